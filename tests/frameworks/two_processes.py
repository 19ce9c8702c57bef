"""What each of two processes does under DistributedDataParallel, as `torch.distributed.run` starts them (gloo)."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tests.frameworks.conftest  # noqa: F401  # torchvision beside a CPU-only torch
from tests.frameworks.harness import trained


def trainer(chosen: Any) -> Any:
    from tests.frameworks.test_transformers import training

    with tempfile.TemporaryDirectory() as directory:
        return training(Path(directory), chosen, ddp_backend="gloo", ddp_find_unused_parameters=False)


def lightning(chosen: Any) -> Any:
    from tests.frameworks.test_lightning import training

    with tempfile.TemporaryDirectory() as directory:
        return training(Path(directory), chosen, strategy="ddp", devices=2)


def compared(run: Callable[[Any], Any], callback: type[Any], **settings: Any) -> dict[str, Any]:
    """Whether training is the same with and without a plan, and both peaks."""
    chosen = callback(budget="80%", seconds=2, say=lambda text: None, **settings)
    eager, planned = trained(lambda: run(None)), trained(lambda: run(chosen))
    plan = chosen.receipt.plan
    return {
        "losses": len(eager.losses),
        "same losses": eager.losses == planned.losses,
        "same state": all(torch.equal(x, planned.state[k]) for k, x in eager.state.items()),
        "planned steps": chosen.receipt.planned_steps,
        "eager": eager.peak_bytes,
        "planned": planned.peak_bytes,
        "predicted": plan.predicted["plan"]["peak_allocated_bytes"],
    }


def main(which: str, file: str) -> None:
    if which == "transformers":
        from executor.frameworks.transformers import PlanCallback

        found = compared(trainer, PlanCallback)
    else:
        from executor.frameworks.lightning import PlanCallback as InLightning

        found = compared(lightning, InLightning)
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
