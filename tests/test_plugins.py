# SPDX-License-Identifier: Apache-2.0
"""Every op's reference function against its plain NumPy reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx.shape_inference
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.plugins.codecs import fp8, nvfp4
from nemo_build.plugins.registry import plugins_by_name, register_schemas
from nemo_build.plugins.schema import DOMAIN, OPSET_VERSION

from .op_models import check, many, normal, one_node_model, run_function, seeds, step_control


@many
@given(
    seed=seeds, batch=st.integers(1, 4), steps=st.integers(1, 9), ring=st.integers(0, 5), bias=st.booleans()
)
def test_causal_conv1d(seed, batch, steps, ring, bias):
    rng = np.random.default_rng(seed)
    slots, channels, width = batch + 2, int(rng.integers(1, 7)), int(rng.integers(2, 5))
    state = normal(rng, slots, width - 1 + ring, channels)
    control = step_control(rng, batch, slots, steps, ring, 40)
    inputs = [
        normal(rng, batch, steps, channels),
        normal(rng, channels, 1, width),
        normal(rng, channels) if bias else None,
        state,
        *control,
    ]
    check("CausalConv1d", inputs, {}, control[3])


@many
@given(seed=seeds, batch=st.integers(1, 3), steps=st.integers(1, 9), one_expert=st.booleans())
def test_routed_experts(seed, batch, steps, one_expert):
    rng = np.random.default_rng(seed)
    experts, width, inner = (int(v) for v in rng.integers(2, 8, 3))
    top_k = int(rng.integers(1, experts + 1))
    scores = rng.random((batch, steps, experts))
    if one_expert:
        scores[..., 0] += 10
    indices = np.argsort(-scores, axis=-1)[..., :top_k].astype(np.int64)
    lengths = rng.integers(0, steps + 1, batch).astype(np.int64)
    weights = [normal(rng, inner, width) for _ in range(experts)] + [
        normal(rng, width, inner) for _ in range(experts)
    ]
    inputs = [normal(rng, batch, steps, width), indices, normal(rng, batch, steps, top_k), lengths, *weights]
    check("RoutedExperts", inputs, {"num_experts": experts}, lengths)


@pytest.mark.parametrize("rank", [2, 3])
def test_block_linear(rank):
    rng = np.random.default_rng(0)
    x = normal(rng, 2, 3, 5) if rank == 3 else normal(rng, 4, 5)
    w = normal(rng, 7, 5)
    lengths = [np.array([2, 3])] if rank == 3 else []
    got = run_function("BlockLinear", [x, w, *lengths], {})[0]
    np.testing.assert_allclose(got, plugins_by_name()["BlockLinear"].reference(x, w), atol=1e-5)
    np.testing.assert_allclose(got, np.einsum("...k,nk->...n", x, w), atol=1e-5)


def stored(rng: np.random.Generator, rows: int, columns: int, kind: str) -> list[np.ndarray]:
    """The stored tensors of a random weight in a format."""
    weight = normal(rng, rows, columns)
    if kind == "nvfp4":
        packed = nvfp4.encode(weight)
        return [packed.codes, packed.e4m3_scales, np.array(packed.scale_2)]
    if kind == "fp8":
        coded = fp8.encode(weight)
        return [coded.codes.view(ml_dtypes.float8_e4m3fn), np.array(coded.scale)]
    return [weight.astype(ml_dtypes.bfloat16) if kind == "bf16" else weight]


FORMATS = {  # name: (stored as, weight_format, activation_format, input scale)
    "bf16": ("bf16", "plain", "none", None),
    "fp8": ("fp8", "fp8", "none", None),
    "fp8 with rounded inputs": ("fp8", "fp8", "fp8", 0.01),
    "nvfp4": ("nvfp4", "nvfp4", "none", None),
    "nvfp4 with rounded inputs": ("nvfp4", "nvfp4", "nvfp4", 4 / (6 * 448)),
    "nvfp4 with inputs beyond the scale": ("nvfp4", "nvfp4", "nvfp4", 1 / (6 * 448)),
}


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (7, 32), (33, 176)])
def test_block_linear_formats(kind, rows, columns):
    rng = np.random.default_rng(rows)
    form, weight_format, activation, scale = kind
    parts = stored(rng, rows, columns, form)
    x = normal(rng, 2, 3, columns)
    x[0, 0, :16] = 0
    inputs = [x, parts[0], np.array([3, 3]), *parts[1:], *[None] * (3 - len(parts))]
    inputs += [] if scale is None else [np.array(scale, np.float32)]
    while inputs[-1] is None:
        inputs.pop()
    attributes = {"weight_format": weight_format, "activation_format": activation}
    check("BlockLinear", inputs, attributes, np.array([3, 3]))


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
def test_routed_expert_formats(kind):
    rng = np.random.default_rng(5)
    form, weight_format, activation, scale = kind
    experts, width, inner, lengths = 3, 32, 48, np.array([4, 2])
    shapes = ((inner, width), (width, inner))
    each = [[stored(rng, *shape, form) for _ in range(experts)] for shape in shapes]
    flat = []
    for projection in each:
        flat += [projection[e][part] for part in range(len(projection[0])) for e in range(experts)]
        flat += [] if scale is None else [np.array(scale * (1 + e), np.float32) for e in range(experts)]
    indices = np.stack([rng.permutation(experts)[:2] for _ in range(8)]).reshape(2, 4, 2)
    inputs = [normal(rng, 2, 4, width), indices, normal(rng, 2, 4, 2), lengths, *flat]
    attributes = {"num_experts": experts, "weight_format": weight_format, "activation_format": activation}
    check("RoutedExperts", inputs, attributes, lengths)


def test_padding_never_touches_other_rows():
    """NaN in padding tokens, in padding rows and in a slot's former sequence stays where it is."""
    rng = np.random.default_rng(1)
    nan = np.float32("nan")
    order, past, accepted = np.array([2, 0, 1]), np.array([0, 4, 9]), np.array([0, 1, 2])
    lengths = np.array([2, 3, 0])
    padding = np.arange(4) >= lengths[:, None]

    def poisoned(*shape: int) -> np.ndarray:
        a = normal(rng, *shape)
        a[padding] = nan
        return a

    conv_state = normal(rng, 4, 3 + 3, 5)
    ssm_state, pending = normal(rng, 4, 4, 2, 3), np.abs(normal(rng, 4, 3, 8 + 6 + 4))
    keys, values = normal(rng, 4, 2, 16, 3), normal(rng, 4, 2, 16, 3)
    for state in (conv_state, ssm_state, pending):
        state[2] = nan  # row 0 begins a new sequence in this slot
    for cache in (keys, values):
        cache[2] = nan
        cache[0, :, 7:] = nan  # beyond what row 1 has written
    weight = [normal(rng, 5, 1, 4), normal(rng, 5)]
    conv = run_function(
        "CausalConv1d", [poisoned(3, 4, 5), *weight, conv_state, order, past, accepted, lengths], {}
    )
    scan = run_function(
        "SelectiveScan",
        [poisoned(3, 4, 8), poisoned(3, 4, 4), poisoned(3, 4, 6), poisoned(3, 4, 6)]
        + [normal(rng, 4) for _ in range(3)]
        + [ssm_state, pending, order, past, accepted, lengths],
        {},
    )
    attention = run_function(
        "CachedAttention",
        [poisoned(3, 4, 12), poisoned(3, 4, 6), poisoned(3, 4, 6), keys, values, order, past, lengths],
        {"scale": 1.0},
    )
    experts = run_function(
        "RoutedExperts",
        [
            *(poisoned(3, 4, 5), np.zeros((3, 4, 1), np.int64), poisoned(3, 4, 1), lengths),
            *(normal(rng, 6, 5), normal(rng, 5, 6)),
        ],
        {"num_experts": 1},
    )
    for outputs in (conv, scan, attention, experts):
        assert np.isfinite(outputs[0][~padding]).all()
    assert np.isfinite(conv[1][[0, 1, 3]]).all()
    assert np.isfinite(scan[1]).all()
    assert np.isfinite(attention[1][0, :, :7]).all()


