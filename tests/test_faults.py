"""The list of faults: complete, true to the tests, and its own check able to fail."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "make_faults.py"


@pytest.fixture(scope="module")
def faults():
    spec = importlib.util.spec_from_file_location("make_faults", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_fault_has_a_test_and_the_page_is_up_to_date(faults, capsys):
    assert faults.main(["--check"]) == 0, capsys.readouterr().out


def test_there_are_as_many_as_there_were(faults):
    numbers = [number for section in faults.SECTIONS.values() for number in section]
    assert numbers == [f"F{number:02}" for number in range(1, 43)]


def test_marks_are_read_from_the_source(faults, tmp_path, capsys, monkeypatch):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_x.py").write_text(
        "import nothing_like_this\n"
        "class TestA:\n"
        "    @pytest.mark.parametrize('x', [1])\n"
        "    @pytest.mark.fault('F01', 'F99')\n"
        "    def test_one(self, x): ...\n"
        "@pytest.mark.fault('F02')\n"
        "def helper(): ...\n"
    )
    found = faults.collect(tests)
    assert found == {"F01": ["tests/test_x.py::test_one"], "F99": ["tests/test_x.py::test_one"]}
    said = faults.problems(found)
    assert "no test proves F02" in said
    assert "no test proves F01" not in said
    assert any(text.startswith("F99 is no fault") for text in said)
    page = tmp_path / "faults.md"
    page.write_text("old")
    monkeypatch.setattr(faults, "TARGET", page)
    assert faults.main(["--check"]) == 1
    assert page.read_text() == "old"
    assert "out of date" in capsys.readouterr().out
