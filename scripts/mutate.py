"""Delete every check of the reading modules, one at a time, and see whether some test notices.

A check is a `raise`; without it there is `pass`. Each mutant runs the tests of its module in
a process that is forked from one which has torch and pytest imported, on a copy of the repository.
What is known is kept in `build/mutants.json`, so that a run goes on where the last one stopped;
a module or its tests that changed are looked at anew.

    python scripts/mutate.py --seconds 900          # all modules, for a quarter of an hour
    python scripts/mutate.py tensorfile codec       # these only
"""

import argparse
import ast
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
STATE = ROOT / "build" / "mutants.json"
LONGEST = 120.0
"""Seconds after which a mutant counts as noticed: the tests hang without the check."""

_COMPRESS = ("compress/test_attacks.py", "compress/test_container.py", "compress/test_opened.py")
_EXPERT = ("test_expert.py",)
_ROUTING = ("routing/test_damaged.py", "test_composition.py")

# Module below cgmerge/ to its tests below tests/modules/ (or tests/, with a leading slash).
TESTS: dict[str, tuple[str, ...]] = {
    "strictjson.py": ("/test_strictjson.py",),
    "strictyaml.py": ("/test_strictyaml.py",),
    "tensorfile.py": ("/test_tensorfile.py", *_EXPERT),
    "refs.py": ("/cases/test_u14_paths.py", "/cli/test_compose.py", "/cli/test_hints.py"),
    "modules/adapter_config.py": (*_EXPERT, "/cases/test_u40_hostile.py"),
    "modules/pairs.py": (*_EXPERT, "/cli/test_compose.py"),
    "modules/card.py": (*_EXPERT, "/cases/test_u40_hostile.py", "/faults/test_damage.py"),
    "modules/expert.py": (*_EXPERT, "/cases/test_u04_vocabulary.py"),
    "modules/base.py": ("test_base.py", "/cli/test_compose.py"),
    "modules/vocabulary.py": ("test_vocabulary.py",),
    "modules/recipe.py": ("/cli/test_compose.py", "test_compose.py"),
    "modules/recipefile.py": ("/cli/test_compose.py", "test_compose.py"),
    "modules/mergekit.py": ("test_mergekit.py",),
    "modules/data.py": ("test_data.py", "test_data_parts.py"),
    "modules/formats.py": ("test_data.py", "test_data_parts.py"),
    "modules/compress/container.py": _COMPRESS,
    "modules/compress/index.py": _COMPRESS,
    "modules/compress/manifest.py": _COMPRESS,
    "modules/compress/sections.py": _COMPRESS,
    "modules/compress/dense.py": _COMPRESS,
    "modules/compress/opened.py": _COMPRESS,
    "modules/compress/codec.py": ("compress/test_codec.py", *_COMPRESS),
    "modules/compress/bitplane.py": ("compress/test_codec.py", *_COMPRESS),
    "modules/routing/files.py": _ROUTING,
    "modules/routing/router.py": _ROUTING,
    "modules/library/entry.py": ("library/test_entry.py",),
    "modules/library/folder.py": ("library/test_writing.py", "/cli/test_library.py"),
    "evals/record.py": ("/evals/test_record.py",),
}


class Mutant(NamedTuple):
    """One check that is left out."""

    module: str
    line: int
    text: str
    source: str

    @property
    def key(self) -> str:
        """Name it by its own text and place among equal ones, whatever stands above it."""
        return f"{self.module}:{self.text}"


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Yield one mutant for each `raise` with a value; raising again what was caught is no check."""
    lines = source.splitlines(keepends=True)
    seen: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Raise) or node.exc is None or node.end_lineno is None:
            continue
        indent = " " * node.col_offset
        gap = "\n" * (node.end_lineno - node.lineno)
        changed = [*lines[: node.lineno - 1], f"{indent}pass\n{gap}", *lines[node.end_lineno :]]
        text = " ".join(ast.unparse(node).split())[:150]
        seen[text] = seen.get(text, 0) + 1
        yield Mutant(module, node.lineno, f"{text} #{seen[text]}", "".join(changed))


def tests_of(module: str) -> list[str]:
    """Return the test files of a module, from the repository's root."""
    return [
        f"tests{name}" if name.startswith("/") else f"tests/modules/{name}"
        for name in TESTS[module]
    ]


