# SPDX-License-Identifier: Apache-2.0
"""What the models of a step do, apart from how Triton calls them: ``run`` takes and gives tensors by name.

Nothing is rolled back between them: a step leaves its new tokens pending in the target's state, and how many of them
are to be committed travels with the next step (``ACCEPTED``). Likewise the drafter hears of committed tokens when it is
next asked; what it conditions on (hidden states, taps) waits for it in shared memory, at the row of the slot, where the
step that computed it left it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.session import Session, StepBatch
from nemo_build.runtime.choice import TokenChooser, likeliest
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.request import Request
from nemo_build.runtime.sampling import NonFiniteLogitsError
from nemo_build.runtime.speculation.base import Committed, DraftRequest, Speculator
from nemo_build.runtime.speculation.rounds import worth_verifying
from nemo_build.runtime.steps import last_rows
from nemo_build.triton_repo.arrays import Tensors, from_rows, pack, to_rows, unpack
from nemo_build.triton_repo.tensors import UNUSABLE

Outputs = dict[str, NDArray[Any]]


def describe(request: Request) -> dict[str, Any]:
    """All that choosing its tokens depends on, as plain data."""
    chooser = request.chooser
    return {
        "params": asdict(chooser.params) | {"logit_bias": list(chooser.params.logit_bias.items())},
        "seed": chooser.seed,
        "eos_ids": sorted(chooser.eos_ids),
        "tokens": request.tokens,
        "prompt_tokens": request.prompt_tokens,
    }


def chooser_of(data: Mapping[str, Any]) -> TokenChooser:
    """The chooser of a request that was described."""
    params = SamplingParams(**{**data["params"], "logit_bias": dict(data["params"]["logit_bias"])})
    count = data["prompt_tokens"]
    return TokenChooser(
        params,
        seed=data["seed"],
        eos_ids=data["eos_ids"],
        prompt=data["tokens"][:count],
        output=data["tokens"][count:],
    )


class Verify:
    """Runs the target and chooses tokens.

    Args:
        session: The open target graph.
        features: Where what the drafter conditions on is left, ``[slots, L, F]``; ``None``: nowhere.
        kind: Which output of the target that is.
    """

    def __init__(self, session: Session, features: NDArray[np.float32] | None, kind: str | None) -> None:
        self._session = session
        self._features, self._kind = features, kind
        self._choosers: dict[int, TokenChooser] = {}

    def control(self, order: Mapping[str, Any], extra: Tensors) -> tuple[dict[str, Any], Tensors]:
        """``start``: a request begins in a slot, or goes on in another one."""
        self._choosers[order["slot"]] = chooser_of(order["request"])
        return {}, {}

    def run(self, inputs: Tensors) -> Outputs:
        """One step; the state of the rows' slots advances."""
        slots, past, accepted, wants, watched = inputs["ROWS"].T.tolist()
        drafts = from_rows(inputs["DRAFT"])
        fed = [t + d for t, d in zip(from_rows(inputs["TOKENS"]), drafts, strict=True)]
        wanted = [len(d) + 1 if w else 0 for d, w in zip(drafts, wants, strict=True)]
        batch = StepBatch.of_rows(
            fed,
            past=past,
            slots=slots,
            accepted=accepted,
            logits="none",
        )
        lean = self._features is None or not any(watched)
        output = self._session.step(batch.replace(logit_rows=last_rows(batch, wanted), lean=lean))
        if not lean:
            self._keep(slots, fed, getattr(output, self._kind or ""))
        return {"TARGET": to_rows(self._choose(slots, drafts, wanted, output.logits))}

    def _keep(self, slots: list[int], fed: list[list[int]], features: NDArray[np.float32]) -> None:
        assert self._features is not None, "a lean step has none"
        for slot, tokens, row in zip(slots, fed, features, strict=True):
            self._features[slot, : len(tokens)] = row[: len(tokens)]

    def _choose(
        self, slots: list[int], drafts: list[list[int]], wanted: list[int], logits: NDArray[np.float32]
    ) -> list[list[int]]:
        choosers = [self._choosers[slot] for slot in slots]
        best, finite = likeliest(choosers, logits)
        chosen: list[list[int]] = []
        first = 0
        for chooser, row, count in zip(choosers, drafts, wanted, strict=True):
            end = first + count
            tokens: list[int] = []
            if count:
                try:
                    found, _ = chooser.choose(logits[first:end], best[first:end] if finite else None, row)
                    tokens = list(found)
                    for token in tokens:
                        chooser.push(token)
                except NonFiniteLogitsError:
                    tokens = [UNUSABLE]
            chosen.append(tokens)
            first = end
        return chosen


