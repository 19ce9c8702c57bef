"""Training steps of transformers' models: by family and size, or of any architecture by its configuration."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from tracer.step.batch import loss_in_outputs
from tracer.step.context import made_on, made_with_values, moved
from tracer.step.loop import TrainingStep
from tracer.step.named.vision import help_torchvision, set_dropout
from tracer.step.optimizers import make_optimizer
from tracer.torch_api import unset_fake_temporarily
from traces.errors import EnvironmentProblem, LowtideError, SpecError
from traces.model_spec import HF

# transformers marks label positions without a loss by this id.
NO_LABEL: Final = -100
# One token in seven carries a masked-LM label: 14 %, where BERT draws 15 %. A fixed pattern never leaves a
# small batch without any label.
MASKED_EVERY: Final = 7
# Task -> transformers' automatic class for it. Without a task the first counts that has the configuration's model.
TASKS: Final = {
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
}
POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_target_positions")
SEQ_LEN: Final = 512  # tokens, where neither the user nor the model's positions say less


# Family -> its task, and the attributes of its configuration that hold a dropout probability.
FAMILIES: Final = {
    "bert": ("masked-lm", ("hidden_dropout_prob", "attention_probs_dropout_prob")),
    "gpt2": ("causal-lm", ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    "llama": ("causal-lm", ("attention_dropout",)),
    "t5": ("seq2seq-lm", ("dropout_rate",)),
    "vit": ("image-classification", ("hidden_dropout_prob", "attention_probs_dropout_prob")),
}
# Families' defaults are the published ones; stated here is only what training needs or the defaults lack.
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "llama": {"max_position_embeddings": 131072},
    "t5": {"decoder_start_token_id": 0},
    "vit": {"num_labels": 1000},
}


def family_step(
    family: str, name: str, sizes: Mapping[str, Any], options: dict[str, Any], device: str
) -> TrainingStep:
    """The step of a model of a family of FAMILIES, as `config_step` makes it (and raises); `sizes` differ from the
    family's default configuration. T5's encoder and decoder both get seq_len tokens.
    """
    task, dropouts = FAMILIES[family]
    data = {"model_type": family, **SETTINGS.get(family, {}), **sizes}
    if options.get("dropout") is not None:
        data |= dict.fromkeys(dropouts, float(options["dropout"]))
    if options.get("image_size", 0) % data.get("patch_size", 1):
        raise SpecError(
            f"{name}: --image-size {options['image_size']} is not a multiple of its patches of {data['patch_size']} "
            "pixels."
        )
    return config_step(name, data, task, options, device)


def read_config(reference: str) -> dict[str, Any]:
    """The configuration in the file that "hf:FILE" names, or in the directory's config.json. Raises SpecError if there
    is no such file, or it is no configuration of transformers.
    """
    path = Path(reference.removeprefix(HF)).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(
            f"{reference}: {path} cannot be read ({error.strerror}); hf: takes a model's config.json, and nothing is "
            "downloaded."
        ) from None
    except ValueError as error:
        raise SpecError(f"{reference}: {path} is no JSON ({error}).") from None
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise SpecError(f"{reference}: {path} has no model_type, so it is no configuration of transformers.")
    return data


def config_step(
    reference: str, data: dict[str, Any], task: str | None, options: dict[str, Any], device: str
) -> TrainingStep:
    """Build the model of a configuration in training mode, one random batch with labels, and the optimizer.

    The weights are random and of the type that `options` say, whatever `data` says. No attention mask is passed: every
    sequence has the full length. `task`: a key of TASKS; None: the first that transformers has for it, or that the
    configuration names. Raises SpecError: transformers has no such architecture, or none of it for the task, or it
    cannot be built so, or only the user can make its batch; EnvironmentProblem: transformers is missing or too old.
    """
    with unset_fake_temporarily():
        transformers = import_transformers()
        with quiet_transformers():
            config = _config(transformers, reference, data, options)
            model_class, task = _class(transformers, reference, config, task)
    with quiet_transformers(), made_on(device, getattr(torch, options["dtype"])):
        try:
            model = made_with_values(partial(model_class, config))
        except (ValueError, ImportError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise SpecError(f"{reference} cannot be built: {type(error).__name__}: {error}") from error
        model.train()
        set_dropout(model, options)
        if getattr(model, "loss_type", "") is None and task == "causal-lm":
            model.loss_type = "ForCausalLM"  # which not every class's name tells
        batch = _Batch(reference, config, options).of(model, task)
        batch = dict(zip(batch, moved(device, model, *batch.values()), strict=True))
    return TrainingStep(
        model=model,
        args=(),
        kwargs=batch,
        loss=loss_in_outputs,
        loss_inputs=(),
        optimizer=make_optimizer(options["optimizer"], model.parameters()),
        batch_size=options["batch_size"],
        name=reference,
        options=dict(options),
    )


def _config(transformers: Any, reference: str, data: dict[str, Any], options: dict[str, Any]) -> Any:
    """The configuration, with what the options change in it."""
    values = {k: v for k, v in data.items() if k not in ("model_type", "dtype", "torch_dtype")}
    size = options.get("image_size")
    if size is not None and "image_size" in values:
        values["image_size"] = size
    try:
        config = transformers.AutoConfig.for_model(data["model_type"], **values)
    except LowtideError:
        raise
    except Exception as error:  # of checks that each architecture has of its own
        raise SpecError(
            f"{reference}: transformers {transformers.__version__} makes no configuration of it: {error}"
        ) from error
    if size is not None and hasattr(config, "image_size"):
        config.image_size = size
    if hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values are copied for generation alone
    if options.get("attention"):
        config._attn_implementation = options["attention"]
    return config


def _class(transformers: Any, reference: str, config: Any, task: str | None) -> tuple[Any, str]:
    """The model's class and the task that it is for."""
    if task is not None and task not in TASKS:
        raise SpecError(f"--task {task!r} is unknown; known are {', '.join(TASKS)}.")
    offered: dict[str, Any] = {}
    for name, auto in TASKS.items():
        found = getattr(transformers, auto)._model_mapping.get(type(config), None)
        if found is not None:
            offered[name] = found[0] if isinstance(found, (list, tuple)) else found
    if not offered:
        raise SpecError(
            f"{reference}: transformers has {config.model_type} for none of the tasks {', '.join(TASKS)}; write a "
            "function that builds its step: my_training.py:build."
        )
    if task is None:
        named = set(config.architectures or ())
        task = next((t for t, c in offered.items() if c.__name__ in named), next(iter(offered)))
    if task not in offered:
        raise SpecError(
            f"{reference}: transformers has no {config.model_type} for --task {task}, only for {', '.join(offered)}."
        )
    return offered[task], task


