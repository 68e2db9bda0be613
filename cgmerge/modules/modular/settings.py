"""What the user may choose for modules that tasks share."""

from dataclasses import dataclass
from typing import Literal

from cgmerge.errors import UsageError
from cgmerge.merge.params import Checked, build_params, param
from cgmerge.modules.modular import METHOD

MAX_SKILLS = 1024


@dataclass(frozen=True, kw_only=True)
class ModularParams(Checked):
    """Settings beyond those of every training; see `TrainSettings`."""

    skills: int = param(4, "S: modules that all tasks share", low=1, high=MAX_SKILLS)
    granularity: Literal["layer", "model"] = param(
        "layer", "layer: a task has weights of its own in every layer; model: the same in all"
    )
    allocation_lr: float = param(0.1, "Peak learning rate of the allocation", above=0, high=10)
    temperature: float = param(1.0, "τ of the relaxed Bernoulli draws", above=0, high=100)
    ibp: float = param(
        0.0, "Strength of the Indian-buffet prior on the allocation; 1 is the prior as it is", low=0
    )


def read_modular(text: str) -> tuple[ModularParams, int | None]:
    """Read `skills=4,rank=8,granularity=model`.

    Returns:
        The settings, and the rank of a module where it is given.

    Raises:
        UsageError: No number of skills, an unknown name or value, or a name twice.
    """
    values: dict[str, str] = {}
    for item in text.split(","):
        name, mark, value = (part.strip() for part in item.partition("="))
        if not mark or not name or name in values:
            raise UsageError(
                f"--modular takes NAME=VALUE, each once, with commas between; found {item!r}",
                code="modular",
                hint="like --modular skills=4,rank=8",
                found=item,
            )
        values[name] = value
    if "skills" not in values:
        raise UsageError(
            "--modular has to say how many modules the tasks share",
            code="modular",
            hint="like --modular skills=4; fewer than tasks, or there is nothing to share",
        )
    rank = values.pop("rank", None)
    if rank is not None and not (rank.isascii() and rank.isdecimal()):
        raise UsageError(f"rank must be a whole number, found {rank!r}", code="rank", found=rank)
    return build_params(ModularParams, values, METHOD), None if rank is None else int(rank)
