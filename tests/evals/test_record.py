"""Records on disk: deterministic, tied to their items, and strict about what they read."""

import dataclasses
import hashlib
import json
import os
import signal

import pytest

from cgmerge import fs
from cgmerge.errors import Damaged, NotFound, StorageError, UsageError
from cgmerge.evals.record import (
    BaseInfo,
    Evaluation,
    Item,
    Record,
    RunSettings,
    SkillInfo,
    TargetInfo,
    check_out,
    items_path,
    load_record,
    write_record,
)
from cgmerge.evals.summary import summarise


def item(number, target, *, correct, skill="copy", **more):
    return Item(
        id=f"{number:016x}",
        skill=skill,
        target=target,
        correct=correct,
        loglik=-0.1 * number - (0.5 if target == "base" else 0.25),
        prediction="a\nb <eos>" if correct else "é\u2028 <eos>",
        expected="a\nb <eos>",
        **more,
    )


@pytest.fixture
def evaluation():
    # base: 2 of 4 on copy, 1 of 2 on sort; expert: 4 of 4, 1 of 2.
    rights = {"base": [1, 1, 0, 0, 1, 0], "expert": [1, 1, 1, 1, 0, 1]}
    items = tuple(
        item(n, target, correct=bool(right), skill="copy" if n < 4 else "sort")
        for target, row in rights.items()
        for n, right in enumerate(row)
    )
    numbers = summarise(items, compare_to="base", seed=5)
    record = Record(
        base=BaseInfo("tiny", "fp1:00"),
        settings=RunSettings(compare_to="base", seed=5),
        targets=(TargetInfo("base", "base", "fp1:00"), TargetInfo("expert", "expert", "ab")),
        skills=(SkillInfo("copy", 4, "copy.jsonl", "cd"), SkillInfo("sort", 2)),
        results=numbers.results,
        means=numbers.means,
        comparisons=numbers.comparisons,
        warnings=("copy: 1 of 4 items repeat an earlier one",),
        versions={"cgmerge": "0"},
    )
    return Evaluation(record, items)


def test_numbers_by_hand(evaluation):
    results = {(r.target, r.skill): r for r in evaluation.record.results}
    assert results["base", "copy"].score == 0.5
    assert results["expert", "copy"].score == 1.0
    assert results["expert", "copy"].low == pytest.approx(0.510109, abs=1e-6)  # Wilson 4 of 4
    assert results["base", "copy"].loglik == pytest.approx(-0.65)
    means = {m.target: m for m in evaluation.record.means}
    assert means["base"].score == 0.5
    assert means["expert"].score == 0.75
    assert (means["expert"].n, means["expert"].skills) == (6, 2)
    overall, copy, sort = evaluation.record.comparisons
    assert (overall.skill, overall.wins, overall.losses, overall.n) == (None, 3, 1, 6)
    assert overall.p == pytest.approx(0.625)  # 2 · (1 + 4) / 16
    assert overall.difference == 0.25
    assert (copy.skill, copy.wins, copy.losses, copy.p) == ("copy", 2, 0, 0.5)
    assert (sort.skill, sort.wins, sort.losses, sort.p) == ("sort", 1, 1, 1.0)
    assert copy.p_holm == 1.0  # two tests: 2 · 0.5


def test_summarise_refuses_pairs_that_are_none(evaluation):
    with pytest.raises(NotFound) as caught:
        summarise(evaluation.items, compare_to="nobody")
    assert "base, expert" in caught.value.hint
    with pytest.raises(UsageError) as other:
        summarise(evaluation.items[:-1], compare_to="base")
    assert other.value.code == "usage.paired"
    swapped = (*evaluation.items[:6], *evaluation.items[6:][::-1])
    with pytest.raises(UsageError):
        summarise(swapped, compare_to="base")


def test_what_is_written_is_read_back(evaluation, tmp_path):
    path = tmp_path / "new" / "record.json"
    written = write_record(path, evaluation)
    again = load_record(path)
    assert again.items == evaluation.items
    assert again.record == written
    assert dataclasses.replace(written, items=None) == evaluation.record
    assert written.items.n == 12
    assert items_path(path).name == written.items.file == "record.items.jsonl"
    numbers = summarise(again.items, compare_to="base", seed=5)
    assert numbers.results == again.record.results
    assert numbers.means == again.record.means
    assert numbers.comparisons == again.record.comparisons


