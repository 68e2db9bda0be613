"""Size against kept gain: what each way of compressing leaves of trained experts.

    python benchmarks/compress_study.py tiny --from cgmerge-methods/seed-0
    python benchmarks/compress_study.py real --from cgmerge-real

Sizes are bytes of files, headers included. Kept gain is the share of what training gained in
log-likelihood of a target token on the expert's own test rows, with paired bootstrap intervals;
every result got one factor on the delta that was chosen on validation rows. `svd` is plain
truncation to fewer directions in 16 bits, which is what PEFT offers. Ends with a JSON file in
benchmarks/results and, beside it, a plot.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from methods_table import Quiet

from cgmerge.errors import Incompatible
from cgmerge.evals import demo
from cgmerge.evals.runner import Settings, evaluate_targets
from cgmerge.evals.suite import SkillSet
from cgmerge.evals.targets import Target
from cgmerge.evals.tasks import wordlists
from cgmerge.merge import LowRank, truncate
from cgmerge.modules.base import open_base
from cgmerge.modules.compress.modes import MODES, Mode, Options, decode, encode
from cgmerge.modules.compress.sections import Coded
from cgmerge.modules.compress.writer import write_cge
from cgmerge.modules.expert import open_expert
from cgmerge.modules.loading import LoadedBase, load_base

RESULTS = Path(__file__).parent / "results"
# Factors on the delta; compeft multiplies both factors by its alpha, for which the paper's grid is.
ALPHAS = (0.5, 1, 2, 3, 4, 5, 6, 8, 10)
FACTORS = {
    "compeft": tuple(alpha**2 for alpha in ALPHAS),
    "svd": (1.0, 1.15, 1.35),
    "": (0.7, 0.85, 1.0, 1.15, 1.35),
}
DRAWS = 2000


@dataclass(frozen=True)
class Study:
    """Experts and the rows they are measured on."""

    loaded: LoadedBase
    experts: dict[str, dict[str, LowRank]]
    validation: dict[str, SkillSet]
    test: dict[str, SkillSet]


@dataclass(frozen=True)
class Smaller:
    """A compressed expert before its factor is chosen."""

    mode: str
    asked: float
    size: int
    deltas: dict[str, LowRank]


def open_tiny(folder: Path) -> Study:
    """Take the experts of a demo, which is run where it was not."""
    if not (folder / "record.json").exists():
        demo.run_demo(folder, seed=0, steps=demo.STEPS, voice=Quiet())
    loaded = load_base(open_base("tiny"), device="cpu", dtype="float32")
    sets = {s: demo.skill_sets(folder / "data", s) for s in ("validation", "test")}
    return _study(loaded, folder / "experts", demo.SKILLS, sets)


def open_real(folder: Path) -> Study:
    """Take the experts that `make real` left."""
    from real_model import skill_sets

    loaded = load_base(open_base(str(folder / "warm-base")))
    skills = wordlists.DEFAULT_SKILLS
    sets = {s: skill_sets(folder / "data", s, skills) for s in ("validation", "test")}
    return _study(loaded, folder / "experts", skills, sets)


def _study(
    loaded: LoadedBase, place: Path, skills: Sequence[str], sets: Mapping[str, list[SkillSet]]
) -> Study:
    experts = {skill: dict(open_expert(str(place / skill)).deltas(loaded.base)) for skill in skills}
    chosen = {
        split: {one.name: one for one in found if one.name in skills}
        for split, found in sets.items()
    }
    return Study(loaded, experts, chosen["validation"], chosen["test"])


def logliks(study: Study, skills: SkillSet, targets: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the mean log-likelihood of a target token for every item, by target."""
    made = [Target.of_deltas(name, deltas, "0" * 64) for name, deltas in targets.items()]
    settings = Settings(keeps_base=True, expects_same=True)
    items = evaluate_targets(study.loaded, made, [skills], settings).items
    names = ("base", *targets)
    return {n: np.array([item.loglik for item in items if item.target == n]) for n in names}


def kept_share(found: np.ndarray, base: np.ndarray, expert: np.ndarray) -> dict[str, float]:
    """Return the kept share of the gain with a paired 95 % bootstrap interval over items."""
    rng = np.random.default_rng(0)
    draws = rng.integers(len(base), size=(DRAWS, len(base)))
    shares = (found - base)[draws].mean(1) / (expert - base)[draws].mean(1)
    low, high = np.quantile(shares, [0.025, 0.975])
    share = float((found - base).mean() / (expert - base).mean())
    return {"share": share, "low": float(low), "high": float(high)}


def file_size(coded: Sequence[Coded], mode: str) -> int:
    """Return the bytes of the file, with a manifest as small as it gets."""
    fields = {"base": {"id": "base"}, "peft": {}, "method": {"mode": mode}}
    with tempfile.TemporaryDirectory() as folder:
        return write_cge(Path(folder) / "x.cge", coded, {}, fields).size


