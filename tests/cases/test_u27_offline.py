"""U27: network use in offline runs."""

import json
import socket

import case_support as cases
import pytest
import train_support


@pytest.mark.fault("F35")
def test_train_compose_and_eval_without_a_look_up(run, tmp_path, monkeypatch):
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    base = train_support.make_base(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    # As a base has it that came from the hub once.
    config["_name_or_path"] = "some-org/some-model"
    (base / "config.json").write_text(json.dumps(config))
    train_support.write_rows(tmp_path / "reverse.jsonl", train_support.make_rows(20))
    data = ["--base", base, "--data", tmp_path / "reverse.jsonl"]
    words = ["train", *data, "--skill", "reverse", "--steps", 5, "--rank", 4, "--device", "cpu"]
    trained = cases.done(run(*words, "--lr", 0.01, "-o", tmp_path / "expert", "--json"))
    assert trained["trained"] is True
    words = ["compose", tmp_path / "expert", "--base", base, "-o", tmp_path / "out", "--json"]
    found = cases.done(run(*words))
    assert found["norm"] > 0
    scored = cases.done(run("eval", tmp_path / "out", *data, "--limit", 4, "--json"))
    assert len(scored["targets"]) == 2
    assert cases.done(run("inspect", tmp_path / "out", "--base", base, "--json"))
    assert tried == []
