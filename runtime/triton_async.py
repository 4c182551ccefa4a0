# SPDX-License-Identifier: Apache-2.0
"""The asyncio client of the server that ``nemo-build triton`` makes, over HTTP or gRPC.

HTTP needs ``h11``, which the extra ``serve`` brings; gRPC needs ``tritonclient[grpc]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from nemo_build.runtime import triton_messages as messages
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.triton_messages import MODEL, Options, Piece, TritonError, no_answer, refused

__all__ = ["AsyncTritonClient"]

_Found = TypeVar("_Found")

_CHUNK = 1 << 16
"""Bytes that are read at a time."""


class AsyncTritonClient:
    """Asks a server, in one event loop. Each request of HTTP has a connection of its own; those of gRPC share one.

    Args:
        address: As of :class:`~nemo_build.runtime.triton_client.TritonClient`.
        model: The model to ask.

    Raises:
        TritonError: The address is of another kind, or a package is not installed.
    """

    def __init__(self, address: str, *, model: str = MODEL) -> None:
        scheme, self._address = messages.scheme_of(address)
        self._model = model
        self._channel: Any = None
        if scheme == "grpc":
            messages.require_grpc()
            self._responses = self._over_grpc
            return
        try:
            import h11  # noqa: F401
        except ImportError as error:
            raise TritonError(
                "Asking a server from coroutines needs a package that is not installed: pip install h11."
            ) from error
        self._host, self._port = _host_and_port(self._address)
        self._responses = self._over_http

    async def close(self) -> None:
        """End what runs over gRPC, and let go of its connection."""
        if self._channel is not None:
            await self._channel.close()

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Piece, None]:
        """The answer to a prompt as it comes. Closing the generator cancels the request. Arguments and errors are
        those of :meth:`nemo_build.runtime.triton_client.TritonClient.stream`.
        """
        inputs = messages.inputs_of(prompt, params, stream=True, **options)
        deadline = messages.deadline_of(options.get("timeout"))
        piece = None
        async with contextlib.aclosing(self._responses(inputs, deadline)) as responses:
            async for outputs in responses:
                piece = messages.piece_of(outputs)
                yield piece
        if piece is None or not piece.finish_reason:
            raise no_answer(self._address, "ended the answer before its end.")

    async def report(self, seconds: float) -> dict[str, Any]:
        """What the server serves, does, and has done; see :func:`nemo_build.triton_repo.responses.report`.

        Args:
            seconds: For the whole of it.

        Raises:
            TritonError: There is no answer, or none in time.
        """
        responses = self._responses({"report": True}, time.monotonic() + seconds)
        async with contextlib.aclosing(responses):
            async for outputs in responses:
                found: dict[str, Any] = json.loads(outputs["text_output"])
                return found
        raise no_answer(self._address, "gives no report.")

    # --- HTTP ------------------------------------------------------------------------------------------------

    async def _over_http(
        self, inputs: Mapping[str, Any], deadline: float | None
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        import h11

        writer = None
        try:
            reader, writer = await self._within(deadline, asyncio.open_connection(self._host, self._port))
            connection = h11.Connection(h11.CLIENT)
            body = json.dumps(inputs).encode()
            request = h11.Request(
                method="POST",
                target=f"/v2/models/{urllib.parse.quote(self._model)}/generate_stream",
                headers=[
                    ("Host", self._address),
                    ("Content-Type", "application/json"),
                    ("Content-Length", str(len(body))),
                    ("Connection", "close"),
                ],
            )
            for event in (request, h11.Data(data=body), h11.EndOfMessage()):
                writer.write(connection.send(event) or b"")
            async for line in _lines(self._body(connection, reader, deadline)):
                if line.startswith(b"data:"):
                    found = json.loads(line[5:])
                    if "error" in found:
                        raise refused(self._address, found["error"])
                    yield found
        except (OSError, EOFError, ValueError, h11.ProtocolError) as error:
            if isinstance(error, TimeoutError):
                raise no_answer(self._address, "does not answer in time.") from error
            raise no_answer(self._address, f"cannot be talked to: {error!r}") from error
        finally:
            if writer is not None:
                writer.close()

    async def _body(
        self, connection: Any, reader: asyncio.StreamReader, deadline: float | None
    ) -> AsyncIterator[bytes]:
        """The body of a response as it comes; raises TritonError with all of it if that is an error."""
        import h11

        status, content = 200, b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await self._within(deadline, reader.read(_CHUNK)))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data) and status == 200:
                yield bytes(event.data)
            elif isinstance(event, h11.Data):
                content += event.data
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                break
        if status != 200:
            raise refused(self._address, messages.message_of(content))

    # --- gRPC ------------------------------------------------------------------------------------------------

    async def _over_grpc(
        self, inputs: Mapping[str, Any], deadline: float | None
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        import grpc  # type: ignore[import-untyped]
        from tritonclient.grpc.aio import InferenceServerClient

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {
                "model_name": self._model,
                "inputs": messages.tensors(inputs),
                "enable_empty_final_response": True,
            }

        if self._channel is None:
            self._channel = InferenceServerClient(self._address)
        responses = self._channel.stream_infer(requests())
        try:
            while True:
                result, error = await self._within(deadline, anext(responses))
                if error is not None:
                    raise refused(self._address, error.message())
                if outputs := messages.outputs_of(result):
                    yield outputs
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise no_answer(self._address, "does not answer in time.") from error
        except grpc.RpcError as error:
            raise no_answer(self._address, f"cannot be talked to: {error.details()}") from error
        finally:
            responses.cancel()

    @staticmethod
    async def _within(deadline: float | None, awaited: Awaitable[_Found]) -> _Found:
        """What is awaited; raises TimeoutError if it is not there by then."""
        if deadline is None:
            return await awaited
        async with asyncio.timeout(max(deadline - time.monotonic(), 1e-3)):
            return await awaited


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole lines of what comes in parts."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _host_and_port(address: str) -> tuple[str, int]:
    """Raises TritonError if an address has none."""
    try:
        found = urllib.parse.urlsplit(f"//{address}")
        if found.hostname and found.port:
            return found.hostname, found.port
        problem = "it is not HOST:PORT"
    except ValueError as error:
        problem = str(error)
    raise TritonError(f"{address} is no address: {problem}.")
