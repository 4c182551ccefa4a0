# SPDX-License-Identifier: Apache-2.0
"""``generate``: the model that clients talk to."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from nemo_build.errors import BundleError
from nemo_build.runtime.engine import Engine
from nemo_build.runtime.steps import StateLostError
from nemo_build.triton_repo.arrays import Tensors
from nemo_build.triton_repo.front import Front
from nemo_build.triton_repo.models._python_backend import FAILED, call, read, settings_of, tensors
from nemo_build.triton_repo.remote import StepsFailedError
from nemo_build.triton_repo.shared import release, server_key

_OWN = "triton_"
"""How the names of parameters begin that are meant for the server."""

_DEAD = ("is not healthy", "not ready", "not found")
"""What the server says of a model that does not answer."""

_WAIT = 0.05
"""Seconds between looks at whether a model is ready."""

_PATIENCE = 600.0
"""Seconds that a model may take to be ready; a large engine's is reading its weights."""


class TritonPythonModel:
    """The front of the engine."""

    def initialize(self, args: dict[str, str]) -> None:
        """Prepare; the engine is opened with the first request, as the other models load at the same time."""
        self._settings, self._folder = settings_of(args)
        self._key = server_key(self._settings.key)
        gauges = _Gauges(args["model_version"])
        speculator = self._settings.options["speculate"]
        self._front = Front(
            self._connect,
            most_waiting=self._settings.most_waiting,
            observe=gauges.observe,
            speculator=None if speculator == "none" else speculator,
        )

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the thread; the responses are sent from there."""
        for request in requests:
            self._front.submit(_asked(request), _Sender(request))

    def finalize(self) -> None:
        """Answer what was asked, then go."""
        self._front.close()
        release(self._key)

    def _connect(self) -> Engine:
        settings = self._settings
        if settings.in_process:
            engine: Engine = Engine.load(settings.directory(self._folder), **settings.options)
            return engine
        models = _Neighbours(settings.models)
        models.wait()
        parts = settings.parts(self._folder, self._key)
        try:
            return parts.engine(models)
        except StateLostError:  # a model did not answer, but does again
            return parts.engine(models)


def _asked(request: Any) -> dict[str, NDArray[Any]]:
    """Inputs of a request, and its parameters: what is no input in the body of an HTTP request comes as these."""
    given: dict[str, Any] = json.loads(request.parameters() or "{}")
    parameters = {n: np.array([v]) for n, v in given.items() if not n.startswith(_OWN)}
    return parameters | read(request)


class _Neighbours:
    """The models of a step in this server; see :class:`~nemo_build.triton_repo.remote.Models`."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def call(self, model: str, inputs: Tensors, outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        try:
            return call(self._names[model], inputs, outputs)
        except RuntimeError as error:
            if FAILED in str(error) or not any(words in str(error) for words in _DEAD):
                raise
            raise StepsFailedError(str(error)) from error

    def repair(self) -> None:
        """Load all of them again, in the order of a step; a model whose process has died says that it is ready."""
        # Loading alone does nothing where no file of the model has changed. Steps go before their models.
        for name in reversed(list(self._names.values())):
            pb_utils.unload_model(model_name=name)
        for name in self._names.values():
            pb_utils.load_model(model_name=name)
        self.wait()

    def wait(self) -> None:
        end = time.monotonic() + _PATIENCE
        missing = list(self._names.values())
        while missing := [name for name in missing if not pb_utils.is_model_ready(model_name=name)]:
            if time.monotonic() > end:
                raise BundleError(f"Models of this repository are not ready: {', '.join(missing)}.")
            time.sleep(_WAIT)


class _Sender:
    """Answers one request; see :class:`~nemo_build.triton_repo.delivery.Responder`."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._wanted = set(request.requested_output_names())

    def send(self, outputs: Tensors, *, final: bool) -> None:
        response = pb_utils.InferenceResponse(
            tensors({n: a for n, a in outputs.items() if n in self._wanted})
        )
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)

    def fail(self, message: str, *, busy: bool = False) -> None:
        kind = pb_utils.TritonError
        error = kind(message, kind.UNAVAILABLE if busy else kind.INVALID_ARG)
        self._sender.send(
            pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )

    def cancelled(self) -> bool:
        found: bool = self._sender.is_cancelled()
        return found


class _Gauges:
    """Figures of the engine among the server's metrics; one thread sets them, as the server's own are not safe."""

    def __init__(self, version: str) -> None:
        kinds = {
            "requests_running": "Requests that have a slot",
            "requests_waiting": "Requests that wait for a slot",
            "slots_free": "Slots that nobody has",
            "steps": "Steps so far",
            "preemptions": "How often a request lost its slot",
            "requests_failed": "Requests that ended with a step that failed",
            "draft_tokens": "Drafts that were judged",
            "accepted_draft_tokens": "Drafts that were accepted",
        }
        self._families = [
            pb_utils.MetricFamily(f"nemo_build_{name}", text, pb_utils.MetricFamily.GAUGE)
            for name, text in kinds.items()
        ]
        labels = {"version": version}
        self._metrics = dict(
            zip(kinds, (family.Metric(labels=labels) for family in self._families), strict=True)
        )
        self._shown: dict[str, float] = {}

    def observe(self, engine: Engine) -> None:
        now, acceptance = engine.statistics(), engine.acceptance
        values: dict[str, float] = {
            "requests_running": now.running,
            "requests_waiting": now.waiting,
            "slots_free": now.free_slots,
            "steps": now.steps,
            "preemptions": now.preemptions,
            "requests_failed": now.failed,
            "draft_tokens": sum(acceptance.drafted),
            "accepted_draft_tokens": sum(acceptance.accepted),
        }
        for name, value in values.items():
            if self._shown.get(name) != value:  # a message to the server and back
                self._metrics[name].set(value)
        self._shown = values
