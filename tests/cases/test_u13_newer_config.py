"""U13: a config that a newer library wrote."""

import case_support as cases
import pytest
import support


@pytest.mark.parametrize("value", [None, False, [], {}, ""])
@pytest.mark.fault("F25")
def test_unknown_field_without_a_value(run, experts, value):
    support.edit_config(experts / "E1", foo_config=value, peft_version="9.9.0")
    cases.done(run("compose", experts / "E1", "-o", experts / "out", "--json"))


@pytest.mark.parametrize("value", [{"k": 1}, True, 1, "x"])
@pytest.mark.fault("F25")
def test_unknown_field_with_a_value(run, experts, value):
    support.edit_config(experts / "E1", foo_config=value, peft_version="9.9.0")
    for words in (["inspect"], ["compose", "-o", experts / "out"]):
        error = cases.refused(
            run(*words, experts / "E1", "--json"),
            3,
            "incompatible.config_unknown_field",
            "unknown field 'foo_config'",
            "PEFT 9.9.0",
            "update cgmerge",
        )
        assert error["field"] == "foo_config"
    assert not (experts / "out").exists()


@pytest.mark.fault("F25")
def test_newer_record_names_both_schemas(run, experts):
    (experts / "r.json").write_text('{"schema": "cgmerge.composition/9", "experts": ["E1"]}')
    cases.refused(
        run("compose", experts / "r.json", "-o", experts / "out", "--json"),
        3,
        "incompatible.recipe_schema",
        "cgmerge.composition/9",
        "cgmerge.composition/1",
    )
