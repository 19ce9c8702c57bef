"""Training steps of torchvision's classification models, on random images and labels.

torchvision's wheels are built against a CUDA torch; beside a CPU-only one their compiled library is refused, and
`import torchvision` fails, because the package describes ops that nobody has defined. The models use none of those, so
that declaring the missing signatures is enough (`import_torchvision`).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from tracer.step.batch import WithTargets
from tracer.step.context import made_on, moved
from tracer.step.loop import TrainingStep
from tracer.step.optimizers import make_optimizer
from tracer.torch_api import replaced, unset_fake_temporarily
from traces.errors import EnvironmentProblem, LowtideError, SpecError
from traces.provenance import rehearsing

CLASSES: Final = 1000
# The auxiliary classifiers' share of the loss, as published: GoogLeNet 0.3 each (Szegedy et al. 2014, section
# 5); Inception v3 0.4, the weight that its reference training code and torchvision's tutorial use.
AUXILIARY_WEIGHT: Final = {"googlenet": 0.3, "inception_v3": 0.4}
OPS: Final = ("nms", "qnms")
SIGNATURE: Final = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[Any] = []  # a torch.library.Library withdraws its definitions when it is collected


def image_step(name: str, options: dict[str, Any], device: str) -> TrainingStep:
    """Build a torchvision model in training mode, one random batch, cross-entropy and the optimizer. Raises SpecError
    if the image size does not suit the model.
    """
    with unset_fake_temporarily():
        import_torchvision()
        from torchvision import models
    builder, size = models.get_model_builder(name), options["image_size"]
    with made_on(device, getattr(torch, options["dtype"])), _regnet_widths_computed():
        try:
            model = builder(weights=None, **_settings(name, size))
        except LowtideError:
            raise
        except Exception as error:
            raise SpecError(f"{name} with --image-size {size} cannot be built: {error}") from error
        return classifier_step(name, model, 3, CLASSES, options, device)


def classifier_step(
    name: str, model: nn.Module, channels: int, classes: int, options: dict[str, Any], device: str
) -> TrainingStep:
    """The step of a classifier of images, in training mode, on a random batch."""
    size, batch = options["image_size"], options["batch_size"]
    model.train()
    set_dropout(model, options)
    made = torch.empty if rehearsing() else torch.randn  # on the null driver nobody reads gigabytes of values
    images, labels = moved(device, model, made(batch, channels, size, size), torch.randint(classes, (batch,)))
    return TrainingStep(
        model=model,
        args=(images,),
        kwargs={},
        loss=WithTargets(classification_loss(AUXILIARY_WEIGHT.get(name, 0.0)), (labels,)),
        loss_inputs=(labels,),
        optimizer=make_optimizer(options["optimizer"], model.parameters()),
        batch_size=batch,
        name=name,
        options=dict(options),
    )


def _settings(name: str, size: int) -> dict[str, Any]:
    """Return what a builder must be told beside its defaults."""
    if name == "maxvit_t":
        return {"input_size": (size, size)}
    if name.startswith("vit_"):
        return {"image_size": size}
    # Both warn unless they are told whether to initialise.
    return {"init_weights": True} if name in AUXILIARY_WEIGHT else {}


def _regnet_widths_computed() -> AbstractContextManager[None]:
    """Let RegNet compute its widths, which it does with tensors, on real float32 ones whatever is set."""
    from torchvision.models.regnet import BlockParams

    original = BlockParams.from_init_params

    def compute(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily(), made_on("cpu", torch.float32):
            return original(*args, **kwargs)

    return replaced(BlockParams, from_init_params=compute)


def classification_loss(auxiliary_weight: float) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Cross-entropy of the logits, plus that of the auxiliary classifiers by their weight, if there are any."""

    def loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        if isinstance(outputs, torch.Tensor):
            return functional.cross_entropy(outputs, labels)
        # GoogLeNet and Inception return a named tuple in training: the logits and those of the auxiliaries.
        total = functional.cross_entropy(outputs.logits, labels)
        for field in outputs._fields:
            value = getattr(outputs, field)
            if field != "logits" and value is not None:
                total = total + auxiliary_weight * functional.cross_entropy(value, labels)
        return total

    return loss


def set_dropout(model: nn.Module, options: dict[str, Any]) -> None:
    """Give every dropout of a model, also those inside attention, the same probability, if options say one. Edits the
    model."""
    probability: Any = options.get("dropout")
    for module in model.modules() if probability is not None else ():
        if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
            module.p = float(probability)
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = float(probability)


def import_torchvision() -> ModuleType:
    """Import torchvision, declaring the signatures of its missing ops if it fails for want of them. Raises
    EnvironmentProblem if torchvision is not installed, or does not fit this torch for another reason.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(
            f"torchvision cannot be imported ({error}); install it with: pip install 'lowtide[torch]'"
        ) from None
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise _misfit(error) from error
    # The failed import leaves submodules behind, which would be taken for complete ones.
    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + SIGNATURE)
    _kept.append(library)
    try:
        return importlib.import_module("torchvision")
    except (RuntimeError, ImportError) as error:
        raise _misfit(error) from error


def help_torchvision() -> None:
    """Make torchvision importable beside a CPU-only torch, if it is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()


def _misfit(error: Exception) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"torchvision does not work with torch {torch.__version__} ({error}); install versions that belong "
        "together: pip install --upgrade 'lowtide[torch]'"
    )
