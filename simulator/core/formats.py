"""Formats in which a saved value waits for backward in fewer bytes: how small it gets, and what packing it costs.

`bits` has booleans 8 to a byte, `narrow8` to `narrow32` have non-negative int64 in fewer bits: both come back in every
bit. The others have floating-point numbers in groups of `GROUP` neighbours in memory: `fp8_*` as that type, scaled by
the group's largest magnitude and rounded to nearest; `int*` as so many even levels from the group's least to its
largest number, rounded up or down at random so that the mean is right (ActNN, Chen et al. 2021, section 3; Mesa, Pan et
al. 2021; GACT, Liu et al. 2022). `fewbit*` has the input of an activation as the number of one of so many intervals, in
each of which backward takes one derivative (Few-Bit Backward, Novikov et al. 2022, arXiv:2202.00441). `executor.codecs`
is the code; its tests hold what stands here against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GROUP: Final = 256  # numbers that share scales
CHUNK: Final = 1 << 21  # numbers that are worked on at a time: a whole number of groups
SCALE_BYTES: Final = 4  # of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format. A payload is one run of bytes: the groups' scales, then the codes."""

    bits: int  # of a number's code
    dtypes: tuple[str, ...]  # that can be packed
    scales: int = 0  # float32 numbers a group
    of_activations: bool = False  # only inputs of activations that backward reads for nothing else
    buffers: int = 0  # of `CHUNK` float32 numbers, while it is packed
    # Bytes that the passes of packing and of unpacking read and write, a number, beside its own and its code's.
    pack_moves: int = 0
    unpack_moves: int = 0

    @property
    def exact(self) -> bool:
        """True if every bit comes back."""
        return not self.scales and not self.of_activations

    def payload_bytes(self, elements: int) -> int:
        """Bytes of the payload of so many numbers."""
        if self.exact:
            return -(-elements * self.bits // 8)
        return -(-elements // GROUP) * (SCALE_BYTES * self.scales + GROUP * self.bits // 8)

    def pack_events(self, elements: int, item_bytes: int) -> tuple[int, ...]:
        """Return what packing numbers of so many bytes each allocates (+bytes) and frees (-bytes), in order, as
        `Ops.events`.

        Ignores: the 12 bytes in which torch puts a number on the CPU, for a pass.
        """
        bounds = ((1 << self.bits) - 1) * item_bytes
        return self._events(self.payload_bytes(elements), elements, self.buffers, bounds)

    def unpack_events(self, elements: int, item_bytes: int) -> tuple[int, ...]:
        """Return what unpacking them allocates and frees."""
        points = (1 << self.bits) * item_bytes
        return self._events(elements * item_bytes, elements, min(1, self.buffers), points)

    def _events(self, made: int, elements: int, buffers: int, table: int) -> tuple[int, ...]:
        if not elements:
            return ()
        inside = [min(CHUNK, -(-elements // GROUP) * GROUP) * 4] * buffers + [table] * self.of_activations
        return (made, *inside, *(-n for n in reversed(inside)))

    def bytes_moved(self, elements: int, item_bytes: int, moves: int) -> int:
        """Bytes that packing reads and writes, or unpacking, by its `moves`.

        Counts: every pass over the numbers. Ignores: passes over scales; what stays in a cache between passes.
        """
        return elements * (item_bytes + moves) + self.payload_bytes(elements)


_FLOATS: Final = ("float32", "bfloat16", "float16")
_FP8: Final = Format(bits=8, dtypes=_FLOATS, scales=1, buffers=1, pack_moves=20, unpack_moves=16)


def _ints(bits: int, pack: int, unpack: int) -> Format:
    return Format(bits=bits, dtypes=_FLOATS, scales=2, buffers=2, pack_moves=pack, unpack_moves=unpack)


def _fewbit(bits: int) -> Format:
    # Codes are four bytes until eight of them are shifted into one word, and again when they are back.
    return Format(bits=bits, dtypes=_FLOATS, of_activations=True, buffers=1, pack_moves=22, unpack_moves=19)


FORMATS: Final = {
    # Packing adds seven eighths of the numbers, shifted, to the eighth that holds the sums; unpacking shifts the
    # payload seven times and masks eighths in place.
    "bits": Format(bits=1, dtypes=("bool",), pack_moves=2, unpack_moves=3),
    "narrow8": Format(bits=8, dtypes=("int64",)),
    "narrow16": Format(bits=16, dtypes=("int64",)),
    "narrow32": Format(bits=32, dtypes=("int64",)),
    "fp8_e4m3": _FP8,
    "fp8_e5m2": _FP8,
    "int8": _ints(8, 44, 16),
    "int4": _ints(4, 56, 31),
    "int2": _ints(2, 58, 38),
    "fewbit4": _fewbit(4),
    "fewbit3": _fewbit(3),
    "fewbit2": _fewbit(2),
}


# Numbers from 0 up to these, exclusive.
HOLDS: Final = {"narrow8": 1 << 8, "narrow16": 1 << 15, "narrow32": 1 << 31}


def narrow(positions: int) -> str:
    """The smallest format that holds every number from 0 up to `positions`, itself not included; "" if none does."""
    return next((name for name, limit in HOLDS.items() if positions <= limit), "")
