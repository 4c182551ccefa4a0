# SPDX-License-Identifier: Apache-2.0
"""Schema of ``SelectiveScan``."""

from nemo_build.plugins.schema import ACCEPTED, FLOATS, INDEX, LENGTHS, PAST, SLOTS, Attribute, Op, Param

OP = Op(
    name="SelectiveScan",
    doc=(
        "The Mamba-2 recurrence (arXiv:2405.21060, equation 1 with scalar A): with d = clamp(softplus(dt + "
        "dt_bias), dt_min, dt_max) and a = -exp(a_log), h_t = exp(d_t a) h_(t-1) + d_t x_t B_t^T, "
        "y_t = h_t C_t + d_skip x_t. Head i of H uses B and C of group i // (H / G). "
        "A slot holds the committed state and a ring of K pending tokens (x | B | d). A step first advances the "
        "state over the `accepted` pending tokens, then computes the new tokens. A row with 2 to K new tokens "
        "leaves them pending, so that the next step can commit any number of them; a single one, behind "
        "which there is no draft, and more than K are committed at once. A row whose `past` equals `accepted` "
        "starts from a zero state."
    ),
    types={"T": FLOATS, "W": FLOATS, "I": INDEX},
    inputs=(
        Param("x", "T", "[B, L, H*P]", "inputs, after the convolution"),
        Param("dt", "T", "[B, L, H]", "raw time steps"),
        Param("b", "T", "[B, L, G*N]", "input projections B"),
        Param("c", "T", "[B, L, G*N]", "output projections C"),
        Param("a_log", "W", "[H]", "log of -a"),
        Param("d_skip", "W", "[H]", "skip weights D"),
        Param("dt_bias", "W", "[H]", "bias of the time steps"),
        Param("state", "T", "[S, H, P, N]", "committed state of every slot"),
        Param("pending", "T", "[S, K, H*P+G*N+H]", "pending tokens of every slot: x | B | d; K may be 0"),
        SLOTS,
        PAST,
        ACCEPTED,
        LENGTHS,
    ),
    outputs=(
        Param("y", "T", "[B, L, H*P]", "outputs; unspecified at and past a row's length"),
        Param("state_out", "T", "[S, H, P, N]", "committed state after the step"),
        Param("pending_out", "T", "[S, K, H*P+G*N+H]", "pending tokens after the step"),
    ),
    attributes=(
        Attribute("dt_min", "lower clamp of the time step", 0.0),
        Attribute("dt_max", "upper clamp of the time step", float("inf")),
    ),
    aliases={"state_out": "state", "pending_out": "pending"},
)
