"""Training: the bytes it gives, what it goes on from, and what it refuses."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import support
import torch
import train_support
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cgmerge.errors import (
    Damaged,
    InputError,
    LimitExceeded,
    MissingExtra,
    StorageError,
    UsageError,
)
from cgmerge.modules.attach import attached
from cgmerge.modules.base import open_base
from cgmerge.modules.card import read_card
from cgmerge.modules.expert import open_expert
from cgmerge.modules.training import adapter as adapters
from cgmerge.modules.training import batches
from cgmerge.modules.training import trainer as training
from cgmerge.modules.training.checkpoints import WorkFolder, verify_checkpoint
from cgmerge.modules.training.plan import make_plan
from cgmerge.modules.training.quantized import settle_bitsandbytes
from cgmerge.modules.training.run import RunOptions, Start, check_start, train_expert

STEPS = 6
KILLER = Path(__file__).parents[2] / "benchmarks" / "kill_train.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    train_support.make_base(folder / "base")
    train_support.write_rows(folder / "rows.jsonl", train_support.make_rows())
    return folder


@pytest.fixture(scope="module")
def make(place):
    """Plan a run on the module's base and rows."""

    def call(out, **changes):
        options = {"base": place / "base", "data": place / "rows.jsonl", **changes}
        base, data = options.pop("base"), options.pop("data")
        return make_plan(train_support.settings(base, data, out, **options))

    return call


@pytest.fixture(scope="module")
def reference(make, tmp_path_factory):
    """An undisturbed run with dropout, and its losses."""
    out = tmp_path_factory.mktemp("reference") / "expert"
    recorder = train_support.Recorder()
    result = train_expert(make(out, dropout=0.1), RunOptions(), listener=recorder)
    return support.folder_bytes(out), result.losses


def _stop_at(step):
    def stop(now):
        if now == step:
            raise KeyboardInterrupt

    return train_support.Recorder(stop)


class TestResult:
    def test_loss_falls_and_the_card_tells_all(self, make, tmp_path):
        out = tmp_path / "expert"
        plan = make(out, steps=30, lr=5e-3)
        recorder = train_support.Recorder()
        result = train_expert(plan, RunOptions(), listener=recorder)
        assert list(recorder.losses) == list(range(1, 31))
        assert tuple(recorder.losses.values()) == result.losses
        assert result.losses[-1] < 0.8 * result.losses[0]
        assert result.loss == pytest.approx(sum(result.losses[-10:]) / 10)
        names = ["README.md", "adapter_config.json", "adapter_model.safetensors", "expert.json"]
        assert sorted(path.name for path in out.iterdir()) == names
        card = read_card(out)
        assert card.skill == "reverse"
        assert card.base.fingerprint == plan.base.fingerprint
        assert card.base.name == "base"
        assert [(source.name, source.rows) for source in card.data] == [("rows.jsonl", 40)]
        assert card.training == plan.identity
        assert card.metrics["loss"] == result.loss
        assert card.seed == 0
        assert [path.name for path in tmp_path.iterdir()] == ["expert"]
        for path in out.iterdir():
            assert str(tmp_path).encode() not in path.read_bytes()
        assert not WorkFolder(out).path.exists()

    def test_same_command_same_bytes(self, make, reference, tmp_path):
        train_expert(make(tmp_path / "again", dropout=0.1), RunOptions())
        assert support.folder_bytes(tmp_path / "again") == reference[0]
        train_expert(make(tmp_path / "other", dropout=0.1, seed=1), RunOptions())
        assert support.folder_bytes(tmp_path / "other") != reference[0]

    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    def test_plain_peft_and_our_own_reader_agree(self, place, make, tmp_path, family):
        from peft import PeftModel

        base = place / "base"
        if family == "gpt2":
            base = support.make_gpt2(tmp_path / "gpt2")
            train_support.make_tokenizer().save_pretrained(base)
        train_expert(make(tmp_path / "out", base=base, lr=1e-2), RunOptions())
        ids = torch.arange(4, 12)[None]
        model = AutoModelForCausalLM.from_pretrained(base).eval()
        with torch.no_grad():
            plain = model(ids).logits
            deltas = open_expert(str(tmp_path / "out")).deltas(open_base(str(base)))
            with attached(model, deltas):
                ours = model(ids).logits
            theirs = PeftModel.from_pretrained(model, str(tmp_path / "out")).eval()(ids).logits
        assert torch.allclose(ours, theirs, atol=1e-5)
        assert (ours - plain).abs().max() > 1e-3

    def test_a_chosen_layer_only(self, make, tmp_path):
        from peft import PeftModel

        plan = make(tmp_path / "out", target_modules=("0.self_attn.q_proj", "mlp.up_proj"))
        train_expert(plan, RunOptions())
        tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
        # Loaders go by type, so the other layer's q_proj stands there as a zero.
        name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
        assert tensors[name.format(0, "B")].any()
        assert not tensors[name.format(1, "A")].any()
        assert len(tensors) == 8
        model = AutoModelForCausalLM.from_pretrained(plan.base.folder)
        PeftModel.from_pretrained(model, str(tmp_path / "out"))

    def test_fewer_rows_than_a_batch_and_parts_of_a_step(self, make, place, tmp_path):
        data = train_support.write_rows(tmp_path / "d.jsonl", train_support.make_rows(4))
        whole = train_expert(make(tmp_path / "a", data=data, batch_size=64), RunOptions())
        parts = train_expert(
            make(tmp_path / "b", data=data, batch_size=4, accumulate=2), RunOptions()
        )
        assert whole.losses == pytest.approx(parts.losses, rel=1e-4)

    def test_text_rows_and_scores(self, make, tmp_path):
        rows = [{"text": "a b c d"}, {"text": "b c d e"}]
        data = train_support.write_rows(tmp_path / "d.jsonl", rows)
        seen = []

        def scorer(model, encoded):
            seen.append([(row.prompt_ids, row.target_ids) for row in encoded])
            with torch.no_grad():
                return {"exact_match": float(len(seen)), "loss": 0.0}

        plan = make(tmp_path / "out", data=data, eval_data=(data,))
        metrics = train_expert(plan, RunOptions(), scorer=scorer).metrics
        assert seen[0] == seen[1] == [([8], [9, 10, 11, 1]), ([9], [10, 11, 12, 1])]
        assert metrics["eval"] == {
            "exact_match": 1.0,
            "base_exact_match": 2.0,
            "loss": 0.0,
            "base_loss": 0.0,
            "n": 2,
        }
        assert (
            "exact match 1.000 on 2 rows (base 2.000)" in (tmp_path / "out/README.md").read_text()
        )

    def test_hub_name_in_the_config_causes_no_look_up(self, place, make, tmp_path):
        base = tmp_path / "base"
        base.mkdir()
        for path in (place / "base").iterdir():
            (base / path.name).write_bytes(path.read_bytes())
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({**config, "_name_or_path": "some/model"}))
        train_expert(make(tmp_path / "out", base=base, checkpoint_steps=2), RunOptions())


