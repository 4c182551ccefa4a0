# SPDX-License-Identifier: Apache-2.0
"""Recipes: which projections are stored how. A recipe is a YAML file; one loader reads ours and the user's.

.. code-block:: yaml

    description: experts in NVFP4, Mamba projections in FP8
    rules:
      - match: ["backbone.layers.*.mixer.experts.*", lm_head]
        weights: nvfp4-four-over-six     # or nvfp4, fp8, fp8-least-error
        activations: false               # whether the input is rounded too (W4A4, W8A8)
      - match: ["backbone.layers.*.mixer.in_proj"]
        weights: fp8
        activations: true
    kv_cache: fp8                        # none or fp8
    algorithm: gptq                      # optional: a calibration algorithm of ModelOpt's

Instead of rules a recipe may have ``auto``: ModelOpt then chooses each projection's format under a budget.

.. code-block:: yaml

    auto: {effective_bits: 5.5, formats: [nvfp4, fp8]}

A pattern is a shell pattern (``*``, ``?``, ``[...]``) over names of projections, as checkpoints spell them. Rules do
not override each other: a projection that two rules match, and a pattern that matches none, are errors.

ModelOpt's own recipe files are taken as well; the ModelOpt engine then runs them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from nemo_build.errors import UserError
from nemo_build.export.ledger import TensorRule
from nemo_build.export.names import collapse
from nemo_build.plugins.formats import formats

SHIPPED = Path(__file__).parent / "recipes"

WEIGHTS = {
    "nvfp4": ("nvfp4", False),
    "nvfp4-four-over-six": ("nvfp4", True),
    "fp8": ("fp8", False),
    "fp8-least-error": ("fp8", True),
}
"""What a rule may say of weights -> (stored format, whether scales are searched).

A search takes, of two scales, the one with the smaller squared error: for each block of NVFP4 those that map its
largest value to 6 and to 4, for a whole FP8 weight those that map its largest value, and 1.5 times that, to 448.
"""

_RULE_KEYS = {"match", "weights", "activations"}
_RECIPE_KEYS = {"description", "rules", "kv_cache", "algorithm", "auto"}
_AUTO_KEYS = {"effective_bits", "formats"}
_AUTO_FORMATS = ("nvfp4", "fp8")


@dataclass(frozen=True)
class Rule:
    """Projections that match one of the patterns are stored alike."""

    match: tuple[str, ...]
    weights: str
    activations: bool


@dataclass(frozen=True)
class Recipe:
    """A named set of rules.

    Attributes:
        name: Its file's name without the ending.
        description: One sentence.
        rules: What is quantized; everything else is kept.
        kv_cache: ``none`` or ``fp8``.
        algorithm: A calibration algorithm of ModelOpt's, or ``None``.
        auto: Budget and formats of an automatic choice, or ``None``.
        modelopt: Path of a recipe file of ModelOpt's, which replaces all of the above.
    """

    name: str
    description: str
    rules: tuple[Rule, ...]
    kv_cache: str
    algorithm: str | dict[str, Any] | None = None
    auto: dict[str, Any] | None = None
    modelopt: str | None = None

    @property
    def needs_modelopt(self) -> bool:
        """Whether only the ModelOpt engine can do it."""
        return self.algorithm is not None or self.auto is not None or self.modelopt is not None

    @property
    def needs_calibration(self) -> bool:
        """Whether scales of activations or caches must be measured on a text."""
        return self.needs_modelopt or self.kv_cache != "none" or any(r.activations for r in self.rules)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Assignment:
    """How one projection is stored.

    Attributes:
        format: Stored format.
        search: Whether its scales are searched.
        activations: Whether its input is rounded too.
        rank: Rank of the low-rank term beside it; 0 for none. ModelOpt's calibration gives it, not a rule.
    """

    format: str
    search: bool
    activations: bool
    rank: int = 0


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(p.stem for p in SHIPPED.glob("*.yaml"))


def load_recipe(name: str) -> Recipe:
    """Load a shipped recipe by name, or any recipe by path.

    Raises:
        UserError: There is no such recipe, or it says what cannot be understood; all problems are named.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else SHIPPED / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"There is no recipe {name}.", [f"shipped: {n}" for n in shipped_recipes()])
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    if isinstance(data, dict) and "quantize" in data and "rules" not in data:
        metadata = data.get("metadata")
        description = metadata.get("description", "") if isinstance(metadata, dict) else ""
        return Recipe(path.stem, str(description).strip(), (), "none", modelopt=str(path.resolve()))
    problems: list[str] = []
    recipe = _parse(path.stem, data, problems)
    if problems:
        raise UserError(f"The recipe {path} cannot be understood:", problems)
    return recipe


