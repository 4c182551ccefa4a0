# SPDX-License-Identifier: Apache-2.0
"""``mtp``: the checkpoint's multi-token-prediction module."""

from __future__ import annotations

from nemo_build.runtime.speculation.base import Speculator
from nemo_build.runtime.speculation.kind import EngineFiles, SpeculatorKind
from nemo_build.runtime.speculation.mtp import MtpSpeculator


def _open(files: EngineFiles) -> Speculator:
    return MtpSpeculator(files.session("mtp", hidden=True))


KIND = SpeculatorKind(rank=20, graphs=("mtp",), features="hidden", open=_open)
