"""Models by others, from their own packages: traced by name, planned, and trained to eager's bits by the plan.

Run with -m slow. The architectures of transformers are as their configurations make them, small; those of timm and
diffusers want these packages.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from executor.verifying import verify
from simulator.prediction import ask as simulator
from tests.bench import architectures
from tests.torch.steps import recorded
from tracer.step.step import load_spec
from traces.errors import BudgetError

BUDGETS = ("85%", "95%")  # the second where the first is below the floor
SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 99, "max_position_embeddings": 66, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
PLAIN = (
    "bert",
    "roberta",
    "electra",
    "albert",
    "camembert",
    "xlm-roberta",
    "roformer",
    "megatron-bert",
    "mpnet",
    "ernie",
    "rembert",
    "gpt_neox",
    "opt",
    "bloom",
    "biogpt",
    "xglm",
    "layoutlm",
)
GROUPED_ONES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "mixtral",
    "gemma",
    "stablelm",
    "olmo",
    "olmo2",
    "starcoder2",
)
TRANSFORMERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(PLAIN, SMALL),
    **dict.fromkeys(GROUPED_ONES, GROUPED),
    "ernie": {
        **SMALL,
        "output_hidden_states": True,
        "output_attentions": True,
        "attn_implementation": "eager",
    },
}


def check(spec: str, **options: Any) -> None:
    """The step of these options has a plan, and trains by it to eager's bits."""
    build = load_spec(spec, options)
    trace = recorded(build).trace
    try:
        plan = simulator.plan(trace, BUDGETS[0], seconds=2)
    except BudgetError:
        plan = simulator.plan(trace, BUDGETS[1], seconds=2)
    outcome = verify(build, plan, steps=2)
    assert outcome.bit_equal, outcome.first_difference


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"model_type": name, **TRANSFORMERS[name]}))
    check(f"hf:{path}", batch_size=8, seq_len=32)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in architectures.CONFIGS if name not in TRANSFORMERS])
def test_larger_transformers(name: str) -> None:
    check(f"{architectures.__file__}:{name}", batch_size=4, seq_len=256)


@pytest.mark.slow
@pytest.mark.parametrize("name", architectures.TIMM)
def test_timm(name: str) -> None:
    if not find_spec("timm"):  # which imports torchvision, as `trace` knows to do
        pytest.skip("timm is not installed")
    check(f"timm:{name}", batch_size=8 if "_b" in name else 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", architectures.SEGMENTATION)
def test_segmentation(name: str) -> None:
    check(f"{architectures.__file__}:{name}", batch_size=4, image_size=64)


@pytest.mark.slow
@pytest.mark.parametrize("name", architectures.DIFFUSERS)
def test_diffusers(name: str) -> None:
    pytest.importorskip("diffusers")
    check(f"{architectures.__file__}:{name}", batch_size=4)
