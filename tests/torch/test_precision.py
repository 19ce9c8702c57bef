"""Dtype policies: autocast, gradient scaling and TF32, from the option to the planned step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import executor.measuring as measuring
import executor.verifying as module
from executor import fit
from executor.measuring import Job, perform
from executor.training.module import apply_plan
from executor.verifying import KINDS, SCALER, verify
from simulator.core.problem import Problem
from tests.torch import small_nets
from tests.torch.steps import build_of, measured, random_actions, recompute_all, recorded
from tracer.measure.step import measure
from tracer.precision.policy import Autocast, ambient, parse_policy
from tracer.record.program import program_of
from tracer.record.step import capture_step
from tracer.step.loop import run_step
from tracer.step.step import BuildStep, load_spec
from traces.errors import PlanError, SpecError, TraceError
from traces.records.plan import Plan
from traces.records.trace import Trace

TIED = small_nets.spec("tied")
MLP = small_nets.spec("mlp")
OVERFLOWING = small_nets.spec("overflowing")
BF16 = {"amp": "bfloat16"}


def all_recomputed(trace: Trace) -> Plan:
    return Plan(meta=trace.meta, actions=recompute_all(Problem(trace)))


def casts(trace: Trace, phase: str) -> list[int]:
    return [
        i for i, t in enumerate(trace.ops.target)
        if t == "aten._to_copy.default" and trace.ops.phase[i] == phase
    ]  # fmt: skip


# The options


def test_options_are_recorded_under_their_full_names_and_build_the_same_step_again() -> None:
    residual = small_nets.spec("residual")
    spec = load_spec(residual, {"amp": "BF16", "batch_size": 2})
    assert spec.options["amp"] == "bfloat16"
    trace = recorded(spec).trace
    assert trace.meta.options == spec.options
    assert (trace.meta.amp, trace.meta.dtype) == ("bfloat16", "float32")
    again = recorded(load_spec(trace.meta.model, dict(trace.meta.options))).trace
    assert again.meta.fingerprint == trace.meta.fingerprint
    other = recorded(load_spec(residual, {"batch_size": 2})).trace
    assert trace.meta.fingerprint != other.meta.fingerprint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"amp": "float32"}, "--amp 'float32' is unknown; known are bfloat16"),
        ({"amp": "bfloat16", "dtype": "bfloat16"}, "keeps the weights in float32"),
    ],
)
def test_policies_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load_spec("resnet18", options)
    with pytest.raises(SpecError, match=words):
        load_spec(MLP, options)


def test_a_policy_is_not_the_model_s_business() -> None:
    assert parse_policy({"batch_size": 2, "amp": "fp16"}) == {"amp": "float16"}


def test_float16_gets_a_scaler_and_bfloat16_none() -> None:
    assert load_spec(MLP, {"amp": "float16"})().scaler is not None
    assert load_spec(MLP, BF16)().scaler is None
    assert load_spec(MLP)().autocast.dtype == ""


def test_a_build_function_asks_for_a_policy_and_the_option_goes_before_it(tmp_path: Path) -> None:
    step = load_spec(OVERFLOWING)()
    assert step.autocast == Autocast(dtype="float16")
    assert step.scaler is not None
    assert load_spec(OVERFLOWING, BF16)().autocast.dtype == "bfloat16"
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "def build():\n"
        "    step = {'model': torch.nn.Linear(2, 2), 'batch': torch.ones(1, 2), 'loss': lambda y: y.sum()}\n"
        "    return {**step, 'amp': 'int8'}\n"
    )
    with pytest.raises(SpecError, match=r"own.py:build: amp is 'int8' and must be"):
        load_spec(str(file))()


def test_a_build_function_that_names_amp_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "def build(amp='none'):\n"
        "    print(amp)\n"
        "    return torch.nn.Linear(2, 2), torch.ones(1, 2), lambda y: y.sum(), None\n"
    )
    load_spec(str(file), BF16)()
    load_spec(str(file))()
    assert capsys.readouterr().out.split() == ["bfloat16", "none"]


# The step


def test_model_and_loss_run_under_autocast_and_backward_does_not() -> None:
    seen: dict[str, str] = {}

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen["model"] = ambient("cpu").dtype
            return super().forward(x)

    def loss(y: torch.Tensor) -> torch.Tensor:
        seen["loss"], seen["output"] = ambient("cpu").dtype, str(y.dtype)
        y.register_hook(lambda g: seen.update(backward=ambient("cpu").dtype))
        return y.float().sum()

    plain = load_spec(MLP)()
    step = replace(
        plain, model=Watched(8, 4), args=(torch.randn(2, 8),), loss=loss, optimizer=None,
        autocast=Autocast(dtype="bfloat16"),
    )  # fmt: skip
    run_step(step, step.model, None)
    assert seen == {"model": "bfloat16", "loss": "bfloat16", "output": "torch.bfloat16", "backward": ""}


def test_a_weight_used_twice_is_cast_once_in_the_graph_as_in_eager() -> None:
    """Tied casts its input, its weight, and what the layer norm returns not at all: the CPU's keeps bfloat16."""
    trace = recorded(load_spec(TIED, BF16)).trace
    shapes = [trace.storages.shape[trace.ops.writes[i][0]] for i in casts(trace, "forward")]
    assert shapes.count((24, 24)) == 1
    # Backward casts the gradient of the weight once as well: the two uses are summed in bfloat16.
    grads = [trace.storages.shape[trace.ops.writes[i][0]] for i in casts(trace, "backward")]
    assert grads.count((24, 24)) == 1


