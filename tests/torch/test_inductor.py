"""Plans as partitions of the graphs that torch.compile traces; run here op by op."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.backends.debugging import boxed_nop  # noqa: E402
from torch._dynamo.exc import BackendCompilerFailed  # noqa: E402
from torch._inductor.decomposition import select_decomp_table  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from executor.frameworks.inductor import PlanPartitioner  # noqa: E402
from simulator.core.problem import Problem  # noqa: E402
from tracer.measure.probes import cpu_live, memory_profiler  # noqa: E402
from tracer.torch_api import default_partition  # noqa: E402
from traces.errors import SpecError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Blocks(nn.Module):
    """Blocks with dropout and a batch norm, whose buffers forward overwrites."""

    def __init__(self, *, breaks: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.breaks, self.checkpoints = breaks, checkpoints
        self.norm = nn.BatchNorm1d(64)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)
            )
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        if self.breaks:
            torch._dynamo.graph_break()
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return x.square().mean()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def compiled(model: nn.Module, partition: Callable[..., Any], **settings: Any) -> Callable[..., torch.Tensor]:
    """As Inductor compiles it, but that the two graphs run op by op."""
    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    return torch.compile(model, backend=backend, **settings)  # type: ignore[no-any-return]


def partitioner(budget: str | int, told: list[str] | None = None) -> PlanPartitioner:
    return PlanPartitioner(budget, seconds=0.3, say=(lambda _: None) if told is None else told.append)


def as_torch_does(gm: Any, inputs: Any, **kwargs: Any) -> Any:
    return default_partition(gm, inputs, **{k: v for k, v in kwargs.items() if k != "compiler"})


def step(model: nn.Module, call: Callable[..., torch.Tensor], batch: int = 256) -> dict[str, torch.Tensor]:
    """Gradients and buffers after one step, from one seed."""
    model.zero_grad()
    torch.manual_seed(1)
    call(torch.randn(batch, 64)).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {k: v.detach().clone() for k, v in (grads | dict(model.named_buffers())).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert len(a) > 10
    for name, x in a.items():
        assert torch.equal(x, b[name]), name


def peak_bytes(model: nn.Module, call: Callable[..., torch.Tensor]) -> int:
    """Of a step after the first, above what is there when it begins."""
    step(model, call)
    model.zero_grad()
    x = torch.randn(256, 64)
    gc.collect()
    with memory_profiler() as prof:
        call(x).backward()
    return max(cpu_live(prof, "none")[1])


@pytest.mark.parametrize("budget", ["100%", "75%"])
def test_a_partition_by_a_plan_trains_the_same_in_less_memory(budget: str) -> None:
    chosen = partitioner(budget)
    own, other = Blocks(), Blocks()
    plain, planned = compiled(own, as_torch_does), compiled(other, chosen)
    for _ in range(2):
        same(step(own, plain), step(other, planned))
    (graph,) = chosen.graphs
    assert graph.plan.actions
    limit = graph.torch_peak_bytes * int(budget[:-1]) // 100
    resident = graph.trace.resident_bytes
    assert graph.peak_bytes <= limit < peak_bytes(own, plain) + resident
    # Inductor writes results over inputs that end there, and a graph that runs as it is does not.
    ops = replace(graph.trace.ops, overwrites=(-1,) * len(graph.trace.ops))
    predicted = Problem(replace(graph.trace, ops=ops)).replay(graph.plan.actions).timeline
    assert peak_bytes(other, planned) == pytest.approx(predicted.peak_allocated_bytes - resident, rel=1e-3)


def test_random_ops_do_not_run_again() -> None:
    chosen = partitioner("50%")
    model = Blocks()
    step(model, compiled(model, chosen))
    (graph,) = chosen.graphs
    assert graph.plan.actions
    assert not [a for a in graph.plan.actions if "dropout" in a.op or "rand" in a.op or "bernoulli" in a.op]


def test_sizes_that_vary() -> None:
    chosen = partitioner("80%")
    own, other = Blocks(), Blocks()
    plain, planned = compiled(own, as_torch_does, dynamic=True), compiled(other, chosen, dynamic=True)
    for batch in (256, 100, 300):
        same(step(own, plain, batch), step(other, planned, batch))
    assert len(chosen.graphs) == 1
    assert chosen.graphs[0].plan.actions


def test_each_graph_of_a_model_has_a_plan_within_its_share() -> None:
    chosen = partitioner("90%")
    own, other = Blocks(breaks=True), Blocks(breaks=True)
    same(step(own, compiled(own, as_torch_does)), step(other, compiled(other, chosen)))
    assert len({g.name for g in chosen.graphs}) == len(chosen.graphs) > 1


def test_bytes_for_a_model_of_several_graphs_are_refused() -> None:
    model = Blocks(breaks=True)
    with pytest.raises(BackendCompilerFailed, match="several graphs"):
        step(model, compiled(model, partitioner("1GiB")))


def test_a_budget_that_no_plan_meets() -> None:
    model, told = Blocks(), list[str]()
    with pytest.raises(BackendCompilerFailed, match="lowest peak"):
        step(model, compiled(model, partitioner("300KiB")))
    torch._dynamo.reset()
    chosen = partitioner("10%", told)
    step(model, compiled(model, chosen))
    assert "no plan within the budget" in told[-1]
    assert told[-1].startswith("warning")
    assert chosen.graphs[0].peak_bytes < 0.8 * chosen.graphs[0].torch_peak_bytes


def test_a_model_that_checkpoints_itself_is_refused() -> None:
    model = Blocks(checkpoints=True)
    with pytest.raises(BackendCompilerFailed, match="says itself what runs again"):
        step(model, compiled(model, partitioner("80%")))


def test_the_cache_key_changes_with_what_a_plan_follows_from() -> None:
    assert partitioner("60%").uuid() == partitioner("60%").uuid()
    others = [
        partitioner("50%"),
        PlanPartitioner("60%", seconds=3),
        PlanPartitioner("60%", planner="mu-two", seconds=0.3),
    ]
    assert len({p.uuid() for p in (partitioner("60%"), *others)}) == 4


def test_what_is_no_budget_is_refused_at_once() -> None:
    with pytest.raises(SpecError):
        PlanPartitioner("much")
