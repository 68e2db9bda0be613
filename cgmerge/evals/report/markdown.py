"""The tables of a report as Markdown, with the same numbers."""

import re
from collections.abc import Mapping, Sequence

from cgmerge.evals.record import Comparison, Mean, Result
from cgmerge.evals.report.labels import label, labels, p_value
from cgmerge.evals.report.page import Report
from cgmerge.evals.report.sections import (
    Key,
    Section,
    best_expert,
    column_labels,
    significant,
)
from cgmerge.evals.report.statements import Plain
from cgmerge.evals.report.tables import signed

_MARKS = {1: " ▲", 0: "", -1: " ▼"}


def plain(text: str) -> str:
    """Escape everything that Markdown or HTML would take for more than text.

    Example:
        >>> plain("a|b <i> *c*")
        'a\\\\|b &lt;i&gt; \\\\*c\\\\*'
    """
    safe = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]()#!|~$@:])", r"\\\1", safe)


def render_markdown(report: Report) -> str:
    """Write title, sentences and tables."""
    parts = [f"# {plain(label(report.title, 200))}"]
    for place, section in enumerate(report.sections):
        if len(report.sections) > 1:
            parts.append(f"## Part {place + 1}")
        parts.append(" ".join(plain(sentence) for sentence in report.text(section)))
        parts += [f"> {plain(label(one, 400))}" for one in report.warnings(section)]
        parts.append(_scores(section))
        if section.groups:
            parts.append(_groups(section))
        better = " (+ is lower)" if section.info.lower_is_better else ""
        how = (
            f"difference{better} \\[95 % interval\\], exact {section.info.test} p,"
            " Holm-corrected; ▲ ▼ p &lt; 0.05"
        )
        if section.base:
            parts.append(f"Against the base: {how}.")
            parts.append(_differences(section, section.base))
        if section.expert:
            parts.append(f"Against the best single expert of each skill: {how}.")
            parts.append(_differences(section, section.expert))
        for one in report.tables(section):
            parts.append(f"{plain(one.title)}. {plain(one.note)}")
            parts.append(_table([plain(head) for head in one.heads], _plain_rows(one)))
        sources = [(one.name, one.sha256) for one in section.sources]
        parts += [f"Record {plain(label(name))}, sha256 {digest}." for name, digest in sources]
    return "\n\n".join(parts) + "\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *rows))


def _scores(section: Section) -> str:
    names, skills = column_labels(section), labels(section.skills)
    rows = []
    for skill in section.skills:
        results = [column.results[skill] for column in section.columns]
        rows.append([plain(skills[skill]), str(results[0].n), *map(_score, results)])
    if len(section.skills) > 1:
        means = [column.mean for column in section.columns]
        rows.append(["mean", str(means[0].n), *map(_score, means)])
    heads = [plain(names[column.name]) for column in section.columns]
    return _table(["skill", "n", *heads], rows)


def _plain_rows(one: Plain) -> list[list[str]]:
    return [
        [plain(f"{value} ({small})" if small else value) for value, small in row]
        for row in one.rows
    ]


def _score(one: Result | Mean) -> str:
    return f"{signed(one.score)} \\[{signed(one.low)}, {signed(one.high)}\\]"


def _groups(section: Section) -> str:
    names = column_labels(section)
    found = [section.shares(group) for group in section.groups]
    rows = [
        [
            plain(names[column.name]),
            *(
                f"{signed(one[column.name].score)} \\[{signed(one[column.name].low)},"
                f" {signed(one[column.name].high)}\\]"
                for one in found
            ),
        ]
        for column in section.columns
    ]
    titles = labels(group.name for group in section.groups)
    return _table(["model", *(plain(title) for title in titles.values())], rows)


def _differences(section: Section, family: Mapping[Key, Comparison]) -> str:
    names, skills = column_labels(section), labels(section.skills)
    columns = list(dict.fromkeys(column for column, _ in family))
    places: list[str | None] = [*section.skills, *([None] if len(section.skills) > 1 else [])]
    rows = []
    for skill in places:
        head = "mean" if skill is None else plain(skills[skill])
        if family is section.expert:
            head += f" (against {plain(best_expert(section, skill))})"
        rows.append([head, *(_difference(family[column, skill]) for column in columns)])
    return _table(["skill", *(plain(names[column]) for column in columns)], rows)


def _difference(one: Comparison) -> str:
    p = p_value(one.p_holm).replace("<", "&lt;")
    return (
        f"{signed(one.difference, plus=True)}{_MARKS[significant(one)]}"
        f" \\[{signed(one.low, plus=True)}, {signed(one.high, plus=True)}\\], {p}"
    )
