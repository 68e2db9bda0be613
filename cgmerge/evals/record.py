"""The record of an evaluation: what was measured on what, and every item behind every number.

Two files: `NAME.json` (schema `cgmerge.record/1`) with scores, intervals and tests, and
`NAME.items.jsonl` beside it with one line per target and item. The record holds the digest of the
items file, so the two cannot drift apart unseen, and nothing in it depends on the time, the
machine's folders or the order of a hash: the same evaluation writes the same bytes.

Two files cannot be replaced in one step, so that one rename decides: new items first stand as
`NAME.items.next`, then the record is replaced, which makes the new evaluation the valid one, then
the items get their name. Whoever reads takes the items that the record names from either place,
and the next writer tidies up after one that was killed.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from cgmerge import fs, strictjson
from cgmerge.errors import CgmergeError, Damaged, NotFound
from cgmerge.inputs import refuse_inputs
from cgmerge.outputs import refuse_foreign_file
from cgmerge.tensorfile import file_sha256, read_small

SCHEMA: Literal["cgmerge.record/1"] = "cgmerge.record/1"
MAX_ITEM_BYTES = 8 * 1024**3
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Metric = Literal[
    "exact_match",
    "loglik",
    "token_accuracy",
    "perplexity",
    "rouge_l",
    "token_f1",
    "choice",
    "choice_norm",
    "lm_eval",
    "lm_eval_right",
]
"""What a score is; `metrics` says how each follows from items."""
Kind = Literal["base", "expert", "merged", "routed", "model", "deltas", "baseline"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers that an item offers.

    Attributes:
        text: As in the data.
        loglik: Log-likelihood of all its tokens, end token included.
        tokens: How many they are.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    text: str
    loglik: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Item:
    """One target on one item: a line of the items file.

    Attributes:
        id: 16 hexadecimal digits over skill, prompt and target text; the same for every target.
        skill: Name of the skill.
        target: Name of the model that was scored.
        correct: Every target token, end token included, is the arg-max; where another harness
            scored, it gave the item all of its worth.
        loglik: Mean log-likelihood of a target token; None where lm-evaluation-harness scored.
        prediction: Text of the teacher-forced arg-max.
        expected: Text of the target, end token included.
        tied: Two tokens shared the highest logit exactly.
        generated: Text that greedy generation wrote, where that was asked for.
        generated_correct: Whether generation wrote exactly the target.
        tokens: Target tokens.
        right: Of these, the ones that are the arg-max.
        answer: Generated text without end and other special tokens, for metrics of texts.
        references: Texts that `answer` is measured against.
        stopped: Whether generation was stopped before an end token.
        choices: Answers that were offered, for metrics of choices.
        choice: Place of the right one.
        parts: Ids of the items that ask for its parts (from the column `part_ids`).
        at: Numbers that scores are read over, by column.
        value: What lm-evaluation-harness gave the item in the metric that is the score.
        measures: The same in all metrics that it has for the item.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    id: str
    skill: str
    target: str
    correct: bool
    loglik: float | None
    prediction: str
    expected: str
    tied: bool = False
    generated: str | None = None
    generated_correct: bool | None = None
    tokens: int | None = None
    right: int | None = None
    answer: str | None = None
    references: tuple[str, ...] | None = None
    stopped: bool | None = None
    choices: tuple[Choice, ...] | None = None
    choice: int | None = None
    parts: tuple[str, ...] | None = None
    at: dict[str, float] | None = None
    value: float | None = None
    measures: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """A model that was scored.

    Attributes:
        name: Its name in all tables.
        kind: Where it came from; `deltas` were given in memory, a `baseline` is made of the
            answers of experts.
        digest: SHA-256 of the adapter or model weights; the fingerprint for the base.
        tokenizer: `own` when a full model's tokenizer differs from the base's.
        note: How a baseline was picked.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    kind: Kind
    digest: str
    tokenizer: Literal["base", "own"] = "base"
    note: str = ""


@dataclass(frozen=True, slots=True)
class SkillInfo:
    """A set of items.

    Attributes:
        name: Its name in all tables.
        n: Items.
        source: Name of the data file, without its folder.
        sha256: Digest of the data file.
        repeated: Items that repeat an earlier one word for word.
        contradicting: Items whose prompt stood earlier with another target.
        same_id: Rows whose `id` column repeats that of another row.
        cut: Items whose prompt lost tokens on the left to fit the model.
        unknown: Items whose answer holds a token that the base's tokenizer does not know.
        measure: Metric and filter of lm-evaluation-harness, where it scored.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    n: int
    source: str = ""
    sha256: str = ""
    repeated: int = 0
    contradicting: int = 0
    same_id: int = 0
    cut: int = 0
    unknown: int = 0
    measure: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """One target on one skill.

    Attributes:
        score: What `metric` says.
        low: Lower end of the 95 % interval of `score` (Wilson where items are right or wrong,
            else bootstrap).
        high: Upper end.
        correct: Items right by teacher forcing.
        loglik: Mean over items of their mean token log-likelihood, where all have one.
        generated_correct: Items that greedy generation got right, where it ran.
        agree: Items on which generation and teacher forcing say the same.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    target: str
    skill: str
    metric: Metric
    score: float
    n: int
    low: float
    high: float
    correct: int
    loglik: float | None
    generated_correct: int | None = None
    agree: int | None = None


@dataclass(frozen=True, slots=True)
class Mean:
    """One target over all skills, each skill weighing the same."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    target: str
    metric: Metric
    score: float
    low: float
    high: float
    n: int
    skills: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two targets on the same items.

    Attributes:
        skill: None for all skills together.
        wins: Items that only `target` has right, or on which it is better.
        losses: Items that only `against` has right, or on which it is better.
        difference: Mean over skills of the difference of the scores, above zero where `target` is
            better: for a perplexity, by how much it is lower.
        low: Lower end of its 95 % interval (paired bootstrap inside each skill).
        high: Upper end.
        p: Exact McNemar test, or exact sign test, of wins against losses.
        p_holm: The same after Holm's correction over all targets (and skills).
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    target: str
    against: str
    skill: str | None
    n: int
    wins: int
    losses: int
    difference: float
    low: float
    high: float
    p: float
    p_holm: float


