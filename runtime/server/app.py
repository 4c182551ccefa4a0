# SPDX-License-Identifier: Apache-2.0
"""The application: all routes, and what stands before them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from nemo_build import __version__
from nemo_build.runtime.server import chat, completions, errors, health, responses, tokens
from nemo_build.runtime.server.backend import Backend
from nemo_build.runtime.server.context import ServerContext, Settings
from nemo_build.runtime.server.limits import Edge
from nemo_build.runtime.server.page import page_routes
from nemo_build.runtime.server.sse import ClientGone

__all__ = ["create_app"]

_GONE = 499
"""The status, which nobody reads, of an answer whose client has gone."""


def create_app(backend: Backend, settings: Settings | None = None) -> FastAPI:
    """An ASGI application that serves a backend; its lifespan starts and closes the backend.

    ``app.state`` has the :class:`~nemo_build.runtime.server.context.ServerContext` as ``server``, and the
    :class:`~nemo_build.runtime.server.health.Readiness` as ``readiness``.
    """
    settings = settings or Settings()
    server = ServerContext.of(backend, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await backend.start()
        try:
            yield
        finally:
            await backend.close()
            server.tracing.close()

    app = FastAPI(
        title="nemo-build",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.state.server, app.state.readiness = server, health.Readiness(server)
    app.openapi = _openapi(app)  # type: ignore[method-assign]
    app.router.routes.extend(page_routes())
    app.include_router(health.routes(server, app.state.readiness))
    for module in (chat, completions, responses, tokens):
        app.include_router(module.routes(server))
    errors.install(app)
    app.add_exception_handler(ClientGone, _gone)
    app.add_middleware(
        Edge,
        keys=settings.keys,
        origins=settings.origins,
        is_local=settings.is_local,
        most_bytes=settings.max_request_bytes,
        count_error=server.metrics.count_error,
        paths=lambda: app.openapi()["paths"],
    )
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _gone(request: Request, error: Exception) -> Response:
    request.state.record.client_aborted = True
    return Response(status_code=_GONE)


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _openapi(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """The document of an app, whose errors are all of one form."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = found.setdefault("components", {}).setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schemas["Error"] = _ERROR
            content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
            for path in found["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
                    operation["responses"]["default"] = {"description": "An error", "content": content}
            app.openapi_schema = found
        return app.openapi_schema

    return openapi
