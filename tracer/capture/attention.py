"""Let attention of CPU tensors that stand for a GPU's be captured as the one kernel that every GPU has for it.

A CPU has none for masks with dropout, and would hold all scores. Which of its kernels a GPU takes, torch itself says
where it was built for one.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch

aten = torch.ops.aten


ATTENTION: Final = "scaled_dot_product_attention"


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention of CPU tensors by efficient attention."""
    if query.dim() != 4 or query.dtype is torch.float64:
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    heads = query.shape[1]
    key, value = (
        x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value)
    )
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype))
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, trains, dropout_p, is_causal, scale=scale
    )[0]
