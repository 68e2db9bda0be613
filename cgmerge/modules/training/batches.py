"""Tokenized rows as the tensors of a step; the labels are the targets and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from datasets import Dataset

from cgmerge.modules.data import Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Collator:
    """Pad rows on the right; one tensor per key, built once (trl's makes one per row)."""

    padding: int

    def __call__(self, rows: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `attention_mask` and `labels`, each [rows, tokens], int64."""
        width = max(len(row["input_ids"]) for row in rows)
        gaps = [width - len(row["input_ids"]) for row in rows]
        pairs = list(zip(rows, gaps, strict=True))
        return {
            "input_ids": torch.tensor([r["input_ids"] + [self.padding] * g for r, g in pairs]),
            "attention_mask": torch.tensor([[1] * (width - g) + [0] * g for g in gaps]),
            "labels": torch.tensor([r["labels"] + [IGNORED] * g for r, g in pairs]),
        }


def make_dataset(rows: Sequence[Encoded]) -> Dataset:
    """Hold rows in memory in the form that trl takes: `input_ids` and `labels`."""
    return Dataset.from_dict(
        {
            "input_ids": [[*row.prompt_ids, *row.target_ids] for row in rows],
            "labels": [[IGNORED] * len(row.prompt_ids) + row.target_ids for row in rows],
        }
    )


def padding_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Choose the token that fills short rows; masked, so any will do."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