def digest_of(module: str) -> str:
    """Hash a module and its tests: what is known of other content is no longer true."""
    parts = [ROOT / "cgmerge" / module, *(ROOT / name for name in tests_of(module))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in parts)).hexdigest()[:16]


def is_noticed(mutant: Mutant | None, place: Path, tests: Sequence[str]) -> bool:
    """Run tests on the copy in a process of its own; whether some fail."""
    child = os.fork()
    if child == 0:
        os._exit(_run(place, tests))
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) != 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert mutant is not None, "the tests take too long without any change"
    return True


def _run(place: Path, tests: Sequence[str]) -> int:
    import pytest

    os.setsid()
    os.chdir(place)
    os.environ["PYTHONPATH"] = str(place)
    sys.path.insert(0, str(place))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    # The same examples each time; what is imported already may be some plugin's.
    words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*words, *tests]))


def copy_repository(place: Path) -> None:
    """Copy what tests need."""
    for name in ("cgmerge", "tests", "scripts", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"):
        shutil.copy(ROOT / name, place / name)


def load_state() -> dict[str, dict[str, Any]]:
    """Return what is known of each module: the digest it holds for, and the mutants."""
    if not STATE.is_file():
        return {}
    known: dict[str, dict[str, Any]] = json.loads(STATE.read_text(encoding="utf-8"))
    return {
        module: found
        for module, found in known.items()
        if module in TESTS and found["digest"] == digest_of(module)
    }


def save_state(state: dict[str, dict[str, Any]]) -> None:
    STATE.parent.mkdir(exist_ok=True)
    waiting = STATE.with_suffix(".new")
    waiting.write_text(json.dumps(state, indent=1), encoding="utf-8")
    waiting.replace(STATE)


def work(modules: Sequence[str], place: Path, end: float) -> dict[str, dict[str, Any]]:
    """Look at mutants until the time is over; returns all that is known."""
    state = load_state()
    for module in modules:
        path = place / "cgmerge" / module
        source = path.read_text(encoding="utf-8")
        found = state.setdefault(module, {"digest": digest_of(module), "mutants": {}})
        waiting = [m for m in mutants(module, source) if m.key not in found["mutants"]]
        if waiting and time.monotonic() < end and is_noticed(None, place, tests_of(module)):
            raise SystemExit(f"the tests of {module} fail without any change")
        for mutant in waiting:
            if time.monotonic() >= end:
                break
            path.write_text(mutant.source, encoding="utf-8")
            try:
                noticed = is_noticed(mutant, place, tests_of(module))
            finally:
                path.write_text(source, encoding="utf-8")
            found["mutants"][mutant.key] = noticed
            print(f"{'noticed ' if noticed else 'SURVIVED'} {module}:{mutant.line} {mutant.text}")
            save_state(state)
    return state


def report(modules: Sequence[str], state: dict[str, dict[str, Any]]) -> None:
    noticed = looked = there = 0
    for module in modules:
        source = (ROOT / "cgmerge" / module).read_text(encoding="utf-8")
        known = state.get(module, {}).get("mutants", {})
        every = list(mutants(module, source))
        there += len(every)
        looked += sum(mutant.key in known for mutant in every)
        noticed += sum(known.get(mutant.key, False) for mutant in every)
    share = f"{noticed / looked:.1%}" if looked else "none"
    print(f"{noticed} of {looked} deleted checks were noticed ({share}); {there} there are")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("modules", nargs="*", help="parts of their names  [default: all]")
    parser.add_argument("--seconds", type=float, default=900.0, help="no mutant starts later")
    options = parser.parse_args(arguments)
    words = options.modules or [""]
    chosen = [module for module in TESTS if any(word in module for word in words)]
    end = time.monotonic() + options.seconds
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    import pytest  # noqa: F401  (once, for all who are forked)
    import safetensors.torch  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        state = work(chosen, Path(folder), end)
    report(chosen, state)
    return 0


if __name__ == "__main__":
    sys.exit(main())
