"""Build tiny traces by hand, so that a test can work out every byte in a comment, and measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from traces.records.measurement import Measurement, RunFigures
from traces.records.store import validate
from traces.records.trace import (
    ACTIVATION,
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    PARAMETER,
    VIEW,
    Ops,
    Storages,
    Trace,
    TraceMeta,
    fingerprint,
)


@dataclass(frozen=True)
class Op:
    """One op of a tiny trace: which storages it makes (name -> bytes) and which it reads (by name)."""

    phase: str
    makes: dict[str, int]
    reads: tuple[str, ...] = ()
    time_ns: int = 1
    flags: int = 0
    events: tuple[int, ...] = ()
    overwrites: str = ""
    name: str = ""
    view: str = ""  # this op makes a view of that name of reads[0]; others may read it by name
    module: str = ""
    mutates: tuple[str, ...] = ()
    target: str = ""
    arguments: str = ""
    bytes_moved: int = 0


def fwd(makes: dict[str, int], *reads: str, **more: object) -> Op:
    return Op(FORWARD, makes, reads, **more)  # type: ignore[arg-type]


def bwd(makes: dict[str, int], *reads: str, **more: object) -> Op:
    return Op(BACKWARD, makes, reads, **more)  # type: ignore[arg-type]


def opt(makes: dict[str, int], *reads: str, **more: object) -> Op:
    return Op(OPTIMIZER, makes, reads, **more)  # type: ignore[arg-type]


def trace(
    ops: list[Op],
    resident: dict[str, int] | None = None,
    hold: dict[str, int] | None = None,
    categories: dict[str, str] | None = None,
) -> Trace:
    """A trace from ops in order; `resident` are parameters by name, `hold` maps a storage's name to an op id."""
    resident, hold, categories = resident or {}, hold or {}, categories or {}
    ids: dict[str, int] = {}
    names: list[str] = []
    nbytes: list[int] = []
    producer: list[int] = []
    for name, size in resident.items():
        ids[name] = len(names)
        names.append(name)
        nbytes.append(size)
        producer.append(-1)
    maker: dict[str, int] = {}  # value name -> op id
    base: dict[str, int] = dict(ids)  # value name -> storage id
    rows: list[dict[str, object]] = []
    for i, op in enumerate(ops):
        reads = [base[r] for r in op.reads]
        writes = []
        for name, size in op.makes.items():
            base[name] = len(names)
            maker[name] = i
            names.append(name)
            nbytes.append(size)
            producer.append(i)
            writes.append(base[name])
        if op.view:
            base[op.view] = base[op.reads[0]]
            maker[op.view] = i
        writes += [base[m] for m in op.mutates]
        rows.append(
            {
                "name": op.name or next(iter(op.makes), "") or op.view or f"op{i}",
                "target": op.target or op.name or "aten.test.default",
                "phase": op.phase,
                "module": op.module,
                "time_ns": op.time_ns,
                "flops": 0,
                "bytes_moved": op.bytes_moved,
                "inputs": tuple(dict.fromkeys(maker[r] for r in op.reads if r in maker)),
                "reads": tuple(dict.fromkeys(reads)),
                "writes": tuple(dict.fromkeys(writes)),
                "events": op.events,
                "overwrites": base[op.overwrites] if op.overwrites else -1,
                "flags": op.flags | (VIEW if op.view else 0),
                "arguments": op.arguments,
            }
        )
    table = Ops(**{k: tuple(r[k] for r in rows) for k in Ops.__dataclass_fields__})  # type: ignore[arg-type]
    n = len(names)
    use: dict[str, list[int]] = {k: [-1] * n for k in ("ff", "lf", "fb", "lb")}
    for i, row in enumerate(rows):
        keys = {"forward": ("ff", "lf"), "backward": ("fb", "lb")}.get(str(row["phase"]))
        if keys:
            for s in row["reads"]:  # type: ignore[attr-defined]
                if use[keys[0]][s] < 0:
                    use[keys[0]][s] = i
                use[keys[1]][s] = i
    storages = Storages(
        name=tuple(names),
        nbytes=tuple(nbytes),
        category=tuple(
            categories.get(names[s], PARAMETER if producer[s] < 0 else ACTIVATION) for s in range(n)
        ),
        producer=tuple(producer),
        first_forward_use=tuple(use["ff"]),
        last_forward_use=tuple(use["lf"]),
        first_backward_use=tuple(use["fb"]),
        last_backward_use=tuple(use["lb"]),
        hold=tuple(hold.get(x, -1) for x in names),
        dtype=("float32",) * n,
        shape=tuple((b // 4,) for b in nbytes),
    )
    out = Trace(meta=TraceMeta(model="tiny"), ops=table, storages=storages)
    out = replace(
        out,
        meta=replace(
            out.meta,
            fingerprint=fingerprint(table, storages),
            graph_fingerprint=fingerprint(table, storages, eager=False),
            structure_fingerprint=fingerprint(table, storages, eager=False, sizes=False),
        ),
    )
    validate(out)
    return out


def storage(of: Trace, name: str) -> int:
    return of.storages.name.index(name)


def names(of: Trace, column: str, op: str) -> list[str]:
    """What an op reads or writes, or the ops that its inputs are of."""
    found = getattr(of.ops, column)[of.ops.name.index(op)]
    return [(of.ops if column == "inputs" else of.storages).name[k] for k in found]


def measurement(run: RunFigures, **more: Any) -> Measurement:
    """Of which every part took the same, but for what is said."""
    runs = dict.fromkeys(("predicted", "measured", "keep_all_predicted", "keep_all", "eager"), run)
    words = {"model": "m", "planner": "p", "fingerprint": "f", "device": "cpu", "provenance": "measured-cpu"}
    return Measurement(**{**runs, **words, "options": {}, "budget_bytes": None, "environment": {}, **more})


def chain(n: int, size: int = 4, time_ns: int = 1) -> Trace:
    """x1 = f(x0) ... xn = f(xn-1), then a backward that reads every x once, from the last to the first.

    The parameter w is resident; gi is the gradient of xi and is read by the next backward op.
    """
    ops = [fwd({"x0": size}, "w", time_ns=time_ns)]
    ops += [fwd({f"x{i}": size}, f"x{i - 1}", "w", time_ns=time_ns) for i in range(1, n + 1)]
    ops += [bwd({f"g{n}": size}, f"x{n}", time_ns=time_ns)]
    ops += [bwd({f"g{i}": size}, f"g{i + 1}", f"x{i}", time_ns=time_ns) for i in range(n - 1, -1, -1)]
    return trace(ops, {"w": size})
