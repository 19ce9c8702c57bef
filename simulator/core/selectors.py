"""Which ops of a trace a selector such as `layers.*.attn :: aten.mm.default` means.

A selector is `module glob :: op glob`; either side may be left out (`layers.0 ::`, `:: aten.mm.default`), and without
`::` the one glob may match either. Only ops of forward are meant, since nothing else can run again.

- The module glob is matched from the root, part by part: `*`, `?` and `[...]` stay within one part, `**` stands for
  any number of parts. It means the module and all inside it, so `layers.*.attn` covers `layers.3.attn.q_proj`.
- The op glob is matched with `aten.mm.default`, with `aten.mm` and with `mm`; here `*` matches dots as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from simulator.core.limits import Constraints
from traces.errors import SpecError
from traces.records.trace import FORWARD, VIEW, Trace

SYNTAX = "a selector is `module glob :: op glob`, such as `layers.*.attn :: aten.mm.default`"


def sides_of(text: str) -> list[str]:
    """A selector's globs, "" where one is left out: of modules and of ops, or one of either. Raises SpecError if it is
    no
    selector."""
    sides = [side.strip() for side in text.split("::")]
    if len(sides) > 2 or not any(sides):
        raise SpecError(f"selector {text!r}: {SYNTAX}; either side may be left out, not both.")
    return sides


def check_selectors(constraints: Constraints) -> None:
    """Raise SpecError before any work if a selector cannot mean anything in any trace."""
    for text in (*constraints.never, *constraints.always_save):
        sides_of(text)


def module_matches(glob: str, path: str) -> bool:
    """Return whether the path is that of a matching module, or of one inside it."""
    return bool(path) and _covers(glob.split("."), path.split("."))


def _covers(globs: Sequence[str], parts: Sequence[str]) -> bool:
    if not globs:
        return True
    if globs[0] == "**":
        return any(_covers(globs[1:], parts[k:]) for k in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], globs[0]) and _covers(globs[1:], parts[1:])


def op_matches(glob: str, target: str) -> bool:
    """Return whether the op glob matches `aten.mm.default`, `aten.mm` or `mm`."""
    parts = target.split(".")
    names = {target, ".".join(parts[:2]), parts[1] if len(parts) > 1 else target}
    return any(fnmatchcase(name, glob) for name in names)


def matching_ops(trace: Trace, text: str, option: str) -> list[int]:
    """The ops of forward that a selector means, views included. Raises SpecError, which names the option, if it means
    none."""
    sides, ops = sides_of(text), trace.ops

    def matches(module: str, target: str) -> bool:
        if len(sides) == 1:
            return module_matches(sides[0], module) or op_matches(sides[0], target)
        return all(
            (not sides[0] or module_matches(sides[0], module), not sides[1] or op_matches(sides[1], target))
        )

    forward = [key for *key, phase in zip(ops.module, ops.target, ops.phase, strict=True) if phase == FORWARD]
    verdict = {key: matches(*key) for key in set(map(tuple, forward))}
    if found := [i for i, key in enumerate(forward) if verdict[tuple(key)]]:
        return found
    raise SpecError(f"{option} {text!r} matches no op of forward; `trace show` prints modules and ops.")


def resolve(trace: Trace, constraints: Constraints) -> tuple[frozenset[int], frozenset[int]]:
    """The ops that must not run again, and the storages of forward that must not be computed again. Raises
    SpecError if a selector is malformed, or means nothing that it could forbid or save.
    """
    ops, producer = trace.ops, trace.storages.producer
    never: set[int] = set()
    always_saved: set[int] = set()
    for text in constraints.never:
        computing = {i for i in matching_ops(trace, text, "--never") if not ops.flags[i] & VIEW}
        if not computing:
            raise SpecError(f"--never {text!r} matches only views, which cost nothing to make again.")
        never |= computing
    for text in constraints.always_save:
        found = matching_ops(trace, text, "--always-save")
        values = ((i, s) for i in found for s in (ops.reads if ops.flags[i] & VIEW else ops.writes)[i])
        made = {s for i, s in values if 0 <= producer[s] <= i}
        if not made:
            raise SpecError(
                f"--always-save {text!r} matches only views of parameters and inputs, which are there anyway."
            )
        always_saved |= made
    return frozenset(never), frozenset(always_saved)
