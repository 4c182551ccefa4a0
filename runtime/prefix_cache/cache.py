# SPDX-License-Identifier: Apache-2.0
"""The cache's interface: match, restore, store."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType

from nemo_build.runtime.prefix_cache.slot import TOKEN, Array, Buffers, SlotLayout
from nemo_build.runtime.prefix_cache.tree import Node, PrefixCacheStatistics, Snapshot, Tree, encode
from nemo_build.state import StateSpec


class Match:
    """The longest usable prefix of a prompt; the cache keeps it until it is released.

    Attributes:
        length: Tokens of the prefix; 0 if there is none.
    """

    def __init__(self, node: Node | None) -> None:
        self.length = 0 if node is None else node.end
        self._node = node
        if node is not None:
            node.pins += 1

    def release(self) -> None:
        """Let the cache evict it again. Releasing twice does nothing."""
        if self._node is not None:
            self._node.pins -= 1
            self._node = None

    def __enter__(self) -> Match:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class PrefixCache:
    """Prefixes of prompts, and what slots held after them; see the package's text.

    Args:
        states: The buffers of all graphs that a slot has state in.
        capacity: Bytes it may hold. Python's own objects, a few kB a block, are not counted.
        pending: Tokens that a step may leave uncommitted, as the session was opened with.
        block: Tokens in a block.
        snapshot_every: Blocks between the snapshots of a long prompt; 0 for none.
        lookahead: For buffers whose row at a position depends on tokens after it: on how many.

    Raises:
        ValueError: A size is out of range, or `lookahead` names a buffer without positions.
    """

    def __init__(
        self,
        states: Iterable[StateSpec],
        *,
        capacity: int,
        pending: int = 0,
        block: int = 64,
        snapshot_every: int = 64,
        lookahead: Mapping[str, int] | None = None,
    ) -> None:
        if capacity < 0 or pending < 0 or block < 1 or snapshot_every < 0:
            raise ValueError("a prefix cache needs blocks of at least one token, and no size below 0")
        self._layout = SlotLayout(states, lookahead or {})
        self._tree = Tree(capacity, block, self._layout.recurrent)
        self._pending = pending
        self._block = block
        self._interval = block * snapshot_every

    def match(self, tokens: Sequence[int], salt: Hashable = None) -> Match:
        """The longest prefix that is cached and leaves a token to feed.

        Args:
            tokens: The whole prompt.
            salt: Whose prompt it is. Prompts with different salts share nothing.
        """
        node = self._tree.deepest(encode(_usable(tokens)), salt)
        if node is not None:
            self._tree.touch(node)
        s = self._tree.statistics
        s.queries += 1
        s.hits += node is not None
        s.queried_tokens += len(tokens)
        return Match(node)

    def restore(self, match: Match, state: Buffers, slot: int) -> Mapping[str, Array]:
        """Copy a match into a slot, whose next step then has ``past`` = ``match.length`` and ``accepted`` = 0.

        Args:
            match: What :meth:`match` returned, not released. One of length 0 leaves the slot as it is.
            state: Every buffer, ``[slots, …]``; written in place.
            slot: Which slot.

        Returns:
            The `extra` that was stored for this position, not to be written to; empty if none was.

        Raises:
            ValueError: The match was released, a buffer is missing, there is no such slot, or it is too short.
        """
        if match.length == 0:
            return {}
        node = match._node
        if node is None or node.snapshot is None:
            raise ValueError("the match was released; its prefix may be gone")
        self._layout.check(state, slot, match.length)
        start = 0
        for block in node.path()[1:]:
            self._layout.write_rows(block.rows, state, slot, start, block.end)
            start = block.end
        self._layout.write_fixed(node.snapshot.arrays, state, slot)
        self._tree.statistics.saved_tokens += match.length
        return node.snapshot.extra

    def next_snapshot(self, tokens: Sequence[int], past: int, salt: Hashable = None) -> int:
        """Where the next chunk of a prompt should end at the latest, so that a snapshot can be taken there.

        Args:
            tokens: The whole prompt.
            past: Tokens of it that were fed or restored.
            salt: As for :meth:`match`.

        Returns:
            A position after `past`; the prompt's end if no other is wanted. Others are far enough away that a chunk
            from `past` to there is committed at once. Where a budget cuts such a chunk and leaves at most `pending`
            tokens of it, the next call passes over the position.
        """
        end = len(tokens)
        if not self._layout.recurrent:
            return end
        path = self._tree.walk(encode(_usable(tokens)), salt)
        earliest = past + self._pending + 1
        wanted = [end]
        if path and path[-1].end >= earliest and path[-1].snapshot is None:
            wanted.append(path[-1].end)
        if self._interval:
            known = {node.end for node in path if node.snapshot is not None}
            first = -(-earliest // self._interval) * self._interval
            wanted += [p for p in range(first, end, self._interval) if p not in known][:1]
        return min(wanted)

    def store(
        self,
        tokens: Sequence[int],
        state: Buffers,
        slot: int,
        committed: int,
        salt: Hashable = None,
        extra: Mapping[str, Array] | None = None,
    ) -> bool:
        """Copy what a slot holds after its committed tokens, as far as that prefix is not cached yet.

        Args:
            tokens: The slot's sequence, at least `committed` tokens of it.
            state: Every buffer, ``[slots, …]``. The rows of `committed` tokens and the committed state are read.
            slot: Which slot.
            committed: Tokens that the state has seen: fed, accepted, and not pending.
            salt: As for :meth:`match`.
            extra: Arrays to keep for this position, for example ``hidden [H]`` of the last committed token; copied.

        Returns:
            Whether the prefix of `committed` tokens is cached now. Nothing is stored for 0 tokens.

        Raises:
            ValueError: `committed` exceeds the tokens, a buffer is missing, there is no such slot, or it is too short.
        """
        if not 0 <= committed <= len(tokens):
            raise ValueError(f"{committed} tokens are said to be committed of {len(tokens)}")
        self._layout.check(state, slot, committed)
        if committed == 0:
            return False
        data = encode(tokens[:committed])
        last = self._tree.last(data, salt)
        if last.end == committed and last.snapshot is not None:
            self._tree.touch(last)
            return True
        size = self._layout.snapshot_bytes + sum(a.nbytes for a in (extra or {}).values())
        if not self._tree.make_room(size + self._layout.block_bytes(last.end, committed), last):
            self._tree.statistics.refused += 1
            return False
        nodes = self._copy_blocks(last, data, state, slot)
        copies = {name: a.copy() for name, a in (extra or {}).items()}
        self._tree.add(nodes, Snapshot(self._layout.copy_fixed(state, slot), copies, size))
        return True

    def statistics(self) -> PrefixCacheStatistics:
        """A copy of the counts."""
        return replace(self._tree.statistics)

    def clear(self) -> None:
        """Forget everything. Matches that are held can still be restored; their bytes are counted no longer."""
        self._tree.clear()

    def _copy_blocks(self, last: Node, data: bytes, state: Buffers, slot: int) -> list[Node]:
        """`last`, and new nodes for the encoded tokens after it, not linked to the tree yet."""
        nodes, width, end = [last], TOKEN.itemsize, len(data) // TOKEN.itemsize
        for a in range(last.end, end, self._block):
            b = min(a + self._block, end)
            rows = self._layout.copy_rows(state, slot, a, b)
            nbytes = self._layout.block_bytes(a, b)
            nodes.append(Node(data[a * width : b * width], b, nodes[-1], rows, nbytes))
        return nodes


def _usable(tokens: Sequence[int]) -> Sequence[int]:
    """What of a prompt may be restored: all but the last token."""
    return tokens[: max(len(tokens) - 1, 0)]
