"""Shared fixtures; the whole suite runs offline, on one thread, and unpickles nothing."""

import os
import socket

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("COLUMNS", "100")

import audit
import pytest
import support
import torch


@pytest.fixture(autouse=True)
def _harmless():
    """Fail a test in which something was unpickled, started by the program, or looked up."""
    audit.take()
    yield
    assert audit.take() == [], "the audit hook saw what no command may do"


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Any look-up or connection beyond this machine's own sockets fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError(f"network used: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder with the bases B, B' (other seed), Bt (tied) and G (GPT-2)."""
    folder = tmp_path_factory.mktemp("models")
    support.make_llama(folder / "B", seed=0)
    support.make_llama(folder / "B2", seed=1)
    support.make_llama(folder / "Bt", seed=0, tied=True)
    support.make_gpt2(folder / "G")
    return folder


@pytest.fixture
def qv():
    return support.pick(support.llama_shapes(), "q_proj", "v_proj")


@pytest.fixture
def experts(tmp_path, qv):
    """E1, E2 (rank 4 on q, v), E3 (rank 8 on q and down): different seeds, non-zero B."""
    support.make_expert(tmp_path / "E1", qv, seed=1)
    support.make_expert(tmp_path / "E2", qv, seed=2)
    wide = support.pick(support.llama_shapes(), "q_proj", "down_proj")
    support.make_expert(tmp_path / "E3", wide, rank=8, alpha=4, seed=3)
    return tmp_path


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process: returns (exit code, stdout, stderr)."""

    def call(*words):
        from cgmerge.cli import app

        code = app.run([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
