"""Build functions of architectures by others that `trace` does not know by name, small enough to be rehearsed quickly.

`FILE.py:NAME` builds transformers' model of the configuration in `CONFIGS`, or torchvision's function of that name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SMALL = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1536}
LLAMA_LIKE = {**SMALL, "num_key_value_heads": 4, "vocab_size": 16_000}
# Name -> (configuration, model, what differs from the configuration's own values).
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": ("AlbertConfig", "AlbertForMaskedLM", SMALL),
    "bart": ("BartConfig", "BartForConditionalGeneration", {"d_model": 512, "encoder_layers": 4, "decoder_layers": 4}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 512, "n_layer": 6, "n_head": 8}),
    "deberta": ("DebertaV2Config", "DebertaV2ForMaskedLM", {**SMALL, "vocab_size": 16_000}),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", {}),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", SMALL),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**SMALL, "vocab_size": 16_000}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**LLAMA_LIKE, "head_dim": 64}),
    "gpt_neo": ("GPTNeoConfig", "GPTNeoForCausalLM",
                {"hidden_size": 512, "num_layers": 6, "num_heads": 8, "attention_types": [[["global", "local"], 3]]}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**SMALL, "vocab_size": 16_000}),
    "mistral": ("MistralConfig", "MistralForCausalLM", LLAMA_LIKE),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**LLAMA_LIKE, "num_hidden_layers": 2, "num_local_experts": 4}),
    "mpnet": ("MPNetConfig", "MPNetForMaskedLM", SMALL),
    "opt": ("OPTConfig", "OPTForCausalLM",
            {"hidden_size": 512, "ffn_dim": 2048, "num_hidden_layers": 6, "num_attention_heads": 8,
             "word_embed_proj_dim": 512}),
    "phi": ("PhiConfig", "PhiForCausalLM", {**SMALL, "vocab_size": 16_000}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", LLAMA_LIKE),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**LLAMA_LIKE, "head_dim": 64}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", SMALL),
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


def __getattr__(name: str) -> Any:
    if name in CONFIGS:
        return lambda batch_size=8, seq_len=256: _transformer(name, batch_size, seq_len)
    if name in SEGMENTATION:
        return lambda batch_size=4, image_size=224: _segmentation(name, batch_size, image_size)
    raise AttributeError(name)
