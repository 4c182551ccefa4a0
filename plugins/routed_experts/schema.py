# SPDX-License-Identifier: Apache-2.0
"""Schema of ``RoutedExperts``."""

from nemo_build.plugins.schema import (
    ACTIVATION_FORMAT,
    FLOATS,
    INDEX,
    LENGTHS,
    STORED,
    WEIGHT_FORMAT,
    Attribute,
    Op,
    Param,
)

OP = Op(
    name="RoutedExperts",
    doc=(
        "Mixture of experts without gate projection, y = sum_j weights_j down_e(relu(up_e(x))^2) with "
        "e = indices_j. The router is not part of the op. Only chosen experts are computed; tokens at or past "
        "a row's length choose none. With an `activation_format`, the inputs of both projections are rounded to it."
    ),
    types={"T": FLOATS, "W": STORED, "I": INDEX},
    inputs=(
        Param("x", "T", "[B, L, H]", "activations (in the latent space where the model has one)"),
        Param("indices", "I", "[B, L, k]", "chosen experts, distinct for a token"),
        Param("weights", "T", "[B, L, k]", "their weights, normalised and scaled"),
        LENGTHS,
        Param(
            "experts",
            "W",
            "E x [F, H], E x [H, F]",
            "all up projections, then all down projections",
            variadic=True,
        ),
    ),
    outputs=(Param("y", "T", "[B, L, H]", "weighted sum; unspecified at and past a row's length"),),
    attributes=(Attribute("num_experts", "number of experts E", kind=int), WEIGHT_FORMAT, ACTIVATION_FORMAT),
)
