"""Trace: one training step as data, in two tables (ops and storages) and a header.

The tables are kept as columns (tuples of plain ints and strings) because every reader walks them by row
number: an op's id and a storage's id *are* their row numbers. A trace is never edited; make a new one with
`dataclasses.replace`.

What the rows, columns and the fields of the header mean stands in traces/README.md under "A trace".
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any, Final

from traces.files import to_json
from traces.units import show_bytes, show_time

# How what an op makes grows with the tile.
ROWS: Final = "rows"  # as many rows as the tile has
WHOLE: Final = "whole"  # the same in every tile
SUM: Final = "sum"  # added up over the tiles
PRODUCT: Final = "product"  # added up by the matrix product itself, which makes no summand


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One result of a tiled stretch."""

    op: int  # of the trace: the one that makes it there
    storage: int
    grows: str  # ROWS, SUM or PRODUCT


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Ops that run tile by tile in one call."""

    body: tuple[tuple[int, str], ...]  # the ops, in order, and how what they make grows
    inputs: tuple[tuple[int, int], ...]  # what they take from outside: the op (-1: none), and the storage
    results: tuple[Result, ...]  # what is left when all tiles are done


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A stretch around a wide value, each row of which is made and used by itself; ids are of the trace.

    Either it leads from a matrix product to a sum over its rows, and backward is linear in one number, the factor,
    which is what it takes beside `inputs`: then all of it can run in forward, tile by tile, for a factor of one;
    backward multiplies the gradients by what it is. Or it leaves something narrow, and its backward is a part by
    itself, which makes again in each tile what it needs of forward.
    """

    storage: int  # the wide value
    rows: int  # how many it has: the most tiles
    body: tuple[tuple[int, str], ...]  # the ops, in order, and how what they make grows
    inputs: tuple[tuple[int, int], ...]  # what they take from outside: the op (-1: none), and the storage
    losses: tuple[Result, ...]  # what it leaves: sums; rows, too, if it has a backward
    gradients: tuple[Result, ...]  # none if it has a backward, whose results they are
    # Of each cross entropy, whose targets' weight is counted first: how many there are.
    weights: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()  # numbers of the model's outputs that do not exist any more
    backward: Part | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return what runs in one call each, by its phase."""
        first = Part(body=self.body, inputs=self.inputs, results=(*self.losses, *self.gradients))
        return (first,) if self.backward is None else (first, self.backward)


SCHEMA_VERSION: Final = 1

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
OPTIMIZER: Final = "optimizer"
PHASES: Final = (FORWARD, BACKWARD, OPTIMIZER)

PARAMETER: Final = "parameter"
BUFFER: Final = "buffer"
GRADIENT: Final = "gradient"
ACTIVATION: Final = "activation"
OPTIMIZER_STATE: Final = "optimizer state"
INPUT: Final = "input"
WORKSPACE: Final = "workspace"
COMMUNICATION: Final = "gathered and reduced"
OTHER: Final = "other"
CATEGORIES: Final = (
    PARAMETER, OPTIMIZER_STATE, BUFFER, INPUT, GRADIENT, COMMUNICATION, ACTIVATION, OTHER, WORKSPACE
)  # fmt: skip
FAKE, REHEARSED_MODE = "fake", "rehearsed"  # modes of a trace
RANK: Final = "rank"  # the device of a step that is composed of a rank's blocks
# As a rehearsal tells what it held at the peak: its words, and the category.
HELD: Final = {
    "parameters": PARAMETER,
    "gradients": GRADIENT,
    OPTIMIZER_STATE: OPTIMIZER_STATE,
    COMMUNICATION: COMMUNICATION,
    "activations": ACTIVATION,
    "the rest": OTHER,
}

# Reasons why an op may not run a second time, and what kind of op it is (bits of `Ops.flags`).
RANDOM: Final = 1  # draws from a random generator
MUTATES: Final = 2  # overwrites a storage that it did not create
COLLECTIVE: Final = 4  # talks to other processes
EFFECT: Final = 8  # has an effect outside its outputs, or reads a buffer that the step overwrites
VIEW: Final = 16  # creates no storage; running it again costs nothing
EAGER: Final = 32  # outside the captured model graph: the user's own loss code, autograd, the optimizer
FLAG_NAMES: Final = {
    RANDOM: "random",
    MUTATES: "mutates",
    COLLECTIVE: "collective",
    EFFECT: "effect",
    VIEW: "view",
    EAGER: "eager",
}
# Ops whose events may be by rule and yet not all: on a GPU cuDNN allocates, too, nobody knows how much.
CUDNN_DECIDES: Final = ("aten.convolution.default", "aten.convolution_backward.default")
ALIAS: Final = "aten.alias.default"  # as which torch records a slice that takes all
SLICE: Final = "aten.slice.Tensor"
FIRST: Final = 1  # in `Untouched.once`
LATER: Final = 2
MOST: Final = 1 << 61  # of all sizes, and of all times, together: plans are reckoned with in 64 bits
FORBIDS_RECOMPUTE: Final = RANDOM | MUTATES | COLLECTIVE | EFFECT | EAGER


# The columns of the tables. A file has ids in 32 bits, and other numbers in 64.
Texts = tuple[str, ...]
Ids = tuple[int, ...]
Numbers = tuple[int, ...]
IdLists = tuple[Ids, ...]
NumberLists = tuple[Numbers, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """The ops table: one row an op, in execution order; row number = op id."""

    name: Texts
    target: Texts  # e.g. "aten.convolution.default"
    phase: Texts  # one of PHASES
    module: Texts  # path of the module that ran it, "" for none
    time_ns: Numbers
    flops: Numbers
    bytes_moved: Numbers  # bytes of all tensors read and written
    inputs: IdLists  # op ids whose values this op takes
    reads: IdLists  # storage ids
    writes: IdLists  # storage ids, created (producer == this op) or overwritten
    events: NumberLists  # allocations (+bytes) and frees (-bytes) while it runs
    # A storage whose memory the op may take over for its output when nothing else needs it; -1: none.
    overwrites: Ids
    flags: Ids
    arguments: Texts

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storages:
    """The storages table: one row a storage; row number = storage id. -1 stands for "none" everywhere."""

    name: Texts  # a label for people: the parameter's name, or the producing op's
    nbytes: Numbers  # size of the untyped storage
    category: Texts  # one of CATEGORIES
    producer: Ids  # op id; -1: exists throughout the step
    first_forward_use: Ids  # op ids of readers in each phase
    last_forward_use: Ids
    first_backward_use: Ids
    last_backward_use: Ids
    hold: Ids  # not released before this op has ended
    dtype: Texts
    shape: NumberLists  # of the tensor that created the storage

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Untouched:
    """The requests of the untouched loop's iterations to a GPU's allocator, in order: one row a request.

    A block may be given back in the iteration after the one that made it: of two with one number, the older.
    """

    block: Numbers = ()  # numbers of new blocks; ~number: that block is given back
    nbytes: Numbers = ()  # of a new block; 0 where one is given back
    # 0: in every iteration; FIRST: in the first alone, and where it is for good without a number (-1); LATER: in all
    # others.
    once: Ids = ()
    phase: Texts = ()  # in which it is asked

    def __post_init__(self) -> None:
        if len(self.phase) != len(self.block) or not {*self.phase} <= {*PHASES}:
            raise ValueError("the untouched loop cannot ask in phases that are none")
        if not {*self.once} <= {0, FIRST, LATER}:
            raise ValueError("the untouched loop has first and later iterations, and no others")
        there: Counter[int] = Counter()
        for other in (LATER, FIRST, FIRST):  # the first iteration and two later ones
            for block, n, once in zip(self.block, self.nbytes, self.once, strict=True):
                if once == other:
                    continue
                if n > 0:
                    right = there[block] < 2 and (block >= 0 or (block == -1 and once == FIRST))
                    there[block] += block >= 0
                else:
                    right = n == 0 and there[~block] > 0
                    there[~block] -= 1
                if not right:
                    raise ValueError(f"the untouched loop cannot ask for {n} bytes as block {block}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMeta:
    """The header of a trace: what was recorded, how to rebuild it, and where its figures come from."""

    model: str  # a name that `trace` knows, or "path/to/file.py:build"
    options: dict[str, Any] = field(default_factory=dict)  # how to rebuild it: batch_size, seq_len, ...
    batch_size: int = 0
    dtype: str = "float32"
    amp: str = ""  # the dtype of torch.autocast around forward and loss; "": none
    loop: str = ""  # what the loop does otherwise than the ordinary one, in words
    optimizer: str = ""
    seed: int = 0
    mode: str = "fake"
    device: str = "cpu"  # the kind of device whose graph this is
    target: str = ""  # the device-table entry behind the times, or the measured device's name
    torch_version: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    alloc_conf: str = ""
    rates: dict[str, int] = field(default_factory=dict)
    profile: str = ""  # the profile by torch.profiler that times were taken from; "": none
    threads: int = 0  # with which ops or rates were measured on the CPU; 0: they were not, or not told
    grad_outputs: tuple[int, ...] = ()  # flat indices of the model outputs that receive a gradient
    forward_ops: int = 0  # the captured graph's forward ops are the rows before this one
    first_backward_graph_op: int = 0  # and its backward ops a run of rows from this one
    within_backward: tuple[tuple[int, int], ...] = ()
    workspace: dict[str, int] = field(default_factory=dict)
    rerun_workspaces: dict[str, int] = field(default_factory=dict)
    untouched_peak_bytes: int = 0  # peak of the untouched model's eager step; 0: not counted
    graph_fingerprint: str = ""  # of the captured model graph, sizes included
    structure_fingerprint: str = ""  # of the captured model graph, sizes left out
    fingerprint: str = ""  # of the whole trace, times and workspaces left out
    # What the captured call was like, for telling why another graph is another: `tracer.record.sketch`. Empty in traces
    # older than this field, and left out of their JSON.
    sketch: dict[str, Any] = field(default_factory=dict)
    inputs: int = 0  # how many storages of the captured graph no op of it makes; 0: not told
    stretches: tuple[Stretch, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if any(self.rerun_workspaces.values()):
            raise ValueError("rerun_workspaces holds bytes, as older traces did; trace again")

    @property
    def times(self) -> str:
        """Where the times of ops come from, in words: the class of evidence of every added time."""
        if self.profile:
            return f"measured by torch.profiler, {self.profile}"
        return f"measured on {self.target}" if self.mode == "real" else f"roofline of {self.target}"

    def to_json(self) -> dict[str, Any]:
        left_out = ("profile", "sketch", "inputs", "stretches", "within_backward")
        return {k: v for k, v in to_json(self).items() if k not in left_out or v}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trace:
    """One training step: header, ops, storages. Shown in a notebook as a table of its figures."""

    meta: TraceMeta
    ops: Ops
    storages: Storages
    untouched: Untouched = Untouched()  # empty: not recorded, or of a CPU

    @property
    def resident_bytes(self) -> int:
        """Bytes that exist throughout the step: parameters, buffers, optimizer state, inputs."""
        s = self.storages
        return sum(n for n, p in zip(s.nbytes, s.producer, strict=True) if p < 0)

    @property
    def time_ns(self) -> int:
        return sum(self.ops.time_ns)

    @property
    def saved(self) -> tuple[int, ...]:
        ops, sts = self.ops, self.storages
        return tuple(
            s
            for s, producer in enumerate(sts.producer)
            if producer >= 0 and ops.phase[producer] == FORWARD and sts.last_backward_use[s] >= 0
        )

    def summary(self) -> dict[str, Any]:
        """The figures that `trace show --json` prints: counts, bytes and ns."""
        ops, sts = self.ops, self.storages
        resident = dict.fromkeys(CATEGORIES, 0)
        for n, category, producer in zip(sts.nbytes, sts.category, sts.producer, strict=True):
            resident[category] += n if producer < 0 else 0
        phases = dict.fromkeys(ops.phase, 0)
        for p, t in zip(ops.phase, ops.time_ns, strict=True):
            phases[p] += t
        return {
            "meta": self.meta.to_json(),
            "ops": len(ops),
            "computing_ops": sum(1 for f in ops.flags if not f & VIEW),
            "storages": len(sts),
            "resident_bytes": {c: b for c, b in resident.items() if b},
            "gradient_bytes": sum(n for n, c in zip(sts.nbytes, sts.category, strict=True) if c == GRADIENT),
            "saved_storages": len(self.saved),
            "saved_bytes": sum(sts.nbytes[s] for s in self.saved),
            "flops": sum(ops.flops),
            "time_ns": self.time_ns,
            "phase_time_ns": phases,
            "backward_ops": sum(1 for p in ops.phase if p == BACKWARD),
        }

    def describe(self) -> tuple[str, dict[str, str]]:
        """Return the header for people: what it is, and a figure for each word."""
        figures, meta = self.summary(), self.meta
        options = ", ".join(f"{k} {v}" for k, v in (meta.options or {"batch_size": meta.batch_size}).items())
        phases = ", ".join(f"{p} {show_time(t)}" for p, t in figures["phase_time_ns"].items())
        sizes = {
            **figures["resident_bytes"],
            GRADIENT: figures["gradient_bytes"],
            ACTIVATION: figures["saved_bytes"],
        }
        shown = {category: f"{show_bytes(n):>11}" for category, n in sizes.items()}
        shown[ACTIVATION] += f" in {figures['saved_storages']} storages saved for backward"
        rows = {
            "ops": f"{figures['ops']} ({figures['computing_ops']} that compute), {figures['storages']} storages",
            **{f"{category:16}": text for category, text in shown.items()},
            "step": f"{show_time(figures['time_ns'])} ({self.meta.times}); {phases}",
            "fingerprint": f"{meta.fingerprint} (graph {meta.graph_fingerprint})",
        }
        return f"{meta.model} ({options}), {meta.optimizer}, torch {meta.torch_version}", rows

    def text(self, name: str) -> str:
        """Some lines about the trace of this name."""
        what, rows = self.describe()
        return "\n".join([f"{name}: {what}", *(f"  {word:12} {figure}" for word, figure in rows.items())])

    def __repr__(self) -> str:
        return self.text("Trace")

    def _repr_html_(self) -> str:
        what, rows = self.describe()
        body = "".join(f"<tr><th>{word}</th><td>{escape(figure)}</td></tr>" for word, figure in rows.items())
        return f"<table><caption>{escape(what)}</caption>{body}</table>"


def as_named(targets: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """The targets of ops, with slices that take all, and are aliases then, named as among the others where that is all
    in which they differ."""
    if len(targets) != len(others):
        return tuple(targets)
    return tuple(b if {a, b} == {ALIAS, SLICE} else a for a, b in zip(targets, others, strict=True))


def uses_of(ops: Ops, storages: int) -> dict[str, tuple[int, ...]]:
    """The columns of first and last uses that these ops make of so many storages: op ids by phase; -1: none."""
    out: dict[str, tuple[int, ...]] = {}
    for phase in (FORWARD, BACKWARD):
        first, last = [-1] * storages, [-1] * storages
        for i, reads in enumerate(ops.reads):
            if ops.phase[i] == phase:
                for s in reads:
                    last[s] = i
                    if first[s] < 0:
                        first[s] = i
        out |= {f"first_{phase}_use": tuple(first), f"last_{phase}_use": tuple(last)}
    return out


def eager_runs(flags: Sequence[int], graph: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The ops outside the captured graph that stand among these of the graph, as runs (first op, how many)."""
    others = [i for i in range(graph[0], graph[-1]) if flags[i] & EAGER] if graph else []
    starts = [k for k, i in enumerate(others) if not k or others[k - 1] != i - 1]
    return tuple((others[a], b - a) for a, b in pairwise([*starts, len(others)]))


