"""`cgmerge compose --examples`: coefficients, or a method, learned from examples."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from cgmerge.cli.output import Output
from cgmerge.errors import UsageError
from cgmerge.shown import counted, score_text

if TYPE_CHECKING:
    from cgmerge.evals.routed import RoutedPlan
    from cgmerge.evals.suite import SkillSet
    from cgmerge.modules.compose import Plan
    from cgmerge.modules.learned.learn import Made
    from cgmerge.modules.learned.objectives import Support
    from cgmerge.modules.learned.presets import AutoSettings, Learner
    from cgmerge.modules.loading import LoadedBase
    from cgmerge.modules.recipe import Recipe

FORMAT = '--examples FILE.jsonl with rows like {"prompt": "…", "completion": "…"}'
_MANY_GROUPS = 12


@dataclass(frozen=True)
class Learned:
    """What was learned.

    Attributes:
        recipe: What composes it, unless it is routed.
        routed: What composes it where a router was chosen.
        loaded: The base in memory.
    """

    recipe: "Recipe"
    routed: "RoutedPlan | None"
    loaded: "LoadedBase"


@dataclass(frozen=True)
class Learning:
    """What the user wants learned.

    Attributes:
        method: A preset, or `auto`.
        settings: Of the learner, or of the choice.
        examples: Data files as named by the user.
        skills: The examples.
        recipe: The plain weighted sum that is to get coefficients.
        seed: For routers.
        fixed: The option that wants one adapter or one model, so that no router can be chosen.
    """

    method: str
    settings: "Learner | AutoSettings"
    examples: tuple[str, ...]
    skills: "list[SkillSet]"
    recipe: "Recipe"
    seed: int = 0
    fixed: str | None = None

    @property
    def may_route(self) -> bool:
        """Whether a router can come out."""
        return self._why_static() is None

    def check(self, plan: "Plan") -> None:
        """Refuse what cannot be learned before any work."""
        from cgmerge.modules.learned.learn import check_learnable

        check_learnable(plan)

    def learned(self, plan: "Plan", output: Output) -> Learned:
        """Learn, say what came out, and return what composes it."""
        from cgmerge.modules.loading import load_base

        assert plan.base is not None
        count = sum(len(skill.examples) for skill in self.skills)
        output.line("learn", f"{self.method} from {counted(count, 'example')}")
        for key, value in asdict(self.settings).items():
            output.detail("means", f"{key}={value}")
        routers, aside = self._routers()
        for name, why in aside.items():
            output.line("left out", f"{name}: {why}")
        loaded = load_base(plan.base, with_encoder=True)
        made = self._made(plan, loaded, routers, output)
        _show(made, self.method, plan.given, output)
        data = [
            {"name": s.name, "file": s.source, "sha256": s.sha256, "n": len(s.examples)}
            for s in self.skills
        ]
        tuning = {**(made.recipe.tuning or {}), "data": data, "notes": list(made.notes)}
        if aside:
            tuning["left_out"] = [*tuning["left_out"], *aside]
        recipe = replace(made.recipe, tuning=tuning, notes=(*made.recipe.notes, *made.notes))
        chosen = next((one for one in routers if one.spec.name == recipe.method), None)
        if chosen is not None:
            chosen = replace(chosen, request=replace(chosen.request, tuning=tuning))
        return Learned(recipe, chosen, loaded)

    def _routers(self) -> "tuple[list[RoutedPlan], dict[str, str]]":
        """Return the routed methods that may be chosen, and why others may not."""
        from cgmerge.evals.routedauto import TRIED, open_routed
        from cgmerge.modules.learned.presets import AutoSettings

        if not isinstance(self.settings, AutoSettings):
            return [], {}
        why = self._why_static()
        if why is not None:
            return [], dict.fromkeys(TRIED, why)
        return open_routed(self.recipe, self.examples, self.seed)

    def _why_static(self) -> str | None:
        """Return why no router can be chosen, or None where one can."""
        from cgmerge.modules.base import open_base
        from cgmerge.modules.learned.presets import AutoSettings

        if not isinstance(self.settings, AutoSettings):
            return f"{self.method} learns coefficients"
        if not self.settings.routed:
            return "--set routed=false"
        base = self.recipe.base
        if base is not None and open_base(base).has_encoder:
            return "the base reads prompts with an encoder"
        if self.fixed is not None:
            return f"{self.fixed} asks for one result for every input"
        return None

    def _made(
        self, plan: "Plan", loaded: "LoadedBase", routers: "list[RoutedPlan]", output: Output
    ) -> "Made":
        from cgmerge.evals.routedauto import routable
        from cgmerge.modules.learned.auto import choose, fits
        from cgmerge.modules.learned.learn import learn, points
        from cgmerge.modules.learned.presets import Learner

        support = _support(self.skills, loaded)
        settings = self.settings
        if isinstance(settings, Learner):
            with output.progress("learn", points(support, settings)) as advance:
                return learn(plan, loaded, support, self.method, settings, progress=advance)
        routed = [routable(one) for one in routers]
        with output.progress("choose", fits(plan, support, settings, routed)) as advance:
            return choose(plan, loaded, support, settings, routed=routed, progress=advance)


def learning_of(
    recipe: "Recipe",
    examples: list[str] | None,
    *,
    tuned: bool,
    seed: int = 0,
    fixed: Mapping[str, Any] | None = None,
) -> Learning | None:
    """Return what is to be learned, or None for methods that learn nothing.

    Args:
        recipe: What was asked for.
        examples: Data files.
        tuned: Whether there are other data to choose from.
        seed: For routers.
        fixed: Options that want one adapter or one model, where they are given.

    Raises:
        UsageError: Examples without such a method or the other way round, or wrong settings.
        InputError: Examples that cannot be used.
    """
    from cgmerge.evals.suite import read_examples
    from cgmerge.modules.learned.presets import AUTO, PRESETS, is_learned, make_auto, make_learner

    method = recipe.method
    if not is_learned(method):
        if examples:
            raise UsageError(
                f"method `{method}` does not learn from --examples",
                code="examples",
                hint=f"--method {', '.join(PRESETS)}; to choose a scale: --tune",
            )
        return None
    if not examples:
        raise UsageError(
            f"method `{method}` learns from examples, and there are none",
            code="examples",
            hint=f"add {FORMAT}, five to fifty for each skill, and --base BASE",
        )
    if tuned:
        raise UsageError(
            f"`{method}` chooses from --examples, --tune from other data: give one of them",
            code="tune",
        )
    settings = make_auto(recipe.params) if method == AUTO else make_learner(method, recipe.params)
    return Learning(
        method,
        settings,
        tuple(examples),
        read_examples(examples)[0],
        replace(recipe, method="task-arithmetic", params={}),
        seed,
        _fixed(recipe, fixed or {}),
    )


def _fixed(recipe: "Recipe", options: Mapping[str, Any]) -> str | None:
    """Return the option, or the line of a recipe, that no routed composition can honour."""
    asked = {name: value is not None for name, value in options.items()}
    asked |= {
        "`as` of the recipe": recipe.form == "model",
        "`rank` of the recipe": recipe.rank != "auto",
        "`dtype` of the recipe": recipe.dtype != "auto",
    }
    return next((name for name, is_set in asked.items() if is_set), None)


def _support(skills: "list[SkillSet]", loaded: "LoadedBase") -> "Support":
    from cgmerge.evals.suite import encode_questions, questions
    from cgmerge.modules.learned.objectives import Support
    from cgmerge.modules.teacher import position_limit

    asked = questions(skills)
    rows = encode_questions(asked, loaded.tokenizer, position_limit(loaded.model))
    answered = tuple(one.example.prompt is not None for one in asked)
    return Support(rows.encoded, tuple(one.skill for one in asked), answered)


def _show(made: "Made", method: str, given: list[int], output: Output) -> None:
    """Print what was learned and what it is worth; experts in the order they were given in."""
    tuning: Any = made.recipe.tuning
    if made.learned is not None:
        _show_coefficients(tuning, given, output)
        names = {"base": tuning["base"], **{e["name"]: e for e in tuning["experts"]}}
        marks = {**names, "average": tuning["average"], method: tuning["learned"]}
        for name, mark in marks.items():
            output.detail(
                "seen",
                f"{name}: right {score_text(mark['score'])}, objective {mark['objective']:.4f}",
            )
        before, after = tuning["base"]["objective"], tuning["learned"]["objective"]
        output.line(
            "learned",
            f"objective {after:.4f} on the examples (base {before:.4f}),"
            f" {tuning['passes']:,} passes",
        )
    if made.table:
        folds = tuning["crossvalidation"]["folds"]
        chosen = tuning.get("chosen", method)
        rows = [
            [
                row.name,
                score_text(row.score, 3),
                f"{row.loss:.3f}",
                "←" if row.name == chosen else "",
            ]
            for row in made.table
        ]
        output.table(["left-out examples", "right", "loss", ""], rows)
        output.line("checked", f"each on examples that it did not see, {folds} parts in turn")
    if "chosen" in tuning:
        output.line("chosen", f"{tuning['chosen']} {tuning['note']}".rstrip())
    for note in made.notes:
        output.warn(note)


def _show_coefficients(tuning: Any, given: list[int], output: Output) -> None:
    names, groups = tuning["coefficients"]["experts"], tuning["coefficients"]["groups"]
    if len(groups) <= _MANY_GROUPS:
        rows = [[group, *[f"{values[i]:.3f}" for i in given]] for group, values in groups.items()]
        output.table(["coefficients", *[names[i] for i in given]], rows)
        return
    for place in given:
        values = [row[place] for row in groups.values()]
        output.line(
            "expert",
            f"{names[place]}: coefficients {min(values):.2f} … {max(values):.2f},"
            f" mean {sum(values) / len(values):.2f}, in {len(values)} modules",
        )
