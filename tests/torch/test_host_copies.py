"""The rate of copies to and from host memory, with a timer that is no GPU's."""

from __future__ import annotations

from itertools import chain, repeat

from tracer.measure.host_copies import COPY_BYTES, ROUNDS, host_bytes_per_s


def test_the_quickest_copy_of_the_slower_way_counts() -> None:
    out = chain([9_000_000, 5_000_000], repeat(8_000_000))
    back = chain([12_000_000], repeat(10_000_000))
    asked = []

    def copy_ns(to_host: bool) -> int:
        asked.append(to_host)
        return next(out if to_host else back)

    assert host_bytes_per_s(copy_ns) == COPY_BYTES * 100  # 10 ms from the host
    assert asked == [True] * ROUNDS + [False] * ROUNDS
