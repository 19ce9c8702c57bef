"""Say what torch's message that memory ran out means, and what to run next, from its text alone."""

from __future__ import annotations

import re
from typing import Any, Final

from traces.errors import SpecError
from traces.units import KIB, show_bytes

SIZE: Final = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
UNITS: Final = {"bytes": 1, "KiB": KIB, "MiB": KIB**2, "GiB": KIB**3, "TiB": KIB**4}
# Of c10/cuda/CUDACachingAllocator.cpp, as torch 2 has it, and torch 1.
FIGURES: Final = {
    "asked": rf"Tried to allocate {SIZE}",
    "total": rf"total capacity of {SIZE}|{SIZE} total capacity",
    "free": rf"of which {SIZE} is free|{SIZE} free",
    "process": rf"this process has {SIZE} memory in use",
    "allocated": rf"{SIZE} is allocated by PyTorch|{SIZE} already allocated",
    "unallocated": rf"{SIZE} is reserved by PyTorch but unallocated",
    "limit": rf"{SIZE} allowed",
    "reserved": rf"{SIZE} reserved in total",
}
NOISE: Final = KIB**3 // 50  # of a sum: each figure has two decimals
SCRIPT: Final = re.compile(r'File "([^"]+\.py)", line \d+')


def message_in(text: str, name: str) -> dict[str, Any]:
    """Explain the last such message in a text, such as a traceback: its figures, the script that failed, and sentences
    on what was asked for and what was there, why that was not enough, and what to run. Raises SpecError: there is none.
    """
    at = max((m.start() for m in re.finditer(FIGURES["asked"], text)), default=-1)
    if at < 0:
        raise SpecError(
            f"{name}: torch's words of CUDA, 'Tried to allocate 2.00 GiB', are not there; give the whole message."
        )
    said = {key: re.search(pattern, text[at : at + 2000]) for key, pattern in FIGURES.items()}
    f = {k: int(float(n) * UNITS[of]) for k, m in said.items() if m for n, of in [filter(None, m.groups())]}
    if {"reserved", "allocated"} <= {*f}:
        f.setdefault("unallocated", f.pop("reserved") - f["allocated"])
    script = next((s for s in SCRIPT.findall(text[:at]) if "site-packages" not in s), "")
    of = {k: show_bytes(n) for k, n in f.items()}
    there = f" and the device had {of['free']} of {of['total']} free" if {"free", "total"} <= {*f} else ""
    first = f"torch was asked for {of['asked']}{there}."
    more, idle = max(0, f["asked"] - f.get("free", 0)), f.get("unallocated", 0)
    others = f.get("total", 0) - f.get("free", 0) - f.get("process", f.get("total", 0))
    outside = f.get("process", 0) - f.get("allocated", 0) - idle
    told = [f"{of['allocated']} are in use by tensors"] if "allocated" in f else []
    told += [f"{show_bytes(idle)} are reserved by torch and free"] if "unallocated" in f else []
    told += [f"{show_bytes(outside)} of this process lie outside of torch"] if "process" in f else []
    told += [f"{show_bytes(others)} belong to other processes"] if others > NOISE and "process" in f else []
    cause = f"It lacks {show_bytes(more)}, which tensors must need less"
    if "free" not in f:
        cause = "How much it lacks, the message does not say"
    if "limit" in f and f.get("free", 0) >= f["asked"]:
        cause = "The process set itself a limit (set_per_process_memory_fraction), which was reached"
    elif more <= idle:
        cause = "Fragmentation: torch has more than that free, in pieces that are each too small; try "
        cause += "PYTORCH_ALLOC_CONF=expandable_segments:True first"
    elif others >= more > 0:
        cause = "Without the other processes it would have fitted"
    last = (
        f"Next: `execute rehearse {script or 'train.py'} --gpu NAME` tells without a GPU what holds the memory, and "
        "`simulate why` of its --json or --snapshot file explains that; on the GPU call "
        'torch.cuda.memory._record_memory_history() first and torch.cuda.memory._dump_snapshot("s.pickle") '
        "where it fails, then run `simulate why s.pickle`."
    )
    sentences = [first, f"{'; '.join(told)}. {cause}.".removeprefix(". "), last]
    figures = {f"{name}_bytes": n for name, n in f.items()}
    return {"kind": "message", "script": script, **figures, "sentences": sentences}
