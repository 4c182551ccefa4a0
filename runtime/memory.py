# SPDX-License-Identifier: Apache-2.0
"""What the sequences that run take of the machine's memory.

A slot's buffers are there from the start, but a page of a cache takes memory when it is first written to. So an engine
may have more slots of a longer context than the memory could hold if all were full; what counts is what is in use.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from nemo_build.state import StateSpec, state_bytes


@dataclass(frozen=True)
class SlotMemory:
    """Memory for the state of sequences.

    Attributes:
        total: Bytes there are.
        fixed: Bytes of a slot's state that does not grow.
        per_position: Bytes of a position in its caches.
    """

    total: int
    fixed: int
    per_position: int

    @classmethod
    def of(cls, states: Iterable[StateSpec], total: int, *, pending: int) -> SlotMemory:
        """For slots with these buffers."""
        states = list(states)
        fixed = state_bytes(states, slots=1, pending=pending, context=0)
        return cls(total, fixed, state_bytes(states, slots=1, pending=pending, context=1) - fixed)

    def need(self, positions: int) -> int:
        """Bytes of a sequence of so many positions."""
        return self.fixed + positions * self.per_position


def give_back(arrays: Iterable[NDArray[Any]]) -> None:
    """Return the memory of arrays to the operating system, by whole pages; they read as zeros or as before then.

    Args:
        arrays: Contiguous, of memory that was allocated for them (``numpy.zeros``).

    Raises:
        OSError: The operating system refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for array in arrays:
        start = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length <= 0:
            continue
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
