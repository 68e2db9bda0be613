"""An expert's folder as a `.cge` file: what is asked, what is written, what the file says of it."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from cgmerge._version import __version__
from cgmerge.errors import Incompatible, UsageError
from cgmerge.modules.adapter_out import AdapterForm, adapter_config
from cgmerge.modules.base import Base
from cgmerge.modules.compress.advice import keeping_all
from cgmerge.modules.compress.budget import CLOSE
from cgmerge.modules.compress.container import write_cge
from cgmerge.modules.compress.fidelity import Fidelity
from cgmerge.modules.compress.manifest import WRITTEN_HERE
from cgmerge.modules.compress.modes import (
    MODES,
    Encoded,
    Gauge,
    Mode,
    Options,
    TooSmall,
    coded_bytes,
    encode,
)
from cgmerge.modules.compress.opened import CgeTensors
from cgmerge.modules.compress.sidecar import Restored, read_sidecar
from cgmerge.modules.expert import Expert, ExpertDeltas, open_expert
from cgmerge.plain import exact

if TYPE_CHECKING:
    from cgmerge.merge.deltas import LowRank

Result = TypeVar("Result")

DEFAULT_MODE: Mode = "ternary"
_TRIES = 5
_SPARE, _MARGIN = 64, 1.03
"""Bytes left free at first, as names and shapes deflate differently for every result."""

USED = 0.9
"""Share of the bytes asked for below which it is said what the next size would be."""

_MOST_BYTES = 2.0**62
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for; None is the mode's default.

    Attributes:
        mode: One of `MODES`.
        density: Share of entries kept.
        size: Bytes of the whole file.
        ratio: Bytes at 16 bits per parameter, over those of the file.
        gauge: `raw` keeps the basis of the factors (mode ternary).
        alpha: Factor on σ (mode compeft).
        multiplier: Factor on the delta (the other modes).
    """

    mode: Mode | None = None
    density: float | None = None
    size: int | None = None
    ratio: float | None = None
    gauge: Gauge | None = None
    alpha: float | None = None
    multiplier: float | None = None

    def asked(self) -> dict[str, Any]:
        """Return what was asked for, as it stands in the manifest."""
        names = self.__dataclass_fields__
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def target(self, entries: int) -> float | None:
        """Return the bytes that the file of so many parameters may have; None for a density."""
        if self.ratio is not None:
            return min(2.0 * entries / self.ratio, _MOST_BYTES)
        return None if self.size is None else float(self.size)

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            UsageError: Two sizes, or a setting that the mode does not have.
        """
        sizes = [name for name in ("density", "size", "ratio") if getattr(self, name) is not None]
        if len(sizes) > 1:
            raise UsageError(
                f"{' and '.join(sizes)} are asked for at once; one of them decides", code="target"
            )
        mode = self.mode or DEFAULT_MODE
        if mode not in MODES:
            raise UsageError(f"unknown mode {mode!r}; one of {', '.join(MODES)}", code="mode")
        if self.gauge is not None and self.gauge not in get_args(Gauge):
            raise UsageError(f"unknown gauge {self.gauge!r}; svd or raw", code="gauge")
        for name, value, modes in (
            ("alpha", self.alpha, ("compeft",)),
            ("multiplier", self.multiplier, ("ternary", "svdq")),
            ("gauge", self.gauge, ("ternary",)),
        ):
            if value is not None and mode not in modes:
                raise UsageError(
                    f"--{name} belongs to mode {' and '.join(modes)}, not to {mode}", code=name
                )
        for name in ("size", "ratio"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise UsageError(
                    f"the target {name} must be a finite number above 0, found {exact(value)}",
                    code=name,
                    found=value,
                )


@dataclass(frozen=True)
class Plan:
    """What to compress: checked, nothing computed.

    Attributes:
        expert: The adapter.
        base: The base it was checked against, where one was given.
        request: What is asked for.
        entries: Parameters of the adapter.
        restored: The file that the folder was decompressed from, where the request is the same.
        warnings: What the user should know.
    """

    expert: Expert
    base: Base | None
    request: Request
    entries: int
    restored: Restored | None = field(default=None, repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def mode(self) -> Mode:
        """Return the mode that is used."""
        if self.restored is not None:
            mode: Mode = self.restored.fields["method"]["mode"]
            return mode
        return self.request.mode or DEFAULT_MODE

    @property
    def target(self) -> float | None:
        """Return the bytes that the file may have, or None where a density decides."""
        return self.request.target(self.entries)

    def raw_factors(self) -> "Mapping[str, LowRank]":
        """Return the factors as trained, read lazily."""
        return _Raw(self.expert)

    def options(
        self, target: float | None, progress: Callable[[int, int], None] | None = None
    ) -> Options:
        """Return what the mode is asked for."""
        request = self.request
        return Options(
            density=request.density,
            target=target,
            multiplier=request.multiplier,
            alpha=1.0 if request.alpha is None else request.alpha,
            gauge=request.gauge or "svd",
            scaling={path: pair.scaling for path, pair in self.expert.pairs.items()},
            progress=progress,
        )


Maker = Callable[[Options], Encoded]
"""Encodes for options; the place where a search on validation data comes in."""

Fields = Callable[[Encoded], dict[str, Any]]
"""The manifest's fields for a result."""


