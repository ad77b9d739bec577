"""What a cubin says of its kernel: registers, stack frame and the machine code itself.

A cubin is an ELF64 file. Its section ``.nv.info`` is a list of attributes: one byte format, one
byte attribute, two bytes size or value; format 4 carries ``size`` more bytes. Reading them here
agrees with ``cuobjdump -res-usage`` (tests/test_compiler.py) and needs no process of its own.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

_SIZED = 4  # EIFMT_SVAL
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F  # EIATTR_FRAME_SIZE, EIATTR_REGCOUNT


@dataclass(frozen=True)
class CubinFacts:
    regs: int  # a thread
    frame_bytes: int  # local memory a thread: spills and arrays
    code_hash: str  # of the .text sections


def read_cubin(cubin: bytes) -> CubinFacts:
    """Raises ValueError when this is not a cubin with one kernel's attributes."""
    sections = _sections(cubin)
    attributes = dict(_attributes(sections.get(".nv.info", b"")))
    if _REGISTERS not in attributes:
        raise ValueError("no register count in the cubin's .nv.info")
    code = hashlib.sha256()
    for name in sorted(sections):
        if name.startswith(".text."):
            code.update(sections[name])
    return CubinFacts(
        regs=attributes[_REGISTERS],
        frame_bytes=attributes.get(_FRAME_SIZE, 0),
        code_hash=code.hexdigest()[:16],
    )


def _sections(elf: bytes) -> dict[str, bytes]:
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    sections = {}
    for name_offset, kind, _, _, offset, length in headers:
        start = names + name_offset
        name = elf[start : elf.index(b"\0", start)].decode()
        sections[name] = b"" if kind == 8 else elf[offset : offset + length]  # 8: no bytes in file
    return sections


def _attributes(info: bytes) -> list[tuple[int, int]]:
    """(attribute, value) of those whose payload is a symbol index and one 32-bit value."""
    found = []
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            if size == 8:
                found.append((attribute, struct.unpack_from("<II", info, at)[1]))
            at += size
    return found
