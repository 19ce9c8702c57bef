"""A planned module in the user's own loop behaves as the model itself, and refuses what it cannot do."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import executor.backend as module_module  # noqa: E402
import executor.graphs.graph as backend_module  # noqa: E402
from executor import apply_plan  # noqa: E402
from executor.verifying import _difference, _train, verify  # noqa: E402
from simulator.core.problem import Problem  # noqa: E402
from tests.torch import small_nets  # noqa: E402
from tests.torch.steps import build_of, plan_of, random_actions, recompute_all, recorded  # noqa: E402
from tracer.capture.passes import dropout as dropout_module  # noqa: E402
from tracer.record import program as program_module  # noqa: E402
from tracer.step.step import load_spec  # noqa: E402
from traces.errors import CaptureError, PlanError  # noqa: E402
from traces.records.plan import Plan  # noqa: E402

RESIDUAL = small_nets.spec("residual")


@pytest.fixture(scope="module")
def plan() -> Plan:
    trace = recorded(load_spec(RESIDUAL)).trace
    actions = random_actions(trace, random.Random(5))
    assert actions
    return plan_of(trace, *actions)


def batch(size: int = 4, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 16, 16, generator=g), torch.randint(5, (size,), generator=g)


def twins() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = small_nets.Residual()
    return model, copy.deepcopy(model)


def same(a: nn.Module, b: nn.Module) -> None:
    for (name, x), (other, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(x, y), name
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def both(
    eager: nn.Module, planned: nn.Module, run: Callable[[nn.Module], Any], seed: int = 7
) -> tuple[Any, Any]:
    """Run something on both from the same random state; both leave the generator in the same state."""
    torch.manual_seed(seed)
    a = run(eager)
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    b = run(planned)
    assert torch.equal(torch.get_rng_state(), after)
    return a, b


def test_it_is_the_same_module_from_outside(plan: Plan) -> None:
    other, model = twins()
    planned = apply_plan(model, plan)
    assert planned is model
    assert type(model) is small_nets.Residual
    assert planned.state_dict().keys() == other.state_dict().keys()
    assert [name for name, _ in planned.named_modules()] == [name for name, _ in other.named_modules()]


def test_a_loop_of_one_s_own(plan: Plan) -> None:
    """Criterion outside, an optimizer made before, another made after, a scheduler."""
    model, twin = twins()
    planned = apply_plan(twin, plan)

    def train(m: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        losses = []
        for k in range(4):
            x, y = batch(seed=k)
            loss = criterion(m(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
        return losses

    a, b = both(model, planned, train)
    assert a == b
    same(model, planned)


def test_evaluation_and_no_grad_use_the_model_s_own_forward(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = twins()
    planned = apply_plan(twin, plan)

    def refuse(*_: Any) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr(module_module, "compile_graph", refuse)
    x, _ = batch()

    def without(m: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return m(x)

    assert torch.equal(*both(model, planned, without))
    same(model, planned)  # in training mode, so the statistics moved
    model.eval(), planned.eval()
    a, b = both(model, planned, lambda m: m(x))
    assert torch.equal(a, b)
    assert b.requires_grad
    planned.train()
    with pytest.raises(CaptureError, match="captured"):
        planned(x)


def test_evaluation_mode_reaches_code_of_the_root_module() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(self.linear(x), 0.5, training=self.training)

    x = torch.randn(4, 16)
    trace = recorded(build_of(lambda: (Root(), x, lambda y: y.sum(), None))).trace
    planned = apply_plan(Root(), plan_of(trace))
    planned(x).sum().backward()
    planned.eval()
    assert torch.equal(planned(x), planned.linear(x))


def test_switching_between_training_and_evaluation(plan: Plan) -> None:
    model, twin = twins()
    planned = apply_plan(twin, plan)

    def run(m: nn.Module) -> list[torch.Tensor]:
        out = []
        for k in range(3):
            x, y = batch(seed=k)
            m.train()
            functional.cross_entropy(m(x), y).backward()
            m.eval()
            out.append(m(x).detach())
        return out

    a, b = both(model, planned, run)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    same(model, planned)


def test_a_frozen_batch_norm_is_another_graph_and_refused(plan: Plan) -> None:
    _, twin = twins()
    planned = apply_plan(twin, plan)
    x, _ = batch()
    planned(x)
    planned.norm.eval()  # as in fine-tuning; the engine in the cache updates its statistics
    before = planned.norm.running_mean.clone()
    with pytest.raises(PlanError, match="another graph"):
        planned(x)
    assert torch.equal(planned.norm.running_mean, before)


def test_another_batch_size(plan: Plan) -> None:
    model, twin = twins()
    planned = apply_plan(twin, plan)

    def run(m: nn.Module) -> None:
        for size in (4, 7, 4, 2):
            x, y = batch(size)
            functional.cross_entropy(m(x), y).backward()

    both(model, planned, run)
    same(model, planned)
    assert [c.fit for c in planned._lowtide.compiler.compiled] == ["exact", "resized"]


def test_gradients_accumulate_over_two_batches(plan: Plan) -> None:
    model, twin = twins()
    planned = apply_plan(twin, plan)

    def run(m: nn.Module) -> None:
        for seed in (1, 2):
            x, y = batch(seed=seed)
            (functional.cross_entropy(m(x), y) / 2).backward()

    both(model, planned, run)
    same(model, planned)


def test_two_forwards_before_one_backward(plan: Plan) -> None:
    model, twin = twins()
    planned = apply_plan(twin, plan)

    def run(m: nn.Module) -> float:
        (x, y), (u, v) = batch(seed=1), batch(seed=2)
        first, second = functional.cross_entropy(m(x), y), functional.cross_entropy(m(u), v)
        (first + 2 * second).backward()
        return float(first.detach() + second.detach())

    a, b = both(model, planned, run)
    assert a == b
    same(model, planned)


def test_the_gradient_of_an_argument(plan: Plan) -> None:
    model, twin = twins()
    x, y = batch()

    def make() -> tuple[Any, ...]:
        return small_nets.Residual(), (x.clone().requires_grad_(), y), functional.cross_entropy, None

    trace = recorded(build_of(make)).trace
    planned = apply_plan(twin, plan_of(trace, *recompute_all(Problem(trace))))

    def run(m: nn.Module) -> torch.Tensor:
        u = x.clone().requires_grad_()
        functional.cross_entropy(m(u), y).backward()
        assert u.grad is not None
        return u.grad

    assert torch.equal(*both(model, planned, run))
    same(model, planned)


def test_a_deep_copy_has_parameters_of_its_own(plan: Plan) -> None:
    model, twin = twins()
    planned = apply_plan(twin, plan)
    x, y = batch()
    planned(x)  # an engine is in the cache
    twin.load_state_dict(model.state_dict())
    other = copy.deepcopy(planned)
    assert not {id(p) for p in planned.parameters()} & {id(p) for p in other.parameters()}

    def run(m: nn.Module) -> None:
        functional.cross_entropy(m(x), y).backward()

    both(model, other, run)
    same(model, other)
    assert all(p.grad is None for p in planned.parameters())


def test_another_dtype_is_another_graph(plan: Plan) -> None:
    class Tokens(nn.Module):
        """Its arguments do not change with the dtype of its parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.head = nn.Linear(8, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids) * torch.ones(8)).sum()

    ids = torch.arange(6)
    trace = recorded(build_of(lambda: (Tokens(), ids, None, None))).trace
    planned = apply_plan(Tokens(), plan_of(trace))
    planned(ids).backward()
    planned.to(torch.float64)
    with pytest.raises(PlanError, match="another graph"):
        planned(ids)
    planned.to(torch.float32)
    assert planned(ids).dtype == torch.float32


