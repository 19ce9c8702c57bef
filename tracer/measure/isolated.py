"""Single ops run on the device, without their model, for a device profile of what they allocate and take.

Each call is made from its signature: tensors of its shapes, strides and types with made-up contents, the other
arguments as they are. All calls take their floats from the same memory, which is as large as the largest call needs, so
that the model needs not fit and nothing is filled twice.

Counts: allocations inside the op, as the CPU's profiler or the CUDA allocator's history shows them; the median of a few
runs, after one that warms up; of a long op, one run. Ignores: what depends on the contents of tensors; here floats lie
between a half and one until an op overwrites them, indices inside what they index, and masks are true.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from tracer.costs.approximate import resolve
from tracer.costs.profiles import entry_of
from tracer.costs.signature import DEVICE, Signature, TensorSpec
from tracer.measure.probes import CudaTimer, Probe, Timer, cpu_allocations, cuda_allocations, settle
from tracer.record.draft import Draft
from traces.records.device_profile import DeviceProfile, Entry, Identity, LibraryWorkspace
from traces.records.trace import VIEW

RUNS: Final = 3  # timed runs of each op, after one that warms up
LONG_NS: Final = 5_000_000  # of an op that takes as long, only the run that shows its allocations is timed
TOGETHER: Final = 32  # ops under one profiler
# Arguments that an op reads on the host.
HOST: Final = {
    "aten._scaled_dot_product_efficient_attention_backward.default": ("philox_seed", "philox_offset")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A call to measure, and the bytes of the storages that it creates in its step."""

    signature: Signature
    created_bytes: int


def missing(draft: Draft, profile: DeviceProfile | None) -> list[Wanted]:
    """The distinct calls of a trace's computing ops that a profile lacks, in order of first appearance."""
    known = profile.entries if profile is not None else {}
    found: dict[str, Wanted] = {}
    for row, created in zip(draft.rows, draft.created_bytes, strict=True):
        if row.signature is not None and not row.flags & VIEW and row.signature.key not in known:
            found.setdefault(row.signature.key, Wanted(signature=row.signature, created_bytes=created))
    return list(found.values())


def calibrate(wanted: list[Wanted], identity: Identity, device: str) -> tuple[DeviceProfile, dict[str, str]]:
    """Run every call alone; returns what was measured and, by signature's key, why the others could not run, such as
    one whose tensors take more than half of what is free."""
    cuda, limit = device.startswith("cuda"), _free_bytes(device) // 2
    entries: dict[str, Entry] = {}
    skipped: dict[str, str] = {}
    kept: list[LibraryWorkspace] = []
    pool = _Pool(device)
    for start in range(0, len(wanted), TOGETHER):
        calls = [_Call(item, pool) for item in wanted[start : start + TOGETHER]]
        reasons = {call.signature.key: call.try_out(limit) for call in calls}
        skipped |= {key: reason for key, reason in reasons.items() if reason}
        chunk = [call for call in calls if not reasons[call.signature.key]]
        events = _events(chunk, kept if cuda else None)
        for call, found in zip(chunk, events, strict=True):
            entries[call.signature.key] = entry_of(
                settle(found, call.created_bytes),
                int(statistics.median(call.times_ns)),
                len(call.times_ns),
                identity,
            )
    return DeviceProfile(identity=identity, entries=entries, workspaces=tuple(kept)), skipped


class _Call:
    """One call that can be made again and again."""

    def __init__(self, wanted: Wanted, pool: _Pool) -> None:
        self.signature = wanted.signature
        self.created_bytes = wanted.created_bytes
        self.times_ns: list[int] = []
        self._pool = pool
        self._op: Any = None

    def try_out(self, limit: int) -> str:
        """Run it to warm up and, if that is quick, to time it; returns why it cannot run, or nothing."""
        need = sum(s.span_bytes for s in (*self.signature.inputs, *self.signature.results))
        if need > limit:
            return f"its tensors take {need} bytes, and {limit} may be used"
        timer = self._pool.timer()
        try:
            self._op = resolve(self.signature.target)
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                call = self.prepared()
                timer.run(None, call)
                if timer.finish()[0] < LONG_NS:
                    for _ in range(RUNS):
                        timer.run(None, call)
                    self.times_ns = timer.finish()
        except Exception as error:  # any op may refuse made-up arguments, each in its own way
            return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        return ""

    def watched(self, probe: Probe) -> None:
        """Run it under a probe, which times it as well if nothing has."""
        timer = self._pool.timer()
        call = self.prepared()
        probe.run(self.signature.target, lambda: timer.run(None, call))
        if not self.times_ns:
            self.times_ns = timer.finish()

    def prepared(self) -> Callable[[], Any]:
        """The call with arguments made up for it. An op that writes in place finds what its last run has left."""
        args, kwargs = _arguments(self._op, self.signature, self._pool)
        return lambda: self._op(*args, **kwargs)


