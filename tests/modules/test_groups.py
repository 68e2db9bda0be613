"""Groups of experts that change the base alike, from the command line."""

import json

import pytest
import support
import torch
from case_support import done, refused

from cgmerge.modules.groups import group_experts


@pytest.fixture
def family(tmp_path, qv):
    """Two families: noise around one expert each, with other factors for the same ΔW."""
    for name, seed in (("a", 1), ("b", 2)):
        support.make_expert(tmp_path / f"{name}0", qv, seed=seed)
        for number in (1, 2):
            folder = tmp_path / f"{name}{number}"
            support.make_expert(folder, qv, seed=seed)

            def disturb(tensors, number=number):
                generator = torch.Generator().manual_seed(number)
                turn = torch.linalg.qr(torch.randn(4, 4, generator=generator)).Q * (1.0 + number)
                back = torch.linalg.inv(turn)
                return {
                    key: (back @ t if "lora_A" in key else t @ turn).contiguous()
                    + 0.001 * torch.randn(t.shape, generator=generator)
                    for key, t in tensors.items()
                }

            support.edit_tensors(folder, disturb)
    return tmp_path


def test_groups_are_about_what_is_changed_not_how_it_is_factored(family):
    refs = [str(family / name) for name in ("a0", "b1", "a2", "b0", "a1", "b2")]
    first, second = group_experts(refs, 2)
    assert (first.number, set(first.names)) == (1, {"a0", "a1", "a2"})
    assert (second.number, set(second.names)) == (2, {"b0", "b1", "b2"})
    assert first.likeness > 0.9
    assert group_experts(refs, 1)[0].likeness < 0.6


def test_every_expert_can_be_a_group_of_its_own(family):
    refs = [str(family / name) for name in ("a0", "b0", "a1")]
    assert [group.names for group in group_experts(refs, 3)] == [("a0",), ("b0",), ("a1",)]
    assert [group.likeness for group in group_experts(refs, 3)] == [1.0] * 3


def test_ls_shows_groups(family, run, monkeypatch):
    monkeypatch.chdir(family)
    done(run("add", "lib", "a0", "a1", "b0", "b1", "--json"))
    found = done(run("ls", "lib", "--cluster", "2", "--json"))
    assert [group["experts"] for group in found["clusters"]] == [["a0", "a1"], ["b0", "b1"]]
    assert done(run("ls", "lib", "--json"))["clusters"] is None
    code, out, _ = run("ls", "lib", "--cluster", "2")
    assert code == 0
    assert "a0 a1" in out
    error = refused(run("ls", "lib", "--cluster", "9", "--json"), 2, "usage.clusters")
    assert "4" in json.dumps(error)
