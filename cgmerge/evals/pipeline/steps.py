"""From a pipeline to its steps: command lines, in an order in which each finds what it reads."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from cgmerge import __version__
from cgmerge.errors import UsageError
from cgmerge.evals.pipeline.config import Files, Options, Pipeline
from cgmerge.modules.recipe import default_method
from cgmerge.shown import some_of
from cgmerge.tensorfile import file_sha256

_SMALL = "cge-"
"""Begins the names of compressed experts."""

KINDS = ("train", "compress", "compose", "eval", "report")


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a pipeline.

    Attributes:
        name: Kind and subject, as `compose-ties-scale0.8`.
        kind: Which command.
        words: Its command line, the program's name left out.
        out: What it writes.
        inputs: Files and folders of the user that it reads.
        after: Names of the steps whose results it reads.
        settings: What was chosen from a grid, for the table of results.
        launcher: Words in front of the command.
    """

    name: str
    kind: str
    words: tuple[str, ...]
    out: Path
    inputs: tuple[Path, ...]
    after: tuple[str, ...]
    settings: Mapping[str, Any]
    launcher: tuple[str, ...] = ()


def plan_steps(pipeline: Pipeline, known: Mapping[str, Mapping[str, bool]]) -> list[Step]:
    """Return all steps, each after those whose results it reads.

    Args:
        pipeline: From `read_pipeline`.
        known: Command to its options and whether each takes no value, to check names by.

    Raises:
        UsageError: Options that a command does not have, experts that are not named, two steps
            of one name.
    """
    maker = _Maker(pipeline, known)
    steps = [*maker.training()]
    experts = maker.experts(steps)
    small = list(maker.compressed(experts))
    steps += small
    steps += maker.composed(experts, maker.experts(small, named=False))
    if pipeline.evaluation:
        steps += maker.evaluated(steps)
    if pipeline.report:
        steps.append(maker.reported(steps))
    names = [step.name for step in steps]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UsageError(
            f"{pipeline.path}: two steps are called {twice!r}",
            code="pipeline",
            hint="give one entry a `name`",
        )
    return steps


@dataclass(frozen=True, slots=True)
class _Expert:
    """An expert that steps can name: where it is, and which step makes it."""

    path: str
    made_by: str | None
    inputs: tuple[Path, ...] = ()


