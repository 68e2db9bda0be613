"""Before the first step: settings, recipes of several skills, and the plan of a run."""

import json
import math
from pathlib import Path

import pytest
import torch
import train_support as support
from transformers import GPT2Config, GPT2LMHeadModel

from cgmerge.errors import Damaged, DataError, Incompatible, NotFound, UsageError
from cgmerge.modules.data import Encoded
from cgmerge.modules.training import defaults
from cgmerge.modules.training import plan as planning
from cgmerge.modules.training.checkpoints import WorkFolder
from cgmerge.modules.training.defaults import default_lr
from cgmerge.modules.training.plan import make_plan
from cgmerge.modules.training.recipe import read_recipe
from cgmerge.modules.training.settings import TrainSettings
from cgmerge.modules.training.skeleton import build_empty, find_targets


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return support.make_base(tmp_path_factory.mktemp("plan") / "base")


@pytest.fixture
def data(tmp_path):
    return support.write_rows(tmp_path / "rows.jsonl", support.make_rows())


def _settings(**changes):
    return TrainSettings(
        **{"base": "b", "data": (Path("d"),), "skill": "s", "out": Path("o")} | changes
    )


class TestSettings:
    @pytest.mark.parametrize(
        "change",
        [
            {"rank": 0},
            {"rank": 1025},
            {"alpha": 0},
            {"lr": 0.0},
            {"lr": math.nan},
            {"lr": math.inf},
            {"steps": 0},
            {"epochs": -1.0},
            {"batch_size": 0},
            {"max_length": 1},
            {"dropout": 1.0},
            {"seed": -1},
            {"weight_decay": -0.1},
            {"checkpoint_steps": 0},
        ],
    )
    def test_ranges(self, change):
        (name, value), *_ = change.items()
        with pytest.raises(UsageError, match=f"{name} must lie in") as error:
            _settings(**change)
        assert error.value.code == f"usage.{name}"
        assert error.value.details["found"] is value

    @pytest.mark.parametrize("skill", ["", " x", "a/b", "..", "-x", "a\nb", "x" * 101])
    def test_skill_names(self, skill):
        with pytest.raises(UsageError, match="cannot name a skill"):
            _settings(skill=skill)

    def test_contradictions(self):
        with pytest.raises(UsageError, match="contradict"):
            _settings(steps=3, epochs=1.0)
        with pytest.raises(UsageError, match="schedule"):
            _settings(schedule="sawtooth")
        with pytest.raises(UsageError, match="empty name"):
            _settings(target_modules=("q_proj", ""))
        with pytest.raises(UsageError, match="no training data"):
            _settings(data=())


def _recipe(tmp_path, text):
    path = tmp_path / "skills.yml"
    path.write_text(text)
    return path


