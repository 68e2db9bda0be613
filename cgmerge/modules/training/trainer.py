"""The training loop: trl's SFTTrainer, with every default that matters set here.

The only module that imports trl. Rows come tokenized (`Encoded`), so that trl neither renders,
truncates nor packs; the labels are the targets and nothing else. On top of trl's trainer this
adds the loss of every step, an error at the first loss that is not finite, checkpoints that are
whole or absent, a strict way back from them, and less work per step.
"""

import contextlib
import math
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback, ProgressCallback
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

from cgmerge import fs, strictjson
from cgmerge.errors import Damaged, InputError, StorageError
from cgmerge.modules.loading import quiet_transformers
from cgmerge.modules.training.batches import Collator, make_dataset, padding_token
from cgmerge.modules.training.checkpoints import Checkpoint, WorkFolder
from cgmerge.modules.training.listener import Listener
from cgmerge.modules.training.plan import Plan
from cgmerge.modules.training.processes import is_main_process, meet, process_count, share
from cgmerge.modules.training.watch import Notes, Watch, first_line, memory_errors, stop_signals
from cgmerge.tensorfile import TensorFile, read_small

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

_ADAPTER = "adapter.safetensors"
_LOSSES = "losses.json"
_STATE = "trainer_state.json"
_MAX_LOSSES = 1 << 30


def train_adapter(
    model: "PeftModel",
    tokenizer: "PreTrainedTokenizerBase",
    plan: Plan,
    work: WorkFolder,
    start: Checkpoint | None,
    listener: Listener,
) -> list[float]:
    """Run all steps of a plan, from the beginning or from a checkpoint.

    Args:
        model: The base with fresh LoRA weights; trained in place.
        tokenizer: Its padding token fills short rows.
        plan: What to train.
        work: Where checkpoints go.
        start: Go on from here.
        listener: Told about every step and checkpoint.

    Returns:
        The loss of every step from the first, also of those before the checkpoint.

    Raises:
        InputError: A loss that is not finite; says at which step.
        LimitExceeded: The memory of the device is used up.
        StorageError: A checkpoint cannot be written.
        Damaged: The checkpoint does not fit the model.
        KeyboardInterrupt: After a checkpoint was written at the user's Ctrl-C.
    """
    with warnings.catch_warnings():
        # Renamed arguments of transformers that trl still uses, and a note about the missing
        # pinned memory on machines without an accelerator: nothing a user could act on.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        trainer = _Trainer(
            model=model,
            args=_arguments(plan, work),
            train_dataset=make_dataset(plan.rows),
            processing_class=tokenizer,
            data_collator=Collator(padding_token(tokenizer)),
        )
        trainer.remove_callback(PrinterCallback)  # writes to stdout
        trainer.remove_callback(ProgressCallback)
        trainer.notes.bind(plan, work, listener)
        trainer.add_callback(Watch(trainer.notes))
        with stop_signals(trainer.notes), quiet_transformers(), memory_errors(plan):
            trainer.train(resume_from_checkpoint=str(start.folder) if start else None)
    return trainer.notes.losses


