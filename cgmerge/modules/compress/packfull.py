"""A full fine-tune's delta as a `.cge` file, tensor by tensor."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge._version import __version__
from cgmerge.errors import Incompatible, UsageError
from cgmerge.modules.base import Base
from cgmerge.modules.compress.container import write_cge
from cgmerge.modules.compress.fulldelta import (
    FULL_MODES,
    Measured,
    encode_tensors,
    measure_tensors,
)
from cgmerge.modules.compress.modes import Mode, Options
from cgmerge.modules.compress.pack import (
    DEFAULT_MODE,
    Request,
    fidelity_fields,
    manifest_details,
    short,
)
from cgmerge.modules.expert import is_adapter
from cgmerge.modules.fullmodel import FullExpert, open_full, task_vectors
from cgmerge.quoting import quoted

if TYPE_CHECKING:
    from cgmerge.merge.deltas import Delta


@dataclass(frozen=True)
class FullPlan:
    """What to compress: checked, nothing computed.

    Attributes:
        expert: The full fine-tune.
        base: What its delta is relative to.
        request: What is asked for.
        deltas: Weight name to delta, read lazily.
    """

    expert: FullExpert
    base: Base
    request: Request
    deltas: "Mapping[str, Delta]"

    @property
    def mode(self) -> Mode:
        """Return the mode that is used."""
        return self.request.mode or DEFAULT_MODE

    @cached_property
    def entries(self) -> int:
        """Return the number of entries of all deltas."""
        from cgmerge.merge.deltas import matrix_shape

        return sum(math.prod(matrix_shape(delta)) for delta in self.deltas.values())

    @property
    def target(self) -> float | None:
        """Return the bytes that the file may have, or None where a density decides."""
        return self.request.target(self.entries)

    def options(self) -> Options:
        """Return what is asked for, but for a size."""
        request = self.request
        return Options(
            density=request.density,
            multiplier=request.multiplier,
            alpha=1.0 if request.alpha is None else request.alpha,
        )


@dataclass(frozen=True)
class FullPacked:
    """What was written."""

    size: int
    fields: dict[str, Any]
    measured: Measured


def is_full(folder: Path) -> bool:
    """Whether a folder holds a model, not an adapter."""
    return (folder / "config.json").exists() and not is_adapter(folder)


def plan_full(
    ref: str, request: Request, base: Base | None, *, force_base: bool = False
) -> FullPlan:
    """Open a full fine-tune and check what can be checked without computing.

    Args:
        ref: What the user wrote.
        request: Mode and strength.
        base: What its delta is relative to.
        force_base: Accept a model whose record names another base.

    Raises:
        UsageError: No base, or a request that only adapters can meet.
        InputError: A model that does not fit the base.
    """
    request.check()
    if base is None:
        raise UsageError(
            f"{ref} is a full model: its delta is relative to a base",
            code="base",
            hint=f"add --base BASE: cgmerge compress {quoted(ref)} --base BASE -o FILE.cge",
        )
    mode = request.mode or DEFAULT_MODE
    odd = "gauge" if request.gauge is not None else None
    if mode not in FULL_MODES or odd is not None:
        raise UsageError(
            f"a full fine-tune cannot be compressed by {odd or f'mode {mode}'}",
            code="mode" if odd is None else odd,
            hint="use --mode ternary or compeft, or make an adapter: cgmerge extract"
            f" {quoted(ref)} --base {quoted(base.ref)} --rank 16 -o OUT",
        )
    expert = open_full(ref, base, force_base=force_base)
    (deltas,) = task_vectors([expert], base)
    return FullPlan(expert, base, request, deltas)


def write_full(
    plan: FullPlan,
    out: Path,
    options: Options | None = None,
    scores: list[dict[str, Any]] | None = None,
    *,
    overwrite: bool = False,
) -> FullPacked:
    """Compress and write; the delta is read once to measure and once to write.

    Args:
        plan: From `plan_full`.
        out: The `.cge` file.
        options: Density and strength; default those of the plan, where no size is asked for.
        scores: Entries of `eval` in the manifest.
        overwrite: Replace a file that exists.

    Raises:
        Incompatible: The model is the base.
        Damaged: Values that are no numbers.
        StorageError: Disk full and the like; nothing is left behind.
    """
    options = options or plan.options()
    measured = measure_tensors(plan.mode, plan.deltas, options)
    if measured.fidelity.total.coded_sq <= 0:
        raise Incompatible(
            f"nothing is left of {plan.expert.folder} relative to {plan.base.ref}",
            code="no_effect",
            hint="check that the full model is the trained one",
        )
    fields = _fields(plan, options, measured) | ({"eval": scores} if scores else {})
    parts = encode_tensors(plan.mode, plan.deltas, options)
    details = manifest_details(measured.fidelity)
    written = write_cge(out, parts, {}, fields, details=details, overwrite=overwrite)
    return FullPacked(written.size, fields, measured)


def _fields(plan: FullPlan, options: Options, measured: Measured) -> dict[str, Any]:
    method: dict[str, Any] = {
        "mode": plan.mode,
        "gauge": "raw",
        "density": short(measured.density),
        "asked": plan.request.asked(),
    }
    if plan.mode == "compeft":
        method["alpha"] = options.alpha
    elif options.multiplier is not None:
        method["multiplier"] = short(options.multiplier)
    files = sorted(set(plan.expert.model.files.values()))
    return {
        "base": {"id": plan.base.ref, "fingerprint": plan.base.fingerprint},
        "peft": None,
        "method": method,
        "producer": f"cgmerge {__version__}",
        "sizes": {
            "bytes": sum(path.stat().st_size for path in files),
            "parameters": measured.entries,
        },
        "fidelity": fidelity_fields(measured.fidelity),
        "parents": [{"name": plan.expert.name, "sha256": plan.expert.digest}],
    }
