"""Throw damaged compressed experts at their reader, with true digests so that it reads them.

Three targets: sections (the decoder alone), files whose parts were changed and sealed again, and
files with changed bytes. Whatever happens, only the package's own errors may come out, in less
than a second; what the decoder accepts must be coded again to the same levels, and a second
reader, written from the format's page, must agree. An input that breaks this is kept.

    python scripts/fuzz_cge.py [--seconds 60] [--executions N] [--seed 0] [--keep FOLDER]
"""

import argparse
import importlib.util
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cgmerge.errors import InputError
from cgmerge.modules.compress.codec import decode, dtype_of, encode
from cgmerge.modules.compress.container import CgeFile, write_cge
from cgmerge.modules.compress.sections import Coded

TESTS = Path(__file__).parent.parent / "tests"
LIMIT = 1.0
BYTES = (0, 1, 2, 3, 5, 7, 16, 20, 63, 64, 65, 127, 128, 129, 254, 255)
NUMBERS = (0, 1, 2, 3, 64, 255, 1 << 16, 1 << 31, (1 << 31) - 1, 1 << 62, -1, True, 1.0, "I8", None)


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


forge, second_reader = load("cge_forge"), load("cge_reader")


class Broken(Exception):
    """A promise that did not hold."""


def samples() -> list[np.ndarray[Any, Any]]:
    """Return small tensors that use every kind of code."""
    generator = np.random.default_rng(0)
    found = []
    for density in (0.0, 0.02, 0.12, 0.22, 0.3, 0.39, 0.5, 0.8, 0.97, 1.0):
        levels = generator.choice([-1, 1], (4, 120)) * (generator.random((4, 120)) < density)
        found.append(levels.astype(np.int32))
    for spread in (0.7, 1.5, 4.0, 40.0, 1e5):
        levels = np.rint(generator.normal(0, spread, (4, 90)))
        found.append(levels.astype(np.int32))
    sparse = generator.choice([-1, 0, 1], (6, 400), p=[0.01, 0.98, 0.01])
    full = generator.choice([-1, 0, 1], (6, 400), p=[0.4, 0.2, 0.4])
    found.append(np.concatenate([sparse, full]).astype(np.int32))
    return found


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Change a few bytes: flips, likely values, cuts, repeats."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        place = draw.randrange(len(out) + 1) if draw.random() < 0.5 else draw.randrange(24)
        place = min(place, max(len(out) - 1, 0))
        action = draw.randrange(6)
        if action == 0 and out:
            out[place] ^= 1 << draw.randrange(8)
        elif action == 1 and out:
            out[place] = draw.choice(BYTES)
        elif action == 2:
            out[place:place] = bytes([draw.choice(BYTES)])
        elif action == 3:
            del out[place : place + draw.choice((1, 1, 2, 8))]
        elif action == 4:
            out[place:place] = out[place : place + draw.choice((1, 2, 8))]
        elif out:
            out[place] = draw.randrange(256)
    return bytes(out)