def lora_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the trainable parameters by name, on the CPU, without copies of the base."""
    return {
        name: parameter.detach().to("cpu", copy=True).contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


class _Trainer(SFTTrainer):
    """SFTTrainer without network, files of its own and per-step work that nobody reads."""

    def __init__(self, **options: Any) -> None:
        self.notes = Notes()
        super().__init__(**options)
        # A new accelerator has nothing to free, but would walk the whole heap looking for it.
        self.accelerator.free_memory = lambda *objects: list(objects)

    def _send_telemetry(self) -> None:
        """Stay offline: trl reports every run to a hub by default."""

    def create_model_card(self, *_args: Any, **_options: Any) -> None:
        """Write no card; the expert gets its own."""

    def floating_point_ops(self, _inputs: Any) -> int:
        """Skip a count of all parameters at every step."""
        return 0

    def _module(self) -> torch.nn.Module:
        if self.model is None:
            raise RuntimeError("the trainer holds no model")
        return self.model

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """Run one part of a step and note its loss.

        Raises:
            InputError: The loss is not finite.
        """
        loss: torch.Tensor = super().training_step(*args, **options)  # type: ignore[no-untyped-call]
        self._metrics["train"].clear()  # trl collects per-step lists for logs that are off
        value = float(self.accelerator.gather(loss.reshape(1)).mean())
        if not math.isfinite(value):
            rate = self.args.learning_rate
            raise InputError(
                f"the loss is not finite at step {self.state.global_step + 1}: {value}",
                code="loss",
                hint=f"lower the learning rate (now {rate:g}), or check the base and the data",
                step=self.state.global_step + 1,
                found=str(value),
            )
        self.notes.part_loss += value
        return loss

    def _save_checkpoint(self, _model: Any, _trial: Any) -> None:
        work = self.notes.work
        if work is None:
            return
        step = self.state.global_step
        staging = work.new_checkpoint(step) if is_main_process() else contextlib.nullcontext()
        with staging as stage:
            folder = Path(share(str(stage)))
            if stage is not None:
                fs.write_tensors(folder / _ADAPTER, lora_tensors(self._module()))
                fs.write_json(folder / _LOSSES, self.notes.losses)
                self.state.save_to_json(str(folder / _STATE))
            self._save_training_state(folder)
            meet()  # before the main process seals what the others write too
        meet()
        self.notes.saved_at = time.monotonic()

    def _save_training_state(self, folder: Path) -> None:
        """Save what is not ours: optimiser, schedule, gradient scale, random states.

        Raises:
            StorageError: torch could not write (it says so with a RuntimeError).
        """
        try:
            self._save_optimizer_and_scheduler(str(folder))
            self._save_scaler(str(folder))
            self._save_rng_state(str(folder))
        except RuntimeError as error:
            raise StorageError(
                f"cannot write a checkpoint in {folder.parent}: {first_line(error)}",
                code="write",
                hint="free some space; the checkpoints before it are whole, and the same command "
                "goes on from there",
                path=folder.parent,
            ) from error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Put back A and B, every one of them, and the losses so far.

        The rest (optimiser, schedule, random states) transformers reads with torch.load and
        weights_only. That format is acceptable here and nowhere else: these files were written by
        this program on this machine, and their digests were verified a moment ago.

        Raises:
            Damaged: Names or shapes that differ from the model's.
        """
        folder = Path(resume_from_checkpoint)
        parameters = {
            name: parameter
            for name, parameter in (model or self._module()).named_parameters()
            if parameter.requires_grad
        }
        with TensorFile(folder / _ADAPTER) as file, torch.no_grad():
            found = {name: info.shape for name, info in file.infos.items()}
            wanted = {name: tuple(item.shape) for name, item in parameters.items()}
            if found != wanted:
                raise Damaged(f"{folder} holds other tensors than the model", code="checkpoint")
            for name, parameter in parameters.items():
                parameter.copy_(file.read(name))
        losses = strictjson.loads(
            read_small(folder / _LOSSES, limit=_MAX_LOSSES),
            source=str(folder / _LOSSES),
            max_bytes=_MAX_LOSSES,
        )
        self.notes.losses = [float(value) for value in losses]
        last = self.notes.losses[-1]
        self.notes.listener.on_resume(len(losses), self.notes.total, last)


def _arguments(plan: Plan, work: WorkFolder) -> SFTConfig:
    """Set explicitly whatever trl or transformers might choose differently one day."""
    chosen, settings = plan.chosen, plan.settings
    accelerated = plan.device != "cpu"
    per_process = chosen.batch_size // (settings.accumulate * process_count())
    arguments = SFTConfig(
        output_dir=str(work.path),
        max_steps=chosen.steps,
        per_device_train_batch_size=per_process,
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=chosen.lr,
        lr_scheduler_type=settings.schedule
        if settings.schedule != "constant"
        else "constant_with_warmup",
        warmup_steps=chosen.warmup,
        optim="adamw_torch_fused",
        weight_decay=settings.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.999,
        max_grad_norm=1.0,
        seed=settings.seed,
        data_seed=settings.seed,
        # Mixed precision only on accelerators: on the CPU peft casts where it must, and trl's
        # default (bf16 everywhere) fails there.
        use_cpu=not accelerated,
        bf16=accelerated and plan.dtype == "bfloat16",
        fp16=plan.device == "cuda" and plan.dtype == "float16",
        gradient_checkpointing=settings.gradient_checkpointing,
        packing=False,
        max_length=None,  # rows were cut by `encode`, never here
        dataset_kwargs={"skip_prepare_dataset": True},
        loss_type="nll",
        dataloader_num_workers=0,
        dataloader_pin_memory=plan.device == "cuda",
        dataloader_drop_last=False,
        ddp_find_unused_parameters=False,
        report_to="none",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        eval_strategy="no",
        save_strategy="no",  # `Watch` asks for checkpoints
        push_to_hub=False,
        disable_tqdm=True,
    )
    if process_count() == 1 and arguments.n_gpu > 1:
        # One process uses one device; trl refuses the data-parallel mode that transformers
        # would choose on a machine with several.
        arguments._n_gpu = 1
    return arguments
