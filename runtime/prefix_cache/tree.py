# SPDX-License-Identifier: Apache-2.0
"""The radix tree: what is found by which tokens, in which order it was used, and what goes for lack of room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_build.runtime.prefix_cache.slot import TOKEN, Array


@dataclass
class PrefixCacheStatistics:
    """Counts since the cache was made, and what it holds now.

    Attributes:
        queries: Calls of ``match``.
        hits: Those that matched anything.
        queried_tokens: Tokens of all queries.
        saved_tokens: Tokens that were restored instead of computed.
        stores: Calls of ``store`` that added something.
        refused: Calls of ``store`` that found no room.
        evicted_blocks: Blocks whose rows were evicted.
        evicted_snapshots: Snapshots that were evicted.
        blocks: Blocks held now, partial ones included.
        snapshots: Snapshots held now; 0 without recurrent state.
        row_bytes: Bytes of rows and of the tokens they are found by.
        snapshot_bytes: Bytes of snapshots and of what was stored with them.
    """

    queries: int = 0
    hits: int = 0
    queried_tokens: int = 0
    saved_tokens: int = 0
    stores: int = 0
    refused: int = 0
    evicted_blocks: int = 0
    evicted_snapshots: int = 0
    blocks: int = 0
    snapshots: int = 0
    row_bytes: int = 0
    snapshot_bytes: int = 0

    @property
    def bytes(self) -> int:
        """All bytes held now."""
        return self.row_bytes + self.snapshot_bytes


@dataclass(frozen=True)
class Snapshot:
    """What makes a position one to start from: the state that is not rows, and the scheduler's own arrays."""

    arrays: Sequence[Array]
    extra: Mapping[str, Array]
    nbytes: int


