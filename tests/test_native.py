# SPDX-License-Identifier: Apache-2.0
"""The native libraries: the panel layout, the kernels on packed weights, and which library is used."""

from __future__ import annotations

import platform

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from nemo_build.errors import UserError
from nemo_build.plugins import native, panels
from nemo_build.plugins.codecs import fp8, int_blocks, nvfp4
from nemo_build.plugins.formats import activations

SETS = native.instruction_sets()
FORMATS = list(panels.FORMATS.values())


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def encode(form: panels.PanelFormat, weight: np.ndarray):
    """Stored codes, block scales, tensor scale, and the values they stand for."""
    if form.name == "nvfp4":
        e = nvfp4.encode(weight)
        return e.codes, e.scales, float(e.scale_2), e.decode()
    if form.name == "fp8":
        f = fp8.encode(weight)
        codes = np.asarray(f.codes)
        return codes, None, float(f.scale), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * f.scale
    if form.name == "int8":
        codes, scales = int_blocks.encode_int8(weight)
        return codes, scales, 1.0, int_blocks.decode_int8(codes, scales)
    if form.name == "int4":
        codes, scales = int_blocks.encode_int4(weight)
        return codes, scales, 1.0, int_blocks.decode_int4(codes, scales, weight.shape[1])
    dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}[form.name]
    stored = weight.astype(dtype)
    return stored.view(np.uint8), None, 1.0, stored.astype(np.float32)


