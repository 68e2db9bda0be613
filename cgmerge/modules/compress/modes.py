"""The compression modes behind one door: factors in, whole numbers with scales out, and back.

`ternary`  signs chosen for the product ΔW, at the best density for each tensor (the default);
           with `gauge="raw"` signs of the stored factors themselves, exactly k per tensor
`svdq`     singular directions on a grid of one common step: the smallest at high fidelity
`compeft`  the published algorithm: one threshold and one scalar for all factors
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cgmerge.errors import Damaged, Incompatible, UsageError
from cgmerge.merge.deltas import LowRank
from cgmerge.merge.engine import one_thread
from cgmerge.modules.compress.budget import fit
from cgmerge.modules.compress.compeft import global_signs, sample_deviation
from cgmerge.modules.compress.fidelity import Fidelity, fidelity
from cgmerge.modules.compress.rate import SCALE_BITS, entropy_bits
from cgmerge.modules.compress.sections import Coded
from cgmerge.modules.compress.svdq import quantised_terms
from cgmerge.modules.compress.terms import Terms
from cgmerge.modules.compress.ternary import ternary_terms
from cgmerge.modules.compress.topk import top_k_signs

Mode = Literal["ternary", "svdq", "compeft"]
MODES: tuple[Mode, ...] = ("ternary", "svdq", "compeft")

DENSITY = 0.2
"""Share of entries kept where neither a density nor a size is asked for."""

_RAW_MULTIPLIERS = ((0.05, 2.2), (0.1, 2.0), (0.2, 1.7), (0.5, 1.3), (1.0, 1.0))
"""Best multipliers of the scales of raw factors by density, measured on trained experts."""


def estimated_bytes(coded: Sequence[Coded]) -> float:
    """Return what the tensors cost at least: entropy of the levels, and the scales."""
    bits = sum(entropy_bits(part.levels) + SCALE_BITS * part.scales.size for part in coded)
    return bits / 8.0


@dataclass(frozen=True)
class Options:
    """What a mode is asked for.

    Attributes:
        density: Share of entries kept, in (0, 1]; None where a size is asked for.
        target: Bytes of the result, by `size_of`; the knob of the mode is turned to just below.
        size_of: Bytes of a list of coded tensors.
        multiplier: Factor on the delta; None takes the data-free default of the mode.
        alpha: Of `compeft`, factor on σ.
        gauge: Of `ternary`: `free` to choose signs for ΔW, `raw` to keep the factors' own basis.
        scaling: Module to what its B must still be multiplied by; absent is 1.
    """

    density: float | None = None
    target: float | None = None
    size_of: Callable[[Sequence[Coded]], float] = estimated_bytes
    multiplier: float | None = None
    alpha: float = 1.0
    gauge: Literal["free", "raw"] = "free"
    scaling: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoded:
    """A compressed expert and what is known about it.

    Attributes:
        coded: Two tensors for each module, names sorted.
        mode: How it was made.
        gauge: `raw` where A and B are still in the basis they were trained in.
        multiplier: Factor on the delta that the scales hold.
        knob: Slope, step or density that was settled on.
        entries: Parameters of the expert before.
        fidelity: Likeness of every module.
    """

    coded: list[Coded]
    mode: Mode
    gauge: Literal["free", "raw"]
    multiplier: float
    knob: float
    entries: int
    fidelity: Fidelity

    @property
    def density(self) -> float:
        """Return the share of entries that are not zero."""
        return count_nonzero(self.coded) / self.entries

    def times(self, factor: float) -> "Encoded":
        """Return the same with another factor on the delta (on the scales of B)."""
        coded = [
            replace(part, scales=(part.scales.astype(np.float64) * factor).astype(np.float32))
            if part.name.endswith(".lora_B")
            else part
            for part in self.coded
        ]
        fidelity = self.fidelity.scaled(factor)
        return replace(self, coded=coded, multiplier=self.multiplier * factor, fidelity=fidelity)


def encode(mode: Mode, factors: Mapping[str, LowRank], options: Options) -> Encoded:
    """Compress the factors of an expert.

    Args:
        mode: One of `MODES`.
        factors: Module path to float factors; not modified.
        options: Density or size, and the settings of the mode.

    Returns:
        Tensors whose decoded values are the result on every machine. The same input and options
        give the same tensors, whatever the number of threads.

    Raises:
        Damaged: NaN or infinity, with the tensor's name.
        Incompatible: All deltas are zero, or nothing is left of them at this density.
        UsageError: Settings out of range, or a size that the mode cannot reach.
    """
    _check(mode, options)
    with one_thread():
        _check_finite(factors)
        exact = {name: _folded(factors[name], options, name) for name in sorted(factors)}
        if all(delta.norm() == 0.0 for delta in exact.values()):
            raise Incompatible(
                "all deltas are zero: the expert has no effect",
                code="no_effect",
                hint="check that it is a trained adapter",
            )
        make: _Make = {"ternary": _Free, "svdq": _Stepped, "compeft": _Published}[mode](
            exact, factors, options
        )
        if mode == "ternary" and options.gauge == "raw":
            make = _Raw(exact, factors, options)
        encoded = make.best()
    if encoded.fidelity.total.coded_sq <= 0:
        raise Incompatible(
            f"nothing is left of the expert in mode {mode}"
            f" {'at this size' if options.target else f'at density {_density(options):g}'}",
            code="emptied",
            hint="ask for more bytes or a higher density"
            + (", or use --mode ternary" if mode == "compeft" else ""),
        )
    return encoded


def decode(coded: Sequence[Coded]) -> dict[str, LowRank]:
    """Return the factors that coded tensors stand for: float32, one product per entry.

    Args:
        coded: Names end in `.lora_A` and `.lora_B`, both for each module.
    """
    tensors = {part.name: decode_tensor(part) for part in coded}
    names = sorted(name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A"))
    return {name: LowRank(tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]) for name in names}


def decode_tensor(part: Coded) -> Tensor:
    """Return the values of one coded tensor, float32."""
    values = part.levels.astype(np.float32)
    values *= part.scales.reshape(-1, 1)
    return torch.from_numpy(np.ascontiguousarray(values.T) if part.transposed else values)


def count_nonzero(coded: Sequence[Coded]) -> int:
    """Return how many levels are not zero."""
    return sum(int(np.count_nonzero(part.levels)) for part in coded)


class _Make:
    """One mode at work on one expert."""

    mode: Mode
    gauge: Literal["free", "raw"] = "free"

    def __init__(
        self, exact: dict[str, LowRank], factors: Mapping[str, LowRank], options: Options
    ) -> None:
        self.exact = exact
        self.factors = factors
        self.options = options
        self.entries = sum(delta.a.numel() + delta.b.numel() for delta in exact.values())
        self.energy = math.fsum(delta.norm() ** 2 for delta in exact.values())

    def at(self, knob: float) -> Encoded:
        """Return the result for a knob, with the default or wanted multiplier."""
        raise NotImplementedError

    def best(self) -> Encoded:
        """Return the result for the asked density or size."""
        raise NotImplementedError

    def by_size(self, bounds: tuple[float, float], start: float) -> Encoded:
        """Turn the knob to the asked size, or else to the asked density."""
        options = self.options
        if options.target is not None:
            size_of = options.size_of
            return fit(self.at, lambda e: size_of(e.coded), options.target, bounds, start)[1]
        count = _density(options) * self.entries
        return fit(self.at, lambda e: count_nonzero(e.coded), count, bounds, start)[1]

    def finished(self, coded: list[Coded], knob: float, default: float | None) -> Encoded:
        """Measure, and put the multiplier in.

        Args:
            coded: With multiplier 1.
            knob: What they were made with.
            default: Data-free multiplier; None restores the norm of the task vector.
        """
        found = fidelity(self.exact, decode(coded))
        encoded = Encoded(coded, self.mode, self.gauge, 1.0, knob, self.entries, found)
        factor = self.options.multiplier
        if factor is None:
            # Least squares gives ‖ΔŴ‖ = cos·‖ΔW‖. What was dropped is mostly harmless noise, what
            # was kept should act at full strength: 1/cos was within 2 % of the tuned score.
            factor = default or 1.0 / max(found.cosine, 0.05)
        return encoded if factor == 1.0 else encoded.times(factor)


class _Terms(_Make):
    def terms(self, delta: LowRank, knob: float) -> Terms:
        raise NotImplementedError

    def at(self, knob: float) -> Encoded:
        coded = [
            part
            for name, delta in self.exact.items()
            for part in self.terms(delta, knob).coded(name)
        ]
        return self.finished(coded, knob, None)


class _Free(_Terms):
    mode = "ternary"

    def terms(self, delta: LowRank, knob: float) -> Terms:
        return ternary_terms(delta, knob)

    def best(self) -> Encoded:
        per_entry = self.energy / self.entries
        return self.by_size((1e-7 * per_entry, self.energy), 0.25 * per_entry)


class _Stepped(_Terms):
    mode = "svdq"

    def terms(self, delta: LowRank, knob: float) -> Terms:
        return quantised_terms(delta, knob)

    def best(self) -> Encoded:
        typical = math.sqrt(self.energy / self.entries)
        return self.by_size((1e-4 * typical, math.sqrt(self.energy)), typical)


class _Raw(_Make):
    mode = "ternary"
    gauge = "raw"

    def at(self, knob: float) -> Encoded:
        density = 1.0 / knob
        coded = [
            _signs(f"{name}.lora_{side}", values, density)
            for name, delta in self.exact.items()
            for side, values in (("A", delta.a), ("B", delta.b))
        ]
        return self.finished(coded, density, raw_multiplier(density) ** 2)

    def best(self) -> Encoded:
        if self.options.target is None:
            return self.at(1.0 / _density(self.options))
        return self.by_size((1.0, float(self.entries)), 10.0)


class _Published(_Make):
    mode = "compeft"
    gauge = "raw"

    def at(self, knob: float) -> Encoded:
        density = 1.0 / knob
        sigma = self.options.alpha * self.sigma
        coded = []
        for signs in global_signs(self.tensors, density):
            module, side = signs.name.rsplit(".lora_", 1)
            scale = sigma * self.options.scaling.get(module, 1.0) if side == "B" else sigma
            coded.append(_coded(signs.name, signs.levels, scale))
        return self.finished(coded, density, 1.0)

    def best(self) -> Encoded:
        self.tensors = {
            f"{name}.lora_{side}": values.float()
            for name, delta in self.factors.items()
            for side, values in (("A", delta.a), ("B", delta.b))
        }
        self.sigma = sample_deviation(self.tensors)
        if self.options.target is None:
            return self.at(1.0 / _density(self.options))
        return self.by_size((1.0, float(self.entries)), 10.0)


def raw_multiplier(density: float) -> float:
    """Return the data-free multiplier of the scales of raw factors, by linear interpolation."""
    xs, ys = zip(*_RAW_MULTIPLIERS, strict=True)
    return float(np.interp(density, xs, ys))


def _signs(name: str, values: Tensor, density: float) -> Coded:
    found = top_k_signs(values.float().numpy(), density)
    return _coded(name, found.levels, found.scale)


def _coded(name: str, levels: np.ndarray, scale: float) -> Coded:
    """Store B by component, as terms are stored."""
    if not levels.any():
        scale = 1.0
    transposed = name.endswith(".lora_B")
    return Coded(
        name,
        np.ascontiguousarray(levels.T) if transposed else levels,
        np.array([scale], dtype=np.float32),
        transposed,
    )


def _density(options: Options) -> float:
    return DENSITY if options.density is None else options.density


def _folded(delta: LowRank, options: Options, name: str) -> LowRank:
    scaling = options.scaling.get(name, 1.0)
    return delta if scaling == 1.0 else LowRank(delta.a, delta.b * scaling)


def _check(mode: str, options: Options) -> None:
    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r}; one of {', '.join(MODES)}", code="mode")
    for name, value, most in _ranges(options):
        if value is not None and not 0.0 < value <= most:
            upper = f" and at most {most:g}" if math.isfinite(most) else ""
            raise UsageError(
                f"{name} must be above 0{upper}, found {value:g}", code=name, found=value
            )
    if options.density is not None and options.target is not None:
        raise UsageError("a density and a size are both asked for", code="target")


def _ranges(options: Options) -> Iterator[tuple[str, float | None, float]]:
    yield "density", options.density, 1.0
    yield "target", options.target, math.inf
    yield "multiplier", options.multiplier, 1e6
    yield "alpha", options.alpha, 1e6


def _check_finite(factors: Mapping[str, LowRank]) -> None:
    for name in sorted(factors):
        for side, values in (("A", factors[name].a), ("B", factors[name].b)):
            if not torch.isfinite(values).all():
                bad = int((~torch.isfinite(values)).sum())
                raise Damaged(
                    f"{name}.lora_{side} holds {bad} values that are NaN or infinite",
                    code="not_finite",
                    hint="the expert is broken (often a diverged training); train it again",
                    tensor=f"{name}.lora_{side}",
                    found=bad,
                )
