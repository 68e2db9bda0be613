"""The registry of routed methods: described in full, found by name, light to import."""

import dataclasses
import json
import subprocess
import sys

import pytest

from cgmerge.errors import UsageError
from cgmerge.merge.params import Checked
from cgmerge.merge.registry import is_method
from cgmerge.modules.routing.fitting import AutoTopK, TopK
from cgmerge.modules.routing.methods import find_routed, routed_methods

METHODS = routed_methods()


def test_all_are_there_once_and_sorted():
    names = [method.name for method in METHODS]
    assert names == [
        "arrow", "gate", "lora-flow", "phatgoose", "retrieval", "spectral", "task",
    ]  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_each_is_described_and_found(method):
    for name in (method.name, *method.aliases):
        assert find_routed(name) is method
        assert not is_method(name), f"{name} is a merge method too"
    assert method.needs <= {"base", "examples"}
    assert not method.named or "examples" in method.needs
    assert method.granularity in ("token", "sequence")
    assert len(method.summary) <= 90
    assert method.about.formula.startswith("w")
    assert method.about.paper
    assert issubclass(method.params, Checked)
    for item in dataclasses.fields(method.params):
        assert item.metadata["doc"], item.name


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_parameters_come_back_from_a_record(method):
    params = method.make_params()
    record = json.loads(json.dumps(dataclasses.asdict(params)))
    assert method.make_params(record) == params
    typed = {name: str(value) for name, value in record.items()}
    assert method.make_params(typed) == params


def test_what_is_unknown_is_none():
    assert find_routed("ties") is None
    assert find_routed("Arrow") is None
    assert find_routed("spectr").name == "spectral"


def test_wrong_parameters_are_refused():
    with pytest.raises(UsageError, match="method `gate` has no parameter `step`") as error:
        find_routed("gate").make_params({"step": 5})
    assert error.value.hint == "did you mean `steps`?"
    with pytest.raises(UsageError, match=r"`lr` must be in \(0, 10\]"):
        find_routed("gate").make_params({"lr": 0})
    with pytest.raises(UsageError, match="at least 1, `all` or `auto`, found 'most'"):
        find_routed("gate").make_params({"top_k": "most"})
    with pytest.raises(UsageError, match="a whole number of at least 1, or `all`, found 'auto'"):
        find_routed("arrow").make_params({"top_k": "auto"})


def test_top_k_in_numbers():
    said = []
    assert [TopK("2").of(n, said, default="2") for n in (1, 2, 3)] == [None, None, 2]
    assert said == []  # nobody asked for it
    assert [TopK("2").of(n, said, default="3") for n in (1, 2, 3)] == [None, None, 2]
    assert said == ["top_k=2 is more than 1 expert: all are used"]
    assert TopK("ALL").of(5, said, default="2") is None
    assert AutoTopK("auto").of(5, said, default="auto") is None
    for wrong in ("0", "-1", "1.5", "", "²", "auto"):
        with pytest.raises(ValueError):
            TopK(wrong)


def test_the_registry_needs_no_model_library():
    code = (
        "import sys, cgmerge.modules.routing.methods\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "torch" in loaded
    assert not loaded & {"transformers", "peft", "datasets", "trl"}
