"""transformers' Trainer with the callback: the same training within the budget, whatever the Trainer does around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from torch import nn  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from executor.frameworks.transformers import PlanCallback  # noqa: E402
from tests.frameworks.harness import BATCH, Ended, gpt2, same, texts, trained, within_budget  # noqa: E402

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]


class Rows(torch.utils.data.Dataset):
    """Texts with their labels, and a column that the model does not take."""

    def __init__(self, count: int = 40, lengths: tuple[int, ...] = ()) -> None:
        self.rows = [x[: lengths[k % len(lengths)]] if lengths else x for k, x in enumerate(texts(count))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"input_ids": self.rows[k], "labels": self.rows[k].clone(), "source": k}


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen += [(state.global_step, k, v) for k, v in logs.items() if k.endswith(("loss", "norm"))]


def training(
    directory: Path,
    callback: PlanCallback | None,
    data: Any = None,
    resume: str | None = None,
    **settings: Any,
) -> tuple[nn.Module, list[Any]]:
    made = {"max_steps": 10, "save_strategy": "no", **settings}
    args = TrainingArguments(
        str(directory), per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, logging_steps=1,
        report_to=[], use_cpu=True, seed=1, disable_tqdm=True, learning_rate=1e-3, **made,
    )  # fmt: skip
    losses = Losses()
    trainer = Trainer(
        gpt2(), args, train_dataset=data or Rows(), eval_dataset=Rows(8),
        callbacks=[losses, *([callback] if callback else [])],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model, losses.seen


def callback(**settings: Any) -> PlanCallback:
    return PlanCallback(**{"budget": "70%", "seconds": 2, "say": lambda text: None, **settings})


def both(tmp_path: Path, chosen: PlanCallback, **settings: Any) -> tuple[Ended, Ended]:
    eager = trained(lambda: training(tmp_path / "eager", None, **settings))
    return eager, trained(lambda: training(tmp_path / "planned", chosen, **settings))


SETTINGS: dict[str, tuple[dict[str, Any], int]] = {  # and how many planned steps
    "plain": ({}, 10),
    "accumulating": ({"gradient_accumulation_steps": 2}, 20),
    "bf16": ({"bf16": True}, 10),
    "evaluating": ({"eval_strategy": "steps", "eval_steps": 3}, 10),
    "checkpointing": ({"gradient_checkpointing": True}, 10),
    "label smoothing": ({"label_smoothing_factor": 0.1}, 10),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_trainer_trains_the_same_by_a_plan_of_its_first_batch(tmp_path: Path, name: str) -> None:
    settings, steps = SETTINGS[name]
    chosen = callback()
    eager, planned = both(tmp_path, chosen, **settings)
    same(eager, planned)
    receipt = chosen.receipt
    assert (receipt.planned_steps, receipt.unplanned_steps, len(receipt.captures)) == (steps, 0, 1)
    within_budget(planned, receipt.plan, loss_outside=name == "label smoothing")


def test_the_model_is_afterwards_as_it_was(tmp_path: Path) -> None:
    model, _ = training(tmp_path, callback(), max_steps=2, gradient_checkpointing=True)
    assert type(model) is type(gpt2())
    assert model.is_gradient_checkpointing
    assert not [k for k in vars(model) if k.startswith("_lowtide")]


def test_a_run_that_is_resumed(tmp_path: Path) -> None:
    """Five steps and a checkpoint, then five more by a second Trainer: as ten without a plan."""
    saves = {"save_strategy": "steps", "save_steps": 5}
    eager = trained(lambda: training(tmp_path / "eager", None))

    def resumed() -> Any:
        training(tmp_path / "first", callback(), max_steps=10, **saves)
        return training(tmp_path / "second", callback(), resume=str(tmp_path / "first" / "checkpoint-5"))

    planned = trained(resumed)

    def late(
        ended: Ended,
    ) -> list[Any]:  # train_loss is a mean over all steps of this run, of which there are fewer
        return [x for x in ended.losses if x[0] > 5 and x[1] != "train_loss"]

    assert late(eager) == late(planned)
    for name, x in eager.state.items():
        assert torch.equal(x, planned.state[name]), name
    config = json.loads((tmp_path / "first" / "checkpoint-5" / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]


def test_lengths_that_vary_and_a_smaller_last_batch(tmp_path: Path) -> None:
    from transformers import default_data_collator

    def run(chosen: PlanCallback | None) -> Any:
        lengths = (16,) * BATCH + (24,) * BATCH + (16,) * (BATCH - 1)
        args = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=BATCH, num_train_epochs=1, logging_steps=1, report_to=[],
            use_cpu=True, disable_tqdm=True, save_strategy="no", train_sampling_strategy="sequential",
        )  # fmt: skip
        losses = Losses()
        given = [losses, *([chosen] if chosen else [])]
        data = Rows(len(lengths), lengths)
        trainer = Trainer(
            gpt2(), args, train_dataset=data, data_collator=default_data_collator, callbacks=given
        )
        trainer.train()
        return trainer.model, losses.seen

    chosen = callback(budget="95%")
    same(trained(lambda: run(None)), trained(lambda: run(chosen)))
    assert chosen.receipt.planned_steps + chosen.receipt.unplanned_steps == 3
    assert chosen.receipt.planned_steps >= 2