class TestAgainstPlainTransformers:
    def test_labels_are_the_targets_and_nothing_else(self, make, tmp_path):
        plan = make(tmp_path / "out")
        rows = list(batches.make_dataset(plan.rows))
        batch = batches.Collator(0)(rows[:5])
        for line, row in zip(batch["labels"].tolist(), plan.rows, strict=False):
            start = len(row.prompt_ids)
            assert line[:start] == [-100] * start
            assert line[start : len(row)] == row.target_ids
            assert set(line[len(row) :]) <= {-100}
        assert batch["attention_mask"].sum(1).tolist() == [len(row) for row in plan.rows[:5]]

    def test_losses_equal_a_loop_by_hand(self, make, tmp_path):
        plan = make(tmp_path / "out", batch_size=40, steps=5, schedule="constant", warmup=0)
        ours = train_expert(plan, RunOptions()).losses
        model, _ = adapters.attach_lora(plan)
        model.train()
        weights = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=plan.chosen.lr, weight_decay=0.0)
        batch = batches.Collator(0)(list(batches.make_dataset(plan.rows)))
        theirs = []
        for _ in range(5):
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            theirs.append(float(loss.detach()))
        assert ours == pytest.approx(theirs, rel=1e-5)


class TestResume:
    @pytest.mark.parametrize("step", [3, 5])
    def test_same_bytes_and_same_next_loss(self, make, reference, tmp_path, step):
        out = tmp_path / "expert"
        plan = make(out, dropout=0.1, checkpoint_steps=2)
        with pytest.raises(KeyboardInterrupt):
            train_expert(plan, RunOptions(), listener=_stop_at(step))
        assert not out.exists()
        before = step // 2 * 2
        assert check_start(plan, RunOptions()) == Start(before)
        recorder = train_support.Recorder()
        result = train_expert(plan, RunOptions(), listener=recorder)
        assert result.resumed_from == before
        assert recorder.resumed == [(before, reference[1][before - 1])]
        assert recorder.losses[before + 1] == reference[1][before]
        assert result.losses == reference[1]
        assert support.folder_bytes(out) == reference[0]

    def test_ctrl_c_writes_a_checkpoint_first(self, make, reference, tmp_path):
        out = tmp_path / "expert"
        plan = make(out, dropout=0.1)
        recorder = train_support.Recorder(
            lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 3 else None
        )
        before = signal.getsignal(signal.SIGINT)  # SIG_IGN in a job that a shell put aside
        with pytest.raises(KeyboardInterrupt):
            train_expert(plan, RunOptions(), listener=recorder)
        assert recorder.saved
        assert check_start(plan, RunOptions()).step in (3, 4)
        assert signal.getsignal(signal.SIGINT) is before
        train_expert(plan, RunOptions())
        assert support.folder_bytes(out) == reference[0]

    def test_torn_newest_checkpoint_is_skipped_with_a_message(self, make, reference, tmp_path):
        out = tmp_path / "expert"
        plan = make(out, dropout=0.1, checkpoint_steps=1)
        with pytest.raises(KeyboardInterrupt):
            train_expert(plan, RunOptions(), listener=_stop_at(5))
        work = WorkFolder(out)
        assert sorted(p.name for p in work.path.glob("step-*")) == [
            "step-00000003",
            "step-00000004",
        ]
        os.truncate(work.path / "step-00000004" / "optimizer.pt", 100)
        recorder = train_support.Recorder()
        result = train_expert(plan, RunOptions(), listener=recorder)
        assert result.resumed_from == 3
        assert "step-00000004/optimizer.pt has 100 bytes" in recorder.warnings[0]
        assert support.folder_bytes(out) == reference[0]

    def test_other_settings_are_refused_with_both_values(self, make, tmp_path):
        out = tmp_path / "expert"
        with pytest.raises(KeyboardInterrupt):
            train_expert(make(out, checkpoint_steps=1), RunOptions(), listener=_stop_at(3))
        other = make(out, rank=8, seed=5)
        for call in (train_expert, check_start):
            with pytest.raises(UsageError, match=r"rank: 4 there, 8 now") as error:
                call(other, RunOptions())
            assert error.value.details["expected"] == {"alpha": 8, "rank": 4, "seed": 0}
            assert "--overwrite" in error.value.hint
        assert check_start(other, RunOptions(overwrite=True)) == Start(0)
        result = train_expert(other, RunOptions(overwrite=True))
        assert result.resumed_from is None
        assert not WorkFolder(out).path.exists()

    def test_no_resume_starts_anew(self, make, reference, tmp_path):
        out = tmp_path / "expert"
        plan = make(out, dropout=0.1, checkpoint_steps=1)
        with pytest.raises(KeyboardInterrupt):
            train_expert(plan, RunOptions(), listener=_stop_at(3))
        assert check_start(plan, RunOptions(resume=False)) == Start(0)
        assert train_expert(plan, RunOptions(resume=False)).resumed_from is None
        assert support.folder_bytes(out) == reference[0]

    @pytest.mark.parametrize("half_removed", [False, True])
    @pytest.mark.fault("F28")
    def test_killed_between_commit_and_clean_up(self, make, tmp_path, half_removed):
        out = tmp_path / "expert"
        plan = make(out)
        train_expert(plan, RunOptions())
        before = support.folder_bytes(out)
        WorkFolder(out).open(plan.identity)
        if half_removed:
            (WorkFolder(out).path / "run.json").unlink()
        assert check_start(plan, RunOptions()) == Start(finished=True)
        result = train_expert(plan, RunOptions())
        assert (result.steps, result.size) == (STEPS, len(before["adapter_model.safetensors"]))
        assert support.folder_bytes(out) == before
        assert not WorkFolder(out).path.exists()

    @pytest.mark.slow
    def test_kill_9_at_random_moments(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(KILLER), "1", "--seed", "17"]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "every result equal" in done.stdout