class TestRecipe:
    def test_shared_own_and_overrides(self, tmp_path):
        path = _recipe(
            tmp_path,
            """
            base: tiny
            rank: 8
            lr: 1e-4
            out: experts
            skills:
              reverse: reverse.jsonl
              sort: {data: [a.jsonl, b.jsonl], rank: 4, out: elsewhere}
            """,
        )
        first, second = read_recipe(path, {"steps": 7, "lr": 1e-3})
        assert (first.skill, first.rank, first.steps, first.lr) == ("reverse", 8, 7, 1e-3)
        assert first.data == (tmp_path / "reverse.jsonl",)
        assert first.out == tmp_path / "experts" / "reverse"
        assert (second.rank, second.out) == (4, tmp_path / "elsewhere")
        assert second.data == (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
        assert read_recipe(path, {})[0].lr == 1e-4

    def test_paths_are_relative_to_the_recipe(self, tmp_path, monkeypatch):
        """From every folder; what the current folder has under that name does not count."""
        (tmp_path / "base").mkdir()
        (tmp_path / "place").mkdir()
        _recipe(
            tmp_path / "place",
            "base: base\nout: ../out\neval_data: ~/t.jsonl\nskills: {a: a.jsonl, b: /d/b.jsonl}\n",
        )
        monkeypatch.setenv("HOME", "/home/someone")
        for folder, ref in ((tmp_path, "place/skills.yml"), (tmp_path / "place", "skills.yml")):
            monkeypatch.chdir(folder)
            first, second = read_recipe(Path(ref), {})
            beside = Path(ref).parent
            assert first.base == str(beside / "base")
            assert (first.data, second.data) == ((beside / "a.jsonl",), (Path("/d/b.jsonl"),))
            assert first.out == beside / ".." / "out" / "a"
            assert first.eval_data == (Path("/home/someone/t.jsonl"),)

    @pytest.mark.parametrize("name", ["tiny", "smollm2-135m", "hf://user/repo@main"])
    def test_names_that_are_no_paths_stay(self, tmp_path, name):
        (tmp_path / "tiny").mkdir()
        path = _recipe(tmp_path, f"base: {name}\nout: tiny\nskills: {{a: tiny}}\n")
        (found,) = read_recipe(path, {})
        assert (found.base, found.out) == (name, tmp_path / "tiny" / "a")
        assert found.data == (tmp_path / "tiny",)

    def test_the_command_line_is_relative_to_the_current_folder(self, tmp_path):
        path = _recipe(tmp_path, "base: base\nout: o\nskills: {a: d}\n")
        (found,) = read_recipe(path, {"base": "mine", "out": Path("here")})
        assert (found.base, found.out) == ("mine", Path("here/a"))

    def test_list_form_and_names_of_others(self, tmp_path):
        path = _recipe(
            tmp_path,
            """
            base_model: base
            lora_r: 8
            lora_alpha: 16
            lora_dropout: 0.05
            lora_target_modules: [q_proj, v_proj]
            sequence_len: 128
            micro_batch_size: 4
            gradient_accumulation_steps: 2
            num_epochs: 2
            learning_rate: 0.0002
            lr_scheduler: cosine
            warmup_steps: 5
            output_dir: out
            load_in_4bit: true
            skills:
              - {skill: a, datasets: [{path: a.jsonl}]}
              - {skill: b, data: b.jsonl}
            """,
        )
        (tmp_path / "base").mkdir()
        first, _ = read_recipe(path, {})
        assert first.base == str(tmp_path / "base")
        assert (first.rank, first.alpha, first.dropout) == (8, 16, 0.05)
        assert first.target_modules == ("q_proj", "v_proj")
        assert (first.max_length, first.batch_size, first.accumulate) == (128, 8, 2)
        assert (first.epochs, first.lr, first.schedule, first.warmup) == (2.0, 0.0002, "cosine", 5)
        assert first.load_in_4bit is True
        assert first.data == (tmp_path / "a.jsonl",)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("rnak: 3\nskills: {a: d}", "unknown key 'rnak'"),
            ("skills: {a: {data: d, lear_rate: 3}}", "skill 'a': unknown key 'lear_rate'"),
            ("rank: 3\nr: 4\nskills: {a: d}", "'r' gives rank a second time"),
            ("rank: 3\nrank: 4\nskills: {a: d}", "'rank' stands twice"),
            ("rank: high\nskills: {a: d}", "rank must be a whole number, found 'high'"),
            ("rank: true\nskills: {a: d}", "rank must be a whole number"),
            ("lr: fast\nskills: {a: d}", "lr must be a number"),
            ("lr: false\nskills: {a: d}", "lr must be a number"),
            ("load_in_4bit: 1\nskills: {a: d}", "must be true or false"),
            ("base: 3\nskills: {a: d}", "base must be text"),
            ("skills: {a: {data: 3}}", "data must be a name"),
            ("skills: {a: {data: [{path: x, split: y}]}}", "data must be a name"),
            ("rank: 3", "holds no skills"),
            ("skills: []", "holds no skills"),
            ("skills: [{data: d}]", "no name"),
            ("skills: {a: {skills: {}}}", "holds skills"),
            ("skills: [{skill: 1, data: d}]", "no name"),
            ("skills: [{skill: a, data: d}, {skill: a, data: e}]", "'a' twice"),
            ("skills: {a: d}", "names no base"),
            ("base: b\nout: o\nskills: {a: {rank: 2}}", "no training data"),
            ("batch_size: 4\nmicro_batch_size: 2\nbase: b\nskills: {a: d}", "both given"),
            ("[1, 2]", "must hold a mapping, found list"),
            ("a: [", "is not valid YAML"),
            ("a: &x 1\nb: *x", "aliases are not read"),
            ("base: !!python/object/apply:os.getcwd []", "tags are not read"),
            ("load_in_4bit: no\nskills: {a: d}", "must be true or false, found 'no'"),
            ("steps: 1_000\nskills: {a: d}", "steps must be a whole number, found '1_000'"),
            ("micro_batch_size: 1" + "0" * 200 + "\nskills: {a: d}", "must be a whole number"),
            ("lr: '1e-4'\nskills: {a: d}", "lr must be a number, found '1e-4'"),
            ("skills: {a: d}\n" + "#" * 131_072, "131,087 bytes; the limit for YAML is 131,072"),
        ],
    )
    def test_refusals(self, tmp_path, text, message):
        with pytest.raises(UsageError, match=message) as error:
            read_recipe(_recipe(tmp_path, text), {"out": Path("o")})
        assert error.value.exit_code == 2

    def test_words_and_numbers_as_in_compose_recipes(self, tmp_path):
        text = "base: no\nlr: 1e-4\nweight_decay: .5\nskills: {on: d, 7: e}\nout: o\n"
        first, second = read_recipe(_recipe(tmp_path, text), {})
        assert (first.base, first.lr) == (str(tmp_path / "no"), 1e-4)
        assert first.weight_decay == 0.5
        assert (first.skill, second.skill) == ("on", "7")

    def test_json_says_the_same_as_yaml(self, tmp_path):
        path = tmp_path / "skills.json"
        content = {"base": "tiny", "lr": 1e-4, "r": 8, "out": "o", "skills": {"a": "a.jsonl"}}
        path.write_text(json.dumps(content))
        yaml = _recipe(tmp_path, "base: tiny\nlr: 1e-4\nr: 8\nout: o\nskills: {a: a.jsonl}\n")
        assert read_recipe(path, {}) == read_recipe(yaml, {})
        assert read_recipe(path, {})[0].lr == 1e-4

    @pytest.mark.parametrize(
        ("text", "message", "first"),
        [
            ('{"rank": 1, "rank": 2}', "holds the key 'rank' twice", "keep one of the two; "),
            ('[{"prompt": "a", "completion": "b"}]', "must hold an object, found an array", ""),
            (
                '{"prompt": "a"}\n{"prompt": "b"}',
                "not valid JSON: Extra data",
                "it may be cut short, or edited by hand: correct it there, or get it again; ",
            ),
            ('{"lr": NaN}', "holds NaN", "write a finite number, or null where there is none; "),
        ],
    )
    def test_json_that_is_none(self, tmp_path, text, message, first):
        path = tmp_path / "rows.json"
        path.write_text(text)
        with pytest.raises(Damaged, match=message) as error:
            read_recipe(path, {})
        assert error.value.hint == f"{first}for a data file write --data {path}"

    def test_hint_for_a_near_key(self, tmp_path):
        with pytest.raises(UsageError) as error:
            read_recipe(_recipe(tmp_path, "learning_rte: 3\nskills: {a: d}"), {})
        assert error.value.hint == "did you mean `learning_rate`?"

    def test_no_output_folder_and_no_file(self, tmp_path):
        with pytest.raises(UsageError, match="no output folder"):
            read_recipe(_recipe(tmp_path, "base: b\nskills: {a: d}"), {})
        with pytest.raises(NotFound):
            read_recipe(tmp_path / "none.yml", {})
        with pytest.raises(UsageError, match="is no recipe") as error:
            read_recipe(tmp_path / "rows.jsonl", {})
        assert "--data" in error.value.hint