def make_plan(
    ref: str, request: Request, base: Base | None = None, *, force_base: bool = False
) -> Plan:
    """Open an expert and check everything that can be checked without computing.

    Args:
        ref: The adapter's folder.
        request: What is asked for.
        base: To check names, shapes and fingerprint against.
        force_base: Accept another fingerprint (the shapes must still fit).

    Raises:
        UsageError: A request that makes no sense.
        InputError: An expert that cannot be used.
    """
    request.check()
    expert = open_expert(ref, base=base)
    if base is not None:
        expert.deltas(base, force_base=force_base)
    pairs = expert.pairs.values()
    entries = sum(pair.rank * (pair.out_features + pair.in_features) for pair in pairs)
    warnings = [*expert.warnings, *_forced(expert, base)]
    restored = _compressed_before(expert)
    if restored is not None:
        before = restored.fields.get("method", {}).get("asked", {})
        if request.asked() not in ({}, before):
            if not restored.lossless:
                warnings.append(
                    f"{expert.folder} was compressed before; it is compressed once more, from what"
                    " was left of it"
                )
            restored = None
    return Plan(expert, base, request, entries, restored, tuple(warnings))


def _forced(expert: Expert, base: Base | None) -> list[str]:
    own = expert.base_fingerprint
    if base is None or own in (None, base.fingerprint):
        return []
    return [f"--force-base: {expert.name} was made for {own}, but {base.ref} is {base.fingerprint}"]


def _compressed_before(expert: Expert) -> Restored | None:
    """Return the file that an expert is, or was decompressed from."""
    if not isinstance(expert.file, CgeTensors):
        return read_sidecar(expert)
    file = expert.file.file
    fields = {key: value for key, value in file.manifest.items() if key not in WRITTEN_HERE}
    dense = {name: file.read_dense(name) for name in file.dense}
    return Restored([file.read(name) for name in file.coded], fields, dict(file.details), dense)


