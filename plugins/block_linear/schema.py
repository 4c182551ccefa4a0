# SPDX-License-Identifier: Apache-2.0
"""Schema of ``BlockLinear``."""

from dataclasses import replace

from nemo_build.plugins.schema import FLOATS, INDEX, LENGTHS, Op, Param

OP = Op(
    name="BlockLinear",
    doc="A projection without bias, y = x @ weight^T, whose weight stays in the checkpoint's own layout.",
    types={"T": FLOATS, "W": FLOATS, "I": INDEX},
    inputs=(
        Param("x", "T", "[B, L, K] or [R, K]", "activations"),
        Param("weight", "W", "[N, K]", "weight, output rows first, as checkpoints store it"),
        replace(LENGTHS, optional=True),
    ),
    outputs=(Param("y", "T", "[B, L, N] or [R, N]", "rows at or past a row's length are unspecified"),),
)
