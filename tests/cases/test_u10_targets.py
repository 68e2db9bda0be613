"""U10: experts that touch different modules; unknown names."""

import case_support as cases
import support


def test_union_with_zero_for_absent(run, tmp_path):
    shapes = support.llama_shapes()
    support.make_expert(tmp_path / "q", support.pick(shapes, "q_proj"), seed=1)
    support.make_expert(tmp_path / "v", support.pick(shapes, "v_proj"), seed=2)
    words = ["compose", tmp_path / "q", tmp_path / "v", "-m", "task-arithmetic"]
    code, _, err = run(*words, "-o", tmp_path / "out")
    assert code == 0
    expected = {**support.dense_deltas(tmp_path / "q"), **support.dense_deltas(tmp_path / "v")}
    assert support.relative(support.dense_deltas(tmp_path / "out"), expected) < 1e-6
    # What every expert covers is part of the report.
    assert err.count("2 of 4 modules") == 2


def test_unknown_module_is_listed(run, experts, models, qv):
    support.make_expert(experts / "odd", {**qv, "model.layers.0.mlp.nope": (48, 32)}, seed=4)
    words = ["compose", experts / "E1", experts / "odd", "--base", models / "B"]
    for form in ("adapter", "model"):
        cases.refused(
            run(*words, "--as", form, "-o", experts / "out", "--json"),
            3,
            "incompatible.modules",
            "1 of 5 modules are not in",
            "model.layers.0.mlp.nope",
        )
        assert not (experts / "out").exists()