# By field of a header: of the whole trace, of the captured graph, and of that without its sizes.
DIGESTS: Final[dict[str, dict[str, bool]]] = {
    "fingerprint": {}, "graph_fingerprint": {"eager": False}, "structure_fingerprint": {"eager": False, "sizes": False},
}  # fmt: skip


def fingerprint(ops: Ops, storages: Storages, *, sizes: bool = True, eager: bool = True) -> str:
    """A short digest of what a plan depends on: which ops run in which order on which storages.

    Times, flops and workspaces are left out, so a fake and a real trace of one step share it; without `sizes` those, so
    that another batch size does; without `eager` ops outside the captured model graph (loss code, optimizer).
    """
    h = hashlib.sha256()

    def put(*values: object) -> None:
        h.update(repr(values).encode())
        h.update(b"\n")

    wanted = [i for i in range(len(ops)) if eager or not ops.flags[i] & EAGER]
    # Ids are renumbered in order of appearance, so that a change outside the graph changes nothing here.
    op_label = {op: k for k, op in enumerate(wanted)}
    st_label: dict[int, int] = {}
    for i in wanted:
        seen = [st_label.setdefault(s, len(st_label)) for s in (*ops.reads[i], *ops.writes[i])]
        put(
            ops.target[i],
            ops.phase[i],
            tuple(op_label.get(j, -1) for j in ops.inputs[i]),
            tuple(seen),
            len(ops.reads[i]),
            ops.flags[i] & FORBIDS_RECOMPUTE,
        )
    for s in sorted(st_label, key=st_label.__getitem__):
        put(st_label[s], op_label.get(storages.producer[s], -1), storages.dtype[s])
        if sizes:
            put(storages.nbytes[s], storages.shape[s])
    return h.hexdigest()[:16]


