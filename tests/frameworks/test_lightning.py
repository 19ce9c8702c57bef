"""Lightning's Trainer with the callback: the same training within the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
lightning: Any = pytest.importorskip("lightning")

from executor.frameworks.lightning import PlanCallback  # noqa: E402
from tests.frameworks.harness import batches, gpt2, same, trained, within_budget  # noqa: E402
from traces.errors import PlanError, SpecError  # noqa: E402

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]


class Module(lightning.LightningModule):
    """A network as the attribute `net`, its loss logged, its validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = gpt2()
        self.losses: list[float] = []

    def training_step(self, batch: Any, _k: int) -> Any:
        loss = self.net(**batch).loss
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, _k: int) -> None:
        self.losses.append(self.net(**batch).loss.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Calls(Module):
    """The step goes through the LightningModule's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, **batch: Any) -> Any:
        return self.net(**batch).loss * self.scale

    def training_step(self, batch: Any, _k: int) -> Any:
        loss = self(**batch)
        self.losses.append(loss.item())
        return loss


def training(
    directory: Path, chosen: Any, kind: type[Module] = Module, **settings: Any
) -> tuple[Any, list[float]]:
    module = kind()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=directory, callbacks=[chosen] if chosen else [], num_sanity_val_steps=0,
        **{"enable_checkpointing": False, **settings},
    )  # fmt: skip
    loaders = [torch.utils.data.DataLoader(batches(n), batch_size=None) for n in (10, 2)]
    trainer.fit(module, *loaders)
    return module, module.losses


def callback(**settings: Any) -> PlanCallback:
    return PlanCallback(**{"budget": "70%", "seconds": 2, "say": lambda text: None, **settings})


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating, clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "bf16": {"precision": "bf16-mixed"},
    "validating, checkpointing": {"val_check_interval": 3, "enable_checkpointing": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_trainer_trains_the_same_by_a_plan_of_its_first_batch(tmp_path: Path, name: str) -> None:
    eager = trained(lambda: training(tmp_path / "eager", None, **SETTINGS[name]))
    chosen = callback()
    planned = trained(lambda: training(tmp_path / "planned", chosen, **SETTINGS[name]))
    same(eager, planned)
    receipt = chosen.receipt
    assert (receipt.planned_steps, receipt.unplanned_steps, len(receipt.captures)) == (10, 0, 1)
    within_budget(planned, receipt.plan)


def test_a_step_through_the_module_s_own_forward(tmp_path: Path) -> None:
    eager = trained(lambda: training(tmp_path / "eager", None, Calls))
    chosen = callback()
    planned = trained(lambda: training(tmp_path / "planned", chosen, Calls))
    same(eager, planned)
    assert chosen.receipt.planned_steps == 10
    within_budget(planned, chosen.receipt.plan)


def test_a_network_that_the_step_does_not_call_is_said_after_the_first_batch(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="did not call the GPT2Model that was to be planned"):
        training(tmp_path, callback(module="unused"), Unused)
    with pytest.raises(SpecError, match="no module 'nett'"):
        training(tmp_path, callback(module="nett"))


class Unused(Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = gpt2().transformer


def test_the_module_is_afterwards_as_it_was(tmp_path: Path) -> None:
    module, _ = training(tmp_path, callback())
    assert type(module.net) is type(gpt2())
    assert not [k for k in vars(module.net) if k.startswith("_lowtide")]
