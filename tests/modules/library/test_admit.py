"""What may enter a library, and what is said of it."""

import json
import shutil

import pytest
import support
import torch

from cgmerge import fs, strictjson
from cgmerge.errors import Damaged, NotFound, Unsafe, UsageError
from cgmerge.modules.card import BaseId, ExpertCard, write_card
from cgmerge.modules.compress.container import write_cge
from cgmerge.modules.library.admit import admit
from cgmerge.modules.library.page import expert_page, library_page, with_front
from cgmerge.tensorfile import file_sha256

SHAPES = {"m.q_proj": (6, 4), "m.v_proj": (2, 4)}


@pytest.fixture
def carded(tmp_path):
    """An expert as `train` leaves it: a card that lists its files, a page, scores, statistics."""
    folder = support.make_expert(tmp_path / "plain", SHAPES, rank=2)
    (folder / "README.md").write_text('---\nlicense: "mit"\n---\n\n# Sort\n')
    (folder / "notes.txt").write_text("listed by the card")
    card = ExpertCard(
        skill="sorting letters",
        base=BaseId(name="user/base", fingerprint="f" * 64),
        metrics={
            "loss": 0.25,
            "eval": {"exact_match": 0.5, "n": 40, "deep": {"x": 1}},
            "note": "a",
        },
    )
    with fs.new_folder(tmp_path / "sort") as stage:
        for path in folder.iterdir():
            shutil.copy(path, stage / path.name)
        write_card(stage, card)
    (tmp_path / "sort" / "cgmerge-stats.safetensors").write_bytes(b"x")
    (tmp_path / "sort" / "secret.txt").write_text("not the expert's")
    return tmp_path / "sort"


def test_what_a_card_says(carded):
    entry = admit(str(carded), licence="apache-2.0", tags=["a", "b"]).entry
    assert (entry.name, entry.skill, entry.kind) == ("sort", "sorting letters", "peft")
    assert (entry.base, entry.base_fingerprint) == ("some/base", "f" * 64)
    assert entry.scores == {"loss": 0.25, "eval.exact_match": 0.5, "eval.n": 40}
    assert (entry.license, entry.tags) == ("apache-2.0", ("a", "b"))
    assert (entry.rank, entry.parameters) == (2, 2 * (6 + 4) + 2 * (2 + 4))
    assert sorted(entry.files) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors", "expert.json",
        "notes.txt",
    ]  # fmt: skip
    for name, part in entry.files.items():
        assert part.sha256 == file_sha256(carded / name)


def test_the_delta_of_a_full_model(tmp_path):
    fields = {
        "base": {"id": "user/base", "fingerprint": "f" * 64},
        "peft": None,
        "method": {"mode": "lossless"},
        "license": "mit",
        "eval": [{"suite": "sort", "metric": "exact_match", "compressed": 0.75, "n": 4}],
    }
    write_cge(tmp_path / "tune.cge", [], {"m.weight": torch.ones(3, 2)}, fields)
    entry = admit(str(tmp_path / "tune.cge")).entry
    assert (entry.kind, entry.expert, entry.rank, entry.parameters) == ("full", None, None, 6)
    assert (entry.base, entry.license) == ("user/base", "mit")
    assert entry.scores == {"sort.exact_match": 0.75}
    assert list(entry.files) == ["expert.cge"]


def test_zeros_in_one_module_are_no_reason(tmp_path):
    """Some modules may be idle; an expert in which all are does nothing."""
    folder = support.make_expert(tmp_path / "x", SHAPES)

    def zero(*words):
        def change(tensors):
            hit = [n for n in tensors if all(word in n for word in words)]
            assert hit
            return {n: torch.zeros_like(t) if n in hit else t for n, t in tensors.items()}

        return change

    support.edit_tensors(folder, zero("q_proj"))
    admit(str(folder))
    support.edit_tensors(folder, zero("lora_B"))
    with pytest.raises(Damaged, match="changes nothing: in each of 2 modules"):
        admit(str(folder))


def test_links_and_lists_that_do_not_hold(carded):
    (carded / "notes.txt").write_text("changed")
    with pytest.raises(Damaged, match="not what its card says"):
        admit(str(carded))
    (carded / "notes.txt").unlink()
    with pytest.raises(Damaged, match=r"lacks notes\.txt"):
        admit(str(carded))
    (carded / "expert.json").unlink()
    (carded / "README.md").unlink()
    (carded / "README.md").symlink_to("/etc/hostname")
    with pytest.raises(Unsafe):
        admit(str(carded))
    with pytest.raises(NotFound):
        admit(str(carded.parent / "none"))


def test_the_name_comes_from_folder_or_file(carded):
    odd = carded.rename(carded.with_name("odd name!"))
    with pytest.raises(UsageError, match="odd name!"):
        admit(str(odd))
    assert admit(str(odd), name="fine").entry.name == "fine"


def front(page):
    """Parse the metadata as the hub does."""
    import yaml

    assert page.startswith("---\n")
    return yaml.safe_load(page[4:].partition("\n---\n")[0])


def test_the_page_of_an_expert(carded):
    entry = admit(str(carded), licence="mit", tags=["letters: all"]).entry
    page = expert_page(entry, "me/sort")
    assert front(page) == {
        "base_model": "some/base",
        "base_model_relation": "adapter",
        "license": "mit",
        "library_name": "peft",
        "tags": ["cgmerge", "letters: all", "lora"],
    }
    assert f"| size | {entry.size:,} bytes in 5 files |" in page
    assert "| eval.exact_match | 0.5 |" in page
    own = (carded / "README.md").read_text()
    completed = with_front(own, entry)
    assert front(completed) == {**front(page), "license": "mit"}
    assert completed.count("license") == 1
    assert completed.endswith("# Sort\n")
    assert front(with_front("# no metadata\n", entry)) == front(page)


def test_the_page_of_a_library_says_only_what_holds_for_all(carded, tmp_path):
    one = admit(str(carded), licence="mit").entry
    other = support.make_expert(
        tmp_path / "other", SHAPES, seed=5, base_model_name_or_path="/local/path|x"
    )
    two = admit(str(other)).entry
    page = library_page([two, one], "me/lib")
    assert front(page) == {
        "base_model": "some/base",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "tags": ["cgmerge", "lora"],
    }
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == ["other", "sort"]
    assert "/local/path\\|x" in rows[0]
    assert "| eval.exact_match 0.5, loss 0.25 |" in rows[1]
    assert json.loads(strictjson.canonical(two.facts()))["base"] == "/local/path|x"
