"""The models that are known by name, with their default options and random weights; nothing is downloaded.

Names and default options are plain data, so that listing them needs no torch. Torchvision's classification
models go by their own names, transformers' by family and size.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tracer.precision.policy import AMP_DTYPES
from traces.errors import SpecError
from traces.model_spec import HF, TIMM

if TYPE_CHECKING:
    from tracer.step.loop import TrainingStep

TORCHVISION: Final = "torchvision"
# Classification models of torchvision 0.26 to 0.29.
TORCHVISION_NAMES: Final = tuple(
    """
    alexnet convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161 densenet169
    densenet201 efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnet_b5
    efficientnet_b6 efficientnet_b7 efficientnet_v2_l efficientnet_v2_m efficientnet_v2_s googlenet inception_v3
    maxvit_t mnasnet0_5 mnasnet0_75 mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small
    regnet_x_16gf regnet_x_1_6gf regnet_x_32gf regnet_x_3_2gf regnet_x_400mf regnet_x_800mf regnet_x_8gf
    regnet_y_128gf regnet_y_16gf regnet_y_1_6gf regnet_y_32gf regnet_y_3_2gf regnet_y_400mf regnet_y_800mf
    regnet_y_8gf resnet101 resnet152 resnet18 resnet34 resnet50 resnext101_32x8d resnext101_64x4d
    resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5 shufflenet_v2_x2_0 squeezenet1_0
    squeezenet1_1 swin_b swin_s swin_t swin_v2_b swin_v2_s swin_v2_t vgg11 vgg11_bn vgg13 vgg13_bn vgg16
    vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32 vit_h_14 vit_l_16 vit_l_32 wide_resnet101_2 wide_resnet50_2
    """.split()  # noqa: SIM905
)


# family -> the sizes that its configuration has, and name -> these. Sizes without a publication of their own are for
# trying things out: llama-tiny, llama-small, gpt2-tiny, gpt2-mini, t5-tiny, bert-4l.
TRANSFORMERS: Final[dict[str, tuple[str, dict[str, tuple[int, ...]]]]] = {
    # Devlin et al. 2018; the smaller ones Turc et al. 2019 (arXiv:1908.08962).
    "bert": (
        "hidden_size num_hidden_layers num_attention_heads intermediate_size",
        {
            "bert-tiny": (128, 2, 2, 512),
            "bert-mini": (256, 4, 4, 1024),
            "bert-small": (512, 4, 8, 2048),
            "bert-medium": (512, 8, 8, 2048),
            "bert-4l": (768, 4, 12, 3072),
            "bert-base": (768, 12, 12, 3072),
            "bert-large": (1024, 24, 16, 4096),
        },
    ),
    # Radford et al. 2019; distilgpt2 is the published 6-layer distillation.
    "gpt2": (
        "n_embd n_layer n_head",
        {
            "gpt2-tiny": (128, 2, 2),
            "gpt2-mini": (256, 4, 4),
            "distilgpt2": (768, 6, 12),
            "gpt2": (768, 12, 12),
            "gpt2-small": (768, 12, 12),
            "gpt2-medium": (1024, 24, 16),
            "gpt2-large": (1280, 36, 20),
            "gpt2-xl": (1600, 48, 25),
        },
    ),
    # The shapes of Llama 3.2 1B and 3B and of Llama 3.1 8B.
    # (Without their rotary scaling, which changes values but no size and no cost.)
    "llama": (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size "
        "tie_word_embeddings",
        {
            "llama-tiny": (128, 352, 2, 4, 2, 32000, True),
            "llama-small": (512, 1408, 8, 8, 4, 32000, True),
            "llama-1b": (2048, 8192, 16, 32, 8, 128256, True),
            "llama-3b": (3072, 8192, 28, 24, 8, 128256, True),
            "llama-8b": (4096, 14336, 32, 32, 8, 128256, False),
        },
    ),
    # Raffel et al. 2019.
    "t5": (
        "d_model d_kv d_ff num_layers num_heads",
        {
            "t5-tiny": (128, 32, 512, 2, 4),
            "t5-small": (512, 64, 2048, 6, 8),
            "t5-base": (768, 64, 3072, 12, 12),
            "t5-large": (1024, 64, 4096, 24, 16),
            "t5-3b": (1024, 128, 16384, 24, 32),
        },
    ),
    # Dosovitskiy et al. 2020; tiny and small from Touvron et al. 2020.
    "vit": (
        "hidden_size num_hidden_layers num_attention_heads intermediate_size patch_size",
        {
            "vit-tiny": (192, 12, 3, 768, 16),
            "vit-small": (384, 12, 6, 1536, 16),
            "vit-base": (768, 12, 12, 3072, 16),
            "vit-large": (1024, 24, 16, 4096, 16),
            "vit-huge": (1280, 32, 16, 5120, 14),
        },
    ),
}
_COMMON: Final = ("optimizer", "dtype", "dropout")
SEQUENCE_OPTIONS: Final = ("batch_size", "seq_len", *_COMMON, "attention")
IMAGE_OPTIONS: Final = ("batch_size", "image_size", *_COMMON, "attention")
DTYPES: Final = {"float32": "float32", "fp32": "float32", **AMP_DTYPES}
# Crop sizes of the published weights (IMAGENET1K_V1) where they are not 224.
IMAGE_SIZES: Final = {
    **{f"efficientnet_b{k}": size for k, size in enumerate((240, 288, 300, 380, 456, 528, 600), start=1)},
    "efficientnet_v2_s": 384,
    "efficientnet_v2_m": 480,
    "efficientnet_v2_l": 480,
    "inception_v3": 299,
    **dict.fromkeys(("swin_v2_t", "swin_v2_s", "swin_v2_b"), 256),
}
# What options must be that are no names.
VALUES: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    **dict.fromkeys(
        ("batch_size", "seq_len", "image_size"),
        (lambda v: type(v) is int and v >= 1, "a whole number of at least 1"),
    ),
    "dropout": (lambda v: type(v) in (int, float) and 0.0 <= v < 1.0, "a number from 0 to below 1"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that is known by its name."""

    name: str
    family: str  # torchvision, bert, gpt2, llama, t5, vit; TIMM or HF: the name begins with it

    @property
    def takes(self) -> tuple[str, ...]:
        """The options that have a meaning for this model."""
        if self.family in (TORCHVISION, TIMM):
            return tuple(o for o in IMAGE_OPTIONS if o != "attention")
        if self.family == HF:
            return (*SEQUENCE_OPTIONS, "image_size", "task")
        if self.family == "vit":
            return IMAGE_OPTIONS
        return SEQUENCE_OPTIONS

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that decide its step, where nothing is said of them."""
        sizes: dict[str, Any]
        if self.family == HF:  # the file says the rest
            return {"batch_size": 8, "optimizer": "adamw", "dtype": "float32"}
        if self.family == TIMM:
            from tracer.step.named.timm_models import image_size_of

            sizes = {"batch_size": 32, "image_size": image_size_of(self.name)}
        elif "seq_len" in self.takes:
            # Sizes for trying things out have short sequences; two of their names are of published models.
            trial = self.name.endswith(("-tiny", "-mini", "-small", "-4l"))
            short = trial and self.name not in ("t5-small", "gpt2-small")
            sizes = {"batch_size": 8, "seq_len": 128 if short else 512}
        else:
            sizes = {"batch_size": 32, "image_size": IMAGE_SIZES.get(self.name, 224)}
        kind = "sgd" if self.family in (TORCHVISION, TIMM) else "adamw"
        return {**sizes, "optimizer": kind, "dtype": "float32"}

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options of a step, with the defaults of those that are not given. Raises SpecError: an option that the
        model does not take, or a value that is out of range.
        """
        from tracer.step.optimizers import check_optimizer

        if foreign := [o for o in given if o not in self.takes]:
            flags = ", ".join(map(_flag, self.takes))
            raise SpecError(f"model {self.name} takes no {_flag(foreign[0])}; it takes {flags}.")
        for option, value in given.items():
            fits, wish = VALUES.get(option, (lambda v: isinstance(v, str), "a name"))
            if not fits(value):
                raise SpecError(f"{_flag(option)} {value!r} must be {wish}.")
        options = {**self.defaults, **given}
        dtype = str(options["dtype"]).lower().removeprefix("torch.")
        if dtype not in DTYPES:
            raise SpecError(f"--dtype {options['dtype']!r} is unknown; known are {', '.join(DTYPES)}.")
        options["dtype"] = DTYPES[dtype]
        check_optimizer(options["optimizer"])
        return options

    def step(self, options: dict[str, Any], device: str) -> TrainingStep:
        """The training step with these options, on that device."""
        if self.family == TORCHVISION:
            from tracer.step.named.vision import image_step

            return image_step(self.name, options, device)
        if self.family == TIMM:
            from tracer.step.named.timm_models import timm_step

            return timm_step(self.name, options, device)
        if self.family == HF:
            from tracer.step.named.huggingface import config_step, read_config

            return config_step(self.name, read_config(self.name), options.get("task"), options, device)
        from tracer.step.named.huggingface import family_step

        sizes, named = TRANSFORMERS[self.family]
        config = dict(zip(sizes.split(), named[self.name], strict=True))
        return family_step(self.family, self.name, config, options, device)


