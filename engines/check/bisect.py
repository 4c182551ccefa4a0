# SPDX-License-Identifier: Apache-2.0
"""``nemo-build bisect``: the first op whose output differs between two engines or model bundles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_build.engines.check.plain import plain
from nemo_build.engines.check.trace import Traced, open_manifest, relative_error, trace
from nemo_build.errors import UserError

_GROWTH = 3.0
"""A value whose error is so many times that of the worst it was made of has an error of its own."""


@dataclass(frozen=True)
class Step:
    """A value that both computed.

    Attributes:
        name: Its name, ``LAYER/OP``.
        op: What made it in the second.
        error: Relative difference, by Frobenius norms.
        inherited: The largest such difference of what it was made of.
        position: First token of the sequence at which it is beyond the tolerance; ``None`` if it is at none.
    """

    name: str
    op: str
    error: float
    inherited: float
    position: int | None


@dataclass(frozen=True)
class Bisected:
    """What a comparison found.

    Attributes:
        a: The first path.
        b: The second.
        graph: The graph of both.
        tokens: What both were fed.
        tolerance: The largest relative error that counts as none.
        steps: All values that both have in one shape, in order.
        only_a: Values that the second has not.
        only_b: Values that the first has not.
        first: The first value beyond the tolerance; ``None`` if none is.
        source: The first value beyond it with an error that is its own rather than inherited.
    """

    a: str
    b: str
    graph: str
    tokens: list[int]
    tolerance: float
    steps: list[Step]
    only_a: list[str]
    only_b: list[str]
    first: Step | None
    source: Step | None

    def to_json(self) -> dict[str, Any]:
        """Plain data; errors that are not finite are words."""
        found: dict[str, Any] = plain(asdict(self))
        return found


def bisect(
    a: Path, b: Path, tokens: Sequence[int] | None, *, graph: str = "target", tolerance: float = 0.02
) -> Bisected:
    """Compare what two engines or model bundles compute, value by value.

    Args:
        a: What is right.
        b: What may not be.
        tokens: Fed to both; ``None``: the beginning of a text of ours, by `a`'s tokenizer.
        graph: ``target`` or ``mtp``.
        tolerance: Relative error that is no difference. Two builds with the same options need none; activations in
            bfloat16 against a bundle's float32 need about 0.02.

    Raises:
        UserError: They have no such graph for the CPU, or different vocabularies or sizes.
    """
    manifests = [open_manifest(p) for p in (a, b)]
    sizes = [{k: m["spec"][k] for k in ("vocab_size", "hidden_size")} for m in manifests]
    if sizes[0] != sizes[1]:
        raise UserError(
            "These are different models:", [f"{p}: {s}" for p, s in zip((a, b), sizes, strict=True)]
        )
    fed = list(tokens) if tokens is not None else _beginning(a)
    if not fed:
        raise UserError("There are no tokens to feed.")
    wrong = sorted({t for t in fed if not 0 <= t < sizes[0]["vocab_size"]})
    if wrong:
        raise UserError(f"Tokens {wrong} are not all within 0..{sizes[0]['vocab_size'] - 1}.")
    left, right = trace(a, fed, graph=graph), trace(b, fed, graph=graph)
    steps = compare(left, right, tolerance)
    if not steps:
        raise UserError(f"{a} and {b} compute nothing of the same name in {graph}.")
    beyond = [s for s in steps if not s.error <= tolerance]
    own = [s for s in beyond if not s.error <= _GROWTH * max(s.inherited, tolerance / _GROWTH)]
    return Bisected(
        str(a),
        str(b),
        graph,
        fed,
        tolerance,
        steps,
        [n for n in left.values if n not in right.values],
        [n for n in right.values if n not in left.values],
        beyond[0] if beyond else None,
        own[0] if own else beyond[0] if beyond else None,
    )


def compare(left: Traced, right: Traced, tolerance: float) -> list[Step]:
    """Errors of the values that both have, in the order of the second; infinite where shapes differ."""
    errors: dict[str, float] = {}
    steps = []
    for name, found in right.values.items():
        want = left.values.get(name)
        if want is None:
            continue
        alike = want.shape == found.shape
        errors[name] = relative_error(want, found) if alike else math.inf
        op, inputs = right.ops[name]
        inherited = max((errors.get(i, 0.0) for i in inputs), default=0.0)
        is_close = errors[name] <= tolerance
        position = None if is_close or not alike else _position(want, found, tolerance)
        steps.append(Step(name, op, errors[name], inherited, position))
    return steps


def _position(want: Any, found: Any, tolerance: float) -> int | None:
    """The first token at which values ``[1, L, …]`` or ``[L, …]`` differ."""
    rows = (want[0], found[0]) if want.ndim > 2 else (want, found)
    for i, (a, b) in enumerate(zip(*rows, strict=True)):
        if not relative_error(np.atleast_1d(a), np.atleast_1d(b)) <= tolerance:
            return i
    return None


def _beginning(path: Path) -> list[int]:
    from nemo_build.engines.check.prompts import texts
    from nemo_build.runtime.tokenizer import Tokenizer

    return Tokenizer.load(path).encode(texts()[0], add_special_tokens=True)[:32]