@dataclass(eq=False, slots=True)
class Node:
    """A block of tokens, full or partial, and those before it by way of its parent.

    Below the root there is a node without tokens for each salt.

    Attributes:
        key: The encoded tokens, or the salt.
        end: Tokens up to the end of this block.
        parent: What comes before; ``None`` for the root.
        rows: The block's rows, one array a buffer.
        nbytes: Bytes of the rows and tokens.
        snapshot: Present if the cache may start from here.
        pins: Matches that hold it.
        blocks: Full blocks after it by their keys.
        leaves: Partial blocks after it by theirs.
    """

    key: Hashable
    end: int
    parent: Node | None
    rows: Sequence[Array] = ()
    nbytes: int = 0
    snapshot: Snapshot | None = None
    pins: int = 0
    blocks: dict[Hashable, Node] = field(default_factory=dict)
    leaves: dict[Hashable, Node] = field(default_factory=dict)

    def path(self) -> list[Node]:
        """The nodes from the salt's to this one."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[-2::-1]


def encode(tokens: Sequence[int]) -> bytes:
    """Tokens as what nodes are found by. Raises OverflowError beyond 32 bits."""
    return np.asarray(tokens, TOKEN).tobytes()


class Tree:
    """The nodes, within a capacity.

    Args:
        capacity: Bytes of all rows and snapshots.
        block: Tokens in a full block.
        recurrent: Whether positions need snapshots to start from. If not, every node has an empty one.
    """

    def __init__(self, capacity: int, block: int, recurrent: bool) -> None:
        self.statistics = PrefixCacheStatistics()
        self._capacity = capacity
        self._block = block
        self._recurrent = recurrent
        self._root = Node(None, 0, None)
        # Nodes with a snapshot; those used last are last. Without recurrent state, what follows a node is before it.
        self._order: OrderedDict[Node, None] = OrderedDict()

    def walk(self, data: bytes, salt: Hashable) -> list[Node]:
        """The salt's node and those of the full blocks that encoded tokens begin with; none for an unknown salt."""
        node = self._root.blocks.get(salt)
        path, width = [], self._block * TOKEN.itemsize
        while node is not None:
            path.append(node)
            at = node.end * TOKEN.itemsize
            node = node.blocks.get(data[at : at + width])
        return path

    def deepest(self, data: bytes, salt: Hashable) -> Node | None:
        """The node with a snapshot that has the most of encoded tokens, and none besides."""
        for node in reversed(self.walk(data, salt)):
            at = node.end * TOKEN.itemsize
            rest = data[at : at + (self._block - 1) * TOKEN.itemsize] if node.leaves else b""
            for n in range(len(rest), 0, -TOKEN.itemsize):
                if (leaf := node.leaves.get(rest[:n])) is not None:
                    return leaf
            if node.snapshot is not None:
                return node
        return None

    def last(self, data: bytes, salt: Hashable) -> Node:
        """The node after which encoded tokens are new; perhaps the salt's, and perhaps not in the tree yet."""
        path = self.walk(data, salt)
        node = path[-1] if path else Node(salt, 0, self._root)
        return node.leaves.get(data[node.end * TOKEN.itemsize :], node)

    def touch(self, node: Node) -> None:
        """Make a node the one used last."""
        for n in [node] if self._recurrent else node.path()[::-1]:
            if n.snapshot is not None:
                self._order[n] = None
                self._order.move_to_end(n)

    def add(self, nodes: Sequence[Node], snapshot: Snapshot) -> None:
        """Link nodes, each the parent of the next and the first what :meth:`last` gave; the snapshot is the last's."""
        for node in nodes:
            if node.end and not self._recurrent and node.snapshot is None:
                node.snapshot = Snapshot((), {}, 0)
            if (parent := node.parent) is not None:
                full = node.end - parent.end in (0, self._block)
                (parent.blocks if full else parent.leaves)[node.key] = node
        nodes[-1].snapshot = snapshot
        s = self.statistics
        s.stores += 1
        s.blocks += len(nodes) - 1
        s.row_bytes += sum(n.nbytes for n in nodes[1:])
        s.snapshots += self._recurrent
        s.snapshot_bytes += snapshot.nbytes
        self.touch(nodes[-1])

    def make_room(self, size: int, keep: Node) -> bool:
        """Evict until `size` bytes fit, but not the rows of `keep` nor of what comes before it.

        Returns:
            Whether they fit. If not even the rows to be kept leave room, nothing is evicted.
        """
        if size + sum(n.nbytes for n in keep.path()) > self._capacity:
            return False
        while self.statistics.bytes + size > self._capacity:
            victim = next((n for n in self._order if self._evictable(n, keep)), None)
            if victim is None:
                self._prune(keep, None)
                return False
            self._evict(victim, keep)
        return True

    def clear(self) -> None:
        """Take the tree apart. Ways from a node to the root stay, for those who hold one."""
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            nodes += [*node.blocks.values(), *node.leaves.values()]
            node.blocks.clear()
            node.leaves.clear()
        self._order.clear()
        s = self.statistics
        s.blocks = s.snapshots = s.row_bytes = s.snapshot_bytes = 0

    def _evictable(self, node: Node, keep: Node) -> bool:
        """Whether a node's snapshot may go; without recurrent state, its rows go with it."""
        return not node.pins and (self._recurrent or not (node.blocks or node.leaves or node is keep))

    def _evict(self, node: Node, keep: Node) -> None:
        """Drop a snapshot and the rows that only it needed, except those that lead to `keep`."""
        assert node.snapshot is not None, "the order has nodes with a snapshot"
        del self._order[node]
        s = self.statistics
        s.snapshot_bytes -= node.snapshot.nbytes
        s.snapshots -= self._recurrent
        s.evicted_snapshots += self._recurrent
        node.snapshot = None
        self._prune(node, keep)

    def _prune(self, node: Node, keep: Node | None) -> None:
        """Remove a node and those before it, as far as they have no snapshot and nothing comes after them."""
        while (parent := node.parent) is not None and node is not keep:
            if node.snapshot is not None or node.blocks or node.leaves:
                return
            for table in (parent.blocks, parent.leaves):
                if table.get(node.key) is node:
                    del table[node.key]
            self.statistics.row_bytes -= node.nbytes
            self.statistics.blocks -= node.end > 0
            self.statistics.evicted_blocks += node.end > 0
            node = parent