def test_same_bytes_every_time(evaluation, tmp_path):
    for name in ("a", "b"):
        write_record(tmp_path / name / "r.json", evaluation)
    for name in ("r.json", "r.items.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert str(tmp_path) not in (tmp_path / "a" / "r.json").read_text()


def test_lines_hold_the_documented_keys(evaluation, tmp_path):
    generated = item(0, "base", correct=True, generated="a", generated_correct=False)
    content = dataclasses.replace(evaluation, items=(*evaluation.items, generated))
    write_record(tmp_path / "r.json", content)
    lines = (tmp_path / "r.items.jsonl").read_bytes().decode().split("\n")
    keys = {"id", "skill", "target", "correct", "loglik", "prediction", "expected", "tied"}
    assert set(json.loads(lines[0])) == keys
    assert set(json.loads(lines[12])) == keys | {"generated", "generated_correct"}
    assert lines[13:] == [""]


def test_existing_files_are_kept(evaluation, tmp_path):
    path = tmp_path / "r.json"
    write_record(path, evaluation)
    for keep in (path, items_path(path)):
        other = items_path(path) if keep == path else path
        held = other.read_bytes()
        other.unlink()
        with pytest.raises(UsageError) as caught:
            write_record(path, evaluation)
        assert caught.value.code == "usage.out_exists"
        assert "--overwrite" in caught.value.hint
        other.write_bytes(held)
    write_record(path, evaluation, overwrite=True)
    assert load_record(path).items == evaluation.items


def test_outputs_that_cannot_be(tmp_path):
    data = tmp_path / "data.items.jsonl"
    data.write_text("{}\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.json").symlink_to(data)
    for path, code in (("folder", "out_is_folder"), ("data.json", "out_is_input")):
        with pytest.raises(UsageError) as caught:
            check_out(tmp_path / path, overwrite=True, inputs=[data])
        assert caught.value.code == f"usage.{code}"
    with pytest.raises(UsageError):
        check_out(tmp_path / "link.json", overwrite=True, inputs=[data])
    with pytest.raises(UsageError):
        check_out(data / "below" / "r.json", overwrite=True)
    check_out(tmp_path / "new" / "r.json", overwrite=False)
    assert not (tmp_path / "new").exists()


def test_other_items_are_noticed(evaluation, tmp_path):
    path = tmp_path / "r.json"
    write_record(path, evaluation)
    beside = items_path(path)
    good = beside.read_bytes()
    for bad in (good.replace(b"true", b"false", 1), good[:-1], good + good[:80], b""):
        beside.write_bytes(bad)
        with pytest.raises(Damaged) as caught:
            load_record(path)
        assert caught.value.code == "damaged.items"
        assert caught.value.details["expected"] != caught.value.details["found"]
    beside.unlink()
    with pytest.raises(NotFound, match=r"r\.items\.jsonl"):
        load_record(path)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "cgmerge.record/2"},
        {"surprise": 1},
        {"results": "many"},
        {"targets": [{"name": "x", "kind": "friend", "digest": ""}]},
        {"skills": [{"name": "x", "n": "4"}]},
        {"base": None},
    ],
)
def test_records_that_are_none(evaluation, tmp_path, change):
    path = tmp_path / "r.json"
    write_record(path, evaluation)
    content = json.loads(path.read_text()) | change
    path.write_text(json.dumps(content))
    with pytest.raises(Damaged) as caught:
        load_record(path)
    assert caught.value.code == "damaged.record"
    assert "r.json" in caught.value.message


def test_items_that_are_none(evaluation, tmp_path):
    path = tmp_path / "r.json"
    write_record(path, evaluation)
    for bad in (b'{"id": 1}\n', b"nonsense\n", b'{"loglik": NaN}\n'):
        items_path(path).write_bytes(bad)
        content = json.loads(path.read_text())
        content["items"]["sha256"] = hashlib.sha256(bad).hexdigest()
        path.write_text(json.dumps(content))
        with pytest.raises(Damaged):
            load_record(path)
    for bad in (b"not json", b"[]", b'{"schema": NaN}'):
        path.write_bytes(bad)
        with pytest.raises(Damaged):
            load_record(path)
    with pytest.raises(NotFound):
        load_record(tmp_path / "absent.json")


