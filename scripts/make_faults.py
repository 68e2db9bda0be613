"""Write docs/faults.md: what can go wrong, what then happens, and the tests that prove it.

Tests say which faults they prove with `@pytest.mark.fault("F01")`; the marks are read from the
source, so that nothing is imported.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "faults.md"
TESTS = ROOT / "tests"


class Fault(NamedTuple):
    """One line of the table: what happens, what the user gets, the exit code."""

    name: str
    behaviour: str
    exit: str


SECTIONS: dict[str, dict[str, Fault]] = {
    "Hostile or damaged files": {
        "F01": Fault(
            "a file cut short, at any length",
            "refused before anything of it is used, with the size found and the size its header"
            " needs",
            "3",
        ),
        "F02": Fault(
            "a changed bit, burst or sector",
            "found wherever there is a digest: in `.cge` files (the tensor is named), in libraries,"
            " in folders with an `expert.json`; a plain adapter of another tool has none, there"
            " only damage to the header shows",
            "3",
        ),
        "F03": Fault(
            "bytes in front of or behind the file",
            "refused: tensors must cover the file from end to end",
            "3",
        ),
        "F04": Fault(
            "a header that lies about lengths, offsets or shapes",
            "refused before anything is allocated",
            "3 or 4",
        ),
        "F05": Fault(
            "a small file that would unpack into a huge one",
            "refused by limits that are known before the body is read; sizes come from the base or"
            " the bytes there are, never from what the file says",
            "3 or 4",
        ),
        "F06": Fault(
            "a compressed tensor that is not in its one legal form",
            "refused, with the tensor's name",
            "3",
        ),
        "F07": Fault(
            "JSON or YAML made to hurt: keys twice, NaN, endless numbers or nesting, bad Unicode,"
            " aliases, tags",
            "refused in bounded time",
            "2, 3 or 4",
        ),
        "F08": Fault(
            "NaN, infinity or absurd scales",
            "refused wherever they are read, with tensor and count; no option accepts them",
            "3",
        ),
        "F09": Fault(
            "full weights or unknown tensors in an expert",
            "refused, all of them listed; no option accepts them",
            "3",
        ),
        "F10": Fault(
            "an `adapter_config.json` that matches by regex, allocates, repeats layers, rewrites"
            " the base or imports",
            "refused by the name of the field; PEFT never sees a file of a stranger",
            "3 or 4",
        ),
        "F11": Fault(
            "pickles, code, remote names",
            "pickles are never opened: refused where there is nothing else, reported beside sound"
            " weights; names of bases are labels, nothing is imported or fetched by them",
            "3",
        ),
        "F12": Fault(
            "links, pipes, devices, paths that lead out of the folder",
            "not followed, not waited for, refused; a hard link is the file itself and is read",
            "3",
        ),
        "F13": Fault(
            "archives (zip, tar) in place of an expert",
            "never unpacked: refused as what they are",
            "2 or 3",
        ),
        "F14": Fault(
            "an expert unlike honest ones: one direction far above the others, few rows, one"
            " module, the output head alone",
            "`inspect` says so and why; `compose` prints each expert's share of the sum; a note is"
            " no proof, and its absence even less",
            "0",
        ),
        "F15": Fault(
            "an expert changed after it was published",
            "refused where its card, its library or a recipe with digests says what it was; cgmerge"
            " does not sign, digests are what a signature can cover",
            "3",
        ),
    },
    "Mismatch": {
        "F16": Fault(
            "another base of the same shape",
            "refused with both fingerprints; `--force-base` accepts it and is recorded",
            "3",
        ),
        "F17": Fault(
            "other shapes, layers or module names",
            "refused with both sides listed; nothing is applied in part",
            "3",
        ),
        "F18": Fault(
            "another vocabulary",
            "refused: sizes where embeddings differ, the first token with another number where a"
            " tokenizer lies beside the adapter",
            "3",
        ),
        "F19": Fault(
            "experts of different rank, alpha, rsLoRA, targets or float type",
            "merged exactly in ΔW",
            "0",
        ),
        "F20": Fault("experts with heads of their own", "refused, the heads listed", "3"),
        "F21": Fault(
            "the same name or the same content twice",
            "a taken name is refused with both digests, capitals do not tell names apart; equal"
            " content is stored once and counted as often as it is named",
            "2",
        ),
        "F22": Fault(
            "weights, densities and scales out of range",
            "refused with what is allowed; edge values are identities",
            "2",
        ),
        "F23": Fault(
            "empty, zero, constant and one-entry tensors, ties",
            "legal, by fixed rules, without division by zero",
            "0",
        ),
        "F24": Fault(
            "float types that cannot hold the result",
            "what rounding lost is measured, warned of from 1 %, refused from 50 %; overflow is"
            " refused",
            "0 or 3",
        ),
        "F25": Fault(
            "files of a newer version",
            "refused with both versions; what is marked as optional is left alone",
            "3",
        ),
    },
    "Environment": {
        "F26": Fault(
            "a full disk, an I/O error, at whichever write",
            "old results intact, no partial files, path and bytes needed and free in the message",
            "4",
        ),
        "F27": Fault(
            "places that cannot be written, odd names",
            "found before the work begins; every name that the system allows works",
            "2 or 4",
        ),
        "F28": Fault(
            "SIGKILL at any step",
            "the old or the new, whole; the next command works and removes what was left",
            "–",
        ),
        "F29": Fault(
            "Ctrl-C, SIGTERM, a reader that goes away",
            "ends at once, nothing half-written, no traceback",
            "130, 143, 0",
        ),
        "F30": Fault(
            "power loss",
            "as SIGKILL: data are on the disk before the rename that shows them, the rename before"
            " the command says it is done",
            "–",
        ),
        "F31": Fault(
            "several writers and readers of one place",
            "one wins, the other is told; readers see the old or the new, whole; no lock is needed",
            "2",
        ),
        "F32": Fault(
            "very many experts",
            "the same time for each; listing 10,000 takes about a second and no torch",
            "0",
        ),
        "F33": Fault(
            "too little memory",
            "refused before anything is written where an estimate tells, else ended cleanly;"
            " merging streams and takes the same for any size of model",
            "4",
        ),
        "F34": Fault(
            "no GPU, no bitsandbytes",
            "what does not need them works; what does says the real reason",
            "4",
        ),
        "F35": Fault("no network", "no socket is opened unless a URL is written", "0"),
        "F36": Fault(
            "clocks that jump, equal times of files", "no result depends on times of files", "0"
        ),
        "F37": Fault(
            "resuming after a crash, torn checkpoints",
            "continues from the newest whole one and says so; the result is that of an"
            " uninterrupted run, byte for byte; another configuration is refused",
            "0 or 2",
        ),
        "F38": Fault(
            "order of experts, hash seed, threads",
            "the same bytes",
            "0",
        ),
        "F39": Fault(
            "a search that diverges or may not try anything",
            "the best point that was measured, base and single experts among them; too small a"
            " budget is refused with what is needed",
            "0 or 2",
        ),
        "F40": Fault(
            "empty, repeated, over-long items; answers without an end",
            "refused or counted; scores do not depend on the batch",
            "0, 2 or 3",
        ),
        "F41": Fault(
            "outputs that exist, or that are inputs",
            "refused; `--overwrite` replaces results only, never inputs or files of the user",
            "2",
        ),
        "F42": Fault(
            "files that change while they are read",
            "refused; what was opened stays what it was, nothing is mapped",
            "3",
        ),
    },
}

HEAD = """\
# Faults

