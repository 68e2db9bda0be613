"""A base, three experts that fit together oddly, examples that a known mix of them answers."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import support
import torch
import train_support

from cgmerge.merge import LowRank, stack
from cgmerge.modules.attach import attached
from cgmerge.modules.base import open_base
from cgmerge.modules.compose import make_plan
from cgmerge.modules.expert import open_expert
from cgmerge.modules.learned.objectives import Outcome, Support
from cgmerge.modules.loading import load_base
from cgmerge.modules.recipe import ExpertRef, Recipe
from cgmerge.refs import parse_weighted

TRUTH = {"e1": 0.8, "e2": -0.5, "e3": 0.0}
SETTINGS = {
    "e1": {"leaves": ("q_proj", "down_proj"), "rank": 4, "alpha": 8},
    "e2": {"leaves": ("q_proj", "v_proj"), "rank": 2, "alpha": 4, "use_rslora": True},
    "e3": {"leaves": ("down_proj",), "rank": 3, "alpha": 3},
}


def make_place(folder):
    """Write base, experts e1 … e3, an expert that changes nothing and two files of examples."""
    base = str(train_support.make_base(folder / "base"))
    support.edit_weights(folder / "base", "lm_head", lambda weight: weight * 4)  # sure of itself
    shapes = {
        path: (shape.out_features, shape.in_features)
        for path, shape in open_base(base).modules.items()
    }
    for seed, (name, wanted) in enumerate(SETTINGS.items(), 1):
        options = dict(wanted)
        chosen = support.pick(shapes, *options.pop("leaves"))
        support.make_expert(folder / name, chosen, seed=seed, std=0.2, **options)
    support.make_expert(folder / "zero", support.pick(shapes, "q_proj"), seed=9, std=0.0)
    loaded = load_base(open_base(base), device="cpu", dtype="float32")
    for name, seed in (("first", 1), ("second", 2)):
        rows = answered_rows(loaded, folder, 12, seed)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    prompts = [json.dumps({"text": row["prompt"]}) + "\n" for row in rows]
    (folder / "prompts.jsonl").write_text("".join(prompts))
    return folder


def answered_rows(
    loaded, folder, count, seed, truth=TRUTH, words=("copy :", train_support.LETTERS)
):
    """Prompts of some letters and what the base with Σ truth·ΔW answers to them, in two words."""
    rng, rows = random.Random(seed), {}
    first = 4  # ids below are special
    with attached(loaded.model, mixed(folder, truth)), torch.no_grad():
        while len(rows) < count:
            prompt = f"{words[0]} {' '.join(rng.choices(words[1], k=4))} ="
            ids = loaded.tokenizer(prompt)["input_ids"]
            for _ in range(2):
                logits = loaded.model(torch.tensor([ids])).logits[0, -1]
                ids.append(first + int(logits[first:].argmax()))
            rows[prompt] = loaded.tokenizer.decode(ids[-2:])
    return [{"prompt": prompt, "completion": answer} for prompt, answer in rows.items()]


def mixed(folder, coefficients):
    """Σ c·ΔW of experts, module by module, by the algebra that merging uses."""
    found = {}
    for name, value in coefficients.items():
        for path, delta in open_expert(str(folder / name)).deltas().items():
            found.setdefault(path, []).append((delta, value))
    return {p: stack([d for d, _ in pairs], [c for _, c in pairs]) for p, pairs in found.items()}


def plan_of(folder, *names, **fields):
    refs = tuple(ExpertRef(*parse_weighted(str(folder / name))) for name in names)
    options = {"method": "task-arithmetic", "base": str(folder / "base"), **fields}
    return make_plan(Recipe(experts=refs, **options))


def loaded_of(folder):
    return load_base(open_base(str(folder / "base")), device="cpu", dtype="float32")


def support_of(folder, loaded, *files, limit=None):
    from cgmerge.evals.suite import encode_questions, questions, read_skills

    skills = read_skills([str(folder / f"{file}.jsonl") for file in files], limit=limit)
    asked = questions(skills)
    rows = encode_questions(asked, loaded.tokenizer, None)
    answered = tuple(one.example.prompt is not None for one in asked)
    # Without the end token, which the mix behind the answers did not write.
    cut = [replace(r, target_ids=r.target_ids[:2] if a else r.target_ids)
           for r, a in zip(rows.encoded, answered, strict=True)]  # fmt: skip
    return Support(tuple(cut), tuple(one.skill for one in asked), answered)


class Formula:
    """A problem whose per-example aims are a formula of the coefficients [experts, modules]."""

    def __init__(self, function, experts, modules=("m",), examples=1):
        self.function, self.shape, self.passes = function, (experts, len(modules)), 0
        self.mixture = SimpleNamespace(modules=list(modules))
        self.support = SimpleNamespace(
            weights=lambda: torch.full((examples,), 1.0 / examples, dtype=torch.float64)
        )
        self.seen, self.known = [], {}

    def outcome(self, values):
        key = values.numpy().tobytes()
        if key not in self.known:
            self.seen.append(values.clone())
            self.passes += 1
            self.known[key] = self._outcome(values)
        return self.known[key]

    def gradient(self, values, weights):
        leaf = values.clone().requires_grad_()
        aims = self.function(leaf).reshape(-1)
        (aims * weights).sum().backward()
        self.seen.append(values.clone())
        self.passes += 3
        return self._outcome(values), leaf.grad

    def _outcome(self, values):
        aims = self.function(values).detach().reshape(-1)
        return Outcome(aims, aims, (aims < 0.1).double())


def bowl(centre):
    """Half the squared distance to a centre [experts, modules]."""
    target = torch.tensor(centre, dtype=torch.float64)
    return lambda values: (values - target).square().sum() / 2


def low_rank(a, b):
    return LowRank(torch.tensor(a).float(), torch.tensor(b).float())
