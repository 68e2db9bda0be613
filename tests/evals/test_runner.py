"""Several models side by side: what is scored, what is refused, and the base stays the base."""

from dataclasses import replace

import pytest
import tiny_model as tiny
import torch

from cgmerge.errors import Damaged, DataError, Incompatible, NotFound, UsageError
from cgmerge.evals import scoring
from cgmerge.evals.runner import PROBE, Settings, count_rows, evaluate_targets
from cgmerge.evals.suite import SkillSet, encode_questions, questions, read_skills
from cgmerge.evals.summary import summarise
from cgmerge.evals.targets import Target, open_targets
from cgmerge.modules.base import open_base
from cgmerge.modules.data import Example
from cgmerge.modules.expert import open_expert
from cgmerge.modules.loading import load_base

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A half-trained base, two adapters of it, one that does nothing, a merged model, data."""
    root = tmp_path_factory.mktemp("shelf")
    training = tiny.make_rows("copy", 300, seed=1, lengths=(2, 3)) + tiny.make_rows(
        "reverse", 300, seed=2, lengths=(2, 3)
    )
    model = tiny.train(tiny.make_model(3), tiny.make_tokenizer(), training, steps=60)
    tiny.save(root / "mine", model, tiny.make_tokenizer())
    tiny.make_adapter(root / "one", model, seed=1, size=0.05)
    tiny.make_adapter(root / "two", model, seed=2, size=0.5)
    tiny.make_adapter(root / "idle", model, seed=3, size=0.0)
    for skill in ("copy", "reverse"):
        rows = tiny.make_rows(skill, 24, seed=9, lengths=(1, 2, 3))
        tiny.write_jsonl(root / f"{skill}.jsonl", rows)
    return root


@pytest.fixture(scope="module")
def loaded(shelf):
    return load_base(open_base(str(shelf / "mine")), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def skills(shelf):
    return read_skills([str(shelf / "copy.jsonl"), str(shelf / "reverse.jsonl")])


def open_all(shelf, loaded, *names):
    return open_targets([str(shelf / name) for name in names], loaded.base)


def logliks(evaluation, target):
    return [item.loglik for item in evaluation.items if item.target == target]


def test_side_by_side(shelf, loaded, skills):
    done = []
    targets = open_all(shelf, loaded, "one", "two")
    found = evaluate_targets(
        loaded, targets, skills, progress=lambda count, *, note="": done.append((count, note))
    )
    record = found.record
    assert [t.name for t in record.targets] == ["base", "one", "two"]
    assert [t.kind for t in record.targets] == ["base", "expert", "expert"]
    assert record.targets[0].digest == loaded.base.fingerprint
    assert record.targets[1].digest == open_expert(str(shelf / "one")).digest
    assert len({t.digest for t in record.targets}) == 3
    assert [(r.target, r.skill) for r in record.results] == [
        (t, s) for t in ("base", "one", "two") for s in ("copy", "reverse")
    ]
    assert all(r.n == 24 and r.low <= r.score <= r.high for r in record.results)
    assert 0 < record.results[0].correct < 24, "the fixture must have right and wrong items"
    assert [(s.source, s.n) for s in record.skills] == [("copy.jsonl", 24), ("reverse.jsonl", 24)]
    assert record.base.name == "mine"
    assert record.warnings == ()
    assert len(found.items) == 3 * 48
    assert done[-1] == (count_rows(targets, skills, Settings()), "two")
    assert [c.skill for c in record.comparisons] == [None, None, "copy", "reverse"] * 1 + [
        "copy",
        "reverse",
    ]


def test_predictions_are_the_text_of_the_arg_max(loaded, skills):
    for item in evaluate_targets(loaded, [], skills).items:
        assert item.expected.endswith("<eos>")
        assert (item.prediction == item.expected) == item.correct


def test_adapters_are_really_there(shelf, loaded, skills):
    """Hooks give the log-likelihoods of a model whose weights are W + scaling·B·A."""
    found = evaluate_targets(loaded, open_all(shelf, loaded, "two"), skills)
    rows = encode_questions(questions(skills), loaded.tokenizer, None)
    whole = tiny.merged(loaded.model, shelf / "two")
    theirs = [one.loglik for one in scoring.score(whole, rows.encoded, batch_size=8)]
    assert logliks(found, "two") == pytest.approx(theirs, abs=1e-5)
    assert logliks(found, "base") != pytest.approx(theirs, abs=1e-2)


def test_the_base_is_the_same_before_and_after(shelf, loaded, skills):
    before = logliks(evaluate_targets(loaded, [], skills), "base")
    weights = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    evaluate_targets(loaded, open_all(shelf, loaded, "one", "two"), skills)
    assert logliks(evaluate_targets(loaded, [], skills), "base") == before
    assert all(torch.equal(value, weights[n]) for n, value in loaded.model.state_dict().items())


def test_same_evaluation_same_record(shelf, loaded, skills):
    targets = open_all(shelf, loaded, "one")
    first = evaluate_targets(loaded, targets, skills, Settings(seed=4))
    assert evaluate_targets(loaded, targets, skills, Settings(seed=4)) == first


def test_every_number_follows_from_the_items(shelf, loaded, skills):
    for metric in ("exact_match", "loglik"):
        found = evaluate_targets(
            loaded,
            open_all(shelf, loaded, "one", "two"),
            skills,
            Settings(metric=metric, generates=metric == "loglik", compare_to="one", seed=3),
        )
        record = found.record
        again = summarise(found.items, metric=metric, compare_to="one", seed=3)
        assert (again.results, again.means, again.comparisons) == (
            record.results,
            record.means,
            record.comparisons,
        )
        # And by hand, so that not only the function agrees with itself.
        for result in record.results:
            mine = [i for i in found.items if (i.target, i.skill) == (result.target, result.skill)]
            assert result.correct == sum(i.correct for i in mine)
            share = result.correct / len(mine)
            loglik = sum(i.loglik for i in mine) / len(mine)
            assert result.score == pytest.approx(share if metric == "exact_match" else loglik)
            assert result.low <= result.score <= result.high
        for mean in record.means:
            mine = [r.score for r in record.results if r.target == mean.target]
            assert mean.score == pytest.approx(sum(mine) / 2)
        assert {c.against for c in record.comparisons} == {"one"}
        overall = record.comparisons[0]
        field = {"exact_match": "correct", "loglik": "loglik"}[metric]
        pairs = list(
            zip(
                [getattr(i, field) for i in found.items if i.target == "base"],
                [getattr(i, field) for i in found.items if i.target == "one"],
                strict=True,
            )
        )
        assert (overall.target, overall.n) == ("base", 48)
        assert overall.wins == sum(a > b for a, b in pairs)
        assert overall.losses == sum(b > a for a, b in pairs)


def test_generation_is_recorded_and_agrees(shelf, loaded, skills):
    found = evaluate_targets(
        loaded, open_all(shelf, loaded, "one"), skills, Settings(generates=True, batch_size=5)
    )
    assert all(item.generated_correct == item.correct for item in found.items)
    assert any(item.correct for item in found.items)
    for result in found.record.results:
        assert result.agree == result.n
        assert result.generated_correct == result.correct
    assert all((i.generated == i.expected) == i.correct for i in found.items)
    assert found.record.settings.generate


def test_deltas_in_memory_are_a_target(shelf, loaded, skills):
    """A sweep of scales needs no files: scale 1 is the expert, scale 0 the base."""
    from cgmerge.merge.deltas import LowRank

    expert = open_expert(str(shelf / "two")).deltas(loaded.base)

    def scaled(factor):
        deltas = {path: LowRank(expert[path].a, expert[path].b * factor) for path in expert}
        return Target.of_deltas(f"x{factor:g}", deltas, digest=f"two*{factor:g}")

    found = evaluate_targets(
        loaded,
        [*open_all(shelf, loaded, "two"), scaled(1.0), scaled(0.5)],
        skills,
    )
    assert logliks(found, "x1") == logliks(found, "two")
    assert logliks(found, "x0.5") != logliks(found, "two")
    assert found.record.targets[2].kind == "deltas"
    with pytest.raises(Incompatible):
        evaluate_targets(loaded, [scaled(0.0)], skills)


@pytest.mark.parametrize("keeps_base", [True, False])
def test_an_adapter_without_effect_is_refused(shelf, loaded, skills, keeps_base):
    settings = Settings(keeps_base=keeps_base)
    idle = open_all(shelf, loaded, "idle")
    with pytest.raises(Incompatible) as caught:
        evaluate_targets(loaded, idle, skills, settings)
    assert caught.value.code == "incompatible.same_as_base"
    assert caught.value.exit_code == 3
    assert "--expect-same" in caught.value.hint
    assert str(48 if keeps_base else PROBE) in caught.value.message
    found = evaluate_targets(loaded, idle, skills, replace(settings, expects_same=True))
    assert [t.name for t in found.record.targets][-1] == "idle"
    # The real one passes the same guard, also without the base.
    evaluate_targets(loaded, open_all(shelf, loaded, "one"), skills, settings)


@pytest.mark.parametrize("keeps_base", [True, False])
def test_every_target_that_is_the_base_is_named_before_the_work(
    shelf, loaded, skills, monkeypatch, keeps_base
):
    opened = open_all(shelf, loaded, "one", "idle", "mine", "two")
    twin = Target.of_deltas("twin", opened[1].deltas, "d" * 64)
    done, generated = [], []
    monkeypatch.setattr(scoring, "generate", lambda *_, **__: generated.append(1))
    with pytest.raises(Incompatible) as caught:
        evaluate_targets(
            loaded,
            [*opened, twin],
            skills,
            Settings(keeps_base=keeps_base, generates=True),
            progress=lambda count, *, note="": done.append((count, note)),
        )
    count = 48 if keeps_base else PROBE
    assert caught.value.message == (
        f"targets idle, mine, twin score exactly as the base on all {count} items"
    )
    assert "leave them out, or accept them with --expect-same" in caught.value.hint
    assert caught.value.details["targets"] == ["idle", "mine", "twin"]
    assert caught.value.details["target"] == "idle"
    assert (done, generated) == ([], [])


def test_models_that_are_the_base_are_named_together(shelf, loaded, skills, monkeypatch):
    """They are found when their turn comes, and nothing is generated for what is lost."""
    generated = []
    plain = scoring.generate

    def spy(model, rows, **options):
        generated.append(len(rows))
        return plain(model, rows, **options)

    monkeypatch.setattr(scoring, "generate", spy)
    targets = [*open_all(shelf, loaded, "one"), *open_all(shelf, loaded, "mine")]
    targets += [replace(targets[1], name="again"), *open_all(shelf, loaded, "two")]
    with pytest.raises(Incompatible) as caught:
        evaluate_targets(loaded, targets, skills, Settings(generates=True))
    assert caught.value.details["targets"] == ["mine", "again"]
    assert generated == [48, 48]  # base and `one`
    with pytest.raises(Incompatible, match=f"mine, again score .* all {PROBE} items"):
        evaluate_targets(loaded, targets, skills, Settings(keeps_base=False))


def test_an_adapter_that_differs_late_is_no_base(shelf, loaded, skills, monkeypatch):
    """Equal on the probe, and on all items but one."""
    plain = scoring.score
    targets = open_all(shelf, loaded, "one")
    base = [item.loglik for item in evaluate_targets(loaded, [], skills).items]

    def almost(model, rows, **options):
        scores = plain(model, rows, **options)
        last = len(base) - 1
        return [one if i == last else replace(one, loglik=base[i]) for i, one in enumerate(scores)]

    monkeypatch.setattr(scoring, "score", almost)
    found = evaluate_targets(loaded, targets, skills)
    assert logliks(found, "one")[:-1] == base[:-1]
    assert logliks(found, "one")[-1] != base[-1]
    with pytest.raises(Incompatible, match=f"all {PROBE} items"):
        evaluate_targets(loaded, targets, skills, Settings(keeps_base=False))


def test_without_base_nothing_is_compared(shelf, loaded, skills):
    found = evaluate_targets(
        loaded, open_all(shelf, loaded, "one", "two"), skills, Settings(keeps_base=False)
    )
    assert [t.name for t in found.record.targets] == ["one", "two"]
    assert found.record.comparisons == ()
    assert {item.target for item in found.items} == {"one", "two"}


def test_full_models_are_loaded_one_by_one(shelf, loaded, skills, tmp_path):
    whole = tiny.merged(loaded.model, shelf / "two")
    tiny.save(tmp_path / "whole", whole, tiny.make_tokenizer())
    targets = open_targets([str(shelf / "two"), str(tmp_path / "whole")], loaded.base)
    found = evaluate_targets(loaded, targets, skills)
    assert found.record.targets[2].kind == "model"
    assert found.record.targets[2].tokenizer == "base"
    assert logliks(found, "whole") == pytest.approx(logliks(found, "two"), abs=1e-5)
    assert found.record.warnings == ()


def test_a_full_model_that_is_the_base_is_refused(shelf, loaded, skills):
    with pytest.raises(Incompatible) as caught:
        evaluate_targets(loaded, open_all(shelf, loaded, "mine"), skills)
    assert caught.value.code == "incompatible.same_as_base"


def test_a_full_model_uses_its_own_tokenizer_when_it_differs(shelf, loaded, skills, tmp_path):
    words = [*tiny.WORDS[:3], *reversed(tiny.WORDS[3:])]
    tiny.save(tmp_path / "other", tiny.make_model(8, words=words), tiny.make_tokenizer(words))
    found = evaluate_targets(loaded, open_targets([str(tmp_path / "other")], loaded.base), skills)
    assert found.record.targets[1].tokenizer == "own"
    assert any("own tokenizer" in warning for warning in found.record.warnings)
    base, other = found.items[:48], found.items[48:]
    assert [item.expected for item in base] == [item.expected for item in other]


def test_nan_names_the_target(shelf, loaded, skills, tmp_path):
    model = tiny.make_model(4)
    with torch.no_grad():
        model.lm_head.weight[:] = float("inf")
    tiny.save(tmp_path / "broken", model, tiny.make_tokenizer())
    targets = open_targets([str(tmp_path / "broken")], loaded.base)
    with pytest.raises(Damaged, match="target broken"):
        evaluate_targets(loaded, targets, skills)


def test_targets_are_checked_before_anything_is_scored(shelf, loaded, tmp_path):
    with pytest.raises(NotFound) as caught:
        open_all(shelf, loaded, "onee")
    assert "one" in caught.value.hint
    with pytest.raises(UsageError) as twice:
        open_targets([str(shelf / "one"), f"one={shelf / 'two'}"], loaded.base)
    assert "NAME=PATH" in twice.value.hint
    with pytest.raises(UsageError):
        open_targets([f"base={shelf / 'two'}"], loaded.base)
    assert open_targets([f"uno={shelf / 'one'}"], loaded.base)[0].name == "uno"
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound) as nothing:
        open_targets([str(tmp_path / "empty")], loaded.base)
    assert nothing.value.hint == "it is empty"
    (tmp_path / "odd=name").mkdir()
    with pytest.raises(NotFound, match="odd=name"):
        open_targets([str(tmp_path / "odd=name")], loaded.base)


@pytest.mark.parametrize("spec", ["=somewhere", "name="])
def test_half_a_name_is_refused(loaded, spec):
    with pytest.raises(UsageError) as caught:
        open_targets([spec], loaded.base)
    assert caught.value.code == "usage.name"


def test_unknown_reference_and_nothing_to_do(loaded, skills):
    with pytest.raises(UsageError) as caught:
        evaluate_targets(loaded, [], skills, Settings(compare_to="nobody"))
    assert "base" in caught.value.hint
    with pytest.raises(UsageError):
        evaluate_targets(loaded, [], skills, Settings(keeps_base=False))
    with pytest.raises(DataError):
        evaluate_targets(loaded, [], [])
    with pytest.raises(DataError, match="hollow"):
        evaluate_targets(loaded, [], [SkillSet("hollow", ())])
    with pytest.raises(UsageError, match="two skills"):
        evaluate_targets(loaded, [], [*skills, skills[0]])


@pytest.mark.fault("F40")
def test_long_prompts_are_cut_and_counted_long_targets_refused(loaded):
    long = Example("copy : " + "a " * 80 + "=", "a", row=1)
    fits = Example("copy : a =", "a", row=2)
    found = evaluate_targets(loaded, [], [SkillSet("mixed", (long, fits))])
    assert found.record.skills[0].cut == 1
    assert any("1 of 2 prompts were cut" in w for w in found.record.warnings)
    assert found.record.results[0].n == 2
    huge = Example("copy : a =", "a " * 80, row=7)
    with pytest.raises(DataError) as caught:
        evaluate_targets(loaded, [], [SkillSet("huge", (fits, huge))])
    assert caught.value.code == "data.too_long"
    assert "row 7" in caught.value.message
    exact = Example("copy : a =", " ".join(["a"] * (tiny.POSITIONS - 1)), row=3)
    with pytest.raises(DataError, match="alone fills"):
        evaluate_targets(loaded, [], [SkillSet("exact", (exact,))])


def test_text_without_prompt_gives_its_first_token(loaded):
    found = evaluate_targets(loaded, [], [SkillSet("text", (Example(None, "copy : a = a"),))])
    assert found.items[0].expected == ": a = a <eos>"
    assert any("no prompt" in warning for warning in found.record.warnings)


@pytest.mark.fault("F40")
def test_repetitions_are_counted_and_keep_ids_apart(loaded):
    rows = [
        Example("copy : a =", "a", row=1, extra={"id": 1}),
        Example("copy : a =", "a", row=2, extra={"id": 2}),
        Example("copy : a =", "b", row=3, extra={"id": 2}),
    ]
    found = evaluate_targets(loaded, [], [SkillSet("copy", tuple(rows))])
    info = found.record.skills[0]
    assert (info.n, info.repeated, info.contradicting, info.same_id) == (3, 1, 1, 1)
    assert len(found.record.warnings) == 3
    assert len({item.id for item in found.items}) == 3


def test_ids_depend_on_skill_prompt_and_target_only():
    def ids(*examples, skill="s"):
        return [q.id for q in questions([SkillSet(skill, examples)])]

    first = ids(Example("p", "t"), Example("q", "t"))
    assert ids(Example("q", "t", row=9), Example("p", "t")) == first[::-1]
    assert ids(Example("p", "t"), skill="other") != first[:1]
    assert ids(Example("pt", "")) != ids(Example("p", "t"))
    import hashlib

    assert first[0] == hashlib.sha256(b"s\0p\0t").hexdigest()[:16]


def test_skill_files(tmp_path):
    rows = [{**row, "skill": row["prompt"].split()[0]} for row in tiny.make_rows("copy", 3)]
    rows += [{**row, "skill": "reverse"} for row in tiny.make_rows("reverse", 4)]
    mixed = str(tiny.write_jsonl(tmp_path / "mixed.jsonl", rows))
    single = str(tiny.write_jsonl(tmp_path / "single.jsonl", rows[:3]))
    assert [(s.name, len(s.examples)) for s in read_skills([mixed])] == [
        ("copy", 3),
        ("reverse", 4),
    ]
    assert [(s.name, len(s.examples)) for s in read_skills([mixed], limit=2)] == [
        ("copy", 2),
        ("reverse", 2),
    ]
    assert [s.name for s in read_skills([single, f"all={mixed}"])] == ["single", "all"]
    assert len(read_skills([f"all={mixed}"])[0].examples) == 7
    with pytest.raises(UsageError) as caught:
        read_skills([mixed, f"copy={single}"])
    assert "NAME=FILE" in caught.value.hint
    partly = tiny.write_jsonl(
        tmp_path / "partly.jsonl", [*rows, *tiny.make_rows("copy", 1, seed=5)]
    )
    with pytest.raises(DataError) as missing:
        read_skills([str(partly)])
    assert missing.value.code == "data.skill"
    for specs, limit in (([], None), ([single], 0)):
        with pytest.raises(UsageError):
            read_skills(specs, limit=limit)
    with pytest.raises(NotFound) as near:
        read_skills([str(tmp_path / "singel.jsonl")])
    assert "single.jsonl" in near.value.hint


def test_another_base_is_refused_or_recorded(shelf, loaded, skills, tmp_path):
    from cgmerge.modules.card import BaseId, ExpertCard, write_card

    tiny.make_adapter(tmp_path / "guest", loaded.model, seed=6, size=0.1)
    write_card(
        tmp_path / "guest", ExpertCard(skill="x", base=BaseId(name="b", fingerprint="fp1:9"))
    )
    with pytest.raises(Incompatible) as caught:
        open_targets([str(tmp_path / "guest")], loaded.base)
    assert caught.value.code == "incompatible.base"
    forced = open_targets([str(tmp_path / "guest")], loaded.base, force_base=True)
    warnings = evaluate_targets(loaded, forced, skills).record.warnings
    assert len(warnings) == 1
    assert "fp1:9" in warnings[0]


def test_models_in_several_files_have_a_digest_over_all(shelf, loaded, tmp_path):
    whole = tiny.merged(loaded.model, shelf / "one")
    tiny.save(tmp_path / "single", whole, tiny.make_tokenizer())
    whole.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    tiny.make_tokenizer().save_pretrained(tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    single, sharded = open_targets(
        [str(tmp_path / "single"), str(tmp_path / "sharded")], loaded.base
    )
    assert len({single.digest, sharded.digest}) == 2
    assert len(sharded.digest) == 64


def test_ties_and_disagreement_are_said(shelf, loaded, skills, tmp_path, monkeypatch):
    flat = tiny.make_model(4)
    torch.nn.init.zeros_(flat.lm_head.weight)
    tiny.save(tmp_path / "flat", flat, tiny.make_tokenizer())
    targets = open_targets([str(tmp_path / "flat")], loaded.base)
    warnings = evaluate_targets(loaded, targets, skills).record.warnings
    assert len(warnings) == 1
    assert warnings[0].startswith("flat: on 48 of 48 items")
    monkeypatch.setattr(scoring, "generate", lambda _m, rows, **_: [(2,)] * len(rows))
    found = evaluate_targets(loaded, [], skills, Settings(generates=True))
    right = sum(item.correct for item in found.items)
    assert found.record.warnings == (
        f"base: generation and teacher forcing disagree on {right} of 48 items",
    )
    assert sum(result.agree for result in found.record.results) == 48 - right


def test_messages_are_items_too(loaded):
    from cgmerge.modules.data import Message

    asked = Example((Message("user", "copy : a ="),), "a")
    other = Example((Message("user", "copy : b ="),), "a")
    found = evaluate_targets(loaded, [], [SkillSet("chat", (asked, other))])
    assert len({item.id for item in found.items}) == 2
    assert found.items[0].expected == "a <eos>"


def test_records_name_the_base_without_folders(shelf, monkeypatch, skills):
    monkeypatch.chdir(shelf / "mine")
    here = load_base(open_base("."), device="cpu", dtype="float32")
    assert evaluate_targets(here, [], skills).record.base.name == "mine"