STEPS = 7  # three for the waiting items, three for the record, one to name the items


def part(evaluation, count):
    return dataclasses.replace(evaluation, items=evaluation.items[:count])


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.fault("F26")
def test_a_write_that_fails_leaves_the_old_or_the_new(evaluation, tmp_path, monkeypatch, first):
    """After an error at any step: one whole evaluation, and no third file."""
    outcomes = []
    for k in range(STEPS + 1):
        path = tmp_path / str(k) / "r.json"
        if first:
            path.parent.mkdir()
        else:
            write_record(path, part(evaluation, 6))
        count = iter(range(100))

        def fail(operation, _path, k=k, count=count):
            if next(count) == k:
                raise OSError(28, f"no space at {operation}")

        monkeypatch.setattr(fs, "_step", fail)
        if k < STEPS:
            with pytest.raises(StorageError):
                write_record(path, evaluation, overwrite=not first)
        else:
            write_record(path, evaluation, overwrite=not first)
        monkeypatch.undo()
        if first and not path.exists():
            outcomes.append("none")
            assert names(path.parent) == []
        else:
            outcomes.append({6: "old", 12: "new"}[len(load_record(path).items)])
            assert names(path.parent) == ["r.items.jsonl", "r.json"]
    # The record's own rename, the sixth step, decides.
    assert outcomes == ["none" if first else "old"] * 6 + ["new"] * 2


def killed(path, evaluation, k):
    """Write in a child that dies at its k-th step; say whether it got to the end."""
    pid = os.fork()
    if pid == 0:
        count = iter(range(100))

        def die(operation, _path):
            if next(count) == k:
                os.kill(os.getpid(), signal.SIGKILL)

        fs._step = die
        write_record(path, evaluation, overwrite=True)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.fault("F28")
def test_writers_killed_one_after_the_other_at_any_step(evaluation, tmp_path):
    """Old: 6 items; first killed writer: 8; second: 10; the last may end: 12."""
    seen = set()
    for k in range(STEPS + 1):
        for j in range(STEPS + 2):
            path = tmp_path / f"{k}-{j}" / "r.json"
            write_record(path, part(evaluation, 6))
            ended = killed(path, part(evaluation, 8), k)
            between = len(load_record(path).items)
            assert between == (8 if ended or k == 6 else 6)
            last = killed(path, part(evaluation, 10), j)
            after = len(load_record(path).items)
            assert after == 10 if last else after in (between, 10)
            seen.add((between, after))
            write_record(path, evaluation, overwrite=True)
            assert len(load_record(path).items) == 12
            assert names(path.parent) == ["r.items.jsonl", "r.json"]
    assert seen == {(6, 6), (6, 10), (8, 8), (8, 10)}


def test_a_first_writer_killed_at_any_step(evaluation, tmp_path):
    for k in range(STEPS + 1):
        path = tmp_path / str(k) / "r.json"
        path.parent.mkdir()
        killed(path, evaluation, k)
        if path.exists():
            assert load_record(path).items == evaluation.items
        else:
            write_record(path, evaluation)  # what is left does not ask for --overwrite
            assert names(path.parent) == ["r.items.jsonl", "r.json"]


def test_waiting_items_of_another_record_are_no_excuse(evaluation, tmp_path):
    path = tmp_path / "r.json"
    write_record(path, evaluation)
    good = items_path(path).read_bytes()
    items_path(path).write_bytes(b"")
    (tmp_path / "r.items.next").write_bytes(good[:-1])
    with pytest.raises(Damaged) as caught:
        load_record(path)
    assert caught.value.code == "damaged.items"
    assert caught.value.details["found"] == hashlib.sha256(b"").hexdigest()
    (tmp_path / "r.items.next").write_bytes(good)
    assert load_record(path).items == evaluation.items


def test_a_record_of_a_long_name(evaluation, tmp_path):
    path = tmp_path / ("🦙" * 60 + ".json")  # with `.items.jsonl`: 252 of 255 bytes
    for count in (6, 12):
        write_record(path, part(evaluation, count), overwrite=True)
        assert len(load_record(path).items) == count
