"""Tables of a report page: scores as a heat map, differences with their tests, groups."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from cgmerge.evals.metrics import METRICS, MetricInfo
from cgmerge.evals.record import Comparison, Mean, Result
from cgmerge.evals.report.labels import labels, p_value
from cgmerge.evals.report.sections import (
    Key,
    Section,
    best_expert,
    column_labels,
    significant,
)
from cgmerge.evals.summary import GroupScore
from cgmerge.shown import score_text

_STEPS = 10
_MARKS = {1: "▲", 0: "", -1: "▼"}
_WORDS = {1: "significantly better, ", 0: "", -1: "significantly worse, "}


def name(text: str) -> str:
    """Write a label; its direction of writing does not spill over."""
    return f"<bdi>{escape(text)}</bdi>"


def table(note: str, heads: Sequence[str], rows: Sequence[str], *, kind: str, title: str) -> str:
    """Put a table together from cells that are HTML already.

    A wide one scrolls by itself, with the keyboard too; the note above it stays where it is.

    Args:
        note: How to read it, as text; may be empty.
        heads: Inside of the column headers.
        rows: Whole rows.
        kind: Classes.
        title: Text that names the table for screen readers.
    """
    head = "".join(f'<th scope="col">{one}</th>' for one in heads)
    words = f'<p class="note">{escape(note)}</p>' if note else ""
    body = "\n".join(rows)
    return (
        f'{words}<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}">'
        f'<table class="{kind}"><caption class="out">{escape(title)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def scores_table(section: Section) -> str:
    """Lay out skills against targets: score and interval, coloured by the score."""
    names, skills = column_labels(section), labels(section.skills)
    cells = [one for column in section.columns for one in column.results.values()]
    info = section.info
    ends = (info.low, info.high)
    if not all(map(math.isfinite, ends)):
        ends = min(one.score for one in cells), max(one.score for one in cells)
    heat = _Heat(info, ends, [column in section.models for column in section.columns])
    heads = ["skill", *(_column_head(section, one.name, names) for one in section.columns)]
    rows = []
    for skill in section.skills:
        n = section.columns[0].results[skill].n
        row: list[Result | Mean] = [column.results[skill] for column in section.columns]
        rows.append(_row(f"{name(skills[skill])}<small>n = {n:,}</small>", heat.cells(row)))
    if len(section.skills) > 1:
        means: list[Result | Mean] = [column.mean for column in section.columns]
        rows.append(_row("mean of the skills", heat.cells(means), kind="mean"))
    best = "; the best of a row is underlined" if len(section.columns) > 1 else ""
    stronger = "lower" if info.lower_is_better else "higher"
    note = f"{info.title}, 95 % interval below{best}. Stronger colour means a {stronger} score."
    return table(note, heads, rows, kind="heat", title="Scores by skill and model")


def _column_head(section: Section, column: str, names: Mapping[str, str]) -> str:
    kind = section.column(column).target.kind
    shown = name(names[column])
    return shown if kind == column else f"{shown}<small>{kind}</small>"


def _row(head: str, cells: Sequence[str], *, kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<tr{mark}><th scope="row">{head}</th>{"".join(cells)}</tr>'


@dataclass(frozen=True, slots=True)
class _Heat:
    """Colours scores: ten steps from one end to the other, the last is the best.

    Attributes:
        info: The metric.
        ends: Of the scale.
        compete: Which columns may be the best of their row.
    """

    info: MetricInfo
    ends: tuple[float, float]
    compete: Sequence[bool]

    def cells(self, scores: Sequence[Result | Mean]) -> list[str]:
        rivals = [one.score for one, may in zip(scores, self.compete, strict=True) if may]
        best = max(rivals, key=self.info.rank)
        differ = any(score != best for score in rivals)
        cells = []
        for one, may in zip(scores, self.compete, strict=True):
            step = _step(one.score, self.ends)
            step = _STEPS - 1 - step if self.info.lower_is_better else step
            winner = may and differ and one.score == best
            told = '<span class="out">best of its row</span>' if winner else ""
            cells.append(
                f'<td class="h{step}{" best" if winner else ""}"><b>{signed(one.score)}</b>'
                f"<span>{signed(one.low)} to {signed(one.high)}</span>{told}</td>"
            )
        return cells


def _step(score: float, ends: tuple[float, float]) -> int:
    low, high = ends
    share = (score - low) / (high - low) if high > low else 1.0
    return min(int(share * _STEPS), _STEPS - 1)


def signed(value: float, *, plus: bool = False) -> str:
    """Write a number to two digits with a real minus sign.

    Example:
        >>> signed(-0.125), signed(0.5, plus=True), signed(-0.001)
        ('−0.13', '+0.50', '0.00')
    """
    text = score_text(value)
    sign = "+" if plus and float(text) > 0 else ""
    return sign + text.replace("-", "−")


def differences_table(
    section: Section, family: Mapping[Key, Comparison], *, note: str, title: str
) -> str:
    """Lay out differences with intervals and corrected tests.

    Args:
        section: Whose columns are compared.
        family: Comparisons by column and skill.
        note: How to read it.
        title: For screen readers.
    """
    names, skills = column_labels(section), labels(section.skills)
    columns = list(dict.fromkeys(column for column, _ in family))
    against_experts = family is section.expert
    heads = ["skill", *(_column_head(section, one, names) for one in columns)]
    rows = []
    places: list[str | None] = list(section.skills)
    if len(section.skills) > 1:
        places.append(None)
    for skill in places:
        head = "mean of the skills" if skill is None else name(skills[skill])
        if against_experts:
            head += f"<small>against {name(best_expert(section, skill))}</small>"
        cells = [_difference(family[column, skill]) for column in columns]
        rows.append(_row(head, cells, kind="mean" if skill is None else ""))
    return table(note, heads, rows, kind="heat", title=title)


def _difference(one: Comparison) -> str:
    sure = significant(one)
    kind = {1: "up", 0: "even", -1: "down"}[sure]
    mark = f' <span class="out">{_WORDS[sure]}</span>' if sure else ""
    arrow = f' <i aria-hidden="true">{_MARKS[sure]}</i>' if sure else ""
    return (
        f'<td class="{kind}"><b>{signed(one.difference, plus=True)}{arrow}</b>{mark}'
        f"<span>{signed(one.low, plus=True)} to {signed(one.high, plus=True)}</span>"
        f"<span>{escape(p_value(one.p_holm))}</span></td>"
    )


def _share(one: GroupScore) -> str:
    return (
        f"<td><b>{signed(one.score)}</b><span>{signed(one.low)} to {signed(one.high)}</span></td>"
    )


def groups_table(section: Section) -> str:
    """Lay out the pooled shares of groups of skills; the number is that of the charts."""
    names, skills = column_labels(section), labels(section.skills)
    found = [section.shares(group) for group in section.groups]
    titles = labels(group.name for group in section.groups)
    heads = ["model"]
    for group in section.groups:
        n = sum(section.columns[0].results[skill].n for skill in group.skills)
        heads.append(f"{name(titles[group.name])}<small>n = {n:,}</small>")
    rows = []
    for place, column in enumerate(section.columns):
        cells = [_share(shares[column.name]) for shares in found]
        kind = section.column(column.name).target.kind
        rows.append(_row(f"{place + 1} · {name(names[column.name])}<small>{kind}</small>", cells))
    members = "; ".join(
        f"{titles[group.name]}: {', '.join(skills[skill] for skill in group.skills)}"
        for group in section.groups
    )
    info = section.info if section.info.binary else METRICS["exact_match"]
    title = info.title[0].lower() + info.title[1:]
    return table(
        f"Items of a group pooled, {title}, 95 % interval below. {members}.",
        heads, rows, kind="plain", title="Groups of skills",
    )  # fmt: skip
