"""A compressed full model: the one place that says what can be done with it, and its expansion."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cgmerge.errors import Incompatible, UsageError
from cgmerge.modules.base import Base
from cgmerge.modules.compress.container import read_manifest
from cgmerge.quoting import quoted

if TYPE_CHECKING:
    from cgmerge.modules.compose import Composed


def is_whole(path: Path) -> bool:
    """Whether a `.cge` file holds the delta of a full model; its header alone is read."""
    return read_manifest(path)["peft"] is None


def uses_of(path: Path) -> str:
    """Say what the delta of a full model is good for, as commands."""
    base = quoted(str(read_manifest(path)["base"]["id"])[:200])
    return (
        f"it needs its base: cgmerge decompress {quoted(path)} --base {base} -o MODEL writes the"
        f" model, cgmerge compose {quoted(path)} OTHER --base {base} --as model -o MODEL merges it;"
        f" cgmerge extract MODEL --base {base} --rank 16 -o OUT makes an adapter of the model"
    )


def refused(path: Path, wanted: str) -> Incompatible:
    """Make the error for a command that takes adapters only."""
    return Incompatible(
        f"{path} holds the delta of a full model, {wanted}",
        code="full_model",
        hint=uses_of(path),
        path=path,
    )


@dataclass(frozen=True, slots=True)
class Whole:
    """What `decompress` wrote for a full model.

    Attributes:
        composed: The result as the model writer sees it.
        size: Bytes of the `.cge` file.
        mode: How it was compressed.
        weights: How many weights have a delta.
    """

    composed: "Composed"
    size: int
    mode: str
    weights: int


def expand_model(
    path: Path,
    base: Base,
    out: Path,
    *,
    dtype: str = "auto",
    force_base: bool = False,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Whole:
    """Write the full model that a compressed delta stands for: base plus delta.

    Args:
        path: The `.cge` file; everything in it is verified first.
        base: What it is relative to.
        out: Result folder; appears complete or not at all.
        dtype: `auto` is the base's own type.
        force_base: Accept another base of the same shapes.
        overwrite: Replace an existing folder.
        progress: Called with the number of finished weights.

    Raises:
        UsageError: `out` exists, or is an input.
        Damaged: A file that is not what was written.
        Incompatible: Another base, or a float type that swallows most of the delta.
        StorageError: Disk full and the like; nothing is left behind.
    """
    from cgmerge.modules.compose import check_outputs, make_plan, run_plan
    from cgmerge.modules.compress.openedfull import open_compressed_full
    from cgmerge.modules.recipe import ExpertRef, Recipe

    recipe = Recipe(
        experts=(ExpertRef(str(path)),),
        base=base.ref,
        method="task-arithmetic",
        form="model",
        dtype=dtype,
        force_base=force_base,
    )
    plan = make_plan(recipe)
    check_outputs(plan, out, overwrite=overwrite)
    expert = open_compressed_full(path, str(path), base, force_base=force_base)
    with expert.file as file:
        file.verify()
        size, mode, weights = file.size, str(file.manifest["method"]["mode"]), len(file.coded)
    try:
        composed = run_plan(plan, out, overwrite=overwrite, progress=progress)
    except Incompatible as error:
        if error.code != "incompatible.rounding":
            raise
        raise Incompatible(
            error.message, code="rounding", hint="add --dtype float32", **error.details
        ) from error
    return Whole(composed, size, mode, weights)


def need_base(path: Path) -> UsageError:
    """Make the error for a full model without its base."""
    return UsageError(
        f"{path} holds the delta of a full model: it is relative to a base",
        code="base",
        hint=uses_of(path),
        path=path,
    )
