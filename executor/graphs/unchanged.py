"""Find out that an argument was changed between forward and backward where torch's versions do not say so."""

from __future__ import annotations

from typing import Final

import torch

# By the size of an element: the numbers to read it as, and those to add them up in, which may overflow: a wider type
# for the long ones would take forty times as long.
_WHOLE: Final = {
    1: (torch.uint8, torch.int64),
    2: (torch.int16, torch.int64),
    4: (torch.int32, torch.int32),
    8: (torch.int64, torch.int64),
}


def digest(x: torch.Tensor) -> int:
    """The sum of a tensor's elements, read as whole numbers, each row as often as its place says.

    Memory that is NumPy's or another process's, too, and writes through `.data`, change without a new version.
    Counts: tensors on the CPU, where others write so. Ignores: the order within a row.
    """
    if x.device.type != "cpu":
        return 0
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    whole, total = _WHOLE[x.itemsize]
    if x.ndim < 2:
        return int(x.view(whole).sum(dtype=total))
    rows = x.view(whole).sum(tuple(range(1, x.ndim)), dtype=total)
    return int((rows * torch.arange(1, len(rows) + 1)).sum())
