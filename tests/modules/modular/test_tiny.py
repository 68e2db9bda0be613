"""On the embedded base: four tasks in two kinds, two modules; then a fifth task by tuning alone."""

import json
import random

import pytest
from case_support import done
from composition_support import tiny

from cgmerge.cli.training import score_rows
from cgmerge.evals.tasks import chains
from cgmerge.modules.attach import attached
from cgmerge.modules.data import encode_all, read_data
from cgmerge.modules.expert import open_expert

TASKS = {
    "caesar": ("caesar",),
    "caesar-copy": ("copy", "caesar"),
    "rotr": ("rotr",),
    "rotr-copy": ("copy", "rotr"),
}


def write(path, names, count, split, seed):
    rng, rows = random.Random(seed), {}
    while len(rows) < count:
        letters = rng.sample(chains.LETTERS, rng.choice(chains.LENGTHS))
        if chains.split_of(letters) == split:
            rows[tuple(letters)] = chains.example(names, letters)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))


@pytest.fixture
def place(tmp_path, monkeypatch):
    lines = ["base: tiny", "skills:"]
    for seed, (task, names) in enumerate(TASKS.items()):
        write(tmp_path / f"{task}.jsonl", names, 96, "train", seed)
        write(tmp_path / f"{task}-test.jsonl", names, 24, "test", seed)
        lines.append(f"  {task}: {{data: {task}.jsonl, eval_data: {task}-test.jsonl}}")
    (tmp_path / "skills.yml").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_related_tasks_come_to_share_and_a_new_one_is_tuned(place, run):
    words = ("--steps", 30, "--batch-size", 16, "--lr", "2e-3", "--device", "cpu")
    command = ("train", "skills.yml", "--modular", "skills=2,rank=4", *words, "-o", "shared")
    fit = done(run(*command, "--json"))["fit"]
    assert fit["first_loss"] > 0.6
    assert fit["loss"] < 0.2
    for task in fit["tasks"].values():
        assert task["eval"]["exact_match"] >= 0.6  # seen: 0.79 to 1
        assert task["eval"]["base_exact_match"] <= 0.4  # seen: 0 to 0.25
    lean = {}
    for task in TASKS:
        rows = [layer[task] for layer in fit["allocation"].values()]
        lean[task] = sum(first - second for first, second in rows) / len(rows)
    caesars = sorted((lean["caesar"], lean["caesar-copy"]))
    rotrs = sorted((lean["rotr"], lean["rotr-copy"]))
    assert caesars[1] < rotrs[0] or rotrs[1] < caesars[0]

    write(place / "new.jsonl", ("reverse", "caesar"), 12, "train", 7)
    write(place / "new-test.jsonl", ("reverse", "caesar"), 24, "test", 8)
    skills = ("shared/experts/skill-0", "shared/experts/skill-1")
    few = ("--set", "granularity=layer", "--set", "steps=40", "--set", "lr=0.1", "--set", "folds=0")
    examples = ("--base", "tiny", "--examples", "new.jsonl")
    done(run("compose", *skills, "-m", "atlas", *few, *examples, "-o", "new", "--json"))
    base = tiny()
    rows = encode_all(read_data(place / "new-test.jsonl").examples, base.tokenizer)
    losses = {"base": score_rows(base.model, rows)["loss"]}
    for name in (*skills, "new"):
        with attached(base.model, open_expert(name).deltas()):
            losses[name] = score_rows(base.model, rows)["loss"]
    assert min(losses, key=losses.get) == "new", losses
    assert losses["new"] < 0.5 * losses["base"]
