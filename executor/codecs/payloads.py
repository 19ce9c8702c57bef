"""A saved value as a smaller payload and back: the ops `lowtide::pack` and `lowtide::unpack`.

A payload is one uint8 tensor, scales included (`simulator.core.formats` has the formats, their sizes and what the ops
take beside their result). Both work in torch's own passes; those of the approximate formats are in
`executor.codecs.approximate`.

What does not lie in memory without gaps is copied first, and comes back row by row. A group that holds an infinity or a
NaN, or whose numbers lie farther apart than float32 can say, comes back without one finite number. `fewbit*` formats
are given with their activation, as `fewbit4:gelu`; a NaN comes back as a number, and is in the activation's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from executor.codecs.approximate import pack_groups, pack_intervals, unpack_groups, unpack_intervals
from simulator.core.formats import FORMATS
from traces.errors import PlanError

# Whether a tensor's numbers lie one after another in memory, in whatever order.
dense = torch.ops.aten.is_non_overlapping_and_dense
NARROW: Final = {"narrow8": torch.uint8, "narrow16": torch.int16, "narrow32": torch.int32}


@torch.library.custom_op("lowtide::pack", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def pack(x: torch.Tensor, format: str) -> torch.Tensor:
    """The payload of a tensor: uint8, `Format.payload_bytes` of them. Raises PlanError if the format is not for tensors
    of that type.
    """
    payload = new_payload(x, format)
    flat = x.as_strided((x.numel(),), (1,)) if dense(x) else x.reshape(-1)
    if format == "bits":
        # Bit k of byte i is number i of the k-th eighth, which needs no copy of any.
        for k, part in enumerate(_eighths(flat.view(torch.uint8), payload)):
            if k == 0:
                payload.copy_(part)
            else:
                payload[: len(part)].add_(part, alpha=1 << k)
    elif format in NARROW:
        payload.view(NARROW[format]).copy_(flat)
    elif x.numel():
        (pack_intervals if ":" in format else pack_groups)(flat, payload, format)
    return payload


@pack.register_fake
def new_payload(x: torch.Tensor, format: str) -> torch.Tensor:
    rule = FORMATS[format.partition(":")[0]]
    if str(x.dtype).removeprefix("torch.") not in rule.dtypes:
        raise PlanError(
            f"a tensor of {x.dtype} cannot be packed as {format}, which takes {', '.join(rule.dtypes)}."
        )
    return x.new_empty((rule.payload_bytes(x.numel()),), dtype=torch.uint8)


@torch.library.custom_op("lowtide::unpack", mutates_args=())
def unpack(
    payload: torch.Tensor, format: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The tensor of a payload, with the size and type that it had, and the strides if it lay without gaps."""
    out = new_tensor(payload, format, size, stride, dtype)
    flat = out.as_strided((out.numel(),), (1,))
    if format == "bits":
        for k, part in enumerate(_eighths(flat.view(torch.uint8), payload)):
            torch.bitwise_right_shift(payload[: len(part)], k, out=part)
            part.bitwise_and_(1)
    elif format in NARROW:
        flat.copy_(payload.view(NARROW[format]))
    elif out.numel():
        (unpack_intervals if ":" in format else unpack_groups)(flat, payload, format)
    return out


@unpack.register_fake
def new_tensor(
    payload: torch.Tensor, format: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    if dense(torch.empty_strided(size, stride, device="meta")):
        return torch.empty_strided(size, stride, dtype=dtype, device=payload.device)
    return torch.empty(size, dtype=dtype, device=payload.device)


def _eighths(flat: torch.Tensor, payload: torch.Tensor) -> Sequence[torch.Tensor]:
    return flat.split(len(payload)) if len(payload) else ()
