"""What `--overwrite` replaces: results, never files of the user, devices, or where one stands."""

import os
from pathlib import Path

import pytest

from cgmerge import fs
from cgmerge.errors import StorageError, UsageError
from cgmerge.outputs import is_ours


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def refused(out, code):
    """Both the check before the work and the writer refuse, and nothing changes."""
    before = sorted(str(path) for path in out.rglob("*")) if out.is_dir() else None
    with pytest.raises(UsageError) as caught:
        fs.check_target(out, overwrite=True)
    with pytest.raises(UsageError), fs.new_folder(out, overwrite=True):
        pass
    assert caught.value.code == f"usage.{code}"
    assert before is None or sorted(str(path) for path in out.rglob("*")) == before
    return caught.value


RESULT = ("adapter_config.json", "adapter_model.safetensors", "expert.json", "README.md")


def test_a_result_is_replaced(tmp_path):
    out = tmp_path / "out"
    write(out, *RESULT, "experts/a/adapter_config.json", "cgmerge-stats-layerwise.safetensors")
    write(out, ".cgmerge-stats.safetensors.cgmerge-tmp-00000000-1-ab")
    with fs.new_folder(out, overwrite=True) as stage:
        fs.write_bytes(stage / "README.md", b"new")
    assert [path.name for path in out.iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    "name",
    ["notes.txt", "data.jsonl", "experts/notes.txt", "experts/a/b/README.md", ".git/config",
     "README.md.bak", "checkpoint-5/adapter_config.json", "link"],
)  # fmt: skip
def test_one_file_of_the_user_saves_a_result(tmp_path, name):
    out = tmp_path / "out"
    write(out, *RESULT)
    if name == "link":
        (out / name).symlink_to(tmp_path)
    else:
        write(out, name)
    error = refused(out, "out_foreign")
    assert error.details["found"] == [name]
    assert name in error.message
    assert "move these away" in error.hint


def test_what_has_no_mark_is_no_result_and_five_are_named(tmp_path):
    out = tmp_path / "out"
    write(out, "config.json", "model.safetensors", *(f"{i}.py" for i in range(9)))
    error = refused(out, "out_foreign")
    assert "is no result" in error.message
    assert len(error.details["found"]) == 5
    assert "…" in error.message


def test_the_current_folder_those_above_and_home_are_never_replaced(tmp_path, monkeypatch):
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    write(tmp_path / "a", *RESULT)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    write(tmp_path / "home" / "me", *RESULT)
    (tmp_path / "home" / "link").symlink_to(here)
    places = (Path(), Path("../b"), Path(".."), tmp_path / "home" / "me", tmp_path / "home")
    for out in places:
        assert "never replaced" in refused(out, "out_foreign").message
    with pytest.raises(UsageError), fs.new_folder(here):  # empty, and still where we are
        pass
    with fs.new_folder(here / "below") as stage:
        fs.write_bytes(stage / "x", b"")


def test_names_of_results():
    for name in ("model-00001-of-00002.safetensors", "tokenizer.json", "adapters/x y/README.md"):
        assert is_ours(name)
    for name in ("pytorch_model.bin", "my.safetensors", "adapters/README.md", "tokenizer.json~"):
        assert not is_ours(name)


def test_only_files_are_replaced_by_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/null")):
        for call in (
            fs.check_file,
            lambda p, overwrite: fs.replace_file(p, b"", overwrite=overwrite),
        ):
            with pytest.raises(UsageError) as caught:
                call(path, overwrite=True)
            assert caught.value.code == "usage.out_is_special"
    assert not Path("/dev/null").is_file()
    with pytest.raises(UsageError) as caught:
        fs.check_file(tmp_path, overwrite=True)
    assert caught.value.code == "usage.out_is_folder"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_places_where_nothing_can_be_made_are_found_before_work(tmp_path):
    for check in (fs.check_target, fs.check_file):
        with pytest.raises(StorageError) as caught:
            check(Path("/proc/x/y"), overwrite=False)
        assert "free some space" not in caught.value.hint
        assert "--out" in caught.value.hint
        check(tmp_path / "new" / "x", overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_still_says_to_free_space(tmp_path, monkeypatch):
    def full(operation, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fs, "_step", full)
    with pytest.raises(StorageError) as caught:
        fs.replace_file(tmp_path / "x", b"")
    assert "free some space" in caught.value.hint
