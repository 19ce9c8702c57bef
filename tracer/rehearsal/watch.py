"""Watch torch's allocator while a loop runs on the null driver: peaks by phase, what is alive, who reads values.

Runs in the process of the loop. torch's own hooks say where an iteration is: backward is what runs in
`torch.autograd.backward` (or `grad`), the optimizer's phase is from there to the end of its step, the rest is forward.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from tracer.rehearsal.peak import (
    BEFORE,
    MOST_LINES,
    Event,
    by_category,
    by_line,
    held_at_peaks,
    innermost,
    owned_by,
)
from tracer.rehearsal.record import ASSUMED, HOST_READ, MASK, MISSING, Alive, Communicator, Iteration, Peaks
from tracer.step.loop import Enough, Phases
from tracer.torch_api import (
    FakeTensor,
    bindings,
    cuda_memory_snapshot,
    record_memory_history,
    replaced,
    when_cuda_begins,
)
from traces.records.plan import PredictionWarning
from traces.records.trace import BACKWARD, FORWARD, OPTIMIZER, PHASES

MAX_EVENTS: Final = 10**7
MOST_COUNTS: Final = 1 << 12  # that are read at once
# Words in a line that asks whether something is wrong, which it is not; other yes-or-no questions are answered yes.
_DOUBTS: Final = ("isnan", "isinf", "inf_or_nan", ".any(", "torch.any")
_FIGURES: Final = ("requested_bytes", "allocated_bytes", "reserved_bytes")


class Watch:
    """Figures by iteration and phase. `begin` and `end` an iteration, or let the first optimizer's steps end them."""

    def __init__(
        self, *, most_iterations: int = 0, device: int | None = None, settle: Any = None, words: Any = None
    ) -> None:
        """most_iterations: raise `Enough` after so many optimizer steps; 0: `end` is called by the loop. device: whose
        memory is watched; None: the current one's. settle: called when an iteration ends. words: of the ranks."""
        self.iterations: list[Iteration] = []
        self.snapshot: dict[str, Any] = {}  # torch's own, once `watching` has ended
        self._most = most_iterations
        self._settle, self._words = settle, words
        self._device = torch.cuda.current_device() if device is None else device
        self._phase = FORWARD
        self._loop = Phases(self._enter)
        self._phases: dict[str, Peaks] = {}
        self._marks: list[tuple[int, str]] = []  # (microseconds of Unix time, phase that begins)
        self._began_us = 0  # the last whole iteration
        self._this_us = 0
        self._owned: dict[int, str] = {}  # addresses of parameters, gradients and state, as they were last
        self._owned_us = 0
        self._optimizer = 0  # the first that stepped, by identity
        self._steps, self._steps_each = 0, 0  # that it has made in this iteration, and makes in each
        self._highest = Peaks()  # of what the user's own code sees
        self._reads: Counter[tuple[str, int, int]] = Counter()
        self._masks: Counter[str] = Counter()
        self._chosen = 0, 0  # how many choices the last topk made, of how many
        self._stats = bindings._cuda_memoryStats  # which only a CUDA build has
        self._reset = bindings._cuda_resetPeakMemoryStats
        self._driver = null_driver()

    def begin(self) -> None:
        """An iteration begins. Until a module is called it goes on as the one before it ended, with its gradients."""
        self._loop.enter(OPTIMIZER if self.iterations else FORWARD)
        self._phases = {}
        self._this_us = now_us()

    def end(self, again: bool = False) -> None:
        """It ends, or what goes on of the one that ended `again`; the next begins."""
        torch.cuda.synchronize(self._device)
        if self._settle is not None:
            self._settle()
        self._take()
        before = self.iterations.pop().phases if again else {}
        found = [(p, before.get(p, Peaks()) | self._phases.get(p, Peaks())) for p in PHASES]
        self.iterations.append(Iteration(phases={p: peaks for p, peaks in found if peaks != Peaks()}))
        self._began_us = self._began_us if again else self._this_us
        self.begin()

    def _enter(self, phase: str) -> None:
        self._take()
        self._phase = phase
        self._marks.append((now_us(), phase))

    def _take(self) -> None:
        """Add the peaks since the last call to the phase that was."""
        if not torch.cuda.is_initialized():
            return
        stats = self._stats(self._device)
        found = Peaks(**{k: stats[k]["all"]["peak"] for k in _FIGURES})
        self._highest |= found
        self._phases[self._phase] = self._phases.get(self._phase, Peaks()) | found
        self._reset(self._device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Be told by torch while the body runs."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        stepped = register_optimizer_step_post_hook(lambda *given: self._after_optimizer(*given))
        heard = _READ(self._on_read)
        self._driver.null_on_read(heard)
        # A rank may choose its GPU as long as torch has not begun with CUDA.
        when_cuda_begins(
            lambda: record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_EVENTS)
        )
        masks = self._masks_select_all()
        self.begin()
        try:
            with (
                self._loop.telling(),
                replaced(torch, compile=untimed(torch.compile)),
                replaced(
                    bindings,
                    _cuda_memoryStats=self._stats_as_if_alone,
                    _cuda_resetPeakMemoryStats=self._reset_by_user,
                ),
            ):
                yield
        finally:
            if torch.cuda.is_initialized():
                self.snapshot = cuda_memory_snapshot()
                record_memory_history(None)
            self._driver.null_on_read(_READ())
            stepped.remove()
            del masks

    def _after_optimizer(self, optimizer: Any, *_: Any) -> None:
        if any(isinstance(p, FakeTensor) for group in optimizer.param_groups for p in group["params"]):
            return  # `fit` records a step
        self._owned |= owned_by(optimizer)
        self._owned_us = now_us()
        if not self._most:
            return
        self._optimizer = self._optimizer or id(optimizer)
        if id(optimizer) == self._optimizer:
            before = self.iterations[-1].phases if self.iterations else {}
            again = BACKWARD in before and BACKWARD not in self._phases  # as DeepSpeed does, by groups
            self._steps = self._steps + 1 if again else 1
            self._steps_each = max(self._steps_each, self._steps)
            self.end(again)
            done = len(self.iterations) - self._most
            if done > 0 or (done == 0 and self._steps == self._steps_each):
                raise Enough

    def _stats_as_if_alone(self, device: int) -> Any:
        """torch's statistics with the peaks that they would have if nobody had reset them but the user."""
        stats = self._stats(device)
        for key in _FIGURES if device == self._device else ():
            stats[key]["all"]["peak"] = max(stats[key]["all"]["peak"], getattr(self._highest, key))
        return stats

    def _reset_by_user(self, device: int) -> None:
        if device != self._device:
            self._reset(device)
            return
        self._take()
        self._highest = Peaks()

    def _masks_select_all(self) -> torch.library.Library:
        """While it lives, `nonzero` finds all elements, so that what a mask indexes is taken whole, the most it can be,
        and it is known what `topk` chose among. Ignores: that temporaries of `nonzero` exist beside its result."""
        library = torch.library.Library("aten", "IMPL")
        kernel = torch.library.get_kernel("aten::nonzero", "CUDA")

        def nonzero(keys: Any, mask: torch.Tensor) -> torch.Tensor:
            reads = self._reads.copy()
            kernel.call_boxed(keys, mask)
            self._reads = reads  # of the number that it found
            self._masks[_line_of(sys._getframe())[0]] += 1
            return mask.new_empty((mask.dim(), mask.numel()), dtype=torch.long).t()

        library.impl("nonzero", nonzero, "CUDA", with_keyset=True, allow_override=True)
        choose = torch.library.get_kernel("aten::topk", "CUDA")

        def topk(keys: Any, scores: torch.Tensor, k: int, dim: int = -1, *how: bool) -> Any:
            of = (scores.shape or (1,))[dim]
            self._chosen = scores.numel() // max(of, 1) * k, of
            return choose.call_boxed(keys, scores, k, dim, *how)

        library.impl("topk", topk, "CUDA", with_keyset=True, allow_override=True)
        return library

    def _on_read(self, size: int, told: int, to: int, at: int, message: int) -> int:
        """The host reads `size` bytes of the device, each of which would be `told`; returns what it is. What another
        rank gave in a message is heard from that rank, and -1 returned; also where several numbers may count what the
        last topk chose, by option or by rank: these get even shares."""
        if message and (value := self._words.value(message, at, size)):
            ctypes.memmove(to, value, size)
            return -1
        (choices, of), n = self._chosen, size // 8
        even = size % 8 == 0 and 1 < n < MOST_COUNTS and of > 1 and 0 in (of % n, n % of)
        frame = sys._getframe().f_back  # none in autograd's thread, outside of functions of the user's own
        where, text = _line_of(frame) if frame else ("", "")
        told = choices // min(n, of) if even else int(told and not any(word in text for word in _DOUBTS))
        self._reads[where, size, told] += 1
        if even:
            rest = choices - told * min(n, of)
            ctypes.memmove(to, (ctypes.c_int64 * n)(told + rest, *[told] * (n - 1)), size)
        return -1 if even else told

    def warnings(self) -> tuple[PredictionWarning, ...]:
        """Values that were read, sizes that are assumed, functions that are not there."""
        found: list[tuple[str, str, dict[str, int]]] = [
            (HOST_READ, where, {"bytes": size, "told": told, "times": times})
            for (where, size, told), times in self._reads.most_common(MOST_LINES)
        ]
        found += [(MASK, where, {"times": n}) for where, n in self._masks.most_common(MOST_LINES)]
        found += [(ASSUMED, s, {}) for s in names(self._driver.null_assumed_names())]
        found += [(MISSING, s, {}) for s in names(self._driver.null_missing_names())]
        return tuple(PredictionWarning(code=code, subject=s, figures=f) for code, s, f in found)

    def communicators(self) -> tuple[tuple[Communicator, ...], int]:
        """NCCL's communicators that were ever made, and what they took together at most, in bytes."""
        text = ctypes.create_string_buffer(1 << 16)
        self._driver.null_communicators(text, len(text))
        rows = [[int(n) for n in line.split()] for line in text.value.decode().splitlines()]
        most = max(
            (sum(r[1] for r in rows if r[2] <= at and not 0 < r[3] <= at) for _, _, at, _ in rows), default=0
        )
        return tuple(Communicator(ranks=r[0], nbytes=r[1]) for r in reversed(rows)), most

    def held(self, begins_us: Sequence[int]) -> Iterator[dict[str, int]]:
        """What was in use at the highest point of each stretch of time, by category; call it inside `watching`."""
        events = cuda_memory_snapshot()["device_traces"][self._device]
        return self._by_category(held_at_peaks(events, begins_us), events)

    def _by_category(
        self, held: Iterable[Iterable[Event]], events: Sequence[Event]
    ) -> Iterator[dict[str, int]]:
        return by_category(held, events, self._owned, self._owned_us, self._phase_at)

    def at_the_peak(self) -> tuple[tuple[Alive, ...], dict[str, int]]:
        """Return what was in use at the highest point of the last iteration, by the line that asked for it and by
        category.

        Call it after `watching`.
        """
        events = dict(enumerate(self.snapshot.get("device_traces", []))).get(self._device, [])
        (held,) = held_at_peaks(events, [self._began_us])
        return by_line(held, self._phase_at), next(self._by_category([held], events))

    def _phase_at(self, time_us: int) -> str:
        found = BEFORE
        for begins_us, phase in self._marks[1:]:
            if begins_us > time_us:
                break
            found = phase
        return found


