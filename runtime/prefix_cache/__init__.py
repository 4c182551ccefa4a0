# SPDX-License-Identifier: Apache-2.0
"""A cache of prompt prefixes for models that keep attention rows, recurrent state, or both.

Prompts that begin alike (a system prompt, the earlier turns of a conversation) need not be computed again: the
cache keeps what a slot held after their common part and copies it into the slot of the next sequence.

**What is kept.** A radix tree over blocks of tokens. A node is one full block and holds the block's rows of every
buffer that has positions (keys and values, of all graphs together). A *snapshot* is a copy of everything else a
slot holds: the convolution's window and the recurrent state. It exists for one position only and is the larger
part (50 MB for the 30B model, whose block of 64 rows has under 1 MB), so only some nodes have one; a node without
is a tombstone, kept because longer prefixes need its rows. A snapshot that is not on a block boundary belongs to a
leaf with part of a block, which matches if all its tokens do.

**What matches.** The deepest position that has a snapshot and leaves at least one token to feed: the last token
of a prompt is always computed, since its logits are wanted. Tokens are compared, not hashes of them. A model
without recurrent state needs no snapshots: every block's end matches. In a model without attention a block has no
rows.

**What may enter.** A snapshot at position n is the state after n tokens and nothing else, so only *committed*
tokens enter. In the terms of a step graph, ``committed = fed - uncommitted``: a step of 2 to K tokens (the
session's ``pending``) leaves its tokens pending, and the slot's state is the one before them; the next step
commits the ``accepted`` of them first. Rows of rejected tokens lie past what is committed and are never copied;
neither are pending tokens, so a restored slot has none: its first step has ``past`` = the match's length and
``accepted`` = 0.

**Where snapshots are taken.** Where a chunk of a prompt ends at a position that :meth:`PrefixCache.next_snapshot`
asked for: every `snapshot_every` blocks; where a prompt leaves what an earlier one shared with it, so that the third
prompt with a system prompt starts behind it, and so does the third time of a prompt; and at the end of a prompt,
for its continuation. A scheduler may store at any other committed position, such as where a text ended::

    with cache.match(prompt, salt) as match:  # once a sequence
        cache.restore(match, state, slot)
        fed = match.length
    ...
    end = cache.next_snapshot(prompt, fed, salt)  # for every chunk of the prompt
    step(prompt[fed : min(fed + budget, end)])  # advances fed and uncommitted
    if fed - uncommitted == end:
        cache.store(prompt, state, slot, end, salt)

A last chunk so short that it stays pending is committed by the step after it: then ``fed - uncommitted`` is the
prompt's length one step later, which is when its end can be stored.

**What is evicted.** One capacity for rows and snapshots together, never exceeded: room is made before anything is
copied, and what finds no room is not stored. Snapshots go in the order of their last use. Use is being the end of
a match or of a store, not lying on the way to it, so what nobody starts from goes first, be it a leaf or not. A
snapshot of an inner node leaves a tombstone; one of a leaf takes with it all rows that no other snapshot needs, so
the tree never holds rows that cannot match. Without recurrent state, leaves go in the order of their last use, and
lying on the way is use. What a match holds stays until the match is released.

**Drafters.** One cache serves the target and its drafters if `states` and the mappings given to it have the buffers
of all (their names differ) and a sequence has one slot number in all. A module that predicts a token ahead has, at
position p, a row that depends on token p+1; its buffers have a `lookahead` of 1, and n matched tokens restore its
rows 0 .. n-2. To go on it needs the target's hidden state at n-1, which no later step computes: `extra` keeps such
things. A drafter must have been fed as far before its rows are stored.

**Threads.** None of this is locked; the scheduler that owns the slots is the only caller.
"""

from nemo_build.runtime.prefix_cache.cache import Match, PrefixCache
from nemo_build.runtime.prefix_cache.tree import PrefixCacheStatistics

__all__ = ["Match", "PrefixCache", "PrefixCacheStatistics"]
