"""The settings of PYTORCH_ALLOC_CONF that the simulated allocator obeys.

Source: c10/core/AllocatorConfig.h and the notes on memory management in torch's documentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

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
INTERVALS: Final = 16  # sizes of 1 MiB, 2 MiB, ... 32 GiB and more may be rounded differently

# Options that change how memory is asked for, but not how much of it, nor where. They are accepted and do nothing.
# `garbage_collection_threshold` collects only below a limit that the process has set itself, which is not simulated.
WITHOUT_EFFECT: Final = frozenset({
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register", "pinned_num_register_threads", "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb", "pinned_max_cached_size_mb", "pinned_max_round_threshold_mb",
    "pinned_free_catch_all", "graph_capture_record_stream_reuse", "backend", "garbage_collection_threshold",
})  # fmt: skip
NOT_SIMULATED: Final = ("per_process_memory_fraction", "throw_on_cudamalloc_oom")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """The settings by which the allocator rounds, splits, grows and gives back. Sizes in bytes."""

    max_split_bytes: int = UNLIMITED
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    # Divisions per power of two, for requests of 1 MiB, 2 MiB, ...; the first entry also for all smaller ones.
    roundup_divisions: tuple[int, ...] = (0,) * INTERVALS
    expandable_segments: bool = False
    # Which of equally large free blocks is taken; no option, it goes by the version.
    ties: str = OLDER_SEGMENT


def parse_alloc_conf(text: str) -> AllocatorSettings:
    """Settings from text such as `expandable_segments:True,max_split_size_mb:128`.

    Whatever the order, large_segment_size_mb is read first: it is the least that the two split sizes can be, and what
    max_non_split_rounding_mb is if nothing is said. Raises SpecError: an option that does not exist, or a value that it
    cannot have.
    """
    if len(text) > MAX_TEXT:
        raise SpecError(f"allocator settings: {len(text):,} characters; torch's options take some hundred.")
    pairs = list(_pairs(text))
    size = _whole("large_segment_size_mb", dict(pairs).get("large_segment_size_mb", "20"), 11)
    least = size // MIB
    options: dict[str, tuple[str, Callable[[str, str], object]]] = {
        "large_segment_size_mb": ("large_segment_bytes", partial(_whole, least=11)),
        "max_split_size_mb": ("max_split_bytes", partial(_whole, least=least)),
        "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", partial(_whole, least=least)),
        "roundup_power2_divisions": ("roundup_divisions", lambda _, value: _divisions(value)),
        "expandable_segments": ("expandable_segments", _truth),
    }
    found: dict[str, Any] = {"max_non_split_rounding_bytes": size}
    for key, value in pairs:
        if key in options:
            field, read = options[key]
            found[field] = read(key, value)
        elif key == "backend" and value != "native":
            raise SpecError(f"backend:{value}: only torch's own allocator (backend:native) is simulated.")
        elif key in NOT_SIMULATED:
            raise SpecError(f"{key} is not simulated; leave it out, or name less with --device-memory.")
        elif key not in WITHOUT_EFFECT:
            known = ", ".join(options)
            raise SpecError(f"allocator settings: torch has no option {key!r}; with an effect are {known}.")
    return AllocatorSettings(**found)


def as_in(settings: AllocatorSettings, torch_version: str) -> AllocatorSettings:
    """Return the same settings under the rules of a version of torch; the newest rules if it is not known."""
    numbers = re.match(r"(\d+)\.(\d+)", torch_version)
    version = (2, 13) if numbers is None else (int(numbers[1]), int(numbers[2]))
    ties = OLDER_SEGMENT if version > (2, 12) else OLDER_BLOCK if version == (2, 12) else LOWEST_ADDRESS
    return replace(settings, ties=ties)


def round_up(size_bytes: int, settings: AllocatorSettings) -> int:
    """The bytes that a request takes in a block: a multiple of 512, or of a part of a power of two."""
    if size_bytes < 512:
        return 512
    interval = min(max(size_bytes.bit_length() - 21, 0), INTERVALS - 1)
    divisions = settings.roundup_divisions[interval]
    if divisions > 1 and size_bytes > 512 * divisions:
        if size_bytes & (size_bytes - 1) == 0:
            return size_bytes
        part = 1 << (size_bytes.bit_length() - 1) >> (divisions.bit_length() - 1)
        return -(-size_bytes // part) * part
    return -(-size_bytes // 512) * 512


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text))):
        key, colon, value = part.partition(":")
        if not colon or not value:
            raise SpecError(
                f"allocator settings: {part!r} is not KEY:VALUE; write them as in "
                "expandable_segments:True,max_split_size_mb:128."
            )
        yield key, value


def _whole(key: str, value: str, least: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 13) or int(value) < least:
        raise SpecError(f"{key}:{value}: give a whole number of MiB, {least} or more.")
    return int(value) * MIB


def _truth(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise SpecError(f"{key}:{value}: give True or False, written so; torch takes nothing else.")
    return value == "True"


def _divisions(value: str) -> tuple[int, ...]:
    """One number for all sizes, or [256:1,512:2,>:4]: the division from that power of two, in MiB, up to its double."""
    if not value.startswith("["):
        return (_power(value),) * INTERVALS
    if not value.endswith("]"):
        raise SpecError(f"roundup_power2_divisions:{value}: the bracket is not closed.")
    out = [0] * INTERVALS
    last, first = 0, True
    for part in filter(None, value[1:-1].split(",")):
        bound, _, number = part.partition(":")
        divisions = _power(number, none=True)
        if bound == ">":
            out[last + 1 :] = [divisions] * (INTERVALS - last - 1)
            continue
        last = min(_power(bound).bit_length() - 1, INTERVALS - 1)
        if first:
            out[:last] = [divisions] * last
        out[last] = divisions
        first = False
    return tuple(out)


def _power(text: str, none: bool = False) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if (number == 0 and none) or (number > 0 and number & (number - 1) == 0):
        return number
    raise SpecError(f"roundup_power2_divisions: {text!r} is not a power of two.")
