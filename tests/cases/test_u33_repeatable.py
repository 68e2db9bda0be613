"""U33: a merge that draws at random and cannot be made a second time."""

import json
import random

import case_support as cases
import numpy as np
import pytest
import support
import torch

WEIGHTS = "adapter_model.safetensors"


@pytest.mark.parametrize("method", ["dare", "della", "dare-ties"])
@pytest.mark.fault("F38")
def test_twice_and_in_another_order_the_same_bytes(run, experts, method):
    found = {}
    for out, names in (("a", "E1 E2 E3"), ("b", "E3 E1 E2"), ("c", "E2 E3 E1")):
        torch.manual_seed(len(found))  # whatever happened before in this process
        np.random.seed(len(found))  # noqa: NPY002
        random.seed(len(found))
        refs = [experts / name for name in names.split()]
        cases.done(run("compose", *refs, "-m", method, "-o", experts / out, "--json"))
        found[out] = support.folder_bytes(experts / out)
    assert found["a"] == found["b"] == found["c"]


def test_the_record_has_the_seed_and_digests_and_repeats(run, experts):
    words = ["compose", experts / "E1", experts / "E2", "-m", "dare", "--json"]
    cases.done(run(*words, "-o", experts / "plain"))
    assert cases.record(experts / "plain")["params"]["seed"] == 0  # also where nobody chose one
    cases.done(run(*words, "--seed", 7, "-o", experts / "seven"))
    record = cases.record(experts / "seven")
    assert record["params"]["seed"] == 7
    assert all(len(expert["sha256"]) == 64 for expert in record["experts"])
    cases.done(
        run("compose", experts / "seven" / "cgmerge.json", "-o", experts / "again", "--json")
    )
    seven, plain = (support.folder_bytes(experts / name) for name in ("seven", "plain"))
    assert support.folder_bytes(experts / "again") == seven
    assert plain[WEIGHTS] != seven[WEIGHTS]


def test_what_is_drawn_belongs_to_the_content_not_to_the_place(run, experts, tmp_path):
    """An expert under another name, in another folder, loses the same entries."""
    moved = tmp_path / "elsewhere" / "other-name"
    support.write_expert(
        moved, support.load_tensors(experts / "E1"),
        json.loads((experts / "E1" / "adapter_config.json").read_text()),
    )  # fmt: skip
    (moved / WEIGHTS).write_bytes((experts / "E1" / WEIGHTS).read_bytes())
    for source, out in ((experts / "E1", "a"), (moved, "b")):
        words = ["compose", source, experts / "E2", "-m", "dare", "-o", experts / out, "--json"]
        cases.done(run(*words))
    assert (experts / "a" / WEIGHTS).read_bytes() == (experts / "b" / WEIGHTS).read_bytes()
