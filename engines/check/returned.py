# SPDX-License-Identifier: Apache-2.0
"""What a target graph itself gives of its layers, on whatever runs it: all there is of one that cannot be traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.check.subject import Subject
from nemo_build.engines.session import StepBatch
from nemo_build.spec_draft import DraftSpec
from nemo_build.state import stays_pending

if TYPE_CHECKING:
    from nemo_build.runtime.engine import Engine

_CHUNK = 32
"""Tokens of a step."""


def returned(subject: Subject, tokens: Sequence[int]) -> dict[str, NDArray[Any]]:
    """What drafters are fed after a sequence, computed by the engine's own session.

    Args:
        subject: The engine; it is opened with a speculator for each kind of what the target can return.
        tokens: The sequence.

    Returns:
        ``layers up to N``: the residual ``[L, H]`` after each layer that is tapped, in order; ``hidden``: the final
        hidden states ``[L, H]``. Nothing where the engine has no drafters that want them.
    """
    from nemo_build.runtime.speculation.kinds import SPECULATORS

    found: dict[str, NDArray[Any]] = {}
    feeds = {SPECULATORS[name].features: name for name in reversed(subject.speculators)}
    if "taps" in feeds:
        layers = DraftSpec.from_json(subject.manifest["drafters"][feeds["taps"]]["spec"]).taps
        values = _fed(subject.engine(speculate=feeds["taps"]), tokens, "taps")
        parts = np.split(values, len(layers), axis=1)
        found |= {f"layers up to {n}": part for n, part in sorted(zip(layers, parts, strict=True))}
    if "hidden" in feeds:
        found["hidden"] = _fed(subject.engine(speculate=feeds["hidden"]), tokens, "hidden")
    return found


def _fed(engine: Engine, tokens: Sequence[int], output: str) -> NDArray[np.float32]:
    """An output ``[L, F]`` of the steps that take a sequence, from an empty slot."""
    session: Any = engine.session  # the open target graph, since nothing stands in its place here
    found = []
    past = pending = 0
    for start in range(0, len(tokens), _CHUNK):
        part = list(tokens[start : start + _CHUNK])
        batch = StepBatch.of_rows([part], past=[past], slots=[0], accepted=[pending], logits="none")
        found.append(getattr(session.step(batch), output)[0, : len(part)])
        past += len(part)
        pending = len(part) if stays_pending(len(part), session.pending) else 0
    return np.concatenate(found)
