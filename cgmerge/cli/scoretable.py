"""Scores as a table that says how sure they are, and a line that says how to read it."""

from collections.abc import Sequence

from cgmerge.evals.metrics import METRICS
from cgmerge.evals.record import Comparison, Mean, Record, Result
from cgmerge.shown import score_text

MOST_COLUMNS = 6
"""With more skills than this they become the rows."""

_Cells = list[list[str]]


def score_table(record: Record) -> tuple[list[str], _Cells]:
    """Lay out targets against skills, with intervals, means and the paired comparison.

    Args:
        record: Of an evaluation.

    Returns:
        Column titles and rows of cells; the best of each skill carries a `*`.
    """
    names = [target.name for target in record.targets]
    columns = [_column(record, skill.name) for skill in record.skills]
    titles = [skill.name for skill in record.skills]
    if len(titles) > 1:
        columns.append(_marked(record, record.means))
        titles.append("mean")
    if record.comparisons:
        columns.append(_against(record, names))
        titles.append(f"vs {record.settings.compare_to}")
    if len(record.skills) > MOST_COLUMNS:
        rows = [[title, *cells] for title, cells in zip(titles, columns, strict=True)]
        return ["skill", *names], rows
    rows = [[name, *cells] for name, *cells in zip(names, *columns, strict=True)]
    return ["target", *titles], rows


def how_to_read(record: Record) -> str:
    """Say in two lines what the numbers are and on how many items they rest."""
    sizes = sorted({skill.n for skill in record.skills})
    n = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    info = METRICS[record.settings.metric]
    text = f"how to read: {info.what} [95 % interval], n = {n} items per skill"
    if len(record.targets) > 1:
        text += "; * best of its skill"
    if len(record.skills) > 1:
        text += "; the mean weighs every skill the same"
    if record.comparisons:
        text += (
            f"\nvs {record.settings.compare_to}: difference on the same items, + is better, and"
            f" its exact {info.test} p, Holm-corrected over targets"
        )
    notes = [f"\n{one.name}: {one.note}" for one in record.targets if one.note]
    notes += [f"\n{one.name}: {one.measure}" for one in record.skills if one.measure]
    return text + "".join(notes)


def _column(record: Record, skill: str) -> list[str]:
    return _marked(record, [result for result in record.results if result.skill == skill])


def _marked(record: Record, scores: Sequence[Result | Mean]) -> list[str]:
    """Write scores, and mark the best model unless all are the same."""
    picked = {one.name for one in record.targets if one.kind == "baseline"}
    models = [one for one in scores if one.target not in picked]
    best = max((one.score for one in models), key=METRICS[scores[0].metric].rank)
    differ = any(one.score != best for one in models)
    return [
        f"{score_text(one.score)}{'*' if differ and one in models and one.score == best else ' '}"
        f"[{score_text(one.low)}, {score_text(one.high)}]"
        for one in scores
    ]


def _against(record: Record, names: Sequence[str]) -> list[str]:
    overall = {one.target: one for one in record.comparisons if one.skill is None}
    return [_difference(overall[name]) if name in overall else "" for name in names]


def _difference(one: Comparison) -> str:
    p = f"p={one.p_holm:.3f}" if one.p_holm >= 0.001 else "p<0.001"
    return f"{score_text(one.difference, plus=True)} {p}"
