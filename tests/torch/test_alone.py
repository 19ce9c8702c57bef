"""Ops that run alone allocate what they allocate in their step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from tests.torch import small_nets  # noqa: E402
from tests.torch.steps import build_of, recorded  # noqa: E402
from tracer.costs.calibration import MEASURED, Costs  # noqa: E402
from tracer.costs.profiles import identity_here  # noqa: E402
from tracer.costs.signature import of_call  # noqa: E402
from tracer.measure import isolated  # noqa: E402
from tracer.measure.isolated import Wanted, _index_limit, calibrate, missing, resolve  # noqa: E402
from tracer.measure.step import measure  # noqa: E402
from tracer.record.draft import Draft  # noqa: E402
from tracer.step.step import BuildStep, load_spec  # noqa: E402
from traces.records.device_profile import DeviceProfile  # noqa: E402
from traces.records.trace import VIEW  # noqa: E402

aten = torch.ops.aten


def calibrated(step: Draft) -> DeviceProfile:
    profile, skipped = calibrate(missing(step, None), identity_here("cpu"), "cpu")
    assert skipped == {}
    return profile


def language() -> tuple[Any, ...]:
    """Embedding, dropout, layer norm, attention and cross-entropy: ops that want sensible arguments."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            self.norm = nn.LayerNorm(32)
            self.head = nn.Linear(32, 50)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = functional.dropout(self.norm(self.embed(tokens)), 0.1)
            q = x.view(4, 8, 2, 16).transpose(1, 2)
            y = functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(4, 8, 32)
            return self.head(y)[:, [0, 3, 5]]

    model = Model()
    tokens, labels = torch.randint(0, 50, (4, 8)), torch.randint(0, 50, (12,))

    def loss(y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(y.reshape(12, 50), labels)

    return model, tokens, loss, torch.optim.AdamW(model.parameters(), foreach=True)


def vision() -> tuple[Any, ...]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, stride=2, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return (
        model,
        torch.randn(4, 3, 16, 16),
        lambda y: y.square().mean(),
        torch.optim.SGD(model.parameters(), momentum=0.9),
    )


@pytest.mark.parametrize(
    "make",
    [lambda: build_of(language), lambda: build_of(vision), lambda: load_spec(small_nets.spec("residual"))],
)
def test_alone_and_in_the_step_are_the_same(make: Callable[[], BuildStep]) -> None:
    build = make()
    step = recorded(build)
    alone = calibrated(step)
    together = measure(step, build, "cpu", rounds=1, warmup=1).profile(identity_here("cpu"), 1)
    assert set(alone.entries) == set(together.entries)
    differing = {k for k, e in alone.entries.items() if e.events != together.entries[k].events}
    assert differing == set()


def test_a_calibrated_fake_trace_has_the_real_one_s_allocations() -> None:
    build = build_of(vision)
    step = recorded(build)
    real = measure(step, build, "cpu", rounds=1, warmup=1).finish()
    fake = step.finish(Costs(profile=calibrated(step)))
    assert fake.meta.workspace == {MEASURED: real.meta.workspace[MEASURED]}
    assert fake.meta.fingerprint == real.meta.fingerprint
    for i, flags in enumerate(fake.ops.flags):
        if not flags & VIEW:
            assert fake.ops.events[i] == real.ops.events[i], fake.ops.target[i]
            assert fake.ops.time_ns[i] > 0


def test_only_what_lacks_is_run_and_views_never() -> None:
    step = recorded(build_of(vision))
    everything = missing(step, None)
    assert len({w.signature.key for w in everything}) == len(everything)
    assert not {"aten.view.default", "aten.t.default"} & {w.signature.target for w in everything}
    profile = calibrated(step)
    assert missing(step, profile) == []


def test_indices_stay_within_what_they_index() -> None:
    table, tokens = torch.zeros(7, 3), torch.zeros(2, 5, dtype=torch.long)
    assert _index_limit(of_call(aten.embedding.default, (table, tokens), {}, table)) == {"indices": 7}
    grad = torch.zeros(2, 5, 3)
    call = of_call(aten.embedding_dense_backward.default, (grad, tokens, 7, -1, False), {}, table)
    assert _index_limit(call) == {"indices": 7}
    scores, target = torch.zeros(4, 9), torch.zeros(4, dtype=torch.long)
    forward = of_call(aten.nll_loss_forward.default, (scores, target, None, 1, -100), {}, scores)
    assert _index_limit(forward) == {"target": 9}
    gather = of_call(aten.gather.default, (scores, 1, target[:, None]), {}, scores)
    assert _index_limit(gather) == {"index": 9}


def test_what_cannot_run_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_free_bytes", lambda device: 200_000)
    x = torch.zeros(64, 64)
    good = of_call(aten.mm.default, (x, x), {}, x)
    large = of_call(aten.mm.default, (x.repeat(8, 1), x), {}, x.repeat(8, 1))
    wrong = of_call(aten.mm.default, (x, torch.zeros(3, 3)), {}, x)
    unknown = of_call("aten.no_such_op.default", (x,), {}, x)
    calls = [Wanted(signature=s, created_bytes=16384) for s in (good, large, wrong, unknown)]
    profile, skipped = calibrate(calls, identity_here("cpu"), "cpu")
    assert set(profile.entries) == {good.key}
    assert profile.entries[good.key].events == (64 * 64 * 4,)
    assert "100000 may be used" in skipped[large.key]
    assert "mat1 and mat2" in skipped[wrong.key]
    assert "no operator" in skipped[unknown.key]


@pytest.mark.parametrize("names", [{"SC_PHYS_PAGES": 1}, {}])
def test_systems_other_than_linux_do_not_say_what_memory_is_free(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, int]
) -> None:
    monkeypatch.setattr(os, "sysconf_names", names)
    free = isolated._free_bytes("cpu")
    assert free == (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if names else sys.maxsize)


def test_running_alone_leaves_the_random_state() -> None:
    x = torch.zeros(8, 8)
    call = of_call(aten.native_dropout.default, (x, 0.5, True), {}, (x, x.bool()))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    calibrate([Wanted(signature=call, created_bytes=320)], identity_here("cpu"), "cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_operators_by_name() -> None:
    assert resolve("aten._foreach_add_.List") is aten._foreach_add_.List
    with pytest.raises(LookupError, match="no operator"):
        resolve("aten.mm.nothing")