def test_a_plan_for_another_model_is_refused_before_anything_ran(plan: Plan) -> None:
    with pytest.raises(PlanError, match="made for another model"):
        apply_plan(nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)), plan)
    _, twin = twins()
    twin.head = nn.Sequential(twin.head, nn.ReLU())[:1]  # the same parameters under other names
    with pytest.raises(PlanError, match="of other names"):
        apply_plan(twin, plan)
    _, twin = twins()
    twin.drop = nn.Softsign()
    planned = apply_plan(twin, plan)
    with pytest.raises(PlanError, match="made for another graph"):
        planned(batch()[0])
    assert int(planned.norm.num_batches_tracked) == 0


def test_the_plan_may_be_a_path(plan: Plan, tmp_path: Path) -> None:
    model, twin = twins()
    planned = apply_plan(twin, plan.save(tmp_path / "plan.json"))
    x, y = batch()
    both(model, planned, lambda m: functional.cross_entropy(m(x), y).backward())
    same(model, planned)
    with pytest.raises(PlanError, match="no such plan"):
        apply_plan(twin, tmp_path / "none.json")


def test_backward_twice_needs_the_graph_as_ever(plan: Plan) -> None:
    model, twin = twins()
    planned = apply_plan(twin, plan)

    def run(m: nn.Module) -> None:
        x, y = batch()
        loss = functional.cross_entropy(m(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    both(model, planned, run)
    same(model, planned)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"a": self.a(x), "b": self.b(x), "kind": "two", "ids": torch.arange(3)}


def test_an_output_outside_the_plan_s_loss_can_be_read_but_not_differentiated() -> None:
    x = torch.randn(3, 4)
    trace = recorded(build_of(lambda: (TwoHeads(), x, lambda out: out["a"].sum(), None))).trace
    model = TwoHeads()
    planned = apply_plan(copy.deepcopy(model), plan_of(trace))
    out, want = planned(x), model(x)
    assert out["kind"] == "two"
    assert all(torch.equal(out[k], want[k]) for k in ("a", "b", "ids"))
    out["a"].sum().backward()
    assert planned.a.weight.grad is not None
    out = planned(x)
    with pytest.raises(PlanError, match="differentiates output 1"):
        (out["a"].sum() + out["b"].sum()).backward()
    assert planned.b.weight.grad is None


def test_what_the_loss_does_not_reach_this_time_gets_no_gradient() -> None:
    x = torch.randn(3, 4)
    trace = recorded(
        build_of(lambda: (TwoHeads(), x, lambda out: out["a"].sum() + out["b"].sum(), None))
    ).trace
    planned = apply_plan(TwoHeads(), plan_of(trace))
    planned(x)["a"].sum().backward()
    assert planned.a.weight.grad is not None
    assert planned.b.weight.grad is None


def test_a_hugging_face_model_returns_its_own_output() -> None:
    pytest.importorskip("transformers")
    build = load_spec("bert-tiny", {"batch_size": 2, "seq_len": 8})
    trace = recorded(build).trace
    step = build()
    model = copy.deepcopy(step.model)
    planned = apply_plan(step.model, plan_of(trace, *recompute_all(Problem(trace))))

    def run(m: nn.Module) -> Any:
        out = m(**step.kwargs)
        out.loss.backward()
        return out

    want, out = both(model, planned, run)
    assert type(out) is type(want)
    assert out.keys() == want.keys()
    assert torch.equal(out.loss, want.loss)
    assert torch.equal(out.logits, want.logits)
    same(model, planned)
    again = planned(**step.kwargs)
    with pytest.raises(PlanError, match="differentiates output"):
        again.logits.sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# The verification itself can fail


def fresh() -> tuple[Any, Plan]:
    """The residual net, with everything recomputed that may be, by the flags of this moment."""
    build = load_spec(RESIDUAL)
    trace = recorded(build).trace
    return build, plan_of(trace, *recompute_all(Problem(trace)))


def test_verification_of_an_honest_plan() -> None:
    outcome = verify(*fresh(), steps=2)
    assert outcome.equal
    assert outcome.bit_equal
    assert set(outcome.max_abs_difference.values()) == {0.0}
    assert len(outcome.losses) == 2


def test_verification_notices_a_mask_that_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module, "is_random", lambda n: False)
    build, plan = fresh()
    assert any("dropout_mask" in a.storage_name for a in _labelled(build, plan))
    outcome = verify(build, plan, steps=2)
    assert not outcome.equal
    assert outcome.max_abs_difference["gradients"] > 0
    assert outcome.max_abs_difference["rng_state"] > 0
    assert outcome.first_difference.startswith("step 1")


