# SPDX-License-Identifier: Apache-2.0
"""An engine as a model of EleutherAI's lm-eval, whose interface is that of ``lm_eval.api.model.LM``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from nemo_build.engines.check.prompts import logits_of
from nemo_build.errors import UserError
from nemo_build.export.quantize.evaluation import log_softmax

if TYPE_CHECKING:
    from nemo_build.runtime.engine import Engine


class EngineModel(LM):  # type: ignore[misc]  # lm-eval has no types
    """An engine that lm-eval asks for likelihoods and texts.

    Contexts that are too long lose their beginning. A text's probability under ``loglikelihood_rolling`` is that of its
    tokens after the first one, which the tokenizer may have put there.

    Args:
        engine: The engine; nothing else may use its session meanwhile.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of each ``(context, continuation)``: its natural log-probability, and whether greedy decoding gives it."""
        return [self._continuation(*request.args) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of each ``(text,)``: its natural log-probability, in windows of the engine's context."""
        return [self._text(request.args[0]) for request in requests]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Of each ``(context, options)``: the text that follows, without the stop string."""
        from nemo_build.runtime.params import SamplingParams

        prompts, params = [], []
        for request in requests:
            context, options = request.args
            until = options.get("until") or []
            length = int(options.get("max_gen_toks", 256))
            params.append(
                SamplingParams(
                    max_tokens=length,
                    temperature=float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0,
                    stop=tuple([until] if isinstance(until, str) else until),
                    seed=0,
                )
            )
            room = self._engine.session.context - length
            prompts.append(self._engine.tokenizer.encode(context, add_special_tokens=True)[-max(room, 1) :])
        return [c.text for c in self._engine.generate(prompts, params)]

    def _continuation(self, context: str, continuation: str) -> tuple[float, bool]:
        # Spaces at the end of a context belong to the next token, as in lm-eval's own models.
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        encode = self._engine.tokenizer.encode
        whole = encode(context + continuation, add_special_tokens=True)
        start = min(max(len(encode(context, add_special_tokens=True)), 1), len(whole))
        tokens, targets = whole[-self._engine.session.context - 1 :], whole[start:]
        if not targets:
            return 0.0, True
        session: Any = self._engine.session
        logs = log_softmax(logits_of(session, tokens[:-1]))[-len(targets) :]
        targets = targets[-len(logs) :]
        found = logs[np.arange(len(targets)), targets]
        return float(found.sum()), bool((logs.argmax(-1) == targets).all())

    def _text(self, text: str) -> float:
        tokens = self._engine.tokenizer.encode(text, add_special_tokens=True)
        session: Any = self._engine.session
        total, size = 0.0, self._engine.session.context
        for start in range(0, len(tokens) - 1, size):
            window = tokens[start : start + size + 1]
            logs = log_softmax(logits_of(session, window[:-1]))
            total += float(logs[np.arange(len(window) - 1), window[1:]].sum())
        return total


def run_tasks(engine: Engine, tasks: Sequence[str], metric: str, limit: int, shots: int) -> dict[str, str]:
    """Do tasks.

    Returns:
        By task: a ``0`` or ``1`` for each sample, in order.

    Raises:
        UserError: There is no such task, or it has no such metric of 0 or 1.
    """
    paths = [t for t in tasks if t.endswith((".yaml", ".yml"))]
    manager = TaskManager(
        include_defaults=len(paths) < len(tasks)
    )  # to read all of lm-eval's own takes a while
    missing = [t for t in tasks if t not in paths and t not in manager.all_tasks]
    if missing:
        raise UserError(f"lm-eval has no task {', '.join(missing)}.")
    results = simple_evaluate(
        EngineModel(engine),
        tasks=list(tasks),
        num_fewshot=shots,
        limit=limit,
        log_samples=True,
        task_manager=manager,
        bootstrap_iters=0,
    )
    return {name: _outcomes(name, samples, metric) for name, samples in results["samples"].items()}


def _outcomes(task: str, samples: Sequence[dict[str, Any]], metric: str) -> str:
    ordered = sorted(samples, key=lambda s: int(s["doc_id"]))
    values = [s.get(metric) for s in ordered]
    if any(v not in (0, 1) for v in values):
        known = sorted(k for k, v in ordered[0].items() if isinstance(v, (int, float)) and k != "doc_id")
        raise UserError(
            f"The task {task} has no metric {metric!r} that is 0 or 1; it has {', '.join(known)}."
        )
    return "".join(str(int(v)) for v in values if v is not None)
