"""Runs commands on hostile packages in one process, and writes down what each cost and touched.

Arguments: a JSON file with a list of {name, folder, words}. One JSON object for each on stdout.
"""

# ruff: noqa: PTH120, PTH123, T201

import contextlib
import io
import json
import os
import resource
import sys
import time

SEEN = []
ON = []
WATCHED = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork",
           "pickle.find_class", "ctypes.dlopen", "import", "open", "exec", "compile")  # fmt: skip


# Looked at by what they name; the name of the machine goes into names of temporary files only.
QUIET = {"open", "open itself", "import", "exec", "compile", "ctypes.dlopen", "socket.gethostname"}


def watch(event, args):
    if ON and event.startswith(WATCHED):
        followed = event != "open" or not isinstance(args[2], int) or not args[2] & os.O_NOFOLLOW
        SEEN.append((event if followed else "open itself", args[0] if args else ""))


sys.addaudithook(watch)


def places(folder):
    """Where a command may read: its own folder, Python's and the program's own files, /proc."""
    import cgmerge

    own = os.path.dirname(cgmerge.__file__)
    roots = {folder, sys.prefix, sys.base_prefix, own, "/proc", "/sys", "/dev/null", "/usr/share"}
    return tuple(os.path.realpath(root) for root in roots)


def outside(path, allowed):
    if not isinstance(path, str | bytes):
        return False  # a file that is open already
    return not os.path.realpath(os.fsdecode(path)).startswith(allowed)


def attempt(app, job):
    os.chdir(job["folder"])
    allowed = places(job["folder"])
    err, out = io.StringIO(), io.StringIO()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    SEEN.clear()
    start = time.process_time()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        ON.append(True)
        code = app.run([*job["words"], "--json"])
        ON.clear()
    spent = time.process_time() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    lines = err.getvalue().strip().splitlines()
    bad = [
        (event, str(what)[:200])
        for event, what in SEEN
        if (event == "open" and outside(what, allowed))
        or (event == "import" and "evil" in str(what))
        or (event in ("exec", "compile") and "evil" in str(what))
        or event not in QUIET
    ]
    last = lines[-1] if lines else ""
    return {"name": job["name"], "exit": code, "last": last, "bad": bad,
            "stdout": out.getvalue()[:500], "seconds": spent, "grown": grown}  # fmt: skip


def main():
    from cgmerge.cli import app

    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    cpu = 2 * len(jobs) + 60
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    for job in jobs:
        print(json.dumps(attempt(app, job)), flush=True)


main()
