"""What lm-evaluation-harness returns, as items of a record."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from numbers import Number
from typing import Any

from cgmerge.errors import Incompatible, UsageError
from cgmerge.evals.record import Item

RIGHT_OR_WRONG = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match")
"""Metrics of the harness that call an item right or wrong."""
LOGLIK = "loglik"
"""Among an item's measures: log-likelihood of the whole expected answer."""
_CLOSE = 1e-9
_Sample = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Measure:
    """Which number of a task is its score.

    Attributes:
        metric: Of the harness.
        filter: Through which answers went first; `none` for as they are.
    """

    metric: str
    filter: str

    def __str__(self) -> str:
        """Write it as the harness does."""
        return f"{self.metric},{self.filter}"


def choose_measure(task: str, found: Mapping[str, Any], wanted: str | None) -> Measure:
    """Choose the score of a task: a number from 0 to 1 for each item, of which more is better.

    Args:
        task: Its name.
        found: What the harness returned.
        wanted: `METRIC` or `METRIC,FILTER`; None for the first that is such a number.

    Raises:
        UsageError: There is none, or not the wanted one.
    """
    samples = found["samples"][task]
    better = found["higher_is_better"].get(task) or {}
    pairs = dict.fromkeys((name, str(one["filter"])) for one in samples for name in one["metrics"])
    usable = [
        Measure(*pair)
        for pair in pairs
        if better.get(pair[0], True) and _is_share(samples, *pair)
        and _is_mean(found["results"][task], samples, Measure(*pair))
    ]  # fmt: skip
    chosen = [one for one in usable if wanted in (None, one.metric, str(one))]
    if chosen:
        return chosen[0]
    there = ", ".join(f"{metric},{name}" for metric, name in pairs)
    about = "no score" if wanted is None else f"no score {wanted!r}"
    raise UsageError(
        f"{task} has {about} that is a number from 0 to 1 for every item, more being better",
        code="measure",
        hint=f"its metrics are {there}"
        + (f"; of these fit {', '.join(map(str, usable))}" if usable else ""),
        expected=[str(one) for one in usable],
        found=wanted,
    )


def _is_share(samples: Sequence[_Sample], metric: str, name: str) -> bool:
    values = [one.get(metric) for one in samples if one["filter"] == name]
    return all(isinstance(value, Number) and 0.0 <= float(value) <= 1.0 for value in values)  # type: ignore[arg-type]


def _is_mean(results: Mapping[str, Any], samples: Sequence[_Sample], one: Measure) -> bool:
    """Whether the harness's own score is the mean over items."""
    values = [float(s[one.metric]) for s in samples if s["filter"] == one.filter]
    theirs = results.get(str(one))
    return isinstance(theirs, Number) and math.isclose(
        float(theirs), sum(values) / len(values), rel_tol=_CLOSE, abs_tol=_CLOSE  # type: ignore[arg-type]
    )  # fmt: skip


def is_right_or_wrong(measures: Sequence[Measure]) -> bool:
    """Whether items are right or wrong in all of some measures."""
    return all(one.metric in RIGHT_OR_WRONG for one in measures)


def items_of(target: str, task: str, samples: Sequence[_Sample], measure: Measure) -> list[Item]:
    """Turn what the harness says of one target on one task into items.

    An item's id is made as that of built-in tasks: of task, prompt and target.

    Args:
        target: Name of the model.
        task: The skill.
        samples: All that the harness logged for the task.
        measure: The score.

    Raises:
        Incompatible: Items that the score was not computed for.
    """
    chosen = [one for one in samples if one["filter"] == measure.filter]
    values: dict[Any, dict[str, float]] = {}
    for one in samples:
        kept = {
            str(Measure(name, str(one["filter"]))): float(one[name])
            for name in one["metrics"]
            if isinstance(one[name], Number)
        }
        values.setdefault(one["doc_id"], {}).update(kept)
    seen: Counter[str] = Counter()
    items = []
    for one in sorted(chosen, key=lambda sample: int(sample["doc_id"])):
        if measure.metric not in one["metrics"]:
            raise Incompatible(
                f"{task}: item {one['doc_id']} has no {measure.metric}", code="measure"
            )
        value = float(one[measure.metric])
        said, loglik = _said(one)
        measures = values[one["doc_id"]]
        if loglik is not None:
            measures[LOGLIK] = loglik
        items.append(
            Item(
                id=_id(task, one, seen),
                skill=task,
                target=target,
                correct=value >= 1.0,
                loglik=None,  # per token, and the harness counts none
                prediction=said,
                expected=_target(one),
                value=value,
                measures=measures,
            )
        )
    return items


def _id(task: str, sample: _Sample, seen: Counter[str]) -> str:
    prompt = str(sample["arguments"][0][0])
    key = "\0".join([task, prompt, _target(sample)])
    again = f"\0{seen[key]}" if seen[key] else ""
    seen[key] += 1
    return sha256((key + again).encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


def _target(sample: _Sample) -> str:
    """Return the expected answer as a text: of a choice its words."""
    target, arguments = sample["target"], sample["arguments"]
    offered = [str(one[1]) for one in arguments if len(one) > 1 and isinstance(one[1], str)]
    if _is_place(target) and len(offered) > 1:
        return offered[int(target)].strip() if int(target) < len(offered) else str(target)
    return str(target)


def _is_place(target: object) -> bool:
    return isinstance(target, int) and not isinstance(target, bool)


def _said(sample: _Sample) -> tuple[str, float | None]:
    """Return what a model answered, and the log-likelihood of the expected answer."""
    answers = sample["filtered_resps"]
    if not all(isinstance(one, list | tuple) and len(one) == 2 for one in answers):
        return str(answers[0]), None
    texts = [str(one[1]).strip() for one in sample["arguments"]]
    logliks = [float(one[0]) for one in answers]
    if len(texts) == 1:  # one continuation: it is what greedy decoding writes, or not
        return (texts[0] if answers[0][1] else ""), logliks[0]
    if "acc_mutual_info" in sample["metrics"]:  # the second half asks without the context
        del texts[len(texts) // 2 :], logliks[len(logliks) // 2 :]
    expected, target = _target(sample), sample["target"]
    place = target if _is_place(target) else texts.index(expected) if expected in texts else -1
    known = 0 <= place < len(logliks)
    best = max(range(len(logliks)), key=logliks.__getitem__)
    return texts[best], logliks[place] if known else None
