"""Scores of several seeds as one table and one chart: what the studies share."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from cgmerge import fs
from cgmerge.evals.report.charts import Dot, scatter
from cgmerge.evals.stats import wilson
from cgmerge.evals.summary import GroupScore

Line = dict[str, Any]
"""One target: its name, and per group of items the score, its interval and that of each seed."""

_STYLE = """svg{font:12px sans-serif;fill:#333} .grid{stroke:#e4e4e4} .diag{stroke:#bbb;
stroke-dasharray:4 3} .whisk{stroke:#999} .num{font-weight:bold} .merge{fill:#888}
.learned{fill:#d1813f} .router{fill:#1b6ca8} .none{fill:#333} .small{fill:#3a8a4f}"""


def table(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[Line]:
    """Pool the seeds: share right with a Wilson interval, and the share of every seed.

    Args:
        runs: For each seed rows with `target`, `group`, `right` and `n`; several rows of one
            target and group are added up.
    """
    names = list(dict.fromkeys(row["target"] for run in runs for row in run))
    groups = list(dict.fromkeys(row["group"] for run in runs for row in run))
    found = []
    for name in names:
        line: Line = {"target": name}
        for group in groups:
            counts = [
                [
                    sum(r[key] for r in run if (r["target"], r["group"]) == (name, group))
                    for key in ("right", "n")
                ]
                for run in runs
            ]
            counts = [count for count in counts if count[1]]
            right, n = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
            if not n:
                continue
            span = wilson(right, n)
            line[group] = {
                "score": right / n, "n": n, "low": span.low, "high": span.high,
                "seeds": [k / of for k, of in counts],
            }  # fmt: skip
        mine = [r for run in runs for r in run if r["target"] == name]
        if any("cpu_seconds" in r for r in mine):
            line["cpu_seconds"] = max(r.get("cpu_seconds", 0.0) for r in mine)
        found.append(line)
    return found


def markdown(lines: Sequence[Line], first: str = "composition") -> str:
    """Return the table as Markdown."""
    groups = groups_of(lines)
    timed = any("cpu_seconds" in line for line in lines)
    head = [first, *groups, *(["CPU s to make"] if timed else [])]
    rows = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for line in lines:
        cells = [
            f"{cell['score']:.2f} [{cell['low']:.2f}, {cell['high']:.2f}]" if cell else "–"
            for cell in (line.get(group) for group in groups)
        ]
        cells += [str(line.get("cpu_seconds") or "")] if timed else []
        rows.append(f"| {line['target']} | {' | '.join(cells)} |")
    return "\n".join(rows)


def groups_of(lines: Sequence[Line]) -> list[str]:
    """Return the groups of items in the order in which they came."""
    keys = (key for line in lines for key in line if key not in ("target", "cpu_seconds"))
    return list(dict.fromkeys(keys))


def plot(
    lines: Sequence[Line],
    path: Path,
    axes: tuple[str, str],
    titles: tuple[str, str],
    kind: Callable[[str], str],
) -> None:
    """Draw one group of items against another, with 95 % intervals and a legend.

    Args:
        lines: From `table`; those without both groups are left out.
        path: The SVG file to write.
        axes: The groups.
        titles: What to call them.
        kind: From a target's name to its class in the style.
    """
    dots, legend = [], []
    shown = [line for line in lines if all(axis in line for axis in axes)]
    for number, line in enumerate(shown, 1):
        name = str(line["target"])
        x, y = (
            GroupScore(c["score"], round(c["score"] * c["n"]), c["n"], c["low"], c["high"])
            for c in (line[axis] for axis in axes)
        )
        dots.append(Dot(number, name, kind(name), x, y))
        at = f'x="392" y="{10 + 15 * number}"'
        legend.append(f'<text {at} class="{kind(name)}">{number}  {escape(name)}</text>')
    height = max(340, 30 + 15 * len(dots))
    chart = scatter(dots, *titles)
    placed = chart.replace("<svg ", '<svg x="0" y="0" width="360" height="330" ', 1)
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="600" height="{height}">'
        f'<style>{_STYLE}</style><rect width="600" height="{height}" fill="white"/>'
        f"{placed}{''.join(legend)}</svg>\n"
    )
    fs.replace_file(path, text.encode())