class TestPlan:
    def test_defaults_for_a_small_base(self, base, data, tmp_path):
        plan = make_plan(
            TrainSettings(base=str(base), data=(data,), skill="s", out=tmp_path / "o", device="cpu")
        )
        chosen = plan.chosen
        assert (chosen.alpha, chosen.steps, chosen.lr, chosen.batch_size) == (32, 100, 1e-3, 64)
        assert chosen.warmup == 5
        assert set(chosen.reasons) == {"steps", "lr", "batch_size"}
        assert len(plan.targets) == 14
        assert "lm_head" not in plan.targets
        assert plan.trainable == 16 * sum(out + width for out, width in plan.targets.values())
        assert plan.example == "reverse : d h = ⟦h d <eos>⟧" or plan.example.endswith("<eos>⟧")
        assert (plan.device, plan.dtype, plan.how) == ("cpu", "float32", None)
        assert plan.base_bytes == 4 * plan.total

    def test_epochs_and_accumulation(self, base, data, tmp_path):
        plan = make_plan(
            support.settings(base, data, tmp_path / "o", steps=None, epochs=2.5, accumulate=2)
        )
        assert plan.chosen.steps == math.ceil(2.5 * 5)
        with pytest.raises(UsageError, match="not a multiple of 3"):
            make_plan(support.settings(base, data, tmp_path / "o", accumulate=3))

    @pytest.mark.parametrize(
        ("width", "lr"), [(32, 1e-3), (576, 1e-3), (2000, 5e-4), (4096, 2.9e-4), (8192, 1.7e-4)]
    )
    def test_learning_rate_falls_with_width(self, width, lr):
        assert default_lr(width) == lr

    @pytest.mark.parametrize(
        ("lengths", "parts", "batch"),
        [([20] * 9, 1, 64), ([256] * 9, 1, 16), ([20] * 99 + [8000], 1, 2), ([20] * 9, 3, 66)],
    )
    def test_batch_follows_the_length_of_rows(self, lengths, parts, batch):
        rows = [Encoded([0] * (length - 1), [1]) for length in lengths]
        assert defaults._batch_size(rows, parts) == batch

    def test_identity_ignores_places_and_follows_content(self, base, data, tmp_path):
        first = make_plan(support.settings(base, data, tmp_path / "a")).identity
        same = make_plan(
            support.settings(base, data, tmp_path / "b", checkpoint_steps=3, alpha=8)
        ).identity
        assert first == same == json.loads(json.dumps(first))
        other = make_plan(support.settings(base, data, tmp_path / "a", seed=1)).identity
        assert {name for name in first if first[name] != other[name]} == {"seed"}
        assert str(tmp_path) not in json.dumps(first)
        data.write_text(data.read_text() + "\n")  # the same rows in other bytes
        moved = make_plan(support.settings(base, data, tmp_path / "a")).identity
        assert {name for name in first if first[name] != moved[name]} == {"data"}
        twin = support.make_base(tmp_path / "twin", seed=1)
        other = make_plan(support.settings(twin, data, tmp_path / "a")).identity
        assert {name for name in moved if moved[name] != other[name]} == {"base"}

    def test_warnings(self, base, tmp_path):
        rows = support.make_rows(20)
        rows[5] = {"prompt": "copy : zebra =", "completion": "a"}
        rows[6] = rows[7]
        data = support.write_rows(tmp_path / "d.jsonl", rows)
        test = support.write_rows(tmp_path / "t.jsonl", [rows[0], rows[5]])
        plan = make_plan(
            support.settings(base, data, tmp_path / "o", eval_data=(test,), max_length=8)
        )
        text = "\n".join(plan.warnings)
        assert "1 of 20 examples repeat" in text
        assert "2 tokens of the data are unknown" in text
        assert "2 of 2 evaluation rows stand in the training data" in text
        assert "prompts were cut from the left" in text

    def test_base_and_tokenizer_that_do_not_fit(self, data, tmp_path):
        base = support.make_base(tmp_path / "b", vocab_size=10)
        with pytest.raises(Incompatible, match=r"gives token 1\d; its model knows 10"):
            make_plan(support.settings(base, data, tmp_path / "o"))

    def test_max_length_beyond_the_positions(self, base, data, tmp_path):
        with pytest.raises(UsageError, match="max_length 65 is beyond the 64 positions"):
            make_plan(support.settings(base, data, tmp_path / "o", max_length=65))

    def test_second_accelerator(self, base, data, tmp_path, monkeypatch):
        monkeypatch.setattr(planning, "pick_device", torch.device)
        with pytest.raises(UsageError, match="cuda:1") as error:
            make_plan(support.settings(base, data, tmp_path / "o", device="cuda:1"))
        assert "CUDA_VISIBLE_DEVICES=1" in error.value.hint

    def test_targets_longer_than_the_base(self, base, tmp_path):
        rows = [{"prompt": "copy", "completion": "a " * 70}]
        data = support.write_rows(tmp_path / "d.jsonl", rows)
        with pytest.raises(DataError, match="1 of 1 rows have a target that does not fit"):
            make_plan(support.settings(base, data, tmp_path / "o"))

    def test_completion_without_tokens(self, tmp_path):
        # This tokenizer keeps letters only: a completion of digits disappears.
        from tokenizers import Regex, normalizers

        tokenizer = support.make_tokenizer()
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("[0-9]"), "")
        base = support.make_base(tmp_path / "b", tokenizer=tokenizer)
        data = support.write_rows(tmp_path / "d.jsonl", [{"prompt": "copy", "completion": "77"}])
        with pytest.raises(DataError, match="row 1: the tokenizer makes no tokens"):
            make_plan(support.settings(base, data, tmp_path / "o"))

    def test_base_without_tokenizer_or_of_another_kind(self, base, data, tmp_path):
        bare = tmp_path / "bare"
        bare.mkdir()
        for name in ("config.json", "model.safetensors"):
            (bare / name).write_bytes((base / name).read_bytes())
        with pytest.raises(Incompatible, match="holds no tokenizer: none of config"):
            make_plan(support.settings(bare, data, tmp_path / "o"))
        odd = tmp_path / "odd"
        odd.mkdir()
        for path in base.iterdir():
            (odd / path.name).write_bytes(path.read_bytes())
        (odd / "config.json").write_text('{"model_type": "t5", "vocab_size": 99}')
        with pytest.raises(Incompatible, match="cannot load"):
            make_plan(support.settings(odd, data, tmp_path / "o"))


