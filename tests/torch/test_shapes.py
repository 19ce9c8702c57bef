"""Traces of many sizes, and plans measured at lengths of every kind."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from executor import apply_plan
from simulator.bounds import Instants
from simulator.cli.main import main as simulate_command
from simulator.core.problem import Problem
from simulator.prediction.ask import plan as plan_for
from simulator.prediction.ask import simulate
from simulator.studies.shapes import PLAN, REFUSED, over_shapes
from tests.torch import small_nets
from tests.torch.small_nets import Words
from tests.torch.steps import plan_of, recompute_all
from tests.torch.test_sizes import transformers
from tracer.api import trace
from tracer.cli.main import trace as trace_command
from tracer.measure.probes import cpu_loop
from tracer.step.loop import run_step
from tracer.step.step import load_spec
from traces.records.trace import Trace
from traces.shapes import Shapes, Sizes


def over(model: str, shapes: Shapes, **options: Any) -> list[tuple[Sizes, Trace]]:
    return [(sizes, trace(model, **options, **sizes)) for sizes in shapes.looked_at()]


class Deciding(torch.nn.Module):
    """Has another op where its argument's length is even."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.a(x))
        return self.b(y if x.shape[1] % 2 else torch.sin(y)).mean()


def build(batch_size: int, seq_len: int) -> Any:
    model = Deciding()
    batch = {"x": torch.randn(batch_size, seq_len, 6)}
    return model, batch, torch.optim.SGD(model.parameters(), lr=0.1)


HERE = f"{__file__}:build"


def test_a_model_that_decides_by_sizes() -> None:
    """Each length has its own trace, and where the model has another graph than the plan's, the plan is refused."""
    shapes = Shapes.parse("seq-len=6:9")
    traces = over(HERE, shapes, batch_size=2)
    for sizes, one in traces:
        assert ("aten.sin.default" in one.ops.target) == (sizes["seq_len"] % 2 == 0)
    longest = traces[-1][1]
    found = over_shapes(simulate(longest, plan_of(longest, *recompute_all(Problem(longest)))), shapes, traces)
    assert [p.sizes["seq_len"] for p in found.running(REFUSED)] == [6, 8]
    assert not found.holds


def test_the_longest_that_the_model_takes_has_the_same_graph() -> None:
    """There a slice takes all, and torch records an alias; a plan for it applies to shorter calls all the same."""
    shapes = Shapes.parse("seq-len=6:12:2")
    traces = over(small_nets.spec("table"), shapes, batch_size=2)
    longest = traces[-1][1]
    assert "aten.alias.default" in longest.ops.target
    found = over_shapes(simulate(longest, plan_of(longest, *recompute_all(Problem(longest)))), shapes, traces)
    assert {p.runs for p in found.peaks} == {PLAN}
    assert found.holds


@pytest.mark.usefixtures("by_rules")
def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`simulate --shapes` uses what `trace --shapes` made, and runs no file that a trace names."""
    monkeypatch.chdir(tmp_path)
    run, words = CliRunner().invoke, ["--batch-size", "2", "--target", "h100", "-q"]
    shapes = ["--shapes", "seq-len=7:9:2"]
    assert "leave --device out" in run(trace_command, [HERE, *shapes, "--device", "cpu"]).output
    assert "the shapes say this already" in run(trace_command, [HERE, *shapes, "--seq-len", "8"]).output
    assert run(trace_command, [HERE, "--seq-len", "9", "-o", "t", *words]).exit_code == 0
    refused = run(simulate_command, ["t", *shapes])
    assert refused.exit_code == 2
    assert "is run unasked" in refused.stderr
    assert run(trace_command, [HERE, *shapes, "-o", "t-shapes", *words]).exit_code == 0
    done = run(simulate_command, ["t", *shapes, "--json"])
    assert done.exit_code == 0, done.output
    assert "using t-shapes" in done.stderr
    told = json.loads(done.stdout)["shapes"]
    assert told["worst"]["seq_len"] == 9
    assert told["reserved"]["steps"] == 200


def trained(
    model: str, text: str, steps: int, asked: Mapping[str, Any] | None = None, **options: Any
) -> tuple[list[int], list[int], dict[int, int], int]:
    """Steps of random lengths by one plan, the first three of the longest. `asked`: beside the budget.

    Returns:
        the length of each; its peak by the allocator's account; what is predicted of each length; the budget.
    """
    shapes = Shapes.parse(text)
    traces = over(model, shapes, **options)
    longest, problem = traces[-1][1], Problem(traces[-1][1])
    saved = problem.saved.timeline.peak_allocated_bytes
    plan = plan_for(longest, (saved + Instants(problem).floor.peak_bytes) // 2, seconds=2.0, **(asked or {}))
    told = over_shapes(simulate(longest, plan), shapes, traces)
    assert told.holds
    assert {p.runs for p in told.peaks} == {PLAN}
    assert plan.changes
    predicted = {p.sizes["seq_len"]: p.peak_allocated_bytes for p in told.peaks}
    rng, given = random.Random(1), []
    # Made before anything is counted: what the batches take is added below.
    made = {n: load_spec(model, {**options, "seq_len": n})("cpu") for n in predicted}
    parts = {
        n: {"args": s.args, "kwargs": s.kwargs, "loss": s.loss, "loss_inputs": s.loss_inputs}
        for n, s in made.items()
    }
    batches = {n: sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in s.tensors()}.values())
               for n, s in made.items()}  # fmt: skip
    del made
    with cpu_loop() as watched:
        step = load_spec(model, {**options, "seq_len": shapes.largest["seq_len"]})("cpu")
        planned = apply_plan(step.model, plan)
        for k in range(steps):
            given.append(rng.choice([*predicted]) if k > 2 else shapes.largest["seq_len"])
            mine = replace(step, **parts[given[-1]])
            with watched.iteration():
                run_step(mine, planned, step.optimizer)
    own = batches[shapes.largest["seq_len"]]  # the built step's, counted and not used
    peaks = [p + batches[n] - own for n, p in zip(given, watched.peaks, strict=True)]
    assert plan.budget_bytes is not None
    return given, peaks, predicted, plan.budget_bytes


@pytest.mark.slow
def test_two_hundred_random_lengths_take_what_is_predicted_of_each() -> None:
    """To the byte, and within the budget."""
    transformers()
    given, peaks, predicted, budget = trained(
        "gpt2-tiny", "seq-len=4:32:4", 200, batch_size=4, optimizer="sgd"
    )
    assert len(set(given)) == len(predicted) == 8
    steady = list(zip(given, peaks, strict=True))[1:]  # in the first, there are no gradients to be added to
    assert [(n, p) for n, p in steady if p != predicted[n]] == []
    assert max(peaks) <= budget


def inside(batch_size: int, seq_len: int) -> Any:
    model, (ids, targets) = Words(), torch.randint(0, 600, (2, batch_size, seq_len))
    return model, {"ids": ids, "targets": targets}, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_loss_head_runs_in_tiles_at_every_length() -> None:
    """Down to where the logits are small beside the weights."""
    given, peaks, predicted, budget = trained(
        f"{__file__}:inside", "seq-len=2:98:24", 15, {"allow": "fp", "planner": "save-all"}, batch_size=1
    )
    assert len(set(given)) == len(predicted) == 5
    assert [(n, p) for n, p in zip(given, peaks, strict=True) if p != predicted[n]][1:] == []
    assert max(peaks) <= budget
