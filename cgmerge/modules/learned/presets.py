"""One learner with settings, and the settings that published methods stand for."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cgmerge.errors import UsageError
from cgmerge.merge.params import Checked, build_params, param
from cgmerge.merge.registry import About

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Learner(Checked):
    """How coefficients are learned; see `PRESETS` for the settings of each method."""

    granularity: Literal["model", "layer", "module"] = param(
        "model", "one coefficient per expert for the whole model, each layer or each module"
    )
    constraint: Literal["free", "bounded", "simplex"] = param(
        "free", "none, within low … high, or positive with sum 1 over the experts"
    )
    low: float = param(-1.5, "bounded: smallest coefficient", low=-100, high=0)
    high: float = param(1.5, "bounded: largest coefficient", above=0, high=100)
    objective: Literal["loss", "entropy"] = param(
        "loss", "cross-entropy of the answers, or how unsure the model is (no answers needed)"
    )
    reads: Literal["prompt", "answer"] = param(
        "prompt", "entropy: of the first answer token, or along the given answer"
    )
    optimiser: Literal["scipy", "adam"] = param(
        "adam", "trust region without gradients (COBYQA), or gradient steps"
    )
    evaluations: int = param(40, "scipy: most passes over the examples", low=1, high=100_000)
    steps: int = param(60, "adam: gradient steps over all examples", low=1, high=100_000)
    lr: float = param(0.05, "adam: step size, falling to 0 along a cosine", above=0, high=10)
    start: float = param(0.3, "entropy: every coefficient at the start", low=-10, high=10)
    l1: float = param(0.0, "factor on the mean |coefficient| added to the objective", low=0)
    l2: float = param(0.0, "factor on the mean squared coefficient", low=0)
    folds: int = param(5, "parts of the cross-validation; 0 leaves it out", low=0, high=100)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folds == 1:
            raise UsageError(
                "parameter `folds` must be 0 or at least 2, found 1", code="parameter", found=1
            )


_ONLY: dict[str, tuple[str, str]] = {
    "low": ("constraint", "bounded"),
    "high": ("constraint", "bounded"),
    "reads": ("objective", "entropy"),
    "start": ("objective", "entropy"),
    "evaluations": ("optimiser", "scipy"),
    "steps": ("optimiser", "adam"),
    "lr": ("optimiser", "adam"),
}
"""Settings that mean something only together with another one."""


@dataclass(frozen=True, kw_only=True)
class AutoSettings(Checked):
    """How a method is chosen."""

    folds: int = param(5, "parts of the cross-validation", low=2, high=100)
    passes: int = param(
        6000, "most forward passes over the examples; candidates beyond are left out", low=1
    )
    routed: bool = param(True, "false leaves out routers: the result is one adapter")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A name for some settings of the learner, with the words of its help page.

    Attributes:
        name: What users type.
        summary: What it does, in a line.
        about: Formula, paper, difference, when to use it.
        settings: Where they differ from the learner's defaults.
        cost: What it takes.
        needs: What it needs beyond the experts.
    """

    name: str
    summary: str
    about: About
    settings: Mapping[str, Any]
    cost: str
    needs: tuple[str, ...] = ("--examples with answers", "--base")
    kind: type[Checked] = Learner

    @property
    def params(self) -> "list[dataclasses.Field[Any]]":
        """Return the settings that have an effect here."""
        fixed = {item.name: item.default for item in dataclasses.fields(self.kind)}
        fixed |= self.settings
        return [
            item
            for item in dataclasses.fields(self.kind)
            if item.name not in _ONLY or fixed[_ONLY[item.name][0]] == _ONLY[item.name][1]
        ]

    def default(self, item: "dataclasses.Field[Any]") -> Any:
        """Return what a setting is when the user says nothing."""
        return self.settings.get(item.name, item.default)


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="lorahub",
            summary="One coefficient per expert, learned from a few examples without gradients",
            about=About(
                formula="ΔW = Σ c_e·ΔW_e, c minimising loss(examples) + 0.05·mean|c|, |c_e| ≤ 1.5",
                paper="Huang et al. 2023, arXiv:2307.13269",
                differs="ΔW is combined, not A and B apart, so that negative coefficients subtract;"
                " COBYQA instead of nevergrad's NGOpt; base and every single expert are among the"
                " points that are compared, so that none of them has a better objective on the"
                " examples; ranks and modules may differ; any causal"
                " model, and those with an encoder (T5)",
                use_when="five to fifty examples of a new task that resembles the experts' own",
            ),
            settings={
                "granularity": "model",
                "constraint": "bounded",
                "optimiser": "scipy",
                "l1": 0.05,
            },
            cost="40 forward passes over the examples, no gradients; --set folds=0 leaves out the"
            " cross-validation, which costs up to five times as much again",
        ),
        Preset(
            name="atlas",
            summary="One coefficient per expert and module, learned by gradient from examples",
            about=About(
                formula="ΔW_m = Σ c_em·ΔW_em, c minimising the loss on the examples",
                paper="Zhang et al. 2024 (aTLAS), arXiv:2407.02880",
                differs="a block is a module's ΔW, never A or B alone; starts from the best equal"
                " coefficients instead of 0; keeps the best point seen on the examples, not on"
                " other data; all examples in every step; no weight decay unless --set l2=…",
                use_when="twenty or more examples, also of several skills at once",
            ),
            settings={"granularity": "module", "lr": 0.02},
            cost="steps forward and backward passes over the examples, and as often again for"
            " each fold of the cross-validation",
        ),
        Preset(
            name="adamerging",
            summary="One coefficient per expert and layer that makes the model surest, no answers",
            about=About(
                formula="ΔW_l = Σ c_el·ΔW_el, c minimising the mean entropy of predictions,"
                " 0 ≤ c ≤ 1",
                paper="Yang et al. 2024, arXiv:2310.02575",
                differs="entropy of the first answer token over the vocabulary (--set reads=answer:"
                " along the given answers) instead of class heads; all prompts in every step; the"
                " surest point along the way is kept",
                use_when="there are prompts of the tasks but no answers",
            ),
            settings={
                "granularity": "layer",
                "constraint": "bounded",
                "low": 0.0,
                "high": 1.0,
                "objective": "entropy",
                "start": 0.3,
            },
            cost="steps forward and backward passes over the prompts",
            needs=("--examples (prompts; answers are not read)", "--base"),
        ),
        Preset(
            name="soups",
            summary="LoRA Soups: shares per expert and module that sum to 1, learned by gradient",
            about=About(
                formula="ΔW_m = Σ c_em·ΔW_em, c_em ≥ 0, Σ_e c_em = 1, minimising the loss",
                paper="Prabhakar et al. 2024 (CAT), arXiv:2410.13025",
                differs="the shares are found on the given examples; all of them in every step;"
                " best point seen on them",
                use_when="two skills are needed together and examples of that are at hand",
            ),
            settings={"granularity": "module", "constraint": "simplex", "lr": 0.1},
            cost="steps forward and backward passes over the examples, and as often again for"
            " each fold of the cross-validation",
        ),
        Preset(
            name=AUTO,
            summary="Chooses by cross-validation on the examples, and composes what was chosen",
            about=About(
                formula="the best of: each expert, linear, task-arithmetic and ties with the scale"
                " chosen, lorahub, atlas, retrieval, gate",
                paper="Wolpert 1992 (stacking); van der Laan et al. 2007",
                differs="every choice (scales, coefficients) is made anew without the fold that it"
                " is measured on",
                use_when="you have examples and do not want to choose a method",
            ),
            settings={},
            cost="about 5,000 forward passes over the examples, of which gate takes 3,600; --set"
            " passes=N limits it",
            kind=AutoSettings,
        ),
    )
}
"""Everything that `--examples` can be given to."""


def is_learned(name: str) -> bool:
    """Whether a method learns from examples."""
    return name in PRESETS


def make_learner(name: str, values: Mapping[str, Any] | None = None) -> Learner:
    """Return the learner of a preset.

    Args:
        name: One of `PRESETS` except `auto`.
        values: Settings that differ; strings are read.

    Raises:
        UsageError: Unknown setting, a value out of range, or one that has no effect.
    """
    given = dict(values or {})
    made = build_params(Learner, {**PRESETS[name].settings, **given}, name)
    for key in given:
        owner, wanted = _ONLY.get(key, ("", ""))
        if owner and getattr(made, owner) != wanted:
            raise UsageError(
                f"`{name}` makes no use of `{key}`: that is for {owner}={wanted},"
                f" here it is {getattr(made, owner)}",
                code="parameter",
                hint=f"leave it out, or add --set {owner}={wanted}",
                found=key,
            )
    return made


def make_auto(values: Mapping[str, Any] | None = None) -> AutoSettings:
    """Return the settings of `auto`.

    Raises:
        UsageError: Unknown setting, or a value out of range.
    """
    return build_params(AutoSettings, values or {}, AUTO)
