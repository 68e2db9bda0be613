"""U40: an adapter config, a name or a pickle that wants to run code or open other files."""

import os
import pickle
import sys

import case_support as cases
import pytest
import support

_SEEN = []
_ON = []
_WATCHED = ("import", "open", "exec", "os.system", "subprocess.", "pickle.", "socket.__new__")


def _hook(event, args):
    if _ON and event.startswith(_WATCHED):
        _SEEN.append((event, str(args[0]) if args else ""))


sys.addaudithook(_hook)


@pytest.fixture
def watched(run, experts, monkeypatch):
    """`run`, with every import, open, exec and socket of it on record."""
    monkeypatch.chdir(experts)
    run("compose", "E1", "-o", "warm")  # what the program itself imports

    def call(*words):
        _SEEN.clear()
        _ON.append(True)
        try:
            return run(*words)
        finally:
            _ON.clear()

    return call


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"megatron_core": "evil"}, "unsafe.config_import", "megatron_core"),
        ({"auto_mapping": {"parent_library": "evil"}}, "unsafe.config_import", "auto_mapping"),
        ({"auto_mapping": {"parent_library": "os"}}, "unsafe.config_import", "auto_mapping"),
        ({"target_modules": "(.*)*(.*)*q"}, "unsafe.config_pattern", "target_modules"),
        ({"rank_pattern": {"(a+)+$": 4}}, "unsafe.config_pattern", "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "unsafe.config_init", "pissa"),
        ({"base_model_name_or_path": "x\n\x1b[2J"}, "damaged.config_value", "one line"),
        ({"task_type": "x" * 5000}, "damaged.config_value", "task_type"),
        ({"layer_replication": [[0, 20000]]}, "incompatible.config_layer_replication", "20000"),
    ],
)
@pytest.mark.fault("F10")
def test_config(watched, experts, changes, code, word):
    support.edit_config(experts / "E1", **changes)
    for words in (["inspect", "E1"], ["compose", "E1", "E2", "-o", "out"]):
        result = watched(*words, "--json")
        cases.refused(result, 3, code, word)
        assert "\x1b" not in result[2]
        assert [
            seen
            for seen in _SEEN
            if "evil" in seen[1] or seen[0].startswith(("socket", "subprocess", "os.system"))
        ] == []
    assert not (experts / "out").exists()


@pytest.mark.fault("F11", "F12")
def test_labels_are_labels(watched, experts):
    """Paths and names in the config are neither opened nor fetched."""
    for name in ("../../x", "/etc/passwd", "evil/remote-repo"):
        support.edit_config(experts / "E1", base_model_name_or_path=name, revision="../../y")
        cases.done(watched("compose", "E1", "-o", "out", "--overwrite", "--json"))
        outside = [
            path
            for event, path in _SEEN
            if event == "open" and ("passwd" in path or path.endswith(("/x", "/y", "remote-repo")))
        ]
        assert outside == []
        assert not [seen for seen in _SEEN if seen[0].startswith(("socket", "pickle"))]


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "adapter_model.pkl"])
@pytest.mark.fault("F11")
def test_pickle_is_never_loaded(watched, experts, name):
    (experts / "E1" / "adapter_model.safetensors").unlink()
    (experts / "E1" / name).write_bytes(pickle.dumps(Bomb()))
    for words in (["inspect", "E1"], ["compose", "E1", "E2", "-o", "out"]):
        cases.refused(watched(*words, "--json"), 3, "unsafe.pickle", name, "can run code")
        assert not [seen for seen in _SEEN if seen[0].startswith("pickle")]
    assert not (experts / "pwned").exists()


@pytest.mark.fault("F11")
def test_pickle_beside_sound_weights_is_ignored_and_said(watched, experts):
    (experts / "E1" / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    found = cases.done(watched("compose", "E1", "-o", "out", "--json"))
    assert any("adapter_model.bin (pickle) is ignored" in text for text in found["warnings"])
    assert not (experts / "pwned").exists()


@pytest.mark.fault("F12")
def test_card_with_paths_outside(watched, experts):
    (experts / "E1" / "expert.json").write_text(
        '{"schema": "cgmerge.expert/1", "skill": "x", "base": {"name": "b"},'
        ' "files": {"../../x": "00"}}'
    )
    cases.refused(watched("inspect", "E1", "--json"), 3, "damaged.card", "'../../x'", "outside")
    assert not [path for event, path in _SEEN if event == "open" and path.endswith("/x")]
