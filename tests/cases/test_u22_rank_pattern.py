"""U22: adapters with rank_pattern that cannot be loaded again after a combination."""

import json
import warnings

import case_support as cases
import support


def test_composed_expert_loads_in_plain_peft(run, tmp_path, models, qv):
    for number in (1, 2):
        support.make_expert(tmp_path / f"e{number}", qv, seed=number, ranks={"v_proj": 2})
    words = ["compose", tmp_path / "e1", tmp_path / "e2", "-m", "task-arithmetic"]
    found = cases.done(run(*words, "-o", tmp_path / "out", "--json"))
    assert (found["rank"], found["truncation_error"]) == (8, 0.0)
    assert "rank_pattern" not in json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    cases.done(run(*words, "--base", models / "B", "--as", "model", "-o", tmp_path / "m", "--json"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # what PEFT says of keys it cannot place
        found = cases.effect(models / "B", adapter=tmp_path / "out")
    cases.same_effect(found, cases.effect(models / "B", merged=tmp_path / "m"))
    # And once more: the result is an expert like any other.
    words = ["compose", tmp_path / "out", tmp_path / "e1=-1", "-m", "task-arithmetic"]
    cases.done(run(*words, "-o", tmp_path / "again", "--json"))
    assert (
        support.relative(
            support.dense_deltas(tmp_path / "again"), support.dense_deltas(tmp_path / "e2")
        )
        < 1e-6
    )