class Draft:
    """Keeps a speculator up to date, and has it draft.

    Args:
        speculator: The speculator.
        features: What it conditions on, as :class:`Verify` leaves it; ``None`` if it needs nothing.
    """

    def __init__(self, speculator: Speculator, features: NDArray[np.float32] | None) -> None:
        self._speculator, self._features = speculator, features
        self._choosers: dict[int, TokenChooser] = {}

    def control(self, order: Mapping[str, Any], extra: Tensors) -> tuple[dict[str, Any], Tensors]:
        """``describe``, ``start`` (a request in a slot), or ``save`` (see the speculator's methods)."""
        if order["do"] == "describe":
            return {"lookahead": dict(self._speculator.lookahead)}, {}
        slot = order["slot"]
        if order["do"] == "save":
            known = order["known"]
            if known is not None:
                self._observe(slot, known["past"], known["tokens"])
            return {}, self._speculator.save(slot, order["committed"])
        request = order["request"]
        if slot in self._choosers:
            self._speculator.release(slot)
        self._choosers[slot] = chooser_of(request)
        self._speculator.start(slot, request["tokens"][: order["fed"]], extra)
        return {}, {}

    def run(self, inputs: Tensors) -> Outputs:
        """Take in what was committed, and draft."""
        slots, starts, counts = inputs["ASKED"].T.tolist()
        known = from_rows(inputs["KNOWN"])
        rows = [
            self._committed(slot, past, tokens)
            for slot, past, tokens in zip(slots, starts, known, strict=True)
            if tokens
        ]
        if rows:
            self._speculator.observe(rows)
        asked = {
            i: DraftRequest(slot, count, self._choosers[slot].for_drafts())
            for i, (slot, count) in enumerate(zip(slots, counts, strict=True))
            if count
        }
        price = float(inputs["PRICE"][0])
        proposals = self._speculator.propose(list(asked.values())) if asked else []
        drafts: list[list[int]] = [[] for _ in slots]
        for i, proposal in zip(asked, proposals, strict=True):
            drafts[i] = worth_verifying(proposal, price)
        return {"DRAFT": to_rows(drafts)}

    def _observe(self, slot: int, past: int, tokens: list[int]) -> None:
        self._speculator.observe([self._committed(slot, past, tokens)])

    def _committed(self, slot: int, past: int, tokens: list[int]) -> Committed:
        chooser = self._choosers[slot]
        for token in tokens[max(chooser.length - past, 0) :]:
            chooser.push(token)
        features = None if self._features is None else self._features[slot, : len(tokens) - 1]
        return Committed(slot, past, tokens, features)


class Accept:
    """Compares drafts with what the target chose."""

    def control(self, order: Mapping[str, Any], extra: Tensors) -> tuple[dict[str, Any], Tensors]:
        """It keeps nothing, so there is nothing to order."""
        return {}, {}

    def run(self, inputs: Tensors) -> Outputs:
        """How many drafts of each row are what was chosen there."""
        chosen = inputs["TARGET"]
        accepted = []
        for target, draft in zip(from_rows(chosen), from_rows(inputs["DRAFT"]), strict=True):
            n = 0
            while n < min(len(draft), len(target)) and target[n] == draft[n]:
                n += 1
            accepted.append(n)
        return {"CHOSEN": np.column_stack([np.array(accepted, np.int32), chosen])}


def answer(stage: Verify | Draft | Accept, inputs: Tensors) -> Outputs:
    """A control request's outputs, or a step's."""
    if "CONTROL" not in inputs:
        return stage.run(inputs)
    extra = unpack(inputs["EXTRA"]) if "EXTRA" in inputs else {}
    reply, arrays = stage.control(json.loads(inputs["CONTROL"].ravel()[0]), extra)
    return {"REPLY": np.array([json.dumps(reply).encode()], np.object_), "EXTRA": pack(arrays)}
