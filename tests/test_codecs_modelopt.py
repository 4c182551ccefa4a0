# SPDX-License-Identifier: Apache-2.0
"""NVFP4 and FP8 against ModelOpt, byte for byte."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from nemo_build.plugins.codecs import fp8, nvfp4

from .codec_weights import BFLOAT16, FLOAT16, FLOAT32, KINDS, assert_same, few, many, ours, weights


@pytest.fixture(scope="module")
def modelopt():
    """A function (kind, weight) -> arrays that asks ModelOpt; see codec_oracle.py."""
    if importlib.util.find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed")
    oracle = Path(__file__).with_name("codec_oracle.py")
    process = subprocess.Popen(
        [sys.executable, str(oracle)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )

    def ask(kind: str, weight: np.ndarray) -> tuple[np.ndarray, ...]:
        pickle.dump((kind, weight), process.stdin)
        process.stdin.flush()
        return pickle.load(process.stdout)

    with process:
        yield ask
        process.stdin.close()


def assert_as_modelopt(modelopt, kind: str, weight: np.ndarray) -> None:
    amax = float(np.abs(weight.astype(np.float32)).max())
    if amax < 3e-42:
        return  # ModelOpt has no scale for these; test_zeros
    if kind == "fp8 recipe":
        narrow, wide = (fp8.squared_error(weight, amax * multiplier) for multiplier in (1.0, 1.5))
        if abs(narrow - wide) <= 1e-5 * narrow:
            return  # ModelOpt's float32 sum decides
        if 1.5 * amax > float(ml_dtypes.finfo(weight.dtype).max):
            return  # ModelOpt's amax may be infinite
    assert_same(ours(kind, weight), modelopt(kind, weight))


@pytest.mark.parametrize("kind", KINDS)
@few
@given(weight=weights())
def test_bytes_are_modelopts(modelopt, kind, weight):
    assert_as_modelopt(modelopt, kind, weight)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@many
@given(weight=weights())
def test_bytes_are_modelopts_at_length(modelopt, kind, weight):
    assert_as_modelopt(modelopt, kind, weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=lambda dtype: dtype.name)
def test_bytes_are_modelopts_for_a_projection(modelopt, kind, dtype):
    """A weight of some size: candidates nearly tie somewhere among its blocks."""
    weight = (np.random.default_rng(7).standard_normal((512, 2688)) * 0.02).astype(dtype)
    assert_as_modelopt(modelopt, kind, weight)


def test_bytes_are_modelopts_where_candidates_tie(modelopt):
    """Few distinct values: squared errors whose sums differ in the last bit or not at all."""
    rng = np.random.default_rng(0)
    assert_as_modelopt(modelopt, "4/6", (rng.integers(-12, 13, (2048, 512)) * 0.37).astype(np.float32))
    sparse = rng.standard_normal((65536, 16)) * (np.arange(16) < rng.integers(1, 5, (65536, 1)))
    for dtype in (BFLOAT16, FLOAT16, FLOAT32):
        assert_as_modelopt(modelopt, "4/6", sparse.reshape(-1, 512).astype(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_modelopts_over_the_whole_range(modelopt, kind):
    """Quotients that underflow, scales at their limits."""
    rng = np.random.default_rng(0)
    weight = rng.choice([-1, 1], (128, 512)) * 10.0 ** rng.uniform(-45, 38, (128, 512))
    for dtype in (BFLOAT16, FLOAT32):
        assert_as_modelopt(modelopt, kind, weight.astype(dtype))


def test_three_axes(modelopt):
    weight = np.random.default_rng(1).standard_normal((3, 5, 48)).astype(BFLOAT16)
    assert_same(ours("plain", weight), modelopt("plain", weight))


@few
@given(weight=weights())
def test_decoded_values_are_modelopts(modelopt, weight):
    encoded = nvfp4.encode(weight)
    if np.abs(weight.astype(np.float32)).max() >= 3e-42:
        np.testing.assert_array_equal(encoded.decode(), modelopt("decoded", weight)[0])


def test_the_sum_of_squares_has_the_order_of_torch():
    torch = pytest.importorskip("torch")
    squares = np.exp(3 * np.random.default_rng(0).standard_normal((1000, 16))).astype(np.float32)
    pairs = squares[:, :8] + squares[:, 8:]
    total = np.zeros(len(pairs), np.float32)
    for lane in range(8):
        total = total + pairs[:, lane]
    np.testing.assert_array_equal(total, torch.from_numpy(squares).sum(dim=1).numpy())
