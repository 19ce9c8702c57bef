"""The graph of a GPU, captured without one: attention, batch norm, statistics' types, and what the libraries keep."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from executor.plans import Settings, measure_plan  # noqa: E402
from executor.rewrite import rewrite  # noqa: E402
from executor.training.match import program_actions  # noqa: E402
from executor.training.module import apply_plan  # noqa: E402
from simulator.core.problem import Problem  # noqa: E402
from simulator.core.schedule import build as build_schedule  # noqa: E402
from tests.torch import small_nets  # noqa: E402
from tests.torch.steps import build_of, plan_of, random_actions, recompute_all, step_of  # noqa: E402
from tracer import trace  # noqa: E402
from tracer.capture.cuda.attention import CUDNN_DROPOUT_STEPS  # noqa: E402
from tracer.capture.cuda.gpu import gpu_kernels  # noqa: E402
from tracer.capture.passes.batch_norm import takes_cudnn  # noqa: E402
from tracer.costs.libraries import (  # noqa: E402
    SHARED_FROM,
    cublas_workspace_bytes,
    cublaslt_workspace_bytes,
    library_storages,
    rerun_workspaces,
)
from tracer.costs.rows import OpRow  # noqa: E402
from tracer.costs.rules_cuda.workspaces import rule_events  # noqa: E402
from tracer.costs.signature import of_call  # noqa: E402
from tracer.record.program import Program, program_of  # noqa: E402
from tracer.record.step import capture_step, trace_step  # noqa: E402
from tracer.step.step import load_spec  # noqa: E402
from tracer.torch_api import release  # noqa: E402
from traces.devices import device  # noqa: E402
from traces.errors import PlanError  # noqa: E402
from traces.records.device_profile import LibraryWorkspace  # noqa: E402
from traces.records.trace import BACKWARD, EFFECT, FORWARD, RANDOM, WORKSPACE, Trace  # noqa: E402
from traces.records.validate import validate  # noqa: E402

aten = torch.ops.aten
MIB = 2**20


class Attention(nn.Module):
    def __init__(self, heads: int, size: int, dtype: torch.dtype, **options: Any) -> None:
        super().__init__()
        self.heads, self.options = heads, options
        self.qkv = nn.Linear(heads * size, 3 * heads * size, dtype=dtype)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v, mask, **self.options)


def program(model: nn.Module, *inputs: Any, on: str = "h200") -> Program:
    batch = inputs[0] if len(inputs) == 1 else (inputs, None)
    step = step_of(model, batch, lambda y: y.float().sum(), None)
    return program_of(capture_step(step, device(on)))


def created(p: Program, target: str) -> list[tuple[str, tuple[int, ...]]]:
    """Type and shape of what the op of that name creates."""
    (row,) = [r for r in p.rows if r.target == target]
    i = p.rows.index(row)
    made = [p.storages[s] for s in row.writes if p.storages[s].producer == i]
    return [(s.dtype, s.shape) for s in made]


def flags(p: Program, target: str) -> int:
    return next(r.flags for r in p.rows if r.target == target)


def attention(on: str, dtype: torch.dtype, *, mask: bool = False, **options: Any) -> Program:
    model = Attention(4, 16, dtype, **options)
    inputs = [torch.randn(2, 100, 64, dtype=dtype)]
    if mask:
        inputs.append(torch.ones(2, 1, 1, 100, dtype=torch.bool))
    return program(model, *inputs, on=on)


def test_what_flash_attention_saves() -> None:
    p = attention("a100-40", torch.bfloat16)
    # The output, logsumexp as float32 [batch, heads, length], the generator's seed and offset, an empty debug mask.
    assert created(p, "aten._scaled_dot_product_flash_attention.default") == [
        ("bfloat16", (2, 4, 100, 16)), ("float32", (2, 4, 100)), ("uint64", (2,)), ("uint64", ()), ("bfloat16", (0,))
    ]  # fmt: skip
    assert (
        created(p, "aten._scaled_dot_product_flash_attention_backward.default")
        == [("bfloat16", (2, 4, 100, 16))] * 3
    )
    assert not flags(p, "aten._scaled_dot_product_flash_attention.default") & RANDOM


def test_what_efficient_attention_saves() -> None:
    p = attention("h200", torch.float32)
    # logsumexp is padded to a multiple of 32: 100 -> 128.
    assert created(p, "aten._scaled_dot_product_efficient_attention.default") == [
        ("float32", (2, 4, 100, 16)), ("float32", (2, 4, 128)), ("int64", ()), ("int64", ())
    ]  # fmt: skip
    assert not flags(p, "aten._scaled_dot_product_efficient_attention.default") & RANDOM


def test_what_cudnn_attention_saves() -> None:
    p = attention("h200", torch.bfloat16)
    assert created(p, "aten._scaled_dot_product_cudnn_attention.default") == [
        ("bfloat16", (2, 4, 100, 16)), ("float32", (2, 4, 100, 1)), ("int64", ()), ("int64", ())
    ]  # fmt: skip
    assert "aten._scaled_dot_product_cudnn_attention_backward.default" in [r.target for r in p.rows]


@pytest.mark.parametrize(
    ("on", "dtype", "name"),
    [
        ("a100-40", torch.bfloat16, "flash"),
        ("h200", torch.float32, "efficient"),
        ("t4", torch.float16, "efficient"),
    ],
)
def test_an_attention_with_dropout_is_random(on: str, dtype: torch.dtype, name: str) -> None:
    p = attention(on, dtype, dropout_p=0.1)
    assert flags(p, f"aten._scaled_dot_product_{name}_attention.default") & RANDOM


def test_math_attention_saves_the_scores_and_splits_its_dropout() -> None:
    p = attention("t4", torch.bfloat16, dropout_p=0.1)
    names = [r.target for r in p.rows]
    assert "aten._safe_softmax.default" in names
    assert "lowtide.dropout_mask.default" in names
    assert not [n for n in names if "flash" in n or "efficient" in n or "cudnn" in n]
    assert created(p, "aten._safe_softmax.default") == [("float32", (2, 4, 100, 100))]


def test_a_bool_mask_becomes_a_padded_bias_for_the_efficient_kernel() -> None:
    p = attention("a100-40", torch.bfloat16, mask=True)
    names = [r.target for r in p.rows]
    assert "aten._scaled_dot_product_efficient_attention.default" in names
    # 100 is no multiple of 8: where(...) makes [2, 1, 1, 100], padded to 104; the expanded one is a view.
    assert created(p, "aten.constant_pad_nd.default") == [("bfloat16", (2, 1, 1, 104))]
    assert created(p, "aten.where.self") == [("bfloat16", (2, 1, 1, 100))]


def test_the_cpu_s_flash_kernel_never_appears() -> None:
    for on, dtype in (("h200", torch.float32), ("t4", torch.bfloat16), ("a100-80", torch.float16)):
        assert not [r for r in attention(on, dtype).rows if "for_cpu" in r.target]


def test_attention_inside_torch_s_own_functions_and_by_a_kept_reference() -> None:
    kept, norm = functional.scaled_dot_product_attention, torch.batch_norm

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x, x, x, need_weights=False)[0]
            y = y.view(2, 16, 4, 16).transpose(1, 2)
            return kept(y, y, y, dropout_p=0.1)

    p = program(Both(), torch.randn(2, 16, 64))
    names = [r.target for r in p.rows]
    assert names.count("aten._scaled_dot_product_efficient_attention.default") == 2
    assert functional.scaled_dot_product_attention is kept  # put back
    assert torch.batch_norm is norm


def test_a_failed_capture_puts_torch_s_functions_back() -> None:
    kept, norm = functional.scaled_dot_product_attention, torch.batch_norm
    inside: list[Any] = []

    def fail() -> None:
        with gpu_kernels(device("h200")):
            inside.extend((functional.scaled_dot_product_attention, torch.batch_norm))
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert kept not in inside
    assert norm not in inside
    assert functional.scaled_dot_product_attention is kept
    assert torch.batch_norm is norm


def test_under_autocast_attention_gets_the_lower_precision() -> None:
    class Autocast(Attention):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                q = x.view(2, 100, 4, 16).transpose(1, 2) * self.qkv.weight[0, 0]
                return functional.scaled_dot_product_attention(q, q, q)

    p = program(Autocast(4, 16, torch.float32), torch.randn(2, 100, 64), on="a100-40")
    assert created(p, "aten._scaled_dot_product_flash_attention.default")[0] == ("bfloat16", (2, 4, 100, 16))


# ---------------------------------------------------------------------------------------------------------------------
# Batch norm


class Norms(nn.Module):
    """conv -> batch norm -> relu, the norm used twice."""

    def __init__(self, channels: int = 6, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels, **options)
        self.again = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.conv(x)))
        return functional.relu(self.norm(self.again(x)))


@pytest.mark.parametrize(
    ("dtype", "shape", "options", "wanted"),
    [
        (torch.float32, (2, 6, 4, 4), {}, True),
        (torch.float64, (2, 6, 4, 4), {}, True),
        (torch.float16, (2, 6, 4, 4), {}, True),  # with float32 weights
        (torch.bfloat16, (2, 6, 4, 4), {}, False),
        (torch.float32, (2, 6), {}, False),
        (torch.float32, (2, 6, 4), {}, True),
        (torch.float32, (2, 6, 4, 4), {"enabled": False}, False),
        (torch.float32, (880_802, 6, 1, 1), {}, False),
        (torch.float32, (2, 6, 4, 4), {"weight": None, "bias": None}, False),
        (torch.float32, (2, 6, 4, 4), {"mean": None, "var": None}, True),
        (torch.float32, (2, 6, 4, 4), {"mean": None}, False),
        (torch.float16, (2, 6, 4, 4), {"weight": torch.empty(6, dtype=torch.float16)}, False),
    ],
)
def test_when_torch_takes_cudnn(
    dtype: torch.dtype, shape: tuple[int, ...], options: dict[str, Any], wanted: bool
) -> None:
    x = torch.empty(shape, dtype=dtype, device="meta")
    given: dict[str, Any] = dict.fromkeys(("weight", "bias", "mean", "var"), torch.empty(6)) | options
    assert takes_cudnn(x, eps=1e-5, **given) is wanted


def test_a_batch_norm_by_cudnn_copies_a_gradient_that_lies_otherwise() -> None:
    """And its own lies as the input does, so that the convolution before it copies nothing."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.norm(self.conv(x)).permute(0, 2, 3, 1)).square().sum()

    given_back = {}
    for layout in (torch.contiguous_format, torch.channels_last):
        model, x = Net().to(memory_format=layout), torch.randn(2, 3, 10, 10).to(memory_format=layout)
        ops = trace(model, x, optimizer="sgd", target="h100", profile=False).ops
        rows = {t.split(".")[1]: e for t, e in zip(ops.target, ops.events, strict=True) if e}
        names = ("cudnn_batch_norm_backward", "convolution_backward")
        given_back[layout] = [[n for n in rows[name] if n < 0] for name in names]
    copy = -4 * 2 * 8 * 8 * 8
    assert given_back == {torch.contiguous_format: [[copy], []], torch.channels_last: [[], []]}