def _labelled(build: Any, plan: Plan) -> list[Any]:
    names = recorded(build).trace.storages.name
    return [SimpleNamespace(storage_name=names[a.storage]) for a in plan.actions]


def test_verification_notices_another_dropout_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    build, plan = fresh()
    original = dropout_module.split_dropout

    def scaled_wrongly(graph: Any) -> None:
        original(graph)
        for n in graph.nodes:
            if n.target is torch.ops.aten.mul.Scalar:
                n.args = (n.args[0], n.args[1] * (1 + 1e-3))

    monkeypatch.setattr("tracer.capture.captured.split_dropout", scaled_wrongly)
    outcome = verify(build, plan, steps=1)
    assert not outcome.equal
    assert outcome.max_abs_difference["loss"] > 0


def test_verification_notices_statistics_that_are_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    build, plan = fresh()
    original = backend_module.rewrite

    def twice(program: Any, schedule: Any) -> Any:
        made = original(program, schedule)
        graph = made.forward.graph
        for n in list(graph.nodes):
            if n.target is torch.ops.aten.copy_.default and n.args[0].meta["val"].is_floating_point():
                with graph.inserting_after(n):
                    graph.call_function(torch.ops.aten.mul_.Tensor, (n, 1.5))
        made.forward.recompile()
        return made

    monkeypatch.setattr(backend_module, "rewrite", twice)
    outcome = verify(build, plan, steps=1)
    assert not outcome.equal
    assert outcome.max_abs_difference["buffers"] > 0
    assert outcome.max_abs_difference["loss"] == 0
    assert "buffers" in outcome.first_difference


