"""The audit hook over the whole suite: it sees what it is there for."""

import os
import pickle
import socket
import subprocess
import sys

import audit
import pytest


@pytest.mark.fault("F11", "F35")
@pytest.mark.parametrize("kind", ["pickle", "system", "look-up", "process"])
def test_the_hook_sees(kind, monkeypatch):
    if kind == "pickle":
        pickle.loads(pickle.dumps(os.getcwd))
    elif kind == "system":
        os.system("true")
    elif kind == "look-up":
        monkeypatch.undo()  # the suite's own refusal of sockets, which would come first
        with pytest.raises(OSError):
            socket.getaddrinfo("nowhere.invalid", 1)
    else:
        code = compile("import subprocess\nsubprocess.run(['true'])", "/x/cgmerge/y.py", "exec")
        exec(code, {})  # as if the program did it
    assert len(audit.take()) == 1


def test_what_tests_do_is_left_alone():
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert audit.take() == []
