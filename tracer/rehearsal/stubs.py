"""Find the functions of CUDA's libraries that torch imports, and write those that the null driver's C does not define.

What only computes does nothing and succeeds; what makes a handle gives a number; what asks for the size of a buffer
that torch then allocates is told 0, and that this is assumed; everything else says its name and fails. All are weak, so
that those written in C go first.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from traces.errors import EnvironmentProblem

# Libraries that the null driver stands for. cuFile and nvshmem stay what they are, and say that they cannot work.
_OURS: Final = re.compile(r"(?:__cuda|cuda|cu(?=[A-Z])|cublas|cudnn|cufft|cupti|cusolver|cusparse|nccl)\w*")
_NOT_OURS: Final = re.compile(r"cuFile\w*")
# What the real libraries answer without a device.
_REAL: Final = re.compile(
    r"cublasLtGet(Cudart)?Version|\w*Get(LastErrorString|ErrorString|StatusString|StatusName|Property|CudartVersion)|"
    r"cudnnBackendGetAttribute|cudnnGetVersion|cudnn\w+(Tensor|Filter)(Nd)?Descriptor|ncclGetVersion|ncclGetLastError"
)
_CREATES: Final = re.compile(r"(cublas|cudnn|cusolver|cusparse)(?!Get)\w*[cC]reate\w*")
# These give results to the host, or sizes, by pointers that somebody has to know.
_ANSWERS: Final = re.compile(
    r"\w*(Get|Create|Check|Init|Find|Register|zeroPivot|Query|bufferSize|analysis|SpGEMM|SpSM|SpSV|geam|cusparseLt|preprocess|MemAlloc|"
    r"Window|Split|Shrink|Grow|DevComm|MemStats|Signal)\w*"
)
_COMPUTES: Final = re.compile(r"(cublas|cudnn|cufft|cusolver|cusparse|nccl)\w+")
# The place of the pointer to a size among the arguments, by what follows the library's name and type of number.
_SIZES: Final = {
    "geqrf": 5, "potrf": 5, "getrf": 5, "sytrf": 4, "orgqr": 7, "ungqr": 7, "ormqr": 11, "unmqr": 11,
    "syevd": 7, "heevd": 7, "syevj": 7, "heevj": 7, "syevjBatched": 7, "heevjBatched": 7,
    "gesvd": 3, "gesvdj": 12, "gesvdjBatched": 11, "gesvdaStridedBatched": 16,
}  # fmt: skip
_WIDE_SIZES: Final = {
    "cusolverDnXpotrf_bufferSize": (8, 9), "cusolverDnXgeqrf_bufferSize": (10, 11),
    "cusolverDnXsyevd_bufferSize": (11, 12), "cusolverDnXsyevBatched_bufferSize": (11, 12),
    "cusolverDnXgeev_bufferSize": (17, 18), "cusolverDnXsytrs_bufferSize": (11, 12),
    "cufftXtMakePlanMany": (12,), "cusparseSpMM_bufferSize": (10,), "cusparseSDDMM_bufferSize": (10,),
    "cusparseSpMV_bufferSize": (9,), "cusparseXcoosort_bufferSizeExt": (6,), "cusparseXcsrsort_bufferSizeExt": (6,),
}  # fmt: skip
_DYNSYM: Final = 11  # the type of the section with the symbols that the loader sees
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SYMBOL: Final = struct.Struct("<IBBHQQ")  # Elf64_Sym
_NAMES: Final = {"cusolver": "cuSOLVER", "cusparse": "cuSPARSE", "cufft": "cuFFT"}


def stub_source(imported: Iterable[str]) -> str:
    """C for those of the imported names that belong to CUDA's libraries."""
    wanted = sorted(n for n in set(imported) if _OURS.fullmatch(n) and not _NOT_OURS.fullmatch(n))
    lines = ['#include "null.h"', "#define WEAK __attribute__((weak))"]
    lines += [_stub(n) for n in wanted if not _REAL.fullmatch(n)]
    return "\n".join(lines) + "\n"


def _stub(name: str) -> str:
    solver = re.fullmatch(r"cusolverDn[SDCZ](\w+)_bufferSize", name)
    if name in _WIDE_SIZES:
        return _size(name, _WIDE_SIZES[name], "size_t")
    if solver and solver[1] in _SIZES:
        return _size(name, (_SIZES[solver[1]],), "int")
    if name.startswith("cupti"):  # there is nothing to trace, which torch's profiler takes well
        return f"WEAK int {name}(void) {{ return NOT_SUPPORTED; }}"
    if _CREATES.fullmatch(name):
        return f"WEAK int {name}(void **out) {{ *out = null_handle(); return OK; }}"
    if _COMPUTES.fullmatch(name) and not _ANSWERS.fullmatch(name):
        return f"WEAK int {name}(void) {{ return OK; }}"
    return f'WEAK int {name}(void) {{ return null_missing("{name}"); }}'


def _size(name: str, places: tuple[int, ...], kind: str) -> str:
    arguments = ", ".join(f"long a{k}" for k in range(places[-1] + 1))
    library = next(title for prefix, title in _NAMES.items() if name.startswith(prefix))
    zeros = " ".join(f"*({kind} *)a{k} = 0;" for k in places)
    return f'WEAK int {name}({arguments}) {{ null_assumed("{library}"); {zeros} return OK; }}'


def undefined_symbols(path: Path) -> tuple[str, ...]:
    """The names that the library uses and does not define, without their versions, in the file's order.

    Reads the section headers, the dynamic symbols and their names alone, so that a library of 500 MB costs nothing.
    Raises EnvironmentProblem: it is no little-endian 64-bit ELF file, or damaged.
    """
    with path.open("rb") as file:
        try:
            return tuple(_undefined(file))
        except (struct.error, IndexError, ValueError) as error:
            raise EnvironmentProblem(
                f"{path}: this is no shared library for 64-bit Linux ({error})."
            ) from None


def _undefined(file: BinaryIO) -> Iterator[str]:
    header = file.read(64)
    if header[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it does not begin as one")
    (offset,) = struct.unpack_from("<Q", header, 40)
    size, count = struct.unpack_from("<HH", header, 58)
    sections = [_SECTION.unpack(_read(file, offset + size * k, _SECTION.size)) for k in range(count)]
    for _, kind, _, _, start, length, link, _, _, _ in sections:
        if kind != _DYNSYM:
            continue
        table, symbols = sections[link], _read(file, start, length)
        text = _read(file, table[4], table[5])
        for name, _, _, section, _, _ in _SYMBOL.iter_unpack(symbols):
            if name and section == 0:
                yield text[name : text.index(b"\0", name)].decode()


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise ValueError("it ends too early")
    return data