def digests(ops: Ops, storages: Storages) -> dict[str, Any]:
    """The fingerprints of a header by its fields, which DIGESTS names."""
    return {name: fingerprint(ops, storages, **of) for name, of in DIGESTS.items()}


# What one run of an op asks of an allocator, in order, from its events and the storages that it makes


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


def settle(events: tuple[int, ...], created: int) -> tuple[int, ...]:
    """Make an op's events end at the bytes of the storages that it creates.

    What an op leaves beyond them (a library's cache, an output that is dropped as the op returns) counts as
    workspace: it is part of the peak inside the op and gone afterwards.
    """
    left = sum(events)
    if left > created:
        return (*events, created - left)
    if left < created:
        # Outputs that live in memory which the op did not allocate itself, such as a constant.
        return (created - left, *events)
    return events


def replayed(
    nbytes: Mapping[int, int] | Sequence[int], events: Sequence[int], wanted: Sequence[int], asks: list[int]
) -> dict[int, int]:
    """Allocate and free as an op's events say, or else its outputs in order; returns which new block holds each
    storage. To `asks` are added the bytes of a new block, or ~k: the k-th new block is given back."""
    own, stay = _matched(events)
    asks += own
    made = {}
    for s in wanted:
        if stay.get(nbytes[s]):
            made[s] = stay[nbytes[s]].pop(0)[0]
    # An output that was obtained in pieces, or in place of memory freed: one block of its size stands for it.
    asks += [~block for blocks in stay.values() for block, _ in blocks]
    for s in [s for s in wanted if s not in made]:
        made[s] = sum(1 for n in asks if n > 0)
        asks.append(nbytes[s])
    return made


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
