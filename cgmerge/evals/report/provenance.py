"""What made the numbers: files, digests, settings, versions."""

from collections.abc import Mapping
from html import escape

from cgmerge.evals.report.files import Files, files_of
from cgmerge.evals.report.labels import label
from cgmerge.evals.report.sections import Section, Source, column_labels
from cgmerge.evals.report.tables import name, table

_LONGEST_NAME = 300


def provenance(section: Section, files: Mapping[str, Files]) -> str:
    """Lay out where the numbers of a section come from."""
    records = "".join(_record(source) for source in section.sources)
    return f"<h2>Where the numbers come from</h2>{records}{_models(section, files)}{_data(section)}"


def _record(source: Source) -> str:
    record, settings = source.record, source.record.settings
    limit = "all items" if settings.limit is None else f"the first {settings.limit} of each skill"
    versions = ", ".join(f"{key} {value}" for key, value in sorted(record.versions.items()))
    how = (
        f"{settings.metric}, {limit}, batches of {settings.batch_size}, {settings.dtype} on"
        f" {settings.device}{', 4-bit' if settings.load_in_4bit else ''}, seed {settings.seed}"
    )
    facts = {
        "record": (source.name, source.sha256),
        "items": (record.items.file, record.items.sha256) if record.items else ("in memory", ""),
        "base": (record.base.name, record.base.fingerprint),
        "evaluated": (how, ""),
        "versions": (versions or "not recorded", ""),
    }
    rows = [
        f'<tr><th scope="row">{key}</th><td>{name(label(text, 200))}</td>'
        f"<td>{_code(digest)}</td></tr>"
        for key, (text, digest) in facts.items()
    ]
    return table(
        "", ["", "what", "digest"], rows, kind="plain words", title=f"Record {label(source.name)}"
    )


def _models(section: Section, files: Mapping[str, Files]) -> str:
    names = column_labels(section)
    rows = []
    for column in section.columns:
        known = files_of(column, files)
        tuned = known.tuned if known else None
        data = ", ".join(
            f"{label(file)} ({label(digest[:12], 12)}…)"
            for file, digest in (tuned.data if tuned else ())
        )
        full = label(column.target.name, _LONGEST_NAME)
        more = f"<small>{escape(full)}</small>" if full != names[column.name] else ""
        if column.target.note:
            more += f"<small>{escape(label(column.target.note, _LONGEST_NAME))}</small>"
        rows.append(
            f'<tr><th scope="row">{name(names[column.name])}{more}</th>'
            f"<td>{column.target.kind}</td><td>{name(label(column.source.name))}</td>"
            f"<td>{escape(data) or '–'}</td>"
            f"<td>{_code(column.target.digest)}</td></tr>"
        )
    return "<h3>Models</h3>" + table(
        "", ["model", "kind", "record", "tuned on", "digest"], rows,
        kind="plain words", title="Models",
    )  # fmt: skip


def _data(section: Section) -> str:
    rows = []
    for skill in section.sources[0].record.skills:
        counted = {
            "repeated": skill.repeated,
            "contradicting": skill.contradicting,
            "of one id": skill.same_id,
            "cut": skill.cut,
        }
        notes = ", ".join(f"{count} {word}" for word, count in counted.items() if count)
        if skill.measure:
            notes = f"lm-eval: {escape(label(skill.measure))}"
        rows.append(
            f'<tr><th scope="row">{name(label(skill.name))}</th><td class="count">{skill.n:,}</td>'
            f"<td>{name(label(skill.source)) if skill.source else 'in memory'}</td>"
            f"<td>{notes or '–'}</td><td>{_code(skill.sha256)}</td></tr>"
        )
    return "<h3>Data</h3>" + table(
        "", ["skill", "items", "file", "to note", "sha256"], rows,
        kind="plain words", title="Data files",
    )  # fmt: skip


def _code(digest: str) -> str:
    return f"<code>{escape(label(digest, 80))}</code>" if digest else ""
