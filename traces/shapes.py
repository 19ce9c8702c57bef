"""The sizes that a training step may have: ranges such as seq-len=16:512, and which of their shapes are looked at."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from traces.errors import SpecError

MARKS: Final = {"batch_size": "b", "seq_len": "s", "image_size": "px"}  # what files call an option
MOST_SHAPES: Final = 32  # shapes of ranges without a step that are looked at
LARGEST_SIZE: Final = 1_000_000
ONE_RANGE: Final = re.compile(r"(batch|seq|image)-(size|len)=(\d{1,7}):(\d{1,7})(?::(\d{1,7}))?", re.ASCII)
Sizes = dict[str, int]  # option -> size


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Ranges of sizes by their options; a shape is one size of each."""

    text: str  # as it was asked
    ranges: Mapping[str, range]
    every: bool  # whether all shapes are looked at

    @classmethod
    def parse(cls, text: str) -> Shapes:
        """Shapes from `seq-len=16:512`, with `:8` behind it for every eighth, several of them with commas. Raises
        SpecError if it is none of that, or is of too many shapes.
        """
        ranges: dict[str, range] = {}
        stepped = []
        for word in text.split(","):
            found = ONE_RANGE.fullmatch(word.strip())
            name = "" if found is None else f"{found[1]}_{found[2]}"
            low, high, step = (int(n or 0) for n in found.groups()[2:]) if found is not None else (0, 0, 0)
            if found is None or name not in MARKS or name in ranges or not 0 < low <= high:
                known = ", ".join(k.replace("_", "-") for k in MARKS)
                raise SpecError(
                    f"--shapes {text!r}: give NAME=LOW:HIGH, or NAME=LOW:HIGH:STEP to look at every STEP-th size, each "
                    f"name once, such as seq-len=16:512,batch-size=1:8; names are {known}."
                )
            stepped.append(step > 0)
            ranges[name] = range(low, high + 1, step or 1)
        made = cls(text=text, ranges=ranges, every=all(stepped))
        made = made if made.count > MOST_SHAPES else Shapes(text=text, ranges=ranges, every=True)
        if made.count > (LARGEST_SIZE if not made.every else LARGEST_SIZE // 100):
            raise SpecError(f"--shapes {text!r}: these are {made.count:,} shapes; give a larger STEP.")
        return made

    @property
    def count(self) -> int:
        return math.prod(map(len, self.ranges.values()))

    @property
    def largest(self) -> Sizes:
        return {name: sizes[-1] for name, sizes in self.ranges.items()}

    def looked_at(self) -> tuple[Sizes, ...]:
        """The shapes that are looked at, in order: all, or of many the corners and others that are drawn at random
        (always the same)."""
        if self.every:
            chosen = set(product(*self.ranges.values()))
        else:
            chosen = set(product(*({sizes[0], sizes[-1]} for sizes in self.ranges.values())))
            rng = random.Random(0)
            while len(chosen) < MOST_SHAPES:
                chosen.add(tuple(rng.choice(sizes) for sizes in self.ranges.values()))
        return tuple(dict(zip(self.ranges, sizes, strict=True)) for sizes in sorted(chosen))


def label(options: Mapping[str, Any]) -> str:
    """Return what files call the sizes among some options: b16-s512."""
    return "-".join(f"{mark}{options[k]}" for k, mark in MARKS.items() if k in options)


def in_words(sizes: Mapping[str, int]) -> str:
    """Sizes for people: seq-len 512."""
    return ", ".join(f"{name.replace('_', '-')} {n}" for name, n in sizes.items())
