"""Work out what one run of an op asks of an allocator, in order, from its events and the storages that it makes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence


class OwnEvents:
    """An op's events as they come (`Ops.events`), from blocks with names."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.live: list[tuple[Hashable, int]] = []

    def allocate(self, name: Hashable, *sizes: int) -> None:
        """Blocks of so many bytes; of 0 bytes none."""
        self.events += [n for n in sizes if n]
        self.live += [(name, n) for n in sizes if n]

    def free(self, name: Hashable) -> None:
        """All blocks of that name, the youngest first; zeros tell which of equally large ones each is."""
        for k in reversed([k for k, (of, _) in enumerate(self.live) if of == name]):
            _, size = self.live.pop(k)
            self.events += [0] * sum(n == size for _, n in self.live[k:])
            self.events.append(-size)


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
    own, stay = _matched(events)
    asks += own
    made = {}
    for s in wanted:
        if stay.get(nbytes[s]):
            made[s] = stay[nbytes[s]].pop(0)[0]
    # An output that was obtained in pieces, or in place of memory freed: one block of its size stands for it.
    asks += [~block for blocks in stay.values() for block, _ in blocks]
    return made | _outputs(nbytes, [s for s in wanted if s not in made], asks)


def that_stay(events: Sequence[int]) -> dict[int, list[int]]:
    """Positions of the allocations that stay, by size."""
    return {size: [k for _, k in blocks] for size, blocks in _matched(events)[1].items() if blocks}


def _matched(events: Sequence[int]) -> tuple[list[int], dict[int, list[tuple[int, int]]]]:
    """Events as requests, and of what stays, by size: its block and its position."""
    asks: list[int] = []
    live: dict[int, list[tuple[int, int]]] = {}
    older = count = 0
    for k, event in enumerate(events):
        of = live.setdefault(abs(event), [])
        if event > 0:
            of.append((count, k))
            asks.append(event)
            count += 1
        elif event and of:
            asks.append(~of.pop(-1 - min(older, len(of) - 1))[0])
        older = older + 1 if not event else 0
    return asks, live
