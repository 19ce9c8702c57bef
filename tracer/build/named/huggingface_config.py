"""Training steps of any architecture that the installed transformers has, from its configuration in a file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from tracer.build.context import made_on, made_with_values, outside_fake_mode
from tracer.build.loop import TrainingStep
from tracer.build.named.huggingface import (
    MASKED_EVERY,
    NO_LABEL,
    import_transformers,
    quiet_transformers,
    step_of,
)
from tracer.build.named.vision import set_dropout
from traces.errors import LowtideError, SpecError
from traces.model_spec import HF

# Task -> transformers' automatic class for it. Without a task the first counts that has the configuration's model.
TASKS: Final = {
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
    "ctc": "AutoModelForCTC",
    "audio-classification": "AutoModelForAudioClassification",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
}
POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_target_positions")
SEQ_LEN: Final = 512  # tokens, where neither the user nor the model's positions say less
SAMPLES: Final = 16000  # of a waveform: one second
TRANSCRIPT: Final = 16  # tokens of a waveform's transcript


def read_config(reference: str) -> dict[str, Any]:
    """The configuration in the file that "hf:FILE" names, or in the directory's config.json.

    Raises:
        SpecError: there is no such file, or it is no configuration of transformers.
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


def config_step(reference: str, options: dict[str, Any], device: str) -> TrainingStep:
    """Build the model of a configuration in training mode, one random batch with labels, and the optimizer.

    The weights are random and of the type that `options` say, whatever the file says. No attention mask is passed:
    every sequence has the full length.

    Args:
        reference: "hf:" and the path of a config.json, or of its directory.
        options: batch_size, optimizer, dtype; optionally task (a key of TASKS), seq_len (tokens, of a waveform
            samples), image_size, optimizer_impl, dropout, attention, use_cache.
        device: where everything is made.

    Raises:
        SpecError: transformers has no such architecture, or none of it for the task, or it cannot be built so; or
            its batch is one that only the user can make.
        EnvironmentProblem: transformers is not installed or is too old.
    """
    data = read_config(reference)
    with outside_fake_mode():
        transformers = import_transformers()
        with quiet_transformers():
            config = _config(transformers, reference, data, options)
            model_class, task = _class(transformers, reference, config, options.get("task"))
    with quiet_transformers(), made_on(device, getattr(torch, options["dtype"])):
        try:
            model = made_with_values(partial(model_class, config))
        except LowtideError:
            raise
        except (ValueError, ImportError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise SpecError(f"{reference} cannot be built: {type(error).__name__}: {error}") from error
        model.train()
        if options.get("dropout") is not None:
            set_dropout(model, float(options["dropout"]))
        if getattr(model, "loss_type", "") is None and task == "causal-lm":
            model.loss_type = "ForCausalLM"  # which not every class's name tells
        batch = _Batch(reference, config, options).of(model, task)
    return step_of(reference, model, batch, options)


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
        config.use_cache = bool(options.get("use_cache"))
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
        makers: dict[str, Callable[[], torch.Tensor]] = {
            "input_ids": self._tokens,
            "pixel_values": self._images,
            "input_values": self._waveform,
            "input_features": self._spectrum,
        }
        name = model.main_input_name
        required = [
            p.name
            for p in inspect.signature(model.forward).parameters.values()
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name != name
        ]
        if name not in makers or required:
            raise SpecError(
                f"{self.reference}: {type(model).__name__} takes {', '.join([name, *required])}, for which there is "
                "no example; write a function that builds its step: my_training.py:build."
            )
        given = makers[name]()
        return {name: given, **self._labels(task, given)}

    def _length(self) -> int:
        limits = [getattr(self.text, p) for p in POSITIONS if isinstance(getattr(self.text, p, None), int)]
        length = self.options.get("seq_len")
        if length is None:
            # Some count positions from their padding token on, and have a few more than they take: 514 for 512.
            return min([SEQ_LEN, *(1 << limit.bit_length() - 1 for limit in limits)])
        if limits and length > min(limits):
            raise SpecError(f"{self.reference}: --seq-len {length} is more than its {min(limits)} positions.")
        return int(length)

    def _tokens(self) -> torch.Tensor:
        return torch.randint(self.text.vocab_size, (self.rows, self._length()))

    def _images(self) -> torch.Tensor:
        vision = getattr(self.config, "vision_config", self.config)
        size = self.options.get("image_size") or getattr(vision, "image_size", 224)
        sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        return torch.randn(self.rows, getattr(vision, "num_channels", 3), *sides)

    def _waveform(self) -> torch.Tensor:
        if hasattr(self.config, "num_mel_bins"):  # a spectrum after all
            return torch.randn(self.rows, self.config.max_length, self.config.num_mel_bins)
        return torch.randn(self.rows, int(self.options.get("seq_len") or SAMPLES))

    def _spectrum(self) -> torch.Tensor:
        bins = getattr(self.config, "num_mel_bins", 80)
        frames = getattr(self.config, "max_source_positions", 0) * 2 or self._length()
        if hasattr(self.config, "input_feat_per_channel"):  # frames first, then features
            return torch.randn(self.rows, self._length(), self.config.input_feat_per_channel)
        return torch.randn(self.rows, bins, frames)

    def _labels(self, task: str, given: torch.Tensor) -> dict[str, torch.Tensor]:
        if task == "causal-lm":
            return {"labels": given.clone()}  # the model shifts them itself
        if task == "masked-lm":
            labels = torch.full_like(given, NO_LABEL)
            labels[:, ::MASKED_EVERY] = given[:, ::MASKED_EVERY]
            return {"labels": labels}
        if task in ("seq2seq-lm", "speech-seq2seq"):
            return {"labels": torch.randint(self.text.vocab_size, (self.rows, self._length()))}
        if task == "ctc":
            return {"labels": torch.randint(1, self.text.vocab_size, (self.rows, TRANSCRIPT))}
        if task == "question-answering":
            ends = torch.randint(given.shape[1], (2, self.rows))
            return {"start_positions": ends[0], "end_positions": ends[1]}
        shape = given.shape[:2] if task == "token-classification" else (self.rows,)
        return {"labels": torch.randint(self.config.num_labels, shape)}