class _Pool:
    """Memory for the arguments of one call at a time."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._floats: dict[torch.dtype, torch.Tensor] = {}
        self._taken: dict[torch.dtype, int] = {}

    def timer(self) -> Timer:
        return CudaTimer() if self.device.startswith("cuda") else Timer()

    def begin(self, specs: Iterable[TensorSpec]) -> None:
        """Another call, with these tensors."""
        needs: dict[torch.dtype, int] = {}
        for spec in specs:
            dtype = getattr(torch, spec.dtype)
            needs[dtype] = needs.get(dtype, 0) + _aligned(spec)
        self._taken = dict.fromkeys(needs, 0)
        for dtype, items in needs.items():
            if dtype.is_floating_point and (dtype not in self._floats or len(self._floats[dtype]) < items):
                self._floats.pop(dtype, None)  # before the larger one is made
                self._floats[dtype] = _floats(items, dtype, self.device)

    def tensor(self, spec: TensorSpec, below: int) -> torch.Tensor:
        """A tensor of the call. `below`: one more than the largest integer that may stand in it."""
        dtype = getattr(torch, spec.dtype)
        items = spec.span_bytes // spec.item_bytes
        if dtype.is_floating_point:
            start = self._taken[dtype]
            self._taken[dtype] += _aligned(spec)
            return self._floats[dtype].as_strided(spec.shape, spec.stride, start)
        if below > 1 and not dtype.is_complex and dtype is not torch.bool:
            flat = torch.randint(0, below, (items,), dtype=dtype, device=self.device)
        else:
            flat = torch.full((items,), dtype is torch.bool, dtype=dtype, device=self.device)
        return flat.as_strided(spec.shape, spec.stride)


def _aligned(spec: TensorSpec) -> int:
    """Elements from a tensor's first to its last, so that the next one begins where an allocator's block could."""
    return -(-spec.span_bytes // 512) * 512 // spec.item_bytes


def _floats(items: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Numbers between a half and one: few different ones, since making them takes longer than most ops do."""
    flat = torch.empty(items, dtype=dtype, device=device)
    done = min(items, 1 << 16)
    # Through float32, since not every kernel knows the small types.
    flat[:done] = torch.rand(done, device=device).mul_(0.5).add_(0.5)
    while done < items:
        more = min(done, items - done)
        flat[done : done + more] = flat[:more]
        done += more
    return flat


def _arguments(op: Any, signature: Signature, pool: _Pool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for a call of a signature, with made-up contents. Raises LookupError if an argument is of a kind that a
    signature does not carry.
    """
    pool.begin(signature.inputs)
    schema = op._schema.arguments
    below = _index_limit(signature)

    def made(value: Any, name: str, kind: str) -> Any:
        if isinstance(value, TensorSpec) and name in HOST.get(signature.target, ()):
            return torch.zeros(value.shape, dtype=getattr(torch, value.dtype))
        if isinstance(value, TensorSpec):
            return pool.tensor(value, below.get(name, 1))
        if isinstance(value, tuple):
            return [made(v, name, kind) for v in value]
        if isinstance(value, str) and value.startswith("torch."):
            return getattr(torch, value.removeprefix("torch."))
        if value == DEVICE:
            return torch.device(pool.device)
        if isinstance(value, str) and "str" not in kind:
            raise LookupError(f"its argument {name} is a {value}, which cannot be made up")
        return value

    args = tuple(made(a, schema[k].name, str(schema[k].type)) for k, a in enumerate(signature.args))
    kinds = {a.name: str(a.type) for a in schema}
    return args, {k: made(v, k, kinds[k]) for k, v in signature.kwargs}


def _index_limit(signature: Signature) -> dict[str, int]:
    """By argument: one more than the largest index that may stand in it. (All others hold zeros.)"""
    name = signature.target.split(".")[1]
    shapes = [s.shape for s in signature.inputs]
    if name == "embedding":
        return {"indices": shapes[0][0]}
    if name == "embedding_dense_backward":
        return {"indices": int(signature.argument(2, "num_weights"))}
    if name.startswith("nll_loss"):
        scores = shapes[1] if "backward" in name else shapes[0]
        return {"target": scores[1] if len(scores) > 1 else scores[0]}
    if name in ("gather", "scatter", "scatter_add", "index_select", "index_add"):
        return {"index": shapes[0][int(signature.argument(1, "dim", 0))] if shapes[0] else 1}
    if name in ("index", "index_put", "_index_put_impl_", "index_put_", "_unsafe_index"):
        return {"indices": min(shapes[0], default=1)}
    return {}


def _events(calls: list[_Call], kept: list[LibraryWorkspace] | None) -> Sequence[tuple[int, ...]]:
    """One run of each under one probe. `kept`: of CUDA, to which goes what libraries keep."""

    def work(probe: Probe) -> None:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for call in calls:
                call.watched(probe)

    if kept is None:
        return cpu_allocations(work, len(calls)) if calls else []
    recorded = cuda_allocations(work)
    kept.extend(recorded.workspaces)
    return recorded.events


def _free_bytes(device: str) -> int:
    """Memory that is free; the machine's where the system does not say, and no limit where it says neither."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info()[0])
    pages = [
        name for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in getattr(os, "sysconf_names", ())
    ]
    return os.sysconf(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else sys.maxsize
