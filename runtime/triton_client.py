# SPDX-License-Identifier: Apache-2.0
"""A client of the server that ``nemo-build triton`` makes: the runtime's parameters, over gRPC or HTTP.

gRPC needs ``tritonclient[grpc]``, which the extra ``triton`` brings; HTTP needs nothing beside Python.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from nemo_build.runtime import triton_messages as messages
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.sampling import TokenLogprobs
from nemo_build.runtime.triton_messages import (
    MODEL,
    Details,
    Options,
    Piece,
    TritonError,
    no_answer,
    refused,
)

__all__ = ["Answer", "Details", "Piece", "TritonClient", "TritonError"]


@dataclass(frozen=True)
class Answer:
    """A whole answer; attributes as those of :class:`Piece`."""

    text: str
    tokens: int
    drafted: int
    finish_reason: str
    prompt_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()


class TritonClient:
    """Asks a server. Calls may overlap, from several threads.

    Args:
        address: ``grpc://HOST:PORT`` or ``http://HOST:PORT``; gRPC if it does not say.
        model: The model to ask.

    Raises:
        TritonError: The address is of another kind, or ``tritonclient`` is not installed.
    """

    def __init__(self, address: str, *, model: str = MODEL) -> None:
        scheme, self._address = messages.scheme_of(address)
        self._model = model
        self._responses = self._over_http if scheme == "http" else self._over_grpc
        if scheme == "grpc":
            messages.require_grpc()

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Answer:
        """The whole answer to a prompt; arguments and errors are those of :meth:`stream`."""
        inputs = messages.inputs_of(prompt, params, timeout=timeout, priority=priority, stream=False)
        pieces = list(self._pieces(inputs, timeout))
        return Answer(
            "".join(p.text for p in pieces),
            sum(p.tokens for p in pieces),
            sum(p.drafted for p in pieces),
            pieces[-1].finish_reason,
            pieces[0].prompt_tokens,
            tuple(found for p in pieces for found in p.logprobs),
        )

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> Iterator[Piece]:
        """The answer to a prompt as it comes. Closing the iterator cancels the request.

        Args:
            prompt: A text, or token ids.
            params: How tokens are chosen; ``None``: the model's defaults.
            options: See :class:`~nemo_build.runtime.triton_messages.Options`.

        Raises:
            TritonError: There is no answer, or none in time.
        """
        inputs = messages.inputs_of(prompt, params, stream=True, **options)
        return self._pieces(inputs, options.get("timeout"))

    def _pieces(self, inputs: Mapping[str, Any], timeout: float | None) -> Iterator[Piece]:
        deadline = messages.deadline_of(timeout)
        piece = None
        for outputs in self._responses(inputs, deadline):
            piece = messages.piece_of(outputs)
            yield piece
        if piece is None or not piece.finish_reason:
            raise no_answer(self._address, "ended the answer before its end.")

    # --- gRPC ------------------------------------------------------------------------------------------------

    def _over_grpc(self, inputs: Mapping[str, Any], deadline: float | None) -> Iterator[Mapping[str, Any]]:
        from tritonclient.grpc import InferenceServerClient
        from tritonclient.utils import InferenceServerException

        events: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        # A stream of its own for each request, so that one can be cancelled; channels are shared below that.
        client = InferenceServerClient(self._address)
        is_over = False
        try:
            client.start_stream(lambda result, error: events.put((result, error)))
            # If there is no server, this fails in one way or another, but the event says why.
            with contextlib.suppress(InferenceServerException):
                client.async_stream_infer(
                    self._model, messages.tensors(inputs), enable_empty_final_response=True
                )
            while not is_over:
                result, error = events.get(timeout=_left(deadline))
                if error is not None:
                    is_over = True
                    is_gone = str(error.status()) == "StatusCode.UNAVAILABLE"
                    raise refused(self._address, error.message(), gone=is_gone) from error
                if outputs := messages.outputs_of(result):
                    yield outputs
                is_over = result.get_response().parameters["triton_final_response"].bool_param
        except queue.Empty:
            raise no_answer(self._address, "does not answer in time.") from None
        finally:
            client.stop_stream(cancel_requests=not is_over)
            client.close()

    # --- HTTP ------------------------------------------------------------------------------------------------

    def _over_http(self, inputs: Mapping[str, Any], deadline: float | None) -> Iterator[Mapping[str, Any]]:
        try:
            host = urllib.parse.urlsplit(f"//{self._address}")
            port = host.port
        except ValueError as error:
            raise TritonError(f"{self._address} is no address: {error}.") from error
        connection = http.client.HTTPConnection(host.hostname or "", port, timeout=_left(deadline))
        try:
            connection.request(
                "POST",
                f"/v2/models/{urllib.parse.quote(self._model)}/generate_stream",
                json.dumps(inputs),
                {"Content-Type": "application/json"},
            )
            reply = connection.getresponse()
            if reply.status != http.HTTPStatus.OK:
                raise refused(self._address, messages.message_of(reply.read()))
            for line in reply:
                if line.startswith(b"data:"):
                    found = json.loads(line[5:])
                    if "error" in found:
                        raise refused(self._address, found["error"])
                    yield found
                if connection.sock is not None:
                    connection.sock.settimeout(_left(deadline))
        except TimeoutError as error:
            raise no_answer(self._address, "does not answer in time.") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise no_answer(self._address, f"cannot be talked to: {error!r}") from error
        finally:
            connection.close()


def _left(deadline: float | None) -> float | None:
    """Seconds until then, not quite 0 at least."""
    return None if deadline is None else max(deadline - time.monotonic(), 1e-3)
