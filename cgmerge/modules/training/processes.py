"""Several processes that train together, as `accelerate launch` or torchrun start them.

One process is the rule; then everything here does nothing.
"""

import os
from typing import TypeVar

Shared = TypeVar("Shared")


def process_count() -> int:
    """Return how many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this process prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def local_device(device: str) -> str:
    """Return this process's own accelerator where several processes share a machine."""
    if process_count() > 1 and device == "cuda":
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return device


def join_processes(device: str) -> None:
    """Connect the processes; returns at once if they are connected already."""
    if process_count() > 1:
        from accelerate import PartialState

        PartialState(cpu=device == "cpu")


def share(value: Shared) -> Shared:
    """Give every process the main one's value; waits for all."""
    if process_count() == 1:
        return value
    import torch.distributed

    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def meet() -> None:
    """Wait until every process is here."""
    if process_count() > 1:
        import torch.distributed

        torch.distributed.barrier()