class Campaign:
    """One run: inputs, what became of them, and what broke.

    Args:
        seed: Of all choices.
        folder: Where files are written while they are tried.
        keep: Where inputs that break something are kept.
    """

    def __init__(self, seed: int, folder: Path, keep: Path) -> None:
        self.draw = random.Random(seed)
        self.path, self.keep = folder / "x.cge", keep
        self.counts: Counter[tuple[str, str]] = Counter()
        self.codes: Counter[str] = Counter()
        self.broken = 0
        self.slowest = 0.0
        self.sections = [(encode(levels), levels) for levels in samples()]
        write_cge(
            self.path,
            [Coded(f"t{number}", levels, np.ones(1, np.float32))
             for number, levels in enumerate(samples())],
            {"d": np.ones(3, np.float32)},
            {"base": {"id": "b"}, "peft": {"r": 4}, "method": {"mode": "ternary"}},
            details={"t0": {"cosine": 0.5}},
        )  # fmt: skip
        self.data = self.path.read_bytes()
        self.parts = forge.Parts.of(self.data)

    def step(self) -> None:
        """Try one input."""
        kind = self.draw.random()
        if kind < 0.8:
            self._try("section", *self._section())
        elif kind < 0.93:
            self._try("sealed", self._sealed(), self._file)
        else:
            self._try("bytes", mutate(self.data, self.draw), self._bytes)

    def _try(self, target: str, data: bytes, work: Callable[[bytes], None]) -> None:
        start = time.process_time()
        try:
            work(data)
            self.counts[target, "accepted"] += 1
        except InputError as error:
            self.codes[error.code] += 1
            self.counts[target, "refused"] += 1
        except Exception:  # noqa: BLE001  (that is what is looked for)
            self._break(target, data, traceback.format_exc())
        used = time.process_time() - start
        self.slowest = max(self.slowest, used)
        if used > LIMIT:
            self._break(target, data, f"took {used:.1f} s")

    def _break(self, target: str, data: bytes, why: str) -> None:
        self.broken += 1
        self.keep.mkdir(parents=True, exist_ok=True)
        path = self.keep / f"{target}-{self.broken}.bin"
        path.write_bytes(data)
        print(f"BROKEN: {path}\n{why}", file=sys.stderr)

    def _section(self) -> tuple[bytes, Callable[[bytes], None]]:
        section, levels = self.draw.choice(self.sections)
        rows, columns = levels.shape
        if self.draw.random() < 0.1:
            others = [(columns, rows), (rows, columns + 1), (1, 1), (1 << 16, 1)]
            rows, columns = self.draw.choice(others)
        dtype = dtype_of(levels)

        def work(data: bytes) -> None:
            found = decode(data, rows, columns, dtype)
            if not np.array_equal(decode(encode(found), rows, columns, dtype), found):
                raise Broken("what was decoded is not coded to the same")
            if found.size < 10_000 and self.draw.random() < 0.1:  # it is slow
                second = second_reader.read_section(data, rows, columns)
                if not np.array_equal(second, found):
                    raise Broken("the second reader disagrees")

        return mutate(section, self.draw), work

    def _sealed(self) -> bytes:
        parts = self.parts.copy()
        table = parts.index["coded"]
        action = self.draw.randrange(6)
        if action == 0:
            column = table[self.draw.choice(list(table))]
            column[self.draw.randrange(len(column))] = self.draw.choice(NUMBERS)
        elif action == 1:
            sections = parts.sections()
            name = self.draw.choice(list(sections))
            sections[name] = mutate(sections[name], self.draw)
            parts.set_sections(sections)
        elif action == 2:
            parts.scales = mutate(parts.scales, self.draw)[: len(parts.scales)].ljust(
                len(parts.scales), b"\0"
            )
            parts.check_sums()
        elif action == 3:
            part = self.draw.choice((parts.manifest, parts.manifest["method"], table, parts.index))
            part[self.draw.choice([*part, "novelty", "must_understand"])] = self.draw.choice(
                (*NUMBERS, [], {}, ["x"], float("nan"), "cgmerge/2")
            )
        elif action == 4:
            text = mutate(forge.compact(parts.index), self.draw)
            return bytes(parts.build(index=forge.zlib.compress(text)))
        else:
            parts.dense["d"] = ("F32", [3], mutate(parts.dense["d"][2], self.draw))
        return bytes(parts.build())

    def _bytes(self, data: bytes) -> None:
        self._file(data)
        if data != self.data:
            raise Broken("a changed file passes")

    def _file(self, data: bytes) -> None:
        self.path.write_bytes(data)
        with CgeFile.open(self.path) as file:
            file.verify()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--executions", type=int, help="stop after so many, whatever the time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(options.seed, Path(folder), options.keep)
        start, done = time.monotonic(), 0
        end = float("inf") if options.executions else start + options.seconds
        while done != options.executions and time.monotonic() < end:
            campaign.step()
            done += 1
        taken = time.monotonic() - start
    print(
        f"{done:,} executions in {taken:.0f} s, {done / taken:,.0f} a second; seed {options.seed}"
    )
    for (target, outcome), count in sorted(campaign.counts.items()):
        print(f"  {target}: {count:,} {outcome}")
    for code, count in campaign.codes.most_common():
        print(f"  {code}: {count:,}")
    print(f"slowest: {1000 * campaign.slowest:.0f} ms of processor; broken: {campaign.broken}")
    return 1 if campaign.broken else 0


if __name__ == "__main__":
    sys.exit(main())
