"""CUDA's lists of what autocast casts, on CPU tensors: the names, the policies, and the graph of a GPU's step."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tests.torch.steps import build_of  # noqa: E402
from tracer.precision import autocast_lists as lists  # noqa: E402
from tracer.precision.policy import Autocast  # noqa: E402
from tracer.record.step import trace_step  # noqa: E402
from tracer.step.step import load_spec  # noqa: E402
from tracer.torch_api import release, storage_expired  # noqa: E402
from traces.devices import device  # noqa: E402
from traces.records.trace import Trace  # noqa: E402

BF16 = Autocast(dtype="bfloat16", lists="cuda")


def test_the_names_are_those_that_torch_has_registered_for_cuda() -> None:
    """torch's registrations exist without CUDA. The lists ignore cuDNN's ops, which no model calls by name (a build
    with CUDA has one more of them), and dimensions by name."""
    mine = {
        *lists.LOWER,
        *lists.FLOAT32,
        *lists.FLOAT32_RESULT,
        *lists.FLOAT32_NORM,
        *lists.WIDEST,
        lists.REFUSED,
    }
    cudnn = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"}
    theirs = {n for n in lists.listed("AutocastCUDA") if "dimname" not in n.lower() and "names" not in n}
    later = {"rms_norm": (2, 12), "linalg_matrix_sqrth": (2, 14)}
    assert {n for n in mine if release() >= later.get(n, release())} == theirs - cudnn


def test_torch_s_own_lists_are_back_afterwards() -> None:
    before = lists.listed("AutocastCPU")
    x = torch.randn(4, 8)
    norm = nn.LayerNorm(8)
    with BF16.region():
        assert norm(functional.linear(x, torch.randn(8, 8))).dtype == torch.float32
    assert lists.listed("AutocastCPU") == before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(functional.linear(x, torch.randn(8, 8))).dtype == torch.bfloat16


y16 = torch.randn(4, 8).bfloat16()
x32 = torch.randn(4, 8)
POLICIES: list[tuple[str, Any, torch.dtype]] = [
    ("linear", lambda: functional.linear(x32, torch.randn(8, 8)), torch.bfloat16),
    ("einsum of a list", lambda: torch.einsum("ij,kj->ik", x32, x32), torch.bfloat16),
    ("layer norm", lambda: functional.layer_norm(y16, (8,)), torch.float32),
    ("power", lambda: y16.pow(2), torch.float32),
    ("softmax", lambda: functional.softmax(y16, -1), torch.float32),
    ("softmax with a type", lambda: functional.softmax(y16, -1, dtype=torch.bfloat16), torch.bfloat16),
    ("sum", lambda: y16.sum(), torch.float32),
    ("sum over a dimension", lambda: y16.sum(0), torch.float32),
    ("norm", lambda: y16.norm(dim=1), torch.float32),
    ("addcmul of one type", lambda: torch.addcmul(y16, y16, y16), torch.bfloat16),
    ("addcmul of two", lambda: torch.addcmul(y16, y16, x32), torch.float32),
    ("not listed: add", lambda: y16 + y16, torch.bfloat16),
    ("double is left alone", lambda: x32.double() @ x32.double().T, torch.float64),
    (
        "only the CPU's: padding",
        lambda: functional.pad(y16, (1, 1), mode="reflect"),
        torch.bfloat16,
    ),
]


@pytest.mark.parametrize(("call", "dtype"), [p[1:] for p in POLICIES], ids=[p[0] for p in POLICIES])
def test_a_policy(call: Any, dtype: torch.dtype) -> None:
    with BF16.region():
        assert call().dtype == dtype


def test_the_last_argument_is_cast_first() -> None:
    """As torch's wheels do it, whose compiler evaluates the casts of a call from the right."""
    order: list[tuple[int, ...]] = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default:
                order.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    x, weight, bias = torch.randn(2, 3), torch.randn(4, 3), torch.randn(4)
    for call in (
        lambda: functional.linear(x, weight, bias),
        lambda: functional.linear(bias=bias, weight=weight, input=x),
    ):
        order.clear()
        with Casts(), BF16.region():
            call()
        assert order == [(4,), (4, 3), (2, 3)]
    order.clear()
    with Casts(), BF16.region():
        lists.lowered((x, weight), {"attn_mask": bias})
    assert order == [(4,), (4, 3), (2, 3)]