class _Batch:
    """Random arguments of a model, by what its `forward` and its configuration say."""

    def __init__(self, reference: str, config: Any, options: dict[str, Any]) -> None:
        self.reference, self.config, self.options = reference, config, options
        self.rows: int = options["batch_size"]
        self.text = config.get_text_config()

    def of(self, model: Any, task: str) -> dict[str, torch.Tensor]:
        """The model's main input, and the labels of the task."""
        makers = {"input_ids": self._tokens, "pixel_values": self._images}
        name, taken = model.main_input_name, inspect.signature(model.forward).parameters.values()
        plain = [p for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != name]
        required = [p.name for p in plain if p.default is p.empty]
        if name not in makers or required:
            raise SpecError(
                f"{self.reference}: {type(model).__name__} takes {', '.join([name, *required])}, for which there is "
                "no example; write a function that builds its step: my_training.py:build."
            )
        given = makers[name]()
        return {name: given, **self._labels(task, given)}

    def _tokens(self) -> torch.Tensor:
        limits = [getattr(self.text, p) for p in POSITIONS if isinstance(getattr(self.text, p, None), int)]
        length = self.options.get("seq_len")
        if length is None:
            # Some count positions from their padding token on, and have a few more than they take: 514 for 512.
            length = min([SEQ_LEN, *(1 << limit.bit_length() - 1 for limit in limits)])
        elif limits and length > min(limits):
            raise SpecError(f"{self.reference}: --seq-len {length} is more than its {min(limits)} positions.")
        return torch.randint(self.text.vocab_size, (self.rows, length))

    def _images(self) -> torch.Tensor:
        vision = getattr(self.config, "vision_config", self.config)
        size = self.options.get("image_size") or getattr(vision, "image_size", 224)
        sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        return torch.randn(self.rows, getattr(vision, "num_channels", 3), *sides)

    def _labels(self, task: str, given: torch.Tensor) -> dict[str, torch.Tensor]:
        if task == "question-answering":
            ends = torch.randint(given.shape[1], (2, self.rows))
            return {"start_positions": ends[0], "end_positions": ends[1]}
        if task == "causal-lm":
            labels = given.clone()  # the model shifts them itself
        elif task == "masked-lm":
            labels = torch.full_like(given, NO_LABEL)
            labels[:, ::MASKED_EVERY] = given[:, ::MASKED_EVERY]
        elif task == "seq2seq-lm":
            labels = self._tokens()
        else:
            shape = given.shape[:2] if task == "token-classification" else (self.rows,)
            labels = torch.randint(self.config.num_labels, shape)
        return {"labels": labels}


def import_transformers() -> Any:
    """transformers, importable beside a CPU-only torch as well; EnvironmentProblem if it is missing or old."""
    help_torchvision()
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentProblem(
            f"transformers cannot be imported ({error}); install it with: pip install 'lowtide[torch]'"
        ) from None
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise EnvironmentProblem(
            f"transformers {transformers.__version__} is too old, Lowtide needs 5: pip install --upgrade "
            "'lowtide[torch]'"
        )
    return transformers


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' remarks about token ids and losses off the user's terminal."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(before)