def now_us() -> int:
    """The time as events of torch's memory history have it."""
    return time.time_ns() // 1000


_READ: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_ulonglong, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
)


def null_driver() -> Any:
    """The null driver that this process runs on, as ctypes sees it."""
    driver = ctypes.CDLL(os.environ["LD_PRELOAD"].split(os.pathsep)[0])
    driver.null_missing_names.restype = driver.null_assumed_names.restype = ctypes.c_char_p
    driver.null_on_read.argtypes = [_READ]
    driver.null_read.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    driver.null_communicators.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    driver.null_communicators.restype = None
    return driver


def names(text: bytes) -> list[str]:
    """The names in a list of the null driver's."""
    return text.decode(errors="replace").split("\n")[:-1]


def _line_of(frame: Any) -> tuple[str, str]:
    """The innermost line that users look at, from a frame on outwards, and its text."""
    return innermost(
        (f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(frame)
    )


def untimed(compiling: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.compile` so that Inductor's autotuning takes the first choice that compiles, ATen's own where it is
    among them, and times none; matrices that it might pad for tensor cores are padded, as on an H200.

    Counts: what the chosen kernel asks for. Ignores: what timing the others asks for in a program's first run.
    """

    @functools.wraps(compiling)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend", "inductor") == "inductor":
            _take_first()
        return compiling(*args, **kwargs)

    return compiled


@functools.cache
def _take_first() -> None:
    from tracer.torch_api import choosing_among, pad_mm

    choosing_among(first_that_compiles)
    # Not to be captured with a compiled step.
    Watch._after_optimizer = torch.compiler.disable(Watch._after_optimizer)  # type: ignore[method-assign]
    pad_mm._skip_do_bench_times = True


def first_that_compiles(choices: Sequence[Any]) -> Sequence[Any]:
    """The first choice, or where the GPU lacks what that needs (shared memory) the next; all if none compiles."""
    for choice in choices if len(choices) > 1 else ():
        try:
            choice.precompile()
        except Exception:  # as Inductor passes over it, which tells why if it is the last
            continue
        return [choice]
    return choices
