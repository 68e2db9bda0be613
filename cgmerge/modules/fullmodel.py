"""Experts that are full fine-tunes: a model folder whose delta is its weights minus the base's.

Opening reads headers only. A delta is read in rows, from both models at once, so that neither a
model nor one tensor of all experts is ever in memory. Names are those of the base's weights, and
matrices are [out, in] whatever the file has (GPT-2 stores its projections transposed), as rules
that look at whole matrices tell the two sides apart.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge.errors import Damaged, readable
from cgmerge.merge.deltas import LowRank, Rows, matrix_shape
from cgmerge.modules.base import Base, open_base, stem_of
from cgmerge.modules.compress.openedfull import CompressedDeltas, CompressedFull
from cgmerge.modules.compress.wholemodel import refused
from cgmerge.modules.expert import COMPRESSED, Expert, ExpertDeltas, check_modules
from cgmerge.modules.fullcheck import check_full, check_made_from, is_table
from cgmerge.modules.weights import WeightReader
from cgmerge.refs import local_place

if TYPE_CHECKING:
    import torch

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class FullExpert:
    """One full fine-tune.

    Attributes:
        ref: What the user wrote.
        name: The folder's name.
        model: The folder, opened by its headers.
        warnings: What the user should know.
        base_fingerprint: Of the base that it was made from, where a record in the folder tells.
    """

    ref: str
    name: str
    model: Base
    warnings: tuple[str, ...] = ()
    base_fingerprint: str | None = None
    reader: WeightReader = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reader", WeightReader(self.model))

    @property
    def folder(self) -> Path:
        """Return the absolute path of the model's folder."""
        return self.model.folder

    @cached_property
    def digest(self) -> str:
        """Return a sha256 over all weights; how they are sharded makes no difference."""
        hashes = {stem_of(name): self.reader.sha256(name) for name in self.model.infos}
        embedding = self.model.embedding
        if embedding is not None and hashes.get(HEAD) == hashes[stem_of(embedding)]:
            del hashes[HEAD]  # a tied head may or may not be written out
        lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
        return hashlib.sha256(lines.encode()).hexdigest()

    @cached_property
    def tied(self) -> bool:
        """Whether head and embedding hold the same values."""
        return _is_tied(self.reader)


AnyExpert = Expert | FullExpert | CompressedFull


def open_full(ref: str, base: Base, *, force_base: bool = False) -> FullExpert:
    """Open a full fine-tune of a base: headers only, everything checked that they tell.

    Args:
        ref: What the user wrote.
        base: What its delta is relative to.
        force_base: Accept a model whose record names another base.

    Raises:
        NotFound: No such folder, or no weights in it.
        Unsafe: Pickle weights only.
        Damaged: A header or the index is wrong.
        Incompatible: Another architecture, vocabulary, shape or set of weights; quantized weights;
            a record of another base.
    """
    # By its path: a folder called `tiny` is not the built-in base of that name.
    place = local_place(ref, what="full model", suffix=COMPRESSED)
    if place.is_file():
        raise refused(place, "which has to be a model again first")
    model = replace(open_base(str(place)), ref=ref)
    warnings = check_full(model, base)
    made_from = check_made_from(model, base, force=force_base)
    if made_from not in (None, base.fingerprint):
        warnings.append(f"{model.folder.name} was made from {made_from}, not from {base.ref}")
    name = readable(model.folder.name, 200).replace("\n", " ")
    return FullExpert(ref, name, model, tuple(warnings), made_from)


def task_vectors(
    experts: Sequence[AnyExpert], base: Base, *, force_base: bool = False
) -> list[Mapping[str, Any]]:
    """Return the deltas of full models, compressed or not, and adapters by the base's names.

    A tied head stays tied (it has no delta of its own) unless some expert moves it apart from the
    embedding; then every full model that is tied gives its embedding's delta to both.

    Raises:
        Incompatible: An adapter that does not fit the base.
    """
    reader = WeightReader(base)
    adapters = [expert for expert in experts if isinstance(expert, Expert)]
    named = {id(expert): _by_weight(expert, base, force_base=force_base) for expert in adapters}
    own_head = HEAD in base.infos
    if shares_head(reader):
        apart = [not expert.tied for expert in experts if isinstance(expert, FullExpert)]
        apart += [HEAD in e.file.coded for e in experts if isinstance(e, CompressedFull)]
        own_head = any(HEAD in deltas for deltas in named.values()) or any(apart)
    shared = (base.embedding, HEAD) if own_head and base.embedding is not None else None

    def vector(expert: AnyExpert) -> Mapping[str, Any]:
        if isinstance(expert, FullExpert):
            return FullDeltas(expert, reader, own_head=own_head)
        if isinstance(expert, CompressedFull):
            return CompressedDeltas(expert, base, shared)
        return named[id(expert)]

    return [vector(expert) for expert in experts]


def shares_head(reader: WeightReader) -> bool:
    """Whether a base's head is its embedding: not stored, or stored again with the same values."""
    return reader.model.embedding is not None and _is_tied(reader)