def test_binary_cross_entropy_is_refused_as_on_cuda() -> None:
    with BF16.region(), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        functional.binary_cross_entropy(torch.rand(4), torch.rand(4))


def test_a_weight_used_twice_is_cast_once_outside_a_capture_too() -> None:
    """The gradient of the shared cast is summed in bfloat16: exactly what one cast made by hand gives."""
    weight = nn.Parameter(torch.randn(8, 8))
    with BF16.region():
        functional.linear(functional.linear(x32, weight), weight).float().sum().backward()
    assert weight.grad is not None
    by_hand = nn.Parameter(weight.detach().clone())
    once = by_hand.bfloat16()
    functional.linear(functional.linear(x32.bfloat16(), once), once).float().sum().backward()
    assert by_hand.grad is not None
    assert torch.equal(weight.grad, by_hand.grad)


class Casts(TorchDispatchMode):
    """Watches the storages of copies in another type."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.made.append(StorageWeakRef(out.untyped_storage()))
        return out


def test_the_cast_of_a_weight_goes_when_autocast_ends() -> None:
    """As in torch: at the end of the outermost region, and not when the lists end."""
    weight = nn.Parameter(torch.randn(8, 8))
    with lists.cuda_lists(), Casts() as casts:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                functional.linear(x32, weight)
            there = [not storage_expired(ref.cdata) for ref in casts.made]
        gone = [storage_expired(ref.cdata) for ref in casts.made]
    assert there == [True, False]  # the weight is cast first; what is no leaf goes when its op has run
    assert gone == [True, True]


def types(trace: Trace, target: str) -> set[str]:
    return {
        trace.storages.dtype[trace.ops.writes[i][0]]
        for i, t in enumerate(trace.ops.target)
        if t == target and trace.ops.writes[i]
    }


def test_the_graph_for_a_gpu_has_cuda_s_casts_and_the_cpu_s_its_own() -> None:
    spec = load_spec("bert-tiny", {"batch_size": 2, "seq_len": 16, "amp": "bfloat16"})
    gpu, cpu = trace_step(spec, device("h200")).trace, trace_step(spec, device("cpu")).trace
    assert types(gpu, "aten.native_layer_norm.default") == {"float32"}
    assert "bfloat16" in types(cpu, "aten.native_layer_norm.default")
    assert types(gpu, "aten.addmm.default") == {"bfloat16"}


def test_attention_for_a_gpu_is_chosen_by_the_type_after_autocast() -> None:
    """Float32 query, key and value go to the memory-efficient kernel; cast to bfloat16, to flash attention."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x * self.scale
            return functional.scaled_dot_product_attention(q, q, q)

    def kernel(amp: str) -> list[str]:
        spec = build_of(lambda: (Attention(), torch.randn(2, 4, 32, 64), lambda y: y.sum(), None))
        object.__setattr__(spec, "policy", {"amp": amp} if amp else {})
        trace = trace_step(spec, device("h200")).trace
        return [t for t in trace.ops.target if "attention" in t and "backward" not in t]

    (plain,), (cast,) = kernel(""), kernel("bfloat16")
    assert "efficient" in plain
    assert "flash" in cast or "cudnn" in cast


def test_float16_softmax_needs_no_copy_in_float32() -> None:
    """On CUDA one kernel reads float16 and writes float32."""

    def make() -> tuple[Any, Any, Any, Any]:
        return nn.Linear(8, 8), torch.randn(4, 8), lambda y: functional.log_softmax(y, -1).sum(), None

    spec = build_of(make)
    object.__setattr__(spec, "policy", {"amp": "float16"})
    trace = trace_step(spec, device("h200")).trace
    i = trace.ops.target.index("aten._log_softmax.default")
    assert [trace.storages.dtype[s] for s in trace.ops.reads[i]] == ["float16"]
    assert types(trace, "aten._log_softmax.default") == {"float32"}
