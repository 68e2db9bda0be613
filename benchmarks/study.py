"""Cross-task and compositional evaluation, from training to the report, by `cgmerge run`.

    python benchmarks/study.py tiny --out cgmerge-study [--seeds 5] [--workers 2]
    python benchmarks/study.py real --from cgmerge-real --public PCFG/data --out cgmerge-study

tiny    two pipelines for each seed, on the embedded base: skill chains (experts of four string
        edits; pairs of two are unseen) and the grid (an expert for each skill on an alphabet of
        its own; a skill on another's alphabet is unseen)
real    one pipeline on SmolLM2-135M-Instruct: the three list skills that `make real` left, and two
        more skills of published data: SCAN, and PCFG SET, whose {dev,test}.{src,tgt}.gz are in
        the folder --public

Pipelines stay beside their results, to be read and run again by hand. Scales are chosen on
validation rows; tables are about test rows. Ends with benchmarks/results/study_NAME.json.
"""

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from pooled import Line, markdown, plot, table

from cgmerge import fs
from cgmerge.evals import demo
from cgmerge.evals.tasks import chains, wordlists
from cgmerge.evals.tasks.parts import Parts
from cgmerge.evals.tasks.suites import Wanted, find_suite, make_parts

RESULTS = Path(__file__).parent / "results"
SKILLS = tuple(chains.NEW)
BUDGET, REAL_BUDGET, EXAMPLES, RATIO = 8, 5, 20, 16
GRID_STEPS = 80
Groups = Mapping[str, Sequence[str]]
"""From a column of the table to the skills that it adds up."""

TUNED: tuple[dict[str, Any], ...] = (
    {"name": "sum", "method": "task-arithmetic"},
    {"name": "ties", "method": "ties", "set": {"density": 0.2}},
    {"name": "dare-ties", "method": "dare-ties"},
    {"name": "pcb", "method": "pcb"},
    {"name": "emr", "method": "emr"},
    {"name": "tsv", "method": "tsv"},
    {"name": "iso-c", "method": "iso-c"},
    {"name": "core+ties", "method": "core+ties"},
)
SMALL: tuple[dict[str, Any], ...] = (
    {"name": "sum of compressed", "method": "task-arithmetic", "experts": "cge-*"},
    {"name": "ties of compressed", "method": "ties", "set": {"density": 0.2}, "experts": "cge-*"},
)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write rows without the name of the skill; returns the file's name."""
    kept = [{key: row[key] for key in ("prompt", "completion")} for row in rows]
    fs.replace_file(path, "".join(json.dumps(row) + "\n" for row in kept).encode())
    return path.name


def compositions(
    experts: Sequence[str], tune: Sequence[str], budget: int = BUDGET
) -> list[dict[str, Any]]:
    """Return the merges of a study: as they come, tuned, and of compressed experts."""
    made: list[dict[str, Any]] = [{"name": "average", "method": "linear", "experts": list(experts)}]
    for entry in (*TUNED, *SMALL):
        name = str(entry["name"]).replace(" ", "-")
        some = entry.get("experts") or list(experts)
        made.append({**entry, "name": name, "experts": some, "tune": list(tune), "budget": budget})
    return made


