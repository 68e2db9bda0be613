"""U24: merging takes the whole model, twice, and the process is killed without a word."""

import json
import subprocess
import sys

import pytest
import support
import torch

LAYERS, WIDTH = 16, 1024

_CHILD = """
import os, resource, sys, torch
torch.set_num_threads(1)
from cgmerge.cli import app
base, expert, warm, out, *rooms = sys.argv[1:]
words = ["compose", expert, expert + "=0.5", "-m", "ties", "--as", "model", "--json", "--base"]
assert app.run([*words, base + "-small", "-o", warm]) == 0  # all that is imported and kept
used = int(open("/proc/self/statm").read().split()[0]) * 4096
for room in map(int, rooms):
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
        os._exit(app.run([*words, base, "-o", f"{out}-{room}"]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def write_base(folder, layers, shards):
    """8 MB for each layer at full width; only config and files are needed."""
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
              "num_attention_heads": 8, "vocab_size": 64}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    whole = torch.full((2 * WIDTH, WIDTH), 0.5)
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight": whole.clone() for i in range(layers)}
    support.write_tensors(folder, tensors, shard=None if shards == 1 else (layers // shards) << 23)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base of 128 MB in eight files, one of a single layer, an expert of either."""
    folder = tmp_path_factory.mktemp("u24")
    write_base(folder / "base", LAYERS, 8)
    write_base(folder / "base-small", 1, 1)
    return folder


def run(place, *rooms):
    shapes = {"model.layers.0.self_attn.q_proj": (2 * WIDTH, WIDTH)}
    expert = place / "e"
    support.make_expert(expert, shapes, rank=2)
    words = [place / "base", expert, place / "warm", place / "out", *rooms]
    return subprocess.run(
        [sys.executable, "-c", _CHILD, *map(str, words)], capture_output=True, text=True, check=True
    )


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")
@pytest.mark.fault("F33")
def test_half_the_size_of_the_base_is_enough_and_too_little_is_said_before(place):
    # The expert is of one layer, which both bases have; every file of the large one is written.
    done = run(place, 64_000_000, 4_000_000)
    *_, plenty, little = done.stdout.splitlines()
    assert (plenty, little) == ("0", "4"), done.stderr
    written = support.load_tensors(place / "out-64000000")
    assert len(written) == LAYERS
    assert len(list((place / "out-64000000").glob("*.safetensors"))) == 8
    error = json.loads(done.stderr.splitlines()[-1])
    assert error["code"] == "limit.memory"
    assert error["expected"] > error["found"]
    assert "this merge needs about" in error["message"]
    assert not (place / "out-4000000").exists()
    assert not [path for path in place.iterdir() if path.name.startswith(".")]
