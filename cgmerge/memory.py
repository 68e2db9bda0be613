"""Memory: what this process may still take, and what it looks like when there is none left."""

import contextlib
from pathlib import Path

from cgmerge.errors import LimitExceeded


def refuse_shortage(needed: int, what: str) -> None:
    """Refuse work that cannot fit before it begins: a killed process says nothing.

    Args:
        needed: Bytes above what is in use, estimated.
        what: What needs them, for the message.

    Raises:
        LimitExceeded: More than the process may still take.
    """
    room = left()
    if room is not None and needed > room:
        raise LimitExceeded(
            f"{what} needs about {_shown(needed)} of memory, {_shown(room)} are left",
            code="memory",
            hint="close other programs, raise the limit, or use fewer experts or another method",
            expected=needed,
            found=room,
        )


def left() -> int | None:
    """Return the bytes that this process can still take, or None where nothing tells.

    The least of three: its own limits (`ulimit -v`, `-d`), its control group's, the machine's.
    """
    found = [room for room in (_own(), _group(), _machine()) if room is not None]
    return max(min(found), 0) if found else None


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory ran out; torch has no class of its own for the CPU."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def _own() -> int | None:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    used = _fields("/proc/self/status")
    rooms = []
    for limit, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY and field in used:
            rooms.append(most - used[field])
    return min(rooms, default=None)


def _group() -> int | None:
    """Return what the control group allows; cached files are given back when it is needed."""
    place = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        most = int((place / "memory.max").read_text())  # `max` where there is no limit
        used = int((place / "memory.current").read_text())
        lines = (place / "memory.stat").read_text().splitlines()
        return most - used + sum(int(line.split()[1]) for line in lines if line[:5] == "file ")
    return None


def _machine() -> int | None:
    return _fields("/proc/meminfo").get("MemAvailable")


def _fields(path: str) -> dict[str, int]:
    """Read the sizes of a file of /proc, in bytes."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path(path).read_text().splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if len(words) == 2 and words[1] == "kB":
                found[name] = int(words[0]) * 1024
    return found


def _shown(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