def routers(experts: Sequence[str], examples: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the compositions that decide for each token or prompt."""
    few = {"experts": list(experts), "examples": dict(examples)}
    return [
        {"name": "arrow", "method": "arrow", "experts": list(experts)},
        {"name": "retrieval", "method": "retrieval", **few},
        {"name": "gate", "method": "gate", **few},
    ]


def chains_pipeline(folder: Path, seed: int) -> tuple[Path, Groups]:
    """Write data and pipeline of the skill chains."""
    demo.write_data(folder, seed)
    train = {skill: f"{skill}.train.jsonl" for skill in SKILLS}
    few = {}
    for skill in SKILLS:
        rows = make_parts(find_suite("chains"), Wanted(skill, seed=seed, count=300)).validation
        few[skill] = write_rows(folder / f"{skill}.few.jsonl", rows[:EXAMPLES])
    others = {"with-base": "with a base skill", "unseen-pairs": "unseen pairs"}
    others |= {"base-single": "base skills", "base-pairs": "base skills"}
    groups: dict[str, list[str]] = {"new skills": list(SKILLS)}
    for name, group in others.items():
        groups.setdefault(group, []).append(name)
    measured = [*SKILLS, *others]
    content = {
        "base": "tiny",
        "out": "out",
        "train": settings(seed, demo.STEPS, train),
        "compress": [{"mode": "ternary", "target-ratio": RATIO, "experts": list(SKILLS)}],
        "compose": [
            *compositions(SKILLS, [f"{name}.validation.jsonl" for name in measured]),
            *routers(SKILLS, few),
        ],
        "eval": {"data": {name: f"{name}.test.jsonl" for name in measured}},
    }
    return write_pipeline(folder, content), groups


def grid_pipeline(folder: Path, seed: int) -> tuple[Path, Groups]:
    """Write data and pipeline of the grid."""
    suite = find_suite("grid")
    train, tune, few = {}, [], {}
    held: list[Any] = []
    for skill in SKILLS:
        parts = make_parts(suite, Wanted(skill, seed=seed))
        train[skill] = write_rows(folder / f"{skill}.train.jsonl", parts.train)
        tune.append(write_rows(folder / f"{skill}.validation.jsonl", parts.validation))
        few[skill] = write_rows(folder / f"{skill}.few.jsonl", parts.validation[:EXAMPLES])
        held += parts.test
    unseen = make_parts(suite, Wanted("unseen", seed=seed)).test
    write_rows(folder / "known.test.jsonl", held)
    write_rows(folder / "unseen.test.jsonl", unseen)
    base = make_parts(find_suite("chains"), Wanted("pairs", seed=seed)).train
    kept = [row for row in base if not set(row["skill"].split()) & set(SKILLS)]
    write_rows(folder / "base.test.jsonl", kept[:200])
    content = {
        "base": "tiny",
        "out": "out",
        "train": settings(seed, GRID_STEPS, train),
        "compress": [{"mode": "ternary", "target-ratio": RATIO, "experts": list(SKILLS)}],
        "compose": [*compositions(SKILLS, tune), *routers(SKILLS, few)],
        "eval": {"data": {name: f"{name}.test.jsonl" for name in ("known", "unseen", "base")}},
    }
    groups = {"known cells": ["known"], "unseen cells": ["unseen"], "base skills": ["base"]}
    return write_pipeline(folder, content), groups


def settings(seed: int, steps: int, train: Mapping[str, str]) -> dict[str, Any]:
    """Return the training part: every skill alone, and all of them together for as many rows."""
    together = {"data": list(train.values()), "steps": steps * len(train)}
    return {
        "steps": steps, "rank": demo.RANK, "alpha": 2 * demo.RANK, "batch-size": demo.BATCH,
        "lr": demo.LEARNING_RATE, "seed": seed,
        "skills": {**train, "joint": together},
    }  # fmt: skip


class _Plain(yaml.SafeDumper):
    """Writes repeated lists out: a pipeline's file has no aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def write_pipeline(folder: Path, content: Mapping[str, Any]) -> Path:
    path = folder / "pipeline.yml"
    text = yaml.dump(dict(content), Dumper=_Plain, sort_keys=False, allow_unicode=True)
    fs.replace_file(path, text.encode())
    return path


def run(pipeline: Path, threads: int) -> list[dict[str, Any]]:
    """Run a pipeline, or what is left of it, in a process of its own; returns its rows."""
    words = [sys.executable, "-m", "cgmerge", "run", str(pipeline), "--json"]
    told = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=told)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stderr[-4000:]}")
    results = json.loads((pipeline.parent / "out" / "results.json").read_text())
    found: list[dict[str, Any]] = results["results"]
    return found


def grouped(rows: Sequence[Mapping[str, Any]], groups: Groups) -> list[dict[str, Any]]:
    """Name the column of every row, and count what was right."""
    column = {skill: name for name, skills in groups.items() for skill in skills}
    return [
        {"target": row["target"], "group": column[row["skill"]], "n": row["n"],
         "right": round(row["score"] * row["n"])}
        for row in rows if row["skill"] in column
    ]  # fmt: skip


def kind_of(name: str) -> str:
    """Return what a target is, for the colour of its dot."""
    if name.startswith("cge-") or "compressed" in name:
        return "small"
    if name in ("base", "joint", *SKILLS):
        return "none"
    return "router" if name in ("arrow", "retrieval", "gate") else "merge"


