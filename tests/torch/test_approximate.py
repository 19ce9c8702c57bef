"""A GPU's step as it is captured where no CUDA build of torch is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor.plans import Settings, measure_plan
from executor.training.module import apply_plan
from tests.torch import small_nets
from tests.torch.steps import plan_of, step_of
from tracer.record.program import Program, program_of
from tracer.record.step import capture_step, trace_step
from tracer.step.step import load_spec
from traces.devices import device
from traces.errors import PlanError
from traces.records.plan import Plan

MIB = 2**20


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.masked, self.options = options.pop("masked", False), options
        self.q, self.kv = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).view(2, 100, 4, 16).transpose(1, 2)
        heads = 2 if self.options.get("enable_gqa") else 4
        k, v = (self.kv(x).view(2, 100, 4, 16)[:, :, :heads].transpose(1, 2) for _ in range(2))
        mask = torch.ones(2, 1, 1, 100, dtype=torch.bool) if self.masked else None
        return functional.scaled_dot_product_attention(q, k, v, mask, **self.options)


def program(model: nn.Module, on: str = "h200") -> Program:
    step = step_of(model, torch.randn(2, 100, 64), lambda y: y.float().sum(), None)
    return program_of(capture_step(step, device(on) if on != "cpu" else None))


@pytest.mark.parametrize(
    "options", [{}, {"dropout_p": 0.1, "masked": True}, {"is_causal": True}, {"enable_gqa": True}]
)
def test_attention_of_a_gpu_holds_no_scores(options: dict[str, Any]) -> None:
    rows = [r.target for r in program(Attention(**options)).rows if "attention" in r.target]
    name = "aten._scaled_dot_product_efficient_attention"
    assert rows == [f"{name}.default", f"{name}_backward.default"]
    here = [r.target for r in program(Attention(), "cpu").rows if "attention" in r.target]
    assert here[0] == "aten._scaled_dot_product_flash_attention_for_cpu.default"


def test_ops_that_ask_for_cublas_s_buffer_again() -> None:
    draft = trace_step(load_spec(small_nets.spec("mlp")), device("h200"))
    assert draft.meta.rerun_workspaces == {"aten.addmm.default": 0}


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
        measure_plan(Plan.load(path), path, Settings(device="cpu"), lambda _: None)
