"""Training steps of timm's models by their own names, on random images and labels; nothing is downloaded."""

from __future__ import annotations

import difflib
import importlib.util
import warnings
from functools import partial
from typing import Any

import torch

from tracer.step.context import made_on, made_with_values
from tracer.step.loop import TrainingStep
from tracer.step.named.vision import classifier_step, import_torchvision
from tracer.torch_api import unset_fake_temporarily
from traces.errors import EnvironmentProblem, LowtideError, SpecError
from traces.model_spec import TIMM


def image_size_of(reference: str) -> int:
    """The side of the images that a model's published weights take, in pixels. Raises SpecError: it is not timm's;
    EnvironmentProblem: there is no timm."""
    timm, name = _timm(), reference.removeprefix(TIMM)
    if not timm.is_model(name.partition(".")[0]):
        known = timm.list_models()
        close = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
        hint = f"; did you mean {', '.join(TIMM + n for n in close)}?" if close else "."
        raise SpecError(f"timm {timm.__version__} has no model {name!r}{hint}")
    config = timm.get_pretrained_cfg(name)
    return max(config.input_size[1:]) if config is not None else 224


def timm_step(reference: str, options: dict[str, Any], device: str) -> TrainingStep:
    """Build a timm model in training mode, one random batch, cross-entropy and the optimizer. `reference`: "timm:" and
    timm's own name, with or without the tag of its weights. Raises SpecError: it cannot be made for that image size, or
    is no classifier; EnvironmentProblem: there is no timm.
    """
    with unset_fake_temporarily():
        timm = _timm()
    name, size = reference.removeprefix(TIMM), options["image_size"]
    # Only models with a position for each patch take a size; they refuse another than theirs without being told.
    sized = {"img_size": size} if size != image_size_of(reference) else {}
    with made_on(device, getattr(torch, options["dtype"])), warnings.catch_warnings(action="ignore"):
        try:
            try:
                model = made_with_values(partial(timm.create_model, name, **sized))
            except TypeError:  # it takes no img_size
                model = made_with_values(partial(timm.create_model, name))
        except LowtideError:
            raise
        except Exception as error:
            raise SpecError(f"{reference} cannot be built: {type(error).__name__}: {error}") from error
        classes = getattr(model, "num_classes", 0)
        if not classes:
            raise SpecError(f"{reference} has no classes to train on; write a function that builds its step.")
        channels = getattr(model, "default_cfg", {}).get("input_size", (3,))[0]
        return classifier_step(reference, model, channels, classes, options, device)


def _timm() -> Any:
    """timm, importable beside a CPU-only torch as well; EnvironmentProblem if it is missing."""
    if importlib.util.find_spec("timm") is None:
        raise EnvironmentProblem("timm: models need timm, which is not installed here: pip install timm")
    import_torchvision()
    return importlib.import_module("timm")
