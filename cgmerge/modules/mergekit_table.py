"""What is known about mergekit's methods and settings: what maps to what, and what does not.

From the behaviour of mergekit 0.1.5, measured; `tests/modules/mergekit_goldens.json` has its
numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
IGNORED = ("int8_mask",)
"""Parameters that change memory and no numbers."""

_WEIGHT = {"weight": None}
_SUM = {**_WEIGHT, "lambda": 1.0, "normalize": False}
_DARE = {**_SUM, "density": 1.0, "rescale": True}
_WHOLE = "it works on whole weights, which is another rule than ours on deltas"


@dataclass(frozen=True, kw_only=True)
class _Options:
    params: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    reasons: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    votes: bool = False
    experts: tuple[int, int | None] = (1, None)
    base: str | None = "add `base_model`: deltas are relative to it"
    note: str | None = None


@dataclass(frozen=True)
class Entry(_Options):
    """One method of mergekit that has a counterpart.

    Attributes:
        name: Our name.
        params: mergekit's parameters with their defaults; None where one is required.
        fixed: Parameters of ours that give mergekit's meaning.
        only: Parameters of mergekit for which only this value is honoured.
        reasons: Why, and what to do instead, for each of `only`.
        votes: Signs are elected, and `normalize` is about those who agree.
        experts: Fewest and most models besides the base; None for no limit.
        base: What to do when there is no base; None where none is needed.
        note: What is different in every merge of this kind.
    """

    name: str

    @property
    def per_model(self) -> set[str]:
        """Return the parameters that mergekit reads for every model."""
        return {"weight", "density", "gamma"} & set(self.params)


METHODS: Mapping[str, Entry] = {
    "linear": Entry("linear", params={**_WEIGHT, "normalize": True}, base=None),
    "task_arithmetic": Entry("task-arithmetic", params=_SUM),
    "ties": Entry(
        "ties",
        params={**_SUM, "density": 1.0, "normalize": True, "rescale": False},
        fixed={"trim": "tensor", "tie": "positive"},
        only={"rescale": False},
        reasons={"rescale": ("trimmed deltas are not rescaled here", "use a larger lambda")},
        votes=True,
    ),
    "dare_linear": Entry(
        "dare",
        params=_DARE,
        note="which entries are dropped is drawn anew: equal to mergekit in distribution",
    ),
    "dare_ties": Entry(
        "dare-ties",
        params=_DARE,
        fixed={"density": 1.0, "tie": "positive"},
        votes=True,
        note="which entries are dropped is drawn anew: equal to mergekit in distribution",
    ),
    "breadcrumbs": Entry(
        "breadcrumbs",
        params={**_SUM, "density": 1.0, "gamma": 0.01, "rescale": False},
        fixed={"scope": "tensor"},
        only={"rescale": False},
        reasons={"rescale": ("trimmed deltas are not rescaled here", "use a larger lambda")},
    ),
    "model_stock": Entry(
        "model-stock",
        params={"filter_wise": False},
        only={"filter_wise": False},
        reasons={"filter_wise": ("one angle per tensor here", None)},
        experts=(2, None),
        note="experts that point away from each other give the base; mergekit turns them around",
    ),
    "nuslerp": Entry(
        "nuslerp",
        params={**_WEIGHT, "nuslerp_flatten": True, "nuslerp_row_wise": False},
        only={"nuslerp_flatten": True, "nuslerp_row_wise": False},
        reasons={
            "nuslerp_flatten": ("one angle per tensor here, not per row or column", None),
            "nuslerp_row_wise": ("one angle per tensor here, not per row or column", None),
        },
        experts=(2, 2),
        base=f"without `base_model` {_WHOLE}; add it, and deltas are interpolated",
    ),
    "multislerp": Entry(
        "multi-slerp",
        params={**_WEIGHT, "normalize_weights": True, "eps": 1e-8},
        only={"normalize_weights": True, "eps": 1e-8},
        reasons={
            "normalize_weights": ("weights are always relative here", None),
            "eps": ("the limit for zero vectors is fixed here", None),
        },
        base=f"without `base_model` {_WHOLE}; add it, and deltas are averaged",
    ),
}

REFUSED_METHODS: Mapping[str, tuple[str, str | None]] = {
    "slerp": (
        _WHOLE,
        "use linear with weights 1-t and t, or the deltas' arc: cgmerge compose A B -m slerp",
    ),
    "karcher": (_WHOLE, "the same mean of deltas: cgmerge compose A B -m karcher"),
    "della": (
        "mergekit restores one norm per tensor, where the paper divides each entry by its chance",
        "the paper's rule: cgmerge compose A B -m della",
    ),
    "della_linear": (
        "a sum of entries kept by rank has no counterpart here",
        "use dare_linear, or the paper's rule: cgmerge compose A B -m della",
    ),
    "breadcrumbs_ties": (
        "an election among what breadcrumbs keeps has no counterpart here",
        "use breadcrumbs or ties",
    ),
    "sce": (
        "mergekit weighs small deltas, as those of adapters, equally; here energies always count",
        "cgmerge compose A B -m sce",
    ),
    "ram": ("it has no counterpart here", "use ties or consensus"),
    "ramplus_tl": ("it has no counterpart here", "use ties or consensus"),
    "nearswap": ("it has no counterpart here", "use linear or slerp"),
    "arcee_fusion": ("it has no counterpart here", "use ties or breadcrumbs"),
    "passthrough": (
        "it copies or stacks layers of whole models; there is nothing to merge",
        "to write one expert into its base: cgmerge compose EXPERT --base BASE --as model -o OUT",
    ),
}

REFUSED_KEYS: Mapping[str, tuple[str, str | None]] = {
    "slices": (
        "layers cannot be taken from different places: experts are merged module by module",
        "list whole experts under `models`",
    ),
    "modules": (
        "submodules are not merged by rules of their own",
        "list whole experts under `models`",
    ),
    "tokenizer": (
        "vocabularies are not merged; the base's tokenizer is copied",
        "leave it out, or write {source: base}",
    ),
    "tokenizer_source": (
        "vocabularies are not merged; the base's tokenizer is copied",
        "leave it out, or write base",
    ),
    "chat_template": ("the base's chat template is copied", "leave it out"),
    "name": ("it belongs to files of several merges, which are not read", "leave it out"),
}
