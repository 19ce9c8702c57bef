"""What one H200 took: the tables agree, and the null driver puts memory where that GPU's driver does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import measured
from tracer.rehearsal.driver import driver_environment, find_cuda_torch
from traces.devices import device
from traces.units import MIB

HERE = Path(__file__).resolve().parents[2] / "traces" / "gallery" / "h200"
# Reads words and prints addresses: a number of MiB is asked for, -k gives the k-th of what was got back.
CHILD = """
import ctypes, os, sys
driver = ctypes.CDLL(os.environ["LD_PRELOAD"].split(os.pathsep)[0])
driver.cudaFree.argtypes = [ctypes.c_void_p]
got = []
for word in map(int, sys.argv[1:]):
    p = ctypes.c_void_p()
    if word < 0:
        assert driver.cudaFree(got[-word - 1]) == 0
    else:
        assert driver.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(word << 20)) == 0
        got.append(p.value)
print(*got)
"""


def places(gpu: str, *words: int) -> list[int]:
    """In MiB from the first."""
    env = {**os.environ, **driver_environment(find_cuda_torch(), device(gpu))}
    command = [sys.executable, "-c", CHILD, *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = [int(n) // MIB for n in done.stdout.split()]
    return [n - found[0] for n in found]


@pytest.mark.rehearsal
def test_memory_lies_where_an_h200_puts_it() -> None:
    # The context's last chunk of 32 MiB has 2 MiB left at its end, where the first request lies (0), and begins at -30;
    # the chunk before lies above and has 24 MiB left from its 8th on: 2 + 8.
    # 148 gets a chunk of 160 below: -30 - 160. 2 lies in the newest chunk, behind it. 20 has only the context's hole.
    # The next 20 gets a chunk of 32 below, 12 the rest of that, 8 the smallest hole of the newest chunk with one: the
    # 160's, 10 left behind the 2. The 148 is given back; 100 and 40 lie where it lay. 60 gets a chunk of 64, below all.
    assert places("h200", 2, 148, 2, 20, 20, 12, 8, -2, 100, 40, 60) == [
        0, -190, -42, 10, -222, -202, -40, -190, -90, -286
    ]  # fmt: skip
    # A chunk that is empty goes back, and lies free for one that is smaller by 32 MiB or more, at its upper end.
    assert places("h200", 2, 512, 64, -2, 160, 512) == [0, -542, -606, -190, -1118]


@pytest.mark.rehearsal
def test_older_gpus_have_one_segment_after_the_other() -> None:
    assert places("a100-80", 2, 148, 20, -2, 20, 160) == [0, 2, 150, 2, 170]


def test_the_table_says_what_was_measured() -> None:
    found = measured.compared(measured.read(HERE / "measured.jsonl"), measured.read(HERE / "rehearsed.jsonl"))
    assert (HERE / "measured.md").read_text(encoding="utf-8") == measured.HEAD + found


def test_facts_stand_in_the_device_table() -> None:
    facts = json.loads((HERE / "facts.json").read_text(encoding="utf-8"))
    h200 = device("h200")
    assert h200.memory_bytes // MIB == facts["memory_bytes"] // MIB
    said = h200.l2_bytes, h200.multiprocessors, 1000 * h200.memory_mhz
    assert said == tuple(facts["attributes"][k] for k in ("38", "16", "36"))
