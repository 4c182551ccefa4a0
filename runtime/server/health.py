# SPDX-License-Identifier: Apache-2.0
"""Probes, metrics, and what is served."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from nemo_build import __version__
from nemo_build.runtime.server.context import ServerContext
from nemo_build.runtime.server.errors import ApiError, JsonResponse, unavailable
from nemo_build.runtime.server.metrics import CONTENT_TYPE

__all__ = ["Readiness", "routes"]

_log = logging.getLogger(__name__)

_FRESH_SECONDS = 10.0
"""For so long a proof that the engine generates is believed."""


class Readiness:
    """Whether the engine really generates.

    It is asked for a token, unless it made steps since the last time it was asked: those prove the same.

    Args:
        server: Whose engine.
    """

    def __init__(self, server: ServerContext) -> None:
        self._server = server
        self._lock = asyncio.Lock()
        self._steps = self._failed = 0
        self._proved: float | None = None

    async def check(self) -> None:
        """Return if it generates. Raises ApiError (503) if it does not, or the server is shutting down."""
        if self._server.gate.draining:
            raise unavailable("The server is shutting down.")
        if self._proved is None and self._lock.locked():
            raise unavailable("The engine is about to generate its first token.")
        async with self._lock:
            if self._proved is not None and time.monotonic() - self._proved < _FRESH_SECONDS:
                return
            before = self._server.backend.statistics().scheduler
            has_worked = before.steps > self._steps and before.failed == self._failed and before.running
            if self._proved is None or not has_worked:
                await self._probe()
            after = self._server.backend.statistics().scheduler
            self._steps, self._failed = after.steps, after.failed
            self._proved = time.monotonic()

    async def _probe(self) -> None:
        try:
            await self._server.backend.check()
        except Exception as error:
            self._proved = None
            _log.warning("the engine is not ready: %s: %s", type(error).__name__, error)
            raise unavailable("The engine does not generate.") from error


def routes(server: ServerContext, readiness: Readiness) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["Operation"])

    @router.get("/health", summary="Whether the server is alive")
    async def health() -> Response:
        return JsonResponse({"status": "ok"})

    @router.get("/ready", summary="Whether the engine generates")
    async def ready() -> Response:
        await readiness.check()
        return JsonResponse({"status": "ready"})

    @router.get("/version", summary="The version of nemo-build")
    async def version() -> Response:
        return JsonResponse({"version": __version__})

    @router.get("/metrics", summary="Figures for Prometheus")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(server.metrics.render), media_type=CONTENT_TYPE)

    @router.get("/nemo/info", summary="What is served, and how")
    async def info() -> Response:
        backend = server.backend
        sampling: dict[str, Any] = asdict(backend.default_params)
        del sampling["grammar"], sampling["thinking"]
        return JsonResponse(
            {
                "model": server.name,
                "context": backend.context,
                "sequences": backend.slots,
                "target": backend.target,
                "speculators": list(backend.speculators),
                "speculator": backend.speculator,
                "sampling": sampling,
                "version": __version__,
            }
        )

    @router.get("/v1/models", summary="The models", tags=["OpenAI"])
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [_model(server, n) for n in server.names]})

    @router.get("/v1/models/{name:path}", summary="A model", tags=["OpenAI"])
    async def model(name: str) -> Response:
        if name not in server.names:
            raise ApiError(404, f"There is no model {name[:200]!r}.", param="model", code="model_not_found")
        return JsonResponse(_model(server, name))

    return router


def _model(server: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.started,
        "owned_by": "nemo-build",
        "max_model_len": server.backend.context,
    }
