"""U32: what density, weight and normalize mean."""

import case_support as cases
import pytest
import support


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (20, ["(0.0, 1.0]", "found 20.0", "did you mean 0.2?", "a share, not a percentage"]),
        (100, ["did you mean 1?"]),
        (0, ["found 0.0"]),
        (-0.2, ["found -0.2"]),
        ("nan", ["found nan"]),
    ],
)
@pytest.mark.fault("F22")
def test_out_of_range_is_refused(run, experts, value, words):
    given = ["compose", experts / "E1", "-m", "ties", "-o", experts / "out", "--json"]
    cases.refused(run(*given, "--set", f"density={value}"), 2, "usage.parameter", *words)
    (experts / "r.yml").write_text(
        f"experts: [{experts / 'E1'}]\nmethod: ties\nparams: {{density: '{value}'}}\n"
    )
    words_again = ["compose", experts / "r.yml", "-o", experts / "out", "--json"]
    cases.refused(run(*words_again), 2, "usage.parameter", *words)
    assert not (experts / "out").exists()


def test_plain_words_in_the_plan_and_the_page(run, experts):
    given = ["compose", experts / "E1", experts / "E2=2", "--set", "density=0.3", "--dry-run"]
    code, _, err = run(*given, "-v")
    assert code == 0
    assert "ties(scale=1.0, density=0.3" in err
    assert "density=0.3: share of entries each expert keeps" in err
    assert "weight 2" in err
    code, out, _ = run("methods", "ties")
    assert code == 0
    assert "--set density=0.2, in (0.0, 1.0]" in out


def weighted(experts, *weights):
    deltas = [support.dense_deltas(experts / name) for name in ("E1", "E2")]
    return {p: weights[0] * deltas[0][p] + weights[1] * deltas[1][p] for p in deltas[0]}


@pytest.mark.parametrize(
    ("method", "refs", "weights"),
    [
        ("linear", ("E1", "E2"), (0.5, 0.5)),  # without weights: the mean
        ("linear", ("E1=1", "E2=1"), (1, 1)),  # with weights: as written
        ("task-arithmetic", ("E1", "E2"), (1, 1)),  # the sum
        ("task-arithmetic", ("E1=0.25", "E2"), (0.25, 1)),
    ],
)
def test_mean_or_sum_as_documented(run, experts, method, refs, weights):
    words = ["compose", *[experts / ref for ref in refs], "-m", method]
    found = cases.done(run(*words, "-o", experts / "out", "--json"))
    assert [entry["weight"] for entry in found["experts"]] == list(weights)
    expected = weighted(experts, *weights)
    assert support.relative(support.dense_deltas(experts / "out"), expected) < 1e-6


def test_normalized_weights(run, experts):
    words = ["compose", experts / "E1=1", experts / "E2=3", "-m", "linear"]
    cases.done(run(*words, "--set", "normalize=true", "-o", experts / "out", "--json"))
    expected = weighted(experts, 0.25, 0.75)
    assert support.relative(support.dense_deltas(experts / "out"), expected) < 1e-6
