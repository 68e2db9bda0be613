"""Train, compress, compose and evaluate LoRA experts, exactly, in delta space.

Importing this package is light: torch is imported when something that needs it is used.
"""

from typing import TYPE_CHECKING, Any

from cgmerge._version import __version__
from cgmerge.errors import CgmergeError

if TYPE_CHECKING:
    from cgmerge.merge import merge_state_dicts

__all__ = ["CgmergeError", "__version__", "merge_state_dicts"]


def __getattr__(name: str) -> Any:
    if name == "merge_state_dicts":
        from cgmerge.merge import merge_state_dicts

        return merge_state_dicts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