class FullDeltas(Mapping[str, Rows]):
    """Weight name to delta of one full fine-tune.

    Args:
        expert: From `open_full`, for the same base.
        reader: The base's weights.
        own_head: Whether the head has a delta apart from the embedding's.
    """

    def __init__(self, expert: FullExpert, reader: WeightReader, *, own_head: bool) -> None:
        base = reader.model
        self.expert = expert
        self.reader = reader
        self.transposed = {s.weight for s in base.modules.values() if s.transposed}
        self._finite: dict[str, int] = {}
        own = {stem_of(name): name for name in expert.model.infos}
        self._pairs = {
            name: (own[stem_of(name)], name)
            for name in base.infos
            if name != HEAD and not is_table(base, name)
        }
        if own_head:
            theirs = HEAD if HEAD in own else expert.model.embedding
            ours = HEAD if HEAD in base.infos else base.embedding
            assert theirs is not None
            assert ours is not None
            self._pairs[HEAD] = theirs, ours

    @cached_property
    def sizes(self) -> dict[str, tuple[int, int, int]]:
        """Return (out, in, rank) of every weight, without reading it."""
        shapes = {name: matrix_shape(self[name]) for name in self}
        return {
            name: (rows, columns, min(rows, columns)) for name, (rows, columns) in shapes.items()
        }

    def __getitem__(self, name: str) -> Rows:
        theirs, ours = self._pairs[name]
        delta = FullDelta(self.expert.reader, theirs, self.reader, ours, self._finite)
        return TransposedDelta(delta) if name in self.transposed else delta

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


class FullDelta(Rows):
    """One weight of a fine-tune minus the base's, float32, as the files have it.

    Args:
        reader: The fine-tune's weights.
        name: Which of them.
        base: The base's weights.
        base_name: Which of them.
        finite: Entries from the first of a base's weight that were found finite; updated.
    """

    def __init__(
        self,
        reader: WeightReader,
        name: str,
        base: WeightReader,
        base_name: str,
        finite: dict[str, int],
    ) -> None:
        self.reader = reader
        self.name = name
        self.base = base
        self.base_name = base_name
        self.finite = finite
        self.shape = base.model.infos[base_name].shape

    def rows(self, first: int, last: int) -> "torch.Tensor":
        """Read rows of both models and subtract.

        Raises:
            Damaged: NaN or infinity in one of them.
        """
        import torch

        columns = math.prod(self.shape[1:]) if len(self.shape) > 1 else math.prod(self.shape)
        found = torch.empty(last - first, columns)
        self.read_into(found, first, last)
        return found

    def read_into(self, out: "torch.Tensor", first: int, last: int) -> None:
        """Read rows of both models and subtract, in memory that is there already.

        Raises:
            Damaged: NaN or infinity in one of them.
        """
        import torch

        start, end = first * out.shape[1], last * out.shape[1]
        flat = out.view(-1)
        flat.copy_(self.reader.entries(self.name, start, end))
        flat.sub_(self.base.shared_floats(self.base_name, start, end))
        known = self.finite.get(self.base_name, 0)
        if end <= known:
            return  # methods that need several passes read the same open files
        low, high = torch.aminmax(flat)  # one pass; NaN goes through
        if not (math.isfinite(low) and math.isfinite(high)):
            # Names the model at fault; where both are finite their difference overflows.
            self.reader.floats(self.name, start, end)
            self.base.floats(self.base_name, start, end)
            raise Damaged(
                f"{self.reader.model.folder}: weight {self.name!r} is so far from the base's that"
                " their difference is no number",
                code="not_finite",
                hint="the model is broken (often a diverged training)",
                tensor=self.name,
            )
        if start <= known:
            self.finite[self.base_name] = end


class TransposedDelta(Rows):
    """The same for a weight that the files hold as [in, out]; it is read whole, and once."""

    def __init__(self, stored: FullDelta) -> None:
        self.stored = stored
        self.shape = stored.shape[::-1]
        self._whole: torch.Tensor | None = None

    def rows(self, first: int, last: int) -> "torch.Tensor":
        """Return rows of the transposed difference."""
        if self._whole is None:
            self._whole = self.stored.rows(0, self.stored.shape[0]).T.contiguous()
        return self._whole[first:last]


class _ByWeight(Mapping[str, LowRank]):
    """An adapter's deltas under the names of the base's weights."""

    def __init__(self, deltas: ExpertDeltas, paths: Mapping[str, str]) -> None:
        self.deltas = deltas
        self.paths = paths

    @cached_property
    def sizes(self) -> dict[str, tuple[int, int, int]]:
        return {name: self.deltas.sizes[path] for name, path in self.paths.items()}

    def __getitem__(self, name: str) -> LowRank:
        return self.deltas[self.paths[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


def _by_weight(expert: Expert, base: Base, *, force_base: bool) -> _ByWeight:
    deltas = expert.deltas(base, force_base=force_base)
    paths = {
        HEAD if path == "lm_head" else shape.weight: path
        for path, shape in check_modules(expert, base).items()
    }
    return _ByWeight(deltas, paths)


def _is_tied(reader: WeightReader) -> bool:
    embedding = reader.model.embedding
    if HEAD not in reader.model.infos:
        return True
    return embedding is not None and reader.same(HEAD, embedding)