def test_what_a_batch_norm_by_cudnn_is() -> None:
    p = program(Norms(), torch.randn(2, 3, 8, 8))
    rows = [r for r in p.rows if r.target == "aten.cudnn_batch_norm.default"]
    assert len(rows) == 2
    assert len([r for r in p.rows if r.target == "aten.cudnn_batch_norm_backward.default"]) == 2
    for row in rows:
        i = p.rows.index(row)
        made = [p.storages[s] for s in row.writes if p.storages[s].producer == i]
        # Output, mean and inverse deviation, and the reserve, of which nothing is known here.
        assert [s.shape for s in made] == [(2, 6, 8, 8), (6,), (6,), (0,)]
        written = [p.storages[s].name for s in row.writes if p.storages[s].producer < 0]
        assert written == ["norm.running_mean", "norm.running_var"]
        assert not row.flags  # it may run again, without statistics to write
    copies = [r for r in p.rows if r.target == "aten.copy_.default"]
    assert len(copies) == 1  # the number of batches
    assert not [r for r in p.rows if "lowtide" in r.target]


def test_a_reader_of_the_statistics_does_not_run_again() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = self.norm.running_mean * 2
            y = self.norm(x) * before.view(1, 3, 1, 1)
            return y * self.norm.running_var.view(1, 3, 1, 1)

    p = program(Reader(), torch.randn(2, 3, 8, 8))
    assert flags(p, "aten.cudnn_batch_norm.default") == 0
    reading = [r for r in p.rows if set(r.reads) & {2, 3} and r.phase == "forward"]  # weight, bias, mean, var
    others = [r for r in reading if r.target not in ("aten.cudnn_batch_norm.default", "aten.view.default")]
    assert len(others) == 2
    assert all(r.flags & EFFECT for r in others)