def columns_of(form: panels.PanelFormat, columns: int) -> int:
    """A width the format can have."""
    return -(-columns // 16) * 16 if form.name == "nvfp4" else columns


def run_packed(inputs: list[np.ndarray], op: str, kind: str, threads: int = 2, **attributes):
    """Run a lowered op; integer and byte inputs after the first are constants."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(native.library_file(kind)))
    names = [f"i{i}" if a is not None else "" for i, a in enumerate(inputs)]
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, inputs, strict=True)
        if a is not None
    ]
    node = helper.make_node(op, names, ["y"], domain="nemo.cpu", **attributes)
    graph = helper.make_graph(
        [node], "g", infos, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("nemo.cpu", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), options)
    return session.run(None, {n: a for n, a in zip(names, inputs, strict=True) if a is not None})[0]


def rounded(x: np.ndarray, precision: str) -> np.ndarray:
    if precision == "bfloat16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)
    if precision == "int8":
        padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)])
        blocks = padded.reshape(*x.shape[:-1], padded.shape[-1] // 32, 32)
        step = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
        codes = np.rint(blocks / np.where(step == 0, 1, step))
        return (codes * step).reshape(padded.shape)[..., : x.shape[-1]].astype(np.float32)
    return x


def precision_of(form: panels.PanelFormat, precision: str) -> str:
    """What the native code says: only integer codes are multiplied with int8 inputs."""
    return precision if precision != "int8" or form.block else "bfloat16"


def test_every_library_was_built():
    if platform.machine() == "x86_64":
        assert all(native.library_file(name) for name in native.INSTRUCTION_SETS)
    assert "plain" in SETS


@given(
    form=st.sampled_from(FORMATS),
    rows=st.integers(1, 40),
    columns=st.integers(1, 150),
    seed=st.integers(0, 2**32 - 1),
)
def test_panels_are_the_transposed_words_of_rows(form, rows, columns, seed):
    rng = np.random.default_rng(seed)
    columns = columns_of(form, columns)
    codes, scales, _, _ = encode(form, normal(rng, rows, columns))
    got = panels.pack(form, columns, codes, scales).reshape(-1, panels.ROWS, 1)
    padded = np.zeros((-(-rows // 16) * 16, -(-columns // 64) * form.code_bits * 8), np.uint8)
    padded[:rows, : codes.shape[1]] = codes
    words = padded.reshape(-1, 16, padded.shape[1] // (form.code_bits * 8), form.code_bits * 2, 4)
    want = words.transpose(0, 2, 3, 1, 4)  # panel, superblock, chunk, row, byte
    if scales is not None:
        padded = np.zeros((want.shape[0] * 16, want.shape[1] * 4), np.uint8)
        padded[:rows, : scales.shape[1]] = scales
        extra = padded.reshape(-1, 16, want.shape[1], 1, 4).transpose(0, 2, 3, 1, 4)
        want = np.concatenate([want, extra], axis=2)
    assert got.tobytes() == want.tobytes()
    assert len(want.tobytes()) == form.nbytes(rows, columns)


@settings(max_examples=40)
@given(
    form=st.sampled_from(FORMATS),
    precision=st.sampled_from(["float32", "bfloat16", "int8"]),
    rounding=st.sampled_from(["none", "fp8", "nvfp4"]),
    rows=st.integers(1, 70),
    columns=st.integers(1, 200),
    tokens=st.integers(0, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_packed_linear(form, precision, rounding, rows, columns, tokens, seed):
    rng = np.random.default_rng(seed)
    columns = -(-columns // 16) * 16 if rounding == "nvfp4" else columns_of(form, columns)
    x, weight = normal(rng, tokens, columns), normal(rng, rows, columns) * 0.1
    codes, scales, scale, values = encode(form, weight)
    data = panels.pack(form, columns, codes, scales)
    input_scale = np.float32(0.01)
    used = precision_of(form, precision)
    # The scale is taken out before the precision's rounding, so that E4M3 and E2M1 stay exact.
    x_used = rounded(activations.reference(rounding, x, input_scale) / input_scale, used) * input_scale
    if rounding == "none":
        x_used = rounded(x, used)
    want = x_used.astype(np.float64) @ values.T.astype(np.float64)
    size = np.abs(x_used).astype(np.float64)
    tolerance = 3e-6
    if used == "int8":  # where a quotient is all but half way, a code may be its neighbour
        size, tolerance = np.broadcast_to(size.max(axis=-1, keepdims=True, initial=0), size.shape), 1 / 127
    size = size @ np.abs(values.T).astype(np.float64) + 1e-6
    inputs = [x, data, None, np.array([scale], np.float32)]
    inputs += [np.array([input_scale])] if rounding != "none" else []
    attributes = {
        "weight_format": form.name,
        "precision": precision,
        "activation_format": rounding,
        "rows": rows,
        "columns": columns,
    }
    for kind in SETS:
        got = run_packed(inputs, "BlockLinear", kind, **attributes)
        assert (np.abs(got - want) <= tolerance * size).all(), (kind, np.abs(got - want).max())


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", SETS)
def test_a_token_does_not_depend_on_its_batch(form, precision, kind):
    rng = np.random.default_rng(0)
    rows, columns = 33, 192
    x, weight = normal(rng, 29, columns), normal(rng, rows, columns)
    codes, scales, scale, _ = encode(form, weight)
    data = panels.pack(form, columns, codes, scales)
    attributes = {"weight_format": form.name, "precision": precision, "rows": rows, "columns": columns}

    def run(part: np.ndarray, threads: int) -> np.ndarray:
        inputs = [part, data, None, np.array([scale], np.float32)]
        return run_packed(inputs, "BlockLinear", kind, threads, **attributes)

    whole = run(x, 3)
    for size in (1, 2, 3, 5, 12, 13):
        pieces = np.concatenate([run(x[i : i + size], 1) for i in range(0, len(x), size)])
        np.testing.assert_array_equal(pieces, whole)


@settings(max_examples=25)
@given(
    form=st.sampled_from(FORMATS),
    precision=st.sampled_from(["float32", "bfloat16"]),
    batch=st.integers(1, 3),
    steps=st.integers(1, 9),
    one_expert=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_packed_experts(form, precision, batch, steps, one_expert, seed):
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(2, 9))
    width, inner = (columns_of(form, int(v)) for v in rng.integers(1, 70, 2))
    top_k = int(rng.integers(1, experts + 1))
    scores = rng.random((batch, steps, experts))
    scores[..., 0] += 10 * one_expert
    indices = np.argsort(-scores, axis=-1)[..., :top_k].astype(np.int64)
    lengths = rng.integers(0, steps + 1, batch).astype(np.int64)
    x, weights = normal(rng, batch, steps, width), normal(rng, batch, steps, top_k)

    def stack(rows: int, columns: int):
        encoded = [encode(form, normal(rng, rows, columns) * 0.2) for _ in range(experts)]
        data = np.stack([panels.pack(form, columns, codes, scales) for codes, scales, _, _ in encoded])
        return data, np.array([e[2] for e in encoded], np.float32), [e[3].astype(np.float64) for e in encoded]

    up_data, up_scale, up = stack(inner, width)
    down_data, down_scale, down = stack(width, inner)
    want, size = np.zeros((batch, steps, width)), np.full((batch, steps, width), 1e-5)
    for b in range(batch):
        for t in range(lengths[b]):
            for j, e in enumerate(indices[b, t]):
                hidden = np.maximum(up[e] @ rounded(x[b, t], precision), 0) ** 2
                middle = rounded(hidden.astype(np.float32), precision).astype(np.float64)
                want[b, t] += weights[b, t, j] * (down[e] @ middle)
                size[b, t] += abs(weights[b, t, j]) * (np.abs(down[e]) @ middle)
    inputs = [x, indices, weights, lengths, up_data, down_data, up_scale, down_scale]
    attributes = {
        "weight_format": form.name,
        "precision": precision,
        "num_experts": experts,
        "width": width,
        "inner": inner,
    }
    valid = np.arange(steps) < lengths[:, None]
    # A hidden value next to the border of two bfloat16 numbers may be rounded to the other.
    tolerance = 1e-2 if precision == "bfloat16" else 2e-5
    for kind in SETS:
        got = run_packed(inputs, "RoutedExperts", kind, **attributes)
        assert (np.abs(got - want)[valid] <= tolerance * size[valid]).all(), kind


def test_bad_nodes_are_refused():
    form = panels.FORMATS["f32"]
    data = panels.pack(form, 4, normal(np.random.default_rng(0), 2, 4).view(np.uint8), None)
    with pytest.raises(Exception, match="different widths"):
        run_packed(
            [np.zeros((1, 5), np.float32), data],
            "BlockLinear",
            "plain",
            weight_format="f32",
            rows=2,
            columns=4,
        )
    with pytest.raises(Exception, match="no panel format q8"):
        run_packed(
            [np.zeros((1, 4), np.float32), data],
            "BlockLinear",
            "plain",
            weight_format="q8",
            rows=2,
            columns=4,
        )


@given(rows=st.integers(1, 5), columns=st.integers(1, 100), seed=st.integers(0, 2**32 - 1))
def test_integer_blocks_are_near(rows, columns, seed):
    weight = normal(np.random.default_rng(seed), rows, columns)
    blocks = np.pad(weight, ((0, 0), (0, -columns % 32))).reshape(rows, -1, 32)
    amax = np.repeat(np.abs(blocks).max(axis=-1), 32, axis=-1)[:, :columns]
    got8 = int_blocks.decode_int8(*int_blocks.encode_int8(weight))
    assert (np.abs(got8 - weight) <= amax * (0.5 / 127 * 1.01 + 2**-8)).all()
    got4 = int_blocks.decode_int4(*int_blocks.encode_int4(weight), columns)
    # Half a step; up to a step at the end that has one code less.
    assert (np.abs(got4 - weight) <= amax * (1 / 8 + 2**-8)).all()


def test_integer_blocks_refuse_what_is_no_number():
    for encoder in (int_blocks.encode_int8, int_blocks.encode_int4):
        with pytest.raises(ValueError, match="2 values are NaN or infinite"):
            encoder(np.array([[1, np.nan, np.inf]], np.float32))


def test_integer_blocks_of_zeros():
    zeros = np.zeros((2, 40), np.float32)
    assert not int_blocks.decode_int8(*int_blocks.encode_int8(zeros)).any()
    assert not int_blocks.decode_int4(*int_blocks.encode_int4(zeros), 40).any()


def test_the_environment_chooses_the_library(monkeypatch):
    monkeypatch.delenv("NEMO_BUILD_ISA", raising=False)
    assert native.library() == native.library_file(SETS[-1])
    monkeypatch.setenv("NEMO_BUILD_ISA", "plain")
    assert native.library() == native.library_file("plain")
    monkeypatch.setenv("NEMO_BUILD_ISA", "reference")
    assert native.library() is None
    monkeypatch.setenv("NEMO_BUILD_ISA", "sse9")
    with pytest.raises(UserError, match="sse9"):
        native.library()


@pytest.mark.parametrize("kind", SETS)
def test_int8_inputs_that_have_no_quotient(kind):
    """Blocks too small to divide by are zeros; what is no number stays none."""
    form = panels.FORMATS["int8"]
    codes, scales = int_blocks.encode_int8(np.ones((3, 64), np.float32))
    data = panels.pack(form, 64, codes, scales)
    attributes = {"weight_format": "int8", "precision": "int8", "rows": 3, "columns": 64}
    x = np.zeros((3, 64), np.float32)
    x[0, 3], x[0, 40] = 1e-38, 1
    x[1, 5], x[2, 33] = np.nan, np.inf
    got = run_packed([x, data], "BlockLinear", kind, **attributes)
    np.testing.assert_allclose(got[0], 1, rtol=1e-2)
    assert not np.isfinite(got[1:]).any()
