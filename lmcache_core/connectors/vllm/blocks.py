"""vLLM's pool of blocks, read: which are free, in the order in which it takes them, and what it finds them by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmcache_core.errors import LayoutError

__all__ = ["EngineBlocks"]


class EngineBlocks:
    """A `Memory` over vLLM's `BlockPool`. Nothing of it is changed.

    Raises:
        LayoutError: It is not made as it was in the vLLM that this was tested with.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        try:
            self.blocks = int(pool.num_gpu_blocks)
            for block in self.free():
                self.content(block)
                break
        except (AttributeError, TypeError, ValueError, IndexError) as error:
            raise LayoutError(
                f"this vLLM does not tell of its free blocks as others do ({type(error).__name__}: {error}); leave "
                "lazy_offload out"
            ) from error

    def free(self) -> Iterator[int]:
        """Blocks that no request uses, the one that is taken next first."""
        queue = self._pool.free_block_queue
        block, end = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
        while block is not None and block is not end:
            yield block.block_id
            block = block.next_free_block

    def content(self, block: int) -> Any:
        """The hash by which vLLM finds a block; None if it does not."""
        return self._pool.blocks[block].block_hash
