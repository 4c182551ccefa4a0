# SPDX-License-Identifier: Apache-2.0
"""What the models of a step do, apart from how Triton calls them: ``run`` takes and gives tensors by name.

Nothing is rolled back between them: a step leaves its new tokens pending in the target's state, and how many of them
are to be committed travels with the next step (``ACCEPTED``). Likewise the drafter hears of committed tokens when it is
next asked; what it conditions on (hidden states, taps) waits for it in shared memory, at the row of the slot, where the
step that computed it left it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.session import Session, StepBatch
from nemo_build.errors import RequestError
from nemo_build.runtime.choice import TokenChooser, likeliest
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.request import Request
from nemo_build.runtime.sampling import NonFiniteLogitsError, TokenLogprobs
from nemo_build.runtime.speculation.base import Committed, DraftRequest, Speculator
from nemo_build.runtime.speculation.drafting import was_asked
from nemo_build.runtime.speculation.rounds import worth_verifying
from nemo_build.runtime.steps import last_rows
from nemo_build.triton_repo.arrays import Tensors, from_rows, pack, to_logprobs, to_rows, unpack
from nemo_build.triton_repo.guides import Guides
from nemo_build.triton_repo.tensors import REFUSED, UNUSABLE

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


def chooser_of(data: Mapping[str, Any], guides: Guides) -> TokenChooser:
    """The chooser of a request that was described.

    Args:
        data: The description.
        guides: Makes what it obeys.
    """
    params = SamplingParams(**{**data["params"], "logit_bias": dict(data["params"]["logit_bias"])})
    count = data["prompt_tokens"]
    return TokenChooser(
        params,
        seed=data["seed"],
        eos_ids=data["eos_ids"],
        prompt=data["tokens"][:count],
        output=data["tokens"][count:],
        guide=guides.guide(params),
    )


class Verify:
    """Runs the target and chooses tokens.

    Args:
        session: The open target graph.
        features: Where what the drafter conditions on is left, ``[slots, L, F]``; ``None``: nowhere.
        kind: Which output of the target that is.
        guides: Makes what requests obey.
    """

    def __init__(
        self, session: Session, features: NDArray[np.float32] | None, kind: str | None, guides: Guides
    ) -> None:
        self._session, self._guides = session, guides
        self._features, self._kind = features, kind
        self._choosers: dict[int, TokenChooser] = {}

    def control(self, order: Mapping[str, Any], extra: Tensors) -> tuple[dict[str, Any], Tensors]:
        """``start`` (a request begins in a slot, or goes on in another one), or ``prepare`` (see :class:`Guides`)."""
        if order["do"] == "prepare":
            return self._guides.prepare(order), {}
        self._choosers[order["slot"]] = chooser_of(order["request"], self._guides)
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
        return self._choose(slots, drafts, wanted, output.logits)

    def _keep(self, slots: list[int], fed: list[list[int]], features: NDArray[np.float32]) -> None:
        assert self._features is not None, "a lean step has none"
        for slot, tokens, row in zip(slots, fed, features, strict=True):
            self._features[slot, : len(tokens)] = row[: len(tokens)]

    def _choose(
        self, slots: list[int], drafts: list[list[int]], wanted: list[int], logits: NDArray[np.float32]
    ) -> Outputs:
        choosers = [self._choosers[slot] for slot in slots]
        best, finite = likeliest(choosers, logits)
        chosen: list[list[int]] = []
        logprobs: list[list[TokenLogprobs] | None] = []
        first = 0
        for chooser, row, count in zip(choosers, drafts, wanted, strict=True):
            end = first + count
            likely = best[first:end] if finite else None
            tokens, found = _chosen(chooser, logits[first:end], likely, row) if count else ([], None)
            chosen.append(tokens)
            logprobs.append(found)
            first = end
        outputs: Outputs = {"TARGET": to_rows(chosen)}
        if any(logprobs):
            outputs["LOGPROBS"] = to_logprobs(logprobs)
        return outputs


def _chosen(
    chooser: TokenChooser, logits: NDArray[np.float32], best: Sequence[int] | None, drafts: Sequence[int]
) -> tuple[list[int], list[TokenLogprobs] | None]:
    """The tokens of a row, which the chooser is told of, and their log probabilities if they are asked for."""
    try:
        tokens, _ = chooser.choose(logits, best, drafts)
        found = chooser.logprobs(logits, tokens)
    except NonFiniteLogitsError:
        return [UNUSABLE], None
    except RequestError:
        return [REFUSED], None
    for token in tokens:
        chooser.push(token)
    return list(tokens), found


class Draft:
    """Keeps a speculator up to date, and has it draft.

    Args:
        speculator: The speculator.
        features: What it conditions on, as :class:`Verify` leaves it; ``None`` if it needs nothing.
        guides: Makes what requests obey.
    """

    def __init__(self, speculator: Speculator, features: NDArray[np.float32] | None, guides: Guides) -> None:
        self._speculator, self._features, self._guides = speculator, features, guides
        self._choosers: dict[int, TokenChooser] = {}

    def control(self, order: Mapping[str, Any], extra: Tensors) -> tuple[dict[str, Any], Tensors]:
        """``describe``, ``start`` (a request in a slot), ``save`` (see the speculator's methods), or ``prepare``."""
        if order["do"] == "describe":
            return {"lookahead": dict(self._speculator.lookahead)}, {}
        if order["do"] == "prepare":
            return self._guides.prepare(order), {}
        slot = order["slot"]
        if order["do"] == "save":
            known = order["known"]
            if known is not None:
                self._observe(slot, known["past"], known["tokens"])
            return {}, self._speculator.save(slot, order["committed"])
        request = order["request"]
        if slot in self._choosers:
            self._speculator.release(slot)
        self._choosers[slot] = chooser_of(request, self._guides)
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
        for (i, request), proposal in zip(asked.items(), proposals, strict=True):
            drafts[i] = worth_verifying(proposal, price)
            if not was_asked(request.choose):
                drafts[i] = self._choosers[request.slot].corrected(drafts[i], request.length)
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
