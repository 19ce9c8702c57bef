"""Training steps of transformers' models by family and size, with their own heads and losses."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tracer.build.batch import loss_in_outputs
from tracer.build.context import made_on, outside_fake_mode
from tracer.build.loop import TrainingStep
from tracer.build.named.torchvision_shim import import_torchvision
from tracer.build.optimizers import make_optimizer
from traces.errors import EnvironmentProblem, SpecError

# transformers marks label positions without a loss by this id.
NO_LABEL: Final = -100
# One token in seven carries a masked-LM label: 14 %, where BERT draws 15 %. A fixed pattern never leaves a
# small batch without any label.
MASKED_EVERY: Final = 7
IMAGE_CLASSES: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What transformers calls the parts of a family."""

    config: str
    model: str
    dropouts: tuple[str, ...]  # the config's attributes that hold a dropout probability
    positions: str = ""  # the config's attribute that limits the sequence length; "" for no limit
    settings: dict[str, Any] = field(default_factory=dict)


# Families' defaults are the published ones; stated here is only what training needs or the defaults lack.
FAMILIES: Final = {
    "bert": Family(
        config="BertConfig",
        model="BertForMaskedLM",
        positions="max_position_embeddings",
        dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
    "gpt2": Family(
        config="GPT2Config",
        model="GPT2LMHeadModel",
        positions="n_positions",
        dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    "llama": Family(
        config="LlamaConfig",
        model="LlamaForCausalLM",
        settings={
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        positions="max_position_embeddings",
        dropouts=("attention_dropout",),
    ),
    "t5": Family(
        config="T5Config",
        model="T5ForConditionalGeneration",
        settings={"decoder_start_token_id": 0},
        dropouts=("dropout_rate",),
    ),
    "vit": Family(
        config="ViTConfig",
        model="ViTForImageClassification",
        settings={"num_labels": IMAGE_CLASSES},
        dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
}


def transformers_step(
    family: str, name: str, config: dict[str, Any], options: dict[str, Any], device: str
) -> TrainingStep:
    """Build a transformers model in training mode, one random batch with labels, and the optimizer.

    No attention mask is passed: every sequence has the full length. T5's encoder and decoder both get seq_len
    tokens.

    Args:
        family: a key of FAMILIES.
        name: the model's name, for messages.
        config: what differs from the family's default configuration.
        options: batch_size, seq_len or image_size, optimizer, dtype; optionally optimizer_impl, dropout,
            attention (eager, sdpa, ...; default: what transformers chooses), use_cache (of decoders).
        device: where everything is made.

    Raises:
        SpecError: the sequence is longer than the model's position table, the image size does not suit the
            patches, or there is no such attention.
        EnvironmentProblem: transformers is not installed or is too old.
    """
    parts = FAMILIES[family]
    dtype: torch.dtype = getattr(torch, options["dtype"])
    with outside_fake_mode():
        transformers = import_transformers()
        with quiet_transformers():
            config_class = getattr(transformers, parts.config)
            model_class = getattr(transformers, parts.model)
    values = {
        **parts.settings,
        **config,
        **({"use_cache": options["use_cache"]} if "use_cache" in options else {}),
    }
    if family == "vit":
        values["image_size"] = options["image_size"]
        if options["image_size"] % values["patch_size"]:
            raise SpecError(
                f"{name}: --image-size {options['image_size']} is not a multiple of its patches of "
                f"{values['patch_size']} pixels."
            )
    if options.get("dropout") is not None:
        values.update(dict.fromkeys(parts.dropouts, float(options["dropout"])))
    with quiet_transformers(), made_on(device, dtype):
        settings = config_class(**values)
        limit = getattr(settings, parts.positions) if parts.positions else None
        if limit is not None and options["seq_len"] > limit:
            raise SpecError(f"{name}: --seq-len {options['seq_len']} is more than its {limit} positions.")
        if options.get("attention"):
            settings._attn_implementation = options["attention"]
        try:
            model = model_class(settings)
        except (ValueError, ImportError) as error:
            raise SpecError(f"{name} cannot be built: {error}") from error
        model.train()
        if family == "gpt2":
            # Its class name does not tell transformers which loss is meant, which it remarks upon.
            model.loss_type = "ForCausalLM"
        batch = _random_batch(family, settings, options)
    return step_of(name, model, batch, options)


def step_of(name: str, model: Any, batch: dict[str, Any], options: dict[str, Any]) -> TrainingStep:
    """The step of a model that returns its loss, under the options that every model by name takes."""
    return TrainingStep(
        model=model,
        args=(),
        kwargs=batch,
        loss=loss_in_outputs,
        loss_inputs=(),
        optimizer=make_optimizer(options["optimizer"], model.parameters(), options.get("optimizer_impl")),
        batch_size=options["batch_size"],
        name=name,
        options=dict(options),
    )


def _random_batch(family: str, config: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    rows = options["batch_size"]
    if family == "vit":
        size = options["image_size"]
        return {
            "pixel_values": torch.randn(rows, config.num_channels, size, size),
            "labels": torch.randint(config.num_labels, (rows,)),
        }
    tokens = torch.randint(config.vocab_size, (rows, options["seq_len"]))
    if family == "bert":
        labels = torch.full_like(tokens, NO_LABEL)
        labels[:, ::MASKED_EVERY] = tokens[:, ::MASKED_EVERY]
    elif family == "t5":
        labels = torch.randint(config.vocab_size, (rows, options["seq_len"]))
    else:
        labels = tokens.clone()  # the model shifts them itself
    return {"input_ids": tokens, "labels": labels}


def import_transformers() -> Any:
    """transformers, importable beside a CPU-only torch as well; EnvironmentProblem if it is missing or old."""
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
