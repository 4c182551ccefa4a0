# SPDX-License-Identifier: Apache-2.0
"""What the runs of a step give, put together to what the step gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.gpu.contract import OUTPUTS, shapes_of
from nemo_build.engines.gpu.rows import Placed, Rows, Run

Found = dict[str, NDArray[np.float32]]
"""Outputs by name."""


class Taken:
    """The outputs of a step, of which each run gives a part. What one run gives whole is not copied.

    Args:
        rows: The step.
        outputs: Names of the outputs that are wanted.
        widths: Sizes that are the engine's own.

    Attributes:
        outputs: As given.
    """

    def __init__(self, rows: Rows, outputs: Sequence[str], widths: Mapping[str, int]) -> None:
        self.outputs = outputs
        self._rows, self._widths = rows, widths
        self._found: Found = {}

    def add(self, given: Mapping[str, NDArray[Any]], placed: Placed, run: Run) -> None:
        """Add what a run gave, in the order of its slots: of logits those that are wanted, else all its rows."""
        rows = self._rows
        is_whole = np.array_equal(placed.slots, np.arange(len(rows.lengths)))
        for name in self.outputs:
            source = given[name]
            if name == "logits":
                if len(source) == len(rows.logit_rows):
                    self._found[name] = source
                else:
                    self._of(name)[placed.logits] = source
            elif is_whole and source.shape[:2] == (len(rows.lengths), rows.width):
                self._found[name] = source
            else:
                for row, slot in zip(placed.rows.tolist(), placed.slots.tolist(), strict=True):
                    start, take = int(run.start[row]), int(run.take[row])
                    self._of(name)[row, start : start + take] = source[slot, :take]

    def finished(self) -> Found:
        """All of it; zeros where no run had anything to give."""
        return {name: self._of(name) for name in self.outputs}

    def _of(self, name: str) -> NDArray[np.float32]:
        """An output, perhaps still to be filled in."""
        if name not in self._found:
            counts = {
                "batch": len(self._rows.lengths),
                "steps": self._rows.width,
                "rows": len(self._rows.logit_rows),
            }
            ((_, shape, dtype),) = shapes_of([name], OUTPUTS, {**self._widths, **counts})
            self._found[name] = np.zeros(shape, dtype)
        return self._found[name]