class _Maker:
    def __init__(self, pipeline: Pipeline, known: Mapping[str, Mapping[str, bool]]) -> None:
        self.pipeline = pipeline
        self.known = known

    def training(self) -> Iterator[Step]:
        for skill, options in self.pipeline.train.items():
            out = self.pipeline.out / "experts" / skill
            own, files = self._words("train", options, f"train.skills.{skill}")
            words = ("train", "--base", self.pipeline.base, "--skill", skill, *own, "-o", str(out))
            launcher = tuple(self.pipeline.launcher)
            yield Step(f"train-{skill}", "train", words, out, files, (), {}, launcher)

    def experts(self, makers: Sequence[Step], *, named: bool = True) -> dict[str, _Expert]:
        """Return what steps make by its name in tables, and the file's own experts if wanted."""
        found = {_target(step): _Expert(str(step.out), step.name) for step in makers}
        for name, ref in self.pipeline.experts.items() if named else ():
            there = (Path(ref),) if "://" not in ref else ()
            found[name] = _Expert(ref, None, there)
        return found

    def compressed(self, experts: Mapping[str, _Expert]) -> Iterator[Step]:
        for place, entry in enumerate(self.pipeline.compress):
            for options, chosen in _grid(entry):
                label = _label(chosen) or (str(place) if len(self.pipeline.compress) > 1 else "")
                for name, expert in self._chosen(experts, options).items():
                    title = "-".join(filter(None, [name, label]))
                    out = self.pipeline.out / "compressed" / f"{title}.cge"
                    own, files = self._words("compress", options, f"compress[{place}]")
                    words = ("compress", expert.path, *own, "-o", str(out))
                    inputs = (*files, *expert.inputs)
                    after = (expert.made_by,) if expert.made_by else ()
                    yield Step(f"compress-{title}", "compress", words, out, inputs, after, chosen)

    def composed(
        self, experts: Mapping[str, _Expert], small: Mapping[str, _Expert]
    ) -> Iterator[Step]:
        for place, entry in enumerate(self.pipeline.compose):
            given = entry.get("name")
            for options, chosen in _grid({k: v for k, v in entry.items() if k != "name"}):
                some = self._chosen(experts, options, small)
                method = options.get("method", default_method(len(some)))
                title = "-".join(filter(None, [str(given or method), _label(chosen)]))
                out = self.pipeline.out / "composed" / title
                own, files = self._words("compose", options, f"compose[{place}]")
                refs = [expert.path for expert in some.values()]
                words = ("compose", *refs, "--base", self.pipeline.base, *own, "-o", str(out))
                inputs = tuple(itertools.chain(files, *(one.inputs for one in some.values())))
                after = tuple(one.made_by for one in some.values() if one.made_by)
                yield Step(f"compose-{title}", "compose", words, out, inputs, after, chosen)

    def evaluated(self, steps: Sequence[Step]) -> Iterator[Step]:
        targets: dict[str, tuple[str, str | None]] = {
            _target(step): (str(step.out), step.name) for step in steps
        }
        targets |= {name: (ref, None) for name, ref in self.pipeline.experts.items()}
        own, files = self._words("eval", self.pipeline.evaluation, "eval")
        common = ("--base", self.pipeline.base, *own)
        yield self._evaluation("base", common, files, (), {})
        settings = {_target(step): step.settings for step in steps}
        for name, (place, maker) in targets.items():
            words = (f"{name}={place}", *common, "--no-base")
            inputs = files if maker else (*files, *_there(place))
            after = (maker,) if maker else ()
            yield self._evaluation(name, words, inputs, after, settings.get(name, {}))

    def _evaluation(
        self,
        name: str,
        words: tuple[str, ...],
        inputs: tuple[Path, ...],
        after: tuple[str, ...],
        settings: Mapping[str, Any],
    ) -> Step:
        out = self.pipeline.out / "scores" / f"{name}.json"
        return Step(f"eval-{name}", "eval", ("eval", *words, "-o", str(out)), out, inputs, after,
                    settings)  # fmt: skip

    def reported(self, steps: Sequence[Step]) -> Step:
        scores = [step for step in steps if step.kind == "eval"]
        out = self.pipeline.out / "report.html"
        words = ("report", *(str(step.out) for step in scores), "-o", str(out))
        return Step("report", "report", words, out, (), tuple(s.name for s in scores), {})

    def _chosen(
        self,
        experts: Mapping[str, _Expert],
        options: Options,
        small: Mapping[str, _Expert] | None = None,
    ) -> dict[str, _Expert]:
        """Return the experts that an entry names, by patterns; default all.

        Args:
            experts: Those that patterns are about.
            options: Of the entry.
            small: Compressed ones, for patterns that begin as their names do: `*` is every
                expert once.
        """
        wanted = options.get("experts", "*")
        patterns = [str(item) for item in (wanted if isinstance(wanted, list) else [wanted])]
        found: dict[str, _Expert] = {}
        for pattern in patterns:
            known = small if small and pattern.startswith(_SMALL) else experts
            hits = {name: one for name, one in known.items() if fnmatchcase(name, pattern)}
            if not hits:
                raise UsageError(
                    f"{self.pipeline.path}: no expert is called {pattern!r}",
                    code="pipeline",
                    hint=f"there are {some_of([*experts, *(small or ())], 10)}",
                )
            found |= hits
        return found

    def _words(
        self, command: str, options: Options, place: str
    ) -> tuple[tuple[str, ...], tuple[Path, ...]]:
        """Spell options as a command line has them; and the files that they name."""
        words: list[str] = []
        files: list[Path] = []
        for name, value in options.items():
            if name == "experts":
                continue
            if f"--{name}" not in self.known[command]:
                raise UsageError(
                    f"{self.pipeline.path}: `{place}` has the unknown option {name!r}",
                    code="pipeline",
                    hint=f"cgmerge {command} --help lists them",
                )
            if name in ("out", "base", "overwrite", "json", "skill"):
                raise UsageError(
                    f"{self.pipeline.path}: `{place}.{name}` is decided by the pipeline",
                    code="pipeline",
                    hint="remove it",
                )
            spelled, named = _spell(name, value, flag=self.known[command][f"--{name}"])
            words += spelled
            files += named
        return tuple(words), tuple(files)


