"""Fresh processes of Python that need not import torch: each is forked from one that has imported it, and no more.

`python -m tests.forked SOCKET MODULE ...` imports the modules and forks for whoever connects. `CLIENT` stands
in Python's place for who starts processes: it hands words, variables, folder and files over, and ends as the fork does.
Counts: `-m MODULE WORDS`. Ignores: variables that are read while torch is imported, but for LD_PRELOAD.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import runpy
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from select import select
from signal import SIGKILL

from tests.commands import ROOT
from traces.processes import ending_with_this

CLIENT = """#!{python} -SE
import json, os, socket, sys
words, there = sys.argv[1:], socket.socket(socket.AF_UNIX)
if words[:1] != ["-m"] or os.environ.get("LD_PRELOAD", "") != {preload!r}:
    os.execv({python!r}, [{python!r}, *words])
there.connect({path!r})
told = json.dumps([words[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(there, [len(told).to_bytes(8, "big")], [0, 1, 2])
there.sendall(told)
code = int(there.makefile().read() or 1)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def forking(folder: Path, preload: str, *modules: str) -> Iterator[str]:
    """The path of what stands in Python's place, while there is a process with these libraries that forks."""
    path, client = str(folder / "socket"), folder / "python"
    client.write_text(CLIENT.format(python=sys.executable, path=path, preload=preload))
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    env = {**os.environ, "LD_PRELOAD": preload, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.forked", path, *modules]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, **ending_with_this()) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield str(client)
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(path)


def serve(path: str) -> list[str]:
    """Fork for each that connects, and return in the fork the words that it has; or end with who wants nothing."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        os.write(1, b"ready\n")
        while True:
            there, _ = listening.accept()
            begin, files, *_ = socket.recv_fds(there, 8, 3)
            if not files:
                with suppress(ChildProcessError):
                    while True:
                        os.wait()
                sys.exit()
            if not os.fork():
                break
            for file in (there.detach(), *files):
                os.close(file)
    words, variables, folder = json.loads(there.makefile().read(int.from_bytes(begin, "big")))
    if child := os.fork():
        if there in select([there, os.pidfd_open(child)], [], [])[0]:  # who asked was killed
            os.kill(child, SIGKILL)
        with suppress(BrokenPipeError):
            there.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    there.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    if "LOWTIDE_NULL_MEMORY" in variables:
        ctypes.CDLL(None).null_boot()  # it reads what device it is when it is loaded
    return words


def main(path: str, *modules: str) -> None:
    for module in modules:
        import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1  # what other threads do would be missing in a fork
    gc.collect()
    gc.freeze()
    words = serve(path)
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    sys.path[:2] = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = words
    sys.modules.pop(words[0], None)  # it runs anew, as __main__
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
