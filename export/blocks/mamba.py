# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 mixer."""

from __future__ import annotations

import onnx_ir as ir

from nemo_build.export.blocks import WEIGHT_DTYPES, StepInputs, projection
from nemo_build.export.graph import ACTIVATION, GraphBuilder
from nemo_build.export.ledger import TensorRule
from nemo_build.spec import BlockKind, MambaSpec, ModelSpec
from nemo_build.state import StateSpec

KIND = BlockKind.MAMBA


def tensors(spec: ModelSpec) -> dict[str, TensorRule]:
    """What the checkpoint must hold below the layer's prefix."""
    m, hidden = _section(spec), spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "conv1d.weight": (m.conv_dim, 1, m.conv_kernel),
        "A_log": (m.num_heads,),
        "D": (m.num_heads,),
        "dt_bias": (m.num_heads,),
        "norm.weight": (m.inner_size,),
    }
    if m.conv_bias:
        shapes["conv1d.bias"] = (m.conv_dim,)
    if m.proj_bias:
        shapes |= {"in_proj.bias": (m.in_proj_size,), "out_proj.bias": (hidden,)}
    rules = {
        f"mixer.{name}": TensorRule(shape, WEIGHT_DTYPES, f"mamba.{name.removesuffix('.weight')}")
        for name, shape in shapes.items()
    }
    rules["mixer.in_proj.weight"] = projection((m.in_proj_size, hidden), "mamba.in_proj")
    rules["mixer.out_proj.weight"] = projection((hidden, m.inner_size), "mamba.out_proj")
    return rules


def states(spec: ModelSpec, prefix: str) -> tuple[StateSpec, ...]:
    """Convolution window, recurrent state, and the ring of pending tokens (x | B | d)."""
    m = _section(spec)
    token = m.inner_size + m.num_groups * m.state_size + m.num_heads
    shapes: dict[str, tuple[int | str, ...]] = {
        "conv": ("slots", f"{m.conv_kernel - 1}+pending", m.conv_dim),
        "ssm": ("slots", m.num_heads, m.head_dim, m.state_size),
        "ssm_pending": ("slots", "pending", token),
    }
    return tuple(StateSpec(f"{kind}.{prefix}", kind, shape, "float32") for kind, shape in shapes.items())


def build(g: GraphBuilder, spec: ModelSpec, prefix: str, x: ir.Value, step: StepInputs) -> ir.Value:
    """Add the mixer: projection, convolution, scan, gated group norm, projection."""
    m, p = _section(spec), f"{prefix}.mixer"
    bc = m.num_groups * m.state_size
    projected = g.linear(x, f"{p}.in_proj", step.lengths, bias=m.proj_bias)
    z, xbc, dt = g.ops(
        "Split", 3, projected, g.constant([m.inner_size, m.conv_dim, m.num_heads]), axis=-1, name="split_in"
    )
    conv_state, ssm_state, pending_state = states(spec, prefix)
    control = (step.slots, step.past, step.accepted, step.lengths)
    conv, conv_out = g.call(
        "CausalConv1d",
        [
            xbc,
            g.weight(f"{p}.conv1d.weight"),
            g.weight(f"{p}.conv1d.bias") if m.conv_bias else None,
            g.state(conv_state),
            *control,
        ],
        name="conv1d",
    )
    xs, b, c = g.ops("Split", 3, conv, g.constant([m.inner_size, bc, bc]), axis=-1, name="split_conv")
    y, ssm_out, pending_out = g.call(
        "SelectiveScan",
        [
            xs,
            dt,
            b,
            c,
            *(g.weight(f"{p}.{n}") for n in ("A_log", "D", "dt_bias")),
            g.state(ssm_state),
            g.state(pending_state),
            *control,
        ],
        name="scan",
        dt_min=float(m.dt_limit[0]),
        dt_max=float(m.dt_limit[1]),
    )
    for state, value in ((conv_state, conv_out), (ssm_state, ssm_out), (pending_state, pending_out)):
        g.set_state(state, value)
    return g.linear(_gated_norm(g, spec, m, p, y, z), f"{p}.out_proj", step.lengths, bias=m.proj_bias)


def _gated_norm(
    g: GraphBuilder, spec: ModelSpec, m: MambaSpec, prefix: str, y: ir.Value, z: ir.Value
) -> ir.Value:
    """Gate first, then RMSNorm over each group's channels, then the weight."""
    gated = g.op("Mul", y, g.op("Mul", z, g.op("Sigmoid", z), name="silu"), name="gate")
    grouped = g.op("Reshape", gated, g.constant([0, 0, m.num_groups, -1]), name="to_groups")
    ones = g.op("Expand", g.constant(1.0), g.constant([m.inner_size // m.num_groups]), name="unit_weight")
    normed = g.rms_norm(grouped, ones, spec.norm_eps, name="group_norm")
    flat = g.op("Reshape", normed, g.constant([0, 0, -1]), name="from_groups")
    return g.op("Mul", flat, g.weight(f"{prefix}.norm.weight", ACTIVATION), name="group_norm_weight")


def _section(spec: ModelSpec) -> MambaSpec:
    assert spec.mamba is not None, "a spec with mamba layers has a mamba section"
    return spec.mamba
