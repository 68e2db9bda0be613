"""What the numbers say, in plain sentences; nothing that a test does not back is called a fact."""

from collections.abc import Mapping, Sequence

from cgmerge.evals.record import Comparison
from cgmerge.evals.report.labels import label, labels, p_value
from cgmerge.evals.report.sections import Key, Section, column_labels, significant
from cgmerge.shown import score_text

_MOST_NAMES = 6


def say(section: Section) -> list[str]:
    """Return sentences on what was measured, what is best, what equals it and what was lost."""
    names = column_labels(section)
    if len(section.models) == 1:
        return [_measured(section), f"{_best(section, names)} There is nothing to compare it with."]
    found = [_measured(section), _best(section, names), _rivals(section, names)]
    found += _against_base(section, names)
    found += _against_experts(section, names)
    if len(section.models) > 2:
        found.append(
            "The best was picked on these very items, so that its score is a little flattering."
        )
    return found


def _measured(section: Section) -> str:
    results = section.columns[0].results.values()
    n, count = sum(one.n for one in results), len(section.skills)
    models = len(section.models)
    return (
        f"{models} model{'s were' if models > 1 else ' was'} scored on {n:,} items of {count}"
        f" skill{'s' if count > 1 else ''}; a score is the {section.info.what}."
    )


def _best(section: Section, names: dict[str, str]) -> str:
    top = section.top
    equal = [one for one in section.models if one.mean.score == top.mean.score]
    mean = top.mean
    interval = f"{score_text(mean.score)} (95 % interval {score_text(mean.low)} to"
    score = f"{interval} {score_text(mean.high)})"
    weighs = ", every skill weighing the same" if len(section.skills) > 1 else ""
    if len(section.models) == 1:
        return f"{names[top.name]} reaches a mean of {score}{weighs}."
    if len(equal) > 1:
        return (
            f"{_listed([names[one.name] for one in equal])} share the best mean, {score}{weighs}."
        )
    return f"Best overall is {names[top.name]} with a mean of {score}{weighs}."


def _rivals(section: Section, names: dict[str, str]) -> str:
    best = section.top.mean.score
    tied = {one.name for one in section.models if one.mean.score == best}  # said to be the best
    open_ = [
        f"{names[name]} ({p_value(one.p_holm)})"
        for name, one in section.others.items()
        if significant(one) >= 0 and name not in tied
    ]
    test, worse = _test(section), _worse(section)
    if tied >= set(section.others):
        return "These items do not decide which of them is best."
    if not open_:
        return f"Every other model is significantly {worse} ({test})."
    if len(open_) == len(section.others):
        return (
            f"These items do not decide which model is best: {_listed(open_)}"
            f" {_verb(open_)} not significantly {worse} ({test})."
        )
    return f"Not significantly {worse}: {_listed(open_)}; all the others are ({test})."


def _against_base(section: Section, names: dict[str, str]) -> list[str]:
    top = section.top
    if top.target.kind == "base":
        return ["No model has a better mean than the base."]
    if top.base is None:
        return []
    worse, sure_worse, sure_better = _split(section, section.base, top.name)
    text = f"Against its base, {names[top.name]} is significantly better on"
    text += f" {len(sure_better)} of {len(section.skills)} skill{_s(section.skills)}"
    if sure_worse:
        return [f"{text}, and significantly worse on {_changes(section, sure_worse, top.base)}."]
    if worse:
        return [f"{text}; what it lost may be chance: {_changes(section, worse, top.base)}."]
    return [f"{text} and lost nothing on any."]


def _against_experts(section: Section, names: dict[str, str]) -> list[str]:
    top = section.top
    if (top.name, None) not in section.expert:
        return []
    _, sure_worse, _ = _split(section, section.expert, top.name)
    if not sure_worse:
        return ["On no skill is it significantly worse than the best single expert of that skill."]
    shown, worse = labels(section.skills), _worse(section)
    parts = [
        f"{shown[skill]} ({score_text(-one.difference)} {worse} than"
        f" {names[section.experts[skill]]})"
        for skill, one in sure_worse
    ]
    price = "Merging has a price: it is significantly worse than the best single expert on"
    return [f"{price} {_listed(parts)}."]


_Found = list[tuple[str, Comparison]]


def _split(
    section: Section, family: Mapping[Key, Comparison], name: str
) -> tuple[_Found, _Found, _Found]:
    """Return where a column is lower at all, surely lower, and surely higher."""
    cells = [(skill, family[name, skill]) for skill in section.skills]
    return (
        [cell for cell in cells if cell[1].difference < 0],
        [cell for cell in cells if significant(cell[1]) < 0],
        [cell for cell in cells if significant(cell[1]) > 0],
    )


def _changes(section: Section, cells: _Found, base: str) -> str:
    shown = labels(section.skills)
    before, after = section.column(base).results, section.top.results
    return _listed(
        [
            f"{shown[skill]} ({score_text(before[skill].score)} to"
            f" {score_text(after[skill].score)}, {p_value(one.p_holm)})"
            for skill, one in cells
        ]
    )


def _test(section: Section) -> str:
    test = "exact McNemar" if section.info.binary else "exact sign test"
    return f"{test}, Holm-corrected, p < 0.05"


def _worse(section: Section) -> str:
    return "higher" if section.info.lower_is_better else "lower"


def _listed(parts: Sequence[str]) -> str:
    """Join with commas and `and`; a long list says how many more there are."""
    shown = [label(part, 160) for part in parts[:_MOST_NAMES]]
    if len(parts) > _MOST_NAMES:
        shown.append(f"{len(parts) - _MOST_NAMES} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _verb(parts: Sequence[str]) -> str:
    return "is" if len(parts) == 1 else "are"


def _s(parts: Sequence[object]) -> str:
    return "" if len(parts) == 1 else "s"