def compress(
    plan: Plan,
    make: Maker,
    fields_of: Fields,
    progress: Callable[[int, int], None] | None = None,
) -> Encoded:
    """Encode, for a size that counts the whole file.

    Args:
        plan: Without `restored`.
        make: Encodes for options; called again where the first file is a little too large.
        fields_of: A manifest that is at least as long as the one that will be written: what it
            says takes bytes, too.
        progress: Called with modules done and the number of the pass over them.

    Returns:
        The result; its file is no larger than asked for. Where it is much smaller, `next_bytes`
        is what the next result above would take.

    Raises:
        UsageError: A size that cannot be reached.
        Incompatible: Nothing is left of the expert.
        Damaged: Values that are no numbers.
    """
    target = plan.target
    if target is None:
        return _at_density(plan, make, progress)
    # What a file holds besides levels and scales hardly depends on the mode: a quick one tells.
    sample = encode(
        "ternary",
        plan.raw_factors(),
        Options(density=0.1, gauge="raw", scaling=plan.options(None).scaling),
    )
    overhead = _file_bytes(sample, fields_of(sample)) - coded_bytes(sample.coded)

    def measure(one: Encoded) -> tuple[int, float]:
        return _file_bytes(one, fields_of(one)), coded_bytes(one.coded)

    def make_within(room: float) -> Encoded:
        try:
            return make(plan.options(room, progress))
        except TooSmall as error:
            size, payload = measure(error.smallest)
            if size <= target:  # more room was left for names and shapes than they take
                return error.smallest
            raise too_small(plan.mode, size, payload, target) from None

    spare = _MARGIN * overhead + _SPARE
    size, encoded = settle_size(plan.mode, target, spare, make_within, measure)
    if encoded.above is None:
        return encoded
    above = measure(encoded.above)[0]
    if above <= target:  # its names and shapes take less than was thought
        return encoded.above
    return replace(encoded, next_bytes=above) if size < USED * target else encoded


def _at_density(
    plan: Plan, make: Maker, progress: Callable[[int, int], None] | None = None
) -> Encoded:
    options = plan.options(None, progress)
    try:
        return make(options)
    except Incompatible as error:
        option = keeping_all(plan.mode, plan.raw_factors(), options) if _emptied(error) else None
        if option is not None:
            error.hint = f"{option} keeps every module, --lossless every bit"
        raise


def _emptied(error: Incompatible) -> bool:
    return error.code == "incompatible.emptied"


def settle_size(
    mode: Mode,
    target: float,
    spare: float,
    make: Callable[[float], Result],
    measure: Callable[[Result], tuple[int, float]],
) -> tuple[int, Result]:
    """Make the file that comes closest to a size from below.

    Args:
        mode: For messages.
        target: Bytes of the file.
        spare: Of these, what levels and scales do not take, by a first guess that is no less.
        make: A result whose levels and scales take at most so many bytes.
        measure: Bytes of a result's file, and of its levels and scales.

    Returns:
        Bytes of the file, and the result.

    Raises:
        UsageError: No file is as small.
    """
    best: tuple[int, Result] | None = None
    refusal: UsageError | None = None
    tried = math.inf
    for _ in range(_TRIES):
        result = make(max(target - spare, 1.0))
        size, payload = measure(result)
        if size > target:
            refusal = too_small(mode, size, payload, target)
            spare += size - target + (_SPARE if best is None else 1)
        else:
            best = (size, result) if best is None or size > best[0] else best
            tried = spare
            if size >= CLOSE * target:
                break
            spare = size - payload  # as this file has it, no longer as was guessed
        if spare >= tried:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def too_small(mode: Mode, size: int, payload: float, target: float) -> UsageError:
    """Return the refusal of a size below the smallest file.

    Args:
        mode: That was asked for.
        size: Bytes of the smallest file.
        payload: Of these, levels and scales.
        target: Bytes asked for.
    """
    return UsageError(
        f"the smallest file that mode {mode} gives is {size:,} bytes, {size - payload:,.0f} of them"
        f" for names, shapes and the manifest alone; asked are {math.floor(target):,}",
        code="target",
        hint=f"ask for more bytes: --target-size {size}",
        expected=math.floor(target),
        found=size,
    )


