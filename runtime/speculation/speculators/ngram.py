# SPDX-License-Identifier: Apache-2.0
"""``ngram``: prompt lookup, which needs no graph."""

from __future__ import annotations

from nemo_build.runtime.speculation.base import Speculator
from nemo_build.runtime.speculation.kind import EngineFiles, SpeculatorKind
from nemo_build.runtime.speculation.lookup import LookupSpeculator


def _open(files: EngineFiles) -> Speculator:
    return LookupSpeculator()


KIND = SpeculatorKind(rank=30, graphs=(), features=None, open=_open)
