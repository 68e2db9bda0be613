"""U07: a weighted combination that is not the weighted sum."""

import case_support as cases
import pytest
import support


def total(experts, *weights):
    names = ("E1", "E2")
    deltas = [support.dense_deltas(experts / name) for name in names]
    return {
        path: sum(w * d[path] for w, d in zip(weights, deltas, strict=True)) for path in deltas[0]
    }


@pytest.mark.parametrize("weights", [(1, 1), (0.3, -0.7), (1e-3, 10)])
def test_sum_of_deltas(run, experts, weights):
    refs = [f"{experts / name}={w}" for name, w in zip(("E1", "E2"), weights, strict=True)]
    words = ["compose", *refs, "-m", "task-arithmetic", "-o", experts / "out", "--json"]
    found = cases.done(run(*words))
    expected = total(experts, *weights)
    assert support.relative(support.dense_deltas(experts / "out"), expected) < 1e-6
    assert (found["rank"], found["truncation_error"]) == (8, 0.0)
    assert [entry["weight"] for entry in found["experts"]] == list(weights)


def test_effect_of_the_sum_in_plain_peft(run, experts, models):
    words = ["compose", experts / "E1", experts / "E2", "-m", "task-arithmetic", "--json"]
    cases.done(run(*words, "-o", experts / "adapter"))
    cases.done(run(*words, "--base", models / "B", "--as", "model", "-o", experts / "model"))
    cases.same_effect(
        cases.effect(models / "B", adapter=experts / "adapter"),
        cases.effect(models / "B", merged=experts / "model"),
    )


def test_truncation_is_printed_with_its_true_error(run, experts):
    words = ["compose", experts / "E1", experts / "E2", "-m", "task-arithmetic", "--rank", 4]
    found = cases.done(run(*words, "-o", experts / "out", "--json"))
    gap = support.relative(support.dense_deltas(experts / "out"), total(experts, 1, 1))
    assert 0.1 < gap < 0.9
    assert abs(found["truncation_error"] / gap - 1) < 1e-4
    _, _, err = run(*words, "-o", experts / "again")
    assert f"{gap:.2%}"[:-2] in err
    assert "to rank 4" in err
    assert support.folder_bytes(experts / "again") == support.folder_bytes(experts / "out")