@pytest.mark.parametrize(
    ("dtype", "target", "wanted"),
    [
        (torch.bfloat16, "h200", "aten._native_batch_norm_legit_functional.default"),
        (torch.float32, "cpu", "aten._native_batch_norm_legit_functional.default"),
        (torch.float32, "t4", "aten.cudnn_batch_norm.default"),
    ],
)
def test_other_batch_norms_keep_torch_s_own_kernel(dtype: torch.dtype, target: str, wanted: str) -> None:
    step = step_of(Norms().to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype), lambda y: y.sum(), None)
    p = program_of(capture_step(step, device(target) if target != "cpu" else None))
    assert wanted in [r.target for r in p.rows]
    assert any("cudnn" in r.target for r in p.rows) is ("cudnn" in wanted)


def test_a_batch_norm_in_evaluation_is_left_alone() -> None:
    model = Norms()
    model.norm.eval()
    p = program(model, torch.randn(2, 3, 8, 8))
    assert not [r for r in p.rows if "cudnn" in r.target]


@pytest.fixture
def cudnn_on_the_cpu() -> Iterator[list[bool]]:
    """Gives cuDNN's batch norm a CPU kernel that behaves as it does; yields whether each call had statistics."""
    calls: list[bool] = []

    def forward(x, weight, bias, mean, var, training, momentum, eps):  # type: ignore[no-untyped-def]
        calls.append(mean is not None)
        out = aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
        return (*out, x.new_empty(0, dtype=torch.uint8))

    def backward(x, grad, weight, mean, var, saved_mean, saved_var, eps, reserve):  # type: ignore[no-untyped-def]
        return aten.native_batch_norm_backward(
            grad, x, weight, None, None, saved_mean, saved_var, True, eps, [True, True, True]
        )

    library = torch.library.Library("aten", "IMPL")
    library.impl("cudnn_batch_norm", forward, "CPU")
    library.impl("cudnn_batch_norm_backward", backward, "CPU")
    yield calls
    library._destroy()


