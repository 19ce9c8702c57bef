"""A saved value as a smaller payload and back: the ops `lowtide::pack` and `lowtide::unpack`.

A payload is one uint8 tensor, scales included (`simulator.core.formats` has the formats and their sizes). Both ops work
in torch's own passes, on `CHUNK` numbers at a time, in buffers that they allocate once, so that what they take beside
their result is known and small.

What does not lie in memory without gaps is copied first, and comes back row by row. A group that holds an infinity or a
NaN, or whose numbers lie farther apart than float32 can say, comes back without one finite number; a group of equal
numbers comes back as it was from `int*`. `fewbit*` formats are given with their activation, as `fewbit4:gelu`; a NaN
comes back as a number, and is in the activation's output. Rounding draws from a generator of its own, one a device: the
model's random stream stays as it is. `seed` starts it anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import torch

from executor.codecs.fewbit import intervals
from simulator.core.formats import CHUNK, FORMATS, GROUP, SCALE_BYTES
from traces.errors import PlanError

NARROW: Final = {"narrow8": torch.uint8, "narrow16": torch.int16, "narrow32": torch.int32}
FP8: Final = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
TINY: Final = torch.finfo(torch.float32).tiny  # the scale of a group of zeros, or of equal numbers
_generators: Final[dict[torch.device, torch.Generator]] = {}
_seed = 0


def seed(number: int = 0) -> None:
    """Start the random numbers of rounding anew, on every device."""
    global _seed
    _seed = number
    _generators.clear()


@torch.library.custom_op("lowtide::pack", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def pack(x: torch.Tensor, format: str) -> torch.Tensor:
    """The payload of a tensor: uint8, `Format.payload_bytes` of them.

    Raises:
        PlanError: the format is not for tensors of that type.
    """
    payload = new_payload(x, format)
    flat = x.as_strided((x.numel(),), (1,)) if lies_dense(x.shape, x.stride()) else x.reshape(-1)
    if format == "bits":
        _pack_bits(flat.view(torch.uint8), payload)
    elif format in NARROW:
        payload.view(NARROW[format]).copy_(flat)
    elif ":" in format:
        _pack_numbers(flat, payload, format)
    elif x.numel():
        _pack_groups(flat, payload, format)
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
        _unpack_bits(payload, flat.view(torch.uint8))
    elif format in NARROW:
        flat.copy_(payload.view(NARROW[format]))
    elif ":" in format:
        _unpack_numbers(payload, flat, format)
    elif out.numel():
        _unpack_groups(payload, flat, format)
    return out


@unpack.register_fake
def new_tensor(
    payload: torch.Tensor, format: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    if lies_dense(size, stride):
        return torch.empty_strided(size, stride, dtype=dtype, device=payload.device)
    return torch.empty(size, dtype=dtype, device=payload.device)


def lies_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor's numbers lie one after another in memory, in whatever order."""
    expected = 1
    for step, n in sorted((s, n) for s, n in zip(stride, size, strict=True) if n != 1):
        if step != expected:
            return 0 in size
        expected *= n
    return True


def _pack_bits(flat: torch.Tensor, payload: torch.Tensor) -> None:
    """Bit k of byte i is number i of the k-th eighth, which needs no copy of any."""
    for k, part in enumerate(_eighths(flat, payload)):
        if k == 0:
            payload.copy_(part)
        else:
            payload[: len(part)].add_(part, alpha=1 << k)


def _unpack_bits(payload: torch.Tensor, flat: torch.Tensor) -> None:
    for k, part in enumerate(_eighths(flat, payload)):
        torch.bitwise_right_shift(payload[: len(part)], k, out=part)
        part.bitwise_and_(1)


def _eighths(flat: torch.Tensor, payload: torch.Tensor) -> Sequence[torch.Tensor]:
    return flat.split(len(payload)) if len(payload) else ()


