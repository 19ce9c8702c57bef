"""Turn torch's own op samples into calls of aten's ops: what the CPU's rules tell of each, and what the profiler finds.

A program of its own (`python -m tests.torch.op_samples float32`), which prints one JSON object a distinct call. torch's
samples come with its test helpers, which freeze torch's global flags for the rest of the process, and which want
expecttest for the class that their test cases derive from; nothing here does, so that a stand-in will do.

Counts: every call of an op that has a rule, in forward and in backward, with gradients that are contiguous and that are
one number, expanded. Ignores: views, `out=` variants, sparse tensors, all but about 24 samples of each op.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.torch.cpu_calls import peak
from tracer.costs.rules_cpu.workspaces import COMPUTED, TABLE, cpu_events
from tracer.costs.signature import Signature, of_call
from tracer.costs.table import is_pointwise, short_name
from tracer.measure.probes import CpuMarker, cpu_allocations, settle

SAMPLES: Final = 24  # of an op, about
MOST_CALLS: Final = 20_000  # of one op's samples


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    signature: Signature
    created_bytes: int


class _Watch(TorchDispatchMode):
    """Marks every call of an op that has a rule; None: a call that nothing is to be said of."""

    def __init__(self, marker: CpuMarker) -> None:
        super().__init__()
        self.marker = marker
        self.calls: list[_Call | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _counts(func):
            return func(*args, **kwargs)
        given = {_address(t) for t in _tensors((args, kwargs))}
        self.calls.append(None)
        try:
            out = self.marker.run(func, lambda: func(*args, **kwargs))
        except Exception:
            self.marker.targets.append("refused")  # so that its number is not given again
            raise
        made = _tensors(out)
        if all(t.layout == torch.strided for t in (*made, *_tensors((args, kwargs)))):
            created = {_address(t): t.untyped_storage().nbytes() for t in made}
            self.calls[-1] = _Call(
                signature=of_call(func, args, kwargs, out),
                created_bytes=sum(n for address, n in created.items() if address not in given),
            )
        return out


def _counts(func: Any) -> bool:
    target = str(func)
    if not (short_name(target) in COMPUTED or TABLE.rule_for(target) or is_pointwise(target)):
        return False
    returned = func._schema.returns
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in returned)
    return not view and not any(a.is_out for a in func._schema.arguments)


def _tensors(tree: Any) -> list[Any]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else 0


def _op_samples() -> list[Any]:
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def _run(op: Any, samples: list[Any], marker: CpuMarker, *, backward: bool) -> list[_Call | None]:
    calls: list[_Call | None] = []
    for number, sample in enumerate(samples):
        watch = _Watch(marker)
        # Some samples are there to be refused, each in its own way.
        with watch, contextlib.suppress(Exception):
            out = sample.output_process_fn_grad(op(sample.input, *sample.args, **sample.kwargs))
            ends = [t for t in _tensors(out) if t.requires_grad and t.is_floating_point()]
            if backward and ends:
                ones = [torch.ones((), dtype=t.dtype).expand_as(t) for t in ends]
                torch.autograd.backward(ends, ones if number % 2 else [t.contiguous() for t in ones])
        calls += watch.calls
    return calls


def compared(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Each distinct call: `op`, `call`, `told` and `found` (peaks in bytes; told is null where the rule says nothing or
    does not leave what the op leaves), and the `sample` that made it."""
    seen: set[str] = set()
    for op in _op_samples():
        if dtype not in op.supported_dtypes("cpu"):
            continue
        backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        torch.manual_seed(0)
        try:
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=backward))
        except Exception:  # what makes samples may need another library
            continue
        calls: list[_Call | None] = []
        chosen = samples[:: max(1, len(samples) // SAMPLES)]
        events = cpu_allocations(
            lambda marker: calls.extend(_run(op, chosen, marker, backward=backward)),  # noqa: B023
            MOST_CALLS,
        )
        for call, found in zip(calls, events, strict=False):
            if call is None or call.signature.key in seen:
                continue
            seen.add(call.signature.key)
            told = cpu_events(call.signature)
            if told is None:
                continue
            yield {
                "op": call.signature.target,
                "call": call.signature.key,
                "sample": op.name,
                "told": peak(told) if sum(told) == call.created_bytes else None,
                "found": peak(settle(found, call.created_bytes)),
            }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in compared(getattr(torch, sys.argv[1])):
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
