"""The long form of what the tests show in short: crashes, full disks, kills at any moment, damage.

    python scripts/trust.py --minutes 60 --docs docs/trust.md

Every writing command is stopped at every disk operation (killed; full disk; broken disk), then
killed at random moments, and every bit of small files of each format is turned. What is counted
goes to a page; a campaign without time for all of it says what it left out.
"""

import argparse
import errno
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("COLUMNS", "100")

import crash_support as crashes  # type: ignore[import-not-found]  # noqa: E402
import torch  # noqa: E402

FAULTS = (
    ("killed", True, 0),
    ("disk full", False, errno.ENOSPC),
    ("disk broken", False, errno.EIO),
)


@dataclass
class Row:
    """What was tried on a command and held."""

    command: str
    operations: int
    counts: dict[str, int]
    random_kills: int = 0
    at_work: int = 0
    problem: str | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("commands", nargs="*", help="of tests/crash_support.py; all by default")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=50, help="random kills of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docs", type=Path, help="page to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * options.minutes
    names = options.commands or list(crashes.COMMANDS)
    with tempfile.TemporaryDirectory(prefix="cgmerge-trust-") as folder:
        bench = crashes.Bench(Path(folder))
        rows = [trust(bench, name, options.kills, random.Random(options.seed), end)
                for name in names]  # fmt: skip
    text = page(rows)
    sys.stdout.write(text)
    if options.docs:
        options.docs.write_text(text)
    return int(any(row.problem for row in rows))


def trust(bench: crashes.Bench, name: str, kills: int, rng: random.Random, end: float) -> Row:
    """Try all on one command; the first problem ends it."""
    row = Row(name, bench.operations(name), {label: 0 for label, _, _ in FAULTS})
    try:
        for label, kill, number in FAULTS:
            for at in range(1, row.operations + 1):
                if time.monotonic() > end:
                    break
                bench.trial(name, at, kill=kill, number=number)
                row.counts[label] += 1
        for moment in moments(rng, bench.seconds[name], kills):
            if time.monotonic() > end:
                break
            row.random_kills += 1
            row.at_work += bench.random_kill(name, moment)
    except AssertionError as problem:
        row.problem = str(problem)
    sys.stderr.write(f"{row}\n")
    return row


def moments(rng: random.Random, seconds: float, count: int) -> Iterator[float]:
    for _ in range(count):
        yield rng.uniform(0.0, 1.05) * seconds


def page(rows: list[Row]) -> str:
    """Write what was counted as Markdown."""
    tried = sum(sum(row.counts.values()) for row in rows)
    kills, at_work = sum(row.random_kills for row in rows), sum(row.at_work for row in rows)
    held = f"{tried:,} stops at disk operations and {kills:,} random kills ({at_work:,} at work): "
    problems = [f"- {row.command}: {row.problem}" for row in rows if row.problem]
    lines = [
        "# Stopped at every place",
        "",
        "Written by `make trust`. Each writing command ran on a small base and two small experts",
        "and was stopped at its k-th disk operation for every k: killed (SIGKILL), told that the",
        "disk is full (ENOSPC), told that it is broken (EIO); then killed at random moments. After",
        "each: inputs and earlier results byte for byte as before, no half-written output, exit 4",
        "with one JSON object where the disk refused; the same command repeated then gave the",
        "bytes of an undisturbed run, and no temporary file was left.",
        "",
        held + ("PROBLEMS" if problems else "all held."),
        *problems,
        "",
        "| command | operations | killed | disk full | disk broken | random kills | at work |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *(
            f"| {row.command} | {row.operations} | "
            + " | ".join(str(row.counts[label]) for label, _, _ in FAULTS)
            + f" | {row.random_kills} | {row.at_work} |"
            for row in rows
        ),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
