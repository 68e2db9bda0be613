"""A merged tensor that its type cannot hold is refused by name."""

import pytest
import torch

from cgmerge.errors import Incompatible
from cgmerge.merge import merge_state_dicts


@pytest.mark.parametrize(("value", "dtype"), [(60000.0, torch.float16), (3e38, torch.float32)])
@pytest.mark.fault("F24")
def test_a_result_that_its_type_cannot_hold_is_refused(value, dtype):
    with pytest.raises(Incompatible, match=f"'w' overflows {dtype}".replace("torch.", "")):
        merge_state_dicts("task-arithmetic", [{"w": torch.full((2, 2), value).to(dtype)}] * 2)
