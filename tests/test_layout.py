"""Rules of the house that a machine can check: imports, sizes, lightness, documentation."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "cgmerge"
FILES = sorted(ROOT.rglob("*.py"))
ALLOWED = {
    "merge": {"merge"},
    "modules": {"merge", "modules"},
    "evals": {"merge", "modules", "evals"},
    "cli": {"merge", "modules", "evals", "cli"},
}
MERGE_MAY_IMPORT = {"torch", "numpy", "scipy", "jaxtyping", "cgmerge", *sys.stdlib_module_names}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    allowed = ALLOWED.get(package)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "cgmerge" and len(parts) > 1 and parts[1] in ALLOWED and allowed:
            assert parts[1] in allowed, f"{package} imports {name}"
        if package == "merge":
            assert parts[0] in MERGE_MAY_IMPORT, f"merge imports {name}"


def test_one_file_imports_trl():
    users = [path for path in FILES if any(n.split(".")[0] == "trl" for n in imports(path))]
    assert len(users) == 1
    assert "training" in str(users[0])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_are_short_and_documented(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body
            documented = ast.get_docstring(node) is not None
            first = body[1] if documented and len(body) > 1 else body[0]
            assert node.end_lineno - first.lineno + 1 <= 60, f"{node.name} is too long"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_only_one_module_writes_files():
    """No write, rename or removal outside fs.py (temporary bug reports and caches aside)."""
    verbs = {"write_text", "write_bytes", "unlink", "rename", "mkdir", "rmtree", "save_file"}
    allowed = {"fs.py"}
    for path in FILES:
        if path.name in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                ours = isinstance(owner, ast.Name) and owner.id == "fs"
                assert ours or node.func.attr not in verbs, f"{path.name}:{node.lineno}"


def loaded_after(code):
    script = f"{code}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"torch", "transformers", "peft", "trl", "datasets", "accelerate", "bitsandbytes", "scipy"}


def test_import_is_light():
    assert not loaded_after("import cgmerge") & (HEAVY | {"numpy", "pydantic"})


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["train"],
        ["compare"],
        ["compose"],
        ["compress"],
        ["decompress"],
        ["eval"],
        ["extract"],
        ["inspect"],
        ["methods"],
        ["ls"],
        ["report"],
        ["add"],
        ["rm"],
        ["verify"],
        ["pull"],
        ["push"],
        ["lock"],
        ["tasks"],
        ["split"],
        ["demo"],
        ["doctor"],
    ],
)
def test_help_is_light(command):
    words = [*command, "--help"]
    code = f"from cgmerge.cli.app import run\nassert run({words!r}) == 0"
    assert not loaded_after(code) & (HEAVY | {"numpy"})


def test_compress_and_back_do_not_import_peft_or_transformers(experts):
    small, back = str(experts / "e.cge"), str(experts / "back")
    code = (
        "from cgmerge.cli.app import run\n"
        f"assert run({['compress', str(experts / 'E1'), '-o', small, '-q']!r}) == 0\n"
        f"assert run({['decompress', small, '-o', back, '-q']!r}) == 0"
    )
    assert not loaded_after(code) & {"transformers", "peft", "trl", "datasets", "accelerate"}


def test_records_are_compared_and_reported_without_torch(tmp_path):
    from record_support import write

    record = str(write(tmp_path / "r.json", {"base": {"s": "10"}, "m": {"s": "11"}}))
    code = (
        "from cgmerge.cli.app import run\n"
        f"assert run({['compare', record + ':base', record, '-q']!r}) == 0\n"
        f"assert run({['report', record, '-o', str(tmp_path / 'r.html'), '-q']!r}) == 0"
    )
    assert not loaded_after(code) & (HEAVY - {"scipy"})


def test_compose_does_not_import_peft_or_transformers(experts):
    words = ["compose", str(experts / "E1"), str(experts / "E2"), "-o", str(experts / "o"), "-q"]
    code = f"from cgmerge.cli.app import run\nassert run({words!r}) == 0"
    assert not loaded_after(code) & {"transformers", "peft", "trl", "datasets", "accelerate"}


def test_tasks_and_split_are_light(tmp_path):
    out = tmp_path / "s"
    code = (
        "from cgmerge.cli.app import run\n"
        "assert run(['tasks', '-q']) == 0\n"
        f"assert run({['tasks', 'make', 'arithmetic', '--n', '50', '-o', str(out), '-q']!r}) == 0\n"
        f"assert run({['split', str(out / 'train.jsonl'), '--by', 'iid', '-o', str(tmp_path / 'o'), '-q']!r}) == 0"  # noqa: E501
    )
    assert not loaded_after(code) & (HEAVY | {"numpy"})
