# SPDX-License-Identifier: Apache-2.0
"""``dflash``: a block drafter (arXiv:2602.06036)."""

from __future__ import annotations

from functools import partial

from nemo_build.runtime.speculation.block import open_block
from nemo_build.runtime.speculation.kind import SpeculatorKind

KIND = SpeculatorKind(
    rank=10, graphs=("dflash_context", "dflash"), features="taps", open=partial(open_block, "dflash")
)
