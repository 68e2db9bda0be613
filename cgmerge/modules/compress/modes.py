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
from cgmerge.modules.compress.budget import CLOSE, MANY_PEAKS, ONE_PEAK, fit_density
from cgmerge.modules.compress.codec import coded_bits
from cgmerge.modules.compress.compeft import global_signs, sample_deviation
from cgmerge.modules.compress.fidelity import Fidelity, fidelity
from cgmerge.modules.compress.rate import SCALE_BITS
from cgmerge.modules.compress.sections import Coded
from cgmerge.modules.compress.svdq import quantised_terms
from cgmerge.modules.compress.termfit import Decompose, Decomposer, coded_terms, fit_terms
from cgmerge.modules.compress.ternary import ternary_terms
from cgmerge.modules.compress.topk import top_k_signs
from cgmerge.plain import exact

Mode = Literal["ternary", "svdq", "compeft"]
Gauge = Literal["svd", "raw"]
MODES: tuple[Mode, ...] = ("ternary", "svdq", "compeft")

DENSITY = 0.2
"""Share of entries kept where neither a density nor a size is asked for."""

_RAW_MULTIPLIERS = ((0.05, 2.2), (0.1, 2.0), (0.2, 1.7), (0.5, 1.3), (1.0, 1.0))
"""Best multipliers of the scales of raw factors by density, measured on trained experts."""


_LEAST_COSINE = 0.05
_LARGEST = float(torch.finfo(torch.float32).max)


def coded_bytes(coded: Sequence[Coded]) -> float:
    """Return the bytes of levels and scales as the codec writes them, headers and index apart."""
    bits = sum(coded_bits(part.levels) + SCALE_BITS * part.scales.size for part in coded)
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
        gauge: Of `ternary`: `svd` to choose signs for ΔW, `raw` to keep the factors' own basis.
        scaling: Module to what its B must still be multiplied by; absent is 1.
        progress: Called with the number of modules done and the number of the pass over all of
            them; how many passes a size takes is not known before.
    """

    density: float | None = None
    target: float | None = None
    size_of: Callable[[Sequence[Coded]], float] = coded_bytes
    multiplier: float | None = None
    alpha: float = 1.0
    gauge: Gauge = "svd"
    scaling: Mapping[str, float] = field(default_factory=dict)
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True)
class Encoded:
    """A compressed expert and what is known about it.

    Attributes:
        coded: Two tensors for each module, names sorted.
        mode: How it was made.
        gauge: `raw` where A and B are still in the basis they were trained in.
        multiplier: Factor on the delta that the scales hold.
        entries: Parameters of the expert before.
        fidelity: Likeness of every module.
        alpha: Of `compeft`, factor on σ.
        above: Where a size was asked for and is not met within a percent, the next result above
            it; None where the mode has none.
        next_bytes: What a file of that would take, where it was asked for.
    """

    coded: list[Coded]
    mode: Mode
    gauge: Gauge
    multiplier: float
    entries: int
    fidelity: Fidelity
    alpha: float = 1.0
    above: "Encoded | None" = field(default=None, repr=False)
    next_bytes: int | None = None

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


class TooSmall(UsageError):
    """No result is as small as asked.

    Attributes:
        smallest: The smallest that leaves anything of the expert.
    """

    def __init__(self, smallest: Encoded, size: float, target: float) -> None:
        super().__init__(
            f"the smallest that mode {smallest.mode} gives is {math.ceil(size):,} bytes, asked are"
            f" {math.floor(target):,}",
            code="target",
            hint="ask for more bytes",
            expected=math.floor(target),
            found=math.ceil(size),
        )
        self.smallest = smallest


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
        Incompatible: All deltas are zero or too large, or nothing is left of them at this density.
        UsageError: Settings out of range, or a size that the mode cannot reach.
    """
    _check(mode, options)
    gauge: Gauge = "raw" if mode == "compeft" else "svd" if mode == "svdq" else options.gauge
    with one_thread():
        _check_finite(factors)
        exact = {name: _folded(factors[name], options, name) for name in sorted(factors)}
        if all(delta.norm() == 0.0 for delta in exact.values()):
            raise Incompatible(
                "all deltas are zero: the expert has no effect",
                code="no_effect",
                hint="check that it is a trained adapter",
            )
        _check_range(exact)
        work = _Work(exact, factors, options)
        coded, above = work.terms(mode) if gauge == "svd" else work.signs(mode)
        encoded = work.finished(mode, gauge, coded)
        if above is not None:
            encoded = replace(encoded, above=work.finished(mode, gauge, above))
    if encoded.fidelity.total.coded_sq <= 0:
        if options.target is not None and encoded.above is not None:
            size = options.size_of(encoded.above.coded)
            raise TooSmall(encoded.above, size, options.target)
        raise Incompatible(
            f"nothing is left of the expert in mode {mode}"
            f" {'at this size' if options.target else f'at density {_density(options):g}'}",
            code="emptied",
            hint=("ask for more bytes" if options.target else "use a higher --density")
            + (", or --mode ternary" if mode == "compeft" else "")
            + ", or keep every bit: --lossless",
        )
    return encoded


def decode(coded: Sequence[Coded]) -> dict[str, LowRank]:
    """Return the factors that coded tensors stand for: float32, one product per entry.

    Args:
        coded: Names end in `.lora_A` and `.lora_B`, both for each module.
    """
    return dict(_decoded(coded))


def _decoded(coded: Sequence[Coded]) -> Iterator[tuple[str, LowRank]]:
    """Decode module by module, as far as somebody looks."""
    parts = {part.name: part for part in coded}
    for name in sorted(n.removesuffix(".lora_A") for n in parts if n.endswith(".lora_A")):
        yield name, LowRank(parts[f"{name}.lora_A"].tensor(), parts[f"{name}.lora_B"].tensor())


