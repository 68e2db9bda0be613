"""A stream of blocks in which every block is changed on its way, for looks at the whole."""

from collections.abc import Callable, Iterator

from torch import Tensor

from cgmerge.merge.deltas import Block, Blocks


class Changed(Blocks):
    """The same stream with a function applied to each block.

    Args:
        blocks: The stream to change.
        change: Overwrites a block's values, entry by entry: what it does to an entry must not
            depend on which other rows are in the block.
    """

    def __init__(self, blocks: Blocks, change: Callable[[Block], None]) -> None:
        super().__init__(blocks.experts, names=blocks.names, dtype=blocks.dtype, ids=blocks.ids)
        self.change = change

    def __iter__(self) -> Iterator[Block]:
        """Yield changed blocks in the order of names and rows."""
        for block in super().__iter__():
            self.change(block)
            yield block

    def block_at(self, start: int) -> Block:
        """Return the changed block that begins at a flat index, computed again."""
        block = super().block_at(start)
        self.change(block)
        return block

    def _seen(self, block: Block) -> Tensor:
        self.change(block)
        return block.values