@dataclass(frozen=True, slots=True)
class BaseInfo:
    """The base that adapters were attached to."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What decides the numbers.

    Attributes:
        metric: What `score` is.
        compare_to: The target that others are compared to, if any.
        seed: Of the bootstrap.
        batch_size: Rows in a pass.
        limit: First items of each skill that were used; None for all.
        generate: Whether greedy generation ran too.
        max_new_tokens: Most tokens that it wrote; None for two more than each target has.
        by: Columns that scores are read over.
        device: Kind of device.
        dtype: Float type of the model.
        load_in_4bit: Whether weights were quantized on loading.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    metric: Metric = "exact_match"
    compare_to: str | None = None
    seed: int = 0
    batch_size: int = 32
    limit: int | None = None
    generate: bool = False
    max_new_tokens: int | None = None
    by: tuple[str, ...] = ()
    device: str = "cpu"
    dtype: str = "float32"
    load_in_4bit: bool = False


@dataclass(frozen=True, slots=True)
class ItemsFile:
    """The file of items that belongs to a record."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    file: str
    sha256: str
    n: int


@dataclass(frozen=True, slots=True)
class Record:
    """All numbers of an evaluation; see the module's first lines for the files.

    Every number can be computed again from the items: `summary.summarise` does.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    base: BaseInfo
    settings: RunSettings
    targets: tuple[TargetInfo, ...]
    skills: tuple[SkillInfo, ...]
    results: tuple[Result, ...]
    means: tuple[Mean, ...]
    comparisons: tuple[Comparison, ...] = ()
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    items: ItemsFile | None = None
    schema: Literal["cgmerge.record/1"] = SCHEMA


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A record together with its items, in the order of the items file."""

    record: Record
    items: tuple[Item, ...] = field(repr=False)


def items_path(path: Path) -> Path:
    """Return where the items of a record stand: `out.json` gives `out.items.jsonl`."""
    stem = path.name.removesuffix(".json")
    return path.with_name(f"{stem}.items.jsonl")


def _next_path(path: Path) -> Path:
    """Return where items wait for their record; the name is no longer than the final one."""
    return items_path(path).with_suffix(".next")


def check_out(path: Path, *, overwrite: bool, inputs: Sequence[Path] = ()) -> None:
    """Refuse an unusable record path before anything is evaluated.

    Args:
        path: Where the record shall go.
        overwrite: Whether existing files may be replaced.
        inputs: Files and folders that are read; none is replaced or written into.

    Raises:
        UsageError: No file, an existing one without `overwrite`, or part of an input.
        StorageError: The folder cannot be written.
    """
    for target in (path, items_path(path), _next_path(path)):
        refuse_inputs(target, inputs)
    _check_free(path, overwrite=overwrite)
    fs.check_file(path, overwrite=overwrite)
    refuse_foreign_file(path)