def test_verification_notices_random_numbers_that_eager_does_not_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All values are right, but the next step's would not be."""
    build, plan = fresh()
    original = backend_module.rewrite

    def wasteful(program: Any, schedule: Any) -> Any:
        made = original(program, schedule)
        graph = made.forward.graph
        output = next(n for n in graph.nodes if n.op == "output")
        with graph.inserting_before(output):
            graph.call_function(torch.rand, (1,))
        made.forward.recompile()
        return made

    monkeypatch.setattr(backend_module, "rewrite", wasteful)
    outcome = verify(build, plan, steps=1)
    assert not outcome.equal
    assert {k for k, d in outcome.max_abs_difference.items() if d} == {"rng_state"}


def test_a_graph_whose_kernels_differ_from_eager_s_by_rounding_is_equal_but_not_bit_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build, plan = fresh()
    original = dropout_module.split_dropout

    def rounded(graph: Any) -> None:
        original(graph)
        for n in graph.nodes:
            if n.target is torch.ops.aten.mul.Scalar:
                n.args = (n.args[0], n.args[1] * (1 + 2e-7))

    monkeypatch.setattr("tracer.capture.captured.split_dropout", rounded)
    outcome = verify(build, plan, steps=1)
    assert outcome.equal
    assert not outcome.bit_equal
    assert "other kernels than eager" in outcome.note


def test_verification_notices_an_overwritten_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that takes over memory which another op still reads."""
    build, plan = fresh()
    original = backend_module.rewrite

    def greedy(program: Any, schedule: Any) -> Any:
        made = original(program, schedule)
        for n in made.forward.graph.nodes:
            if n.target is torch.ops.aten.mul.Tensor and n.name.startswith("mul"):
                n.target = torch.ops.aten.mul_.Tensor
        made.forward.recompile()
        return made

    keep_all = Plan(meta=plan.meta)
    assert verify(build, keep_all, steps=1).bit_equal
    monkeypatch.setattr(backend_module, "rewrite", greedy)
    assert not verify(build, keep_all, steps=1).equal


def test_verification_notices_a_gradient_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    build, plan = fresh()
    original = backend_module.rewrite

    def forgetful(program: Any, schedule: Any) -> Any:
        made = original(program, schedule)
        output = next(n for n in made.backward.graph.nodes if n.op == "output")
        parameters, arguments = output.args[0]
        output.args = ((((None, *parameters[1:])), arguments),)
        made.backward.recompile()
        return made

    monkeypatch.setattr(backend_module, "rewrite", forgetful)
    outcome = verify(build, plan, steps=1)
    assert not outcome.equal
    assert outcome.max_abs_difference["gradients"] == float("inf")
    assert outcome.max_abs_difference["optimizer_state"] == float("inf")


def test_differences() -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([1.0, nan, inf])
    assert _difference(x, x.clone()) == 0.0
    assert _difference(x, torch.tensor([1.5, nan, inf])) == 0.5
    assert _difference(x, torch.tensor([1.0, 2.0, inf])) == inf
    assert _difference(x, torch.tensor([1.0, nan, 0.0])) == inf
    assert _difference(x, None) == inf
    assert _difference(None, None) == 0.0
    assert _difference(x, x.double()) == inf
    assert _difference(torch.ones(0), torch.ones(0)) == 0.0


@pytest.mark.parametrize(
    ("left", "right", "equal", "same_bits"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), True, True),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), True, False),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), True, True),
        (torch.tensor(float("nan")), -torch.tensor(float("nan")), True, False),
        (torch.tensor([0.0]).bfloat16(), torch.tensor([-0.0]).bfloat16(), True, False),
        (torch.tensor([1 + 0j]), torch.tensor([complex(1, -0.0)]), True, False),
        (torch.ones(2, 3).t(), torch.ones(3, 2), True, True),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True, True),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), False, False),
    ],
)
def test_bit_equal_means_every_bit(
    left: torch.Tensor, right: torch.Tensor, equal: bool, same_bits: bool
) -> None:
    """0 and -0 are equal, so that a plan may swap them, but `bit_equal` must not say so."""

    def side(value: torch.Tensor) -> Any:
        return SimpleNamespace(
            step=SimpleNamespace(scaler=None),
            run=lambda: torch.tensor(1.0),
            tensors=lambda: {("parameters", "w"): value, ("gradients", "w"): None},
        )

    outcome = _train(side(left), side(right), 1)
    assert (outcome.equal, outcome.bit_equal) == (equal, same_bits)
