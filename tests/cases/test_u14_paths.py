"""U14: a wrong local path that gives a baffling hub error."""

import socket
import sys

import case_support as cases
import pytest
import support

_SEEN = []
_ON = []


def _hook(event, args):
    # The host name is part of temporary names and leaves the machine alone.
    if _ON and event.startswith("socket.") and event != "socket.gethostname":
        _SEEN.append((event, args))


sys.addaudithook(_hook)


@pytest.fixture
def sockets():
    """Every socket event of the test, also those that the suite's own guard would stop."""
    _SEEN.clear()
    _ON.append(True)
    yield _SEEN
    _ON.clear()


@pytest.fixture
def lib(tmp_path, qv, monkeypatch):
    support.make_expert(tmp_path / "lib" / "expert1", qv)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_hook_sees_sockets(sockets):
    socket.socket().close()
    assert sockets


@pytest.mark.parametrize("command", ["compose", "inspect"])
@pytest.mark.parametrize(
    ("ref", "hint"),
    [
        ("lib/exprt1", "similar: expert1"),
        ("lib/expert1/", None),
        ("user/repo", "for a repository on the hub write hf://user/repo"),
        ("lib", "there are experts in expert1"),
    ],
)
@pytest.mark.fault("F35")
def test_local_unless_written_otherwise(run, lib, sockets, command, ref, hint):
    out = ["-o", "out"] if command == "compose" else []
    result = run(command, ref, *out, "--json")
    if hint is None:
        cases.done(result)
    else:
        code = "not_found.expert" if ref == "lib" else "not_found.folder"
        cases.refused(result, 2, code, ref, hint)
        assert not (lib / "out").exists()
    assert sockets == []


def test_folder_without_an_expert_lists_what_is_there(run, lib):
    (lib / "notes").mkdir()
    for name in ("model.bin", "todo.txt"):
        (lib / "notes" / name).write_text("x")
    error = cases.refused(
        run("compose", "notes", "-o", "out", "--json"),
        2,
        "not_found.expert",
        "holds no adapter_config.json",
        "it holds model.bin, todo.txt",
    )
    assert error["found"] == ["model.bin", "todo.txt"]


def test_wrong_base_path(run, lib, sockets, models):
    words = ["compose", "lib/expert1", "--base", models / "BB", "-o", "out", "--json"]
    cases.refused(run(*words), 2, "not_found.folder", "no such base model", "B")
    assert sockets == []