def _spell(name: str, value: Any, *, flag: bool) -> tuple[list[str], list[Path]]:
    if isinstance(value, Files):
        words = []
        for label, path in value.items:
            words += [f"--{name}", f"{label}={path}" if label else str(path)]
        return words, [path for _, path in value.items]
    if isinstance(value, Mapping):
        return [w for k, v in value.items() for w in (f"--{name}", f"{k}={_plain(v)}")], []
    if flag and isinstance(value, bool):
        return ([f"--{name}"] if value else []), []
    if isinstance(value, list):
        return [word for item in value for word in (f"--{name}", _plain(item))], []
    return [f"--{name}", _plain(value)], []


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _grid(entry: Options) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Give every combination of the values of lists, and what was chosen in it."""
    axes: list[tuple[str, str | None, list[Any]]] = []
    for name, value in entry.items():
        if name == "experts":
            continue
        if isinstance(value, list):
            axes.append((name, None, value))
        elif isinstance(value, Mapping):
            axes += [(name, key, v) for key, v in value.items() if isinstance(v, list)]
    for values in itertools.product(*(axis[2] for axis in axes)):
        options = {k: dict(v) if isinstance(v, Mapping) else v for k, v in entry.items()}
        chosen: dict[str, Any] = {}
        for (name, key, _), value in zip(axes, values, strict=True):
            if key is None:
                options[name] = value
            else:
                options[name][key] = value
            chosen[key or name] = value
        yield options, chosen


def _label(chosen: Mapping[str, Any]) -> str:
    """Name a point of a grid, as a folder can be called."""
    parts = [f"{key}{_plain(value)}" for key, value in chosen.items() if key != "method"]
    return "-".join("".join(c if c.isalnum() or c in "._+-" else "-" for c in p) for p in parts)


def _target(step: Step) -> str:
    """Name what a step made in tables: experts as they are called, files by what they are."""
    kind, _, name = step.name.partition("-")
    return _SMALL + name if kind == "compress" else name


def _there(place: str) -> tuple[Path, ...]:
    return (Path(place),) if "://" not in place else ()


def identities(steps: Sequence[Step], base: tuple[str, str]) -> dict[str, str]:
    """Return what each step is known by: a digest of its words and of all that it reads.

    Where things lie takes no part, so that a folder can be moved with its results.

    Args:
        steps: From `plan_steps`.
        base: What the steps call the base, and its fingerprint.

    Raises:
        NotFound: A file that a step reads does not exist.
    """
    known: dict[Path, str] = {}
    found: dict[str, str] = {}
    for step in steps:
        places = dict([base]) | {str(place): _content(place, known) for place in step.inputs}
        places |= {str(one.out): found[one.name] for one in steps if one.name in step.after}
        places[str(step.out)] = "out"
        words = [_placed(word, places) for word in step.words]
        content = {"version": __version__, "words": words}
        text = json.dumps(content, sort_keys=True, ensure_ascii=True)
        found[step.name] = hashlib.sha256(text.encode()).hexdigest()
    return found


def _placed(word: str, places: Mapping[str, str]) -> str:
    """Replace a path, alone or behind `NAME=`, by the digest of what is there."""
    name, joined, path = word.partition("=")
    if joined and path in places:
        return f"{name}={places[path]}"
    return places.get(word, word)


def _content(place: Path, known: dict[Path, str]) -> str:
    """Return the digest of a file, or of all files of a folder."""
    if place not in known:
        if place.is_dir():
            parts = {
                str(path.relative_to(place)): file_sha256(path, follow_links=True)
                for path in sorted(place.rglob("*"))
                if path.is_file()
            }
            text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
            known[place] = hashlib.sha256(text.encode()).hexdigest()
        else:
            known[place] = file_sha256(place, follow_links=True)
    return known[place]
