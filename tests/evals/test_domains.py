"""Letters in domains: the generator, and what merging, retrieval and gates make of it."""

import json
import random

import pytest
from case_support import done

from cgmerge.evals.tasks import domains
from cgmerge.evals.tasks.chains import LETTERS, split_of

STEPS, BATCH = 60, 32


@pytest.mark.parametrize("seed", range(5))
def test_domains_share_out_the_alphabet_and_keep_no_letter(seed):
    found = domains.make_domains(random.Random(seed))
    assert len(found) == 4
    assert sorted(letter for one in found for letter in one.letters) == sorted(LETTERS)
    for one in found:
        assert sorted(one.letters) == sorted(one.image)
        assert all(a != b for a, b in zip(one.letters, one.image, strict=True))
    assert found == domains.make_domains(random.Random(seed))


def test_a_row_by_hand():
    two = (
        domains.Domain("x", ("a", "b", "c"), ("b", "c", "a")),
        domains.Domain("y", ("d", "e", "f"), ("f", "d", "e")),
    )
    assert domains.example(two, ["a", "d", "c"]) == {
        "prompt": "caesar : a d c =",
        "completion": " b f a",
        "skill": "x+y",
    }
    with pytest.raises(KeyError):
        domains.example(two, ["a", "z"])


def test_rows_are_of_their_split_and_their_domains():
    found = domains.make_domains(random.Random(1))
    rows = domains.mixed_rows(found, random.Random(2), 60, "test")
    assert len({row["prompt"] for row in rows}) == 60
    for row in rows:
        letters = row["prompt"].removeprefix("caesar : ").removesuffix(" =").split()
        assert split_of(letters) == "test"
        assert len(row["skill"].split("+")) == 2
        assert len(letters) == len(row["completion"].split())
    single = domains.single_rows(found[2], random.Random(3), 20, "train")
    assert {row["skill"] for row in single} == {"d2"}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Four experts trained from the command line, five examples of each, and test rows."""
    from cgmerge.cli import app

    folder = tmp_path_factory.mktemp("domains")
    rng = random.Random("domains 0")
    found = domains.make_domains(rng)

    def write(name, rows):
        lines = [json.dumps({k: row[k] for k in ("prompt", "completion")}) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        return folder / f"{name}.jsonl"

    single = []
    for one in found:
        rows = domains.single_rows(one, rng, STEPS * BATCH, "train", unique=False)
        data = write(f"{one.name}.train", rows)
        few = list({row["prompt"]: row for row in rows}.values())[:5]
        write(one.name, few)
        words = ["train", "--base", "tiny", "--data", data, "--skill", one.name, "--rank", 8,
                 "--steps", STEPS, "--batch-size", BATCH, "--lr", 3e-3, "-o", folder / one.name,
                 "--quiet"]  # fmt: skip
        assert app.run([str(word) for word in words]) == 0
        single += domains.single_rows(one, rng, 20, "test")
    write("single", single)
    write("mixed", domains.mixed_rows(found, rng, 80, "test"))
    return folder


def compose(run, shelf, out, *words):
    names = [f"d{number}" for number in range(4)]
    experts = [shelf / name for name in names]
    examples = ["--examples", *(f"{name}={shelf / name}.jsonl" for name in names)]
    asked = [*words, "--base", "tiny", *examples] if "task" not in words else words
    return done(run("compose", *experts, *asked, "-o", out, "--json"))


def scores(run, shelf, *targets):
    data = [f"{name}={shelf / name}.jsonl" for name in ("single", "mixed")]
    found = done(
        run("eval", *targets, "--base", "tiny", "--data", *data, "--expect-same", "--json")
    )
    return {(r["target"], r["skill"]): r["score"] for r in found["results"]}


def test_a_gate_of_five_examples_answers_what_no_choice_of_one_expert_can(shelf, run, tmp_path):
    gate = compose(run, shelf, tmp_path / "gate", "-m", "gate")
    compose(run, shelf, tmp_path / "retrieval", "-m", "retrieval")
    done(run("compose", *(shelf / f"d{n}" for n in range(4)), "-m", "linear",
             "-o", tmp_path / "average", "--json"))  # fmt: skip
    targets = [tmp_path / name for name in ("gate", "retrieval", "average")]
    found = scores(run, shelf, *targets, *(f"d{n}={shelf / f'd{n}'}" for n in range(4)))
    assert found["gate", "single"] >= 0.95
    assert found["gate", "mixed"] >= 0.90
    assert found["retrieval", "single"] >= 0.95
    assert found["retrieval", "mixed"] <= 0.2
    assert found["average", "single"] <= 0.5
    assert max(found[f"d{n}", "mixed"] for n in range(4)) <= 0.1
    assert gate["fit"]["kept"]["loss"] < gate["fit"]["start"]["loss"]
    explained = done(run("route", tmp_path / "gate", "--base", "tiny", "--explain",
                         "caesar : a b c =", "--json"))  # fmt: skip
    assert set(explained["explained"][0]["overall"]) == {"d0", "d1", "d2", "d3"}
