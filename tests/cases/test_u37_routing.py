"""U37: routing whose prototypes are read from the wrong matrix, or that nobody can look into."""

import json

import case_support as cases
import pytest
import support
import torch
from composition_support import shapes

from cgmerge.merge.deltas import LowRank
from cgmerge.modules.routing.choice import Choice
from cgmerge.modules.routing.spectral import spectral_router
from cgmerge.modules.routing.stack import Stack
from cgmerge.tensorfile import file_sha256


def directions(count, size, seed):
    square = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(square).Q[:count]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("strength", [0.01, 100.0])
def test_a_token_along_its_input_direction_goes_to_that_expert(sign, strength):
    """ΔW = σ·u·vᵀ: v decides, neither u, σ nor the sign of either."""
    v, u = directions(3, 12, 0), directions(3, 20, 1)
    experts = [
        LowRank(sign * v[i : i + 1] * (strength if i == 1 else 1.0), u[i : i + 1].T)
        for i in range(3)
    ]
    router = spectral_router({"m": Stack.of(experts)}, directions=1, choice=Choice(1))
    rule = router.rules["m"]
    tokens = torch.cat([v, -v])
    found = rule.scorer.scores(tokens, tokens @ rule.scorer.rows.T)
    assert found.argmax(dim=1).tolist() == [0, 1, 2, 0, 1, 2]
    assert torch.allclose(found[:3], torch.eye(3), atol=1e-5)
    assert torch.allclose(found[:3], found[3:])


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Two experts for the embedded base, one of them saved in bfloat16, as 4-bit training does."""
    monkeypatch.chdir(tmp_path)
    support.make_expert(tmp_path / "one", shapes("q_proj"), seed=1)
    support.make_expert(tmp_path / "two", shapes("q_proj"), seed=2, dtype=torch.bfloat16)
    return tmp_path


def test_the_choice_can_be_seen_for_each_layer_and_token(run, shelf):
    cases.done(run("compose", "one", "two", "-m", "arrow", "--top-k", 1, "-o", "c", "--json"))
    words = ("route", "c", "--base", "tiny", "--explain", "sort : b a d =", "--json")
    (found,) = cases.done(run(*words))["explained"]
    assert len(found["layers"]) == len(shapes("q_proj"))
    for row in (*found["layers"].values(), *(token["shares"] for token in found["tokens"])):
        assert row.keys() == {"one", "two"}
        assert sum(row.values()) == pytest.approx(1, abs=1e-5)
    # With one expert for each token and module, a layer's share is a share of whole tokens.
    for row in found["layers"].values():
        assert row["one"] * len(found["tokens"]) == pytest.approx(
            round(row["one"] * len(found["tokens"])), abs=1e-4
        )


def test_prototypes_have_a_digest_and_a_change_is_noticed(run, shelf):
    cases.done(run("compose", "one", "two", "-m", "arrow", "-o", "c", "--json"))
    router = json.loads((shelf / "c" / "cgmerge.json").read_text())["router"]
    assert router["sha256"] == file_sha256(shelf / "c" / "router.safetensors")
    data = bytearray((shelf / "c" / "router.safetensors").read_bytes())
    data[-1] ^= 1
    (shelf / "c" / "router.safetensors").write_bytes(bytes(data))
    words = ("route", "c", "--base", "tiny", "--explain", "x", "--json")
    cases.refused(run(*words), 3, "damaged.digest", "router.safetensors")
