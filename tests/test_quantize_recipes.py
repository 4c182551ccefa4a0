# SPDX-License-Identifier: Apache-2.0
"""Recipes: files with mistakes, and rules that do not fit a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_build.errors import UserError
from nemo_build.export.quantize.recipe import Recipe, Rule, load_recipe

from .quantized import make_source, run


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A random checkpoint to quantize. Treat as read-only."""
    return make_source(tmp_path_factory.mktemp("quantize") / "checkpoint")


BAD_RECIPES = {
    "pattern that matches nothing": ([("backbone.layers.*.mixer.no_proj", "fp8")], "matches no projection"),
    "pattern over what cannot be quantized": ([("*.gate", "fp8")], "matches no projection"),
    "two rules for one projection": (
        [("*.in_proj", "fp8"), ("backbone.layers.0.*", "nvfp4")],
        r"backbone\.layers\.0\.mixer\.in_proj is matched by '\*\.in_proj' and 'backbone\.layers\.0\.\*'",
    ),
}


@pytest.mark.parametrize(("rules", "words"), BAD_RECIPES.values(), ids=BAD_RECIPES)
def test_recipes_that_do_not_fit(source, tmp_path, rules, words):
    recipe = Recipe("bad", "", tuple(Rule((pattern,), weights, False) for pattern, weights in rules), "none")
    with pytest.raises(UserError, match=words):
        run(source, tmp_path / "out", recipe)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("rules: []", 1),
        ("rules: [{match: 3, weights: int2, activations: maybe, extra: 1}]\nkv_cache: fp4\nmore: 1", 6),
        ("- 1", 1),
        ("a: [", 0),
    ],
)
def test_recipe_files_with_mistakes(tmp_path, text, problems):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_recipe(str(tmp_path / "r.yaml"))
    assert len(caught.value.problems) == problems
    with pytest.raises(UserError, match="There is no recipe"):
        load_recipe("nothing")


def test_width_that_does_not_divide(tiny_checkpoint, tmp_path):
    """The small checkpoint's experts are 24 wide."""
    with pytest.raises(UserError, match=r"experts\.\{0\.\.7\}\.down_proj: the width does not divide"):
        run(tiny_checkpoint, tmp_path / "out", "w4a16")


def test_experts_in_several_formats_are_refused(source, tmp_path):
    rules = (Rule(("backbone.layers.1.mixer.experts.[0-3].*",), "fp8", False),)
    with pytest.raises(
        UserError, match=r"layers\.1\.mixer\.experts: the experts of a layer must all be stored"
    ):
        run(source, tmp_path / "out", Recipe("r", "", rules, "none"))
    assert list(tmp_path.iterdir()) == []
