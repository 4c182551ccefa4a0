# SPDX-License-Identifier: Apache-2.0
"""An engine whose tokens are chosen in other processes, which have to know of grammars before they meet them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_build.errors import RequestError
from nemo_build.runtime.engine import Engine
from nemo_build.runtime.opening import Opened
from nemo_build.runtime.request import Request
from nemo_build.triton_repo.remote import Steps, StepsFailedError

_POLL = 0.01
"""Seconds between looks at whether a process has prepared."""


class GuidedEngine(Engine):
    """An engine whose tokens are chosen in other processes.

    Args:
        directory: The engine.
        opened: What of it is open here.
        steps: Reaches the others.
        models: Those of them that choose tokens or drafts.
    """

    def __init__(self, directory: Path, opened: Opened, steps: Steps, models: Sequence[str]) -> None:
        super().__init__(directory, opened)
        self._steps, self._models = steps, models

    def requests(self, *arguments: Any, **options: Any) -> list[Request]:
        """As of the base class; every process is ready for them."""
        requests = super().requests(*arguments, **options)
        grammars = {r.params.grammar for r in requests if r.params.grammar is not None}
        for order in [{"do": "prepare", "grammar": asdict(g)} for g in grammars]:
            for model in self._models:
                self._prepare(model, order)
        return requests

    def _prepare(self, model: str, order: Mapping[str, Any]) -> None:
        while True:
            try:
                reply = self._steps.tell(model, order)
            except StepsFailedError:  # the next step finds out, and all of them are started again
                return
            if reply["ready"]:
                break
            time.sleep(_POLL)
        if reply["problem"] is not None:
            raise RequestError(reply["problem"])
