# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of ``BlockLinear`` against the reference, in Triton's interpreter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nemo_build.plugins import gpu
from nemo_build.plugins.block_linear.reference import reference
from nemo_build.plugins.codecs import fp8, nvfp4
from nemo_build.plugins.formats import activations
from nemo_build.plugins.gpu.compile import compile_kernel
from nemo_build.plugins.gpu.interpret import run
from nemo_build.plugins.gpu.stored import as_words, stored_tensors

from .op_models import normal

pytest.importorskip("triton")

ROUNDING = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
FORMATS = {  # weight_format, activation_format, input scale
    "plain": ("plain", "none", 1.0),
    "fp8": ("fp8", "none", 1.0),
    "fp8 with rounded inputs": ("fp8", "fp8", 0.01),
    "nvfp4": ("nvfp4", "none", 1.0),
    "nvfp4 with rounded inputs": ("nvfp4", "nvfp4", 4 / (6 * 448)),
    "nvfp4 with inputs beyond the scale": ("nvfp4", "nvfp4", 1 / (6 * 448)),
}
SHAPES = [[(1, 2), (3, 1), (2, 3)], pytest.param([(2, 8), (8, 8)], marks=pytest.mark.slow)]
"""Rows and steps of launches with one token among them."""
LAUNCHES = ("vector_1", "vector_4", "tile_16", "tile_64", "tile_128")


def stored(weight: np.ndarray, form: str, dtype: str) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """A weight as the reference takes it, and its parts by name, of which kernels take bytes as words."""
    if form == "plain":
        return [weight.astype(dtype)], {"weight": weight.astype(dtype)}
    if form == "fp8":
        coded = fp8.encode(weight)
        scale = np.array([coded.scale])
        return [coded.e4m3_codes, scale], {"weight": coded.codes, "weight_scale": scale}
    packed = nvfp4.encode(weight)
    scale = np.array([packed.scale_2])
    given = {"weight": packed.codes, "weight_scale": packed.scales, "weight_scale_2": scale}
    return [packed.codes, packed.e4m3_scales, scale], given


def in_words(parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Bytes as words; the other arrays as they are."""
    return {n: as_words(a) if a.dtype == np.uint8 else a for n, a in parts.items()}


class Linear:
    """A node with a random weight."""

    def __init__(self, rng, rows, columns, kind="plain", dtype="float32", *, lengths=True):
        self.rng, self.columns, self.dtype = rng, columns, dtype
        form, rounded, scale = FORMATS[kind]
        self.attributes = {"weight_format": form, "activation_format": rounded}
        self.parts, given = stored(normal(rng, rows, columns), form, dtype)
        self.given = in_words(given)
        self.input_scale = np.array([scale], np.float32)
        dims = {"rows": rows, "columns": columns, "lengths": int(lengths)}
        made = gpu.kernels("BlockLinear", self.attributes, dims)
        self.kernels = {k.name: k for k in made if k.types["T"] == dtype}

    def tokens(self, batch: int, steps: int) -> np.ndarray:
        return normal(self.rng, batch, steps, self.columns).astype(self.dtype)

    def run(self, x: np.ndarray, lengths: np.ndarray, launch: str) -> np.ndarray:
        """The launch, after that which rounds x if there is one."""
        given = {"x": x, "lengths": lengths, "input_scale": self.input_scale} | self.given
        if "round" in self.kernels:
            rounded = self._launch("round", given)
            given["x"], given["x_scale"] = rounded["codes"], rounded.get("scales")
        return self._launch(launch, given)["y"]

    def _launch(self, name, given):
        kernel = self.kernels[name]
        return run(kernel, {t.name: given[t.name] for t in kernel.inputs})

    def want(self, x: np.ndarray) -> np.ndarray:
        absent = [None] * (3 - len(self.parts))
        weight, *scales = self.parts
        scales = [*scales, *absent, self.input_scale]
        return reference(x.astype(np.float32), weight, None, *scales, **self.attributes)

    def check(self, x: np.ndarray, lengths: np.ndarray, launch: str) -> None:
        """Compare with the reference in float32 on valid tokens; the others are not written to."""
        got, want = self.run(x, lengths, launch).astype(np.float32), self.want(x)
        valid = np.arange(x.shape[1]) < lengths[:, None]
        close, size = ROUNDING[self.dtype], max(np.abs(want[valid]).max(initial=0), 1)
        np.testing.assert_allclose(got[valid], want[valid], atol=close * size, rtol=close, err_msg=launch)
        if "lengths" in {t.name for t in self.kernels[launch].inputs}:
            assert np.isnan(got[~valid]).all()


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_against_the_reference(launch, kind, dtype):
    rng = np.random.default_rng(0)
    batch, steps = (3, 2) if launch.startswith("vector") else (3, 6)
    linear = Linear(rng, 19, 1072 if launch == "vector_1" else 112, kind, dtype)
    linear.check(linear.tokens(batch, steps), np.array([steps, steps - 1, 0]), launch)


@pytest.mark.parametrize("kind", FORMATS)
def test_vectors_in_bfloat16(kind):
    linear = Linear(np.random.default_rng(1), 9, 48, kind, "bfloat16")
    linear.check(linear.tokens(1, 3), np.array([3]), "vector_4")


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 5), (65, 130)])
def test_plain_weights_of_any_width(rows, columns):
    linear = Linear(np.random.default_rng(rows), rows, columns)
    for launch in ("vector_4", "tile_16"):
        linear.check(linear.tokens(2, 1), np.array([1, 1]), launch)


def test_without_lengths():
    linear = Linear(np.random.default_rng(2), 5, 32, lengths=False)
    for launch in ("vector_4", "tile_16"):
        linear.check(linear.tokens(2, 1), np.array([1, 1]), launch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(FORMATS)[:5])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 9, 16, 17])
def test_numbers_of_tokens(kind, tokens):
    rng = np.random.default_rng(tokens)
    linear = Linear(rng, int(rng.integers(1, 150)), 16 * int(rng.integers(1, 20)), kind)
    batch = next(b for b in (3, 2, 1) if tokens % b == 0)
    lengths = rng.integers(0, tokens // batch + 1, batch)
    for launch in LAUNCHES:
        linear.check(linear.tokens(batch, tokens // batch), lengths, launch)


ROUNDED = "fp8 with rounded inputs"
ALONE = [(k, n) for k in ("plain", ROUNDED, "nvfp4", "nvfp4 with rounded inputs") for n in LAUNCHES[:3]]
ALONE += [(ROUNDED, "codes_16")]
ALONE_TOO = [("nvfp4", "tile_64"), ("nvfp4", "tile_128"), (ROUNDED, "codes_64"), (ROUNDED, "codes_128")]


@pytest.mark.parametrize(
    ("kind", "launch"), [*ALONE, *(pytest.param(*how, marks=pytest.mark.slow) for how in ALONE_TOO)]
)
@pytest.mark.parametrize("shapes", SHAPES)
def test_a_token_does_not_depend_on_the_others(shapes, kind, launch):
    """To the bit: in a launch of 1 to 64 tokens, wherever it is; the others are NaN, and some of them padding."""
    rng = np.random.default_rng(3)
    linear = Linear(rng, 11, 80, kind)
    x = linear.tokens(1, 1)
    (want,) = linear.run(x, np.array([1]), launch).reshape(-1, 11)
    for batch, steps in shapes:
        row, step = int(rng.integers(batch)), int(rng.integers(steps))
        many = np.full((batch, steps, 80), np.nan, np.float32)
        many[row, step] = x[0, 0]
        lengths = rng.integers(0, steps + 1, batch)
        lengths[row] = rng.integers(step + 1, steps + 1)
        np.testing.assert_array_equal(linear.run(many, lengths, launch)[row, step], want)


def decoded(linear: Linear, launch: str) -> np.ndarray:
    """The weight, as its products with the unit vectors."""
    unit = np.eye(16, dtype=np.float32)
    per_launch = 4 if launch == "vector_4" else 16
    parts = [
        linear.run(unit[None, i : i + per_launch], np.array([per_launch]), launch)[0]
        for i in range(0, 16, per_launch)
    ]
    return np.concatenate(parts).T


@pytest.mark.parametrize(
    ("launch", "scale_2"),
    [("vector_4", 2.0**-20), ("tile_16", 2.0**-20), ("tile_16", 2.0**100), ("tile_16", 0.0)],
)
def test_every_nvfp4_code_under_every_scale(launch, scale_2):
    """All 16 codes under E4M3 scales, zero, subnormal, 448 and negative ones among them: exactly NumPy's decoding."""
    finite = [s for s in range(256) if s & 0x7F != 0x7F]
    extremes = [0, 1, 7, 8, 0x38, 0x7E, 0x80, 0x81, 0xFE]
    scales = np.array(finite if launch == "tile_16" else extremes, np.uint8)[:, None]
    codes = np.tile(np.arange(0, 16, 2) + 16 * np.arange(1, 16, 2), (len(scales), 1)).astype(np.uint8)
    linear = Linear(np.random.default_rng(0), len(scales), 16, "nvfp4")
    scale = np.array([scale_2], np.float32)
    linear.given = in_words({"weight": codes, "weight_scale": scales, "weight_scale_2": scale})
    np.testing.assert_array_equal(decoded(linear, launch), nvfp4.decode(codes, scales, scale[0]))


@pytest.mark.parametrize("launch", ["vector_4", "tile_16"])
def test_every_fp8_code(launch):
    codes = np.array([c if c & 0x7F != 0x7F else 0 for c in range(256)], np.uint8).reshape(16, 16)
    linear = Linear(np.random.default_rng(0), 16, 16, "fp8")
    linear.given = {"weight": as_words(codes), "weight_scale": np.array([0.37], np.float32)}
    np.testing.assert_array_equal(decoded(linear, launch), fp8.decode(codes, 0.37))


def test_rounding_to_fp8():
    """To the byte: between any two codes, next to and on the middle, beyond the largest, and signed zeros."""
    values = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2
    near = [np.nextafter(middles, np.float32(to), dtype=np.float32) for to in (0, 1e9)]
    x = np.concatenate([values, middles, *near, [1e-30, 447, 464, 1e9]]).astype(np.float32)
    x = np.concatenate([x, -x])
    x = np.pad(x, (0, -len(x) % 16))[None, None]
    linear = Linear(np.random.default_rng(0), 1, x.shape[-1], "fp8 with rounded inputs")
    for scale in (1.0, 0.3):
        given = {"x": x * np.float32(scale), "lengths": np.array([1])}
        given["input_scale"] = np.array([scale], np.float32)
        held = np.clip(given["x"] / given["input_scale"], -448, 448).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(run(linear.kernels["round"], given)["codes"][0, 0], as_words(held))


@pytest.mark.parametrize("scale", [4 / 2688, 0.01 / 2688, 1.0])
def test_rounding_to_nvfp4(scale):
    """The very values of the reference: ties, blocks of zeros, blocks far below and beyond the scale."""
    rng = np.random.default_rng(4)
    x = normal(rng, 1, 3, 1040) * np.exp2(rng.integers(-20, 4, (1, 3, 65))).repeat(16, -1).astype(np.float32)
    x[0, 0, :16], x[0, 1, :16] = 0, np.arange(16) / 4 * scale * 448
    linear = Linear(rng, 1, 1040, "nvfp4 with rounded inputs")
    given = {"x": x, "lengths": np.array([3]), "input_scale": np.array([scale], np.float32)}
    got = run(linear.kernels["round"], given)
    codes, scales = (got[n].reshape(-1).view(np.uint8) for n in ("codes", "scales"))
    codes, scales = codes.reshape(3, 520), scales[: 3 * 65].reshape(3, 65)
    values = nvfp4.decode(codes, scales, given["input_scale"][0])
    np.testing.assert_array_equal(values, activations.reference("nvfp4", x, given["input_scale"])[0])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_codes_of_fp8(dtype):
    linear = Linear(np.random.default_rng(5), 19, 176, "fp8 with rounded inputs", dtype)
    for tokens in (16, 64, 128):
        linear.check(linear.tokens(2, 3), np.array([3, 1]), f"codes_{tokens}")


def test_codes_of_nvfp4_are_where_they_belong():
    """The interpreter reads block scales as powers of two (E8M0); so does what it is compared with."""
    rng = np.random.default_rng(6)
    linear = Linear(rng, 19, 176, "nvfp4 with rounded inputs")

    def random_codes(rows):
        codes = rng.integers(0, 256, (rows, 88), np.uint8)
        scales = rng.integers(120, 134, (rows, 11), np.uint8)
        exact = nvfp4.E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(rows, 176)
        return codes, scales, exact * np.exp2(scales.astype(np.float32) - 127).repeat(16, 1)

    codes, scales, weight = random_codes(19)
    x_codes, x_scales, x = random_codes(6)
    given = in_words({"weight": codes, "weight_scale": scales})
    given["weight_scale_2"] = np.array([0.5], np.float32)
    given["x"] = as_words(x_codes).reshape(2, 3, 22)
    given["x_scale"] = np.zeros((2, 3, 3), np.int32)  # more words than there are bytes for
    given["x_scale"].reshape(-1)[:17] = as_words(x_scales)
    given |= {"lengths": np.array([3, 1]), "input_scale": np.array([4], np.float32)}
    got = run(linear.kernels["codes_16"], given)["y"].reshape(6, 19)
    np.testing.assert_allclose(got[:4], (x @ weight.T * 2)[:4], rtol=1e-5, atol=1e-3)
    assert np.isnan(got[4:]).all()


@pytest.mark.slow
@pytest.mark.parametrize("sm", [100, 103, 110, 120, 121])
def test_codes_of_nvfp4_are_operands_of_tensor_cores(sm):
    """Of both ops."""
    kernels = [k for k in gpu.all_kernels() if k.types.get("X") == "nvfp4" and k.constexprs.get("CODES")]
    assert [k.name.rpartition("codes_")[0] for k in kernels] == [*[""] * 3, *["up_", "down_"] * 2]
    for kernel in kernels:
        assert "kind::mxf4nvf4" in compile_kernel(kernel, sm).ptx


@pytest.mark.parametrize("size", range(1, 10))
def test_bytes_as_words(size):
    """Every byte where it was, whatever the type and the order in memory; zeros behind."""
    data = np.random.default_rng(size).integers(0, 256, (size, 3), np.uint8)
    words = as_words(data)
    assert (words.dtype, words.shape) == (np.int32, (-(-3 * size // 4),))
    np.testing.assert_array_equal(words.view(np.uint8)[: 3 * size], data.reshape(-1))
    assert not words.view(np.uint8)[3 * size :].any()
    np.testing.assert_array_equal(as_words(data.view(ml_dtypes.float8_e4m3fn)), words)
    np.testing.assert_array_equal(as_words(np.asfortranarray(data)), words)
    numbers = np.arange(size, dtype=np.float32)
    np.testing.assert_array_equal(as_words(numbers[::-1]).view(np.float32), numbers[::-1])


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_stored_tensors_have_the_words_of_the_codecs(form):
    given = in_words(stored(np.ones((19, 48), np.float32), form, "float32")[1])
    described = stored_tensors("weight", form, "float32", (19,), 48, 1)
    assert {t.name: t.shape for t in described} == {n: a.shape for n, a in given.items()}
    assert {t.name: t.dtype for t in described} == {n: a.dtype.name for n, a in given.items()}


def test_what_no_kernel_does():
    with pytest.raises(ValueError, match="multiple of 16"):
        gpu.kernels("BlockLinear", {"weight_format": "nvfp4"}, {"rows": 3, "columns": 24, "lengths": 1})
    mixed = {"weight_format": "nvfp4", "activation_format": "fp8"}
    with pytest.raises(ValueError, match="No kernel multiplies"):
        gpu.kernels("BlockLinear", mixed, {"rows": 3, "columns": 32, "lengths": 1})
