"""Several skills in one YAML (or JSON) file: shared settings at the top, one entry per skill.

    base: tiny
    rank: 16
    out: experts               # each expert goes to experts/SKILL
    skills:
      reverse: reverse.jsonl   # just the data
      sort: {data: [sort.jsonl, other.jsonl], steps: 300}

Paths are relative to the file; `tiny` and `hf://…` are none. Setting names are those of the
command line; the names of peft, transformers and axolotl are understood too. Unknown keys are
errors.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cgmerge.errors import Damaged, UsageError
from cgmerge.inputs import real_path, refuse_inputs
from cgmerge.modules.recipefile import (
    is_recipe_name,
    located,
    located_base,
    read_mapping,
    refuse_missing,
)
from cgmerge.modules.training.settings import SETTING_NAMES, TrainSettings
from cgmerge.nearest import nearest

ALIASES = {
    # peft, transformers, trl
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "learning_rate": "lr",
    "lr_scheduler_type": "schedule",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "warmup_steps": "warmup",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "accumulate",
    "save_steps": "checkpoint_steps",
    "model_name_or_path": "base",
    "output_dir": "out",
    "train_data": "data",
    # axolotl, LLaMA-Factory
    "base_model": "base",
    "datasets": "data",
    "test_datasets": "eval_data",
    "lora_r": "rank",
    "lora_rank": "rank",
    "lora_target_modules": "target_modules",
    "lora_target": "target_modules",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "num_epochs": "epochs",
    "lr_scheduler": "schedule",
}
_EXTRA = ("micro_batch_size", "skills")
_PATHS = ("data", "eval_data", "out")
_SIZES = ("rank", "alpha", "steps", "batch_size", "micro_batch_size", "accumulate")
_INTEGERS = frozenset((*_SIZES, "max_length", "warmup", "checkpoint_steps", "seed"))
_NUMBERS = frozenset(("epochs", "lr", "dropout", "weight_decay"))
_FLAGS = frozenset(("load_in_4bit", "gradient_checkpointing"))


def read_recipe(path: Path, overrides: Mapping[str, Any]) -> list[TrainSettings]:
    """Read a recipe and apply what the command line says on top.

    Args:
        path: A YAML or JSON file.
        overrides: Setting name to value, for every skill.

    Returns:
        One checked `TrainSettings` per skill, in the order of the file.

    Raises:
        NotFound: No such file.
        UsageError: Not YAML, unknown or repeated keys, wrong types, skills without data.
        Damaged: Not JSON.
    """
    content = _load(path)
    shared = _settings(content, str(path), path)
    entries = _entries(shared.pop("skills", None), path)
    names = [name for name, _ in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{path} holds the skill {twice[0]!r} twice", code="recipe")
    result = []
    for name, own in entries:
        chosen = {**shared, **own, **overrides}
        if "out" not in own:
            chosen["out"] = _shared_out(chosen.get("out"), path) / name
        if "base" not in chosen:
            raise UsageError(f"{path} names no base", code="recipe", hint="add `base: …`")
        _split_batch(chosen)
        result.append(TrainSettings(skill=name, **{"data": (), **chosen}))
    _refuse_shared_places(result, path)
    return result


def check_data(path: Path, many: Sequence[TrainSettings], overrides: Mapping[str, Any]) -> None:
    """Refuse a recipe whose data files are not there.

    Args:
        path: The recipe.
        many: From `read_recipe`.
        overrides: Settings that are not the recipe's; whoever reads those files refuses them.

    Raises:
        NotFound: Says the skill and the absolute path of each.
    """
    named = [
        (f"skills.{one.skill}{part}", file)
        for one in many
        for part, files in (("", one.data), (".eval_data", one.eval_data))
        for file in files
        if not (part and "eval_data" in overrides)
    ]
    refuse_missing(path, named, code="data")


def _refuse_shared_places(many: Sequence[TrainSettings], recipe: Path) -> None:
    """Refuse skills of which one would replace, or hide in, what is another's."""
    files = [recipe, *(file for one in many for file in (*one.data, *one.eval_data))]
    inputs = [file for file in files if not file.is_dir()]  # whoever reads refuses those
    for place, one in enumerate(many):
        own = real_path(one.out)
        for other in many[:place]:
            theirs = real_path(other.out)
            if own == theirs or own in theirs.parents or theirs in own.parents:
                how = "the same folder" if own == theirs else "folders one inside the other"
                raise UsageError(
                    f"{recipe}: the skills {other.skill!r} and {one.skill!r} have {how} as"
                    f" `out`: {other.out} and {one.out}",
                    code="recipe",
                    hint="give each skill a folder of its own",
                )
        refuse_inputs(one.out, inputs)


