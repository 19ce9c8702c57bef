"""Every family of models trains by random plans to the same bits as without one."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if importlib.util.find_spec("torchvision") is None:  # importing it is left to Lowtide
    pytest.skip("no torchvision", allow_module_level=True)

from executor.verifying import KINDS, verify  # noqa: E402
from simulator.core.problem import Problem  # noqa: E402
from tests.torch import small_nets  # noqa: E402
from tests.torch.steps import plan_of, random_actions, recompute_all, trace_of  # noqa: E402
from tracer.step.step import load_spec  # noqa: E402
from traces.records.plan import Action  # noqa: E402
from traces.records.trace import Trace  # noqa: E402

IMAGES = {"batch_size": 2, "image_size": 64}
TOKENS = {"batch_size": 2, "seq_len": 16}
SMALL: list[tuple[str, dict[str, Any], int]] = [
    (small_nets.spec("mlp"), {}, 10),
    (small_nets.spec("residual"), {}, 10),
    (small_nets.spec("branches"), {}, 3),
]
NAMED: list[tuple[str, dict[str, Any], int]] = [
    ("resnet18", {"batch_size": 2, "image_size": 32}, 3),
    ("bert-tiny", TOKENS, 3),
    ("llama-tiny", TOKENS, 3),
    ("t5-tiny", TOKENS, 3),
]
GPT2: tuple[str, dict[str, Any], int] = ("gpt2-tiny", TOKENS, 3)
SLOW: list[tuple[str, dict[str, Any], int]] = [
    ("vit-tiny", {"batch_size": 2, "image_size": 32}, 3),
    ("googlenet", IMAGES, 3),
    ("densenet121", {"batch_size": 2, "image_size": 32}, 3),
    ("mobilenet_v3_small", IMAGES, 3),
    ("shufflenet_v2_x0_5", IMAGES, 3),
    ("inception_v3", {"batch_size": 2, "image_size": 299}, 1),
    ("swin_t", IMAGES, 3),
]


def some_actions(trace: Trace, rng: random.Random) -> tuple[Action, ...]:
    """The first random plan that does anything: where there is little to choose, some draws choose nothing."""
    return next(a for a in (random_actions(trace, rng) for _ in range(100)) if a)


def check(model: str, options: dict[str, Any], steps: int, kind: str, seed: int = 1) -> None:
    build = load_spec(model, options)
    trace = trace_of(model, options)
    problem = Problem(trace)
    actions = {
        "keep-all": lambda: (),
        "recompute-all": lambda: recompute_all(problem),
        "recompute-all-unshared": lambda: recompute_all(problem, share=False),
        "random": lambda: some_actions(trace, random.Random(seed)),
    }[kind]()
    assert bool(actions) == (kind != "keep-all")
    outcome = verify(build, plan_of(trace, *actions), steps=steps)
    assert outcome.bit_equal, outcome.first_difference
    assert outcome.max_abs_difference == dict.fromkeys(KINDS, 0.0)
    assert len(outcome.losses) == steps


@pytest.mark.parametrize("kind", ["keep-all", "random"])
@pytest.mark.parametrize(("model", "options", "steps"), SMALL, ids=lambda x: str(x).rpartition("/")[2])
def test_small_nets_are_bit_equal(model: str, options: dict[str, Any], steps: int, kind: str) -> None:
    check(model, options, steps, kind)


@pytest.mark.parametrize(("model", "options", "steps"), NAMED, ids=str)
def test_bit_equal(model: str, options: dict[str, Any], steps: int) -> None:
    check(model, options, steps, "random")


def test_all_of_gpt2_recomputed_rebuilds_its_splits() -> None:
    check(*GPT2, "recompute-all")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keep-all", "random", "recompute-all", "recompute-all-unshared"])
@pytest.mark.parametrize(("model", "options", "steps"), SLOW, ids=lambda x: str(x).rpartition("/")[2])
def test_bit_equal_slow(model: str, options: dict[str, Any], steps: int, kind: str) -> None:
    check(model, options, steps, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "options", "steps"), [*NAMED, GPT2], ids=str)
def test_bit_equal_with_all_saved(model: str, options: dict[str, Any], steps: int) -> None:
    check(model, options, steps, "keep-all")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 7))
@pytest.mark.parametrize(
    ("model", "options", "steps"), [*SMALL, *NAMED, GPT2], ids=lambda x: str(x).rpartition("/")[2]
)
def test_more_random_plans(model: str, options: dict[str, Any], steps: int, seed: int) -> None:
    check(model, options, steps, "random", seed)
