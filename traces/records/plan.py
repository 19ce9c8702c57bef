"""Plan: what to do with each storage that is not simply saved, as data that travels alone.

A plan is JSON: small, diffable, without callables; it carries all that `execute` needs to rebuild and check the step.
What actions, recipes and rewrites mean, and what holds without any, stands in traces/README.md under "A plan".
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from traces.errors import PlanError
from traces.files import Form, JsonRecord, canonical_json, from_json, read_json, to_json
from traces.records.trace import Trace, TraceMeta
from traces.units import show_bytes, show_percent

RECOMPUTE: Final = "recompute"
SAVE: Final = "save"
EXACT: Final = "exact"  # how a planned step's gradients agree with the unplanned one's: in every bit
FP: Final = "fp"  # but for the rounding of sums in another order, or of a function computed in another way
APPROXIMATE: Final = "approximate"  # within an error that was measured
EXACTNESS: Final = (EXACT, FP, APPROXIMATE)
ERRORS_COMMAND: Final = "execute errors TRACE -o errors.json"  # which measures that error
ALLOCATED: Final = "allocated"  # what a budget limits: the bytes that the step asks for
RESERVED: Final = "reserved"  # or what CUDA's allocator takes from the device for them


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """The fate of one storage."""

    storage: int
    recipe: str = RECOMPUTE
    retain: bool = True
    evict_after: tuple[int, ...] = ()  # op ids
    op: str = ""  # label: the producing op's name, for people
    module: str = ""  # label
    nbytes: int = 0  # label

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"storage": self.storage, "recipe": self.recipe}
        if self.recipe != SAVE or self.evict_after:
            out["retain"] = self.retain
        if self.evict_after:
            out["evict_after"] = list(self.evict_after)
        return {**out, "op": self.op, "module": self.module, "nbytes": self.nbytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """One change of the step, made before anything is recomputed."""

    kind: str  # one of `simulator.levers.LEVERS`
    storage: int  # of the trace
    number: int = 0  # how many tiles; 0: the kind takes no number
    error: float | None = None  # of the step's gradient by all of this kind, relative L2; None: not measured
    op: str = ""  # label: the producing op's name, for people
    # Of a copy to host memory: the op of forward before which it must be complete, the op of backward before which it
    # begins to come back, and how fast either way goes.
    out_before: str = ""
    in_before: str = ""
    bytes_per_s: int = 0

    def to_json(self) -> dict[str, Any]:
        of_copies = ("out_before", "in_before", "bytes_per_s")
        return {k: v for k, v in to_json(self).items() if v or k not in of_copies}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(JsonRecord):
    """Actions for one trace, with their provenance."""

    form: ClassVar = Form(
        name="plan",
        version=2,
        advice="make one with `simulate TRACE --budget 60% -o plan.json`",
        error=PlanError,
    )
    meta: TraceMeta
    actions: tuple[Action, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    planner: str = ""
    budget_bytes: int | None = None
    budget_of: str = ALLOCATED  # or RESERVED
    exactness: str = EXACT  # one of EXACTNESS
    predicted: Mapping[str, Any] = field(default_factory=dict)
    seal: str = ""  # a digest of the actions and the figures that they gave; "": none was made

    def __post_init__(self) -> None:
        if self.budget_of not in (ALLOCATED, RESERVED):
            raise ValueError(f"budget_of is {self.budget_of!r} and should be {ALLOCATED} or {RESERVED}")
        warnings = self.predicted.get("warnings", [])
        if not isinstance(warnings, list) or not all(isinstance(text, str) for text in warnings):
            raise ValueError("predicted.warnings should be a list of texts")
        if self.exactness not in EXACTNESS:
            raise ValueError(f"exactness is {self.exactness!r} and should be one of {', '.join(EXACTNESS)}")

    def __repr__(self) -> str:
        told = self.predicted.get("plan", {})
        changes = Counter(r.kind for r in self.rewrites)
        parts = [f"{n} {kind}" for kind, n in (*changes.items(), *self.by_recipe.items())]
        parts = parts or ["everything saved"]
        if told.get("peak_allocated_bytes") is not None:
            parts.append(f"peak {show_bytes(told['peak_allocated_bytes'])}")
        if told.get("overhead_percent") is not None:
            parts.append(f"{show_percent(told['overhead_percent'], signed=True)} time")
        return f"<plan of {self.planner or 'no planner'} for {self.meta.model}: {', '.join(parts)}>"

    @property
    def changes(self) -> bool:
        """True if the planned step is another than the one with everything saved."""
        return bool(self.actions or self.rewrites)

    @property
    def stated_error(self) -> float | None:
        """The error of the gradient, composed of its kinds'; None: none of them was measured."""
        errors = [e**2 for e in {r.kind: r.error for r in self.rewrites}.values() if e is not None]
        return math.sqrt(sum(errors)) if errors else None

    @property
    def recomputed(self) -> frozenset[int]:
        """Ids of the storages that are recomputed: from their last use in forward on, or once they were evicted."""
        return frozenset(a.storage for a in self.actions if a.recipe == RECOMPUTE or a.evict_after)

    @property
    def by_recipe(self) -> dict[str, int]:
        return dict(sorted(Counter(a.recipe for a in self.actions).items()))

    def to_json(self) -> dict[str, Any]:
        told = {
            **JsonRecord.to_json(self),
            "trace": self.meta.to_json(),
            "actions": [a.to_json() for a in self.actions],
            "rewrites": [r.to_json() for r in self.rewrites],
        }
        return {k: v for k, v in told.items() if k != "meta" and (v or k != "rewrites")}

    def sealed(self) -> Plan:
        """The plan with the digest by which a later change of its actions or figures is found."""
        return replace(self, seal=self._digest())

    def check_seal(self, path: object) -> None:
        """Raise PlanError if the plan is not what it was when it was made: its actions, budget, figures, or what it
        says of gradients."""
        if self.seal and self.seal != self._digest():
            raise PlanError(
                f"{path}: the plan's actions do not give its figures: one of them was changed after the plan was made. "
                "Plan again (`simulate TRACE --budget ... -o plan.json`)."
            )

    def _digest(self) -> str:
        figures = {k: self.predicted.get(k) for k in ("baseline", "plan")}
        actions, rewrites = ([x.to_json() for x in of] for of in (self.actions, self.rewrites))
        parts: list[Any] = [self.meta.fingerprint, self.budget_bytes, self.budget_of, figures, actions]
        # What most plans do not have is left out, so that their digests are as they always were.
        exactness = [self.exactness, None] if self.exactness != EXACT else []
        parts += [x for x in (rewrites, exactness) if x]
        return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:16]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        if lacking := sorted({"planner", "budget_bytes", "exactness", "predicted", "actions"} - data.keys()):
            raise ValueError(f"it lacks {lacking[0]}")
        return from_json(cls, {**data, "meta": data.get("trace")})


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """A plan, and the blocks that train by it."""

    blocks: tuple[str, ...]  # paths in the model
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlans(JsonRecord):
    """Plans for the blocks of a model, made within a budget of the whole step of one rank."""

    form: ClassVar = Form(
        name="block-plans",
        version=1,
        advice="make them with `execute rehearse SCRIPT --gpu GPU --budget 80% -o plan.json`",
        error=PlanError,
    )
    model: str  # the script or the model that was rehearsed
    plans: tuple[BlockPlan, ...]
    # Of blocks that `fully_shard` shards, by path, in which the script does otherwise: whether they reshard.
    reshard_after_forward: Mapping[str, bool] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)


def load_plan(path: str | Path) -> Plan | BlockPlans:
    """The plan of a file, or the plans for blocks that it holds. Raises PlanError if it is neither."""
    with suppress(OSError, ValueError, AttributeError):
        if read_json(path).get("record") == BlockPlans.form.name:
            return BlockPlans.load(path)
    return Plan.load(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionWarning:
    """One thing that must be said beside a prediction, as data; its prose is made where it is shown.

    `figures` hold bytes, counts and percents as numbers, and names as text.
    """

    code: str
    subject: str = ""
    figures: Mapping[str, int | float | str] = field(default_factory=dict)


def label_actions(trace: Trace, actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return the same actions in storage order, with the names, modules and sizes that the trace knows."""
    ops, sts = trace.ops, trace.storages
    return tuple(
        replace(
            a,
            op=ops.name[sts.producer[a.storage]],
            module=ops.module[sts.producer[a.storage]],
            nbytes=sts.nbytes[a.storage],
        )
        for a in sorted(actions, key=lambda a: a.storage)
    )
