"""A router and the experts beside it must speak of the same numbers; files can say anything."""

from collections.abc import Mapping, Sequence

from cgmerge.errors import Damaged
from cgmerge.modules.routing.attach import layer_name, place_of
from cgmerge.modules.routing.router import RetrievalRouter, Router, TaskRouter, TokenRouter
from cgmerge.modules.routing.rule import TokenRule
from cgmerge.modules.routing.scores import Energy, Gate, Scorer, Standardised, Subspace

Sizes = Mapping[str, tuple[int, int, int]]
"""(out, in, rank) by module path."""


def check_router(router: Router, experts: Sequence[Sizes], source: str) -> None:
    """Check a router against the shapes of the experts that it was read with.

    Args:
        router: From a file.
        experts: Sizes of their modules, in order.
        source: For messages.

    Raises:
        Damaged: It is for other experts.
    """
    count = len(experts)
    if isinstance(router, TaskRouter):
        _check_table(router, experts, source)
    elif isinstance(router, RetrievalRouter):
        width = router.centre.shape
        _same(tuple(router.centroids.shape), (count, *width), f"{source}: centroids")
        _same(len(width), 1, f"{source}: dimensions of the centre")
        if router.noise is not None:
            found = tuple(router.noise.shape)
            _same(found, (found[0] if found else 0, *width), f"{source}: noise")
    elif isinstance(router, TokenRouter):
        _check_tokens(router, experts, source)


def _check_table(router: TaskRouter, experts: Sequence[Sizes], source: str) -> None:
    weights = router.weights(list(router.table)) if router.layers else None
    lengths = (
        {len(row) for row in router.table.values()} if weights is None else {weights.shape[-1]}
    )
    _same(lengths, {len(experts)}, f"{source}: weights in a row of the table")
    if router.layers:
        changed = sorted({place_of(path) for sizes in experts for path in sizes})
        _same(sorted(router.layers), changed, f"{source}: layers of the table")


def _check_tokens(router: TokenRouter, experts: Sequence[Sizes], source: str) -> None:
    modules = {path: into for sizes in experts for path, (_, into, _) in sizes.items()}
    if router.scope == "module":
        _same(sorted(router.rules), sorted(modules), f"{source}: modules of the router")
    else:
        layers = {layer_name(path) for path in modules} - {None}
        if router.scope == "model":  # any one of them decides for all
            _same(len(router.rules), 1, f"{source}: layers of the router")
            layers &= set(router.rules)
        _same(sorted(router.rules), sorted(map(str, layers)), f"{source}: layers of the router")
    for place, rule in router.rules.items():
        _check_rule(rule, len(experts), modules.get(place), f"{source}: {place}")


def _check_rule(rule: TokenRule, count: int, width: int | None, where: str) -> None:
    scorer: Scorer = rule.scorer
    _check_rows(scorer, count, width, where)
    vectors = {"present": scorer.present, "after": rule.after}
    if isinstance(scorer, Gate):
        vectors["bias"] = scorer.bias
    if isinstance(scorer, Subspace | Energy):
        vectors["weights"] = scorer.weights
    for name, vector in vectors.items():
        if vector is not None:
            _same(tuple(vector.shape), (count,), f"{where}: {name}")
    if isinstance(scorer, Standardised | Subspace | Energy):
        if scorer.present is None:
            raise Damaged(f"{where}: nothing says which experts are there", code="router")
        if not bool(scorer.present.any()):
            raise Damaged(f"{where}: no expert can be chosen", code="router")


def _check_rows(scorer: Scorer, count: int, width: int | None, where: str) -> None:
    if isinstance(scorer, Energy):
        if scorer.rows is not None:
            raise Damaged(f"{where}: an energy scorer with rows", code="router")
    elif scorer.rows is not None:
        found = tuple(scorer.rows.shape)
        lines = count * scorer.width if isinstance(scorer, Subspace) else count
        into = found[-1] if width is None else width
        _same(found, (lines, into), f"{where}: rows")
    else:
        raise Damaged(f"{where}: a {scorer.form} scorer without rows", code="router")


def _same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise Damaged(
            f"{what}: found {found}, expected {expected}; the router is for other experts",
            code="router",
            hint="compose again",
            expected=expected,
            found=found,
        )