class TestExistingOutput:
    def test_refused_replaced_or_kept(self, make, tmp_path):
        out = tmp_path / "expert"
        plan = make(out)
        train_expert(plan, RunOptions())
        with pytest.raises(UsageError, match="exists already"):
            train_expert(plan, RunOptions())
        recorder = train_support.Recorder()
        assert train_expert(plan, RunOptions(keep_finished=True), listener=recorder).steps == STEPS
        assert recorder.losses == {}
        other = make(out, seed=1)
        with pytest.raises(UsageError, match="exists already"):
            train_expert(other, RunOptions(keep_finished=True))
        before = support.folder_bytes(out)
        train_expert(other, RunOptions(overwrite=True))
        assert support.folder_bytes(out) != before

    def test_foreign_folder_is_never_kept(self, make, tmp_path):
        out = tmp_path / "expert"
        out.mkdir()
        (out / "notes.txt").write_text("mine")
        with pytest.raises(UsageError, match="exists already"):
            check_start(make(out), RunOptions(keep_finished=True))

    def test_two_at_once(self, make, tmp_path):
        plan = make(tmp_path / "expert")
        first = WorkFolder(tmp_path / "expert")
        first.open(plan.identity)
        with pytest.raises(UsageError, match="right now"):
            train_expert(plan, RunOptions())
        with pytest.raises(UsageError, match="right now"):
            train_expert(plan, RunOptions(resume=False))
        first.close()


