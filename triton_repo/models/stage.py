# SPDX-License-Identifier: Apache-2.0
"""``draft_*``, ``verify`` and ``accept``: the models of a step."""

from __future__ import annotations

from typing import Any

from nemo_build.triton_repo.models._python_backend import answer_all, settings_of
from nemo_build.triton_repo.shared import release, server_key
from nemo_build.triton_repo.stages import Accept, Draft, Verify, answer


class TritonPythonModel:
    """One of them, as its settings say."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open what the model needs of the engine."""
        settings, folder = settings_of(args)
        self._stage: Verify | Draft | Accept
        self._key = ""
        if settings.role == "accept":
            self._stage = Accept()
            return
        self._key = server_key(settings.key)
        parts = settings.parts(folder, self._key)
        self._stage = parts.verify() if settings.role == "verify" else parts.draft()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Steps, or orders about a slot."""
        return answer_all(requests, lambda inputs: answer(self._stage, inputs))

    def finalize(self) -> None:
        """Let go of the shared memory."""
        if self._key:
            release(self._key)
