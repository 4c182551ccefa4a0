# SPDX-License-Identifier: Apache-2.0
"""Schema of ``CausalConv1d``."""

from nemo_build.plugins.schema import ACCEPTED, FLOATS, INDEX, LENGTHS, PAST, SLOTS, Op, Param

OP = Op(
    name="CausalConv1d",
    doc=(
        "Depthwise causal convolution over time followed by SiLU, with the last W-1 inputs of every sequence "
        "kept in a slot (Mamba-2, arXiv:2405.21060, section 7). "
        "A slot holds [window (W-1) | pending (K)]. A step first moves the window over the `accepted` pending "
        "inputs, then computes the new tokens. A row with 2 to K new tokens leaves them pending; a single one "
        "and more than K are committed at once. A row whose `past` equals `accepted` starts a new sequence: the slot's "
        "window counts as zero, its pending inputs do not."
    ),
    types={"T": FLOATS, "W": FLOATS, "I": INDEX},
    inputs=(
        Param("x", "T", "[B, L, C]", "inputs of the new tokens"),
        Param("weight", "W", "[C, 1, W]", "one kernel a channel, oldest tap first"),
        Param("bias", "W", "[C]", "bias of each channel", optional=True),
        Param("state", "T", "[S, W-1+K, C]", "window and pending inputs of every slot"),
        SLOTS,
        PAST,
        ACCEPTED,
        LENGTHS,
    ),
    outputs=(
        Param("y", "T", "[B, L, C]", "SiLU of the convolution; unspecified at and past a row's length"),
        Param(
            "state_out", "T", "[S, W-1+K, C]", "the state after the step; slots of no active row unchanged"
        ),
    ),
    aliases={"state_out": "state"},
)
