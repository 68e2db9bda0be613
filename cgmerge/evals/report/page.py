"""The page: one HTML file that needs nothing else and asks nobody for anything.

Everything that comes from a record passes `escape`. A content security policy forbids scripts and
requests of any kind; the one style sheet is allowed by its digest, so that not even a `style`
attribute that slipped through would count. Same records, same bytes.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from importlib.resources import files as resources

from cgmerge.errors import readable
from cgmerge.evals.report.charts import Dot, curves, scatter
from cgmerge.evals.report.files import Files, files_of, tuned_on_reported
from cgmerge.evals.report.labels import label
from cgmerge.evals.report.provenance import provenance
from cgmerge.evals.report.sections import Section, column_labels
from cgmerge.evals.report.statements import Plain, plain_tables, statements_of
from cgmerge.evals.report.tables import (
    differences_table,
    groups_table,
    name,
    scores_table,
    table,
)
from cgmerge.evals.report.words import say
from cgmerge.evals.statements import Statement

_MOST_CHARTS = 6
_MOST_WARNINGS = 20
_LONGEST_WARNING = 400
_FOOTER = "Written by cgmerge report. The page holds no script and loads nothing."


@dataclass(frozen=True)
class Report:
    """What a page is about.

    Attributes:
        title: Heading, as it comes.
        sections: Records, joined where their items agree.
        files: What is known of targets' files, by the name of the column.
    """

    title: str
    sections: Sequence[Section]
    files: Mapping[str, Files] = field(default_factory=dict)

    def text(self, section: Section) -> list[str]:
        """Return what a section says, in sentences; the second one says what is best."""
        return say(section)

    def tables(self, section: Section) -> list[Plain]:
        """Return what follows from the items beyond scores and differences."""
        return plain_tables(section, self.statements(section))

    def statements(self, section: Section) -> list[Statement]:
        """Return the analyses of the columns of a section."""
        return self._analyses[id(section)]

    @cached_property
    def _analyses(self) -> dict[int, list[Statement]]:
        return {id(one): statements_of(one) for one in self.sections}

    def warnings(self, section: Section) -> list[str]:
        """Return what is doubtful about the numbers of a section."""
        recorded = [word for source in section.sources for word in source.record.warnings]
        found = list(dict.fromkeys([*tuned_on_reported(section, self.files), *recorded]))
        shown = [readable(one, _LONGEST_WARNING) for one in found[:_MOST_WARNINGS]]
        more = len(found) - len(shown)
        return [*shown, f"and {more} more warnings"] if more else shown


def render_page(report: Report) -> bytes:
    """Write the page as UTF-8."""
    css = resources("cgmerge").joinpath("assets", "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    title = label(report.title, 200)
    several = len(report.sections) > 1
    body = [
        _section(report, section, place + 1 if several else None)
        for place, section in enumerate(report.sections)
    ]
    sources = [source.name for section in report.sections for source in section.sources]
    about = f"From {', '.join(label(one) for one in sources)}; every number is computed from items."
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title>",
        f"<style>{css}</style>",
        "</head>",
        "<body>",
        f'<header><h1>{name(title)}</h1>\n<p class="about">{escape(about)}</p></header>',
        "<main>",
        *body,
        "</main>",
        f'<footer><p class="note">{_FOOTER}</p></footer>',
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(parts).encode("utf-8", errors="replace")


def _section(report: Report, section: Section, number: int | None) -> str:
    head = f"<h2>Part {number}</h2>" if number else ""
    sentences = [escape(one) for one in report.text(section)]
    sentences[1] = f"<strong>{sentences[1]}</strong>"  # what is best
    text = f'<p class="said">{" ".join(sentences)}</p>'
    warnings = "".join(f'<p class="warn">{escape(one)}</p>' for one in report.warnings(section))
    parts = [
        head + text + warnings,
        f"<h2>Scores</h2>{scores_table(section)}",
        _groups(section),
        _differences(section),
        _statements(report, section),
        _tuning(report, section),
        _cost(report, section),
        provenance(section, report.files),
    ]
    return f"<section>{''.join(part for part in parts if part)}</section>"


def _groups(section: Section) -> str:
    if not section.groups:
        return ""
    names = column_labels(section)
    first = section.groups[0]
    across = section.shares(first)
    charts = []
    for group in section.groups[1 : _MOST_CHARTS + 1]:
        shares = section.shares(group)
        dots = [
            Dot(place + 1, names[one.name], one.target.kind, across[one.name], shares[one.name])
            for place, one in enumerate(section.columns)
        ]
        charts.append(f"<figure>{scatter(dots, first.name, group.name)}</figure>")
    guessed = (
        " The groups were guessed: the first holds the skills that an expert is named after."
        if first.guessed
        else ""
    )
    note = (
        f'<p class="note">{name(label(first.name))} against the other groups; the numbers are'
        " those of the table, the whiskers 95 % intervals; on the dotted line both are equal."
        f"{guessed}</p>"
    )
    figures = f'{note}<div class="figures">{"".join(charts)}</div>' if charts else ""
    return f"<h2>Groups of skills</h2>{figures}{groups_table(section)}"


def _differences(section: Section) -> str:
    test = f"exact {section.info.test} test, Holm-corrected over the table"
    better = "; + is better (lower)" if section.info.lower_is_better else ""
    marks = (
        f"Paired on the same items{better}, 95 % bootstrap interval, p of the {test}; ▲ ▼ p < 0.05."
    )
    tables = []
    if section.base:
        title = "Gained and lost against the base"
        tables.append((title, differences_table(section, section.base, note=marks, title=title)))
    if section.expert:
        title = "Against the best single expert"
        note = (
            f"The expert that is best on a skill, picked on these items. {marks} What is lost here"
            " is the interference of merging."
        )
        tables.append((title, differences_table(section, section.expert, note=note, title=title)))
    return "".join(f"<h2>{title}</h2>{text}" for title, text in tables)


def _statements(report: Report, section: Section) -> str:
    parts = []
    for one in report.tables(section):
        rows = [
            "<tr>" + "".join(_cell(place, cell) for place, cell in enumerate(row)) + "</tr>"
            for row in one.rows
        ]
        heads = [name(head) for head in one.heads]
        text = table(one.note, heads, rows, kind="plain", title=one.title)
        parts.append(f"<h2>{escape(one.title)}</h2>{text}")
    return "".join(parts)


def _cell(place: int, cell: tuple[str, str]) -> str:
    value, small = cell
    if place == 0:
        more = f"<small>{escape(small)}</small>" if small else ""
        return f'<th scope="row">{name(value)}{more}</th>'
    more = f"<span>{escape(small)}</span>" if small else ""
    return f"<td><b>{escape(value)}</b>{more}</td>"


def _tuning(report: Report, section: Section) -> str:
    names = column_labels(section)
    charts = []
    for column in section.columns:
        known = files_of(column, report.files)
        if known is None or known.tuned is None or not known.tuned.curves:
            continue
        left_out = len(known.tuned.curves) - _MOST_CHARTS
        more = f" {left_out} more settings were tried." if left_out > 0 else ""
        files = ", ".join(label(file) for file, _ in known.tuned.data) or "unnamed data"
        charts.append(
            f"<figure>{curves(known.tuned, 'score on that data')}<figcaption>"
            f"{name(names[column.name])}, chosen on {escape(files)}.{more}</figcaption></figure>"
        )
    if not charts:
        return ""
    return f'<h2>How the scale was chosen</h2><div class="figures">{"".join(charts)}</div>'


def _cost(report: Report, section: Section) -> str:
    names = column_labels(section)
    rows = []
    for column in section.columns:
        files = files_of(column, report.files)
        if files is not None:
            rows.append(
                f'<tr><th scope="row">{name(names[column.name])}</th>'
                f'<td class="count">{files.size:,}</td>'
                f"<td>{escape(label(files.made_by or 'not recorded', 200))}</td></tr>"
            )
    if not rows:
        return ""
    return "<h2>Size</h2>" + table(
        "Bytes of all files of a model on disk.",
        ["model", "bytes", "made by"],
        rows,
        kind="plain words",
        title="Size of the models",
    )
