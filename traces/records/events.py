"""What one run of an op asks of an allocator, in order, from its events and the storages that it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def _outputs(
    nbytes: Mapping[int, int] | Sequence[int], wanted: Sequence[int], asks: list[int]
) -> dict[int, int]:
    made = {}
    for s in wanted:
        made[s] = sum(1 for n in asks if n > 0)
        asks.append(nbytes[s])
    return made


def replayed(
    nbytes: Mapping[int, int] | Sequence[int], events: Sequence[int], wanted: Sequence[int], asks: list[int]
) -> dict[int, int]:
    """Allocate and free as an op's events say, or else its outputs in order.

    Args:
        nbytes: of storages, by id.
        events: as `Ops.events`; none: nothing is known but the outputs.
        wanted: the storages that the op makes.
        asks: to which requests are added: bytes of a new block, or ~k: the k-th new block is given back.

    Returns:
        Which new block holds each storage.
    """
    if not events:
        return _outputs(nbytes, wanted, asks)
    stays = {k for positions in that_stay(events).values() for k in positions}
    temporary: dict[int, list[int]] = {}
    outputs: dict[int, list[int]] = {}
    count = 0
    for k, size in enumerate(events):
        if size > 0:
            (outputs if k in stays else temporary).setdefault(size, []).append(count)
            asks.append(size)
            count += 1
        elif temporary.get(-size):
            asks.append(~temporary[-size].pop())
    made = {s: outputs[nbytes[s]].pop(0) for s in wanted if outputs.get(nbytes[s])}
    # An output that was obtained in pieces, or in place of memory freed: one block of its size stands for it.
    asks += [~block for blocks in outputs.values() for block in blocks]
    return made | _outputs(nbytes, [s for s in wanted if s not in made], asks)


def that_stay(events: Sequence[int]) -> dict[int, list[int]]:
    """Positions of the allocations that stay, by size: of equally large ones, a free takes the last before it."""
    frees: dict[int, int] = {}
    stay: dict[int, list[int]] = {}
    for k in range(len(events) - 1, -1, -1):
        size = events[k]
        if size < 0:
            frees[-size] = frees.get(-size, 0) + 1
        elif frees.get(size):
            frees[size] -= 1
        else:
            stay.setdefault(size, []).insert(0, k)
    return stay