@pytest.mark.parametrize("seed", range(4))
def test_recomputed_batch_norms_update_their_statistics_once(seed: int, cudnn_on_the_cpu: list[bool]) -> None:
    torch.manual_seed(seed)
    model = Norms()
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3, 8, 8)
    p = program(model, x)
    trace = p.trace()
    actions = recompute_all(Problem(trace)) if seed == 0 else random_actions(trace, random.Random(seed))
    local = program_actions(plan_of_program(trace, p, *actions), p)
    made = rewrite(p, build_schedule(Problem(p.trace()), local))
    for _ in range(2):
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        mine = [parameters[n] for n in p.captured.parameters]
        with torch.no_grad():
            given = [*mine, *(buffers[n] for n in p.captured.buffers), x]
            (output,), saved = made.forward(given)
            gradients, _ = made.backward([*saved, torch.ones_like(output)])
        for parameter, g in zip(mine, gradients, strict=True):
            parameter.grad = g if parameter.grad is None else parameter.grad + g
        twin(x).sum().backward()
    for (name, a), (_, b) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    if seed == 0:
        # Twice a step with statistics, and twice a step again, without.
        assert cudnn_on_the_cpu == [True, True, False, False] * 2


def plan_of_program(trace: Trace, p: Program, *actions: Any) -> Any:
    from dataclasses import replace

    meta = replace(
        trace.meta, graph_fingerprint=p.fingerprint(), structure_fingerprint=p.fingerprint(sizes=False)
    )
    return plan_of(replace(trace, meta=meta), *actions)


# ---------------------------------------------------------------------------------------------------------------------
# Types of results, libraries, the whole step


def test_statistics_of_a_norm_are_float32_on_a_gpu() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.GroupNorm(2, 4)).to(torch.bfloat16)
    x = torch.randn(2, 4, 8, dtype=torch.bfloat16)
    p = program(model, x)
    assert [d for d, _ in created(p, "aten.native_layer_norm.default")] == ["bfloat16", "float32", "float32"]
    step = step_of(model, x, lambda y: y.sum(), None)
    cpu = program_of(capture_step(step))
    assert [d for d, _ in created(cpu, "aten.native_layer_norm.default")] == ["bfloat16"] * 3


