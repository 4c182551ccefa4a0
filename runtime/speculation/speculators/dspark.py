# SPDX-License-Identifier: Apache-2.0
"""``dspark``: a block drafter with a Markov head (arXiv:2607.05147)."""

from __future__ import annotations

from functools import partial

from nemo_build.runtime.speculation.block import open_block
from nemo_build.runtime.speculation.kind import SpeculatorKind

KIND = SpeculatorKind(
    rank=0, graphs=("dspark_context", "dspark"), features="taps", open=partial(open_block, "dspark")
)
