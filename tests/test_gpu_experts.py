# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of ``RoutedExperts`` against the reference, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_build.plugins import gpu
from nemo_build.plugins.gpu.interpret import run
from nemo_build.plugins.routed_experts.reference import reference

from .op_models import normal
from .test_gpu_linear import ROUNDING, stored

pytest.importorskip("triton")

WAYS = ("step", "16", "64")


class Experts:
    """A layer of random experts."""

    def __init__(self, rng, experts, width, inner, top_k, form="plain", dtype="float32"):
        self.rng, self.experts, self.width, self.top_k, self.dtype = rng, experts, width, top_k, dtype
        self.attributes = {"num_experts": experts, "weight_format": form}
        dims = {"hidden": width, "inner": inner, "top_k": top_k}
        made = gpu.kernels("RoutedExperts", self.attributes, dims)
        self.kernels = {k.name: k for k in made if k.types["T"] == dtype}
        self.up, up = self._projection(inner, width, form)
        self.down, down = self._projection(width, inner, form)
        self.inputs = [*up, *down]

    def _projection(self, rows, columns, form):
        """An up or a down projection: stacked for the kernels, and as the op's inputs."""
        each = [
            stored(normal(self.rng, rows, columns) * columns**-0.5, form, self.dtype)
            for _ in range(self.experts)
        ]
        stacked = {n: np.stack([given[n] for _, given in each]) for n in each[0][1]}
        scalars = ("weight_scale", "weight_scale_2")
        stacked |= {n: a.reshape(-1) for n, a in stacked.items() if n in scalars and a.dtype == np.float32}
        return stacked, [parts[i] for i in range(len(each[0][0])) for parts, _ in each]

    def step(self, batch: int, steps: int, lengths: list[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Random tokens and choices."""
        scores = self.rng.random((batch, steps, self.experts))
        indices = np.argsort(-scores, axis=-1)[..., : self.top_k].astype(np.int64)
        return {
            "x": normal(self.rng, batch, steps, self.width).astype(self.dtype),
            "indices": indices,
            "weights": self.rng.random((batch, steps, self.top_k)).astype(self.dtype),
            "lengths": np.asarray(lengths, np.int64),
        }

    def launch(self, name: str, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        kernel = self.kernels[name]
        return run(kernel, {t.name: given[t.name] for t in kernel.inputs})

    def run(self, given: dict[str, np.ndarray], way: str) -> np.ndarray:
        """All launches of a way through the op."""
        if way == "step":
            hidden = self.launch("step_up", given | self.up)
            return self.launch("step_down", given | self.down | hidden)["y"]
        order = self.launch("route", given)
        hidden = self.launch(f"up_{way}", given | order | self.up)["y"]
        outputs = self.launch(f"down_{way}", given | order | self.down | {"x": hidden})["y"]
        return self.launch("combine", given | {"outputs": outputs})["y"]

    def check(self, given: dict[str, np.ndarray], way: str) -> None:
        """Compare with the reference in float32 on valid tokens; the others are not written to."""
        got = self.run(given, way).astype(np.float32)
        x, weights = (given[n].astype(np.float32) for n in ("x", "weights"))
        want = reference(x, given["indices"], weights, given["lengths"], *self.inputs, **self.attributes)
        valid = np.arange(x.shape[1]) < given["lengths"][:, None]
        close, size = ROUNDING[self.dtype], max(np.abs(want[valid]).max(initial=0), 1)
        np.testing.assert_allclose(got[valid], want[valid], atol=close * size, rtol=close, err_msg=way)
        assert np.isnan(got[~valid]).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["plain", "fp8", "nvfp4"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_against_the_reference(way, form, dtype):
    experts = Experts(np.random.default_rng(0), 5, 48, 32, 2, form, dtype)
    experts.check(experts.step(2, 2, [2, 1]), way)


@pytest.mark.parametrize("form", ["plain", "fp8", "nvfp4"])
def test_steps_in_bfloat16(form):
    experts = Experts(np.random.default_rng(1), 3, 32, 48, 2, form, "bfloat16")
    experts.check(experts.step(1, 2, [2]), "step")


@pytest.mark.parametrize("top_k", range(1, 7))
def test_numbers_of_choices(top_k):
    experts = Experts(np.random.default_rng(top_k), 6, 7, 9, top_k)
    for way in WAYS:
        experts.check(experts.step(1, 2, [2]), way)


@pytest.mark.parametrize("way", WAYS)
def test_all_tokens_choose_one_expert(way):
    """So the others have none; with 17 tokens, one tile of 16 is not enough."""
    experts = Experts(np.random.default_rng(2), 4, 10, 6, 1)
    given = experts.step(1, 17, [17])
    for expert in (0, 3):
        given["indices"][:] = expert
        experts.check(given, way)


@pytest.mark.parametrize("way", WAYS)
def test_padding_chooses_none(way):
    """Whatever it holds: NaN, and indices of no expert."""
    experts = Experts(np.random.default_rng(3), 4, 10, 6, 2)
    given = experts.step(3, 4, [2, 0, 3])
    padding = np.arange(4) >= given["lengths"][:, None]
    given["x"][padding], given["weights"][padding] = np.nan, np.nan
    given["indices"][padding] = 10**12
    experts.check(given, way)
    nothing = given | {"lengths": np.zeros(3, np.int64)}
    assert np.isnan(experts.run(nothing, way)).all()


@pytest.mark.parametrize("way", WAYS)
def test_a_token_does_not_depend_on_the_others(way):
    """To the bit, wherever it lies and whichever experts the others choose."""
    experts = Experts(np.random.default_rng(4), 4, 16, 32, 2, "nvfp4")
    given = experts.step(2, 2, [2, 2])
    want = experts.run(given, way)[1, 0]
    for lengths in ([0, 1], [1, 2]):
        np.testing.assert_array_equal(experts.run(given | {"lengths": np.array(lengths)}, way)[1, 0], want)


def test_the_order_of_pairs():
    """Sorted by expert, equals in their order; more pairs than a program reads at once."""
    experts = Experts(np.random.default_rng(5), 7, 4, 4, 3)
    given = experts.step(3, 150, [150, 0, 97])
    given["indices"][given["indices"] == 4] = 2  # nobody chooses 4
    got = experts.launch("route", given)
    chosen = np.where((np.arange(150) < given["lengths"][:, None])[..., None], given["indices"], 7).reshape(
        -1
    )
    counts = np.bincount(chosen, minlength=8)
    np.testing.assert_array_equal(got["offsets"], np.concatenate([[0], np.cumsum(counts[:7])]))
    placed = got["order"].reshape(-1)[: counts[:7].sum()]
    np.testing.assert_array_equal(placed, np.argsort(chosen, kind="stable")[: len(placed)])


def test_choices_are_added_in_their_order():
    """To the bit, where sums in another order would differ."""
    experts = Experts(np.random.default_rng(6), 4, 40, 4, 4)
    given = experts.step(1, 3, [3])
    outputs = (normal(experts.rng, 1, 3, 4, 40) * np.float32(10) ** np.arange(4)[:, None]).astype(np.float32)
    want = np.zeros((1, 3, 40), np.float32)
    for choice in range(4):
        want += given["weights"][..., choice, None] * outputs[..., choice, :]
    np.testing.assert_array_equal(experts.launch("combine", given | {"outputs": outputs})["y"], want)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_random_steps(seed):
    rng = np.random.default_rng(seed)
    form = ("plain", "fp8", "nvfp4")[seed % 3]
    count, batch = int(rng.integers(2, 20)), int(rng.integers(1, 4))
    widths = 16 * rng.integers(1, 8, 2) if seed % 3 else rng.integers(1, 70, 2)
    width, inner = (int(n) for n in widths)
    experts = Experts(rng, count, width, inner, int(rng.integers(1, min(count, 6) + 1)), form)
    steps = int(rng.integers(1, 18 // batch))
    given = experts.step(batch, steps, rng.integers(0, steps + 1, batch))
    for way in WAYS:
        experts.check(given, way)


def test_what_no_kernel_does():
    dims = {"hidden": 32, "inner": 24, "top_k": 2}
    with pytest.raises(ValueError, match="multiple of 16"):
        gpu.kernels("RoutedExperts", {"num_experts": 3, "weight_format": "nvfp4"}, dims)
    rounded = {"num_experts": 3, "weight_format": "fp8", "activation_format": "fp8"}
    with pytest.raises(ValueError, match="No kernel rounds"):
        gpu.kernels("RoutedExperts", rounded, dims)
