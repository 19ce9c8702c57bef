"""Plans as partitions of torch.compile, compiled by Inductor for the CPU: the same gradients in less memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from executor.frameworks.inductor import PlanPartitioner  # noqa: E402
from tracer.measure.probes import cpu_live, memory_profiler  # noqa: E402

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]


class Encoder(nn.Module):
    """A small transformer with dropout and its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(97, 64)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 97)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(
            self.head(self.layers(self.embedding(ids))).flatten(0, 1), ids.flatten()
        )


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor's own cache, empty; one thread, since on several an embedding's gradient is summed in any order."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(partitioner: PlanPartitioner | None) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of two steps, and the second one's peak above what is there before it."""
    model, ids = Encoder(), torch.randint(97, (8, 64), generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {} if partitioner is None else {"custom_partitioner_fn": partitioner}
    compiled = torch.compile(model, options=options)
    torch.manual_seed(3)
    compiled(ids).backward()
    first = {f"first {name}": p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    gc.collect()
    with memory_profiler() as prof:
        compiled(ids).backward()
    peak = max(cpu_live(prof, "none")[1])
    return first | {name: p.grad for name, p in model.named_parameters()}, peak


def test_gradients_are_those_of_the_compiled_model_in_less_memory() -> None:
    own, own_peak = trained(None)
    torch._dynamo.reset()
    chosen = PlanPartitioner("60%", seconds=3, say=lambda _: None)
    planned, peak = trained(chosen)
    for name, gradient in own.items():
        assert torch.equal(gradient, planned[name]), name
    (graph,) = chosen.graphs
    predicted = graph.peak_bytes - graph.trace.resident_bytes
    assert peak < 0.7 * own_peak, f"{own_peak:,} -> {peak:,}, predicted without fusion {predicted:,}"
    assert 0.8 * predicted < peak <= predicted


def test_inductor_s_cache_knows_the_plan() -> None:
    def graphs(budget: str) -> int:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        chosen = PlanPartitioner(budget, seconds=1, say=lambda _: None)
        torch.compile(model, options={"custom_partitioner_fn": chosen})(torch.randn(64, 8)).sum().backward()
        return len(chosen.graphs)

    assert [graphs("90%"), graphs("90%"), graphs("80%")] == [1, 0, 1]
