"""What is asked: skills as sets of examples, items with ids that survive reordering.

A data file is one skill, named after it, unless the user gives `NAME=FILE`, or its rows carry
several values in a `skill` column, which then split it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from cgmerge.errors import DataError, UsageError
from cgmerge.evals.columns import Question, numbers_at, with_parts
from cgmerge.evals.record import SkillInfo
from cgmerge.modules.data import Encoded, Example, encode_all, read_data
from cgmerge.modules.encoding import unknown_token
from cgmerge.refs import expanded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COLUMN = "skill"


@dataclass(frozen=True)
class SkillSet:
    """The examples of one skill.

    Attributes:
        name: Unique among the sets of an evaluation.
        examples: At least one.
        source: Name of the data file they come from, without its folder.
        sha256: Digest of that file.
    """

    name: str
    examples: tuple[Example, ...] = field(repr=False)
    source: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class Rows:
    """Questions as one tokenizer sees them.

    Attributes:
        encoded: Tokens of each question, in order.
        expected: Text of each target, end token included.
        bare: Questions without a prompt, whose first target token is given instead of asked.
        others: Tokens of the other choices, in the order of `other_choices`.
        unknown: The token for what the tokenizer does not know, if it has one.
    """

    encoded: tuple[Encoded, ...]
    expected: tuple[str, ...]
    bare: int
    others: tuple[Encoded, ...] = ()
    unknown: int | None = None


def read_skills(specs: Sequence[str], *, limit: int | None = None) -> list[SkillSet]:
    """Read data files as skills.

    Args:
        specs: `FILE` or `NAME=FILE`; a named file is one skill whatever its columns.
        limit: Use only the first so many examples of each skill.

    Raises:
        UsageError: No file, the same data twice, two skills of one name, or a limit below 1.
        NotFound: No such file.
        DataError: A file that cannot be used, or rows without a skill among rows with one.
    """
    if not specs:
        raise UsageError("there is nothing to evaluate on", code="data", hint="--data FILE")
    if limit is not None and limit < 1:
        raise UsageError(f"a limit of {limit} leaves no items", code="limit")
    skills: list[SkillSet] = []
    digests: list[str] = []
    for spec in specs:
        name, ref = split_name(spec)
        path = expanded(ref)
        content = read_data(path)
        digests.append(content.sha256)
        parts = {name: content.examples} if name else _split(content.examples, path)
        skills += [
            SkillSet(part, examples[:limit], path.name, content.sha256)
            for part, examples in parts.items()
        ]
    _refuse_copies(specs, digests)
    check_names([skill.name for skill in skills], what="skill", form="NAME=FILE")
    return skills


def _refuse_copies(specs: Sequence[str], digests: Sequence[str]) -> None:
    """Refuse the same data twice, where it is not said of both which skill they are of.

    Nobody would see that the rows weigh twice, as two skills or as twice the rows of one.
    """
    known: dict[str, list[str]] = {}
    for spec, digest in zip(specs, digests, strict=True):
        name = split_name(spec)[0]
        for earlier in known.setdefault(digest, []):
            if name is None or split_name(earlier)[0] in (None, name):
                raise UsageError(
                    f"{earlier} and {spec} are the same data, byte for byte",
                    code="data",
                    hint="give each file once, or NAME=FILE for each if the rows are to count as"
                    " several skills",
                    found=spec,
                )
        known[digest].append(spec)


def read_examples(specs: Sequence[str]) -> tuple[list[SkillSet], list[str]]:
    """Read data files to learn from; several sets may be of one skill, where its name was said.

    Args:
        specs: As for `read_skills`.

    Returns:
        The sets in the order of the files, and the SHA-256 of every file.

    Raises:
        UsageError: Two files that only their own names put together, or the same data twice.
        NotFound, DataError: As for `read_skills`.
    """
    files = [read_skills([spec]) for spec in specs]
    skills = [skill for file in files for skill in file]
    digests = [file[0].sha256 for file in files]
    _refuse_copies(specs, digests)
    silent = Counter(
        file[0].name
        for spec, file in zip(specs, files, strict=True)
        if len(file) == 1 and split_name(spec)[0] is None
    )
    for name, count in silent.items():
        if count > 1:
            raise UsageError(
                f"two files of examples are called {name!r}",
                code="name",
                hint=f"if both are of one skill, say so for each: {name}=FILE; else give them"
                " different names",
                found=name,
            )
    return skills, digests


def split_name(spec: str) -> tuple[str | None, str]:
    """Split `NAME=REF`; a path that exists as written has no name.

    Raises:
        UsageError: Nothing before or after the `=`, or a name that is none.
    """
    name, equals, ref = spec.partition("=")
    if not equals or expanded(spec).exists():
        return None, spec
    if not name.strip() or not ref.strip():
        raise UsageError(f"{spec!r} lacks a part of NAME=PATH", code="name")
    check_name(name.strip(), f"if {spec!r} is meant as a path: there is none")
    return name.strip(), ref.strip()


def check_name(name: str, hint: str) -> None:
    """Refuse a name that breaks tables or looks like a path.

    Raises:
        UsageError: Line ends, control characters, slashes.
    """
    if not name.isprintable() or "/" in name or "\\" in name:
        raise UsageError(
            f"{name!r} cannot be a name: names are printable and without slashes",
            code="name",
            hint=hint,
            found=name,
        )


def check_names(names: Iterable[str], *, what: str, form: str) -> None:
    """Refuse two things of one name.

    Raises:
        UsageError: With the form that gives another name.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(
            f"two {what}s are called {twice[0]!r}",
            code="name",
            hint=f"give one of them another name: {form}",
        )