def assign(recipe: Recipe, expected: Mapping[str, TensorRule]) -> dict[str, Assignment]:
    """Which projection is stored how, in the order of `expected`.

    Args:
        recipe: The recipe.
        expected: The model's tensors; those that are projections can be quantized.

    Raises:
        UserError: A pattern matches no projection, a projection is matched by several patterns, or its width
            does not divide into the format's blocks; all are named.
    """
    projections = {n.removesuffix(".weight"): r for n, r in expected.items() if r.projection}
    patterns = [(pattern, rule) for rule in recipe.rules for pattern in rule.match]
    hits: dict[str, list[tuple[str, Rule]]] = {}
    problems = []
    for pattern, rule in patterns:
        matched = [name for name in projections if fnmatchcase(name, pattern)]
        if not matched:
            problems.append(f"{pattern!r} matches no projection")
        for name in matched:
            hits.setdefault(name, []).append((pattern, rule))
    twice = {name: " and ".join(repr(p) for p, _ in found) for name, found in hits.items() if len(found) > 1}
    for both in dict.fromkeys(twice.values()):
        for names, _ in collapse(name for name, found in twice.items() if found == both):
            problems.append(f"{names} is matched by {both}")
    chosen = {name: found[0][1] for name, found in hits.items() if len(found) == 1}
    problems += _width_problems(chosen, projections) + _expert_problems(chosen, projections)
    if problems:
        known = ", ".join(text for text, _ in collapse(projections))
        raise UserError(
            f"The recipe {recipe.name} does not fit this model:", problems, f"Projections: {known}"
        )
    return {
        name: Assignment(*WEIGHTS[chosen[name].weights], chosen[name].activations)
        for name in projections
        if name in chosen
    }


def _expert_problems(chosen: Mapping[str, Rule], projections: Mapping[str, TensorRule]) -> list[str]:
    """The experts of a layer run as one op, so they are all stored alike."""
    kinds: dict[str, set[tuple[str, bool] | None]] = {}
    for name in projections:
        layer, dot, _ = name.partition(".experts.")
        if dot:
            rule = chosen.get(name)
            kind = None if rule is None else (rule.weights, rule.activations)
            kinds.setdefault(f"{layer}.experts", set()).add(kind)
    mixed = [name for name, found in kinds.items() if len(found) > 1]
    return [f"{text}: the experts of a layer must all be stored alike" for text, _ in collapse(mixed)]


def _width_problems(chosen: Mapping[str, Rule], projections: Mapping[str, TensorRule]) -> list[str]:
    block = formats()["nvfp4"].BLOCK
    uneven = [
        name
        for name, rule in chosen.items()
        if WEIGHTS[rule.weights][0] == "nvfp4" and projections[name].shape[1] % block
    ]
    return [f"{text}: the width does not divide into blocks of {block}" for text, _ in collapse(uneven)]


def _parse(name: str, data: Any, problems: list[str]) -> Recipe:
    if not isinstance(data, dict):
        problems.append("it is not a mapping with a list of rules")
        return Recipe(name, "", (), "none")
    problems += [f"unknown key {key!r}" for key in data if key not in _RECIPE_KEYS]
    auto = _parse_auto(data.get("auto"), problems)
    kv_cache = data.get("kv_cache", "none")
    rules = data.get("rules") or ([] if auto else None)
    if auto and (rules or "algorithm" in data or kv_cache != "none"):
        problems.append("auto goes with neither rules, nor algorithm, nor kv_cache")
    elif not auto and (not isinstance(rules, list) or not rules):
        problems.append("rules is not a list with at least one rule")
        rules = []
    if kv_cache not in ("none", "fp8"):
        problems.append(f"kv_cache is {kv_cache!r}; it may be none or fp8")
    algorithm = data.get("algorithm")
    if not (algorithm is None or isinstance(algorithm, (str, dict))):
        problems.append(f"algorithm is {algorithm!r}; it may be a name, or a mapping with a method")
    parsed = tuple(_parse_rule(i, rule, problems) for i, rule in enumerate(rules or []))
    return Recipe(name, str(data.get("description", "")), parsed, kv_cache, algorithm, auto)


def _parse_auto(data: Any, problems: list[str]) -> dict[str, Any] | None:
    if data is None:
        return None
    if not isinstance(data, dict) or set(data) != _AUTO_KEYS:
        problems.append("auto is not a mapping with effective_bits and formats")
        return None
    bits, chosen = data["effective_bits"], data["formats"]
    if not isinstance(bits, (int, float)) or isinstance(bits, bool) or not 4 < bits <= 16:
        problems.append(f"auto: effective_bits is {bits!r}; it may be above 4 and at most 16")
    if not isinstance(chosen, list) or not chosen or any(c not in _AUTO_FORMATS for c in chosen):
        problems.append(f"auto: formats is {chosen!r}; it may list {', '.join(_AUTO_FORMATS)}")
    return {"effective_bits": bits, "formats": chosen}


def _parse_rule(index: int, data: Any, problems: list[str]) -> Rule:
    where = f"rule {index + 1}"
    if not isinstance(data, dict):
        problems.append(f"{where} is not a mapping")
        return Rule((), "fp8", False)
    problems += [f"{where}: unknown key {key!r}" for key in data if key not in _RULE_KEYS]
    match = data.get("match")
    match = [match] if isinstance(match, str) else match
    if not isinstance(match, list) or not match or not all(isinstance(m, str) for m in match):
        problems.append(f"{where}: match is not a pattern or a list of patterns")
        match = []
    weights = data.get("weights")
    if weights not in WEIGHTS:
        problems.append(f"{where}: weights is {weights!r}; it may be {', '.join(WEIGHTS)}")
        weights = "fp8"
    activations = data.get("activations", False)
    if not isinstance(activations, bool):
        problems.append(f"{where}: activations is {activations!r}; it may be true or false")
        activations = False
    return Rule(tuple(match), weights, activations)
