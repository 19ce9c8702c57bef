"""What the ranks of a job tell each other in the store and as objects: kept in a folder, from run to run."""

from __future__ import annotations

import os
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from traces.isolated import tell


def spoken(folder: Path, rank: int) -> Iterator[tuple[str, Any]]:
    """The words that a rank has said so far, with their contents."""
    with suppress(FileNotFoundError, EOFError), (folder / str(rank)).open("rb") as file:
        while True:
            yield pickle.load(file)


class Words:
    """What ranks tell each other in the store, as objects and as small tensors, kept in a folder: each rank that runs
    adds its own. The process ends, with an answer, once it has said what it was started for, or needs what another
    rank says that has not been rehearsed so far."""

    def __init__(self, folder: Path, rank: int, until: str) -> None:
        """until: the word for which this rank was started; "": it runs to its end."""
        self._folder, self._rank, self._until = folder, rank, until
        self._numbers: Counter[str] = Counter()
        # By rank: none goes on speaking while this one runs.
        self._heard: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        self._later: list[tuple[int, str, str, int]] = []
        self._before = Counter(name for name, _ in spoken(folder, rank))  # when it ran as far as that before

    def numbered(self, word: str) -> str:
        """The name of the next word of this kind."""
        self._numbers[word] += 1
        return f"{word} {self._numbers[word]}"

    def say(self, word: str, content: Any) -> None:
        """Tell the other ranks."""
        if self._before[word] > 0:
            self._before[word] -= 1
        else:
            with (self._folder / str(self._rank)).open("ab") as file:
                pickle.dump((word, content), file)
        if word == self._until:
            _end({"said": word})

    def hear(self, rank: int, word: str, what: str) -> Any:
        """What another rank said last under that name."""
        found = self._heard[rank]
        if word not in found:
            found.update(spoken(self._folder, rank))
        if word not in found:
            why = f"rank {self._rank} {what}, which that rank does not say where it is rehearsed."
            _end({"unheard": rank, "word": word, "why": why})
        return found[word]

    def later(self, rank: int, word: str, what: str, at: int) -> int:
        """A number for the value at that address, which is heard when the host reads it."""
        self._later.append((rank, word, what, at))
        return len(self._later)

    def value(self, number: int, at: int, size: int) -> bytes | None:
        """So many bytes there of the value with that number; None: its rank does not know them either."""
        rank, word, what, begin = self._later[number - 1]
        found = bytes(self.hear(rank, word, what)[at - begin : at - begin + size])
        return found if len(found) == size else None


def _end(answer: dict[str, Any]) -> None:
    tell(answer)
    os._exit(0)
