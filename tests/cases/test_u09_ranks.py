"""U09: experts of different rank."""

import case_support as cases
import pytest
import support


@pytest.mark.fault("F19")
def test_ties_of_rank_4_and_8(run, experts):
    words = ["compose", experts / "E1", experts / "E3", "-m", "ties", "--set", "density=0.5"]
    whole = cases.done(run(*words, "--rank", 32, "-o", experts / "whole", "--json"))
    assert whole["truncation_error"] < 1e-4
    found = cases.done(run(*words, "-o", experts / "out", "--json"))
    assert found["rank"] == 12
    exact = support.dense_deltas(experts / "whole")
    gap = support.relative(support.dense_deltas(experts / "out"), exact)
    assert 0.01 < gap < 0.9
    assert abs(found["truncation_error"] / gap - 1) < 1e-3
    for path, report in cases.record(experts / "out")["result"]["modules"].items():
        one = support.relative(
            {path: support.dense_deltas(experts / "out")[path]}, {path: exact[path]}
        )
        assert abs(report["error"] - one) < 1e-4


def test_sum_of_rank_4_and_8_is_exact(run, experts):
    words = ["compose", experts / "E1", experts / "E3", "-m", "task-arithmetic"]
    found = cases.done(run(*words, "-o", experts / "out", "--json"))
    assert (found["rank"], found["truncation_error"]) == (12, 0.0)
    deltas = [support.dense_deltas(experts / name) for name in ("E1", "E3")]
    expected = {
        path: sum(d[path] for d in deltas if path in d) for path in {**deltas[0], **deltas[1]}
    }
    assert support.relative(support.dense_deltas(experts / "out"), expected) < 1e-6


def test_a_rank_no_reader_takes_is_a_usage_error(run, experts):
    words = ["compose", experts / "E1", experts / "E3", "-o", experts / "out", "--json"]
    for rank in (1025, 99_999_999, 10**17):
        error = cases.refused(
            run(*words, "--rank", rank), 2, "usage.rank", f"{rank:,}", "1,024", "--as model"
        )
        assert (error["expected"], error["found"]) == (1024, rank)
    assert not (experts / "out").exists()
