"""Models by name beyond the list: any of transformers from its configuration, timm's, and functions in packages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tracer.step.loop import TrainingStep, run_step
from tracer.step.step import load_spec
from traces.errors import SpecError
from traces.model_spec import short_name, split_reference

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**SMALL, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**TEXT, "num_key_value_heads": 2, "head_dim": 8},
    "roberta": {**TEXT, "max_position_embeddings": 66},
    "vit": {**SMALL, "image_size": 32, "patch_size": 8},
}  # fmt: skip


def config_file(directory: Path, base: str, **more: Any) -> str:
    path = directory / f"{base}.json"
    path.write_text(json.dumps({"model_type": base, **CONFIGS[base], **more}))
    return f"hf:{path}"


def runs(spec: str, **options: Any) -> TrainingStep:
    """Build the step for real, run it, and see that every parameter that has a gradient has a finite one."""
    step = load_spec(spec, options)()
    loss = run_step(step, step.model, step.optimizer)
    assert torch.isfinite(loss)
    return step


@pytest.mark.parametrize(
    ("model_type", "task", "names"),
    [
        ("qwen3", None, "Qwen3ForCausalLM"),
        ("qwen3", "sequence-classification", "Qwen3ForSequenceClassification"),
        ("roberta", "masked-lm", "RobertaForMaskedLM"),
        ("roberta", "token-classification", "RobertaForTokenClassification"),
        ("roberta", "question-answering", "RobertaForQuestionAnswering"),
        ("vit", None, "ViTForImageClassification"),
    ],
)
def test_a_configuration_makes_the_step_of_its_task(
    tmp_path: Path, model_type: str, task: str | None, names: str
) -> None:
    step = runs(config_file(tmp_path, model_type), batch_size=2, task=task)
    assert type(step.model).__name__ == names
    assert step.batch_size == 2


def test_without_a_task_the_file_s_architecture_counts_and_its_type_of_weights_does_not(
    tmp_path: Path,
) -> None:
    spec = config_file(
        tmp_path, "roberta", architectures=["RobertaForSequenceClassification"], dtype="bfloat16"
    )
    step = runs(spec, batch_size=2, seq_len=8)
    assert type(step.model).__name__ == "RobertaForSequenceClassification"
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}
    assert step.kwargs["input_ids"].shape == (2, 8)


def test_a_configuration_is_built_without_memory_and_from_its_directory(tmp_path: Path) -> None:
    file = config_file(tmp_path, "qwen3").removeprefix("hf:")
    (tmp_path / "my-qwen").mkdir()
    Path(file).rename(tmp_path / "my-qwen" / "config.json")
    with FakeTensorMode():
        step = load_spec(f"hf:{tmp_path / 'my-qwen'}", {"seq_len": 16})()
    assert all(isinstance(x, FakeTensor) for x in (*step.model.parameters(), *step.tensors()))
    assert not step.model.config.use_cache
    assert short_name(f"hf:{tmp_path / 'my-qwen' / 'config.json'}") == "my-qwen"


@pytest.mark.parametrize(
    ("more", "options", "said"),
    [
        ({}, {"task": "masked-lm"}, "no qwen3 for --task masked-lm, only for causal-lm"),
        ({}, {"task": "poetry"}, "--task 'poetry' is unknown; known are seq2seq-lm"),
        ({}, {"seq_len": 65}, "--seq-len 65 is more than its 64 positions"),
        ({"model_type": "qwen33"}, {}, "makes no configuration of it: Unrecognized model identifier"),
        ({"model_type": None}, {}, "has no model_type"),
        ({"hidden_act": "nonsense"}, {}, "cannot be built: KeyError|makes no configuration"),
        ({}, {"image": 3}, "takes no --image"),
    ],
)
def test_what_cannot_be_built_says_so(
    tmp_path: Path, more: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    spec = config_file(tmp_path, "qwen3", **more)
    with pytest.raises(SpecError, match=said):
        load_spec(spec, options)()


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot be read .* nothing is\s+downloaded"):
        load_spec("hf:meta-llama/Llama-3.1-8B")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(SpecError, match="no JSON"):
        load_spec(f"hf:{tmp_path / 'x.json'}")


def test_a_model_of_timm() -> None:
    pytest.importorskip("timm")
    step = runs("timm:resnet18", batch_size=2, image_size=64)
    assert type(step.model).__name__ == "ResNet"
    with FakeTensorMode():
        step = load_spec("timm:vit_tiny_patch16_224", {"image_size": 96})()
    assert step.args[0].shape == (32, 3, 96, 96)
    with pytest.raises(SpecError, match="no model 'resnet19'; did you mean timm:resnet18"):
        load_spec("timm:resnet19")


def package(root: Path) -> None:
    """A package `mine` whose training file imports by dots."""
    (root / "mine" / "runs").mkdir(parents=True)
    for directory in ("mine", "mine/runs"):
        (root / directory / "__init__.py").touch()
    (root / "mine" / "nets.py").write_text("from torch import nn\nWIDTH = 4\nNet = nn.Linear\n")
    (root / "mine" / "runs" / "beside.py").write_text("FACTOR = 2\n")
    (root / "mine" / "runs" / "train.py").write_text(
        dedent("""
            import torch
            from ..nets import Net, WIDTH
            from . import beside

            def build(batch_size=2):
                return Net(WIDTH, WIDTH), torch.randn(batch_size, WIDTH), lambda y: y.sum() * beside.FACTOR, None
        """)
    )


@pytest.mark.parametrize("spec", ["mine.runs.train:build", "mine/runs/train.py", "mine/runs/train.py:build"])
def test_a_function_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    package(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert runs(spec, batch_size=3).batch_size == 3
    # Imported anew each time, as files are, and so is what stands beside it once another package was used.
    other = tmp_path / "elsewhere"
    package(other)
    (other / "mine" / "nets.py").write_text("from torch import nn\nWIDTH = 8\nNet = nn.Linear\n")
    monkeypatch.chdir(other)
    assert runs(spec).args[0].shape == (2, 8)


def test_an_installed_module_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path)
    (tmp_path / "mine" / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert split_reference("mine.runs.train:build") == (str(tmp_path / "mine" / "runs" / "train.py"), "build")
    assert split_reference("mine.runs.missing:build") is None
    assert split_reference("timm:resnet18") is None
