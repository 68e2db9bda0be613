"""Kill a training run again and again and prove that nothing of the result changes.

    python benchmarks/kill_train.py [TRIALS] [--seed N]

Each trial trains with a checkpoint after every step and is killed (SIGKILL) at a random moment,
up to three times, with the newest checkpoint damaged in between in a third of the trials; the
run that finally finishes must give the bytes of an undisturbed run. Heavy packages are imported
once; every run is a fork of this process, which itself never computes.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cgmerge import fs
from cgmerge.modules.training.checkpoints import WorkFolder
from cgmerge.modules.training.listener import Silent
from cgmerge.modules.training.plan import make_plan
from cgmerge.modules.training.run import RunOptions, train_expert
from cgmerge.modules.training.settings import TrainSettings
from cgmerge.modules.training.trainer import train_adapter  # noqa: F401  (imports trl before the forks)

STEPS = 30
WORDS = ["<pad>", "<eos>", "<unk>", ":", "=", *"abcdefghij"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trials", type=int, nargs="?", default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kill-train-") as name:
        sys.exit(run(Path(name), options.trials, random.Random(options.seed)))


def run(folder: Path, trials: int, rng: random.Random) -> int:
    """Run all trials; returns the exit code."""
    fork(lambda: build_inputs(folder))
    reference = folder / "reference"
    started = time.monotonic()
    fork(lambda: train(folder, reference))
    duration = time.monotonic() - started
    expected = digest(reference)
    counts: Counter[str] = Counter()
    for trial in range(trials):
        out = folder / "result" / "expert"
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()
        problem = one_trial(folder, out, rng, duration, counts) or compare(out, expected)
        if problem:
            print(f"trial {trial}: {problem}")
            return 1
    print(f"{trials} trials, every result equal to the undisturbed run; {dict(counts)}")
    return 0


def one_trial(
    folder: Path, out: Path, rng: random.Random, duration: float, counts: Counter[str]
) -> str | None:
    """Train with kills until it finishes; returns what went wrong."""
    damaged: set[str] = set()
    for _ in range(rng.randint(1, 3)):
        if kill(lambda: train(folder, out), rng.uniform(0.2, 1.0) * duration):
            counts["killed"] += 1
        if out.exists() and not WorkFolder(out).path.exists():
            counts["finished before the kill"] += 1
            break
        if out.exists():
            counts["killed after the commit"] += 1
        elif WorkFolder(out).path.exists():
            newest, skipped = WorkFolder(out).newest()
            counts["with checkpoint" if newest else "before the first checkpoint"] += 1
            torn = [reason for reason in skipped if not any(name in reason for name in damaged)]
            if torn:
                return f"a kill tore a checkpoint: {torn}"
            if newest and rng.random() < 1 / 3:
                damage(newest.folder, rng)
                damaged.add(newest.folder.name)
                counts["checkpoint damaged"] += 1
    if out.exists() and not WorkFolder(out).path.exists():
        return None
    return fork(lambda: train(folder, out))


def damage(folder: Path, rng: random.Random) -> None:
    """Delete, cut or alter one file of a checkpoint."""
    path = rng.choice(sorted(folder.iterdir()))
    match rng.randrange(3):
        case 0:
            path.unlink()
        case 1:
            os.truncate(path, rng.randrange(path.stat().st_size))
        case _:
            content = bytearray(path.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)


def compare(out: Path, expected: dict[str, str]) -> str | None:
    """Return how a result differs from the undisturbed one, or what is left beside it."""
    found = digest(out)
    if found != expected:
        differing = sorted(set(found.items()) ^ set(expected.items()))
        return f"other bytes: {differing}"
    rest = [path.name for path in out.parent.iterdir() if path != out]
    return f"left over: {rest}" if rest else None


def digest(folder: Path) -> dict[str, str]:
    """Hash every file of a folder."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def train(folder: Path, out: Path) -> None:
    """Train the one expert of this benchmark; slow enough that kills hit every part of it."""
    settings = TrainSettings(
        base=str(folder / "base"),
        data=(folder / "data.jsonl",),
        skill="reverse",
        out=out,
        rank=4,
        steps=STEPS,
        batch_size=8,
        dropout=0.1,  # random numbers at every step: their state must come back too
        checkpoint_steps=1,
        device="cpu",
    )
    train_expert(make_plan(settings), RunOptions(), listener=Silent())


def build_inputs(folder: Path) -> None:
    """Write a tiny random base, its tokenizer and a data file."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    rng = random.Random(3)
    letters = WORDS[5:]
    lines = []
    for _ in range(50):
        word = rng.choices(letters, k=rng.randint(2, 6))
        prompt, answer = " ".join(["a", ":", *word, "="]), " ".join(reversed(word))
        lines.append(f'{{"prompt": "{prompt}", "completion": "{answer}"}}'.encode())
    fs.write_lines(folder / "data.jsonl", lines)


def fork(job: Callable[[], None]) -> str | None:
    """Run a job in a child process; returns what went wrong."""
    _, status = os.waitpid(start(job), 0)
    code = os.waitstatus_to_exitcode(status)
    return None if code == 0 else f"the run ended with {code}"


def kill(job: Callable[[], None], after: float) -> bool:
    """Run a job and kill it after some seconds; returns whether it was still running."""
    child = start(job)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def start(job: Callable[[], None]) -> int:
    """Fork; the child runs the job and never returns."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        job()
        code = 0
    except BaseException as error:  # noqa: BLE001  (the parent must learn of anything)
        print(f"child: {type(error).__name__}: {error}")
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
