"""Count what the untouched model's step needs at its peak, by running the ordinary loop on fake tensors.

The captured graph is not what eager runs. There Python's names and autograd's nodes decide how long a tensor lives (a
caller's variable holds a layer's input until the layer has returned, a model's output its logits until the loss is
made), an op rarely writes into its input, and autograd sums gradients in a way of its own. All of that happens on fake
tensors just so; only the bytes are left to count.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tracer.build.cuda_words import cuda_words
from tracer.build.loop import TrainingStep, run_step
from tracer.capture.capture import forward_once
from tracer.capture.cuda.gpu import gpu_kernels, results
from tracer.costs.calibration import Costs
from tracer.costs.roofline import compute_dtype, result_bytes
from tracer.costs.rows import OpRow
from tracer.costs.signature import of_call
from tracer.precision.cast_cache import kernels
from tracer.precision.policy import scaler_tensors
from tracer.record.assemble import optimizer_tensors, stays_on_cpu
from tracer.record.draft import Draft
from tracer.record.eager import EagerRecorder, given_to
from tracer.record.rows import storage_key, tensors_in
from tracer.record.step import fake_mode
from tracer.torch_api import current_autograd_node, storage_expired, storage_uses
from traces.devices import Device
from traces.errors import LowtideError
from traces.trace import BACKWARD

aten = torch.ops.aten
NO_NODE: Final = -1  # of autograd
# What autograd's own code writes in place, but not where tensors are fake (at::isTensorSubclassLike): its sums of
# gradients (torch/csrc/autograd/input_buffer.cpp, accumulate), formulas (FunctionsManual.cpp, gather_backward).
IN_PLACE: Final = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_put.default: aten.index_put_.default,
}

MOST_OPS: Final = 20_000  # of a step that is counted: the work grows with the square


def untouched_peak_bytes(draft: Draft, costs: Costs) -> int:
    """Peak of allocated bytes in a steady iteration of the untouched model; 0 if it cannot be counted.

    Counts: every storage from the op that makes it until nobody refers to it any more, and what `costs` knows of the
    allocations inside each op. Ignores: what Python keeps in one run and not in another; branches that library code
    takes on the data of a mask, where the capture had to go around them.

    Args:
        draft: the step; one on a GPU's own fake tensors is not counted.
        costs: what ops allocate inside.
    """
    step, gpu = draft.step, draft.program.captured.target
    if draft.target.kind != "cpu" and gpu is None:
        return 0
    peak_bytes = 0

    def run() -> None:
        nonlocal peak_bytes
        counter = _Counter(draft, costs)
        with step.autocast.region():  # the model makes what it keeps from step to step
            step.loss_of(step.model(*step.args, **step.kwargs))
        with counter:
            counter.start(step)
            run_step(step, step.model, step.optimizer, counter.begin)
        peak_bytes = counter.peak_bytes

    with fake_mode(draft.mode), cuda_words(gpu), _ops_of(gpu):
        try:
            forward_once(step.model, run)
        except LowtideError:
            return 0
    return peak_bytes


@contextlib.contextmanager
def _ops_of(gpu: Device | None) -> Iterator[None]:
    """What eager runs on a GPU in place of what it runs on a CPU: attention, inputs of batch norms, fused dropout."""
    if gpu is None:
        yield
        return

    def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if train and 0 < p < 1 and x.numel():  # is_fused_kernel_acceptable in ATen/native/Dropout.cpp
            out: torch.Tensor = aten.native_dropout(x, p, train)[0]
            return out
        whole: torch.Tensor = aten.dropout.default.decompose(x, p, train)
        return whole

    with gpu_kernels(gpu), kernels("AutogradCPU", {"dropout": dropout}):
        yield


class _TooLong(LowtideError):
    """The step has too many ops to be counted in good time."""


class _Counter(EagerRecorder):
    """Adds up storages as ops make them, and takes off those that are gone.

    Whether a storage is gone is only asked when it matters: when there would be a new peak with all of them.
    """

    checks_loss = False  # the recording of this step has

    def __init__(self, draft: Draft, costs: Costs) -> None:
        super().__init__([])
        self.target, self.costs = draft.target, costs
        self.peak_bytes = 0
        self._live_bytes = sum(row.nbytes for row in draft.libraries)  # with storages that may be gone
        self._ops = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._maker: dict[int, int] = {}  # storage -> the node of autograd that was running

    def start(self, step: TrainingStep) -> None:
        """The step is complete and nothing of it has run: what is there now stays."""
        for x in (
            *step.model.parameters(),
            *step.model.buffers(),
            *step.loss_parameters.values(),
            *step.tensors(),
            *scaler_tensors(step.scaler),
        ):
            self._stays(x)
        for x in optimizer_tensors(step.optimizer):
            self._stays(x, elsewhere=self.target.kind == "cuda" and stays_on_cpu(x, step.optimizer))
        self.peak_bytes = self._live_bytes

    def look(self) -> None:
        """Nothing to note before an op."""

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        twin = IN_PLACE.get(func) if self.phase == BACKWARD and not kwargs else None
        if twin is not None and isinstance(args[0], torch.Tensor) and _alone(args[0]) and _of_autograd():
            # A sum is of what an earlier node made; else a formula writes into zeros that it has just made itself.
            made_now = self._maker.get(storage_key(args[0])) == _node()
            if made_now is not (func is aten.add.Tensor):
                return twin(*args)
        return super()._call(func, args, kwargs)

    def _stays(self, x: torch.Tensor, *, elsewhere: bool = False) -> None:
        """It is there already; an optimizer may put something else in its place."""
        key = storage_key(x)
        if key not in self._made:
            nbytes = 0 if elsewhere else x.untyped_storage().nbytes()
            self._made[key] = (StorageWeakRef(x.untyped_storage()), nbytes)
            self._live_bytes += nbytes

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._ops += 1
        if self._ops > MOST_OPS:
            raise _TooLong(f"more than {MOST_OPS} ops")
        before = self._live_bytes
        for x in given_to(func, args, kwargs):
            self._stays(x)  # made before the step began, and known to nobody
        self.peak_bytes += self._live_bytes - before
        there = results(func, args, kwargs, out, laptop=self.target.kind == "cuda")
        created = 0
        for x, y in zip(tensors_in(out), tensors_in(there), strict=True):
            key = storage_key(x)
            if key not in self._made:
                nbytes = result_bytes(func, args, y)
                self._made[key] = (StorageWeakRef(x.untyped_storage()), nbytes)
                self._maker[key] = _node() if self.phase == BACKWARD else NO_NODE
                created += nbytes
        rise = max(created, self._inside(func, args, kwargs, out, created))
        if self._live_bytes + rise > self.peak_bytes:
            self._release()
            self.peak_bytes = max(self.peak_bytes, self._live_bytes + rise)
        self._live_bytes += created

    def _release(self) -> None:
        gone = [key for key, (ref, _) in self._made.items() if storage_expired(ref.cdata)]
        for key in gone:
            self._live_bytes -= self._made.pop(key)[1]

    def _inside(self, func: Any, args: Any, kwargs: Any, out: Any, created: int) -> int:
        """The most that is allocated at once inside an op, its outputs included."""
        if not created and not func._schema.is_mutable:
            return 0
        row = OpRow(
            name="",
            target=str(func),
            phase=self.phase,
            dtype=compute_dtype(list(tensors_in((args, kwargs)))),
            signature=of_call(func, args, kwargs, out),
        )
        most = live = 0
        for event in self.costs.of(row, created, self.target).events:
            live += event
            most = max(most, live)
        return most


def _of_autograd() -> bool:
    """Whether autograd's own C++ calls an op, and not a hook or a function of somebody's in Python."""
    frame = sys._getframe(3)
    while frame.f_globals.get("__name__", "").startswith("torch._") and frame.f_back is not None:
        frame = frame.f_back  # of what torch puts around a mode
    return frame.f_code.co_name == "_engine_run_backward"


def _node() -> int:
    """The number of the node of autograd that runs, or has just run."""
    node = current_autograd_node()
    return NO_NODE if node is None else node._sequence_nr()


def _alone(x: torch.Tensor) -> bool:
    """Whether a tensor fills its storage, and no other tensor shares that."""
    storage = x.untyped_storage()  # the second that does
    return storage_uses(storage._cdata) == 2 and storage.nbytes() == x.numel() * x.element_size()
