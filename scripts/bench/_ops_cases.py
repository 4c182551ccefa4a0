# SPDX-License-Identifier: Apache-2.0
"""What `cpu_ops.py` measures: contenders, weights and inputs of each op, at the widths of Nemotron 3.5 Lightning.

Weights are random codes. An integer format of ours and of ONNX Runtime has the same ones, so that both compute one
function. Copies of an op in a model have weights or states of their own, more than the caches hold, as the layers of a
model do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
from _ops_run import Array, Case, Contender, Weights

from nemo_build.plugins import panels

HIDDEN, INNER = 2688, 1856
ROWS = 10304  # of a Mamba layer's input projection
LINEAR_COPIES = 5
HEADS, HEAD_DIM, GROUPS, STATE = 64, 64, 8, 128
CHANNELS, TAPS = HEADS * HEAD_DIM + 2 * GROUPS * STATE, 4
QUERY_HEADS, KEY_HEADS, ATTENTION_DIM = 32, 2, 128
TOP_K = 6

STEPS = (1, 4, 128, 512)
BLOCK = 32


@dataclass(frozen=True)
class Op:
    """An op: how its weights are written, what is compared, and with which inputs."""

    prepare: Callable[[Weights], None]
    contenders: tuple[Contender, ...]
    cases: Callable[[], Iterator[Case]]


def ops(experts: int) -> dict[str, Op]:
    """All of them, with a number of experts."""
    return {
        "SelectiveScan": Op(_scan_weights, SCAN, _scan_cases),
        "CausalConv1d": Op(_conv_weights, CONV, _conv_cases),
        "CachedAttention": Op(lambda weights: None, ATTENTION, _attention_cases),
        "BlockLinear": Op(_linear_weights, LINEAR, _linear_cases),
        "RoutedExperts": Op(
            lambda weights: _expert_weights(weights, experts),
            _experts(experts),
            lambda: _expert_cases(experts),
        ),
    }


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32)


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count > 1)}"


def _row(length: int, past: int) -> dict[str, Array]:
    """One sequence in slot 0."""
    values = {"slots": 0, "past": past, "accepted": 0, "lengths": length}
    return {name: np.array([value], np.int64) for name, value in values.items()}


def _state_copies(tokens: int) -> int:
    """So many that the caches do not hold their states, but few where the time goes into tokens."""
    return 46 if tokens <= 4 else 4


# SelectiveScan

SCAN = (
    Contender(
        "ours",
        "y_{i}, state_{i}_out, pending_{i}_out = nemo.SelectiveScan (x, dt, b, c, a_log, d_skip, dt_bias, state_{i}, "
        "pending_{i}, slots, past, accepted, lengths)",
        note="softplus, skip, slots, pending tokens and lengths are within",
    ),
    Contender(
        "LinearAttention",
        """
        biased_{i} = Add (dt_{i}, dt_bias)
        d_{i} = Softplus (biased_{i})
        decay_{i} = Mul (d_{i}, a)
        heads_{i} = Reshape (x_{i}, heads_shape)
        d4_{i} = Unsqueeze (d_{i}, last)
        dx4_{i} = Mul (heads_{i}, d4_{i})
        dx_{i} = Reshape (dx4_{i}, flat_shape)
        b5_{i} = Reshape (b_{i}, grouped_shape)
        all5_{i} = Expand (b5_{i}, expanded_shape)
        all_{i} = Reshape (all5_{i}, flat_shape)
        main_{i}, turned_{i}_out = com.microsoft.LinearAttention <update_rule = "gated", scale = 1.0,
          q_num_heads = 8, kv_num_heads = 64> (c, all_{i}, dx_{i}, turned_{i}, decay_{i})
        main4_{i} = Reshape (main_{i}, heads_shape)
        skip_{i} = Mul (heads_{i}, d_skip2)
        sum_{i} = Add (main4_{i}, skip_{i})
        y_{i} = Reshape (sum_{i}, flat_shape)""",
        "ours",
        2e-4,
        "update_rule=gated, with softplus, expansion of B and skip; no slots, pending tokens or lengths",
    ),
    Contender(
        "LinearAttention alone",
        'y_{i}, turned_{i}_out = com.microsoft.LinearAttention <update_rule = "gated", scale = 1.0, q_num_heads = 8, '
        "kv_num_heads = 64> (c, all_b, dx, turned_{i}, decay)",
        "ours",
        None,
        "its inputs computed beforehand, without skip",
    ),
)


def _scan_parameters() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {
        "a_log": np.log(rng.uniform(1, 16, HEADS)).astype(np.float32),
        "d_skip": _normal(rng, HEADS),
        "dt_bias": rng.uniform(-6, -2, HEADS).astype(np.float32),
    }


def _scan_weights(weights: Weights) -> None:
    parameters = _scan_parameters()
    for name, value in parameters.items():
        weights.add(name, value)
    weights.add("a", -np.exp(parameters["a_log"]))
    weights.add("d_skip2", parameters["d_skip"][:, None])
    shapes = {
        "last": [-1],
        "heads_shape": [0, 0, HEADS, HEAD_DIM],
        "flat_shape": [0, 0, -1],
        "grouped_shape": [0, 0, GROUPS, 1, STATE],
        "expanded_shape": [1, 1, GROUPS, HEADS // GROUPS, STATE],
    }
    for name, dims in shapes.items():
        weights.add(name, np.array(dims, np.int64))


def _scan_cases() -> Iterator[Case]:
    rng = np.random.default_rng(1)
    parameters = _scan_parameters()
    state = _normal(rng, 1, HEADS, HEAD_DIM, STATE)
    states = {
        "state": state,
        "turned": state.transpose(0, 1, 3, 2).copy(),
        "pending": np.zeros((1, 0, HEADS * HEAD_DIM + GROUPS * STATE + HEADS), np.float32),
    }
    for tokens in STEPS:
        x, dt = _normal(rng, 1, tokens, HEADS * HEAD_DIM), _normal(rng, 1, tokens, HEADS)
        b, c = (_normal(rng, 1, tokens, GROUPS * STATE) for _ in range(2))
        d = np.logaddexp(0, dt + parameters["dt_bias"]).astype(np.float32)
        groups = b.reshape(1, tokens, GROUPS, STATE)
        derived = {
            "all_b": np.repeat(groups, HEADS // GROUPS, axis=2).reshape(1, tokens, -1),
            "dx": (x.reshape(1, tokens, HEADS, HEAD_DIM) * d[..., None]).reshape(x.shape),
            "decay": -d * np.exp(parameters["a_log"]),
        }
        feeds = {"x": x, "dt": dt, "b": b, "c": c, **derived, **_row(tokens, past=1)}
        yield Case(_tokens(tokens), tokens, _state_copies(tokens), [feeds], states)


# CausalConv1d

_CONV_WITH_STATE = 'com.microsoft.CausalConvWithState <activation = "silu"'

CONV = (
    Contender(
        "ours",
        "y_{i}, window_{i}_out = nemo.CausalConv1d (x, taps_{i}, bias_{i}, window_{i}, slots, past, accepted, lengths)",
        note="slots, pending tokens and lengths are within",
    ),
    Contender(
        "CausalConvWithState",
        f"y_{{i}}, window_{{i}}_out = {_CONV_WITH_STATE}, channels_last = 1> (x, taps_{{i}}, bias_{{i}}, window_{{i}})",
        "ours",
        1e-5,
        "channels_last=1; no slots, pending tokens or lengths",
    ),
    Contender(
        "the same, channels first",
        f"""
        first_{{i}} = Transpose <perm = [0, 2, 1]> (x_{{i}})
        result_{{i}}, turned_{{i}}_out = {_CONV_WITH_STATE}> (first_{{i}}, taps_{{i}}, bias_{{i}}, turned_{{i}})
        y_{{i}} = Transpose <perm = [0, 2, 1]> (result_{{i}})""",
        "ours",
        1e-5,
        "with transposes of inputs and results",
    ),
    Contender(
        "channels first alone",
        f"y_{{i}}, turned_{{i}}_out = {_CONV_WITH_STATE}> (turned_x, taps_{{i}}, bias_{{i}}, turned_{{i}})",
        "ours",
        None,
        "without the transposes",
    ),
)


def _conv_weights(weights: Weights) -> None:
    rng = np.random.default_rng(0)
    for i in range(_state_copies(1)):
        weights.add(f"taps_{i}", _normal(rng, CHANNELS, 1, TAPS) * 0.5)
        weights.add(f"bias_{i}", _normal(rng, CHANNELS))


def _conv_cases() -> Iterator[Case]:
    rng = np.random.default_rng(1)
    window = _normal(rng, 1, TAPS - 1, CHANNELS)
    states = {"window": window, "turned": window.transpose(0, 2, 1).copy()}
    for tokens in STEPS:
        x = _normal(rng, 1, tokens, CHANNELS)
        feeds = {"x": x, "turned_x": x.transpose(0, 2, 1).copy(), **_row(tokens, past=1)}
        yield Case(_tokens(tokens), tokens, _state_copies(tokens), [feeds], states)


# CachedAttention

ATTENTION = (
    Contender(
        "ours",
        "y_{i}, keys_{i}_out, values_{i}_out = nemo.CachedAttention <scale = 0.08838834764> (q, k, v, keys_{i}, "
        "values_{i}, slots, past, lengths)",
        note="slots and lengths are within",
    ),
    Contender(
        "GroupQueryAttention",
        "y_{i}, keys_{i}_out, values_{i}_out = com.microsoft.GroupQueryAttention <num_heads = 32, kv_num_heads = 2, "
        "do_rotary = 0> (q, k, v, keys_{i}, values_{i}, seqlens_k, total_length)",
        "ours",
        1e-5,
        "do_rotary=0, shared cache; rows are its slots, in order",
    ),
)


def _attention_cases() -> Iterator[Case]:
    rng = np.random.default_rng(1)
    for label, tokens, context, copies in (
        ("decode at 1024", 1, 1024, 48),
        ("decode at 8192", 1, 8192, 6),
        ("prompt of 512", 512, 512, 4),
    ):
        width = KEY_HEADS * ATTENTION_DIM
        states = {name: _normal(rng, 1, KEY_HEADS, context, ATTENTION_DIM) for name in ("keys", "values")}
        feeds = {
            "q": _normal(rng, 1, tokens, QUERY_HEADS * ATTENTION_DIM),
            "k": _normal(rng, 1, tokens, width),
            "v": _normal(rng, 1, tokens, width),
            "seqlens_k": np.array([context - 1], np.int32),
            "total_length": np.array(context, np.int32),
            **_row(tokens, past=context - tokens),
        }
        yield Case(label, tokens, copies, [feeds], states)


# BlockLinear


def _packed_linear(form: str, precision: str) -> Contender:
    scale = ", , scale" if form in ("nvfp4", "fp8") else ""
    attributes = f'weight_format = "{form}", precision = "{precision}", rows = {ROWS}, columns = {HIDDEN}'
    return Contender(
        f"ours {form}, {precision}",
        f"y_{{i}} = nemo.cpu.BlockLinear <{attributes}> (x, {form}_panels_{{i}}{scale})",
    )


def _stored_linear(form: str, parts: str) -> Contender:
    kind = "plain" if form == "bf16" else form
    return Contender(
        f"ours {form} in place",
        f'y_{{i}} = nemo.BlockLinear <weight_format = "{kind}", precision = "bfloat16"> (x, {form}_{{i}}{parts})',
        f"ours {form}, bfloat16",
        0.0,
        "as the checkpoint stores it",
    )


def _matmul_nbits(bits: int, level: int, beside: str, tolerance: float) -> Contender:
    attributes = f"K = {HIDDEN}, N = {ROWS}, bits = {bits}, block_size = {BLOCK}, accuracy_level = {level}"
    return Contender(
        f"MatMulNBits {bits}-bit, level {level}",
        f"y_{{i}} = com.microsoft.MatMulNBits <{attributes}> (x, nbits{bits}_{{i}}, nbits{bits}_scales_{{i}})",
        f"ours {beside}",
        tolerance,
        "float32 scales; packs a copy of the weights when it is loaded",
    )


LINEAR = (
    _packed_linear("nvfp4", "float32"),
    _packed_linear("nvfp4", "bfloat16"),
    _packed_linear("nvfp4", "int8"),
    _packed_linear("int4", "bfloat16"),
    _packed_linear("int4", "int8"),
    _packed_linear("int8", "int8"),
    _packed_linear("fp8", "bfloat16"),
    _packed_linear("bf16", "bfloat16"),
    _stored_linear("nvfp4", ", , nvfp4_scales_{i}, scale"),
    _stored_linear("fp8", ", , scale"),
    _stored_linear("bf16", ""),
    _matmul_nbits(4, 0, "int4, bfloat16", 5e-3),
    _matmul_nbits(4, 4, "int4, int8", 1e-2),
    _matmul_nbits(8, 4, "int8, int8", 1e-2),
    Contender(
        "MatMul float32",
        "y_{i} = MatMul (x, float32_{i})",
        "ours bf16, bfloat16",
        5e-3,
        "four bytes a weight; packs a copy when it is loaded",
    ),
)


def _linear_weights(weights: Weights) -> None:
    rng = np.random.default_rng(0)
    weights.add("scale", np.array([0.02], np.float32))
    for i in range(LINEAR_COPIES):
        codes, scales = _nvfp4_codes(rng, ROWS, HIDDEN)
        weights.add(f"nvfp4_{i}", codes)
        weights.add(f"nvfp4_scales_{i}", scales.view(ml_dtypes.float8_e4m3fn))
        weights.add(f"nvfp4_panels_{i}", panels.pack(panels.FORMATS["nvfp4"], HIDDEN, codes, scales))
        for bits in (4, 8):
            codes, scales = _integer_codes(rng, ROWS, HIDDEN, bits)
            offset = 128 if bits == 8 else 0  # MatMulNBits takes codes from 0 on
            weights.add(
                f"int{bits}_panels_{i}", panels.pack(panels.FORMATS[f"int{bits}"], HIDDEN, codes, scales)
            )
            weights.add(f"nbits{bits}_{i}", (codes ^ offset).reshape(ROWS, HIDDEN // BLOCK, -1))
            weights.add(f"nbits{bits}_scales_{i}", _float_scales(scales))
        values = _normal(rng, ROWS, HIDDEN)
        stored = values.astype(ml_dtypes.float8_e4m3fn)
        weights.add(f"fp8_{i}", stored)
        weights.add(
            f"fp8_panels_{i}", panels.pack(panels.FORMATS["fp8"], HIDDEN, stored.view(np.uint8), None)
        )
        plain = (values * 0.02).astype(ml_dtypes.bfloat16)
        weights.add(f"bf16_{i}", plain)
        weights.add(
            f"bf16_panels_{i}", panels.pack(panels.FORMATS["bf16"], HIDDEN, plain.view(np.uint8), None)
        )
        weights.add(f"float32_{i}", plain.astype(np.float32).T)


def _nvfp4_codes(rng: np.random.Generator, rows: int, columns: int) -> tuple[Array, Array]:
    """Codes, and scales between 0.25 and 2."""
    codes = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    return codes, rng.integers(0x28, 0x40, (rows, columns // 16), np.uint8)


def _integer_codes(rng: np.random.Generator, rows: int, columns: int, bits: int) -> tuple[Array, Array]:
    """Codes, and bytes of bfloat16 scales for values of about 0.02."""
    codes = rng.integers(0, 256, (rows, columns * bits // 8), np.uint8)
    scales = rng.uniform(0.5, 1, (rows, columns // BLOCK)) * (0.1 / 2**bits)
    return codes, scales.astype(ml_dtypes.bfloat16).view(np.uint8)


def _float_scales(scales: Array) -> Array:
    values: Array = scales.view(ml_dtypes.bfloat16).astype(np.float32)
    return values


def _linear_cases() -> Iterator[Case]:
    rng = np.random.default_rng(1)
    for tokens in (1, 4, 16, 128, 512):
        feeds = {"x": _normal(rng, 1, tokens, HIDDEN)}
        yield Case(_tokens(tokens), tokens, LINEAR_COPIES, [feeds], flops=2.0 * tokens * ROWS * HIDDEN)


# RoutedExperts


def _experts(count: int) -> tuple[Contender, ...]:
    def ours(form: str, precision: str) -> Contender:
        scales = ", expert_scale, expert_scale" if form == "nvfp4" else ""
        attributes = (
            f'weight_format = "{form}", precision = "{precision}", num_experts = {count}, width = {HIDDEN}, '
            f"inner = {INNER}"
        )
        return Contender(
            f"ours {form}, {precision}",
            f"y = nemo.cpu.RoutedExperts <{attributes}> (x, indices, chosen, lengths, {form}_up, {form}_down{scales})",
        )

    def qmoe(up: str, down: str, attributes: str) -> str:
        inputs = f"rows, scores, {up}, {up}_scales, , {down}, {down}_scales, , , , , , , , scores"
        common = f"k = {TOP_K}, normalize_routing_weights = 0, {attributes}"
        return f"y = com.microsoft.QMoE <{common}> ({inputs})"

    relu = 'activation_type = "relu"'
    squared = (
        'activation_type = "swiglu", swiglu_fusion = 1, activation_alpha = 1000.0, activation_beta = 0.0'
    )
    int4 = f"expert_weight_bits = 4, weights_prepacked = 0, block_size = {BLOCK}, accuracy_level = "
    lacks = "another function: does not square; routes by itself, no lengths"
    doubled = "squares by SwiGLU of doubled up rows; routes by itself, no lengths"
    ratios = {4: "ours int4, int8", 0: "ours int4, bfloat16"}
    found = [ours("nvfp4", "bfloat16"), ours("int4", "bfloat16"), ours("int4", "int8")]
    for level in (4, 0):
        text = qmoe("qmoe_up", "qmoe_down", f"{int4}{level}, {relu}")
        found.append(Contender(f"QMoE int4 relu, level {level}", text, ratios[level], None, lacks))
    text = qmoe("qmoe_up2", "qmoe_down", f"{int4}4, {squared}")
    found.append(Contender("QMoE int4 swiglu, level 4", text, ratios[4], 2e-2, doubled))
    return tuple(found)


def _expert_weights(weights: Weights, count: int) -> None:
    """Panels for ours; for QMoE rows of codes, and those of the up projections doubled for SwiGLU."""
    shapes = {"up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    encoders: dict[str, Callable[..., tuple[Array, Array]]]
    encoders = {"nvfp4": _nvfp4_codes, "int4": partial(_integer_codes, bits=4)}
    weights.add("expert_scale", np.full(count, 0.02, np.float32))

    def stored(form: str, half: str) -> Iterator[tuple[Array, Array]]:
        for expert in range(count):
            rng = np.random.default_rng([expert, len(half)])
            yield encoders[form](rng, *shapes[half])

    for half, (_, columns) in shapes.items():
        for form in ("nvfp4", "int4"):
            packed = (panels.pack(panels.FORMATS[form], columns, *both) for both in stored(form, half))
            weights.add(f"{form}_{half}", stack=packed)
    for name, half, times in (("qmoe_up", "up", 1), ("qmoe_up2", "up", 2), ("qmoe_down", "down", 1)):
        weights.add(name, stack=(np.repeat(codes, times, axis=0) for codes, _ in stored("int4", half)))
        scales = (np.repeat(_float_scales(s), times, axis=0) for _, s in stored("int4", half))
        weights.add(f"{name}_scales", stack=scales)


def _expert_cases(count: int) -> Iterator[Case]:
    rng = np.random.default_rng(1)
    for tokens, steps in ((1, 16), (16, 2), (128, 1)):
        feeds, used = [], []
        for _ in range(steps):
            scores = rng.uniform(0.1, 0.9, (tokens, count)).astype(np.float32)
            indices = np.argsort(-scores, axis=-1)[:, :TOP_K].astype(np.int64)
            rows = _normal(rng, tokens, HIDDEN)
            used.append(len(np.unique(indices)) / count)
            feeds.append(
                {
                    "x": rows[None],
                    "rows": rows,
                    "scores": scores,
                    "indices": indices[None],
                    "chosen": np.take_along_axis(scores, indices, axis=-1)[None],
                    "lengths": np.array([tokens], np.int64),
                }
            )
        flops = 4.0 * tokens * TOP_K * HIDDEN * INNER
        yield Case(_tokens(tokens), tokens, 1, feeds, flops=flops, used=float(np.mean(used)))


def prepare(name: str, folder: Path, experts: int) -> None:
    """Write the weights of an op."""
    folder.mkdir(parents=True)
    ops(experts)[name].prepare(Weights(folder))