def questions(skills: Sequence[SkillSet], by: Sequence[str] = ()) -> list[Question]:
    """Give every example its id: 16 digits of SHA-256 over skill, prompt and target.

    A repeated example gets an id of its own that counts the repetition, so that ids are unique.

    Args:
        skills: At least one.
        by: Columns that scores shall be read over; `tokens` is no column but the answer's length.

    Raises:
        DataError: No skills, a skill without examples, `part_ids` that name no row, or a row
            without a number in a column of `by`.
    """
    if not skills:
        raise DataError("there are no skills to evaluate", code="empty")
    empty = [skill.name for skill in skills if not skill.examples]
    if empty:
        raise DataError(f"skill {empty[0]!r} has no items", code="empty")
    seen: Counter[str] = Counter()
    found = []
    for skill in skills:
        for example in skill.examples:
            key = "\0".join([skill.name, prompt_text(example), example.completion])
            again = f"\0{seen[key]}" if seen[key] else ""
            seen[key] += 1
            digest = hashlib.sha256((key + again).encode("utf-8", errors="surrogatepass"))
            question = Question(digest.hexdigest()[:16], skill.name, example)
            found.append(replace(question, at=numbers_at(question, by)))
    return with_parts(found)


def encode_questions(
    asked: Sequence[Question], tokenizer: "PreTrainedTokenizerBase", limit: int | None
) -> Rows:
    """Turn questions into tokens; long prompts lose tokens on the left, targets never do.

    Args:
        asked: From `questions`.
        tokenizer: Of the model that is scored.
        limit: Positions of that model.

    Raises:
        DataError: Targets that do not fit the model, or that are empty.
    """
    encoded: list[Encoded] = []
    for name, part in groupby(asked, key=lambda one: one.skill):
        examples = [one.example for one in part]
        encoded += encode_all(
            examples, tokenizer, max_length=limit, source=f"skill {name!r}", positions=limit
        )
    asked_for = [_with_prompt(row, one) for row, one in zip(encoded, asked, strict=True)]
    texts = tokenizer.batch_decode([row.target_ids for row in asked_for], skip_special_tokens=False)
    bare = sum(not row.prompt_ids for row in encoded)
    return Rows(tuple(asked_for), tuple(texts), bare, unknown=unknown_token(tokenizer))