def test_what_cublas_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps(name: str, release: tuple[int, int] = (2, 13)) -> tuple[int, int]:
        return cublas_workspace_bytes(device(name), release), cublaslt_workspace_bytes(device(name), release)

    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    assert keeps("h200") == keeps("h200", (2, 12)) == (32 * MIB, 0)
    assert keeps("h200", (2, 11)) == (32 * MIB, MIB)
    blackwell = replace(device("h200"), sm=(10, 0))
    assert [cublas_workspace_bytes(blackwell, r) for r in ((2, 11), (2, 12))] == [8_519_680, 32 * MIB]
    for name in ("a100-40", "l40s", "t4"):
        assert (keeps(name), keeps(name, (2, 11))) == ((8_519_680, 0), (8_519_680, MIB))
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    assert keeps("h200", (2, 11)) == (32 * MIB, 4 * MIB)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert keeps("h200", (2, 11)) == (128 * 1024, 128 * 1024)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert keeps("h200") == ((4096 * 2 + 16 * 8) * 1024, 0)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert keeps("h200", (2, 11)) == (0, 0)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "nonsense")
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE")
    for told, own in (("0", MIB), ("1", 0), ("", 0)):
        monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", told)
        assert keeps("t4") == (8_519_680, own)
        assert keeps("t4", (2, 11)) == (8_519_680, 0 if told == "1" else MIB)


