"""What lies beside composed weights: the record that repeats them, a model card, a card."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge import fs
from cgmerge.modules.card import BaseId, ExpertCard, package_versions, write_card
from cgmerge.modules.recipe import RECORD, SCHEMA

if TYPE_CHECKING:
    from cgmerge.modules.compose import Composed, Plan


def write_records(composed: "Composed", stage: Path) -> None:
    """Write the recipe that repeats the result, a model card, and the expert's own card.

    Args:
        composed: What is in the folder.
        stage: From `fs.new_folder`, with the weights already there.
    """
    plan = composed.plan
    record = {
        "schema": SCHEMA,
        "base": base_record(plan),
        "experts": experts_record(plan),
        "method": plan.rule.name,
        "params": asdict(plan.rule.params),
        "force_base": plan.recipe.force_base,
        "allow_noop": plan.recipe.allow_noop,
        "output": {
            "as": plan.recipe.form,
            "rank": plan.rank if plan.rank else None,
            "dtype": plan.recipe.dtype,
            "allow_rounding": plan.recipe.allow_rounding,
        },
        "result": {
            "norm": composed.norm,
            "truncation_error": composed.truncation_error,
            "rounding_error": composed.rounding_error,
            "modules": {path: asdict(report) for path, report in composed.modules.items()},
        },
        "versions": package_versions(),
        "warnings": composed.warnings,
    }
    if plan.parts:
        record["parts"] = parts_record(plan)
    if plan.recipe.tuning is not None:
        record["tuning"] = dict(plan.recipe.tuning)
    fs.write_json(stage / RECORD, record)
    fs.write_bytes(stage / "README.md", _model_card(composed).encode())
    if plan.recipe.form == "adapter":
        fingerprint = plan.base.fingerprint if plan.base else _shared_fingerprint(plan)
        write_card(
            stage,
            ExpertCard(
                skill="+".join(sorted({expert.name for expert in plan.experts}))[:200],
                base=BaseId(name=base_name(plan), fingerprint=fingerprint),
                training={"composed": plan.rule.name},
                versions=package_versions(),
            ),
        )


def _model_card(composed: "Composed") -> str:
    plan = composed.plan
    lines = [
        "---",
        f"base_model: {_yaml_word(base_name(plan) or 'unknown')}",
        f"library_name: {'peft' if plan.recipe.form == 'adapter' else 'transformers'}",
        f"tags: [{'' if plan.has_full else 'lora, '}merge, cgmerge]",
        "---",
        "",
        (
            f"Composed with cgmerge: `{plan.rule.name}`,"
            f" {', '.join(f'{k}={v}' for k, v in asdict(plan.rule.params).items())}."
        ),
        "",
        "| expert | weight | sha256 |",
        "|---|---|---|",
        *[
            f"| {_cell(entry['name'])} | {entry['weight']:g} | `{entry['sha256'][:16]}` |"
            for entry in experts_record(plan)
        ],
        "",
        *(
            [f"Weights and parameters differ between modules, see `{RECORD}`.", ""]
            if plan.parts
            else []
        ),
        f"Formula: {plan.rule.spec.about.formula}",
        "",
    ]
    if plan.rank:
        lines.append(
            f"Rank {plan.rank}; the truncation lost {composed.truncation_error:.2%} of the merged"
            " delta (Frobenius)."
        )
    lines.append(f"The recipe is in `{RECORD}`; `cgmerge compose {RECORD} -o OUT` repeats it.")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _yaml_word(text: str) -> str:
    """Quote a name that YAML would not read as one word."""
    return text if re.fullmatch(r"[\w./][\w./\-]*", text) else json.dumps(text)


def experts_record(plan: "Plan") -> list[dict[str, Any]]:
    """Return reference, name, digest and weight of every expert, in the order of the plan.

    Where the method used statistics, also the digest of their file, and of what data they are.
    """
    entries: list[dict[str, Any]] = [
        {"ref": ref, "name": expert.name, "sha256": expert.digest, "weight": weight}
        for ref, expert, weight in zip(plan.refs, plan.experts, plan.rule.weights, strict=True)
    ]
    for entry, file in zip(entries, plan.stats or [], strict=False):
        entry["stats"] = file.pin()
    return entries


def parts_record(plan: "Plan") -> list[dict[str, Any]]:
    """Return the rules that differ between modules; weights in the order of the plan."""
    return [
        {"modules": list(names), "weights": list(rule.weights), "params": asdict(rule.params)}
        for rule, names in plan.parts
    ]


def base_record(plan: "Plan") -> dict[str, Any] | None:
    """Return reference and fingerprint of the base, where there is one."""
    if plan.base is None:
        return None
    return {"ref": plan.base.ref, "fingerprint": plan.base.fingerprint}


def base_name(plan: "Plan") -> str:
    """Return what the experts call their base, else what the user calls it."""
    names = {expert.config.base_name for expert in plan.adapters if expert.config.base_name}
    if len(names) == 1 and not plan.has_full:
        return names.pop()
    return plan.base.ref if plan.base else ""


def _shared_fingerprint(plan: "Plan") -> str | None:
    known = {e.base_fingerprint for e in plan.experts}
    return known.pop() if len(known) == 1 else None
