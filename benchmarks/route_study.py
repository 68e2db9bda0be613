"""Cross-task and mixed inputs: merging, learned coefficients and routing side by side.

    python benchmarks/route_study.py tiny --out cgmerge-routes [--seeds 3]
    python benchmarks/route_study.py demo --from cgmerge-methods
    python benchmarks/route_study.py real --from cgmerge-real

tiny    four skills on the embedded base, one word for all of them and a domain of letters each:
        inputs of one domain, and inputs that mix two (see evals/tasks/domains.py)
demo    the demo's experts, whose word names the skill: single skills, and pairs in one prompt
real    what `make real` left: list skills on SmolLM2-135M-Instruct

Everything is what the command line does. Methods that learn get 5 and 20 examples of each skill,
all of single skills; scales are chosen on validation rows of single skills. Test rows are never
looked at before. Ends with benchmarks/results/route_NAME.json and a table.
"""

import argparse
import contextlib
import io
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pooled import groups_of, markdown, plot, table

from cgmerge import fs
from cgmerge.cli import app
from cgmerge.evals.tasks import domains

RESULTS = Path(__file__).parent / "results"
FEW = (5, 20)
STEPS, BATCH, LR = 150, 32, 1e-3
SINGLE, MIXED, VALIDATION = 20, 200, 20


@dataclass(frozen=True)
class Setting:
    """Experts and data of one seed.

    Attributes:
        base: Reference of the base.
        experts: Folders by skill.
        train: Rows that examples are taken from, by skill.
        validation: Rows of single skills, by skill.
        test: Rows by group.
    """

    base: str
    experts: Mapping[str, Path]
    train: Mapping[str, Path]
    validation: Mapping[str, Path]
    test: Mapping[str, Path]