def count_nonzero(coded: Sequence[Coded]) -> int:
    """Return how many levels are not zero."""
    return sum(int(np.count_nonzero(part.levels)) for part in coded)


class _Work:
    """One expert at work."""

    def __init__(
        self, exact: dict[str, LowRank], factors: Mapping[str, LowRank], options: Options
    ) -> None:
        self.exact = exact
        self.factors = factors
        self.options = options
        self.entries = sum(delta.a.numel() + delta.b.numel() for delta in exact.values())
        self.energy = math.fsum(delta.norm() ** 2 for delta in exact.values())

    def terms(self, mode: Mode) -> tuple[list[Coded], list[Coded] | None]:
        """Choose terms of all modules for the asked size or density; also what comes next."""
        options = self.options
        per_entry = self.energy / self.entries
        decompose: Decompose = ternary_terms
        knobs = (1e-7 * per_entry, self.energy, 0.25 * per_entry)
        if mode == "svdq":
            decompose, typical = quantised_terms, math.sqrt(per_entry)
            knobs = (1e-4 * typical, math.sqrt(self.energy), typical)
        size_of: Callable[[Sequence[Coded]], float] = count_nonzero
        target = _density(options) * self.entries
        if options.target is not None:
            size_of, target = self.size_if_left, options.target
        make = Decomposer(self.exact, decompose, options.progress)
        found = fit_terms(make, size_of, target, knobs)
        assert found.below is not None
        if options.target is None or found.above is found.below:
            return coded_terms(found.below), None
        above = None if found.above is None else coded_terms(found.above)
        return coded_terms(found.below), above

    def signs(self, mode: Mode) -> tuple[list[Coded], list[Coded] | None]:
        """Take signs of the factors as they are, at the asked density or just below the size."""
        make = self._published() if mode == "compeft" else self._raw
        gauge: Gauge = "raw"
        target, size_of = self.options.target, self.options.size_of
        if target is None:
            return make(_density(self.options)), None

        def error_at(density: float) -> float:
            return self.finished(mode, gauge, make(density)).fidelity.error

        densities = (1.0 / self.entries, *(MANY_PEAKS if mode == "compeft" else ONE_PEAK))
        found = fit_density(lambda d: self.size_if_left(make(d)), error_at, target, densities)
        above = None if found.above is None else make(found.above)
        if found.below is not None:
            coded = make(found.below)
            return coded, None if size_of(coded) >= CLOSE * target else above
        if above is None:
            return make(1.0), None
        raise TooSmall(self.finished(mode, gauge, above), size_of(above), target)

    def size_if_left(self, coded: Sequence[Coded]) -> float:
        """Return the size, 0 where no module has an effect any more: that is no result."""
        left = any(delta.norm() > 0.0 for _, delta in _decoded(coded))
        return self.options.size_of(coded) if left else 0.0

    def finished(self, mode: Mode, gauge: Gauge, coded: list[Coded]) -> Encoded:
        """Measure, and put the multiplier in."""
        found = fidelity(self.exact, decode(coded))
        encoded = Encoded(coded, mode, gauge, 1.0, self.entries, found, self.options.alpha)
        factor = self.options.multiplier
        if factor is None:
            factor = self._default(mode, encoded)
        return encoded if factor == 1.0 else encoded.times(factor)

    def _default(self, mode: Mode, encoded: Encoded) -> float:
        """Return the multiplier that is taken without data."""
        if mode == "compeft":
            return 1.0
        if encoded.gauge == "raw":
            return raw_multiplier(encoded.density) ** 2
        # Least squares gives ‖ΔŴ‖ = cos·‖ΔW‖. What was dropped acts like noise and does little,
        # what was kept should act at full strength: the norm of ΔW is restored.
        return 1.0 / max(encoded.fidelity.cosine, _LEAST_COSINE)

    def _raw(self, density: float) -> list[Coded]:
        return [
            _signs(f"{name}.lora_{side}", values, density)
            for name, delta in self.exact.items()
            for side, values in (("A", delta.a), ("B", delta.b))
        ]

    def _published(self) -> Callable[[float], list[Coded]]:
        tensors = {
            f"{name}.lora_{side}": values.float()
            for name, delta in self.factors.items()
            for side, values in (("A", delta.a), ("B", delta.b))
        }
        sigma = self.options.alpha * sample_deviation(tensors)

        def make(density: float) -> list[Coded]:
            coded = []
            for signs in global_signs(tensors, density):
                module, side = signs.name.rsplit(".lora_", 1)
                scaling = self.options.scaling.get(module, 1.0) if side == "B" else 1.0
                coded.append(_coded(signs.name, signs.levels, sigma * scaling))
            return coded

        return make


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
            upper = f" and at most {exact(most)}" if math.isfinite(most) else ""
            raise UsageError(
                f"{name} must be above 0{upper}, found {exact(value)}", code=name, found=value
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


def _check_range(exact: Mapping[str, LowRank]) -> None:
    """Refuse deltas that float32 cannot hold: no scale could be written, and no model runs."""
    for name, delta in exact.items():
        norm = delta.norm()
        if not norm <= _LARGEST:
            raise Incompatible(
                f"‖ΔW‖ of {name} is {norm:.3g}, beyond float32, which ends at {_LARGEST:.3g}",
                code="overflow",
                hint="the expert is broken (often a diverged training); train it again, or keep it"
                " as it is with --lossless",
                tensor=name,
                found=norm if math.isfinite(norm) else None,
            )
