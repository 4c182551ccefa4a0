# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of ``RoutedExperts`` against the reference, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_build.plugins import gpu
from nemo_build.plugins.codecs import nvfp4
from nemo_build.plugins.formats import activations, formats
from nemo_build.plugins.gpu.interpret import run
from nemo_build.plugins.gpu.stored import as_words
from nemo_build.plugins.routed_experts.reference import reference

from .op_models import normal
from .test_gpu_linear import ROUNDING, SHAPES, in_words, stored

pytest.importorskip("triton")

WAYS = ("step", "16", "64")
SCALES = {"fp8": 0.02, "nvfp4": 6 / (6 * 448)}  # of activations that are a few units


class Experts:
    """A layer of random experts; ``rounded`` is the activation format."""

    def __init__(self, rng, experts, width, inner, top_k, form="plain", dtype="float32", rounded="none"):
        self.rng, self.experts, self.width, self.top_k, self.dtype = rng, experts, width, top_k, dtype
        self.form, self.rounded = form, rounded
        self.attributes = {"num_experts": experts, "weight_format": form, "activation_format": rounded}
        dims = {"hidden": width, "inner": inner, "top_k": top_k}
        made = gpu.kernels("RoutedExperts", self.attributes, dims)
        self.kernels = {k.name: k for k in made if k.types["T"] == dtype}
        self.up, up = self._projection(inner, width, form)
        self.down, down = self._projection(width, inner, form)
        self.inputs = [*up, *down]

    def _projection(self, rows, columns, form):
        """An up or a down projection: stacked for the kernels, and as the op's inputs."""
        weights = normal(self.rng, self.experts, rows, columns) * columns**-0.5
        each = [stored(weight, form, self.dtype) for weight in weights]
        stacked = {n: np.stack([given[n] for _, given in each]) for n in each[0][1]}
        scales = ("weight_scale", "weight_scale_2")
        stacked |= {n: a[:, 0] for n, a in stacked.items() if n in scales and a.dtype == np.float32}
        inputs = [parts[i] for i in range(len(each[0][0])) for parts, _ in each]
        if self.rounded != "none":
            spread = np.exp2(self.rng.uniform(-1, 1, self.experts)).astype(np.float32)
            stacked["input_scale"] = np.float32(SCALES[self.rounded]) * spread
            inputs += list(stacked["input_scale"])
        return in_words(stacked), inputs

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

    def rounds(self, part: str, given: dict[str, np.ndarray], x: np.ndarray) -> dict[str, np.ndarray]:
        """What a projection multiplies by: ``x``, or its codes."""
        if self.rounded == "none":
            return {"x": x}
        got = self.launch(f"round_{part}", given | getattr(self, part) | {"x": x})
        return {"x": got["codes"], "x_scale": got.get("scales")}

    def run(self, given: dict[str, np.ndarray], way: str) -> np.ndarray:
        """All launches of a way through the op."""
        return self.down_projection(given, way, self.hidden(given, way))

    def hidden(self, given: dict[str, np.ndarray], way: str) -> np.ndarray:
        """The up projection, up to what goes down."""
        given = given | self.up | self.rounds("up", given, given["x"])
        if way == "step":
            return self.launch("step_up", given)["hidden"]
        return self.launch(f"up_{way}", given | self.launch("route", given))["y"]

    def down_projection(self, given: dict[str, np.ndarray], way: str, hidden: np.ndarray) -> np.ndarray:
        """From there on."""
        given = given | self.down | self.rounds("down", given, hidden)
        if way == "step":
            return self.launch("step_down", given | {"hidden": given["x"]})["y"]
        outputs = self.launch(f"down_{way}", given | self.launch("route", given))["y"]
        return self.launch("combine", given | {"outputs": outputs})["y"]

    def check(self, given: dict[str, np.ndarray], way: str) -> None:
        """Compare with the reference in float32 on valid tokens; the others are not written to."""
        got = self.run(given, way)
        x, weights = (given[n].astype(np.float32) for n in ("x", "weights"))
        want = reference(x, given["indices"], weights, given["lengths"], *self.inputs, **self.attributes)
        self.compare(given, got, want, way)

    def compare(self, given, got: np.ndarray, want: np.ndarray, way: str) -> None:
        got, valid = got.astype(np.float32), np.arange(got.shape[1]) < given["lengths"][:, None]
        close, size = ROUNDING[self.dtype], max(np.abs(want[valid]).max(initial=0), 1)
        np.testing.assert_allclose(got[valid], want[valid], atol=close * size, rtol=close, err_msg=way)
        assert np.isnan(got[~valid]).all()

    def check_projections(self, given: dict[str, np.ndarray], way: str) -> None:
        """As :meth:`check`, each projection from what went into it.

        What lies between them is rounded to codes, and what it was rounded to before may decide to which.
        """
        hidden = self.hidden(given, way)
        each = (self.inputs[: len(self.inputs) // 2], self.inputs[len(self.inputs) // 2 :])
        x = np.repeat(given["x"][:, :, None], self.top_k, 2).astype(np.float32)
        up = np.maximum(self._projected(each[0], x, given), 0) ** 2
        self.compare(given, hidden, up, way)
        down = self._projected(each[1], hidden.astype(np.float32), given)
        want = (down * given["weights"].astype(np.float32)[..., None]).sum(2)
        self.compare(given, self.down_projection(given, way, hidden), want, way)

    def _projected(self, parts: list[np.ndarray], x: np.ndarray, given) -> np.ndarray:
        """One projection of every pair by NumPy."""
        parts = [parts[i :: self.experts] for i in range(self.experts)]
        weights = [formats()[self.form].decode(*(p[:-1] if self.rounded != "none" else p)) for p in parts]
        y = np.full((*x.shape[:3], weights[0].shape[0]), np.nan, np.float32)
        for row, n in enumerate(given["lengths"]):
            for at in np.ndindex(int(n), self.top_k):
                expert = given["indices"][(row, *at)]
                values = activations.reference(self.rounded, x[(row, *at)], parts[expert][-1])
                y[(row, *at)] = weights[expert] @ values
        return y


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["plain", "fp8", "nvfp4"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_against_the_reference(way, form, dtype):
    experts = Experts(np.random.default_rng(0), 5, 48, 32, 2, form, dtype)
    experts.check(experts.step(2, 2, [2, 1]), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_rounded_inputs_against_the_reference(way, form):
    """Each expert by its own scales."""
    experts = Experts(np.random.default_rng(7), 5, 48, 80, 2, form, rounded=form)
    experts.check(experts.step(2, 3, [3, 1]), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rounded_inputs(way, form, dtype):
    experts = Experts(np.random.default_rng(8), 5, 112, 32, 3, form, dtype, rounded=form)
    experts.check_projections(experts.step(2, 2, [2, 1]), way)


def test_codes_of_fp8():
    experts = Experts(np.random.default_rng(9), 4, 144, 48, 2, "fp8", "float16", rounded="fp8")
    given = experts.step(2, 3, [3, 1])
    experts.check_projections(given, "codes_16")
    experts.check_projections(given, "codes_64")


@pytest.mark.parametrize("way", ["16", "codes_16"])
def test_codes_of_nvfp4_are_where_they_belong(way):
    """The interpreter reads block scales of two sides of codes as powers of two; so does what it is compared with."""
    rng = np.random.default_rng(10)
    experts = Experts(rng, 3, 144, 48, 2, "nvfp4", rounded="nvfp4")
    given = experts.step(1, 4, [4])
    is_codes = way.startswith("codes")

    def coded(rows):
        codes = rng.integers(0, 256, (rows, 72), np.uint8)
        scales = (
            rng.integers(120, 134, (rows, 9), np.uint8) if is_codes else np.full((rows, 9), 0x38, np.uint8)
        )
        sizes = np.exp2(scales.astype(np.float32) - 127) if is_codes else np.ones((rows, 9), np.float32)
        values = nvfp4.E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(rows, 144)
        return codes, scales, values * sizes.repeat(16, 1)

    (w_codes, w_scales, weights), (codes, scales, x) = coded(3 * 48), coded(8)
    units, wholes = rng.random(3).astype(np.float32), rng.random(3).astype(np.float32)
    parts = {"weight": w_codes, "weight_scale": w_scales, "weight_scale_2": wholes, "input_scale": units}
    padded = np.zeros((8, 12), np.uint8)
    padded.reshape(-1)[:72] = scales.reshape(-1)
    given |= in_words(parts) | {"x": as_words(codes).reshape(1, 4, 2, 18)}
    given["x_scale"] = as_words(padded).reshape(1, 4, 2, 3)
    got = experts.launch(f"up_{way}", given | experts.launch("route", given))["y"].reshape(8, 48)
    chosen = given["indices"].reshape(8)
    sums = np.einsum("pk,prk->pr", x, weights.reshape(3, 48, 144)[chosen]) * (units * wholes)[chosen, None]
    np.testing.assert_allclose(got, np.maximum(sums, 0) ** 2, rtol=1e-5, atol=1e-2)


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


ALONE = [(way, *how) for way in WAYS for how in (("plain", "none"), ("nvfp4", "none"), ("nvfp4", "nvfp4"))]
ALONE += [("codes_16", "fp8", "fp8"), ("codes_64", "fp8", "fp8")]


@pytest.mark.parametrize(("way", "form", "rounded"), ALONE)
@pytest.mark.parametrize("shapes", SHAPES)
def test_a_token_does_not_depend_on_the_others(shapes, way, form, rounded):
    """To the bit: in a launch of 1 to 64 tokens, wherever it is; the others are NaN, and choose any experts."""
    rng = np.random.default_rng(4)
    experts = Experts(rng, 4, 16, 32, 2, form, rounded=rounded)
    one = experts.step(1, 1, [1])
    want = experts.run(one, way)[0, 0]
    for batch, steps in shapes:
        row, step = int(rng.integers(batch)), int(rng.integers(steps))
        many = experts.step(batch, steps, rng.integers(0, steps + 1, batch))
        many["lengths"][row] = rng.integers(step + 1, steps + 1)
        many["x"][:] = np.nan
        for name in ("x", "indices", "weights"):
            many[name][row, step] = one[name][0, 0]
        np.testing.assert_array_equal(experts.run(many, way)[row, step], want)


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
@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed):
    rng = np.random.default_rng(seed)
    form = ("plain", "fp8", "nvfp4")[seed % 3]
    rounded = form if seed % 2 and form != "plain" else "none"
    count, batch = int(rng.integers(2, 20)), int(rng.integers(1, 4))
    widths = 16 * rng.integers(1, 8, 2) if seed % 3 else rng.integers(1, 70, 2)
    width, inner = (int(n) for n in widths)
    experts = Experts(
        rng, count, width, inner, int(rng.integers(1, min(count, 6) + 1)), form, rounded=rounded
    )
    steps = int(rng.integers(1, 18 // batch))
    given = experts.step(batch, steps, rng.integers(0, steps + 1, batch))
    for way in WAYS:
        (experts.check if rounded == "none" else experts.check_projections)(given, way)


def test_what_no_kernel_does():
    dims = {"hidden": 32, "inner": 24, "top_k": 2}
    with pytest.raises(ValueError, match="multiple of 16"):
        gpu.kernels("RoutedExperts", {"num_experts": 3, "weight_format": "nvfp4"}, dims)
    mixed = {"num_experts": 3, "weight_format": "fp8", "activation_format": "nvfp4"}
    with pytest.raises(ValueError, match="No kernel multiplies"):
        gpu.kernels("RoutedExperts", mixed, dims)
