"""`cgmerge compare`: two targets of evaluation records, item by item."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import UsageError, readable
from cgmerge.shown import score_text

if TYPE_CHECKING:
    from cgmerge.evals.comparing import Compared
    from cgmerge.evals.record import Comparison

SCHEMA = "cgmerge.compare/1"
_MOST_FLIPS = 20
_MOST_CHARS = 60
_DIGITS = 3
"""Two would round away what the change is about: before, after and change should add up."""


def compare(
    before: Annotated[
        str,
        typer.Argument(metavar="RECORD[:TARGET]", help="What the other is compared to"),
    ],
    after: Annotated[
        str, typer.Argument(metavar="RECORD[:TARGET]", help="What is judged; may be of one record")
    ],
    max_drop: Annotated[
        float | None,
        typer.Option(
            "--max-drop", metavar="X", help="Exit with 1 if the score of any skill fell by more"
        ),
    ] = None,
    show: Annotated[
        int, typer.Option("--show", help="Most changed items that -v and --json show", min=0)
    ] = _MOST_FLIPS,
    seed: options.Seed = 0,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Compare two evaluated targets item by item, with intervals and exact tests.

    Records are those of `cgmerge eval -o`; every number is computed from their items.
    A record with one target needs no name after the colon.

    For example:

      cgmerge compare record.json:base record.json:ties

      cgmerge compare old.json new.json --max-drop 0.02

      cgmerge compare old.json:ties new.json:ties -v
    """
    from cgmerge.evals.comparing import compare_sides, dropped, open_side

    if max_drop is not None and not 0.0 <= max_drop < float("inf"):
        raise UsageError(
            f"--max-drop must be 0 or more, found {max_drop:g}", code="max_drop", found=max_drop
        )
    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    compared = compare_sides(open_side(before), open_side(after), seed=seed)
    failed = dropped(compared, max_drop) if max_drop is not None else []
    _show(compared, output, show)
    for one in failed:
        output.line(
            "dropped",
            f"{readable(one.skill or '')}: {score_text(one.difference, 4, plus=True)},"
            f" more than {max_drop:g} is lost",
        )
    output.result(SCHEMA, _fields(compared, max_drop, failed, show), short=_short(compared))
    if failed:
        raise typer.Exit(1)


def _show(compared: "Compared", output: Output, most: int) -> None:
    for side, label in ((compared.before, "before"), (compared.after, "after")):
        target = side.target
        output.line(
            label,
            readable(f"{target.name}  {target.kind}  sha256 {target.digest[:12]}  of {side.path}"),
        )
    for warning in compared.warnings:
        output.warn(readable(warning))
    rows = [_row(compared, one) for one in compared.skills]
    if len(rows) > 1:
        rows.append(_row(compared, compared.overall))
    output.table(
        ["skill", "n", "before", "after", "change", "95 % interval", "won", "lost", "p"], rows
    )
    output.text("")
    output.text(_how_to_read(compared))
    if output.verbose:
        for flip in compared.flips[:most]:
            word = "won" if flip.gained else "lost"
            output.text(
                f"{word:<5} {readable(flip.skill)} {flip.id}: expected {_cut(flip.expected)},"
                f" before {_cut(flip.before)}, after {_cut(flip.after)}"
            )
        if len(compared.flips) > most:
            output.text(f"… and {len(compared.flips) - most} more (--show)")


def _row(compared: "Compared", one: "Comparison") -> list[str]:
    before, after = compared.scores[one.skill]
    low, high = (score_text(end, _DIGITS, plus=True) for end in (one.low, one.high))
    return [
        readable(one.skill).replace("\n", " ") if one.skill is not None else "mean",
        str(one.n),
        score_text(before, _DIGITS),
        score_text(after, _DIGITS),
        score_text(one.difference, _DIGITS, plus=True),
        f"[{low}, {high}]",
        str(one.wins),
        str(one.losses),
        f"{one.p_holm:.3f}" if one.p_holm >= 0.001 else "<0.001",
    ]


def _how_to_read(compared: "Compared") -> str:
    from cgmerge.evals.metrics import METRICS

    info = METRICS[compared.metric]
    won = "that only the second has right" if info.binary else "on which the second is better"
    text = (
        f"how to read: {info.what}; change, + is better, with its paired bootstrap interval;"
        f" won: items {won};\np: exact {info.test} test of won against lost"
    )
    if len(compared.skills) > 1:
        text += ", Holm-corrected over skills; the mean weighs every skill the same"
    return text


def _cut(text: str) -> str:
    shown = readable(text, _MOST_CHARS).replace("\n", "\\n")
    return shown or "nothing"


def _fields(
    compared: "Compared", max_drop: float | None, failed: "list[Comparison]", most: int
) -> dict[str, Any]:
    def numbers(one: "Comparison") -> dict[str, Any]:
        before, after = compared.scores[one.skill]
        shown = {key: value for key, value in asdict(one).items() if key not in _NAMES}
        return {**shown, "before": before, "after": after}

    return {
        "before": _side(compared, "before"),
        "after": _side(compared, "after"),
        "metric": compared.metric,
        "overall": numbers(compared.overall),
        "skills": [numbers(one) for one in compared.skills],
        "flips": [asdict(flip) for flip in compared.flips[:most]],
        "flipped": len(compared.flips),
        "max_drop": max_drop,
        "dropped": [one.skill for one in failed],
        "passed": not failed,
        "warnings": list(compared.warnings),
    }


_NAMES = {"target", "against"}


def _side(compared: "Compared", which: str) -> dict[str, Any]:
    side = getattr(compared, which)
    return {"record": str(side.path), **asdict(side.target), "base": asdict(side.record.base)}


def _short(compared: "Compared") -> str:
    change = score_text(compared.overall.difference, 4, plus=True)
    return f"{change} p={compared.overall.p_holm:.4g}"