@pytest.mark.parametrize("before", [0, 7])
@pytest.mark.parametrize("ring", [3, 5])
def test_convolution_commits_part_of_a_step(ring, before):
    """After accepting k of n tokens, the next outputs equal those after k sequential steps, for every k."""
    rng = np.random.default_rng(4)
    channels, width, n = 5, 4, 3
    batch = n + 1
    slots, past, none = rng.permutation(batch), np.full(batch, before), np.zeros(batch, np.int64)
    weights = [normal(rng, channels, 1, width), normal(rng, channels)]
    tokens, probe = normal(rng, batch, n, channels), normal(rng, batch, 2, channels)
    window = normal(rng, batch, width - 1, channels)  # a former sequence's where `before` is 0

    def step(x, state, past, accepted):
        full = np.full(batch, x.shape[1])
        return run_function("CausalConv1d", [x, *weights, state, slots, past, accepted, full], {})

    drafted = step(tokens, np.pad(window, ((0, 0), (0, ring), (0, 0))), past, none)[1]
    accepted = np.arange(batch)
    got = step(probe, drafted, past + accepted, accepted)[0]
    for k in range(batch):
        state = window
        for t in range(k):
            state = step(tokens[:, t : t + 1], state, past + t, none)[1]
        np.testing.assert_allclose(got[k], step(probe, state, past + k, none)[0][k], atol=1e-5)


@pytest.mark.parametrize("name", sorted(plugins_by_name()))
def test_schema_is_what_the_checker_uses(name):
    register_schemas()
    schema = onnx.defs.get_schema(name, OPSET_VERSION, DOMAIN)
    op = plugins_by_name()[name].op
    assert [i.name for i in schema.inputs] == [p.name for p in op.inputs]
    assert [o.name for o in schema.outputs] == [p.name for p in op.outputs]
    assert set(op.aliases) <= {p.name for p in op.outputs}
    assert set(op.aliases.values()) <= {p.name for p in op.inputs}


def test_checker_rejects_a_wrong_type():
    x, w = np.zeros((1, 2), np.float32), np.zeros((3, 2), np.int64)
    with pytest.raises(onnx.shape_inference.InferenceError, match=r"weight.*int64"):
        one_node_model("BlockLinear", [x, w], {})
