"""A tiny language model, its data, and what every framework's test asks: is it the same as without a plan?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from tracer.measure.probes import cpu_loop
from traces.records.plan import Plan

VOCABULARY, LENGTH, BATCH = 97, 48, 4
# What a framework holds beside the step, planned or not: copies of random states (5 kB each), the sampler's
# permutation, a batch or two, logged scalars.
BESIDE_BYTES = 40 * 1024


def gpt2(seed: int = 0) -> nn.Module:
    """GPT-2 of two layers with dropout, in training mode."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0,
        use_cache=False, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def texts(count: int = 40, seed: int = 3) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (LENGTH,), generator=g) for _ in range(count)]


def batches(count: int = 10) -> list[dict[str, torch.Tensor]]:
    rows = texts(count * BATCH)
    stacked = [torch.stack(rows[k * BATCH : (k + 1) * BATCH]) for k in range(count)]
    return [{"input_ids": x, "labels": x.clone()} for x in stacked]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a training run left: the losses, the model's tensors, the random state, and the highest live bytes."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    rng: torch.Tensor
    peak_bytes: int


def trained(run: Callable[[], tuple[nn.Module, list[float]]], seed: int = 5) -> Ended:
    """Run a training that makes its own model, from a seed, on one thread.

    The peak is the allocator's own account over the whole run, of what was allocated in it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    try:
        with cpu_loop() as watched:
            model, losses = run()
            rng = torch.get_rng_state()
    finally:
        torch.set_num_threads(threads)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    return Ended(losses=losses, state=state, rng=rng, peak_bytes=watched.highest)


def same(eager: Ended, planned: Ended) -> None:
    """Losses, parameters, buffers and random state are bit-equal."""
    assert eager.losses, "nothing was trained"
    assert eager.losses == planned.losses
    assert eager.state.keys() == planned.state.keys()
    for name, x in eager.state.items():
        assert torch.equal(x, planned.state[name]), name
    assert torch.equal(eager.rng, planned.rng)


def within_budget(planned: Ended, plan: Plan, *, loss_outside: bool = False) -> None:
    """The plan's own peak is within its budget, and so is the run's, but for what the framework holds.

    With `loss_outside` the run's is left out: what loss code around the model allocates is no part of the plan.
    """
    assert plan.budget_bytes is not None
    predicted = plan.predicted["plan"]["peak_allocated_bytes"]
    assert predicted <= plan.budget_bytes < plan.predicted["baseline"]["peak_allocated_bytes"]
    if not loss_outside:
        assert predicted - BESIDE_BYTES <= planned.peak_bytes <= plan.budget_bytes + BESIDE_BYTES