def _check_free(path: Path, *, overwrite: bool) -> None:
    for target in (path, items_path(path)):
        fs.check_free(target, overwrite=overwrite)
    # A killed writer's waiting items are its own business: `write_record` settles them.
    fs.check_free(_next_path(path), overwrite=True)


def write_record(path: Path, evaluation: Evaluation, *, overwrite: bool = False) -> Record:
    """Write the record and its items, or leave the evaluation that was there.

    Whenever it is killed, `load_record` finds the old evaluation or the new one.

    Args:
        path: Where the record goes.
        evaluation: What to write.
        overwrite: Whether existing files may be replaced.

    Returns:
        The record as written, with the digest of its items file.

    Raises:
        UsageError: As `check_out`.
        StorageError: The operating system refused.
    """
    _check_free(path, overwrite=overwrite)
    lines = b"".join(_line(item) for item in evaluation.items)
    beside = items_path(path)
    info = ItemsFile(beside.name, hashlib.sha256(lines).hexdigest(), len(evaluation.items))
    content = strictjson.dumps(asdict(evaluation.record) | {"items": asdict(info)})
    _settle(path)
    try:
        fs.replace_file(_next_path(path), lines)
        fs.replace_file(path, content, overwrite=overwrite)
        fs.move_file(_next_path(path), beside)
    except BaseException:
        with contextlib.suppress(CgmergeError, OSError):
            _settle(path)
        raise
    return _RECORD.validate_json(content)


def _settle(path: Path) -> None:
    """Bring waiting items to their end: in place where the record names them, else away."""
    waiting = _next_path(path)
    if not waiting.is_file():
        return
    named = None
    with contextlib.suppress(CgmergeError):  # no record, or one that is none
        named = _read_record(path).items
    if named is not None and named.sha256 == file_sha256(waiting):
        fs.move_file(waiting, items_path(path))
    else:
        fs.remove(waiting)


def load_record(path: Path) -> Evaluation:
    """Read a record and its items, and check that they belong together.

    Raises:
        NotFound: No such record, or its items file is gone.
        Unsafe: The items are a link; the record itself may be one, as the user names it.
        Damaged: Not a record, or the items are not those that the record was written with.
    """
    record = _read_record(path)
    return Evaluation(record, _load_items(path, record))


def _read_record(path: Path) -> Record:
    if not path.is_file():
        raise NotFound(f"no such record: {path}", code="record", path=path)
    content = read_small(fs.absolute(path), follow_links=True)
    if strictjson.loads_object(content, source=str(path)).get("schema") != SCHEMA:
        raise Damaged(f"{path} is not a {SCHEMA}", code="record", path=path)
    record: Record = _validated(_RECORD, content, str(path))
    return record


def _load_items(path: Path, record: Record) -> tuple[Item, ...]:
    info = record.items
    if info is None:
        return ()
    beside = items_path(path)
    found = None
    # The final name twice: a writer may move the waiting items there meanwhile.
    for place in (beside, _next_path(path), beside):
        with contextlib.suppress(NotFound):
            lines = read_small(fs.absolute(place), limit=MAX_ITEM_BYTES)
            digest = hashlib.sha256(lines).hexdigest()
            if digest == info.sha256:
                return tuple(_validated(_ITEM, line, str(place)) for line in lines.splitlines())
            found = found or digest
    if found is None:
        raise NotFound(
            f"{path.name} needs its items file {beside.name}, which is not beside it",
            code="items",
            hint=f"copy {info.file} along with the record",
            path=beside,
        )
    raise Damaged(
        f"{beside} is not the file that {path.name} was written with: "
        f"sha256 {found[:16]}…, recorded {info.sha256[:16]}…",
        code="items",
        hint="evaluate again",
        path=beside,
        expected=info.sha256,
        found=found,
    )


def _line(item: Item) -> bytes:
    """Write an item as one line; fields that were not measured are left out."""
    fields = {k: v for k, v in asdict(item).items() if v is not None or k == "loglik"}
    text = json.dumps(fields, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", errors="replace") + b"\n"


def _validated(adapter: TypeAdapter[Any], content: bytes, source: str) -> Any:
    try:
        return adapter.validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise Damaged(f"{source}: {place}: {first['msg']}", code="record", path=source) from error


_RECORD = TypeAdapter(Record)
_ITEM = TypeAdapter(Item)