def _shared_out(value: Any, path: Path) -> Path:
    if value is None:
        raise UsageError(
            f"{path} names no output folder", code="recipe", hint="add `out: FOLDER` or --out"
        )
    return Path(value)


def _entries(value: Any, path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Normalise `skills`: a mapping name → settings or data, or a list with `skill` keys."""
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        pairs = [
            (item.get("skill"), {key: item[key] for key in item if key != "skill"})
            for item in value
        ]
    else:
        pairs = []
    if not pairs:
        raise UsageError(
            f"{path} holds no skills",
            code="recipe",
            hint="add `skills:` with one `NAME: DATA_FILE` per line",
        )
    result = []
    for name, own in pairs:
        if not isinstance(name, str):
            raise UsageError(f"{path}: a skill has no name", code="recipe", hint="add `skill: …`")
        wrapped = own if isinstance(own, dict) else {"data": own}
        result.append((name, _settings(wrapped, f"{path}, skill {name!r}", path)))
        if "skills" in result[-1][1]:
            raise UsageError(f"{path}: skill {name!r} holds skills", code="recipe")
    return result


def _settings(content: Mapping[str, Any], where: str, recipe: Path) -> dict[str, Any]:
    """Check keys and types of one level and bring every name and path into our form."""
    result: dict[str, Any] = {}
    for key, value in content.items():
        name = ALIASES.get(key, key)
        if name in ("skill",) or name not in (*SETTING_NAMES, *_EXTRA):
            raise _unknown(key, where)
        if name in result:
            raise UsageError(f"{where}: {key!r} gives {name} a second time", code="recipe")
        result[name] = _typed(name, key, value, where)
    for name in _PATHS:
        if name in result:
            value = result[name]
            many = isinstance(value, tuple)
            result[name] = (
                tuple(located(item, recipe) for item in value) if many else located(value, recipe)
            )
    if "base" in result:
        result["base"] = located_base(result["base"], recipe)
    return result


def _typed(name: str, key: str, value: Any, where: str) -> Any:
    if name == "skills":
        return value
    if name in ("data", "eval_data", "target_modules"):
        read, wanted = _names, "a name or a list of names"
    elif name in _FLAGS:
        read, wanted = _flag, "true or false"
    elif name in _INTEGERS:
        read, wanted = _integer, "a whole number"
    elif name in _NUMBERS:
        read, wanted = _number, "a number"
    else:
        read, wanted = _text, "text"
    result = read(value)
    if result is None:
        raise UsageError(
            f"{where}: {key} must be {wanted}, found {value!r}", code="recipe", found=repr(value)
        )
    return result


def _names(value: Any) -> Any:
    items = value if isinstance(value, list) else [value]
    # Axolotl writes data sets as `{path: …}`; other keys there would be lost, so none may be.
    names = [
        item["path"] if isinstance(item, dict) and set(item) == {"path"} else item for item in items
    ]
    return tuple(names) if all(isinstance(name, str) for name in names) else None


def _flag(value: Any) -> Any:
    return value if isinstance(value, bool) else None


def _integer(value: Any) -> Any:
    # Beyond 64 bits nothing is meant seriously, and products would no longer fit a float.
    return value if type(value) is int and abs(value) < 2**63 else None


def _text(value: Any) -> Any:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _split_batch(chosen: dict[str, Any]) -> None:
    """Others give rows per part; here `batch_size` counts rows per optimiser step."""
    micro = chosen.pop("micro_batch_size", None)
    if micro is None:
        return
    if "batch_size" in chosen:
        raise UsageError(
            "batch_size (rows per step) and micro_batch_size (rows per part) are both given",
            code="recipe",
        )
    chosen["batch_size"] = micro * chosen.get("accumulate", 1)


def _unknown(key: Any, where: str) -> UsageError:
    known = [*SETTING_NAMES, *ALIASES, *_EXTRA]
    near = nearest(str(key), known)
    hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(SETTING_NAMES)}"
    return UsageError(f"{where}: unknown key {str(key)!r}", code="recipe", hint=hint)


def _load(path: Path) -> dict[str, Any]:
    hint = f"for a data file write --data {path}"
    if not is_recipe_name(path):
        raise UsageError(
            f"{path} is no recipe: a recipe ends in .yml, .yaml or .json", code="recipe", hint=hint
        )
    try:
        return read_mapping(path)
    except Damaged as error:  # data files are .json too, but hold a list or many objects
        error.hint = "; ".join(filter(None, [error.hint, hint]))
        raise