def _pack_groups(flat: torch.Tensor, payload: torch.Tensor, format: str) -> None:
    buffer = _buffer(flat)
    noise = torch.empty_like(buffer) if format not in FP8 else buffer
    bits = FORMATS[format].bits
    levels = (1 << bits) - 1
    for numbers, scales, codes in _chunks(flat, payload, format):
        x, r = buffer[: len(codes)], noise[: len(codes)]
        line = x.view(-1)
        line[: len(numbers)].copy_(numbers)
        line[len(numbers) :].copy_(numbers[-1:].expand(x.numel() - len(numbers)))  # fill up the last group
        if format in FP8:
            torch.linalg.vector_norm(x, float("inf"), dim=1, out=scales[0])
            scales[0].div_(torch.finfo(FP8[format]).max).clamp_min_(TINY)
            codes.view(FP8[format]).copy_(x.div_(scales[0][:, None]))
            continue
        least, width = scales
        torch.aminmax(x, dim=1, out=(least, width))
        width.sub_(least).clamp_min_(TINY)
        r.uniform_(generator=_generator(flat.device))
        # The sum may round up to the level above the last.
        r.addcdiv_(x.sub_(least[:, None]), width[:, None], value=levels).clamp_max_(levels)
        if bits < 8:
            first, *others = r.floor_().split(GROUP * bits // 8, dim=1)
            for k, part in enumerate(others, 1):
                first.add_(part, alpha=1 << bits * k)
            r = first
        codes.copy_(r)


def _unpack_groups(payload: torch.Tensor, flat: torch.Tensor, format: str) -> None:
    buffer, bits = _buffer(flat), FORMATS[format].bits
    for numbers, scales, codes in _chunks(flat, payload, format):
        x = buffer[: len(codes)]
        if format in FP8:
            x.copy_(codes.view(FP8[format])).mul_(scales[0][:, None])
        else:
            parts = x.split(GROUP * bits // 8, dim=1)
            for k, part in enumerate(parts):
                part.copy_(codes)
                if k:
                    part.sub_(part, alpha=1 - 0.5 ** (bits * k)).floor_()
            for part, above in pairwise(parts):
                part.sub_(above, alpha=1 << bits)
            least, width = (row[:, None] for row in scales)
            torch.addcmul(least, x, width, value=1 / ((1 << bits) - 1), out=x)
        numbers.copy_(x.view(-1)[: len(numbers)])


def _pack_numbers(flat: torch.Tensor, payload: torch.Tensor, format: str) -> None:
    """The numbers of eight intervals, one of each eighth of a chunk, make one word, of which the lower bytes stay."""
    bits, buffer, bounds = _few_bits(flat, format, 0)
    for numbers, codes in zip(flat.split(CHUNK), payload.view(-1, bits).split(CHUNK // 8), strict=True):
        places = buffer[: 8 * len(codes)]
        torch.bucketize(numbers, bounds, out_int32=True, out=places[: len(numbers)])
        places[len(numbers) :].zero_()
        words, *others = places.view(8, -1)
        for k, row in enumerate(others, 1):
            words.bitwise_or_(row.bitwise_left_shift_(bits * k))
        codes.copy_(words.view(torch.uint8).view(-1, 4)[:, :bits])


def _unpack_numbers(payload: torch.Tensor, flat: torch.Tensor, format: str) -> None:
    bits, buffer, points = _few_bits(flat, format, 1)
    for numbers, codes in zip(flat.split(CHUNK), payload.view(-1, bits).split(CHUNK // 8), strict=True):
        places = buffer[: 8 * len(codes)]
        words, *others = places.view(8, -1)
        words.zero_().view(torch.uint8).view(-1, 4)[:, :bits].copy_(codes)
        for k, row in enumerate(others, 1):
            torch.bitwise_right_shift(words, bits * k, out=row).bitwise_and_((1 << bits) - 1)
        words.bitwise_and_((1 << bits) - 1)
        torch.index_select(points, 0, places[: len(numbers)], out=numbers)


def _few_bits(flat: torch.Tensor, format: str, which: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The bits of a number; room for a chunk of places; and the bounds (0) or the points (1) of the intervals."""
    name, _, activation = format.partition(":")
    bits, buffer = FORMATS[name].bits, _buffer(flat, torch.int32).view(-1)
    return bits, buffer, flat.new_tensor(intervals(activation, 1 << bits)[which])


def _buffer(flat: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Room for a chunk of these numbers, by groups."""
    groups = min(CHUNK // GROUP, -(-len(flat) // GROUP))
    return torch.empty((groups, GROUP), dtype=dtype, device=flat.device)


def _chunks(
    flat: torch.Tensor, payload: torch.Tensor, format: str
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]]:
    """The numbers of each chunk; their groups' scales, one row a kind; and their codes, one row a group."""
    groups = -(-len(flat) // GROUP)
    end = SCALE_BYTES * FORMATS[format].scales * groups
    scales = payload[:end].view(torch.float32).view(-1, groups)
    codes = payload[end:].view(groups, -1)
    step = CHUNK // GROUP
    for a in range(0, groups, step):
        numbers = flat[a * GROUP : (a + step) * GROUP]
        yield numbers, [row[a : a + step] for row in scales], codes[a : a + step]


def _generator(device: torch.device) -> torch.Generator:
    if device not in _generators:
        _generators[device] = torch.Generator(device).manual_seed(_seed)
    return _generators[device]
