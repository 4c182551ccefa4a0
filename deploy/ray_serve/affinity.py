# SPDX-License-Identifier: Apache-2.0
"""Which replica a request should go to: the one whose prefix cache has the beginning of its prompt.

A prompt is cut into blocks, each named by a digest of all up to its end. Where nothing is known of a prompt,
rendezvous hashing of its first block decides (Thaler and Ravishankar, 1998): routers that have never heard of each
other choose the same replica, and a replica that comes or goes moves only what is its own. Beyond that a router
remembers where it sent which blocks, so that the turns of one conversation stay together although all conversations
begin with the same instructions. A replica that has more requests than the least busy one, by more than an allowance,
is passed over: then a beginning that everybody uses is cached by as many replicas as its load needs.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

import numpy as np

Prompt = str | Sequence[int]
"""Text, or token ids."""

BLOCK = 256
"""Bytes of a block: about as many tokens of English as a block of the prefix cache has, which is 64."""

_BLOCKS = 128
"""Blocks of a prompt that are looked at."""

_REMEMBERED = 1 << 16
"""Blocks that are remembered, about 10 MB."""


def is_prompt(value: object) -> bool:
    """Whether a JSON value can be a prompt; the engine checks what is in it."""
    if isinstance(value, list):
        return all(type(token) is int and 0 <= token < 1 << 31 for token in value)
    return isinstance(value, str)


def block_keys(prompt: Prompt, salt: str | None = None) -> tuple[bytes, ...]:
    """Names of a prompt's full blocks, each of the block and all before it.

    Args:
        prompt: The prompt; token ids fit 32 bits.
        salt: Whose it is; prompts of different salts have nothing in common.
    """
    data = (
        prompt.encode("utf-8", "replace") if isinstance(prompt, str) else np.asarray(prompt, "<u4").tobytes()
    )
    state = hashlib.blake2b(repr((type(prompt) is str, salt)).encode(), digest_size=8)
    keys = []
    for start in range(0, min(len(data) // BLOCK, _BLOCKS) * BLOCK, BLOCK):
        state.update(data[start : start + BLOCK])
        keys.append(state.digest())
    return tuple(keys)


class Affinity:
    """What one router knows about who has what.

    Args:
        allowance: Requests that a replica may have more than the least busy one and still get those that fit its cache.
    """

    def __init__(self, allowance: int) -> None:
        self._allowance = allowance
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()

    def rank(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> list[str]:
        """The replicas, the best first.

        Args:
            keys: The prompt's blocks; without any, load alone counts.
            loads: Requests that each replica has.
        """
        if not keys:
            return sorted(loads, key=lambda r: (loads[r], random.random()))
        least = min(loads.values(), default=0)
        busy = {r: max(0, load - least - self._allowance) for r, load in loads.items()}
        return sorted(loads, key=lambda r: (busy[r], -self._held(keys, r), _weight(keys[0], r)))

    def note(self, keys: Sequence[bytes], replica: str) -> None:
        """Remember that a prompt was sent to a replica."""
        for key in keys:
            self._holders.setdefault(key, set()).add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > _REMEMBERED:
            self._holders.popitem(last=False)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all replicas but these."""
        for key, holders in list(self._holders.items()):
            holders &= set(replicas)
            if not holders:
                del self._holders[key]

    def _held(self, keys: Sequence[bytes], replica: str) -> int:
        """How many of a prompt's first blocks a replica has."""
        for count, key in enumerate(keys):
            if replica not in self._holders.get(key, ()):
                return count
        return len(keys)


def _weight(key: bytes, replica: str) -> bytes:
    return hashlib.blake2b(key + replica.encode(), digest_size=8).digest()
