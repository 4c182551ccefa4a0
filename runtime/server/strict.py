# SPDX-License-Identifier: Apache-2.0
"""JSON as its standard has it, for the bodies of requests."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from nemo_build.runtime.server.errors import ApiError

__all__ = ["StrictRoute"]


def _refuse(name: str) -> NoReturn:
    raise ApiError(400, f"The body is no valid JSON: {name} is no JSON number.", code="invalid_json")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ApiError(400, f"The body has a number that is too large: {text[:40]}.", code="invalid_json")
    return value


class _StrictRequest(Request):
    """A request whose body is JSON without Python's additions, in UTF-8."""

    async def json(self) -> Any:
        data = await self.body()
        try:
            return json.loads(data.decode("utf-8"), parse_constant=_refuse, parse_float=_number)
        except UnicodeDecodeError as error:
            message = f"The body is no UTF-8 text: byte {error.start} cannot be decoded."
            raise ApiError(400, message, code="invalid_json") from None
        except RecursionError:
            raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None
        except json.JSONDecodeError:
            raise
        except ValueError:  # Python converts no integer of more than some thousand digits
            raise ApiError(400, "The body has a number that is too large.", code="invalid_json") from None


class StrictRoute(APIRoute):
    """A route with such requests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly
