# SPDX-License-Identifier: Apache-2.0
"""NVFP4 and FP8: the C++ kernels against the NumPy references, byte for byte, and what the formats promise."""

from __future__ import annotations

import shutil
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from nemo_build.plugins.codecs import fp8, native, nvfp4

from .codec_weights import BFLOAT16, FLOAT16, FLOAT32, KINDS, assert_same, few, many, ours, weights

kernels = pytest.mark.parametrize("name", native.SETS)


def use(name: str):
    """A context in which the kernels of one instruction set are used; skips where the processor lacks it."""
    if name not in native.instruction_sets():
        pytest.skip(f"no kernels for {name} here")
    return native.forced(name)


def assert_kernels_as_reference(name: str, weight: np.ndarray) -> None:
    for kind in KINDS:
        with native.forced("reference"):
            want = ours(kind, weight)
        with use(name):
            assert_same(ours(kind, weight), want)


@kernels
@few
@given(weight=weights())
def test_kernels_equal_the_reference(name, weight):
    assert_kernels_as_reference(name, weight)


@kernels
@pytest.mark.slow
@many
@given(weight=weights())
def test_kernels_equal_the_reference_at_length(name, weight):
    assert_kernels_as_reference(name, weight)


@kernels
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=lambda dtype: dtype.name)
def test_kernels_on_every_16_bit_number(name, dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        every = every[np.isfinite(every)]
    for weight in (every, np.repeat(every, 16)):  # neighbours in a block; blocks of one value
        for amax in (None, 448.0, 1.0, 3.3e4, 1e-30):
            with native.forced("reference"):
                want = fp8.encode(weight, amax)
            with use(name):
                got = fp8.encode(weight, amax)
            assert_same((got.codes, got.scale), (want.codes, want.scale))
        assert_kernels_as_reference(name, weight)


@kernels
def test_kernels_on_any_number_of_values(name):
    """FP8 has no blocks."""
    rng = np.random.default_rng(2)
    for count in range(1, 70):
        for dtype in native.DTYPES:
            weight = rng.standard_normal(count).astype(dtype)
            with native.forced("reference"):
                want, amax = fp8.encode(weight), fp8.least_error_amax(weight)
            with use(name):
                assert_same((fp8.encode(weight).codes,), (want.codes,))
                assert fp8.least_error_amax(weight) == amax


@kernels
def test_kernels_decode_every_code_at_every_scale(name):
    scales = np.setdiff1d(np.arange(256), [0x7F, 0xFF]).astype(np.uint8)
    codes = np.tile(
        np.array([16 * high + low for high in range(16) for low in range(16)], np.uint8), (254, 1)
    )
    scales = np.repeat(scales[:, None], 32, axis=1)
    for scale_2 in (1.0, 1e-3, 1e-40, 3e38):
        with native.forced("reference"):
            want = nvfp4.decode(codes, scales, scale_2)
        with use(name):
            got = nvfp4.decode(codes, scales, scale_2)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_chunks_change_nothing(kind, threads):
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((3 * native.CHUNK + 16 * 7) // 16 * 16).astype(BFLOAT16).reshape(-1, 16)
    with native.forced("reference"):
        want = ours(kind, weight)
    if kind in ("plain", "4/6"):
        got = nvfp4.encode(weight, four_over_six=kind == "4/6", threads=threads)
        assert_same((got.codes, got.scales, np.array(got.scale_2)), want)
        np.testing.assert_array_equal(got.decode(threads), got.decode())
        return
    amax = fp8.least_error_amax(weight, threads=threads) if kind == "fp8 recipe" else None
    got = fp8.encode(weight, amax, threads=threads)
    assert_same((got.codes, np.array(got.scale)), want)


@few
@given(weight=weights())
def test_plain_codes_survive_a_round_trip(weight):
    """Where block scales are normal numbers, decoding and encoding again gives the same codes and scales."""
    first = nvfp4.encode(weight)
    if (first.scales < 8).any() or first.scale_2 < 1e-30:
        return
    second = nvfp4.encode(first.decode())
    kept = first.codes.copy()  # -0.0 comes back as 0
    kept[(kept & 0x0F) == 0x08] &= 0xF0
    kept[(kept & 0xF0) == 0x80] &= 0x0F
    zero = (first.codes & 0x77).reshape(*first.scales.shape, 8).max(axis=-1) == 0
    np.testing.assert_array_equal(second.codes, kept)
    np.testing.assert_array_equal(second.scales[~zero], first.scales[~zero])
    np.testing.assert_allclose(second.scale_2, first.scale_2, rtol=1e-6)


@few
@given(weight=weights())
def test_four_over_six_values_survive_a_round_trip(weight):
    first = nvfp4.encode(weight, four_over_six=True)
    values_ = first.decode()
    if (first.scales < 8).any() or not 1e-7 < np.abs(values_).max() < 1e30:
        return
    again = nvfp4.encode(values_, four_over_six=True).decode()
    if np.abs(values_).max() == np.abs(weight.astype(np.float32)).max():
        np.testing.assert_allclose(again, values_, rtol=1e-5)


@few
@given(weight=weights())
def test_four_over_six_is_no_worse_block_by_block(weight):
    """Against scales for 6 alone, with the same scale_2: multiplier 1.0 for every block."""
    x = weight.astype(np.float32).reshape(-1, 16)
    amax = np.abs(x).max()
    if not 1e-6 < amax < 1e15:
        return
    four = nvfp4.encode(weight, four_over_six=True)
    sixth = np.abs(x).max(axis=1) / np.float32(6)
    scale = np.clip(sixth * np.float32(256) / (amax / np.float32(6)), 2.0**-9, 448)
    # Where a scale lies between two, the order of operations decides to which it is rounded.
    sure = np.equal(*((scale * np.float32(f)).astype(ml_dtypes.float8_e4m3fn) for f in (1 - 1e-6, 1 + 1e-6)))
    scale = scale.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None] * four.scale_2
    six = nvfp4.E2M1[nvfp4._magnitude_codes(x / scale)] * scale
    error = np.square(np.abs(x) - six, dtype=np.float64).sum(axis=1)
    ours_ = np.square(x - four.decode().reshape(-1, 16), dtype=np.float64).sum(axis=1)
    assert (ours_ <= error * (1 + 1e-5) + (amax * 2.0**-12) ** 2)[sure].all()


@pytest.mark.parametrize("name", ["reference", *native.SETS])
def test_zeros(name):
    """Zeros, and values whose scale_2 would be zero, get scales of one."""
    with native.forced(name) if name == "reference" else use(name):
        for four_over_six in (False, True):
            for tiny in (0.0, -0.0, 1e-45):
                got = nvfp4.encode(np.full((2, 32), tiny, np.float32), four_over_six=four_over_six)
                assert not got.codes.any()
                assert (got.e4m3_scales.astype(np.float32) == 1).all()
                assert got.scale_2 == np.float32(1) / np.float32(2688)
        got = fp8.encode(np.array([0.0, -0.0], BFLOAT16))
        assert got.codes.tolist() == [0, 0x80]
        assert got.scale == np.float32(1) / np.float32(448)
        assert fp8.least_error_amax(np.zeros(4, np.float32)) == 0


def test_a_block_of_zeros():
    weight = np.zeros((1, 32), np.float32)
    weight[0, 0] = 1
    assert nvfp4.encode(weight).scales.tolist() == [[0x7E, 0x38]]  # 448 and 1
    assert nvfp4.encode(weight, four_over_six=True).scales.tolist() == [[0x78, 0x7E]]  # 256 and 448
    weight[0, 0] = 1536
    assert nvfp4.encode(weight, four_over_six=True).e4m3_scales[0, 1] == 1


def test_nibbles_and_signs():
    row = np.array([6, -6, 0.2, -0.2, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5, 4, 3, -0.26], np.float32)
    row[0], rest = 2688, row[1:]  # scale_2 is one; the second block's scale is one too
    weight = np.concatenate([np.full(16, 2688.0), [6], rest]).astype(np.float32)[None]
    got = nvfp4.encode(weight)
    assert got.scales.tolist() == [[0x7E, 0x38]]
    assert got.codes[0, 8:].tolist() == [0xF7, 0x80, 0x00, 0x22, 0x44, 0x66, 0x6E, 0x95]
    assert np.signbit(got.decode()[0, 19])


def test_fp8_saturates():
    got = fp8.encode(np.array([1000, -1000, 3], np.float32), amax=448)
    assert got.decode().tolist() == [448, -448, 3]
    assert got.e4m3_codes.dtype == ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize("encode", [nvfp4.encode, nvfp4.encode_reference, fp8.encode, fp8.encode_reference])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(encode, dtype, bad):
    weight = np.ones((2, 3, 32), dtype)
    weight[1, 0, 5] = weight[1, 2, 31] = bad
    with pytest.raises(ValueError, match=rf"^2 of 192 .* {bad} at flat index 101, \[1, 0, 5\]$"):
        encode(weight)


@pytest.mark.parametrize("encode", [nvfp4.encode, nvfp4.encode_reference, fp8.encode, fp8.encode_reference])
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.zeros((0, 16), np.float32), r"\[0, 16\] has nothing"),
        (np.float32(1) * np.ones(()), "dtype float64|nothing"),
        (np.ones((), np.float32), "nothing"),
        (np.ones((2, 16), np.int8), "dtype int8"),
        (np.ones((2, 16), ">f4"), "dtype >f4"),
    ],
)
def test_other_weights_are_refused(encode, weight, message):
    with pytest.raises(ValueError, match=message):
        encode(weight)


