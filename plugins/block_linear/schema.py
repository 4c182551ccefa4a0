# SPDX-License-Identifier: Apache-2.0
"""Schema of ``BlockLinear``."""

from dataclasses import replace

from nemo_build.plugins.schema import (
    ACTIVATION_FORMAT,
    FLOATS,
    INDEX,
    LENGTHS,
    SCALES,
    STORED,
    WEIGHT_FORMAT,
    Op,
    Param,
)

OP = Op(
    name="BlockLinear",
    doc=(
        "A projection without bias, y = x @ weight^T, whose weight stays in the checkpoint's own layout: plain, "
        "FP8 with one scale, or NVFP4 with a scale for each block of 16 and one for all. With an "
        "`activation_format`, x is first rounded to that format."
    ),
    types={"T": FLOATS, "W": STORED, "S": SCALES, "F": ("tensor(float)",), "I": INDEX},
    inputs=(
        Param("x", "T", "[B, L, K] or [R, K]", "activations"),
        Param(
            "weight",
            "W",
            "[N, K], or [N, K/2] for nvfp4",
            "weight, output rows first, as checkpoints store it",
        ),
        replace(LENGTHS, optional=True),
        Param(
            "weight_scale",
            "S",
            "scalar, or [N, K/16] for nvfp4",
            "scale of the weight or its blocks",
            optional=True,
        ),
        Param("weight_scale_2", "F", "scalar", "scale of nvfp4's block scales", optional=True),
        Param("input_scale", "F", "scalar", "scale of the rounded activations", optional=True),
    ),
    outputs=(Param("y", "T", "[B, L, N] or [R, N]", "rows at or past a row's length are unspecified"),),
    attributes=(WEIGHT_FORMAT, ACTIVATION_FORMAT),
)