What can go wrong, what cgmerge then does, and the tests that prove it. Exit codes: 0 done ·
2 usage · 3 an input cannot be used · 4 the environment · 130 and 143 interrupted. Every refusal
names file, field or tensor, both values and the next step, leaves inputs and earlier results as
they were, and prints no traceback.
What is promised beyond single faults is in [SECURITY.md](../SECURITY.md).

Generated by `make docs` from the tests' marks; do not edit.
"""


def collect(folder: Path = TESTS) -> dict[str, list[str]]:
    """Return the tests of every fault, as `path::name` below the repository's root."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        place = path.relative_to(folder.parent).as_posix()
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text if "mark.fault" in text else "")
        for name, faults in _marked(tree):
            for fault in faults:
                found.setdefault(fault, []).append(f"{place}::{name}")
    return found


def _marked(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    yield node.name, [str(ast.literal_eval(word)) for word in mark.args]


def build(tests: dict[str, list[str]]) -> str:
    """Return the page."""
    parts = [HEAD]
    for title, faults in SECTIONS.items():
        parts.append(f"## {title}\n")
        for number, fault in faults.items():
            parts.append(f"**{number}: {fault.name}.** Exit {fault.exit}. {_text(fault)}\n")
            parts += [f"- `{test}`" for test in sorted(tests.get(number, []))]
            parts.append("")
    return "\n".join(parts)


def _text(fault: Fault) -> str:
    return fault.behaviour[:1].upper() + fault.behaviour[1:] + "."


def problems(tests: dict[str, list[str]]) -> list[str]:
    """Return what keeps the page from being true: faults without a test, marks without a fault."""
    known = {number for faults in SECTIONS.values() for number in faults}
    lacking = [f"no test proves {number}" for number in sorted(known - set(tests))]
    return lacking + [f"{number} is no fault: {tests[number]}" for number in set(tests) - known]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 when the page is outdated"
    )
    options = parser.parse_args(arguments)
    tests = collect()
    text = build(tests)
    found = problems(tests)
    if options.check and (not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != text):
        found.append(f"{TARGET} is out of date: run make docs")
    if not options.check:
        TARGET.write_text(text, encoding="utf-8")
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