class OwnAutocast(small_nets.Tied):
    """Enters autocast in its own forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = super().forward(x)
        return y.float()


def own_autocast() -> BuildStep:
    def make() -> tuple[Any, Any, Any, Any]:
        model = OwnAutocast()
        batch = torch.randn(16, 24), torch.randn(16, 24)
        return model, batch, functional.mse_loss, torch.optim.AdamW(model.parameters(), lr=1e-2)

    return build_of(make)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: load_spec(TIED, BF16), id="tied"),
        pytest.param(lambda: load_spec(small_nets.spec("residual"), BF16), id="residual"),
        pytest.param(lambda: load_spec(TIED, {"amp": "float16"}), id="tied-fp16"),
        pytest.param(own_autocast, id="own autocast"),
    ],
)
def test_a_planned_step_is_bit_equal_to_eager_s(make: Callable[[], BuildStep]) -> None:
    spec = make()
    trace = recorded(spec).trace
    outcome = verify(spec, Plan(meta=trace.meta, actions=random_actions(trace, random.Random(3))), "cpu", 3)
    assert outcome.bit_equal, outcome.first_difference
    assert set(outcome.max_abs_difference) - {SCALER} == set(KINDS)
    assert (SCALER in outcome.max_abs_difference) == (trace.meta.amp == "float16")


def test_the_statistics_of_a_norm_between_types_are_counted_as_the_kernel_keeps_them() -> None:
    """Layer norm of 16 rows in bfloat16 with float32 weights: mean and 1/std are 16 · 4 bytes each, not 16 · 2."""
    trace = recorded(load_spec(TIED, BF16)).trace
    i = trace.ops.target.index("aten.native_layer_norm.default")
    assert [trace.storages.nbytes[s] for s in trace.ops.writes[i]] == [16 * 24 * 2, 64, 64]


# The gradient scaler


def test_the_scaler_s_ops_and_state_are_in_the_trace_and_the_step_is_taken() -> None:
    trace = recorded(load_spec(MLP, {"amp": "float16"})).trace
    plain = recorded(load_spec(MLP)).trace
    targets = list(trace.ops.target)
    assert targets.count("aten._amp_foreach_non_finite_check_and_unscale_.default") == 1
    assert targets.count("aten._amp_update_scale_.default") == 1
    last = [t for t, p in zip(plain.ops.target, plain.ops.phase, strict=True) if p == "optimizer"]
    mine = [t for t, p in zip(targets, trace.ops.phase, strict=True) if p == "optimizer"]
    assert set(last) <= set(mine)
    added = {n: b for n, b in zip(trace.storages.name, trace.storages.nbytes, strict=True) if "scaler" in n}
    assert added == {"gradient scaler state 0": 4, "gradient scaler state 1": 4}


def test_a_step_that_overflows_is_skipped_as_in_eager() -> None:
    spec = load_spec(OVERFLOWING)
    trace = recorded(spec).trace
    outcome = verify(spec, all_recomputed(trace), "cpu", 5)
    assert outcome.bit_equal, outcome.first_difference
    assert outcome.max_abs_difference[SCALER] == 0.0
    assert outcome.losses[0] == outcome.losses[1]  # the first step changed nothing
    step = spec()
    for _ in range(5):
        run_step(step, step.model, step.optimizer)
    assert step.scaler is not None
    assert step.scaler.get_scale() < 2.0**16


def test_verification_notices_another_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(OVERFLOWING)
    plan = all_recomputed(recorded(spec).trace)
    original = module._train

    def other_scale(a: Any, b: Any, steps: int) -> Any:
        b.step.scaler._init_scale = 2.0**3
        return original(a, b, steps)

    monkeypatch.setattr(module, "_train", other_scale)
    outcome = verify(spec, plan, "cpu", 2)
    assert not outcome.equal
    assert outcome.max_abs_difference[SCALER] > 0


def test_measuring_begins_with_a_scale_at_which_the_scaler_takes_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = load_spec(OVERFLOWING)
    fake = recorded(spec)
    assert measured(spec, fake).meta.mode == "real"
    monkeypatch.setattr("tracer.measure.step.start_low", lambda scaler: None)
    with pytest.raises(TraceError, match="the real step differs"):
        measure(fake, spec, "cpu", rounds=1, warmup=1)


def test_the_peak_counts_when_the_scaler_has_taken_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = load_spec(OVERFLOWING)
    Plan(meta=recorded(spec).trace.meta).save(tmp_path / "plan.json")
    job = Job(
        variant="eager", plan_path=str(tmp_path / "plan.json"), model="", device="cpu",
        memory_steps=2, warmup=0, runs=1, steps=0,
    )  # fmt: skip
    assert len(perform(job).figures.peaks_bytes) > 2 + measuring._TAKEN
    monkeypatch.setattr(measuring, "_PATIENCE", 3)
    with pytest.raises(SpecError, match=r"the gradient scaler skipped 5 of 5 steps.*lower init_scale"):
        perform(job)


# In a loop of one's own


@pytest.fixture(scope="module")
def under_bf16() -> Plan:
    return all_recomputed(recorded(load_spec(TIED, BF16)).trace)


def train(model: nn.Module, steps: int = 3, *, cache: bool = True) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for k in range(steps):
        x, y = torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(k))
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def twins() -> tuple[nn.Module, nn.Module]:
    a, b = small_nets.Tied(), small_nets.Tied()
    b.load_state_dict(a.state_dict())
    return a, b


def test_a_graph_that_is_captured_inside_a_region_is_that_captured_outside() -> None:
    """Attention by its plain formula computes in float32 inside, below autocast, which must not cast it again."""
    spec = load_spec("bert-tiny", {"batch_size": 1, "seq_len": 8, **BF16})
    outside = program_of(capture_step(spec()))
    step = spec()
    with step.autocast.region():
        inside = program_of(capture_step(step))
    assert inside.fingerprint() == outside.fingerprint()


def test_a_region_without_the_cache_of_casts_is_planned_as_it_is() -> None:
    """As Lightning's are. A tied weight is cast twice, and its gradients are summed in float32."""
    a, b = twins()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        batch = torch.randn(2, 16, 24).unbind()
        fit(b, tuple(batch), functional.mse_loss, "adamw", budget="100%", say=lambda text: None)
    assert train(a, cache=False) == train(b, cache=False)
    assert b.receipt().unplanned_steps == 0
    assert [c.fit for c in b.receipt().captures] == ["exact"]
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "context", "words"),
    [
        (BF16, {"enabled": False}, "autocast was bfloat16 and is off"),
        (
            BF16,
            {"dtype": torch.float16},
            r"autocast was bfloat16 and is float16\. Call the model as it was traced",
        ),
        (BF16, {"cache_enabled": False}, "its ops are others"),
        ({}, {}, "autocast was off and is bfloat16"),
    ],
)
def test_another_state_of_autocast_is_refused(
    under_bf16: Plan, options: dict[str, Any], context: dict[str, Any], words: str
) -> None:
    plan = under_bf16 if options else all_recomputed(recorded(load_spec(TIED)).trace)
    planned = apply_plan(small_nets.Tied(), plan)
    with torch.autocast("cpu", **{"dtype": torch.bfloat16, **context}), pytest.raises(PlanError, match=words):
        planned(torch.randn(16, 24))


# Times


def test_attention_in_bfloat16_is_timed_as_such() -> None:
    """Its statistics are float32, and decide nothing."""
    spec = load_spec("llama-tiny", {"batch_size": 1, "seq_len": 8, **BF16})
    rows = recorded(spec).program.rows
    found = {r.dtype for r in rows if "attention" in r.target}
    assert found == {"bfloat16"}
