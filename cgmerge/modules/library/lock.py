"""`lock`: a recipe with the revision and the digest of everything that it names."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cgmerge import fs, strictjson
from cgmerge.errors import UsageError
from cgmerge.inputs import refuse_inputs
from cgmerge.modules import mergekit
from cgmerge.modules.builtin import NAMES
from cgmerge.modules.compose import Plan, make_plan
from cgmerge.modules.compose_record import experts_record
from cgmerge.modules.library.store import HUB, is_url
from cgmerge.modules.recipe import (
    SCHEMA,
    ExpertRef,
    Recipe,
    default_method,
    is_recipe,
    read_recipe,
)
from cgmerge.modules.recipefile import read_mapping
from cgmerge.refs import expanded, is_in_library, parse_weighted


def lock(words: Sequence[str], out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write a recipe whose experts and base cannot change unnoticed.

    Args:
        words: A recipe file, or references with weights as `compose` takes them.
        out: A `.json` file; local references in it are relative to it.
        overwrite: Replace what is there.

    Returns:
        What was written.

    Raises:
        UsageError: A record or a mergekit file, or `out` is no `.json` file.
        CgmergeError: Whatever `compose` would refuse.
    """
    if out.suffix.lower() != ".json":
        raise UsageError(f"a lock file ends in .json, found {out.name}", code="out")
    if is_recipe(list(words)):
        refuse_inputs(out, [Path(words[0])])
    fs.check_file(out, overwrite=overwrite)
    raw, recipe = _read(list(words))
    pinned = replace(
        recipe,
        experts=tuple(replace(item, ref=pinned_ref(item.ref)) for item in recipe.experts),
        base=recipe.base and (recipe.base if recipe.base in NAMES else pinned_ref(recipe.base)),
    )
    plan = make_plan(pinned)
    bases = [plan.base.folder] if plan.base else []
    refuse_inputs(out, [*(expert.folder for expert in plan.experts), *bases])
    content = {**raw, "experts": _experts(pinned, plan, out)}
    if pinned.base is not None and plan.base is not None:
        ref = pinned.base if pinned.base in NAMES else _from(pinned.base, out)
        content["base"] = {"ref": ref, "fingerprint": plan.base.fingerprint}
    fs.replace_file(out, strictjson.dumps(content), overwrite=overwrite)
    return content


def pinned_ref(ref: str) -> str:
    """Return a reference to the hub with the commit that it means now; others as they are."""
    from cgmerge.modules.library.hub import Repository, parse_ref

    if not is_url(ref):
        path = fs.absolute(expanded(ref))
        if os.path.lexists(path) or is_in_library(path) or ref.count("/") != 1:
            return ref
        ref = f"{HUB}{ref}"
    if not ref.startswith(HUB):
        return ref
    named = parse_ref(ref)
    commit = Repository(named.library).newest()
    return f"{HUB}{named.repo}{f'/{named.name}' if named.name else ''}@{commit}"


def _read(words: list[str]) -> tuple[dict[str, Any], Recipe]:
    if not is_recipe(words):
        refs = tuple(ExpertRef(*parse_weighted(word)) for word in words)
        method = default_method(len(refs))
        return {"method": method}, Recipe(experts=refs, method=method)
    path = Path(words[0])
    raw = read_mapping(path)
    if mergekit.KEY in raw or raw.get("schema") == SCHEMA:
        kind = "a file of mergekit" if mergekit.KEY in raw else "a record, which pins its experts"
        raise UsageError(f"{path} is {kind}", code="recipe", hint="give a recipe of cgmerge")
    return raw, read_recipe(path)


def _experts(recipe: Recipe, plan: Plan, out: Path) -> list[dict[str, Any]]:
    """Return the experts as they are, in the order of the recipe."""
    known = {one["ref"]: one for one in experts_record(plan)}
    kept = ("sha256", "name", "stats")
    entries = []
    for item in recipe.experts:
        found = known[item.ref]
        entry = {"ref": _from(item.ref, out), **{k: found[k] for k in kept if k in found}}
        entries.append(entry if item.weight is None else {**entry, "weight": item.weight})
    return entries


def _from(ref: str, out: Path) -> str:
    """Return what a reference is called from the folder of the lock file."""
    if is_url(ref):
        return ref
    path = fs.absolute(expanded(ref))
    return os.path.relpath(path, fs.absolute(out).parent)
