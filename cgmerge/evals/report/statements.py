"""The tables of what was kept and lost, of composition and of scores over a number of each row."""

from collections.abc import Sequence
from dataclasses import dataclass

from cgmerge.evals.analysis import HAD, Estimate
from cgmerge.evals.columns import TOKENS
from cgmerge.evals.composed import BINS, Gap
from cgmerge.evals.report.labels import label, labels
from cgmerge.evals.report.sections import Section, column_labels
from cgmerge.evals.report.tables import signed
from cgmerge.evals.statements import Analysed, Statement, analyse


@dataclass(frozen=True, slots=True)
class Plain:
    """A table of text: what HTML and Markdown both make of it is the same.

    Attributes:
        title: Above it.
        note: How to read it.
        heads: Of the columns.
        rows: Cells; a cell is a value and what is small below it.
    """

    title: str
    note: str
    heads: tuple[str, ...]
    rows: tuple[tuple[tuple[str, str], ...], ...]


def statements_of(section: Section) -> list[Statement]:
    """Analyse the columns of a section; its first group holds the skills of experts."""
    targets = {one.name: Analysed(one.items, one.target.kind, one.base) for one in section.columns}
    settings = section.sources[0].record.settings
    trained = section.groups[0].skills if section.groups else None
    by = [
        name for name in settings.by if all(name in s.record.settings.by for s in section.sources)
    ]
    return analyse(targets, section.metric, by=by, trained=trained, seed=settings.seed)


def plain_tables(section: Section, found: Sequence[Statement]) -> list[Plain]:
    """Lay out what there is to say; tables that would be empty are left out."""
    names = column_labels(section)
    tables = [_effects(section, found, names), _gaps(found, names), _links(found, names)]
    tables += [_curve(section, found, names, column) for column in found[0].curves]
    return [one for one in tables if one is not None and one.rows]


_EFFECTS = {
    "recovered": ("gain kept", False),
    "normalised": ("of the expert's score", False),
    "interference": ("lost to merging", True),
    "forgetting": ("forgotten", True),
    "transfer": ("carried over", True),
}
_MEANING = {
    "recovered": "gain kept: (model − base) / (expert − base) on skills of experts, where the"
    " expert is surely better",
    "normalised": "of the expert's score: model / expert on these skills",
    "interference": "lost to merging: expert − model on these skills",
    "forgetting": f"forgotten: base − model on other skills that the base answers to {HAD:.0%} or"
    " more",
    "transfer": "carried over: model − base on the skills that nobody had",
}


def _effects(section: Section, found: Sequence[Statement], names: dict[str, str]) -> Plain | None:
    cells = {
        (one.target, key): getattr(one.effects, key, None) for one in found for key in _EFFECTS
    }
    shown = [key for key in _EFFECTS if any(cells[one.target, key] for one in found)]
    sure = any(one.calibration for one in found)
    if not shown:
        return None
    heads = [
        "model",
        *(_EFFECTS[key][0] for key in shown),
        *(["calibration error"] if sure else []),
    ]
    rows = []
    for one in found:
        row: list[tuple[str, str]] = [(names[one.target], section.column(one.target).target.kind)]
        row += [_estimate(cells[one.target, key], plus=_EFFECTS[key][1]) for key in shown]
        if sure:
            error = one.calibration
            row.append(("–", "") if error is None else (signed(error.ece), ""))
        rows.append(tuple(row))
    notes = [_MEANING[key] for key in shown]
    if sure:
        about = next(one.calibration.about for one in found if one.calibration)
        confidence = "of the picked choice" if about == "choices" else "of the whole right answer"
        notes.append(
            f"calibration error: over {BINS} bins of the probability {confidence}, how far it is"
            " from the share right"
        )
    note = f"Means over skills, 95 % bootstrap interval below. {'; '.join(notes)}."
    return Plain("Kept, lost and carried over", note, tuple(heads), tuple(rows))


def _estimate(one: Estimate | None, *, plus: bool) -> tuple[str, str]:
    if one is None:
        return "–", ""
    interval = (
        "no interval"
        if one.low is None or one.high is None
        else f"{signed(one.low, plus=plus)} to {signed(one.high, plus=plus)}"
    )
    skills = f"{one.skills} skill{'' if one.skills == 1 else 's'}"
    more = f", {one.left_out} left out" if one.left_out else ""
    return signed(one.value, plus=plus), f"{interval}; {skills}{more}"


def _gaps(found: Sequence[Statement], names: dict[str, str]) -> Plain:
    skills = list(dict.fromkeys(gap.skill for one in found for gap in one.gaps))
    shown = labels(skill for skill in skills if skill is not None)
    heads = ("model", *("all" if skill is None else shown[skill] for skill in skills))
    rows = []
    for one in found:
        by_skill = {gap.skill: gap for gap in one.gaps}
        if by_skill:
            rows.append(((names[one.target], ""), *(_gap(by_skill[skill]) for skill in skills)))
    note = (
        "Share of wholes that are wrong although every part is right; below, the 95 % Wilson"
        " interval and on how many of the wholes it rests."
    )
    return Plain("Compositionality gap", note, heads, tuple(rows))


def _gap(gap: Gap) -> tuple[str, str]:
    if gap.gap is None or gap.low is None or gap.high is None:
        return "–", f"0 of {gap.wholes}"
    return signed(gap.gap), f"{signed(gap.low)} to {signed(gap.high)}; {gap.n} of {gap.wholes}"


def _links(found: Sequence[Statement], names: dict[str, str]) -> Plain:
    rows = [
        (
            (names[one.target], ""),
            (label(link.skill), " + ".join(label(part) for part in link.parts)),
            (signed(link.score), ""),
            (signed(link.weak), ""),
            (signed(link.strong), ""),
            (link.link, ""),
        )
        for one in found
        for link in one.links
    ]
    heads = ("model", "skill", "score", "weakest part", "strongest part", "it is")
    note = "Skills made of others, beside the weakest and the strongest of their parts."
    return Plain("Weakest links", note, heads, tuple(rows))


def _curve(
    section: Section, found: Sequence[Statement], names: dict[str, str], column: str
) -> Plain:
    rows = []
    for place, first in enumerate(found[0].curves[column]):
        span = (
            f"{first.first:g}"
            if first.first == first.last
            else f"{first.first:g} to {first.last:g}"
        )
        points = [one.curves[column][place] for one in found]
        cells = [(signed(p.score), f"{signed(p.low)} to {signed(p.high)}") for p in points]
        rows.append(((span, f"n = {first.n:,}"), *cells))
    what = "tokens of the answer, end included" if column == TOKENS else label(column)
    return Plain(
        f"Scores by {what}",
        f"{section.info.title}, items of all skills pooled, 95 % interval below.",
        (label(column), *(names[one.target] for one in found)),
        tuple(rows),
    )
