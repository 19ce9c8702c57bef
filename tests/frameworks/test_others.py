"""Accelerate, TRL, PEFT and timm: the same training within the budget, or an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from executor import apply_plan, fit  # noqa: E402
from tests.frameworks.harness import batches, gpt2, same, texts, trained, within_budget  # noqa: E402
from traces.errors import PlanError  # noqa: E402

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]
Made = tuple[nn.Module, list[float]]


def fitted(model: nn.Module, batch: Any, optimizer: Any, **settings: Any) -> nn.Module:
    return fit(model, batch, optimizer=optimizer, budget="70%", seconds=2, say=lambda text: None, **settings)


def ten_steps(run: Callable[[bool], Made], *, captures: int = 1, by: Any = None, within: bool = True) -> None:
    """`run(False)` and `run(True)` train the same, the second by a plan within its budget; `by`: of a callback."""
    eager, receipts = trained(lambda: run(False)), []

    def planned_run() -> Made:
        made = run(True)
        receipts.append(
            by.receipt if by else next(m for m in made[0].modules() if hasattr(m, "receipt")).receipt()
        )
        return made

    planned = trained(planned_run)
    same(eager, planned)
    (receipt,) = receipts
    assert (receipt.planned_steps, receipt.unplanned_steps, len(receipt.captures)) == (10, 0, captures)
    if within:
        within_budget(planned, receipt.plan)


# Accelerate


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps the precision of its first Accelerator for the process."""
    state: Any = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(True)
    yield
    state.AcceleratorState._reset_state(True)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_with_the_plan_before_and_after_prepare(when: str, precision: str) -> None:
    accelerate: Any = pytest.importorskip("accelerate")

    def run(planned: bool) -> Made:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        model, data = gpt2(), batches()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if planned and when == "before":
            amp = "bfloat16" if precision == "bf16" else None
            model = fitted(model, data[0], optimizer, amp=amp)
        model, wrapped = accelerator.prepare(model, optimizer)
        if planned and when == "after":
            model = fitted(model, data[0], optimizer)
        losses = []
        for batch in data:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            wrapped.step()
            wrapped.zero_grad()
            losses.append(loss.item())
        return model, losses

    ten_steps(run)


@pytest.mark.usefixtures("fresh_accelerate")
def test_accelerate_s_unwrapping_does_not_lose_the_plan() -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    data = batches(2)
    planned = fitted(gpt2(), data[0], None, amp="bfloat16")
    prepared = accelerator.prepare(planned)
    prepared(**data[0]).loss.backward()
    bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert bare is planned
    with torch.autocast("cpu", torch.bfloat16):
        loss = bare(**data[1]).loss
    loss.backward()
    assert bare.receipt().planned_steps == 2


# TRL


def test_trl_s_fine_tuning_by_a_plan_of_its_first_batch(tmp_path: Path) -> None:
    trl: Any = pytest.importorskip("trl")
    datasets: Any = pytest.importorskip("datasets")
    from transformers import PreTrainedTokenizerFast

    from executor.frameworks.transformers import PlanCallback

    # Its loss in chunks, a backward of its own that writes into slices, breaks the graph.
    chosen = PlanCallback(budget="70%", parts=True, say=lambda text: None)

    def run(planned: bool) -> Made:
        data = datasets.Dataset.from_dict({"input_ids": [x.tolist() for x in texts()]})
        args = trl.SFTConfig(
            str(tmp_path), per_device_train_batch_size=4, max_steps=10, logging_steps=1, report_to=[], seed=1,
            use_cpu=True, disable_tqdm=True, save_strategy="no", learning_rate=1e-3, bf16=False,
            gradient_checkpointing=True, dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            gpt2(), args=args, train_dataset=data, processing_class=tokenizer(PreTrainedTokenizerFast),
            callbacks=[chosen] if planned else [],
        )  # fmt: skip
        trainer.train()
        return trainer.model, [x["loss"] for x in trainer.state.log_history if "loss" in x]

    ten_steps(run, by=chosen, captures=2, within=False)
    assert chosen.receipt.breaks


def tokenizer(kind: Any) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({f"w{k}": k for k in range(97)}, unk_token="w1"))
    return kind(tokenizer_object=words, eos_token="w0", pad_token="w0", unk_token="w1")


# PEFT


def with_lora(model: nn.Module) -> nn.Module:
    peft: Any = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(model, config).train()


@pytest.mark.parametrize("where", ["around", "inside"])
def test_lora_with_the_plan_around_and_inside(where: str) -> None:
    def run(planned: bool) -> Made:
        model, data = with_lora(gpt2()), batches()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if planned:
            inner = model if where == "around" else model.base_model.model
            fitted(inner, data[0], optimizer)
        return model, loop(model, optimizer, data)

    ten_steps(run)


def test_a_plan_from_before_lora_is_refused() -> None:
    data = batches(1)
    plan = fitted(gpt2(), data[0], None).receipt().plan
    model = with_lora(apply_plan(gpt2(), plan))
    with pytest.raises(PlanError, match="another graph"):
        model(**data[0])


def test_lora_in_a_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from executor.frameworks.transformers import PlanCallback
    from tests.frameworks.test_transformers import Losses, Rows

    chosen = PlanCallback(budget="70%", seconds=2, say=lambda text: None)

    def run(planned: bool) -> Made:
        args = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, max_steps=10, logging_steps=1, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no", learning_rate=1e-2, label_names=["labels"],
        )  # fmt: skip
        losses = Losses()
        given = [losses, *([chosen] if planned else [])]
        trainer = Trainer(with_lora(gpt2()), args, train_dataset=Rows(), callbacks=given)
        trainer.train()
        return trainer.model, losses.seen

    ten_steps(run, by=chosen)


def loop(model: nn.Module, optimizer: Any, data: list[dict[str, torch.Tensor]]) -> list[float]:
    losses = []
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# timm


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_timm_s_own_loop(name: str) -> None:
    """As timm's train.py goes: its optimizer, loss, scheduler, clipping and averaged weights."""
    timm: Any = pytest.importorskip("timm")
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    def run(planned: bool) -> Made:
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=10, drop_rate=0.1, drop_path_rate=0.1).train()
        size = model.pretrained_cfg["input_size"][-1]
        g = torch.Generator().manual_seed(2)
        data = [
            (torch.randn(4, 3, size, size, generator=g), torch.randint(10, (4,), generator=g))
            for _ in range(10)
        ]
        optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
        criterion = LabelSmoothingCrossEntropy(0.1)
        if planned:
            model = fit(
                model, data[0], loss=criterion, optimizer=optimizer, budget="80%", seconds=2,
                say=lambda text: None,
            )  # fmt: skip
        average = ModelEmaV3(model, decay=0.9)
        losses = []
        for k, (x, y) in enumerate(data):
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            average.update(model, step=k)
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses.append(float(average(data[0][0]).sum() + functional.softmax(model(data[0][0]), 1).max()))
        return model, losses

    ten_steps(run, within=False)  # the evaluation at its end is not the step


def test_a_plan_s_step_in_a_file_is_the_same_model_by_name() -> None:
    pytest.importorskip("timm")
    from tests.torch.steps import plan_of, recorded
    from tracer.step.step import load_spec

    trace = recorded(load_spec("timm:test_vit", {"batch_size": 2})).trace
    step = load_spec("timm:test_vit", {"batch_size": 2})()
    planned = apply_plan(step.model, plan_of(trace))
    step.loss_of(planned(*step.args)).backward()
    assert planned.receipt().planned_steps == 1
