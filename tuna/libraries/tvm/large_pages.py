"""Large pages for a model's weights, as `examples/run_model.py` asks for them.

TVM loads weights into ordinary memory. Each of its pages of 4 KiB needs an entry of the TLB, which
has no room for those of a model.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_PAGE_BYTES = 2 << 20
#: Advices of madvise(2): large pages from now on, and at once (Linux 6.1)
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def use_large_pages(maps: Path = Path("/proc/self/maps")) -> None:
    """Have Linux keep what this process has allocated so far in pages of 2 MiB.

    It copies the memory. Linux before 6.1 does so in the background; a system without such pages
    ignores it.
    """
    libc = ctypes.CDLL(None)
    for line in maps.read_text().splitlines() if maps.is_file() else ():
        addresses, access, _, _, inode, *name = line.split(maxsplit=5)
        first, end = (int(address, 16) for address in addresses.split("-"))
        first, end = -(-first // _PAGE_BYTES) * _PAGE_BYTES, end // _PAGE_BYTES * _PAGE_BYTES
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]) and first < end:
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)
