"""Two charts as inline SVG: groups of skills against each other, and scores over scales."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from cgmerge.evals.report.files import Tuned
from cgmerge.evals.report.labels import label
from cgmerge.evals.summary import GroupScore
from cgmerge.shown import score_text

_WIDTH, _HEIGHT = 360, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 348, 12, 284
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 5", "1 4")
_REACH = (13, 22, 31)
_TURNS = tuple(math.radians(angle) for angle in (315, 45, 225, 135, 0, 180, 270, 90))


@dataclass(frozen=True, slots=True)
class Dot:
    """A model in a scatter: `number` stands beside it, `kind` gives its colour."""

    number: int
    name: str
    kind: str
    x: GroupScore
    y: GroupScore


def scatter(dots: Sequence[Dot], x_title: str, y_title: str) -> str:
    """Draw shares of one group of skills against those of another, with their intervals.

    Args:
        dots: Shares from 0 to 1; they are numbered as in the table beside the chart.
        x_title: Of the horizontal axis, as it comes.
        y_title: Of the vertical one.

    Returns:
        An `svg` element that needs the page's style.
    """
    said = "; ".join(
        f"{dot.name} {score_text(dot.x.score)}, {score_text(dot.y.score)}" for dot in dots
    )
    parts = [_open(f"{label(y_title)} against {label(x_title)}: {said}")]
    parts += _axes((0.0, 1.0), _fifths(), x_title, y_title)
    parts.append(_segment("diag", (_x(0.0), _y(0.0)), (_x(1.0), _y(1.0))))
    for dot in dots:
        x, y = _x(dot.x.score), _y(dot.y.score)
        parts.append(_segment("whisk", (_x(dot.x.low), y), (_x(dot.x.high), y)))
        parts.append(_segment("whisk", (x, _y(dot.y.low)), (x, _y(dot.y.high))))
    parts += [
        f'<circle class="dot {escape(dot.kind)}" cx="{_x(dot.x.score):.1f}"'
        f' cy="{_y(dot.y.score):.1f}" r="5.5"/>'
        for dot in dots
    ]
    parts += _numbers(dots)
    return "".join([*parts, "</svg>"])


def _numbers(dots: Sequence[Dot]) -> list[str]:
    """Put each number beside its dot where it covers no dot and no other number."""
    taken = [(_x(dot.x.score), _y(dot.y.score)) for dot in dots]
    found = []
    for dot in dots:
        x, y = _x(dot.x.score), _y(dot.y.score)
        places = [
            (x + reach * math.cos(turn), y + reach * math.sin(turn))
            for reach in _REACH
            for turn in _TURNS
        ]
        inside = [
            place
            for place in places
            if _LEFT + 6 <= place[0] <= _RIGHT - 4 and _TOP + 4 <= place[1] <= _BOTTOM - 6
        ]
        free = [p for p in inside if all(math.dist(p, other) > 11 for other in taken)]
        place = (free or inside or places)[0]
        taken.append(place)
        found.append(
            f'<text class="num" x="{place[0]:.1f}" y="{place[1] + 4:.1f}"'
            f' text-anchor="middle">{dot.number}</text>'
        )
    return found


def curves(tuned: Tuned, y_title: str) -> str:
    """Draw scores over scales, one line for each setting of the other parameters.

    Args:
        tuned: With at least one curve; more than six are not told apart and are left out.
        y_title: What the scores are.

    Returns:
        An `svg` element; the chosen scale is marked.
    """
    shown = tuned.curves[: len(_DASHES)]
    scales = [point.scale for one in shown for point in one.points]
    low, high = min(0.0, *scales), max(scales)
    high = high if high - low > 1e-6 else low + 1.0
    height = _HEIGHT + 18 * len(shown) if len(shown) > 1 else _HEIGHT
    best = max((p for one in shown for p in one.points), key=lambda p: p.score)
    parts = [
        _open(
            f"{y_title} over the scale, {len(scales)} trials; best {score_text(best.score)} at"
            f" {best.scale:g}",
            height,
        )
    ]
    parts += _axes((low, high), _ticks(low, high), "scale λ", y_title)
    if tuned.chosen is not None and low <= tuned.chosen <= high:
        x = _x(tuned.chosen, low, high)
        parts.append(_segment("diag", (x, _y(0.0)), (x, _y(1.0))))
        anchor = "end" if x > (_LEFT + _RIGHT) / 2 else "start"
        shift = -6 if anchor == "end" else 6
        parts.append(
            f'<text x="{x + shift:.1f}" y="{_BOTTOM - 8}" text-anchor="{anchor}">chosen'
            f" {tuned.chosen:g}</text>"
        )
    for place, one in enumerate(shown):
        spots = [(_x(p.scale, low, high), _y(min(max(p.score, 0.0), 1.0))) for p in one.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        dash = f' stroke-dasharray="{_DASHES[place]}"' if _DASHES[place] else ""
        parts.append(f'<polyline class="line s{place}"{dash} points="{path}"/>')
        parts += [f'<circle class="f{place}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in spots]
        if len(shown) > 1:
            y = _HEIGHT + 18 * place + 4
            parts.append(
                f'<line class="line s{place}"{dash} x1="{_LEFT}" x2="{_LEFT + 28}"'
                f' y1="{y}" y2="{y}"/><text x="{_LEFT + 36}" y="{y + 4}">'
                f"{escape(label(one.name or 'scale only', 46))}</text>"
            )
    return "".join([*parts, "</svg>"])


def _open(said: str, height: int = _HEIGHT) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(said)}">'


def _axes(
    ends: tuple[float, float], ticks: Sequence[float], x_title: str, y_title: str
) -> list[str]:
    """Draw a grid with its numbers; the vertical axis is a share."""
    parts = []
    for value in ticks:
        x = _x(value, *ends)
        parts.append(_segment("grid", (x, _TOP), (x, _BOTTOM)))
        parts.append(f'<text x="{x:.1f}" y="{_BOTTOM + 17}" text-anchor="middle">{value:g}</text>')
    for value in _fifths():
        y = _y(value)
        parts.append(_segment("grid", (_LEFT, y), (_RIGHT, y)))
        parts.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (_LEFT + _RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{_BOTTOM + 36}" text-anchor="middle">'
        f"{escape(label(x_title, 46))}</text>"
    )
    middle = (_TOP + _BOTTOM) / 2
    parts.append(
        f'<text x="12" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 12'
        f' {middle:.0f})">{escape(label(y_title, 42))}</text>'
    )
    return parts


def _segment(kind: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    return (
        f'<line class="{kind}" x1="{start[0]:.1f}" y1="{start[1]:.1f}"'
        f' x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>'
    )


def _x(value: float, low: float = 0.0, high: float = 1.0) -> float:
    return _LEFT + (value - low) / (high - low) * (_RIGHT - _LEFT)


def _y(share: float) -> float:
    return _BOTTOM - share * (_BOTTOM - _TOP)


def _fifths() -> list[float]:
    return [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]


def _ticks(low: float, high: float) -> list[float]:
    """Return four to eight round numbers between two others."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, 10) for place in range(first, last + 1)]
