"""Record what runs around the captured model (the loss code, autograd's own ops, the optimizer) as trace rows.

These ops run eagerly, so the lifetime of what they allocate is decided by Python references and by autograd. The
recorder watches each storage and notes after which op it is gone; that becomes the storage's hold.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from dataclasses import replace
from operator import itemgetter
from typing import Any, Final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tracer.costs.roofline import result_bytes
from tracer.costs.rows import OpRow, StorageRow
from tracer.record.rows import op_row, overwritten, storage_key, storage_row, tensors_in
from tracer.step.context import is_fake
from tracer.torch_api import (
    FakeTensor,
    TorchDispatchMode,
    disable_current_modes,
    release,
    replaced,
    storage_expired,
)
from traces.errors import CaptureError
from traces.records.trace import ACTIVATION, EAGER, EFFECT, FORWARD, MUTATES, OPTIMIZER, OTHER, RANDOM, VIEW

aten = torch.ops.aten
DEVICE: Final = torch.ops.prim.device.default
functional: Any = nn.functional


class EagerRecorder(TorchDispatchMode):
    """A dispatch mode that notes a row for each op, with op ids of its own, and appends new storages to `storages`.

    Register storages that exist already with `know`. Set `phase` as the step goes on. Under fake tensors, the
    optimizer's questions for a scalar's value (`.item()`) are answered with the value where it follows from nothing but
    numbers (its step counter), else with 1 (a norm of gradients). A gradient scaler's question whether a gradient
    overflowed is answered with 0: the step is taken.
    """

    def __init__(self, storages: list[StorageRow], device: str = "cpu") -> None:
        super().__init__()
        self.storages = storages
        self.device = device.partition(":")[0]
        self.rows: list[OpRow] = []
        self.phase = FORWARD
        self._ids: dict[int, int] = {}
        # What is watched: the address of a weak reference and the storage id that it stands for; and how many each has.
        self._refs: dict[tuple[int, int], StorageWeakRef] = {}
        self._watched: Counter[int] = Counter()
        # Storages that the step did not make: while a weak reference lives, no other storage gets the address of one.
        self._there: dict[int, StorageWeakRef] = {}
        self._found_inf: set[int] = set()  # storages in which a gradient scaler notes an overflow
        self.active = True  # ops are being recorded
        # Storage id -> row after which it was gone (-1: before the first).
        self.died_after: dict[int, int] = {}

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return replaced(self, active=False)

    def know(self, x: torch.Tensor, storage: int, *, watch: bool = False) -> None:
        """Say which storage row stands for a tensor's storage, and whether to note when it is gone.

        What is to be watched counts only while the recorder is active: a warm-up's tensors are gone later, and
        their addresses come back.
        """
        if watch and not self.active:
            return
        self._ids[storage_key(x)] = storage
        ref = StorageWeakRef(x.untyped_storage())
        if watch:
            self._watch(ref, storage)
        else:
            self._there[storage] = ref

    def _watch(self, ref: StorageWeakRef, storage: int) -> None:
        self._watched[storage] += (ref.cdata, storage) not in self._refs
        self._refs[ref.cdata, storage] = ref

    def row(self, x: torch.Tensor, name: str, category: str, producer: int = -1) -> StorageRow:
        """A row for a tensor's storage. Memory of another device is not this trace's: it counts as 0 bytes (the
        optimizers keep their step counters on the CPU)."""
        row = storage_row(x, name, category, producer)
        return row if x.device.type == self.device else replace(row, nbytes=0)

    def id_of(self, x: torch.Tensor, row: StorageRow, *, watch: bool = False) -> int:
        """The storage row of a tensor; `row` is added if its storage is new, and watched if `watch` says so."""
        key = storage_key(x)
        if key not in self._ids:
            self.know(x, len(self.storages), watch=watch)
            self.storages.append(row)
        return self._ids[key]

    def known(self, x: torch.Tensor) -> int:
        """The storage row of a tensor that has one."""
        return self._ids[storage_key(x)]

    def look(self) -> None:
        """Note which watched storages are gone by now."""
        gone = set()
        addresses = map(itemgetter(0), self._refs)
        for key in list(itertools.compress(self._refs, map(storage_expired, addresses))):
            del self._refs[key]
            self._watched[key[1]] -= 1
            if not self._watched[key[1]]:
                del self._watched[key[1]]
                # What stands for an output that is a parameter's goes, and the parameter does not.
                if key[1] not in self._there:
                    gone.add(key[1])
                    self.died_after[key[1]] = len(self.rows) - 1
        if gone:  # the addresses may come back for other storages
            self._ids = {k: s for k, s in self._ids.items() if s not in gone}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks it of every gradient
        kwargs = kwargs or {}
        # The loss code is not answered: it would branch on a made-up value.
        if func is aten._local_scalar_dense.default and self.phase == OPTIMIZER:
            return self._answer(args[0])
        if self.phase == FORWARD:
            _refuse_strangers(args, kwargs)
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._found_inf = {storage_key(args[1])}
        if not self.active or not is_op(func):
            return self._call(func, args, kwargs)
        self.look()
        out = self._call(func, args, kwargs)
        self._record(func, args, kwargs, out)
        return out

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = list(tensors_in((args, kwargs)))
        if self.phase != OPTIMIZER or any(isinstance(x, FakeTensor) for x in given):
            return func(*args, **kwargs)
        # Numbers that come of nothing else are real, so that the optimizer can be told them; a new one is tried first.
        out = None if given else func(*args, **kwargs)
        if not all(x.dim() == 0 and x.device.type == "cpu" for x in given or tensors_in(out)):
            return func(*args, **kwargs) if given else out
        with disable_current_modes():
            return func(*args, **kwargs)

    def _answer(self, x: torch.Tensor) -> Any:
        """Return what the optimizer is told of a number."""
        known = x.constant if isinstance(x, FakeTensor) else x
        if storage_key(x) in self._found_inf:
            return 0.0
        if known is None:
            return 1.0 if x.is_floating_point() else 1
        with disable_current_modes():
            return known.item()

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        # What `torch.tensor(...)` gives `lift_fresh` is its own output.
        inputs = [] if func is aten.lift_fresh.default else list(tensors_in((args, kwargs)))
        outputs = list(tensors_in(out))
        reads = [self.id_of(x, self.row(x, "constant", OTHER)) for x in inputs]
        i = len(self.rows)
        name = f"{str(func).removeprefix('aten.').split('.')[0]}_{i}"
        created = []
        for x in outputs:
            if storage_key(x) not in self._ids:
                row = self.row(x, name, ACTIVATION, i)
                created.append(self.id_of(x, replace(row, nbytes=result_bytes(func, args, x)), watch=True))
        if self.phase == OPTIMIZER:  # which may put something else in the place of what it reads
            for s in self._there.keys() & reads:
                self._watch(self._there.pop(s), s)
        written = tensors_in(overwritten(func, args, kwargs))
        mutated = [self._ids[storage_key(x)] for x in written]
        flags = EAGER
        flags |= VIEW if outputs and not created and not mutated else 0
        flags |= RANDOM if torch.Tag.nondeterministic_seeded in func.tags else 0
        flags |= MUTATES if mutated else 0
        flags |= 0 if func._schema.returns else EFFECT
        self.rows.append(
            op_row(
                func,
                args,
                kwargs,
                out,
                inputs,
                name=name,
                phase=self.phase,
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(dict.fromkeys(created + mutated)),
                flags=flags,
            )
        )


def _refuse_strangers(args: Any, kwargs: Any) -> None:
    """Raise CaptureError if the loss code reads a parameter that the step does not have: its gradient would be lost."""
    given = list(tensors_in((args, kwargs)))
    strangers = [x for x in given if x.requires_grad and x.is_leaf and not isinstance(x, FakeTensor)]
    if strangers and is_fake():
        raise CaptureError(
            f"the loss reads a tensor of shape {tuple(strangers[0].shape)} that requires a gradient and is none of the "
            "model's and the loss's own: a trace is of copies. Give a module as the loss that has the tensor, or the "
            "model, as an attribute."
        )


def one_hot_as_run() -> contextlib.AbstractContextManager[None]:
    """In the body `one_hot` runs the ops that it runs on real tensors; of fake ones it makes a comparison."""
    original = functional.one_hot

    def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor) or num_classes < 1 or not tensor.numel():
            return original(tensor, num_classes)
        if tensor.device.type == "cpu":
            # Looked at, to refuse what is out of range; in 2.11 and 2.12 twice.
            _ = torch.aminmax(tensor) if release() >= (2, 13) else (tensor.min(), tensor.max())
        rows = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype, device=tensor.device)
        return rows.scatter_(-1, tensor.unsqueeze(-1), 1)

    return replaced(functional, one_hot=one_hot)


def is_op(func: Any) -> bool:
    """Return whether a dispatched function counts as an op: questions about a tensor and profiler marks do not."""
    return func.namespace not in ("prim", "prims", "profiler")
