# SPDX-License-Identifier: Apache-2.0
"""A lowered graph beside the portable one: both take the same steps, and what comes of them is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch
from nemo_build.engines.trt.lowering import OVERFLOW
from nemo_build.engines.trt.phases import PENDING
from nemo_build.state import stays_pending

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""What both must agree to in float32."""


class StepsOfBatches:
    """What takes the step of a session with ``run(phase, inputs)``.

    Attributes:
        overflow: How many tokens too many an expert was given in the last step, at worst.
    """

    overflow = 0

    def step(self, phase: str, batch: StepBatch) -> tuple[np.ndarray, np.ndarray]:
        """One step of all rows, row i in slot i; returns logits and hidden states."""
        names = ("input_ids", "lengths", "past", "accepted", "logit_rows")
        inputs: dict[str, Any] = {n: getattr(batch, n) for n in names}
        if batch.hidden_in is not None:
            inputs["hidden_in"] = batch.hidden_in
        found = self.run(phase, inputs)
        self.overflow = int(found[OVERFLOW][0]) if OVERFLOW in found else 0
        return found["logits"], found["hidden"]


class LoweredPair:
    """Row i is in slot i.

    Args:
        lowered: The lowered graphs, which have ``graph``, ``state`` and ``step``.
        bundle: Where the portable graph is.
        slots: Rows of the state.
        context: Positions of a row.
    """

    def __init__(self, lowered: Any, bundle: Path, *, slots: int, context: int) -> None:
        self.lowered = lowered
        self.portable = OrtSession(
            bundle / f"{lowered.graph}.onnx", slots=slots, context=context, pending=PENDING, hidden=True
        )
        self.random = np.random.default_rng(0)
        self.past = np.zeros(slots, int)
        self.pending = np.zeros(slots, int)

    def step(
        self, phase: str, lengths: list[int], accepted: list[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """A step of random tokens; returns (lowered, portable) logits and keeps what the rest needs."""
        accepted = [a if n else 0 for a, n in zip(accepted or [0] * len(lengths), lengths, strict=True)]
        past = self.past + accepted
        batch = StepBatch.of_rows(
            [self.random.integers(3, 90, n).tolist() for n in lengths],
            past=past.tolist(),
            slots=range(len(lengths)),
            accepted=accepted,
            logits="all",
        )
        if "mtp" in self.lowered.graph:
            shape = (*batch.input_ids.shape, self.portable.hidden_size)
            batch = batch.replace(hidden_in=self.random.standard_normal(shape).astype(np.float32))
        self.want = self.portable.step(batch)
        logits, self.hidden = self.lowered.step(phase, batch)
        self.valid = np.arange(batch.input_ids.shape[1]) < batch.lengths[:, None]
        for row, n in enumerate(lengths):
            if n:
                assert accepted[row] <= self.pending[row]
                self.past[row] = past[row] + (0 if stays_pending(n, PENDING) else n)
                self.pending[row] = n if stays_pending(n, PENDING) else 0
        return logits, self.want.logits

    def check(self, phase: str, lengths: list[int], accepted: list[int] | None = None) -> None:
        """A step whose results, and the recurrent state after it, are the same."""
        got, want = self.step(phase, lengths, accepted)
        np.testing.assert_allclose(got, want, **CLOSE)
        np.testing.assert_allclose(self.hidden[self.valid], self.want.hidden[self.valid], **CLOSE)
        for name, held in self.portable.state().items():
            if name.startswith(("conv", "ssm")):
                np.testing.assert_allclose(self.lowered.state[name], held, **CLOSE, err_msg=name)
