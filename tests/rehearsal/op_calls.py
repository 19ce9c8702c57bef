"""Calls of ops on the null driver: what torch's own code allocates inside each, and what the rules tell of it.

Everything here runs in a process on the null driver (`tracer.rehearsal.run_on_null_driver`). Values mean nothing
there; what an op allocates by them (nonzero, masks as indices) is left out.
"""

from __future__ import annotations

import gc
import pickle
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rehearsal.op_families import FAMILIES, GPU, tensors
from tracer.costs.profiles import identity_here
from tracer.costs.rules_cuda.workspaces import rule_events
from tracer.costs.signature import Signature, of_call
from tracer.measure.isolated import calibrate
from tracer.measure.probes import CudaHistory, settle
from tracer.rehearsal.watch import null_driver
from tracer.torch_api import release
from traces.devices import device

NOT_COMPUTED = ("aten._unsafe_view.default", "aten.as_strided_.default", "aten._local_scalar_dense.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    signature: Signature
    created_bytes: int


class Watch(TorchDispatchMode):
    """Marks every call in the allocator's history; None: a call that nothing is to be said of."""

    def __init__(self, history: CudaHistory) -> None:
        super().__init__()
        self.history = history
        self.calls: list[_Call | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        if _is_view(func) or any(t.layout != torch.strided for t in given):
            return func(*args, **kwargs)
        failed: list[Exception] = []

        def run() -> Any:
            try:
                return func(*args, **kwargs)
            except Exception as error:
                failed.append(error)

        out = self.history.run(func, run)
        self.calls.append(None)
        if failed:
            raise failed[0]
        made = tensors(out)
        if all(t.layout == torch.strided and t.is_cuda for t in made):
            before = {_address(t) for t in given}
            created = {_address(t): t.untyped_storage().nbytes() for t in made}
            self.calls[-1] = _Call(
                signature=of_call(func, args, kwargs, out),
                created_bytes=sum(n for address, n in created.items() if address not in before),
            )
        return out


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in returned)
    return view or any(a.is_out for a in func._schema.arguments)


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def rows(gpu: str, families: list[str] | None = None, seed: int = 0) -> dict[str, Any]:
    """Each distinct call: `op`, `call`, `told` (null: no rule) and `found`, events in order; and the calls refused."""
    warnings.simplefilter("ignore")
    null_driver()  # tells it for which GPUs this torch was compiled
    warm_up()
    seen: dict[str, dict[str, Any]] = {}
    refused: dict[str, int] = {}
    gc.disable()  # what it frees would count as freed by the op that runs
    for family in families or FAMILIES:
        gc.collect()
        history = CudaHistory()
        watch = Watch(history)
        with history.recording():
            for call in FAMILIES[family](random.Random(seed)):
                try:
                    with watch:
                        call()
                except (RuntimeError, ValueError, NotImplementedError, IndexError, TypeError) as error:
                    text = f"{family}: {str(error).splitlines()[0][:120]}"
                    refused[text] = refused.get(text, 0) + 1
        for one, found in zip(watch.calls, history.finish().events, strict=True):
            if one is None or one.signature.key in seen or one.signature.target in NOT_COMPUTED:
                continue
            told = rule_events(one.signature, device(gpu), release())
            seen[one.signature.key] = {
                "family": family,
                "op": one.signature.target,
                "call": one.signature.key,
                "told": None if told is None else list(told),
                "found": list(settle(found, one.created_bytes)),
            }
    return {"rows": list(seen.values()), "refused": refused}


def warm_up() -> None:
    """Let the libraries take what they take once."""
    net = nn.Linear(64, 64, device=GPU)
    net(torch.zeros(64, 64, device=GPU)).sum().backward()
    torch.zeros(64, 64, device=GPU) @ torch.zeros(64, 64, device=GPU)


def of_signatures(gpu: str, path: str) -> dict[str, Any]:
    """The same for calls whose signatures are in a file, each made alone; what could not be made is in `refused`."""
    null_driver()
    wanted = pickle.loads(Path(path).read_bytes())
    warm_up()
    profile, skipped = calibrate(wanted, identity_here(GPU), GPU)
    found = []
    for call in wanted:
        key = call.signature.key
        if key in profile.entries:
            told = rule_events(call.signature, device(gpu), release())
            found.append({"op": call.signature.target, "call": key, "told": None if told is None else list(told),
                          "found": list(profile.entries[key].events)})  # fmt: skip
    return {"rows": found, "refused": skipped}
