"""What experts must have in common before anything is computed from them."""

from collections.abc import Sequence
from itertools import combinations

from cgmerge.errors import Damaged, Incompatible
from cgmerge.modules.expert import Expert
from cgmerge.modules.recipe import Recipe

_WRAPPER = "model."
"""In front of module names where the body of a model was loaded with its head around it."""


_BODIES = {
    "model",
    "transformer",
    "gpt_neox",
    "backbone",
    "bert",
    "distilbert",
    "electra",
    "roberta",
}
"""How implementations call the body of a model; no model has two of them."""


def check_digest(what: str, found: str, expected: str, hint: str) -> None:
    """Refuse a file that is not the one whose digest a recipe has.

    Args:
        what: Begins the message, e.g. `a is not the expert that the recipe names`.
        found: Its sha256 as it is.
        expected: That of the recipe.
        hint: The next step.

    Raises:
        Damaged: Says both.
    """
    if found != expected:
        raise Damaged(
            f"{what}: sha256 {found[:16]}…, expected {expected[:16]}…",
            code="digest",
            hint=hint,
            expected=expected,
            found=found,
        )


def check_same_base(experts: Sequence[Expert], recipe: Recipe) -> None:
    """Refuse experts whose fingerprints name different bases, unless the recipe allows it."""
    known = {e.base_fingerprint: e for e in experts if e.base_fingerprint is not None}
    if len(known) > 1 and not recipe.force_base:
        lines = [
            f"  {e.name}  {e.card.base.name if e.card else ''} {fingerprint}"
            for fingerprint, e in known.items()
        ]
        raise Incompatible(
            "these experts do not share a base\n" + "\n".join(lines),
            code="base",
            hint="compose experts of one base; compose and eval take --force-base",
            found=sorted(str(fingerprint) for fingerprint in known),
        )


def check_alike(experts: Sequence[Expert]) -> None:
    """Refuse experts that cannot be of one model, as far as they themselves tell.

    Raises:
        Incompatible: One module in two shapes, one body under two names, bodies of two kinds of
            model, or heads of two kinds.
    """
    _check_same_shapes(experts)
    _check_same_names(experts)
    _check_same_bodies(experts)
    tasks = {expert.config.task_type: expert for expert in experts if expert.config.task_type}
    if len(tasks) > 1:
        said = ", ".join(f"{expert.name} {task}" for task, expert in sorted(tasks.items()))
        raise Incompatible(
            f"these experts are for models with different heads: {said}",
            code="task_type",
            hint="if they are not, write the right task_type into their adapter_config.json",
            found=sorted(tasks),
        )


def _check_same_bodies(experts: Sequence[Expert]) -> None:
    """Refuse experts of two implementations: their modules cannot stand in one model."""
    seen: dict[str, tuple[Expert, str]] = {}
    for expert in experts:
        roots = {path.partition(".")[0]: path for path in expert.pairs}
        for root in sorted(_BODIES & set(roots)):
            seen.setdefault(root, (expert, roots[root]))
    if len(seen) > 1:
        (one, its), (other, path) = list(seen.values())[:2]
        raise Incompatible(
            f"{one.name} and {other.name} are for models of two kinds: {its} and {path}",
            code="modules",
            hint="compose experts of one base",
            expected=its,
            found=path,
        )


def _check_same_shapes(experts: Sequence[Expert]) -> None:
    seen: dict[str, tuple[int, int, Expert]] = {}
    for expert in experts:
        for path, pair in expert.pairs.items():
            out, into, first = seen.setdefault(path, (pair.out_features, pair.in_features, expert))
            if (out, into) != (pair.out_features, pair.in_features):
                raise Incompatible(
                    f"module {path} is {out}×{into} in {first.folder}, but"
                    f" {pair.out_features}×{pair.in_features} in {expert.folder}",
                    code="shape",
                    hint="these experts belong to different bases",
                    tensor=path,
                    expected=[out, into],
                    found=[pair.out_features, pair.in_features],
                )


def _check_same_names(experts: Sequence[Expert]) -> None:
    """Refuse two experts that share modules only under another prefix: half would be lost."""
    # Most experts of many touch the same modules: one of a kind stands for all.
    kinds = {frozenset(expert.pairs): expert for expert in experts}
    for (names, one), (others, other) in combinations(kinds.items(), 2):
        if names & others:
            continue
        bare = {path.removeprefix(_WRAPPER): path for path in other.pairs}
        twin = next((p for p in one.pairs if p.removeprefix(_WRAPPER) in bare), None)
        if twin is not None:
            found = bare[twin.removeprefix(_WRAPPER)]
            raise Incompatible(
                f"{one.name} and {other.name} call the same modules by different names: {twin} and"
                f" {found}",
                code="modules",
                hint="one of them was trained on the model without its head; rename its tensors as"
                " the base has them",
                expected=twin,
                found=found,
            )
