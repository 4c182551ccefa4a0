# SPDX-License-Identifier: Apache-2.0
"""The chat page: plain files that any browser takes as they are, and the routes that serve them.

The page talks to the server it came from, and to nothing else; its content security policy holds it to that.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["FILES", "page_routes"]

FILES: dict[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/answer.js": ("answer.js", "text/javascript; charset=utf-8"),
    "/page/markdown.js": ("markdown.js", "text/javascript; charset=utf-8"),
    "/page/settings.js": ("settings.js", "text/javascript; charset=utf-8"),
    "/page/stream.js": ("stream.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""Path of the server to a file of this folder and its media type. They hold no secrets: no API key is asked for."""

_HEADERS = {
    # No scripts and styles but the files above, no requests but to this server, no frames around the page.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The tag says whether a copy is good: a server that was updated shows its new page at once.
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """A route for each of :data:`FILES`, for GET and HEAD. Files are read now, not when they are asked for."""
    return [_route(path, name, media_type) for path, (name, media_type) in FILES.items()]


def _route(path: str, name: str, media_type: str) -> Route:
    content = (Path(__file__).parent / name).read_bytes()
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def serve(request: Request) -> Response:
        held = request.headers.get("If-None-Match", "").split(",")
        # A proxy that compresses makes the tag a weak one.
        if headers["ETag"] in (tag.strip().removeprefix("W/") for tag in held):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return Route(path, serve, methods=["GET"], include_in_schema=False)