def test_where_cublas_and_cublaslt_keep_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear layer with a bias goes to cuBLASLt in forward, its gradients to cuBLAS: what the wheels allocate."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", raising=False)
    rows = [
        OpRow(name="a", target="aten.addmm.default", phase=FORWARD),
        OpRow(name="b", target="aten.mm.default", phase=BACKWARD),
    ]

    def kept(release: tuple[int, int]) -> list[int]:
        return [s.nbytes // MIB for s in library_storages(rows, device("h200"), release)]

    assert (kept((2, 11)), kept((2, 12)), kept((2, 15))) == ([32, 1, 32], [32, 32], [])
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert kept((2, 15)) == [32, 32]
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")
    assert (kept((2, 11)), kept((2, 12))) == ([32, 1, 32], [1, 32])


@pytest.mark.parametrize(
    ("release", "product", "biased", "summed"), [((2, 14), 0, 0, 0), ((2, 15), 32, 1, 32)]
)
def test_what_cublas_gets_for_one_call(
    release: tuple[int, int], product: int, biased: int, summed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From torch 2.15 on a matrix product gets a buffer and gives it back: what the wheel does on the null driver."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLAS_WORKSPACE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    a, b, bias, whole = (torch.empty(shape) for shape in ((256, 512), (512, 384), (384,), (256, 384)))
    out = 4 * 256 * 384
    for func, args, buffer in (
        (torch.ops.aten.mm.default, (a, b), product),
        (torch.ops.aten.addmm.default, (bias, a, b), biased),
        (torch.ops.aten.addmm.default, (whole, a, b), summed),
    ):
        events = rule_events(of_call(func, args, {}, func(*args)), device("h100"), release)
        assert events is not None
        assert tuple(e for e in events if e) == ((out, buffer * MIB, -buffer * MIB) if buffer else (out,))


def test_what_a_rerun_linear_layer_keeps_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 gives cuBLASLt 1 MiB in each thread that runs an addmm; backward does only if a plan reruns one."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", raising=False)
    addmm = OpRow(name="a", target="aten.addmm.default", phase=FORWARD)
    bmm = OpRow(name="b", target="aten.bmm.default", phase=FORWARD)
    mm = OpRow(name="c", target="aten.mm.default", phase=BACKWARD)
    backward_addmm = OpRow(name="d", target="aten.addmm.default", phase=BACKWARD)
    h200 = device("h200")
    assert rerun_workspaces([addmm, bmm, mm], h200, (2, 11)) == {
        "aten.addmm.default": MIB,
        "aten.bmm.default": 0,
    }
    assert rerun_workspaces([addmm, mm], h200, (2, 12)) == {"aten.addmm.default": 0}  # shares cuBLAS's
    assert rerun_workspaces([addmm, backward_addmm], h200, (2, 11)) == {
        "aten.addmm.default": 0
    }  # there anyway
    assert rerun_workspaces([addmm, mm], device("cpu"), (2, 11)) == {}


def test_libraries_workspaces_know_the_op_that_brings_them() -> None:
    draft = trace_step(load_spec(small_nets.spec("mlp")), device("h200"))
    t = draft.trace
    sts = t.storages
    uses = {
        sts.name[s]: (sts.first_forward_use[s], sts.first_backward_use[s])
        for s in range(len(sts))
        if sts.category[s] == WORKSPACE
    }
    forward = t.ops.target.index("aten.addmm.default")
    backward = next(
        i
        for i, (target, phase) in enumerate(zip(t.ops.target, t.ops.phase, strict=True))
        if phase == BACKWARD and target == "aten.mm.default"
    )
    assert uses["cuBLAS workspace (forward)"] == (forward, -1)
    assert uses["cuBLAS workspace (backward)"] == (-1, backward)
    measured = (
        LibraryWorkspace(nbytes=32 * MIB, op="aten.addmm.default"),
        LibraryWorkspace(nbytes=32 * MIB, op="aten.mm.default"),
        LibraryWorkspace(nbytes=5, op="aten.nobody.default"),
    )
    sts = draft.finish(workspaces=measured).storages
    assert (sts.first_forward_use[-3:], sts.first_backward_use[-3:]) == (
        (forward, -1, -1),
        (-1, backward, -1),
    )


def workspaces(trace: Trace) -> dict[str, int]:
    sts = trace.storages
    return {n: b for n, b, c in zip(sts.name, sts.nbytes, sts.category, strict=True) if c == WORKSPACE}


def test_only_a_step_that_multiplies_matrices_keeps_cublas_s_buffers() -> None:
    mlp = load_spec(small_nets.spec("mlp"))
    own = {} if release() >= SHARED_FROM else {"cuBLASLt workspace (forward)": MIB}
    assert workspaces(trace_step(mlp, device("a100-40")).trace) == {
        "cuBLAS workspace (forward)": 8_519_680,
        **own,
        "cuBLAS workspace (backward)": 8_519_680,
    }
    assert workspaces(trace_step(mlp, device("cpu")).trace) == {}

    def make() -> Any:
        model = nn.Conv1d(3, 4, 3)
        return model, torch.randn(2, 3, 8), lambda y: y.sum(), torch.optim.SGD(model.parameters())

    assert workspaces(trace_step(build_of(make), device("h200")).trace) == {}


def test_a_recording_on_a_gpu_has_the_optimizer_that_torch_takes_of_real_parameters() -> None:
    """Of fake ones torch takes the loop, and the measured step, which takes foreach, would have other ops."""
    asked: list[tuple[str, str]] = []

    class Build:
        policy: ClassVar[dict[str, Any]] = {}

        def __call__(self, on: str, *, optimizer_as_on: str = "") -> Any:
            asked.append((on, optimizer_as_on))
            raise LookupError

    build: Any = Build()
    for target, on in (("h200", "cuda"), ("h200", "cuda:1"), ("h200", "cpu"), ("cpu", "cpu")):
        with pytest.raises(LookupError):
            trace_step(build, device(target), device=on)
    assert asked == [("cuda", "cuda"), ("cuda:1", "cuda"), ("cpu", "cuda"), ("cpu", "cpu")]


def test_step_counters_of_an_optimizer_stay_on_the_cpu() -> None:
    build = load_spec(small_nets.spec("residual"))  # AdamW
    here, there = (trace_step(build, device(name)).trace.storages for name in ("cpu", "h200"))
    assert (
        sum(n == 4 and c == "optimizer state" for n, c in zip(here.nbytes, here.category, strict=True)) == 7
    )
    assert not [
        1 for n, c in zip(there.nbytes, there.category, strict=True) if n == 4 and c == "optimizer state"
    ]


def test_the_header_says_what_the_graph_is_for() -> None:
    build = load_spec(small_nets.spec("residual"))
    trace = trace_step(build, device("h200")).trace
    assert (trace.meta.device, trace.meta.target, trace.meta.mode) == ("cuda", "H200", "fake")
    assert trace_step(build, device("cpu")).trace.meta.graph_fingerprint != trace.meta.graph_fingerprint


def test_a_plan_for_a_gpu_is_refused_on_the_cpu(tmp_path: Any) -> None:
    trace = trace_step(load_spec(small_nets.spec("residual")), device("h200")).trace
    plan = plan_of(trace)
    planned = apply_plan(small_nets.Residual(), plan)
    with pytest.raises(PlanError, match="for the graph that H200 runs"):
        planned(torch.randn(4, 3, 16, 16))
    path = tmp_path / "plan.json"
    plan.save(path)
    with pytest.raises(PlanError, match="--device cuda, or trace again without --target"):
        measure_plan(path, Settings(device="cpu"), lambda _: None)


# From this release on, cuDNN's attention takes only such dropout as is a multiple of 1/16.
STEPS = release() >= CUDNN_DROPOUT_STEPS


@pytest.mark.parametrize(
    ("model", "options", "on", "kernel"),
    [
        ("bert-tiny", {}, "h200", "efficient"),
        ("bert-tiny", {"dtype": "bfloat16"}, "h200", "flash" if STEPS else "cudnn"),  # its dropout is 0.1
        ("bert-tiny", {"dtype": "bfloat16", "dropout": 0.0}, "h200", "cudnn"),
        ("gpt2-tiny", {"dtype": "bfloat16"}, "a100-40", "flash"),
        ("llama-tiny", {"dtype": "bfloat16"}, "t4", None),
        ("bert-tiny", {"dtype": "bfloat16", "dropout": 0.0}, "a100-40", "flash"),
        pytest.param(
            "vit-tiny", {"dtype": "bfloat16", "image_size": 32}, "a100-40", "flash", marks=pytest.mark.slow
        ),
        pytest.param("t5-tiny", {}, "t4", "efficient", marks=pytest.mark.slow),
    ],
)
def test_models_by_name(model: str, options: dict[str, Any], on: str, kernel: str | None) -> None:
    pytest.importorskip("transformers")
    trace = trace_step(load_spec(model, {"batch_size": 2, **options}), device(on)).trace
    validate(trace)
    kernels = {t.split("dot_product_")[1].split("_")[0] for t in trace.ops.target if "scaled_dot" in t}
    assert kernels == ({kernel} if kernel else set())


def test_a_norm_that_torch_s_own_code_normalises_by_is_cudnn_s_too() -> None:
    """`torch.instance_norm` calls the batch norm below Python, over statistics of its own that cuDNN then writes."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True, track_running_stats=True))
    p = program(model, torch.randn(2, 3, 8, 8))
    (row,) = [r for r in p.rows if r.target == "aten.cudnn_batch_norm.default"]
    assert not [r for r in p.rows if "native_batch_norm" in r.target]
    written = [s for s in row.writes if p.storages[s].producer < p.rows.index(row)]
    assert [p.storages[s].shape for s in written] == [(12,), (12,)]
    assert all(p.storages[s].producer >= 0 for s in written)


@pytest.mark.parametrize("asked", [torch.float32, torch.float16])
@pytest.mark.parametrize("where", [torch, functional, torch.Tensor])
def test_a_softmax_of_halves_to_float32_is_one_kernel(where: Any, asked: torch.dtype) -> None:
    """What models write for their scores in float16: torch's CUDA kernel reads halves and writes float32."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 64, dtype=torch.float16)

        def forward(self, x: torch.Tensor) -> Any:
            return where.softmax(self.proj(x), dim=-1, dtype=asked)

    p = program(Scores(), torch.empty(32, 64, dtype=torch.float16))
    assert "aten._to_copy.default" not in [r.target for r in p.rows if r.phase == FORWARD]
    assert created(p, "aten._softmax.default") == [(str(asked).removeprefix("torch."), (32, 64))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_rms_norm_is_one_kernel_as_on_a_gpu(dtype: torch.dtype) -> None:
    """What the wheels dispatch on the null driver; of CPU tensors torch takes it apart, and saves more."""
    p = program(
        nn.Sequential(nn.RMSNorm(64, dtype=dtype)), torch.empty(32, 64, dtype=dtype, requires_grad=True)
    )
    targets = [r.target for r in p.rows]
    assert targets.count("aten._fused_rms_norm.default") == 1
    assert targets.count("aten._fused_rms_norm_backward.default") == 1
    assert "aten.rsqrt.default" not in targets
    name = str(dtype).removeprefix("torch.")
    assert created(p, "aten._fused_rms_norm.default") == [(name, (32, 64)), ("float32", (32, 1))]
    # A weight of another type is torch's reason to take it apart on a GPU too.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says so, once
        mixed = program(nn.Sequential(nn.RMSNorm(64, dtype=torch.float64)), torch.empty(32, 64, dtype=dtype))
    assert "aten.rsqrt.default" in [r.target for r in mixed.rows]
