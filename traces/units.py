"""Bytes, times and shares as text for people."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def bytes_unit(top_bytes: int) -> tuple[int, str]:
    """The binary unit in which figures up to `top_bytes` read well: its size in bytes, its name."""
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    return next(((size, name) for size, name in units if top_bytes >= size), (1, "B"))


def time_unit(top_ns: float) -> tuple[int, str]:
    """The unit in which times up to `top_ns` read well: its length in ns, its name."""
    units = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"))
    return next(((length, name) for length, name in units if top_ns >= length), (1, "ns"))


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
    length, name = time_unit(abs(time_ns))
    return f"{time_ns:.0f} ns" if length == 1 else f"{time_ns / length:,.2f} {name}"


def show_percent(value: float | None, *, signed: bool = False, digits: int = 2) -> str:
    """`+0.31 %`; a dash for an unknown figure."""
    if value is None:
        return "–"
    return f"{value:{'+' if signed else ''}.{digits}f} %"
