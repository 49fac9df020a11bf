"""A kernel's identity: a hash of its machine code, unaffected by names, comments and host code."""

import hashlib
import struct

from anybit.jit.cache import cached
from anybit.jit.source import Kernel

_SECTIONS = (b".text.", b".nv.constant0")


def machine_code(kernel: Kernel, arch: str) -> str:
    """A hash of a kernel's instructions and constants, without symbols and line numbers. Raises like `compile`."""
    cubin = cached(kernel, arch).cubin
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    found = hashlib.sha256()
    for section in sections:
        start = sections[names][4] + section[0]
        if cubin[start : cubin.index(b"\0", start)].startswith(_SECTIONS):
            found.update(cubin[section[4] : section[4] + section[5]])
    return found.hexdigest()