def call(*words: object) -> dict[str, Any]:
    """Run one command; returns its JSON object."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.run([*map(str, words), "--json"])
    if code:
        raise SystemExit(f"cgmerge {' '.join(map(str, words))}\n{err.getvalue()}")
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as JSON lines, without the name of the skill."""
    kept = [{key: row[key] for key in ("prompt", "completion")} for row in rows]
    text = "".join(json.dumps(row) + "\n" for row in kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    fs.replace_file(path, text.encode())
    return path


def tiny(folder: Path, seed: int) -> Setting:
    """Make domains and their experts on the embedded base."""
    rng = random.Random(f"domains {seed}")
    found = domains.make_domains(rng)
    data = folder / "data"
    train, validation, experts, single = {}, {}, {}, []
    for domain in found:
        rows = domains.single_rows(domain, rng, STEPS * BATCH, "train", unique=False)
        train[domain.name] = write(data / f"{domain.name}.train.jsonl", rows)
        held = domains.single_rows(domain, rng, VALIDATION, "validation")
        validation[domain.name] = write(data / f"{domain.name}.validation.jsonl", held)
        single += domains.single_rows(domain, rng, SINGLE, "test")
        experts[domain.name] = folder / "experts" / domain.name
        if not experts[domain.name].exists():
            call(
                "train", "--base", "tiny", "--data", train[domain.name], "--skill", domain.name,
                "-o", experts[domain.name], "--rank", 8, "--steps", STEPS, "--batch-size", BATCH,
                "--lr", LR, "--seed", seed,
            )  # fmt: skip
    test = {
        "single": write(data / "single.test.jsonl", single),
        "mixed": write(data / "mixed.test.jsonl", domains.mixed_rows(found, rng, MIXED, "test")),
    }
    return Setting("tiny", experts, train, validation, test)


def left_by(folder: Path, base: str, groups: Mapping[str, Sequence[str]]) -> Setting:
    """Take experts and data that another benchmark left."""
    places = (folder / "experts").iterdir()
    names = sorted(path.name for path in places if path.is_dir() and path.name != "warm")
    data = folder / "data"
    test = {}
    for group, files in groups.items():
        rows = []
        for name in files or names:
            text = (data / f"{name}.test.jsonl").read_text()
            rows += [json.loads(line) for line in text.splitlines()]
        test[group] = write(data / f"route-{group}.test.jsonl", rows)
    return Setting(
        base,
        {name: folder / "experts" / name for name in names},
        {name: data / f"{name}.train.jsonl" for name in names},
        {name: data / f"{name}.validation.jsonl" for name in names},
        test,
    )


def examples(setting: Setting, folder: Path, count: int) -> list[str]:
    """Write the first rows of every skill; returns `NAME=FILE` words."""
    words = []
    for name, path in setting.train.items():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        distinct = list({row["prompt"]: row for row in rows if _is_own(row, name)}.values())
        few = write(folder / "few" / f"{name}.{count}.jsonl", distinct[:count])
        words.append(f"{name}={few}")
    return words


def _is_own(row: Mapping[str, Any], name: str) -> bool:
    """Training files of the other benchmarks also hold rows of other skills; a word says so."""
    word = str(row["prompt"]).partition(":")[0].strip().lower()
    return word in (name, domains.WORD)


def compositions(setting: Setting, folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Make everything that is compared; returns folder and what it took, by name."""
    experts = [str(path) for path in setting.experts.values()]
    base = ("--base", setting.base)
    tune = ("--tune", *(f"{n}={p}" for n, p in setting.validation.items()), "--budget", 10)
    wanted: dict[str, tuple[object, ...]] = {
        "average": ("-m", "linear"),
        "task arithmetic, tuned": ("-m", "task-arithmetic", *base, *tune),
        "ties, tuned": ("-m", "ties", *base, *tune),
        "arrow, top 2": ("-m", "arrow", "--top-k", 2),
        "spectral, top 2": ("-m", "spectral", "--top-k", 2, "--set", "normalise=fro"),
        "task named": ("-m", "task"),
    }
    for count in FEW:
        shown = ("--examples", *examples(setting, folder, count))
        learners: dict[str, tuple[object, ...]] = {
            "lorahub": ("-m", "lorahub"),
            "atlas": ("-m", "atlas"),
            "retrieval": ("-m", "retrieval"),
            "phatgoose": ("-m", "phatgoose"),
            "lora-flow": ("-m", "lora-flow"),
            "gate": ("-m", "gate"),
            "gate, all experts": ("-m", "gate", "--top-k", "all"),
        }
        for name, words in learners.items():
            wanted[f"{name} ({count})"] = (*words, *base, *shown)
    made = {}
    for name, words in wanted.items():
        out = folder / "made" / "".join(c if c.isalnum() else "-" for c in name)
        started = time.process_time()
        if not out.exists():
            call("compose", *experts, *words, "-o", out)
        made[name] = out, {"cpu_seconds": round(time.process_time() - started, 1)}
        print(f"  {name}: {made[name][1]['cpu_seconds']} s", flush=True)
    return made


def measure(
    setting: Setting, made: Mapping[str, tuple[Path, dict[str, Any]]], folder: Path
) -> list[dict[str, Any]]:
    """Score everything on the test rows."""
    targets = {f"expert {name}": path for name, path in setting.experts.items()}
    targets |= {name: path for name, (path, _) in made.items() if name != "task named"}
    data = [f"{group}={path}" for group, path in setting.test.items()]
    words = [f"{name.replace('=', '-')}={path}" for name, path in targets.items()]
    found = call("eval", *words, "--base", setting.base, "--data", *data, "--expect-same",
                 "-o", folder / "record.json", "--overwrite")  # fmt: skip
    return [
        {
            "target": result["target"],
            "group": result["skill"],
            "right": round(result["score"] * result["n"]),
            "n": result["n"],
            **made.get(result["target"], (None, {}))[1],
        }
        for result in found["results"]
    ]


_KINDS = {
    "none": ("base", "expert"),
    "merge": ("average", "task arithmetic", "ties"),
    "learned": ("lorahub", "atlas"),
}


def kind_of(name: str) -> str:
    """Return what a composition is, for the colour of its dot."""
    return next((k for k, words in _KINDS.items() if name.startswith(words)), "router")


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("study", choices=("tiny", "demo", "real"))
    parser.add_argument("--out", type=Path, default=Path("cgmerge-routes"))
    parser.add_argument("--from", dest="source", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    runs = []
    for seed in range(options.seeds if options.study != "real" else 1):
        folder = options.out / options.study / f"seed-{seed}"
        print(f"{options.study}, seed {seed}", flush=True)
        if options.study == "tiny":
            setting = tiny(folder, seed)
        elif options.study == "demo":
            groups = {"single": (), "pairs": ("unseen-pairs",)}
            setting = left_by(options.source / f"seed-{seed}", "tiny", groups)
        else:
            warm = str(options.source / "warm-base")  # what its experts were trained on
            setting = left_by(options.source, warm, {"single": (), "pairs": ("pairs",)})
        runs.append(measure(setting, compositions(setting, folder), folder))
    lines = table(runs)
    place = RESULTS / f"route_{options.study}.json"
    record = {"study": options.study, "seeds": len(runs), "results": lines}
    fs.replace_file(place, (json.dumps(record, indent=2) + "\n").encode())
    axes = (groups_of(lines)[0], groups_of(lines)[1])
    titles = (f"{axes[0]} inputs, share right", f"{axes[1]} inputs, share right")
    plot(lines, place.with_suffix(".svg"), axes, titles, kind_of)
    print(markdown(lines))
    print(f"wrote {place}")


if __name__ == "__main__":
    main()