class TestTargets:
    def test_names_and_endings(self, base):
        model = build_empty(planning.open_base(str(base)))
        every, transposed = find_targets(model, ("all-linear",))
        assert not transposed
        assert len(every) == 14
        some, _ = find_targets(model, ("v_proj", "0.self_attn.q_proj", "mlp.down_proj"))
        assert len(some) == 5
        assert list(some) == [path for path in every if path in some]

    def test_unknown_name_and_the_head(self, base):
        model = build_empty(planning.open_base(str(base)))
        with pytest.raises(UsageError, match="'q_porj'") as error:
            find_targets(model, ("q_porj",))
        assert "q_proj" in error.value.hint
        with pytest.raises(UsageError, match="'lm_head'"):
            find_targets(model, ("lm_head",))

    def test_gpt2_is_transposed(self):
        config = GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=20, n_positions=16)
        with torch.device("meta"):
            targets, transposed = find_targets(GPT2LMHeadModel(config), ("all-linear",))
        assert transposed
        assert targets["transformer.h.0.attn.c_attn"] == (96, 32)


def test_checkpoints_of_a_long_output_name(tmp_path):
    """63 emoji are 252 of the 255 bytes that a name may have."""
    work = WorkFolder(tmp_path / ("🦙" * 63))
    work.open({"rank": 4})
    work.close()
    assert [path.name for path in tmp_path.iterdir()] == ["." + "🦙" * 60 + ".training"]
    assert work.recorded() == {"rank": 4}
