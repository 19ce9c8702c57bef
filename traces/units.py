"""Bytes, times and shares as text for people."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def bytes_unit(top_bytes: int) -> tuple[int, str]:
    """The binary unit in which figures up to `top_bytes` read well: its size in bytes, its name."""
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if top_bytes >= size:
            return size, name
    return 1, "B"


def show_bytes(nbytes: int | None) -> str:
    """`5.27 GiB`; a dash for an unknown figure."""
    if nbytes is None:
        return "–"
    size, name = bytes_unit(abs(nbytes))
    return f"{nbytes} B" if size == 1 else f"{nbytes / size:,.2f} {name}"


def show_time(time_ns: int | float | None) -> str:
    """`12.34 ms`; a dash for an unknown figure."""
    if time_ns is None:
        return "–"
    for size, name in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if abs(time_ns) >= size:
            return f"{time_ns / size:,.2f} {name}"
    return f"{time_ns:.0f} ns"


def show_percent(value: float | None, *, signed: bool = False, digits: int = 2) -> str:
    """`+0.31 %`; a dash for an unknown figure."""
    if value is None:
        return "–"
    return f"{value:{'+' if signed else ''}.{digits}f} %"
