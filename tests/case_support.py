"""What the user cases measure with: plain transformers and peft, refusals as scripts see them."""

import json
from pathlib import Path

import torch

IDS = torch.arange(8)[None]


def logits(base, adapter=None):
    """Logits of a model folder, with an adapter through plain peft where one is given.

    The generator is poisoned in between: random initial factors must not look like loaded ones.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        torch.manual_seed(987_654_321)
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(IDS).logits


def effect(base, *, merged=None, adapter=None):
    """What a merged model, or an adapter on the base, adds to the base's logits."""
    changed = logits(base, adapter) if merged is None else logits(merged)
    return changed - logits(base)


def same_effect(found, expected, *, atol=1e-5):
    """Both move the logits, and by the same amount."""
    assert expected.abs().max() > 0.02, "the expert has too little effect to test anything"
    assert torch.allclose(found, expected, atol=atol), float((found - expected).abs().max())


def refused(result, exit_code, code, *words):
    """Check a refusal under `--json`; returns its object."""
    found, out, err = result
    assert (found, out) == (exit_code, ""), err
    assert "Traceback" not in err
    error = json.loads(err.strip().splitlines()[-1])
    assert error["code"] == code, error
    said = f"{error['message']} {error['hint']}"
    for word in words:
        assert str(word) in said, said
    return error


def done(result):
    """Check a success under `--json`; returns its object."""
    found, out, err = result
    assert found == 0, err
    return json.loads(out)


def record(folder):
    return json.loads((Path(folder) / "cgmerge.json").read_text())


def tree(folder):
    """Every path below a folder with its size: what a refused command must not change."""
    return sorted((str(p), p.lstat().st_size) for p in Path(folder).rglob("*"))
