"""Count what the untouched model's step needs at its peak, by running the ordinary loop on fake tensors.

The captured graph is not what eager runs. There Python's names and autograd's nodes decide how long a tensor lives (a
caller's variable holds a layer's input until the layer has returned, a model's output its logits until the loss is
made), an op rarely writes into its input, and autograd sums gradients in a way of its own. All of that happens on fake
tensors just so; only the bytes are left to count.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tracer.capture.capture import forward_once
from tracer.capture.cuda.gpu import gpu_kernels, results
from tracer.costs.calibration import Costs
from tracer.costs.roofline import compute_dtype, result_bytes
from tracer.costs.rows import OpRow
from tracer.costs.signature import of_call
from tracer.precision.cast_cache import kernels
from tracer.precision.policy import scaler_tensors
from tracer.record.draft import Draft
from tracer.record.eager import EagerRecorder, caller, given_to
from tracer.record.rows import storage_key, tensors_in
from tracer.record.step import fake_mode
from tracer.step.cuda_words import cuda_words
from tracer.step.loop import TrainingStep, forget_gradients, run_step
from tracer.step.optimizers import optimizer_tensors, stays_on_cpu
from tracer.torch_api import replaced, storage_expired
from traces.devices import Device
from traces.errors import LowtideError
from traces.records.events import replayed
from traces.records.trace import BACKWARD, FIRST, FORWARD, LATER, OPTIMIZER, Untouched

aten = torch.ops.aten
Ask = tuple[int, int, int, str]  # a row of Untouched
MASKS: Final = "transformers.masking_utils"  # which leaves a mask out that masks nothing, if it may look
ONES: Final = frozenset({aten.ones.default, aten.ones_like.default, aten.new_ones.default})
LIKEWISE: Final = frozenset({aten._to_copy.default, aten.clone.default})

MOST_OPS: Final = 20_000  # of a step that is counted: the work grows with the square
MOST_PARTS: Final = 3  # of those that accumulate gradients: the third and all further ones ask the same
ITERATIONS: Final = 3  # what the second gives back is the first's; the third and all further ones are alike


def count_untouched(
    draft: Draft, costs: Costs, say: Callable[[str], None] = lambda text: None
) -> tuple[int, Untouched]:
    """Peak of allocated bytes in a steady iteration of the untouched model, and for a GPU its requests, in order.

    0 and none if it cannot be counted; `say` is told why.

    Counts: every storage from the op that makes it until nobody refers to it any more, and what `costs` knows of the
    allocations inside each op. Ignores: what Python keeps in one run and not in another; branches that library code
    takes on the data of a mask, where the capture had to go around them.
    """
    step, gpu = draft.step, draft.program.captured.target
    if draft.target.kind != "cpu" and gpu is None:
        return 0, Untouched()
    peak_bytes, requests = 0, Untouched()
    ones: set[int] = set()

    def run() -> None:
        nonlocal peak_bytes, requests
        from_the_first = step.loop.gradients_stay or step.own is not None
        shortened = replace(step, loop=replace(step.loop, accumulate=min(step.loop.accumulate, MOST_PARTS)))
        counter = _Counter(draft, costs, ones)
        if not from_the_first:
            _one_iteration(shortened, counter)
        if from_the_first or not counter.complete:
            counter = _Counter(draft, costs, ones)
            _from_the_first(shortened, counter)
        peak_bytes, requests = counter.peak_bytes, counter.requests()

    def cannot_look(mask: torch.Tensor | None = None) -> bool:
        return mask is not None and storage_key(mask) not in ones

    masks = sys.modules.get(MASKS)
    known = hasattr(masks, "is_tracing")
    looked_at = replaced(masks, is_tracing=cannot_look) if known else contextlib.nullcontext()
    with fake_mode(draft.mode), cuda_words(gpu), _ops_of(gpu), looked_at:
        try:
            forward_once(step.model, run)
        except LowtideError as error:
            say(f"warning: the memory of the untouched loop is not counted: {error}")
            return 0, Untouched()
    return peak_bytes, requests


def _one_iteration(step: TrainingStep, counter: _Counter) -> None:
    """Count a steady iteration that leaves nothing to the next but gradients and the loss, which go first there. The
    first differs from it in what comes to stay: the optimizer's state, libraries' workspaces."""
    with step.autocast.region():  # the model makes what it keeps from step to step
        step.loss_of(step.model(*step.args, **step.kwargs))
    forget_gradients((*step.model.parameters(), *step.loss_parameters.values()))
    with counter.counting():
        counter.start(step)
        run_step(step, step.model, step.optimizer, counter.begin)
        counter.end()


def _from_the_first(step: TrainingStep, counter: _Counter) -> None:
    """Count iterations from the first on, until one is as the one before it was."""
    forget_gradients((*step.model.parameters(), *step.loss_parameters.values()))
    if step.optimizer is not None:
        step.optimizer.state.clear()
    if step.own is not None:  # what it gives the model it makes, or takes of the batch
        step = replace(step, args=(), kwargs={})
    with counter.counting():
        counter.start(step)
        for _ in range(ITERATIONS):
            counter.begin_iteration()
            run_step(step, step.model, step.optimizer, counter.begin)
            counter.end_iteration(step.optimizer)


@contextlib.contextmanager
def _ops_of(gpu: Device | None) -> Iterator[None]:
    """What eager runs on a GPU in place of what it runs on a CPU or on fake tensors: attention, inputs of batch norms,
    fused dropout, linear layers of what is not contiguous (Linear.cpp)."""
    if gpu is None:
        yield
        return

    def dropout(x: torch.Tensor, p: float, train: bool) -> Any:
        if train and 0 < p < 1 and x.numel():  # is_fused_kernel_acceptable in ATen/native/Dropout.cpp
            return aten.native_dropout(x, p, train)[0]
        return aten.dropout.default.decompose(x, p, train)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if bias is not None and x.dim() > 2 and not x.is_contiguous():
            return aten.matmul(x, weight.t()).add_(bias)  # out of place where tensors are fake
        return aten.linear.default.decompose(x, weight, bias)

    with gpu_kernels(gpu, eager=True), kernels("AutogradCPU", {"dropout": dropout, "linear": linear}):
        yield


class _TooLong(LowtideError):
    """The step has too many ops to be counted in good time."""


class _Counter(EagerRecorder):
    """Adds up storages as ops make them, and takes off those that are gone.

    Of a CPU, whether a storage is gone is only asked when it matters: when there would be a new peak with all of them.
    """

    checks_loss = False  # the recording of this step has

    def __init__(self, draft: Draft, costs: Costs, ones: set[int]) -> None:
        """`ones`: to which storages are added while they are known to hold nothing but ones."""
        super().__init__([])
        self._ones = ones
        self.target, self.costs = draft.target, costs
        self.peak_bytes = 0
        self._live_bytes = sum(row.nbytes for row in draft.libraries)  # with storages that may be gone
        self._ops = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._asks: list[Ask] = []
        self._residents: frozenset[int] = frozenset()  # storages that are there before the step
        self._blocks: dict[int, int] = {}  # storage -> its block
        self._block_count = 0
        rows = draft.rows
        self._workspaces = [
            (rows[w.used_from].target, rows[w.used_from].phase, w.nbytes) for w in draft.libraries
        ]
        self._state: dict[int, list[int]] = {}  # of the optimizer: turn -> bytes of what comes with it
        # Bytes of a gradient scaler's state, which it makes when it first scales a loss.
        self._scaler: list[int] = []
        self._turns = draft.state_turns
        self._turn: dict[int, int] = {}  # by storage
        self._marks: list[tuple[int, int]] = []  # where iterations begin: so many rows and blocks come before

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """In the body ops are counted, and of a CPU the states of its generator that somebody asks for, which is no op:
        `torch.utils.checkpoint` holds one of 5,056 bytes for each block until that runs again."""
        ask = torch.get_rng_state

        def state() -> torch.Tensor:
            x = ask()
            self._stays(x, elsewhere=self.target.kind == "cuda")
            self._peak(0)
            return x

        with replaced(torch, get_rng_state=state), self:
            yield

    def start(self, step: TrainingStep) -> None:
        """The step is complete and nothing of it has run: what is there now stays."""
        own = (*step.model.parameters(), *step.model.buffers(), *step.loss_parameters.values())
        for x in (*own, *step.tensors(), *scaler_tensors(step.scaler)):
            self._stays(x)
        self._scaler = [x.untyped_storage().nbytes() for x in scaler_tensors(step.scaler)]
        state = optimizer_tensors(step.optimizer)
        self._turn = dict(zip(map(storage_key, state), self._turns, strict=False))
        for x in state:
            before = self._live_bytes
            self._stays(x, elsewhere=self.target.kind == "cuda" and stays_on_cpu(x, step.optimizer))
            turn = self._turn.get(storage_key(x), 0)
            if self._live_bytes > before and turn >= 0:
                self._state.setdefault(turn, []).append(self._live_bytes - before)
        self.peak_bytes = self._live_bytes
        self._residents = frozenset(self._made)

    def begin(self, phase: str) -> None:
        """As of an EagerRecorder; in the first iteration an optimizer like torch's makes its state when it begins."""
        self.look()  # what went with the phase before went in it
        super().begin(phase)
        if phase == BACKWARD:
            self._asks += [(-1, n, 1, BACKWARD) for n in self._scaler]
            self._scaler = []
        if phase == OPTIMIZER and not self._turns:
            self._ask_for_state(list(self._state))

    def _ask_for_state(self, turns: Iterable[int]) -> None:
        self._asks += [(-1, n, 1, OPTIMIZER) for turn in turns for n in self._state.pop(turn, ())]

    @property
    def complete(self) -> bool:
        """Whether all that was there before the iteration is there still; not so where an optimizer replaces its
        state, and a block goes from one iteration to the next."""
        return self._residents <= self._made.keys()

    def end(self) -> None:
        """The only iteration has ended. Gradients and the loss are given back when the next begins, before all else."""
        self._ask_for_the_rest()
        self._asks += [(~b, 0, 0, OPTIMIZER) for b in self._blocks.values()]

    def begin_iteration(self) -> None:
        """One of several begins."""
        self._release()
        self._marks.append((len(self._asks), self._block_count))
        self._ops, self.peak_bytes = 0, self._live_bytes

    def end_iteration(self, optimizer: torch.optim.Optimizer | None) -> None:
        """It ends; what the optimizer made on the CPU is none of the GPU's."""
        self.look()
        self._ask_for_the_rest()
        for x in optimizer_tensors(optimizer) if self.target.kind == "cuda" else ():
            block = self._blocks.pop(storage_key(x), None) if stays_on_cpu(x, optimizer) else None
            if block is not None:
                self._asks = [a for a in self._asks if a[0] != block]
                self._live_bytes -= self._made[storage_key(x)][1]
                self._made[storage_key(x)] = (self._made[storage_key(x)][0], 0)

    def requests(self) -> Untouched:
        """What was asked of the allocator, on a GPU; nothing if the last of several iterations was not as the one
        before it, or one gave back what was there before all of them, as parameters."""
        if self.target.kind != "cuda" or not self.complete:
            return Untouched()
        rows = self._asks if not self._marks else _repeating(self._asks, self._marks)
        block, nbytes, once, phase = zip(*rows, strict=True) if rows else ((), (), (), ())
        return Untouched(block=block, nbytes=nbytes, once=once, phase=phase)

    def is_true(self) -> bool:
        """MASKS asks only whether a mask of ones masks nothing."""
        return self.phase == FORWARD and caller(1, "torch.", "tracer.").f_globals.get("__name__") == MASKS

    def look(self) -> None:
        """Before an op: what is gone was given back."""
        if self.target.kind == "cuda":
            self._release()

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
        if func in ONES or (func in LIKEWISE and storage_key(args[0]) in self._ones):
            self._ones.update(map(storage_key, tensors_in(out)))
        there = results(func, args, kwargs, out, laptop=self.target.kind == "cuda")
        created, made = 0, {}
        for x, y in zip(tensors_in(out), tensors_in(there), strict=True):
            key = storage_key(x)
            if key not in self._made:
                nbytes = result_bytes(func, args, y)
                self._made[key] = (StorageWeakRef(x.untyped_storage()), nbytes)
                self._maker[key] = self._node()
                created += nbytes
                made[key] = nbytes
        if self.phase == OPTIMIZER and self._state:
            self._ask_for_state(self._turn.get(storage_key(x), -1) for x in given_to(func, args, kwargs))
        events = self._events(func, args, kwargs, out, created)
        rise = max(created, *accumulate(events, initial=0))
        self._ask(events, made)
        self._ask_for_workspaces(str(func))
        self._peak(rise)
        self._live_bytes += created

    def _peak(self, more: int) -> None:
        """So many bytes are there for a while, beside what is live."""
        if self._live_bytes + more > self.peak_bytes:
            self._release()
            self.peak_bytes = max(self.peak_bytes, self._live_bytes + more)

    def _release(self) -> None:
        gone = [key for key, (ref, _) in self._made.items() if storage_expired(ref.cdata)]
        for key in gone:
            self._live_bytes -= self._made.pop(key)[1]
            self._ones.discard(key)
            if key in self._blocks:
                self._asks.append((~self._blocks.pop(key), 0, 0, self.phase))

    def _ask(self, events: tuple[int, ...], made: dict[int, int]) -> None:
        """Note an op's requests; `made` are the bytes of the storages that it makes."""
        asks: list[int] = []
        blocks = replayed(made, events, [key for key, n in made.items() if n], asks)
        first = self._block_count
        for n in asks:
            self._asks.append(
                (self._block_count, n, 0, self.phase) if n > 0 else (~(first + ~n), 0, 0, self.phase)
            )
            self._block_count += n > 0
        self._blocks |= {key: first + block for key, block in blocks.items()}

    def _ask_for_workspaces(self, target: str) -> None:
        """A library asks for what it keeps when the outputs of its first op are there."""
        for w in [w for w in self._workspaces if w[:2] == (target, self.phase)]:
            self._workspaces.remove(w)
            self._asks.append((-1, w[2], 1, self.phase))

    def _ask_for_the_rest(self) -> None:
        """What a library keeps whose first op did not run comes in the end."""
        self._asks += [(-1, w[2], 1, OPTIMIZER) for w in self._workspaces]
        self._workspaces = []

    def _events(self, func: Any, args: Any, kwargs: Any, out: Any, created: int) -> tuple[int, ...]:
        """What an op allocates and frees, as far as that is known."""
        if not created and not func._schema.is_mutable:
            return ()
        row = OpRow(
            name="",
            target=str(func),
            phase=self.phase,
            dtype=compute_dtype(list(tensors_in((args, kwargs)))),
            signature=of_call(func, args, kwargs, out),
        )
        return self.costs.of(row, created, self.target).events