class TestRefusals:
    def test_loss_that_is_not_finite_names_the_step(self, make, tmp_path):
        plan = make(tmp_path / "out", steps=30, lr=1e3, schedule="constant")
        broken = train_support.make_base(tmp_path / "broken")
        path = broken / "model.safetensors"
        tensors = load_file(path)
        tensors["model.norm.weight"].fill_(float("nan"))
        from safetensors.torch import save_file

        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(InputError, match="not finite at step 1: nan") as error:
            train_expert(make(tmp_path / "out", base=broken), RunOptions())
        assert error.value.exit_code == 3
        assert not (tmp_path / "out").exists()
        assert plan.chosen.lr == 1e3

    def test_memory_that_is_used_up(self, make, tmp_path, monkeypatch):
        def fail(*_args, **_options):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

        monkeypatch.setattr(training.SFTTrainer, "training_step", fail)
        with pytest.raises(LimitExceeded, match=r"8 rows of up to .* out of memory") as error:
            train_expert(make(tmp_path / "out"), RunOptions())
        assert error.value.hint.startswith("--accumulate 2")

        def other(*_args, **_options):
            raise RuntimeError("something else")

        monkeypatch.setattr(training.SFTTrainer, "training_step", other)
        with pytest.raises(RuntimeError, match="something else"):
            train_expert(make(tmp_path / "out"), RunOptions())

    def test_disk_that_is_full_at_a_checkpoint(self, make, reference, tmp_path, monkeypatch):
        def fail(*_args):
            raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

        plan = make(tmp_path / "out", dropout=0.1, checkpoint_steps=2)
        with monkeypatch.context() as patch:
            recorder = train_support.Recorder(
                lambda step: step == 4 and patch.setattr(training._Trainer, "_save_rng_state", fail)
            )
            with pytest.raises(StorageError, match="PytorchStreamWriter failed") as error:
                train_expert(plan, RunOptions(), listener=recorder)
        assert error.value.exit_code == 4
        assert check_start(plan, RunOptions()) == Start(2)
        train_expert(plan, RunOptions())
        assert support.folder_bytes(tmp_path / "out") == reference[0]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda a, b: (a, b * 0), "every ΔW is zero"),
            (lambda a, b: (a * float("nan"), b), "not finite"),
        ],
    )
    def test_results_that_are_no_expert(self, make, tmp_path, monkeypatch, change, message):
        def spoil(tensors):
            return {path: change(*pair) for path, pair in adapters.factors_of(tensors).items()}

        monkeypatch.setattr("cgmerge.modules.training.run.factors_of", spoil)
        with pytest.raises(Damaged, match=message):
            train_expert(make(tmp_path / "out", steps=1), RunOptions())
        assert not (tmp_path / "out").exists()

    def test_no_weights_at_all(self):
        with pytest.raises(Damaged, match="no LoRA weights"):
            adapters.check_factors({})

    def test_disk_that_gives_back_other_bytes(self, make, tmp_path, monkeypatch):
        original = adapters.write_adapter

        def lossy(folder, factors, form):
            original(folder, {path: (a * 1.001, b) for path, (a, b) in factors.items()}, form)

        monkeypatch.setattr(adapters, "write_adapter", lossy)
        with pytest.raises(Damaged, match="differs from memory"):
            train_expert(make(tmp_path / "out", steps=1), RunOptions())
        assert not (tmp_path / "out").exists()


