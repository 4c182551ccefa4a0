# SPDX-License-Identifier: Apache-2.0
"""Schema of ``CachedAttention``."""

from nemo_build.plugins.schema import FLOATS, INDEX, LENGTHS, PAST, SLOTS, Attribute, Op, Param

OP = Op(
    name="CachedAttention",
    doc=(
        "Grouped-query attention over a key/value cache, softmax(scale q k^T) v. The new keys and values are "
        "written at positions past .. past+length-1 of the row's slot. The query at position p = past+i sees "
        "positions 0 .. p or, where `causal` is 0, all up to past+length-1, so that the new tokens see each other; "
        "a `window` hides the positions up to p - window, in both cases. Rolling back is passing a smaller `past` "
        "next time. `sinks` (arXiv:2309.17453, as learned logits) are one more term of each head's softmax "
        "denominator, without a value. With `cos` and `sin`, the first R components of queries and of new keys are "
        "rotated by position (arXiv:2104.09864; pairs (i, i+R/2)) and keys are cached rotated; scaled variants such "
        "as YaRN (arXiv:2309.00071) are other tables, into which its attention factor is multiplied."
    ),
    types={"T": FLOATS, "W": FLOATS, "F": ("tensor(float)",), "I": INDEX},
    inputs=(
        Param("q", "T", "[B, L, Hq*D]", "queries"),
        Param("k", "T", "[B, L, Hkv*D]", "keys of the new tokens"),
        Param("v", "T", "[B, L, Hkv*D]", "values of the new tokens"),
        Param("key_cache", "T", "[S, Hkv, M, D]", "keys of every slot, M positions at most"),
        Param("value_cache", "T", "[S, Hkv, M, D]", "values of every slot"),
        SLOTS,
        PAST,
        LENGTHS,
        Param("sinks", "W", "[Hq]", "logit of each head's sink", optional=True),
        Param("cos", "F", "[>=M, R/2]", "cosines by position; R is at most D", optional=True),
        Param("sin", "F", "[>=M, R/2]", "sines by position; present with `cos`", optional=True),
    ),
    outputs=(
        Param("y", "T", "[B, L, Hq*D]", "attention output; unspecified at and past a row's length"),
        Param("key_cache_out", "T", "[S, Hkv, M, D]", "the cache with the new keys"),
        Param("value_cache_out", "T", "[S, Hkv, M, D]", "the cache with the new values"),
    ),
    attributes=(
        Attribute("scale", "factor of the scores, usually D^-0.5"),
        Attribute("window", "how many positions up to its own a query sees; 0 for all", 0, kind=int),
        Attribute("causal", "0 lets a row's new tokens see each other", 1, kind=int),
    ),
    aliases={"key_cache_out": "key_cache", "value_cache_out": "value_cache"},
)
