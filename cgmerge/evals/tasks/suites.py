"""What can be made: every suite by name, with its splits, sizes, source and licence."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from cgmerge.errors import UsageError
from cgmerge.evals.tasks import (
    arithmetic,
    chains,
    chomsky,
    domains,
    grid,
    pcfgsplits,
    published,
    rewrites,
    scan,
    skillmix,
)
from cgmerge.evals.tasks.parts import Parts, Record, carve, shrink
from cgmerge.nearest import nearest


@dataclass(frozen=True)
class Wanted:
    """What somebody asked for.

    Attributes:
        split: One of the suite's.
        seed: Of everything random.
        count: Rows in all; None is the suite's own size.
        share: Of the training rows that become validation, in suites published without.
        folder: Where published files are.
        modulus: Of the arithmetic.
    """

    split: str
    seed: int = 0
    count: int | None = None
    share: float = 0.1
    folder: Path | None = None
    modulus: int = arithmetic.MODULUS

    def rng(self, what: str) -> random.Random:
        """Return the source of one kind of draw, so that no draw shifts another."""
        return random.Random(f"{what} {self.split} {self.seed}")


@dataclass(frozen=True)
class Suite:
    """One family of tasks.

    Attributes:
        name: On the command line.
        summary: What it asks, in one line.
        splits: The first is the default.
        sizes: Rows, in words.
        source: Paper.
        licence: Of the published files; what is generated here is nobody else's.
        reads: Whether it is read from a folder instead of being generated.
        make: Makes the rows.
    """

    name: str
    summary: str
    splits: tuple[str, ...]
    sizes: str
    source: str
    licence: str
    make: Callable[[Wanted], Parts]
    reads: bool = False

    def facts(self) -> dict[str, Any]:
        """Return what `--json` shows."""
        keys = ("name", "summary", "sizes", "source", "licence", "reads")
        return {**{key: getattr(self, key) for key in keys}, "splits": list(self.splits)}


def find_suite(name: str) -> Suite:
    """Return a suite by name.

    Raises:
        UsageError: No such suite; the nearest name is suggested.
    """
    if name in SUITES:
        return SUITES[name]
    near = nearest(name, SUITES)
    raise UsageError(
        f"there is no suite {name!r}; there are {', '.join(SUITES)}",
        code="suite",
        hint=f"did you mean {near[0]}?" if near else "cgmerge tasks lists them",
        found=name,
    )


def make_parts(suite: Suite, wanted: Wanted) -> Parts:
    """Make the rows of a split.

    Raises:
        UsageError: No such split, a folder missing or not wanted, or too many rows.
        NotFound: Published files that are not there.
    """
    if wanted.split not in suite.splits:
        near = nearest(wanted.split, suite.splits)
        raise UsageError(
            f"{suite.name} has no split {wanted.split!r}; it has {', '.join(suite.splits)}",
            code="split",
            hint=f"did you mean {near[0]}?" if near else None,
            found=wanted.split,
        )
    if suite.reads and wanted.folder is None:
        raise UsageError(
            f"{suite.name} is read from its published files, which are not part of this program",
            code="from",
            hint="--from DIR, the folder they are in",
        )
    if wanted.folder is not None and not suite.reads:
        raise UsageError(f"{suite.name} is generated; it reads no folder", code="from")
    if wanted.modulus != arithmetic.MODULUS and suite.name != "arithmetic":
        raise UsageError(f"{suite.name} has no modulus", code="modulus")
    return suite.make(wanted)


def _scan(wanted: Wanted) -> Parts:
    rng = wanted.rng("scan")
    # Rows are written after the choice: most of the time goes into them.
    train, test = ([{"prompt": c} for c in part] for part in scan.split(wanted.split, rng))
    kept, taken = carve(train, wanted.share, wanted.rng("validation"))
    chosen = _shrunk(Parts(kept, taken, test), wanted)
    written = [[scan.example(row["prompt"]) for row in rows] for _, rows in chosen.items()]
    return Parts(written[0], written[1], written[2])


def _pcfg(wanted: Wanted) -> Parts:
    return pcfgsplits.make(wanted.split, wanted.rng("pcfg"), wanted.count or 20_000)


def _arithmetic(wanted: Wanted) -> Parts:
    rng, default = wanted.rng("arithmetic"), min(20_000, wanted.modulus**4 // 4)
    return arithmetic.make(wanted.split, rng, wanted.count or default, wanted.modulus)


def _rewrites(wanted: Wanted) -> Parts:
    return rewrites.make(wanted.split, wanted.rng("rewrites"), wanted.count or 10_000)


def _chomsky(wanted: Wanted) -> Parts:
    return chomsky.make(wanted.split, wanted.rng("chomsky"), wanted.count or 11_000)


def _skillmix(wanted: Wanted) -> Parts:
    return skillmix.make(wanted.split, wanted.rng("skillmix"), wanted.count or 3000)


_MOST_CHAINS = 100_000  # a third of the inputs; drawing different ones gets slow beyond
_WITH_PARTS = "pairs-parts"
_CHAIN_SPLITS = ("pairs", _WITH_PARTS, *chains.NEW)
_DOMAIN_SPLITS = ("mixed", "single")


def _chains(wanted: Wanted) -> Parts:
    """Make rows of one skill with replay, or of all skills with unseen pairs as the test."""
    rng, count = wanted.rng("chains"), wanted.count or 3000
    if count > _MOST_CHAINS:
        raise UsageError(
            f"{count:,} rows are wanted; chains have at most {_MOST_CHAINS:,}", code="n"
        )
    held = max(1, count // 10)
    if wanted.split in ("pairs", _WITH_PARTS):
        group: chains.Group = "new2"
        skills = tuple(chains.NEW)
    else:
        group, skills = "new1", (wanted.split,)
    learned = _split_up(count - 2 * held, len(skills))
    train: list[Record] = [
        dict(r) for s, n in zip(skills, learned, strict=True) for r in chains.expert_rows(s, rng, n)
    ]
    rows = {row["prompt"]: row for row in train}  # replay of two skills may draw the same
    halves: tuple[chains.Split, chains.Split] = ("validation", "test")
    if wanted.split == _WITH_PARTS:
        pairs = chains.tasks(group, skills)
        asked = [skillmix.asked(pairs, rng, held, part, suite="chains") for part in halves]
    else:
        asked = [
            [*map(dict, chains.group_rows(group, rng, held, split=part, skills=skills))]
            for part in halves
        ]
    return Parts(list(rows.values()), asked[0], asked[1])


def _domains(wanted: Wanted) -> Parts:
    """List all rows about one domain; the test asks new lists of one, or lists of two."""
    found = domains.make_domains(wanted.rng("domains"))
    rows: dict[str, list[Record]] = {"train": [], "validation": [], "test": []}
    for domain in found:
        for size in chains.LENGTHS:
            for letters in product(domain.letters, repeat=size):
                rows[chains.split_of(letters)].append(dict(domains.example(found, letters)))
    if wanted.split == "mixed":
        rng = wanted.rng("mixed")
        for part, count in (("validation", 200), ("test", 1000)):
            split: chains.Split = "validation" if part == "validation" else "test"
            rows[part] = [dict(row) for row in domains.mixed_rows(found, rng, count, split)]
    return _shrunk(Parts(rows["train"], rows["validation"], rows["test"]), wanted)


def _grid(wanted: Wanted) -> Parts:
    return _shrunk(grid.make(wanted.split, wanted.seed, wanted.rng("grid")), wanted)


def _split_up(count: int, parts: int) -> list[int]:
    return [count // parts + (place < count % parts) for place in range(parts)]


def _shrunk(parts: Parts, wanted: Wanted) -> Parts:
    return parts if wanted.count is None else shrink(parts, wanted.count, wanted.rng("n"))


def _published(reader: Callable[[Path, str], Parts]) -> Callable[[Wanted], Parts]:
    def make(wanted: Wanted) -> Parts:
        assert wanted.folder is not None
        return _shrunk(reader(wanted.folder, wanted.split), wanted)

    return make


_OWN = "generated here"
SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "scan", "navigation commands as actions: jump twice -> I_JUMP I_JUMP",
            scan.SPLITS, "20,910 commands", "Lake & Baroni 2018; Loula, Baroni & Lake 2018",
            "BSD-3-Clause (published files; rows are generated here)", _scan,
        ),
        Suite(
            "pcfg", "nested string functions: repeat append A1 , B2 -> A1 B2 A1 B2",
            pcfgsplits.SPLITS, "any; 20,000 if not said", "Hupkes et al. 2020",
            "MIT (published files; rows are generated here)", _pcfg,
        ),
        Suite(
            "arithmetic", "z = a x + b y mod p, a task for each (a, b)",
            arithmetic.SPLITS, "any up to p^4; 20,000 if not said", "He et al. 2024", _OWN,
            _arithmetic,
        ),
        Suite(
            "chains", "string edits, alone and chained, that the base tiny can learn",
            _CHAIN_SPLITS, "any; 3,000 if not said", "own, after PCFG SET", _OWN, _chains,
        ),
        Suite(
            "domains", "letters replaced by rules of their domains, which a list may mix",
            _DOMAIN_SPLITS, "1,404 lists of one domain; 200 + 1,000 mixed", "own", _OWN, _domains,
        ),
        Suite(
            "grid", "string edits by alphabets; experts know the diagonal",
            grid.SPLITS, "about 470 in one cell; 422 unseen",
            "own, after Tam et al. 2024", _OWN, _grid,
        ),
        Suite(
            "rewrites", "ordered rules rewrite a string until none fits: Markov algorithms",
            rewrites.SPLITS, "any; 10,000 if not said", "after Zhang, Wang & Charton 2024", _OWN,
            _rewrites,
        ),
        Suite(
            "chomsky", "parity, stacks, copying, sorting: tasks by the automaton they need",
            chomsky.SPLITS, "any; 11,000 if not said", "after Delétang et al. 2023", _OWN, _chomsky,
        ),
        Suite(
            "skillmix", "two or three string edits in one row, their parts asked beside them",
            skillmix.SPLITS, "any; 3,000 if not said",
            "own, after Yu et al. 2023, Zhao et al. 2024", _OWN, _skillmix,
        ),
        Suite(
            "cogs", "English sentences as logical forms",
            ("test", "gen"), "24,155 train, 3,000 dev, 3,000 test, 21,000 gen",
            "Kim & Linzen 2020", "MIT; github.com/najoungkim/COGS, folder data",
            _published(published.read_cogs), reads=True,
        ),
        Suite(
            "slog", "COGS with deeper structures",
            ("test", "gen"), "32,755 train, 4,046 dev, 4,046 test, 17,000 gen",
            "Li et al. 2023", "MIT; github.com/bingzhilee/SLOG",
            _published(published.read_cogs), reads=True,
        ),
        Suite(
            "bbh", "BIG-Bench Hard, evaluation only",
            ("test",), "6,511 in 27 tasks", "Suzgun et al. 2022",
            "MIT; github.com/suzgunmirac/BIG-Bench-Hard, folder bbh",
            _published(published.read_bbh), reads=True,
        ),
        Suite(
            "bigbench", "JSON tasks of BIG-bench, evaluation only",
            ("test",), "what the folder holds", "Srivastava et al. 2022",
            "Apache-2.0; github.com/google/BIG-bench, folder bigbench/benchmark_tasks",
            _published(published.read_bigbench), reads=True,
        ),
    )
}  # fmt: skip
