"""Which ops of a trace a selector such as `layers.*.attn :: aten.mm.default` means.

A selector is `module glob :: op glob`; either side may be left out (`layers.0 ::`, `:: aten.mm.default`), and without
`::` the one glob may match either. Only ops of forward are meant, since nothing else can run again.

- The module glob is matched from the root, part by part: `*`, `?` and `[...]` stay within one part, `**` stands for
  any number of parts. It means the module and all inside it, so `layers.*.attn` covers `layers.3.attn.q_proj`.
- The op glob is matched with `aten.mm.default`, with `aten.mm` and with `mm`; here `*` matches dots as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from simulator.core.limits import Constraints
from traces.errors import SpecError
from traces.records.trace import FORWARD, VIEW, Trace

SEPARATOR = "::"
SYNTAX = "a selector is `module glob :: op glob`, such as `layers.*.attn :: aten.mm.default`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """One selector; None: that side is left out. `either`: written without `::`."""

    module: str | None
    op: str | None
    either: bool = False

    def matches(self, module: str, target: str) -> bool:
        by_module = self.module is None or module_matches(self.module, module)
        by_op = self.op is None or op_matches(self.op, target)
        return by_module or by_op if self.either else by_module and by_op


def parse_selector(text: str) -> Selector:
    """A selector from its text; raises SpecError if it is none."""
    sides = [side.strip() for side in text.split(SEPARATOR)]
    if len(sides) > 2 or not any(sides):
        raise SpecError(f"selector {text!r}: {SYNTAX}; either side may be left out, not both.")
    if len(sides) == 1:
        return Selector(module=sides[0], op=sides[0], either=True)
    return Selector(module=sides[0] or None, op=sides[1] or None)


def check_selectors(constraints: Constraints) -> None:
    """Raise SpecError before any work if a selector cannot mean anything in any trace."""
    for text in (*constraints.never, *constraints.always_save):
        parse_selector(text)


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


def matching_ops(trace: Trace, text: str, option: str) -> tuple[int, ...]:
    """The ops of forward that a selector means, views included.

    Args:
        trace, text: where, and what.
        option: who asks, for the message: `--never`.

    Raises:
        SpecError: it means none.
    """
    selector, ops = parse_selector(text), trace.ops
    verdict: dict[tuple[str, str], bool] = {}
    out = []
    for i in range(len(ops)):
        if ops.phase[i] != FORWARD:
            break
        key = (ops.module[i], ops.target[i])
        if key not in verdict:
            verdict[key] = selector.matches(*key)
        if verdict[key]:
            out.append(i)
    if not out:
        raise SpecError(f"{option} {text!r} matches no op of forward; `trace show` prints modules and ops.")
    return tuple(out)


def resolve(trace: Trace, constraints: Constraints) -> tuple[frozenset[int], frozenset[int]]:
    """The ops that must not run again, and the storages of forward that must not be computed again. Raises
    SpecError if a selector is malformed, or means nothing that it could forbid or save.
    """
    sts = trace.storages
    is_view = [bool(f & VIEW) for f in trace.ops.flags]
    never: set[int] = set()
    for text in constraints.never:
        ops = matching_ops(trace, text, "--never")
        if all(is_view[i] for i in ops):
            raise SpecError(f"--never {text!r} matches only views, which cost nothing to make again.")
        never.update(i for i in ops if not is_view[i])
    always_saved: set[int] = set()
    for text in constraints.always_save:
        mine: set[int] = set()
        for i in matching_ops(trace, text, "--always-save"):
            values = trace.ops.reads[i] if is_view[i] else trace.ops.writes[i]
            mine.update(s for s in values if 0 <= sts.producer[s] <= i)
        if not mine:
            raise SpecError(
                f"--always-save {text!r} matches only views of parameters and inputs, which are there anyway."
            )
        always_saved |= mine
    return frozenset(never), frozenset(always_saved)