def list_models() -> tuple[KnownModel, ...]:
    """All names, torchvision's first. Needs neither torch nor torchvision."""
    vision = [KnownModel(name=n, family=TORCHVISION) for n in TORCHVISION_NAMES]
    rest = [KnownModel(name=n, family=f) for f, (_, named) in TRANSFORMERS.items() for n in named]
    return (*vision, *rest)


def find_model(name: str) -> KnownModel:
    """The model of that name, whatever its case and whether written with - or _. Raises SpecError if there is none;
    names the closest ones.
    """
    if name.startswith(HF):
        from tracer.step.named.huggingface import read_config

        read_config(name)
        return KnownModel(name=name, family=HF)
    if name.startswith(TIMM):
        return KnownModel(name=name, family=TIMM)
    known = {_key(m.name): m for m in list_models()}
    if _key(name) in known:
        return known[_key(name)]
    close = [known[k].name for k in difflib.get_close_matches(_key(name), known, n=4, cutoff=0.5)]
    hint = f"; did you mean {', '.join(close)}?" if close else "."
    raise SpecError(
        f"model {name!r} is unknown{hint} Known are torchvision's classification models by their own names, "
        f"{', '.join(f'{f}-*' for f in TRANSFORMERS)}, {TIMM}NAME, {HF}CONFIG.json, and your own as "
        "path/to/file.py:build or package.module:build."
    )


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
