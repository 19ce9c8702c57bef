"""The settings of PYTORCH_ALLOC_CONF that the simulated allocator obeys.

Source: c10/core/AllocatorConfig.h and the notes on memory management in torch's documentation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from traces.errors import SpecError
from traces.units import MIB

UNLIMITED: Final = 1 << 63  # no max_split_size: larger than any request
# Which of equally large free blocks is taken: the one at the lowest address (torch 2.11 and before), the one that has
# existed longest as a block (2.12), the one in the segment that has existed longest, there the lowest address (2.13).
# Read from the versions' own libraries; nothing documents it.
LOWEST_ADDRESS: Final = "lowest address"
OLDER_BLOCK: Final = "older block"
OLDER_SEGMENT: Final = "older segment"
MAX_TEXT: Final = 4096
LARGE_SEGMENT_BYTES: Final = 20 * MIB

# Options that change how memory is asked for, but not how much of it, nor where. They are accepted and do nothing.
# `garbage_collection_threshold` collects only below a limit that the process has set itself, which is not simulated.
WITHOUT_EFFECT: Final = frozenset({
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register", "pinned_num_register_threads", "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb", "pinned_max_cached_size_mb", "pinned_max_round_threshold_mb",
    "pinned_free_catch_all", "graph_capture_record_stream_reuse", "backend", "garbage_collection_threshold",
})  # fmt: skip
NOT_SIMULATED: Final = frozenset({
    "per_process_memory_fraction", "throw_on_cudamalloc_oom", "roundup_power2_divisions",
    "max_non_split_rounding_mb", "large_segment_size_mb",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """The settings by which the allocator rounds, splits, grows and gives back. Sizes in bytes."""

    max_split_bytes: int = UNLIMITED
    expandable_segments: bool = False
    # Which of equally large free blocks is taken; no option, it goes by the version.
    ties: str = OLDER_SEGMENT


def parse_alloc_conf(text: str) -> AllocatorSettings:
    """Settings from text such as `expandable_segments:True,max_split_size_mb:128`.

    Raises SpecError: an option that does not exist or is not simulated, or a value that it cannot have.
    """
    if len(text) > MAX_TEXT:
        raise SpecError(f"allocator settings: {len(text):,} characters; torch's options take some hundred.")
    found = AllocatorSettings()
    for part in filter(None, re.sub(r"\s", "", text).split(",")):
        key, _, value = part.partition(":")
        if not value:
            raise SpecError(
                f"allocator settings: {part!r} is not KEY:VALUE; write them as in "
                "expandable_segments:True,max_split_size_mb:128."
            )
        if key == "max_split_size_mb":
            if not re.fullmatch(r"\d{2,12}", value, re.ASCII) or int(value) * MIB < LARGE_SEGMENT_BYTES:
                raise SpecError(f"{part}: give a whole number of MiB, {LARGE_SEGMENT_BYTES // MIB} or more.")
            found = replace(found, max_split_bytes=int(value) * MIB)
        elif key == "expandable_segments":
            if value not in ("True", "False"):
                raise SpecError(f"{part}: give True or False, written so; torch takes nothing else.")
            found = replace(found, expandable_segments=value == "True")
        elif key == "backend" and value != "native":
            raise SpecError(f"{part}: only torch's own allocator (backend:native) is simulated.")
        elif key in NOT_SIMULATED:
            raise SpecError(f"{key} is not simulated; leave it out.")
        elif key not in WITHOUT_EFFECT:
            raise SpecError(
                f"allocator settings: torch has no option {key!r}; with an effect are max_split_size_mb and "
                "expandable_segments."
            )
    return found


def as_in(settings: AllocatorSettings, torch_version: str) -> AllocatorSettings:
    """Return the same settings under the rules of a version of torch; the newest rules if it is not known."""
    numbers = re.match(r"(\d+)\.(\d+)", torch_version)
    version = (2, 13) if numbers is None else (int(numbers[1]), int(numbers[2]))
    ties = OLDER_SEGMENT if version > (2, 12) else OLDER_BLOCK if version == (2, 12) else LOWEST_ADDRESS
    return replace(settings, ties=ties)