def _repeating(asks: list[Ask], marks: list[tuple[int, int]]) -> list[Ask]:
    """The rows of Untouched of three iterations: those of the first, and those of the third for all later ones.

    A block of the third has its number by the order there. What an iteration gives back of the one before it has, in
    the one before it, the number that it has in that order; so the first's blocks get theirs from what the second gives
    back of them where the third gives back the second's. Returns none at all if the second and the third do not ask
    alike.
    """
    (one, _), (two, second), (three, third) = marks
    count = third - second
    later, last = asks[two:three], asks[three:]
    number: dict[int, int] = {}  # of the first's blocks
    rows = []
    if len(later) != len(last):
        return []
    for (old, old_bytes, *_), (new, new_bytes, _, phase) in zip(later, last, strict=True):
        given = not (old_bytes or new_bytes)  # back
        old, new = (~old, ~new) if given else (old, new)
        before = given and old < second and new < third  # of the iteration before
        if old_bytes != new_bytes or (given and new < second) or not (before or old - second == new - third):
            return []
        block = new - (second if given and new < third else third)
        if given and new < third:
            number[old] = block
        rows.append((~block if given else block, new_bytes, LATER, phase))
    first = []
    for block, n, _, phase in asks[one:two]:
        of = block if n else ~block
        named = -1 if n and block < 0 else number.get(of, count + of)
        first.append((named if n else ~named, n, FIRST, phase))
    return [*first, *rows]
