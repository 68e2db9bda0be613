"""U11: alpha and rank lost or applied wrongly."""

import case_support as cases
import pytest
import support


@pytest.mark.parametrize(
    ("rank", "alpha", "rslora", "scaling"), [(4, 8, False, 2), (4, 4, False, 1), (16, 16, True, 4)]
)
@pytest.mark.fault("F19")
def test_same_effect_in_plain_peft(run, tmp_path, models, qv, rank, alpha, rslora, scaling):
    folder = tmp_path / "e"
    support.make_expert(folder, qv, rank=rank, alpha=alpha, use_rslora=rslora)
    shown = cases.done(run("inspect", folder, "--json"))
    assert {module["scaling"] for module in shown["modules"].values()} == {scaling}
    cases.done(run("compose", folder, "-m", "linear", "-o", tmp_path / "out", "--json"))
    cases.same_effect(
        cases.effect(models / "B", adapter=tmp_path / "out"),
        cases.effect(models / "B", adapter=folder),
    )
    again = cases.done(run("inspect", tmp_path / "out", "--json"))
    assert {module["scaling"] for module in again["modules"].values()} == {1.0}
    assert abs(again["norm"] / shown["norm"] - 1) < 1e-6
