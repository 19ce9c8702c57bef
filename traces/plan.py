"""Plan: what to do with each storage that is not simply kept, as data that travels alone.

A plan is JSON: small, diffable, without callables. It carries how to rebuild the model and the batch, the
trace's fingerprints, the planner and the budget behind it, and the predicted figures, so that the file alone is
enough for `execute`.

Meaning of the actions
----------------------
Without any action, a storage that backward needs is kept from forward until its last use, and every other
storage of forward is released after its last use there.

- `recompute`: released after its last forward use; computed again when a backward op needs it. A recomputed
  value is *shared* (kept until its last use in the rest of the step) unless `share` is off (dropped as soon as the
  op that demanded it has run) or its `drop_after` names that op.
  On a storage that backward does not read itself, a link in the chain to others, `recompute` means only
  this: once rebuilt, it is shared. Links without an action go as soon as the op that demanded the chain has run.
- `save`: kept for the sake of recomputations although backward itself does not read it; released after the last
  recomputation that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from traces.errors import PlanError
from traces.files import write_text
from traces.json_records import checked, read_json
from traces.trace import Trace, TraceMeta, canonical_json

PLAN_VERSION: Final = 1
RECOMPUTE: Final = "recompute"
SAVE: Final = "save"
EXACT: Final = "exact"
ALLOCATED: Final = "allocated"  # what a budget limits: the bytes that the step asks for
RESERVED: Final = "reserved"  # or what CUDA's allocator takes from the device for them


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What happens to one storage."""

    storage: int
    action: str = RECOMPUTE
    share: bool = True
    drop_after: tuple[int, ...] = ()  # backward op ids after which the recomputed value is dropped
    op: str = ""  # label: the producing op's name, for people
    module: str = ""  # label
    nbytes: int = 0  # label

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"storage": self.storage, "action": self.action}
        if self.action == RECOMPUTE:
            out["share"] = self.share
            if self.drop_after:
                out["drop_after"] = list(self.drop_after)
        return {**out, "op": self.op, "module": self.module, "nbytes": self.nbytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Actions for one trace, with their provenance."""

    meta: TraceMeta
    actions: tuple[Action, ...] = ()
    planner: str = ""
    budget_bytes: int | None = None
    budget_of: str = ALLOCATED  # or RESERVED
    exactness: str = EXACT  # exact: gradients equal those of the unplanned step
    predicted: Mapping[str, Any] = field(default_factory=dict)
    constraints: Mapping[str, Any] = field(default_factory=dict)  # what the user forbade; empty: nothing

    @property
    def recomputed(self) -> frozenset[int]:
        """Ids of the storages to recompute."""
        return frozenset(a.storage for a in self.actions if a.action == RECOMPUTE)

    def to_json(self) -> dict[str, Any]:
        return {
            "record": "plan",
            "plan_version": PLAN_VERSION,
            "trace": self.meta.to_json(),
            "planner": self.planner,
            "budget_bytes": self.budget_bytes,
            "budget_of": self.budget_of,
            "exactness": self.exactness,
            "predicted": dict(self.predicted),
            "constraints": dict(self.constraints),
            "actions": [a.to_json() for a in self.actions],
        }

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON, whole or not at all."""
        return write_text(path, canonical_json(self.to_json()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan.

        Raises:
            PlanError: no such file, not JSON, not a plan, or of another version.
        """
        path = Path(path)
        if not path.is_file():
            raise PlanError(f"{path}: no such plan; make one with `simulate TRACE --budget 60% -o {path}`.")
        try:
            data = read_json(path)
        except (ValueError, OSError) as error:
            raise PlanError(
                f"{path}: not a JSON file ({error}); make the plan again with `simulate`."
            ) from None
        try:
            return cls.from_json(data)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Build a plan from parsed JSON; raises PlanError if it is not one."""
        if not isinstance(data, dict) or data.get("record") != "plan":
            raise PlanError("not a Lowtide plan; make one with `simulate TRACE --budget 60% -o plan.json`.")
        if data.get("plan_version") != PLAN_VERSION:
            raise PlanError(
                f"plan version {data.get('plan_version')}, and this Lowtide reads {PLAN_VERSION}; "
                "make the plan again with `simulate`."
            )
        try:
            return checked(
                cls(
                    meta=TraceMeta.from_json(data["trace"]),
                    planner=str(data["planner"]),
                    budget_bytes=data["budget_bytes"],
                    budget_of=_budget_of(data),
                    exactness=str(data["exactness"]),
                    predicted=dict(data["predicted"]),
                    constraints=dict(data.get("constraints", {})),
                    actions=tuple(_action(a) for a in data["actions"]),
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"malformed plan ({type(error).__name__}: {error}); make it again with `simulate`."
            ) from None


def _budget_of(data: Mapping[str, Any]) -> str:
    of = data.get("budget_of", ALLOCATED)  # plans from before it limited what is allocated
    if of not in (ALLOCATED, RESERVED):
        raise ValueError(f"budget_of is {of!r} and should be {ALLOCATED} or {RESERVED}")
    return str(of)


def _action(data: dict[str, Any]) -> Action:
    if data["action"] not in (RECOMPUTE, SAVE):
        raise ValueError(f"unknown action {data['action']!r}")
    return checked(
        Action(
            storage=data["storage"],
            action=data["action"],
            share=data.get("share", True),
            drop_after=tuple(data.get("drop_after", ())),
            op=str(data.get("op", "")),
            module=str(data.get("module", "")),
            nbytes=data.get("nbytes", 0),
        )
    )


def label_actions(trace: Trace, actions: Iterable[Action]) -> tuple[Action, ...]:
    """The same actions in storage order, with the names, modules and sizes that the trace knows."""
    out = []
    for a in sorted(actions, key=lambda a: a.storage):
        op = trace.storages.producer[a.storage]
        out.append(
            Action(
                storage=a.storage,
                action=a.action,
                share=a.share,
                drop_after=a.drop_after,
                op=trace.ops.name[op],
                module=trace.ops.module[op],
                nbytes=trace.storages.nbytes[a.storage],
            )
        )
    return tuple(out)
