"""What is advised was tried: it keeps every module, and what is lower does not."""

import pytest
from compress_support import spectrum

from cgmerge.errors import Incompatible
from cgmerge.merge.deltas import LowRank
from cgmerge.modules.compress import advice
from cgmerge.modules.compress.advice import keeping_all
from cgmerge.modules.compress.modes import Options, encode


@pytest.fixture
def thin():
    """Rank 1, norms from 1 to 1/16: at the default density the weak ones go."""
    return {f"m{i}": spectrum(60, 60, [0.5**i], seed=i) for i in range(5)}


@pytest.mark.parametrize("mode", ["ternary", "svdq"])
def test_the_density_is_the_lowest_of_those_that_keep_all(thin, mode):
    options = Options()
    assert encode(mode, thin, options).fidelity.emptied
    option, value = keeping_all(mode, thin, options).split()
    assert option == "--density"
    density = float(value)
    assert encode(mode, thin, Options(density=density)).fidelity.emptied == []
    assert encode(mode, thin, Options(density=density - 0.1)).fidelity.emptied


def test_an_expert_too_small_for_the_default_is_told_a_density():
    tiny = {"m": spectrum(3, 3, [1.0], seed=0)}
    with pytest.raises(Incompatible, match="nothing is left"):
        encode("ternary", tiny, Options())
    _, value = keeping_all("ternary", tiny, Options()).split()
    assert encode("ternary", tiny, Options(density=float(value))).fidelity.emptied == []


def test_nothing_is_advised_that_does_not_help():
    """B so small against A that float32 scales of ΔW vanish: no density brings it back."""
    gone = {"m": spectrum(8, 8, [1.0], seed=0), "faint": spectrum(8, 8, [1.0], seed=1)}
    gone["faint"] = LowRank(gone["faint"].a * 1e-20, gone["faint"].b * 1e-20)
    assert keeping_all("svdq", gone, Options()) is None


def test_the_basis_of_the_factors_is_advised_where_no_density_helps(thin, monkeypatch):
    monkeypatch.setattr(advice, "_DENSITIES", (0.2,))
    assert keeping_all("ternary", thin, Options()) == "--gauge raw"
    assert encode("ternary", thin, Options(gauge="raw")).fidelity.emptied == []
    assert keeping_all("svdq", thin, Options()) is None


def test_large_experts_are_not_tried_out(thin, monkeypatch):
    monkeypatch.setattr(advice, "MOST_ENTRIES", 599)
    assert keeping_all("ternary", thin, Options()) is None
