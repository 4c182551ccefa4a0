# SPDX-License-Identifier: Apache-2.0
"""Random weights for the tests of codecs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from nemo_build.plugins.codecs import fp8, nvfp4

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
KINDS = ("plain", "4/6", "fp8", "fp8 recipe")
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
shared_fixtures = [HealthCheck.function_scoped_fixture]
few = settings(max_examples=50, deadline=None, suppress_health_check=shared_fixtures)
many = settings(max_examples=750, deadline=None, suppress_health_check=shared_fixtures)


def values(rng: np.random.Generator, pattern: str, rows: int, width: int) -> np.ndarray:
    """float64 values of one of several kinds, with magnitudes around one."""
    blocks = rows * width // 16
    x = rng.standard_normal((blocks, 16))
    if pattern == "heavy tails":
        x *= np.exp(4 * rng.standard_normal(x.shape))
    elif pattern == "blocks of all sizes":
        x *= np.exp(6 * rng.standard_normal((blocks, 1)))
    elif pattern == "zeros":
        x[rng.random(x.shape) < 0.7] = 0
        x[::3] *= 0.0  # negative zeros among them
    elif pattern == "constant blocks":
        x = np.repeat(rng.integers(-7, 8, (blocks, 1)) / 4.0, 16, axis=1)
    elif pattern == "signs":
        x = np.sign(x)
    elif pattern == "few values":
        x = rng.integers(-12, 13, x.shape) / 2.0
    elif pattern == "midpoints":  # with scales that E4M3 has and a scale_2 that is a power of two
        scale = rng.integers(8, 16, (blocks, 1)) * 2.0 ** rng.integers(-6, 3, (blocks, 1))
        x = rng.choice(MIDPOINTS, x.shape) * rng.choice([-1, 1], x.shape) * scale
        x[:, 0] = 6 * scale[:, 0]
        x[0, 0] = 6 * rng.choice([256, 448])
    return x.reshape(rows, width)


PATTERNS = (
    *("normal", "heavy tails", "blocks of all sizes", "zeros"),
    *("constant blocks", "signs", "few values", "midpoints"),
)


@st.composite
def weights(draw) -> np.ndarray:
    """A weight [rows, width] in whole blocks: any dtype, magnitudes from denormal to near the largest."""
    dtype = draw(st.sampled_from([BFLOAT16, FLOAT16, FLOAT32]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, width = draw(st.integers(1, 24)), 16 * draw(st.integers(1, 12))
    x = values(rng, draw(st.sampled_from(PATTERNS)), rows, width)
    exponents = st.integers(-20, 4) if dtype == FLOAT16 else st.integers(-100, 100) | st.integers(-148, 127)
    x = x * 2.0 ** draw(st.just(0) | exponents)
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -limit, limit).astype(dtype)


def ours(kind: str, weight: np.ndarray) -> tuple[np.ndarray, ...]:
    if kind in ("plain", "4/6"):
        got = nvfp4.encode(weight, four_over_six=kind == "4/6")
        return got.codes, got.scales, np.array(got.scale_2)
    got = fp8.encode(weight, fp8.least_error_amax(weight) if kind == "fp8 recipe" else None)
    return got.codes, np.array(got.scale)


def assert_same(got: tuple[np.ndarray, ...], want: tuple[np.ndarray, ...]) -> None:
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(g, w)
