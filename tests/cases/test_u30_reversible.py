"""U30: switching experts that cannot be undone."""

import case_support as cases
import pytest
import support


@pytest.mark.parametrize("form", ["adapter", "model"])
def test_composing_without_an_expert_is_composing_without_it(run, experts, models, form):
    given = ["--base", models / "B", "--as", form, "--json", "-o"]
    first = ["compose", experts / "E1"]
    cases.done(run(*first, *given, experts / "first"))
    cases.done(run(*first, experts / "E2", *given, experts / "out"))
    both = support.folder_bytes(experts / "out")
    cases.done(run(*first, *given, experts / "out", "--overwrite"))
    assert support.folder_bytes(experts / "out") == support.folder_bytes(experts / "first") != both
    cases.done(run("compose", experts / "E2", *first[1:], *given, experts / "out", "--overwrite"))
    assert support.folder_bytes(experts / "out") == both
