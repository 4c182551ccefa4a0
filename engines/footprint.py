# SPDX-License-Identifier: Apache-2.0
"""What a model bundle weighs: bytes by part, role and format, and the state of a sequence, from its manifest alone.

No graph and no weight file is opened, so a bundle whose checkpoint is elsewhere will do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nemo_build.engines.options import CONVERSIONS
from nemo_build.errors import BundleError
from nemo_build.export.drafters import drafter_tensors
from nemo_build.export.ledger import TensorRule
from nemo_build.export.models import expected_tensors
from nemo_build.plugins.panels import FORMATS
from nemo_build.spec import ModelSpec
from nemo_build.spec_draft import DraftSpec
from nemo_build.state import StateSpec, declared_states

TARGET = "target"
"""The part that is the model itself; the others are what drafts for it: ``mtp``, ``dflash``, ``dspark``."""

_PLAIN = ("bf16", "f16", "f32")
_ITEM = {"bf16": 2, "f16": 2, "f32": 4, "fp8": 1}
_ROUTED = "moe.expert."

# What a part's roles are added up to in a table, by the role's beginning; the first that matches.
_GROUPS = (
    (r"embeddings|draft\.embeddings", "embeddings"),
    (r"lm_head|draft\.lm_head", "output head"),
    (r"mamba\.", "mamba"),
    (r"attention\.", "attention"),
    (r"moe\.expert\.", "routed experts"),
    (r"moe\.", "shared experts, router"),
    (r"mlp\.", "mlp"),
    (r"", "other"),
)


@dataclass(frozen=True)
class Part:
    """One graph's share of a model, or one drafter's.

    Attributes:
        weights: Bytes by role and format.
        states: Its state buffers.
        projections: Roles that a build can convert.
    """

    weights: Mapping[str, Mapping[str, int]]
    states: tuple[StateSpec, ...]
    projections: frozenset[str]

    @property
    def nbytes(self) -> int:
        """Bytes of all its weights."""
        return sum(sum(formats.values()) for formats in self.weights.values())

    def recast(self, form_of: Callable[[str, str], str]) -> Part:
        """The same with weights in other formats, by their role and format."""
        weights: dict[str, dict[str, int]] = {}
        for role, formats in self.weights.items():
            totals: Counter[str] = Counter()
            for form, nbytes in formats.items():
                other = form_of(role, form)
                totals[other] += nbytes if other == form else round(elements(nbytes, form) * bits(other) / 8)
            weights[role] = dict(totals)
        return replace(self, weights=weights)

    def held(self, kind: str) -> Part:
        """As an engine holds it, by a name of :data:`~nemo_build.engines.options.WEIGHTS`.

        ``plain`` is float32 but for embeddings, whose rows are looked up as they are. Conversions are of unquantized
        projections; low-rank terms stay.
        """
        if kind == "plain":
            return self.recast(lambda role, form: form if role.endswith("embeddings") else "f32")
        if kind in CONVERSIONS:
            return self.recast(lambda role, f: kind if role in self.projections and f in _PLAIN else f)
        return self

    def groups(self) -> dict[tuple[str, str], int]:
        """Bytes by (group of roles, format)."""
        totals: Counter[tuple[str, str]] = Counter()
        for role, formats in self.weights.items():
            name = next(group for start, group in _GROUPS if re.match(start, role.removeprefix("mtp.")))
            for form, nbytes in formats.items():
                totals[name, form] += nbytes
        return {key: totals[key] for key in sorted(totals)}


@dataclass(frozen=True)
class Footprint:
    """A model and its drafters.

    Attributes:
        spec: The model.
        parts: ``target`` first, then what drafts.
    """

    spec: ModelSpec
    parts: Mapping[str, Part]

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any]) -> Footprint:
        """The footprint of a model bundle.

        Raises:
            BundleError: Its manifest has no bytes by role.
        """
        spec = ModelSpec.from_json(manifest["spec"])
        drafters = manifest["drafters"]
        described = [manifest["weights"], *(d["weights"] for d in drafters.values())]
        if not all("bytes_by_role" in d for d in described):
            raise BundleError(
                "The bundle's manifest does not say what each role weighs: it was exported by an older nemo-build.",
                hint="Make it again with `nemo-build export`; it takes seconds.",
            )
        trunk, mtp = _split(manifest["weights"]["bytes_by_role"])
        rules = expected_tensors(spec).values()
        parts = {TARGET: Part(trunk, _states(manifest, [TARGET]), _projections(rules))}
        if mtp:
            parts["mtp"] = Part(mtp, _states(manifest, ["mtp"]), _projections(rules))
        for kind, drafter in drafters.items():
            weights = drafter["weights"]["bytes_by_role"]
            rules = drafter_tensors(DraftSpec.from_json(drafter["spec"])).values()
            parts[kind] = Part(weights, _states(manifest, drafter["graphs"]), _projections(rules))
        return cls(spec, parts)

    def held(self, kind: str, form_of: Callable[[str], str] = lambda form: form) -> Footprint:
        """As an engine holds it.

        Args:
            kind: A name of :data:`~nemo_build.engines.options.WEIGHTS`.
            form_of: What a target has in place of a format.
        """
        parts = {
            name: part.held(kind).recast(lambda _, form: form_of(form)) for name, part in self.parts.items()
        }
        return replace(self, parts=parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def nbytes_apart(self) -> int:
        """The same if no part shares anything: embeddings and head come again for each that has none of its own."""
        lent = {
            name: sum(self.parts[TARGET].weights.get(name, {}).values()) for name in ("embeddings", "lm_head")
        }
        return self.nbytes + sum(
            nbytes
            for borrower in (part for name, part in self.parts.items() if name != TARGET)
            for name, nbytes in lent.items()
            if not any(role.endswith(name) for role in borrower.weights)
        )

    @property
    def states(self) -> list[StateSpec]:
        """All state buffers."""
        return [s for part in self.parts.values() for s in part.states]

    @cached_property
    def routed_bytes(self) -> int:
        """Bytes of all routed experts of the model itself."""
        return self._bytes(lambda role: role.startswith(_ROUTED))

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes that every step reads whole: all but routed experts and, unless they are the head, embeddings."""
        tied = self.spec.tie_word_embeddings
        return self._bytes(lambda role: not role.startswith(_ROUTED) and (tied or role != "embeddings"))

    @cached_property
    def embedding_row_bytes(self) -> int:
        """Bytes of one row of the embedding table."""
        return self._bytes(lambda role: role == "embeddings") // self.spec.vocab_size

    def _bytes(self, wanted: Callable[[str], bool]) -> int:
        weights = self.parts[TARGET].weights
        return sum(sum(formats.values()) for role, formats in weights.items() if wanted(role))


def elements(nbytes: int, form: str) -> float:
    """Weights that so many bytes of a format hold, scales of blocks counted in."""
    if form in _ITEM:
        return nbytes / _ITEM[form]
    return 8 * nbytes / bits(form)


def bits(form: str) -> float:
    """Bits of a weight of a format, with its share of a block's scale."""
    panel = FORMATS[form]
    return panel.code_bits + (8 * panel.scale_bytes / panel.block if panel.block else 0)


def _split(
    weights: Mapping[str, Mapping[str, int]],
) -> tuple[dict[str, Mapping[str, int]], dict[str, Mapping[str, int]]]:
    """The trunk's roles and those of the MTP module."""
    trunk = {role: f for role, f in weights.items() if not role.startswith("mtp.")}
    return trunk, {role: f for role, f in weights.items() if role.startswith("mtp.")}


def _projections(rules: Iterable[TensorRule]) -> frozenset[str]:
    return frozenset(rule.role for rule in rules if rule.projection)


def _states(manifest: Mapping[str, Any], graphs: Iterable[str]) -> tuple[StateSpec, ...]:
    """The state buffers of some graphs by name."""
    return tuple(declared_states(manifest["graphs"][name] for name in graphs))
