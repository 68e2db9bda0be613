"""Reading ahead changes what is read at once, and nothing else."""

import support
import torch

from cgmerge.modules.base import open_base
from cgmerge.modules.weights import WeightReader


def folder(tmp_path):
    place = tmp_path / "base"
    support.make_llama(place)
    name = "model.layers.0.mlp.down_proj.weight"
    return place, name


def test_any_order_of_requests_gives_the_entries(tmp_path):
    place, name = folder(tmp_path)
    values = support.load_tensors(place)[name].reshape(-1)
    reader, total = WeightReader(open_base(str(place))), values.numel()
    generator = torch.Generator().manual_seed(0)
    step = 37
    ranges = [(first, min(first + step, total)) for first in range(0, total, step)]
    jumps = torch.randint(0, total, (50,), generator=generator).tolist()
    ranges += [(first, min(first + 1 + first % 90, total)) for first in jumps]
    ranges += [(0, total), (0, step), (total - 1, total), (5, 5)]
    for first, last in ranges:
        assert torch.equal(reader.entries(name, first, last), values[first:last]), (first, last)


def test_reading_in_order_asks_the_file_an_eighth_as_often(tmp_path, monkeypatch):
    place, name = folder(tmp_path)
    reader = WeightReader(open_base(str(place)))
    asked = []
    plain = WeightReader._read
    monkeypatch.setattr(
        WeightReader, "_read", lambda s, n, a, b: asked.append((a, b)) or plain(s, n, a, b)
    )
    total = reader.count(name)
    step = total // 64
    for first in range(0, 64 * step, step):
        reader.entries(name, first, first + step)
    assert len(asked) == 1 + 8  # the first tells nothing about the order
    assert asked[1] == (step, 9 * step)
    assert asked[-1][1] <= total
    reader.entries(name, 0, 3)
    assert asked[-1] == (0, 3)
