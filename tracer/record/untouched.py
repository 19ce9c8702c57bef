"""Count what the untouched model's step needs at its peak, by running the ordinary loop on fake tensors.

The captured graph is not what eager runs. There Python's names and autograd's nodes decide how long a tensor lives (a
caller's variable holds a layer's input until the layer has returned, a model's output its logits until the loss is
made), an op rarely writes into its input, and autograd sums gradients in a way of its own. All of that happens on fake
tensors just so; only the bytes are left to count.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tracer.build.loop import TrainingStep, run_step
from tracer.capture.capture import forward_once
from tracer.costs.calibration import Costs
from tracer.costs.roofline import compute_dtype, result_bytes
from tracer.costs.rows import OpRow
from tracer.costs.signature import of_call
from tracer.precision.policy import scaler_tensors
from tracer.record.assemble import optimizer_tensors
from tracer.record.draft import Draft
from tracer.record.eager import EagerRecorder, given_to
from tracer.record.rows import storage_key, tensors_in
from tracer.record.step import fake_mode
from tracer.torch_api import storage_expired
from traces.devices import Device
from traces.errors import LowtideError

MOST_OPS: Final = 20_000  # of a step that is counted: the work grows with the square


def untouched_peak_bytes(draft: Draft, costs: Costs) -> int:
    """Peak of allocated bytes in a steady iteration of the untouched model; 0 if it cannot be counted.

    Counts: every storage from the op that makes it until nobody refers to it any more, and what `costs` knows of the
    allocations inside each op. Ignores: what Python keeps in one run and not in another; branches that library code
    takes on the data of a mask, where the capture had to go around them.

    Args:
        draft: the step. A GPU's ops are not run here, and its steps are not counted.
        costs: what ops allocate inside.
    """
    step, target = draft.step, draft.target
    if target.kind != "cpu":
        return 0
    peak_bytes = 0

    def run() -> None:
        nonlocal peak_bytes
        counter = _Counter(target, costs)
        with step.autocast.region():  # the model makes what it keeps from step to step
            step.loss_of(step.model(*step.args, **step.kwargs))
        with counter:
            counter.start(step)
            run_step(step, step.model, step.optimizer, counter.begin)
        peak_bytes = counter.peak_bytes

    with fake_mode(draft.mode):
        try:
            forward_once(step.model, run)
        except LowtideError:
            return 0
    return peak_bytes


class _TooLong(LowtideError):
    """The step has too many ops to be counted in good time."""


class _Counter(EagerRecorder):
    """Adds up storages as ops make them, and takes off those that are gone.

    Whether a storage is gone is only asked when it matters: when there would be a new peak with all of them.
    """

    checks_loss = False  # the recording of this step has

    def __init__(self, target: Device, costs: Costs) -> None:
        super().__init__([])
        self.target, self.costs = target, costs
        self.peak_bytes = 0
        self._live_bytes = 0  # with storages that may be gone
        self._ops = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def start(self, step: TrainingStep) -> None:
        """The step is complete and nothing of it has run: what is there now stays."""
        for x in (
            *step.model.parameters(),
            *step.model.buffers(),
            *step.loss_parameters.values(),
            *step.tensors(),
            *optimizer_tensors(step.optimizer),
            *scaler_tensors(step.scaler),
        ):
            self._stays(x)
        self.peak_bytes = self._live_bytes

    def look(self) -> None:
        """Nothing to note before an op."""

    def _stays(self, x: torch.Tensor) -> None:
        """It is there already; an optimizer may put something else in its place."""
        key = storage_key(x)
        if key not in self._made:
            nbytes = x.untyped_storage().nbytes()
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
        outputs, created = list(tensors_in(out)), 0
        for x in outputs:
            key = storage_key(x)
            if key not in self._made:
                nbytes = result_bytes(func, args, x)
                self._made[key] = (StorageWeakRef(x.untyped_storage()), nbytes)
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
