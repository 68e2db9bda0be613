"""Routed methods: how one is found and described.

What `cgmerge compose --method NAME` makes of them is a `Composition` with a router; everything
that differs between them is the function that makes the router. Merge methods, whose weights do
not depend on the input, are in `cgmerge.merge`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cgmerge.merge.params import Checked, build_params
from cgmerge.merge.registry import About
from cgmerge.modules.routing.fitting import FitInput, Fitted, Labelled, Progress
from cgmerge.modules.routing.flow import FlowParams, make_flow
from cgmerge.modules.routing.gate import GateParams, make_gate
from cgmerge.modules.routing.phatgoose import PhatgooseParams, make_phatgoose
from cgmerge.modules.routing.retrieval import RetrievalParams, make_retrieval
from cgmerge.modules.routing.router import (
    Granularity,
    RetrievalRouter,
    TaskRouter,
    TokenRouter,
)
from cgmerge.modules.routing.spectral import (
    ArrowParams,
    SpectralParams,
    make_arrow,
    make_spectral,
)
from cgmerge.modules.routing.table import TaskParams, make_table

__all__ = [
    "FitInput",
    "Fitted",
    "Labelled",
    "Progress",
    "RoutedMethod",
    "find_routed",
    "routed_methods",
]

Need = Literal["base", "examples"]


@dataclass(frozen=True, kw_only=True)
class RoutedMethod:
    """One routed method; everything the program knows about it.

    Attributes:
        name: What users type.
        summary: What it does, in a line.
        about: Formula, paper, difference to the official code, when to use it.
        params: Its parameter dataclass.
        needs: What it needs beyond the experts.
        named: Whether it must know which expert each example is for.
        granularity: What decides: every token, or every sequence.
        make: Makes the router.
        aliases: Other names.
    """

    name: str
    summary: str
    about: About
    params: type[Checked]
    needs: frozenset[Need] = frozenset()
    named: bool = False
    granularity: Granularity
    make: Callable[[FitInput], Fitted]
    aliases: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Return the kind of router that it makes."""
        if self.granularity == "token":
            return TokenRouter.kind
        return RetrievalRouter.kind if self.needs else TaskRouter.kind

    def make_params(self, values: Mapping[str, Any] | None = None) -> Checked:
        """Build the parameters from plain values or from strings as typed on a command line.

        Raises:
            UsageError: Unknown name, wrong type, or out of range.
        """
        return build_params(self.params, values or {}, self.name)


_LEARNED: frozenset[Need] = frozenset({"base", "examples"})

_METHODS = (
    RoutedMethod(
        name="arrow",
        summary="Every token goes to the experts whose main input direction it points along",
        about=About(
            formula="w = softmax over the top k of |v_e·h|/T, v_e the leading right singular"
            " vector of ΔW_e",
            paper="Ostapenko et al. 2024 (Arrow), arXiv:2405.11157",
            differs="v_e exactly, from QR and a small SVD (PEFT: 15 power iterations from a random"
            " start); experts' outputs are mixed, never A and B apart (mttl); ranks and modules"
            " may differ; a k above the number of experts is clipped",
            use_when="many experts, no examples, and inputs that differ between skills",
        ),
        params=ArrowParams,
        granularity="token",
        make=make_arrow,
    ),
    RoutedMethod(
        name="spectral",
        summary="Every token goes to the experts that would change it most",
        about=About(
            formula="w = softmax over the top k of ‖ΔW_e·h‖/T, or of ‖V_eᵀh‖/T with the leading"
            " q directions V_e",
            paper="SpectR (COLM 2025); arXiv:2408.10174 (SMILE) for q directions",
            differs="‖ΔW_e·h‖ from A·h, which is computed anyway, and the Gram matrix of B: no SVD",
            use_when="as arrow, where experts have no single main direction",
        ),
        params=SpectralParams,
        granularity="token",
        make=make_spectral,
        aliases=("spectr",),
    ),
    RoutedMethod(
        name="gate",
        summary="A linear gate per module decides for every token, learned from a few examples",
        about=About(
            formula="w = softmax(W·h + c), W minimising the loss on the examples",
            paper="as in mixtures of LoRA experts (arXiv:2404.13628, mergoo)",
            differs="learns with all experts from zero; pruned to k afterwards, only as far as the"
            " examples lose nothing; experts and base stay as they are",
            use_when="five or more examples per skill; also where one text needs several skills",
        ),
        params=GateParams,
        needs=_LEARNED,
        granularity="token",
        make=make_gate,
    ),
    RoutedMethod(
        name="phatgoose",
        summary="Gate vectors that each expert learns alone, compared for every token",
        about=About(
            formula="w = softmax over the top k of LN(v_e)·LN(h)/√d; v_e from W·h + σ(v_eᵀh)·ΔW_e·h"
            " on the expert's own examples",
            paper="Muqeeth et al. 2024 (PHATGOOSE), arXiv:2402.05859",
            differs="Adam on the given examples, all in every step, the best vectors seen;"
            " temperature after the √d",
            use_when="experts come from different owners, who cannot train together",
        ),
        params=PhatgooseParams,
        needs=_LEARNED,
        named=True,
        granularity="token",
        make=make_phatgoose,
    ),
    RoutedMethod(
        name="lora-flow",
        summary="One gate per layer with free strength, learned from a few examples",
        about=About(
            formula="w = softmax(W·h/T) + b for all modules of a layer, h its input",
            paper="Wang et al. 2024 (LoRA-Flow), arXiv:2402.11455",
            differs="begins with the expert (or the even mix) that is best on the examples instead"
            " of the last one; any number of experts; no vendored transformers",
            use_when="a new task that needs one expert much and others a little",
        ),
        params=FlowParams,
        needs=_LEARNED,
        granularity="token",
        make=make_flow,
    ),
    RoutedMethod(
        name="retrieval",
        summary="Every prompt goes to the expert whose examples it resembles",
        about=About(
            formula="w from cos(m(prompt) − c, μ_e − c): the top k, or a kernel with a threshold",
            paper="LoraRetriever, arXiv:2402.09997; TTMM, arXiv:2505.14136 for the kernel",
            differs="the base's own mean hidden state, centred, unless --set encoder=… names a"
            " sentence encoder; weights are given beside the base, never merged into it",
            use_when="a prompt needs one skill, and its text tells which; servable by vLLM",
        ),
        params=RetrievalParams,
        needs=_LEARNED,
        named=True,
        granularity="sequence",
        make=make_retrieval,
    ),
    RoutedMethod(
        name="task",
        summary="A table says which experts a task uses; whoever asks names the task",
        about=About(
            formula="w = table[task]",
            paper="the oracle of the routing papers; Poly's allocation (arXiv:2202.13914) by hand",
            use_when="the task is always known; an upper mark for the others",
        ),
        params=TaskParams,
        granularity="sequence",
        make=make_table,
    ),
)


def routed_methods() -> list[RoutedMethod]:
    """Return every routed method once, sorted by name."""
    return sorted(_METHODS, key=lambda method: method.name)


def find_routed(name: str) -> RoutedMethod | None:
    """Return a routed method by name or alias; None where there is none."""
    return next((m for m in _METHODS if name == m.name or name in m.aliases), None)
