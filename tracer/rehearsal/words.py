"""What the ranks of a job tell each other in the store and as objects: kept in a folder, from run to run."""

from __future__ import annotations

import pickle
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any


class Unheard(BaseException):
    """This rank needs what another one says, which has not been rehearsed so far."""

    def __init__(self, rank: int, word: str, what: str) -> None:
        super().__init__(what)
        self.rank, self.word = rank, word


class Said(BaseException):
    """This rank has said what it was started for."""


class Words:
    """What ranks tell each other in the store and as objects, kept in a folder: each rank that runs adds its own."""

    def __init__(self, folder: Path, rank: int, until: str) -> None:
        """until: raise `Said` once this rank has said it."""
        self._folder, self._rank, self._until = folder, rank, until
        self._numbers: Counter[str] = Counter()
        (folder / str(rank)).unlink(missing_ok=True)

    def numbered(self, word: str) -> str:
        """The name of the next word of this kind."""
        self._numbers[word] += 1
        return f"{word} {self._numbers[word]}"

    def say(self, word: str, content: Any) -> None:
        """Tell the other ranks."""
        with (self._folder / str(self._rank)).open("ab") as file:
            pickle.dump((word, content), file)
        if word == self._until:
            raise Said

    def heard(self, rank: int, word: str) -> list[Any]:
        """What another rank said under that name, if anything: a list of one."""
        found = []
        with suppress(FileNotFoundError, EOFError), (self._folder / str(rank)).open("rb") as file:
            while True:
                name, content = pickle.load(file)
                if name == word:
                    found = [content]
        return found

    def hear(self, rank: int, word: str, what: str) -> Any:
        """The same, where there is no going on without; raises `Unheard`."""
        found = self.heard(rank, word)
        if not found:
            raise Unheard(
                rank, word, f"rank {self._rank} {what}, which that rank does not say where it is rehearsed."
            )
        return found[0]