def describe(skill: SkillSet, asked: Sequence[Question], rows: Rows) -> SkillInfo:
    """Count what a reader of the scores must know about a skill's items.

    Args:
        skill: One of the sets behind `asked`.
        asked: All questions.
        rows: Their tokens for the base.
    """
    answers: dict[str, set[str]] = {}
    repeated = contradicting = 0
    for example in skill.examples:
        known = answers.setdefault(prompt_text(example), set())
        if example.completion in known:
            repeated += 1
        elif known and example.prompt is not None:
            contradicting += 1
        known.add(example.completion)
    own = [row for row, one in zip(rows.encoded, asked, strict=True) if one.skill == skill.name]
    ids = {one.row: str(one.extra["id"]) for one in skill.examples if "id" in one.extra}
    return SkillInfo(
        name=skill.name,
        n=len(skill.examples),
        source=skill.source,
        sha256=skill.sha256,
        repeated=repeated,
        contradicting=contradicting,
        same_id=len(ids) - len(set(ids.values())),
        cut=sum(row.cut > 0 for row in own),
        unknown=sum(rows.unknown in row.target_ids for row in own),
    )


def warnings_about(infos: Sequence[SkillInfo], rows: Rows) -> list[str]:
    """Say in words what `describe` counted."""
    sentences = {
        "repeated": "items repeat an earlier one",
        "contradicting": "items ask an earlier prompt but expect another answer",
        "same_id": "rows repeat the id of an earlier one",
        "unknown": "answers hold what the base's tokenizer does not know, and can never be right",
        "cut": "prompts were cut on the left to fit the model",
    }
    found = [
        f"{info.name}: {count} of {info.n} {sentence}"
        for info in infos
        for key, sentence in sentences.items()
        if (count := getattr(info, key))
    ]
    if rows.bare:
        found.append(f"{rows.bare} items have no prompt; their first token is given, not asked")
    cut = sum(row.cut > 0 for row in rows.others)
    if cut:
        found.append(f"prompts were cut on the left for {cut} choices to fit the model")
    return found


def prompt_text(example: Example) -> str:
    """Return a prompt as one string: messages as JSON, no prompt as nothing."""
    if isinstance(example.prompt, tuple):
        turns = [[message.role, message.content] for message in example.prompt]
        return json.dumps(turns, ensure_ascii=False)
    return example.prompt or ""


def _with_prompt(row: Encoded, question: Question) -> Encoded:
    """Give a row without prompt (plain text, no begin token) its first token as prompt."""
    if row.prompt_ids:
        return row
    if row.cut:
        raise DataError(
            f"skill {question.skill!r}, row {question.example.row}: the target alone fills all "
            f"{len(row.target_ids)} positions of the model",
            code="too_long",
            hint="shorten or remove this row",
            row=question.example.row,
        )
    if len(row.target_ids) < 2:
        raise DataError(
            f"skill {question.skill!r}, row {question.example.row}: a text of one token "
            "asks for nothing",
            code="empty_target",
            row=question.example.row,
        )
    return replace(row, prompt_ids=row.target_ids[:1], target_ids=row.target_ids[1:])


def _split(examples: tuple[Example, ...], path: Path) -> dict[str, tuple[Example, ...]]:
    """Split by the skill column where it holds several values."""
    parts: dict[str, list[Example]] = {}
    for example in examples:
        parts.setdefault(str(example.extra.get(_COLUMN) or ""), []).append(example)
    if len(parts) == 1:
        return {path.stem: examples}
    if "" in parts:
        row = parts[""][0].row
        raise DataError(
            f"{path}: row {row} has no {_COLUMN!r}, but other rows have",
            code="skill",
            hint=f"complete the column, or write NAME={path} to take the file as one skill",
            row=row,
        )
    return {name: tuple(part) for name, part in parts.items()}
