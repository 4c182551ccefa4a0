# SPDX-License-Identifier: Apache-2.0
"""Schema of ``CachedAttention``."""

from nemo_build.plugins.schema import FLOATS, INDEX, LENGTHS, PAST, SLOTS, Attribute, Op, Param

OP = Op(
    name="CachedAttention",
    doc=(
        "Causal grouped-query attention over a key/value cache, softmax(scale q k^T) v, without positional "
        "encoding. The new keys and values are written at positions past .. past+length-1 of the row's slot; "
        "query i of a row sees positions 0 .. past+i. Rolling back is passing a smaller `past` next time."
    ),
    types={"T": FLOATS, "I": INDEX},
    inputs=(
        Param("q", "T", "[B, L, Hq*D]", "queries"),
        Param("k", "T", "[B, L, Hkv*D]", "keys of the new tokens"),
        Param("v", "T", "[B, L, Hkv*D]", "values of the new tokens"),
        Param("key_cache", "T", "[S, Hkv, M, D]", "keys of every slot, M positions at most"),
        Param("value_cache", "T", "[S, Hkv, M, D]", "values of every slot"),
        SLOTS,
        PAST,
        LENGTHS,
    ),
    outputs=(
        Param("y", "T", "[B, L, Hq*D]", "attention output; unspecified at and past a row's length"),
        Param("key_cache_out", "T", "[S, Hkv, M, D]", "the cache with the new keys"),
        Param("value_cache_out", "T", "[S, Hkv, M, D]", "the cache with the new values"),
    ),
    attributes=(Attribute("scale", "factor of the scores, usually D^-0.5"),),
    aliases={"key_cache_out": "key_cache", "value_cache_out": "value_cache"},
)