class TestCheckpointFiles:
    @pytest.fixture
    def work(self, tmp_path):
        work = WorkFolder(tmp_path / "out")
        work.open({"rank": 1})
        for step in (1, 2, 3):
            with work.new_checkpoint(step) as folder:
                (folder / "a.bin").write_bytes(bytes([step]) * 50)
                (folder / "b.json").write_text("{}")
        yield work
        work.close()

    def test_two_are_kept_and_the_newest_is_found(self, work):
        newest, skipped = work.newest()
        assert (newest.step, skipped) == (3, [])
        assert verify_checkpoint(newest.folder) == 3
        assert len(list(work.path.glob("step-*"))) == 2
        assert work.recorded() == {"rank": 1}

    @pytest.mark.parametrize("name", ["a.bin", "b.json", "manifest.json"])
    @pytest.mark.parametrize("damage", ["delete", "cut", "flip", "empty"])
    def test_any_damage_is_found(self, work, name, damage):
        path = work.newest()[0].folder / name
        content = path.read_bytes()
        if damage == "delete":
            path.unlink()
        else:
            new = {"cut": content[:-1], "flip": bytes([content[0] ^ 1]) + content[1:], "empty": b""}
            path.write_bytes(new[damage])
        newest, skipped = work.newest()
        if (name, damage) == ("manifest.json", "cut"):
            assert newest.step == 3  # only the final line end is missing
            return
        assert newest.step == 2
        assert len(skipped) == 1
        assert "step-00000003" in skipped[0]

    @pytest.mark.parametrize(
        "content",
        [
            '{"schema": "x"}',
            '{"schema": "cgmerge.run/1", "step": 3, "files": {"a.bin": 3}}',
            '{"schema": "cgmerge.run/1", "step": 3, "files": {}}',
        ],
    )
    def test_manifest_that_is_none(self, work, content):
        (work.newest()[0].folder / "manifest.json").write_text(content)
        newest, skipped = work.newest()
        assert newest.step == 2
        assert "is not a manifest" in skipped[0]

    def test_a_file_in_the_place_of_a_checkpoint(self, work):
        (work.path / "step-00000004").write_text("x")
        newest, skipped = work.newest()
        assert newest.step == 3
        assert skipped == ["step-00000004 is a file, not a checkpoint"]
        with work.new_checkpoint(4) as folder:
            (folder / "a.bin").write_bytes(b"4")
        assert work.newest()[0].step == 4

    def test_none_is_sound(self, work):
        for path in work.path.glob("step-*/a.bin"):
            path.unlink()
        newest, skipped = work.newest()
        assert newest is None
        assert len(skipped) == 2

    @pytest.mark.parametrize("content", ["", "{", '{"schema": "x"}', '{"identity": {}}'])
    def test_half_discarded_folder_is_no_run(self, work, content):
        (work.path / "run.json").write_text(content)
        assert work.recorded() is None

    def test_checkpoint_of_another_shape(self, make, tmp_path):
        plan = make(tmp_path / "out", checkpoint_steps=1)
        with pytest.raises(KeyboardInterrupt):
            train_expert(plan, RunOptions(), listener=_stop_at(3))
        work = WorkFolder(tmp_path / "out")
        folder = work.newest()[0].folder
        from safetensors.torch import save_file

        from cgmerge.modules.training.checkpoints import seal_checkpoint

        save_file({"x": torch.zeros(1)}, folder / "adapter.safetensors")
        (folder / "manifest.json").unlink()
        seal_checkpoint(folder, 2)
        with pytest.raises(Damaged, match="other tensors than the model"):
            train_expert(plan, RunOptions())


class TestFourBit:
    @pytest.fixture
    def base(self, tmp_path):
        return train_support.make_base(tmp_path / "wide", hidden=64)

    @pytest.mark.skipif(
        importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
    )
    def test_trains_on_the_cpu_and_the_base_stays_whole(self, make, base, tmp_path, monkeypatch):
        plan = make(tmp_path / "out", base=base, load_in_4bit=True, steps=12, lr=1e-2)
        whole = make(tmp_path / "whole", base=base, steps=12, lr=1e-2)
        assert plan.base_bytes < whole.base_bytes
        four = train_expert(plan, RunOptions())
        full = train_expert(whole, RunOptions())
        assert four.losses[-1] < four.losses[0]
        assert four.losses == pytest.approx(full.losses, rel=0.2)
        assert open_expert(str(tmp_path / "out")).deltas(open_base(str(base)))

    @pytest.mark.parametrize(
        "reason", [ImportError("no module"), RuntimeError("CUDA set-up\nfailed")]
    )
    def test_without_bitsandbytes(self, make, base, tmp_path, monkeypatch, reason):
        def fail(name):
            raise reason

        monkeypatch.setattr("cgmerge.modules.training.quantized.importlib.import_module", fail)
        with pytest.raises(
            MissingExtra, match=r"bitsandbytes.*(no module|CUDA set-up failed)"
        ) as error:
            make(tmp_path / "out", base=base, load_in_4bit=True)
        assert error.value.exit_code == 4
        monkeypatch.setitem(sys.modules, "bitsandbytes", object())  # put back afterwards
        settle_bitsandbytes(needed=False)
        assert importlib.util.find_spec("bitsandbytes") is None