def tiny(out: Path, seeds: int, workers: int) -> dict[str, list[Line]]:
    """Run both pipelines for all seeds; returns the pooled tables."""
    studies = {"chains": chains_pipeline, "grid": grid_pipeline}
    tasks = [(name, seed) for seed in range(seeds) for name in studies]

    def one(task: tuple[str, int]) -> list[dict[str, Any]]:
        name, seed = task
        started = time.monotonic()
        pipeline, groups = studies[name](out / f"{name}-{seed}", seed)
        rows = grouped(run(pipeline, max(1, (os.cpu_count() or 2) // workers)), groups)
        print(f"{name}, seed {seed}: {time.monotonic() - started:.0f} s", flush=True)
        return rows

    with ThreadPoolExecutor(workers) as pool:
        found = dict(zip(tasks, pool.map(one, tasks), strict=True))
    return {name: table([found[name, seed] for seed in range(seeds)]) for name in studies}


def real_pipeline(folder: Path, source: Path, public: Path) -> tuple[Path, Groups]:
    """Write data and pipeline of the real model: three list skills, SCAN, PCFG SET."""
    from real_model import BATCH, LR, RANK, REPLAY, SEED, STEPS

    listed = wordlists.DEFAULT_SKILLS
    parts = {"scan": short_scan(), "pcfg": short_pcfg(public)}
    train = {}
    for skill, rows in parts.items():
        rng, count = random.Random(f"study {skill}"), STEPS * BATCH
        replayed: list[Any] = wordlists.expert_rows(listed[0], rng, round(count * REPLAY), replay=1)
        shown = rng.choices(rows.train, k=count - len(replayed)) + replayed
        rng.shuffle(shown)
        train[skill] = write_rows(folder / f"{skill}.train.jsonl", shown)
        write_rows(folder / f"{skill}.validation.jsonl", rng.sample(list(rows.validation), 12))
        write_rows(folder / f"{skill}.test.jsonl", rng.sample(list(rows.test), 30))
    here = dict.fromkeys((*listed, "pairs", "other"), source / "data") | dict.fromkeys(
        parts, folder
    )
    experts = (*listed, *parts)
    few = {skill: str(here[skill].absolute() / f"{skill}.validation.jsonl") for skill in experts}
    tune = [str(where.absolute() / f"{name}.validation.jsonl") for name, where in here.items()]
    test = {name: str(where.absolute() / f"{name}.test.jsonl") for name, where in here.items()}
    content = {
        "base": str((source / "warm-base").absolute()),
        "out": "out",
        "experts": {skill: str((source / "experts" / skill).absolute()) for skill in listed},
        "train": {"steps": STEPS, "rank": RANK, "batch-size": BATCH, "lr": LR, "seed": SEED,
                  "skills": train},
        "compress": [{"mode": "ternary", "target-ratio": RATIO}],
        "compose": [*compositions(experts, tune, REAL_BUDGET), *routers(experts, few)[:2]],
        "eval": {"data": test},
    }  # fmt: skip
    groups = {
        "list skills": listed, "scan": ["scan"], "pcfg": ["pcfg"], "unseen pairs": ["pairs"],
        "other edits": ["other"],
    }  # fmt: skip
    return write_pipeline(folder, content), groups


def short_scan() -> Parts:
    """Return SCAN's simple split, commands of at most four actions."""
    return short(make_parts(find_suite("scan"), Wanted("simple")), 4)


def short_pcfg(public: Path) -> Parts:
    """Return PCFG SET: rows made here to learn from, the published ones to be measured on."""
    made = make_parts(find_suite("pcfg"), Wanted("iid"))
    published = {}
    for part in ("dev", "test"):
        lines = [
            gzip.decompress((public / f"{part}.{side}.gz").read_bytes()).decode().splitlines()
            for side in ("src", "tgt")
        ]
        published[part] = [
            {"prompt": f"{question} =", "completion": f" {answer}"}
            for question, answer in zip(*lines, strict=True)
        ]
    held = {row["prompt"] for rows in published.values() for row in rows}
    train = [row for row in made.train if row["prompt"] not in held]
    return short(Parts(train, published["dev"], published["test"]), 6)


def short(parts: Parts, words: int) -> Parts:
    """Keep rows with short answers: the length of a row is the price of a step."""
    train, validation, test = (
        [row for row in rows if len(row["completion"].split()) <= words]
        for _, rows in parts.items()
    )
    return Parts(train, validation, test, parts.notes)


def real(folder: Path, source: Path, public: Path) -> dict[str, list[Line]]:
    """Run the pipeline of the real model."""
    pipeline, groups = real_pipeline(folder, source, public)
    return {"real": table([grouped(run(pipeline, os.cpu_count() or 2), groups)])}


AXES = {
    "chains": (("new skills", "unseen pairs"), ("new skills", "unseen pairs")),
    "grid": (("known cells", "unseen cells"), ("cells with an expert", "unseen cells")),
    "real": (("list skills", "unseen pairs"), ("list skills", "unseen pairs")),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("study", choices=("tiny", "real"))
    parser.add_argument("--from", dest="source", type=Path, default=Path("cgmerge-real"))
    parser.add_argument("--public", type=Path, help="folder of PCFG SET's published files")
    parser.add_argument("--out", type=Path, default=Path("cgmerge-study"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    started = time.monotonic()
    folder = options.out / options.study
    if options.study == "tiny":
        tables = tiny(folder, options.seeds, options.workers)
    else:
        if not options.public:
            parser.error("real needs --public DIR with the published files of PCFG SET")
        tables = real(folder, options.source, options.public)
    seconds = round(time.monotonic() - started)
    for name, lines in tables.items():
        print(f"\n{name}\n{markdown(lines)}")
        plot(lines, RESULTS / f"study_{name}.svg", *AXES[name], kind_of)
    seeds = options.seeds if options.study == "tiny" else 1
    record = {"seeds": seeds, "seconds": seconds, "tables": tables}
    path = RESULTS / f"study_{options.study}.json"
    fs.replace_file(path, (json.dumps(record, indent=1) + "\n").encode())
    print(f"\n{seconds} s; wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