def manifest_fields(plan: Plan, encoded: Encoded, scores: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest of a result.

    Args:
        plan: What was compressed.
        encoded: The result.
        scores: Entries of `eval`.
    """
    expert, found = plan.expert, encoded.fidelity
    name = expert.card.base.name if expert.card else expert.config.base_name
    fingerprint = fingerprint_of(expert, plan.base)
    method: dict[str, Any] = {
        "mode": encoded.mode,
        "gauge": encoded.gauge,
        "density": short(encoded.density),
        "asked": plan.request.asked(),
    }
    if encoded.mode == "compeft":
        method["alpha"] = encoded.alpha
    else:
        method["multiplier"] = short(encoded.multiplier)
    if plan.base is not None and fingerprint != plan.base.fingerprint:
        method["forced_base"] = plan.base.fingerprint
    fields: dict[str, Any] = {
        "base": {"id": name or "unknown"} | ({"fingerprint": fingerprint} if fingerprint else {}),
        "peft": peft_config(expert, encoded),
        "method": method,
        "producer": f"cgmerge {__version__}",
        "sizes": {"bytes": expert.file.size, "parameters": plan.entries},
        "fidelity": fidelity_fields(found),
        "parents": [{"name": expert.name, "sha256": expert.digest}],
    }
    return fields | ({"eval": scores} if scores else {})


def fingerprint_of(expert: Expert, base: Base | None) -> str | None:
    """Return the fingerprint of the base that an expert is for: its own, where it tells one."""
    return expert.base_fingerprint or (base.fingerprint if base else None)


def fidelity_fields(found: Fidelity) -> dict[str, Any]:
    """Return what the manifest says of all modules together."""
    return {
        "error": short(found.error),
        "cosine": short(found.cosine),
        "cosine_min": short(found.cosine_min),
        "cosine_mean": short(found.cosine_mean),
        "emptied": len(found.emptied),
    }


def manifest_details(found: Fidelity) -> dict[str, Any]:
    """Return error and cosine of every module, for the index."""
    modules = found.modules
    return {
        "modules": {
            name: [short(part.error) if math.isfinite(part.error) else None, short(part.cosine)]
            for name, part in sorted(modules.items())
        }
    }


def peft_config(expert: Expert, encoded: Encoded) -> dict[str, Any]:
    """Return the config of the decompressed expert: one rank for all, scaling folded into B."""
    rank = max(part.levels.shape[0] for part in encoded.coded)
    form = AdapterForm(
        rank=rank,
        alpha=rank,
        base_name=expert.config.base_name,
        fan_in_fan_out=expert.config.fan_in_fan_out,
        task_type=expert.config.task_type,
    )
    return adapter_config(expert.pairs, form)


def write_packed(
    out: Path, encoded: Encoded, fields: dict[str, Any], *, overwrite: bool = False
) -> int:
    """Write the file, atomically; return its bytes."""
    details = manifest_details(encoded.fidelity)
    return write_cge(out, encoded.coded, {}, fields, details=details, overwrite=overwrite).size


def write_restored(out: Path, restored: Restored, *, overwrite: bool = False) -> int:
    """Write the file that a folder was decompressed from, byte for byte; return its bytes."""
    return write_cge(
        out,
        restored.coded,
        restored.dense,
        restored.fields,
        details=restored.details or None,
        overwrite=overwrite,
    ).size


def _file_bytes(encoded: Encoded, fields: dict[str, Any]) -> int:
    """Return the bytes that a file would have, by writing it where nobody looks."""
    with tempfile.TemporaryDirectory(prefix="cgmerge-") as folder:
        return write_packed(Path(folder) / "size.cge", encoded, fields)


def short(value: float) -> float:
    """Round what people read, so that the manifest's length hardly depends on it."""
    return float(f"{value:.{_DIGITS}g}")


class _Raw(Mapping[str, "LowRank"]):
    """An adapter's factors without the scaling, read when asked for."""

    def __init__(self, expert: Expert) -> None:
        self.deltas = ExpertDeltas(expert)

    def __getitem__(self, path: str) -> "LowRank":
        return self.deltas.raw(path)

    def __iter__(self) -> Iterator[str]:
        return iter(self.deltas)

    def __len__(self) -> int:
        return len(self.deltas)
