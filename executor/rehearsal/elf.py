"""Read from a shared library (ELF, 64 bit) which functions it expects others to define."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, Final

from traces.errors import EnvironmentProblem

_DYNSYM: Final = 11  # the type of the section with the symbols that the loader sees
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SYMBOL: Final = struct.Struct("<IBBHQQ")  # Elf64_Sym


def undefined_symbols(path: Path) -> tuple[str, ...]:
    """The names that the library uses and does not define, without their versions, in the file's order.

    Reads the section headers, the dynamic symbols and their names alone, so that a library of 500 MB costs nothing.

    Raises:
        EnvironmentProblem: it is no little-endian 64-bit ELF file, or damaged.
    """
    with path.open("rb") as file:
        try:
            return tuple(_undefined(file))
        except (struct.error, IndexError, ValueError) as error:
            raise EnvironmentProblem(
                f"{path}: this is no shared library for 64-bit Linux ({error})."
            ) from None


def _undefined(file: BinaryIO) -> list[str]:
    header = file.read(64)
    if header[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it does not begin as one")
    (offset,) = struct.unpack_from("<Q", header, 40)
    size, count = struct.unpack_from("<HH", header, 58)
    sections = [_SECTION.unpack(_read(file, offset + size * k, _SECTION.size)) for k in range(count)]
    names: list[str] = []
    for _, kind, _, _, start, length, link, _, _, _ in sections:
        if kind != _DYNSYM:
            continue
        table, symbols = sections[link], _read(file, start, length)
        text = _read(file, table[4], table[5])
        for name, _, _, section, _, _ in _SYMBOL.iter_unpack(symbols):
            if name and section == 0:
                names.append(text[name : text.index(b"\0", name)].decode())
    return names


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise ValueError("it ends too early")
    return data