@pytest.mark.parametrize("encode", [nvfp4.encode, nvfp4.encode_reference])
def test_partial_blocks_are_refused(encode):
    with pytest.raises(ValueError, match=r"\[4, 24\].*multiple of 16"):
        encode(np.ones((4, 24), np.float32))


@pytest.mark.parametrize("encode", [nvfp4.encode, nvfp4.encode_reference, fp8.encode, fp8.encode_reference])
@pytest.mark.parametrize("amax", [np.nan, np.inf, -1.0, 0.0, 1e-45])
def test_other_amax_is_refused(encode, amax):
    with pytest.raises(ValueError, match=r"an amax of .* for a weight with values up to 1"):
        encode(np.ones(16, np.float32), amax=amax)


@pytest.mark.parametrize("name", ["reference", *native.SETS])
def test_rows_with_the_amax_of_the_tensor(name):
    """A weight may be encoded some rows at a time."""
    weight = np.random.default_rng(6).standard_normal((10, 64)).astype(BFLOAT16)
    weight[2:4] = 0
    amax = float(np.abs(weight).max())
    with native.forced(name) if name == "reference" else use(name):
        for four_over_six in (False, True):
            whole = nvfp4.encode(weight, four_over_six=four_over_six)
            parts = [
                nvfp4.encode(weight[i : i + 2], four_over_six=four_over_six, amax=amax)
                for i in range(0, 10, 2)
            ]
            assert_same((np.concatenate([p.codes for p in parts]),), (whole.codes,))
            assert_same((np.concatenate([p.scales for p in parts]),), (whole.scales,))
            assert {p.scale_2 for p in parts} == {whole.scale_2}
        parts = [fp8.encode(weight[i : i + 2], amax=amax).codes for i in range(0, 10, 2)]
        assert_same((np.concatenate(parts),), (fp8.encode(weight).codes,))
        errors = sum(fp8.squared_error(weight[i : i + 2], amax) for i in range(0, 10, 2))
        assert errors == pytest.approx(fp8.squared_error(weight, amax))


