"""Groups of modules and the numbers they share."""

import pytest
import torch

from cgmerge.modules.learned.coefficients import ALL, OUTSIDE, Coefficients, group_modules

MODULES = ["model.layers.10.q", "model.layers.2.q", "model.layers.2.v", "lm_head"]


@pytest.mark.parametrize(
    ("granularity", "names"),
    [
        ("model", [ALL]),
        ("layer", ["layer 2", "layer 10", OUTSIDE]),
        ("module", sorted(MODULES)),
    ],
)
def test_groups(granularity, names):
    groups = group_modules(reversed(MODULES), granularity)
    assert list(groups.names) == names
    assert sorted(m for group in groups.members for m in group) == sorted(MODULES)
    index = groups.index(MODULES)
    for place, module in enumerate(MODULES):
        assert module in groups.members[index[place]]


def test_the_layers_of_gpt2_are_found():
    groups = group_modules(["transformer.h.1.attn.c_attn", "transformer.h.0.mlp.c_fc"], "layer")
    assert groups.names == ("layer 0", "layer 1")


def test_means_weigh_groups_by_their_modules():
    groups = group_modules(MODULES, "layer")
    values = torch.tensor([[1.0, 2.0, 3.0], [0.0, 4.0, 0.0]], dtype=torch.float64)
    found = Coefficients(groups, values)
    assert found.means() == [(2 * 1 + 2 + 3) / 4, 4 / 4]
    assert found.rows() == [[1.0, 0.0], [2.0, 4.0], [3.0, 0.0]]
    assert found.record() == {"layer 2": [1.0, 0.0], "layer 10": [2.0, 4.0], OUTSIDE: [3.0, 0.0]}