def compressed(
    factors: dict[str, LowRank], ratios: Sequence[float]
) -> Iterator[Callable[[], Smaller]]:
    """Yield what makes each compressed form of an expert."""
    full = 2 * sum(delta.a.numel() + delta.b.numel() for delta in factors.values())
    rank = max(delta.rank for delta in factors.values())
    for mode in MODES:
        for ratio in ratios:

            def make(mode: Mode = mode, ratio: float = ratio) -> Smaller:
                try:
                    found = encode(mode, factors, Options(target=full / ratio))
                except Incompatible:  # nothing is left: the base, for free
                    return Smaller(mode, ratio, round(full / ratio), {})
                return Smaller(mode, ratio, file_size(found.coded, mode), decode(found.coded))

            yield make
    for kept in sorted({max(1, round(rank / ratio)) for ratio in ratios}):

        def cut(kept: int = kept) -> Smaller:
            deltas = {name: truncate(delta, kept).delta for name, delta in factors.items()}
            size = 2 * sum(delta.a.numel() + delta.b.numel() for delta in deltas.values())
            return Smaller("svd", rank / kept, size, deltas)

        yield cut


def times(deltas: dict[str, LowRank], factor: float) -> dict[str, LowRank]:
    return {name: LowRank(delta.a, delta.b * factor) for name, delta in deltas.items()}


def measure(study: Study, ratios: Sequence[float]) -> list[dict[str, Any]]:
    """Compress every expert in every way and score it."""
    rows = []
    for skill, factors in study.experts.items():
        entries = sum(delta.a.numel() + delta.b.numel() for delta in factors.values())
        reference = logliks(study, study.test[skill], {"expert": factors})
        for make in compressed(factors, ratios):
            small = make()
            grid = FACTORS.get(small.mode, FACTORS[""])
            tried = {f"x{f:g}": times(small.deltas, f) for f in grid}
            scores = logliks(study, study.validation[skill], tried)
            factor = max(grid, key=lambda f: scores[f"x{f:g}"].mean())
            final = logliks(study, study.test[skill], {"small": times(small.deltas, factor)})
            row = {
                "skill": skill,
                "mode": small.mode,
                "asked": small.asked,
                "bytes": small.size,
                "ratio_16bit": 2 * entries / small.size,
                "factor": factor,
                **kept_share(final["small"], reference["base"], reference["expert"]),
            }
            rows.append(row)
            print(
                f"{skill:<10} {small.mode:<8} {row['ratio_16bit']:6.1f}x  x{factor:<5g}"
                f" {row['share']:7.1%} [{row['low']:.1%}, {row['high']:.1%}]",
                flush=True,
            )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per mode and size, one column per expert."""
    skills = list(dict.fromkeys(row["skill"] for row in rows))
    lines = [
        f"| mode | ratio to 16 bit | {' | '.join(skills)} |",
        f"|---|---|{'---|' * len(skills)}",
    ]
    for mode, asked in dict.fromkeys((row["mode"], row["asked"]) for row in rows):
        mine = {r["skill"]: r for r in rows if (r["mode"], r["asked"]) == (mode, asked)}
        ratio = np.mean([row["ratio_16bit"] for row in mine.values()])
        cells = [
            f"{r['share']:.0%} [{r['low']:.0%}, {r['high']:.0%}]" if (r := mine.get(s)) else "–"
            for s in skills
        ]
        lines.append(f"| `{mode}` | {ratio:.1f}x | {' | '.join(cells)} |")
    return lines


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw kept gain over ratio, the mean over experts, as an SVG without any library."""
    width, height, left, top = 640, 400, 60, 20
    ratios = [row["ratio_16bit"] for row in rows]
    least, most = np.log2(min(ratios)) - 0.1, np.log2(max(ratios)) + 0.1

    def at(ratio: float, share: float) -> tuple[float, float]:
        x = left + (np.log2(ratio) - least) / (most - least) * (width - left - 130)
        return float(x), float(top + (1.05 - max(share, 0.0)) / 1.05 * (height - top - 50))

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            ' font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = at(2**least, share)[1]
        parts.append(f'<path d="M{left} {y:.1f}H{width - 130}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 40}" y="{y + 4:.1f}">{share:.0%}</text>')
    for ratio in (4, 8, 16, 32, 64):
        if least <= np.log2(ratio) <= most:
            x = at(ratio, 0)[0]
            parts.append(f'<text x="{x - 10:.1f}" y="{height - 30}">{ratio}x</text>')
    parts.append(f'<text x="{left}" y="{height - 8}">smaller than 16 bit</text>')
    colours = {"ternary": "#1b6ca8", "svdq": "#2a9d4a", "compeft": "#d1495b", "svd": "#888888"}
    for number, (mode, colour) in enumerate(colours.items()):
        points = []
        for asked in sorted({row["asked"] for row in rows if row["mode"] == mode}):
            mine = [r for r in rows if (r["mode"], r["asked"]) == (mode, asked)]
            points.append(
                at(
                    float(np.mean([r["ratio_16bit"] for r in mine])),
                    float(np.mean([r["share"] for r in mine])),
                )
            )
        points.sort()
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(
            f'<text x="{width - 110}" y="{40 + 20 * number}" fill="{colour}">{mode}</text>'
        )
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("tiny", "real"))
    parser.add_argument("--from", dest="folder", type=Path, required=True)
    parser.add_argument("--ratios", default="8,12,16,24,32,48")
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "real" and not (arguments.folder / "record.json").exists():
        print(f"{arguments.folder} holds no finished run", file=sys.stderr)
        return 2
    study = (open_tiny if arguments.what == "tiny" else open_real)(arguments.folder)
    rows = measure(study, [float(ratio) for ratio in arguments.ratios.split(",")])
    results = arguments.results or RESULTS / f"compress_{arguments.what}.json"
    results.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    plot(rows, results.with_suffix(".svg"))
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
