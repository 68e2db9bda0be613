"""An audit hook for the whole suite: what no command may do, whatever a file says.

No unpickling, no shell, no process that the program starts, no network beyond this machine.
"""

import os
import sys

_SEEN = []
_OWN = f"{os.sep}cgmerge{os.sep}"
_STEPS = os.path.join("evals", "pipeline", "run.py")  # noqa: PTH118
"""The one file that starts processes: the steps of the user's own pipeline."""
_NEVER = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.startfile")
_PLACES = {"socket.getaddrinfo": 0, "socket.connect": 1, "socket.sendto": 1}
"""Which argument says where to."""
_LOCAL = ("127.0.0.1", "localhost", "::1", "", None)


def take():
    """Return what was seen since the last call."""
    seen = list(_SEEN)
    _SEEN.clear()
    return seen


def _watch(event, args):
    if event.startswith(_NEVER):
        _SEEN.append(f"{event} {args[:2]}")
    elif event in _PLACES:
        where = args[_PLACES[event]]
        known = event == "socket.getaddrinfo" or isinstance(where, tuple)  # else a local socket
        host = where[0] if isinstance(where, tuple) else where
        if known and host not in _LOCAL:
            _SEEN.append(f"{event} {host}")
    elif event == "subprocess.Popen" and args[0] != "uname":  # which Python itself asks
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if _OWN in name and f"{os.sep}tests{os.sep}" not in name and _STEPS not in name:
                _SEEN.append(f"{event} {args[0]} from {name}")
                break
            frame = frame.f_back


sys.addaudithook(_watch)
