"""Build functions of architectures by others that `trace` does not know by name, with few layers, to rehearse quickly.

`FILE.py:NAME` builds transformers' model of the configuration in `CONFIGS`, torchvision's or timm's model of that name,
or diffusers' class with the values in `DIFFUSERS`. No weights are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SMALL = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 1536}
LLAMA_LIKE = {**SMALL, "num_key_value_heads": 4, "vocab_size": 16_000}
# Name -> (configuration, model, what differs from the configuration's own values).
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": ("AlbertConfig", "AlbertForMaskedLM", SMALL),
    "bart": ("BartConfig", "BartForConditionalGeneration", {"d_model": 512, "encoder_layers": 2, "decoder_layers": 2}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 512, "n_layer": 2, "n_head": 8}),
    "convbert": ("ConvBertConfig", "ConvBertForMaskedLM", SMALL),
    "deberta": ("DebertaV2Config", "DebertaV2ForMaskedLM", {**SMALL, "vocab_size": 16_000}),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", {"n_layers": 2}),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", SMALL),
    "ernie": ("ErnieConfig", "ErnieForMaskedLM", SMALL),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**SMALL, "vocab_size": 16_000}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**LLAMA_LIKE, "head_dim": 64}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM",
             {"n_embd": 512, "n_layer": 2, "n_head": 8, "rotary_dim": 32, "vocab_size": 16_000}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", LLAMA_LIKE),
    "gpt_neo": ("GPTNeoConfig", "GPTNeoForCausalLM",
                {"hidden_size": 512, "num_layers": 2, "num_heads": 8, "attention_types": [[["global", "local"], 1]]}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**SMALL, "vocab_size": 16_000}),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration",
              {"d_model": 512, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 16_000}),
    "mistral": ("MistralConfig", "MistralForCausalLM", LLAMA_LIKE),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**LLAMA_LIKE, "num_hidden_layers": 2, "num_local_experts": 4}),
    "mpnet": ("MPNetConfig", "MPNetForMaskedLM", SMALL),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", LLAMA_LIKE),
    "opt": ("OPTConfig", "OPTForCausalLM",
            {"hidden_size": 512, "ffn_dim": 2048, "num_hidden_layers": 2, "num_attention_heads": 8,
             "word_embed_proj_dim": 512}),
    "phi": ("PhiConfig", "PhiForCausalLM", {**SMALL, "vocab_size": 16_000}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", LLAMA_LIKE),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**LLAMA_LIKE, "head_dim": 64}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", SMALL),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", LLAMA_LIKE),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", LLAMA_LIKE),
}  # fmt: skip
TIMM = (
    "beit_base_patch16_224", "cait_xxs24_224", "caformer_s18", "coatnet_0_rw_224", "convmixer_768_32",
    "convnextv2_nano", "davit_tiny", "deit_small_patch16_224", "dla34", "edgenext_small", "efficientformer_l1",
    "fastvit_t8", "focalnet_tiny_srf", "ghostnet_100", "gmlp_s16_224", "inception_next_tiny", "levit_128",
    "mixer_b16_224", "mobileone_s0", "mobilevit_s", "pit_s_224", "poolformer_s12", "repvgg_a0", "res2net50_26w_4s",
    "resmlp_12_224", "resnest14d", "rexnet_100", "skresnet18", "tiny_vit_5m_224", "vovnet39a", "xcit_tiny_12_p16_224",
)  # fmt: skip
# Class -> (its values, shapes of what it takes beside an image of 3 channels and a time, for a batch of one).
DIFFUSERS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "UNet2DModel": (
        {"sample_size": 64, "block_out_channels": (64, 128, 256, 256), "layers_per_block": 1}, {}
    ),
    "UNet2DConditionModel": (
        {"sample_size": 64, "in_channels": 3, "out_channels": 3, "block_out_channels": (64, 128, 256, 256),
         "layers_per_block": 1, "cross_attention_dim": 256, "attention_head_dim": 8},
        {"encoder_hidden_states": (77, 256)},
    ),
}  # fmt: skip
SEGMENTATION = ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")


def _transformer(name: str, batch_size: int, seq_len: int) -> tuple[nn.Module, Any, Any]:
    import transformers

    config_class, model_class, values = CONFIGS[name]
    config = getattr(transformers, config_class)(**values)
    model = getattr(transformers, model_class)(config).train()
    tokens = torch.randint(3, config.vocab_size, (batch_size, seq_len))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, {"input_ids": tokens, "labels": tokens.clone()}, optimizer


def _segmentation(name: str, batch_size: int, image_size: int) -> tuple[nn.Module, Any, Any, Any]:
    import torchvision

    model = getattr(torchvision.models.segmentation, name)(
        weights=None, weights_backbone=None, num_classes=21
    )
    images = torch.randn(batch_size, 3, image_size, image_size)
    classes = torch.randint(21, (batch_size, image_size, image_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model.train(), (images, classes), _pixel_loss, optimizer


def _pixel_loss(out: dict[str, torch.Tensor], classes: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out["out"], classes)


def _timm(name: str, batch_size: int) -> tuple[nn.Module, Any, Any, Any]:
    import timm

    model = timm.create_model(name, pretrained=False).train()
    batch = torch.randn(batch_size, *model.default_cfg["input_size"]), torch.randint(1000, (batch_size,))
    return model, batch, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _diffuser(name: str, batch_size: int) -> tuple[nn.Module, Any, Any, Any]:
    import diffusers

    values, others = DIFFUSERS[name]
    model = getattr(diffusers, name)(**values).train()
    side = values["sample_size"]
    images = {n: torch.randn(batch_size, 3, side, side) for n in ("sample", "noise")}
    times = torch.randint(1000, (batch_size,))
    more = {n: torch.randn(batch_size, *shape) for n, shape in others.items()}
    batch = {"sample": images["sample"], "timestep": times, **more}, images["noise"]
    return model, batch, _noise_loss, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _noise_loss(out: Any, noise: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(out.sample, noise)


def __getattr__(name: str) -> Any:
    if name in CONFIGS:
        return lambda batch_size=8, seq_len=256: _transformer(name, batch_size, seq_len)
    if name in SEGMENTATION:
        return lambda batch_size=4, image_size=224: _segmentation(name, batch_size, image_size)
    if name in TIMM:
        return lambda batch_size=16: _timm(name, batch_size)
    if name in DIFFUSERS:
        return lambda batch_size=8: _diffuser(name, batch_size)
    raise AttributeError(name)
