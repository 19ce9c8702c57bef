"""Random programs on torch's own allocator; runs on the null driver alone (see `tests.standin.run`)."""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import sys
from pathlib import Path
from typing import Any

MIB = 1 << 20
TOTAL_BYTES = 80 << 30  # what the null driver says that a device has
SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:40",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:8,16:4,64:2,>:16]",
    "expandable_segments:True,max_split_size_mb:30",
    "garbage_collection_threshold:0.6",
    "large_segment_size_mb:32",
    "max_split_size_mb:32,max_non_split_rounding_mb:64",
    "garbage_collection_threshold:0.4,max_split_size_mb:64",
    "expandable_segments:True,large_segment_size_mb:14",
)
NEVER_AGAIN = ("time_us", "compile_context", "user_metadata", "frames")
SUMS = ("reserved_bytes", "allocated_bytes", "active_bytes", "requested_bytes")


def run(seed: int, standin: Any, streams: list[Any]) -> dict[str, Any]:
    """One program: its operations, what torch's statistics were after each, and the snapshot in the end."""
    import torch

    rng = random.Random(seed)
    conf = SETTINGS[seed % len(SETTINGS)]
    collects = "garbage" in conf
    memory = rng.choice([300, 500, 900]) * MIB if seed % 3 == 0 or collects else TOTAL_BYTES
    fraction = rng.choice([0.6, 0.9]) if collects or rng.random() < 0.2 else 1.0
    set_conf = torch._C._accelerator_setAllocatorSettings
    set_conf("large_segment_size_mb:20,max_non_split_rounding_mb:20,expandable_segments:False")
    set_conf(conf or "expandable_segments:False")
    standin.null_set_memory(0, memory)
    torch.cuda.set_per_process_memory_fraction(fraction * memory / TOTAL_BYTES if fraction < 1 else 1.0, 0)
    steps = rng.choice([60, 200])
    start = rng.choice([0, steps // 2])
    used = streams[: rng.choice([1, 1, 2, 3])]
    sizes = rng.choice([[2000], [2000, MIB, 9 * MIB, 60 * MIB], [MIB, 3 * MIB], [2000, MIB, 30 * MIB]])
    ops: list[tuple[Any, ...]] = []
    figures: list[tuple[int, ...]] = []
    live: list[tuple[int, Any]] = []

    def note(*op: Any) -> None:
        s = torch._C._cuda_memoryStats(0)
        ops.append(op)
        figures.append((*(s[k]["all"]["current"] for k in SUMS), s["num_alloc_retries"], s["num_ooms"]))

    def drop() -> None:
        number, tensor = live.pop(rng.randrange(len(live)))
        if len(used) > 1 and rng.random() < 0.3:
            for stream in rng.sample(used, rng.randint(1, len(used))):
                tensor.record_stream(stream)
                note("record", number, stream.cuda_stream)
        del tensor
        note("free", number)

    before = torch._C._cuda_memoryStats(0)
    for k in range(steps):
        if k == start:
            torch.cuda.reset_peak_memory_stats(0)
            torch.cuda.memory._record_memory_history(context=None, max_entries=10**6)
        choice, stream = rng.random(), rng.choice(used)
        if choice < 0.52 or not live:
            size = rng.randint(1, rng.choice(sizes))
            try:
                with torch.cuda.stream(stream):
                    live.append((k, torch.empty(size, dtype=torch.uint8, device="cuda:0")))
                note("alloc", k, size, stream.cuda_stream, live[-1][1].data_ptr())
            except torch.cuda.OutOfMemoryError:
                note("oom", size, stream.cuda_stream)
                for _ in range(len(live) // 2):
                    drop()
        elif choice < 0.93:
            drop()
        elif choice < 0.98:
            standin.null_stream_done(stream.cuda_stream)
            note("done", stream.cuda_stream)
        elif choice < 0.985 or len(used) == 1:
            torch.cuda.empty_cache()
            note("empty")
        else:
            torch.cuda.synchronize()
            note("sync")
    stats = torch.cuda.memory_stats(0)
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    live.clear()
    torch.cuda.synchronize()
    torch.empty(1, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    for row in [
        *(e for t in snapshot["device_traces"] for e in t),
        *snapshot["segments"],
        *(b for s in snapshot["segments"] for b in s["blocks"]),
    ]:
        for key in NEVER_AGAIN:
            row.pop(key, None)
    return {
        "seed": seed,
        "conf": conf,
        "memory": memory,
        "limit": int(fraction * memory / TOTAL_BYTES * TOTAL_BYTES) if fraction < 1 else None,
        "start": start,
        "snapshot": snapshot,
        "base": (before["num_alloc_retries"], before["num_ooms"]),
        "peaks": {k.removesuffix("_bytes"): stats[f"{k}.all.peak"] for k in SUMS},
        "ops": ops,
        "figures": figures,
    }


def main() -> None:
    import torch

    standin = ctypes.CDLL(os.environ["LD_PRELOAD"].split(os.pathsep)[0])
    standin.null_set_memory.argtypes = [ctypes.c_int, ctypes.c_uint64]
    standin.null_stream_done.argtypes = [ctypes.c_uint64]
    streams = [torch.cuda.default_stream(0), torch.cuda.Stream(0), torch.cuda.Stream(0)]
    rows = [run(seed, standin, streams) for seed in range(int(sys.argv[2]))]
    Path(sys.argv[1]).write_bytes(pickle.dumps(rows))


if __name__ == "__main__":
    main()