def test_decode_refuses_what_does_not_belong_together():
    got = nvfp4.encode(np.ones((2, 32), np.float32))
    for codes, scales in (
        (got.codes, got.scales[:1]),
        (got.codes[:, :8], got.scales),
        (got.codes.view(np.int8), got.scales),
    ):
        with pytest.raises(ValueError, match="belong"):
            nvfp4.decode(codes, scales, got.scale_2)
    with pytest.raises(ValueError, match="1 of 4 block scales are NaN"):
        nvfp4.decode(got.codes, np.array([[0x7F, 0], [1, 2]], np.uint8), got.scale_2)


def test_activation_scales():
    assert fp8.activation_scale(448.0) == 1
    assert nvfp4.activation_scale(np.float32(2688)) == 1
    assert fp8.activation_scale(3).dtype == np.float32
    for scale in (fp8.activation_scale, nvfp4.activation_scale):
        for amax in (0.0, -1.0, np.nan, np.inf, 1e-45):
            with pytest.raises(ValueError, match="positive"):
                scale(amax)


def test_any_layout_in_memory():
    weight = np.random.default_rng(4).standard_normal((64, 48)).astype(BFLOAT16)
    before = weight.copy()
    for view in (weight.T[:, :32], weight[::2], weight[:, 16:]):
        for kind in KINDS:
            assert_same(ours(kind, view), ours(kind, np.ascontiguousarray(view)))
    assert np.array_equal(weight, before)


def test_without_the_library(monkeypatch):
    weight = np.random.default_rng(5).standard_normal((4, 32)).astype(BFLOAT16)
    want = [ours(kind, weight) for kind in KINDS]
    monkeypatch.setattr(native, "instruction_sets", lambda: ())
    assert not native.available()
    assert native.describe() == "not built"
    for kind, arrays in zip(KINDS, want, strict=True):
        assert_same(ours(kind, weight), arrays)
    with pytest.raises(ValueError, match="no kernels"), native.forced("plain"):
        pass


def test_the_library_is_built_where_it_can_be():
    """Otherwise every test of the kernels would be skipped unnoticed."""
    assert native.describe() in (*native.SETS, "not built")
    if sys.platform == "linux" and shutil.which("g++"):
        assert native.available(), "install the package again: the library was not built"
