"""What the presets stand for, and which settings they refuse."""

import pytest

from cgmerge.errors import UsageError
from cgmerge.modules.learned.presets import AUTO, PRESETS, Learner, make_auto, make_learner

LEARNERS = [name for name in PRESETS if name != AUTO]


def test_the_presets_are_settings_of_one_learner():
    picked = {
        name: (one.granularity, one.constraint, one.objective, one.optimiser)
        for name in LEARNERS
        for one in [make_learner(name)]
    }
    assert picked == {
        "lorahub": ("model", "bounded", "loss", "scipy"),
        "atlas": ("module", "free", "loss", "adam"),
        "adamerging": ("layer", "bounded", "entropy", "adam"),
        "soups": ("module", "simplex", "loss", "adam"),
    }
    hub = make_learner("lorahub")
    assert (hub.low, hub.high, hub.l1, hub.evaluations) == (-1.5, 1.5, 0.05, 40)
    merging = make_learner("adamerging")
    assert (merging.low, merging.high, merging.start) == (0.0, 1.0, 0.3)


@pytest.mark.parametrize("name", LEARNERS)
def test_every_setting_that_a_page_lists_can_be_given(name):
    preset = PRESETS[name]
    for item in preset.params:
        value = preset.default(item)
        made = make_learner(name, {item.name: str(value)})
        assert getattr(made, item.name) == value


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("lorahub", {"steps": 5}, "makes no use of `steps`: that is for optimiser=adam"),
        ("atlas", {"evaluations": 5}, "optimiser=scipy"),
        ("atlas", {"high": 1}, "constraint=bounded"),
        ("soups", {"start": 1}, "objective=entropy"),
        ("atlas", {"lr": 0}, "must be in"),
        ("atlas", {"lr": "nan"}, "found nan"),
        ("atlas", {"steps": 0}, "must be in"),
        ("atlas", {"steps": 2.5}, "a whole number"),
        ("atlas", {"folds": 1}, "0 or at least 2"),
        ("atlas", {"granularity": "block"}, "one of model, layer, module"),
        ("atlas", {"l1": -1}, "must be in"),
        ("lorahub", {"low": 1}, "must be in"),
        ("lorahub", {"high": 0}, "must be in"),
        ("lorahub", {"scale": 1}, "no parameter `scale`"),
        ("lorahub", {"evaluatons": 1}, "did you mean `evaluations`?"),
    ],
)
def test_refusals(name, values, says):
    with pytest.raises(UsageError) as caught:
        make_learner(name, values)
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_a_setting_is_of_use_once_its_owner_is_given():
    made = make_learner("lorahub", {"optimiser": "adam", "steps": "7", "lr": "0.5"})
    assert made == make_learner("lorahub", {"optimiser": "adam", "steps": 7, "lr": 0.5})
    assert made.steps == 7
    assert isinstance(made, Learner)


def test_settings_of_a_choice():
    assert make_auto({"passes": "9"}).passes == 9
    with pytest.raises(UsageError, match="no parameter `lr`"):
        make_auto({"lr": 1})
    with pytest.raises(UsageError, match="must be in"):
        make_auto({"folds": 1})
