"""Turn the module paths of a trace's ops into the repeated blocks, and the whole modules, that they belong to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from simulator.core.limits import AUTO
from simulator.core.selectors import module_instances
from traces.errors import SpecError
from traces.trace import FORWARD, Trace

OUTSIDE: Final = -1  # the segment of ops that no segment holds: what they make is kept


def block_segments(modules: Sequence[str]) -> list[int]:
    """The block of each op by its module path; OUTSIDE for ops in none.

    A block is a member of a numbered container that has modules of its own: `layer1.0`, `encoder.layer.3`, `h.5`,
    `features.denseblock1.denselayer2`. Of nested ones the first unbroken run of numbered names counts, so that
    `encoder.block.0.layer.1` belongs to `encoder.block.0` and `features.1.0.block.2` to `features.1.0`.
    """
    found = block_paths(modules)
    number: dict[str, int] = {}
    return [number.setdefault(found[path], len(number)) if path in found else OUTSIDE for path in modules]


def block_paths(modules: Sequence[str]) -> dict[str, str]:
    """Module path -> the path of its block, as in `block_segments`; paths in no block are left out."""
    parents: set[str] = set()
    paths = dict.fromkeys(modules)
    for path in paths:
        parts = path.split(".")
        parents.update(".".join(parts[:k]) for k in range(1, len(parts)))
    return {path: block for path in paths if (block := _block_of(path, parents))}


def _block_of(path: str, parents: set[str]) -> str:
    parts = path.split(".") if path else []
    block = ""
    for k, part in enumerate(parts):
        prefix = ".".join(parts[: k + 1])
        if re.search(r"\d$", part) and prefix in parents:
            block = prefix
        elif block:
            break
    return block


def whole_module_instances(trace: Trace, glob: str) -> dict[str, str]:
    """Module path -> the module that may be recomputed as a whole, for the ops of forward that lie in one.

    `AUTO` stands for the repeated blocks of the model, of which there may be none.

    Raises:
        SpecError: no module matches the glob.
    """
    forward = [m for m, p in zip(trace.ops.module, trace.ops.phase, strict=True) if p == FORWARD]
    if glob == AUTO:
        return block_paths(forward)
    found = module_instances(forward, glob)
    if not found:
        raise SpecError(
            f"--whole-modules {glob!r} matches no module of forward, whose modules are "
            f"{', '.join(_outer(forward)) or 'not named'}."
        )
    return found


def _outer(paths: list[str]) -> list[str]:
    """A few module paths, the outermost first."""
    names = {".".join(p.split(".")[:k]) for p in paths if p for k in range(1, p.count(".") + 2)}
    return sorted(names, key=lambda n: (n.count("."), n))[:12]
