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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nemo_build.errors import UserError
from nemo_build.runtime.params import SamplingParams

__all__ = ["Answer", "Piece", "TritonClient", "TritonError"]

_LATE = 5.0
"""Seconds past a request's timeout, after which the server, which was to end it, is taken to be dead."""

_BUSY = "busy: "
"""How errors of a server begin that has too much to do."""


class TritonError(UserError):
    """The server refuses a request, cannot be reached, or does not answer in time.

    Attributes:
        busy: Whether the same request may well be answered later, or by another server.
    """

    def __init__(self, headline: str, *, busy: bool = False) -> None:
        super().__init__(headline)
        self.busy = busy


@dataclass(frozen=True)
class Piece:
    """A piece of an answer.

    Attributes:
        text: New text, possibly empty.
        tokens: How many tokens it is.
        drafted: How many of these were drafts.
        finish_reason: Of the last one: ``stop``, ``length`` or ``timeout``; else empty.
        prompt_tokens: Of the first one: length of the prompt; else 0.
    """

    text: str
    tokens: int
    drafted: int
    finish_reason: str
    prompt_tokens: int


@dataclass(frozen=True)
class Answer:
    """A whole answer; attributes as those of :class:`Piece`."""

    text: str
    tokens: int
    drafted: int
    finish_reason: str
    prompt_tokens: int


class TritonClient:
    """Asks a server. Calls may overlap, from several threads.

    Args:
        address: ``grpc://HOST:PORT`` or ``http://HOST:PORT``; gRPC if it does not say.
        model: The model to ask.

    Raises:
        TritonError: The address is of another kind, or ``tritonclient`` is not installed.
    """

    def __init__(self, address: str, *, model: str = "generate") -> None:
        scheme, _, self._address = address.rpartition("://")
        self._model = model
        if scheme not in ("", "grpc", "http"):
            raise TritonError(f"{address} begins with {scheme}://; this client knows grpc:// and http://.")
        self._responses = self._over_http if scheme == "http" else self._over_grpc
        if scheme != "http":
            try:
                import tritonclient.grpc  # noqa: F401
            except ImportError as error:
                raise TritonError(
                    "gRPC needs a package that is not installed: pip install 'tritonclient[grpc]'."
                ) from error

    def generate(
        self,
        text: str,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Answer:
        """The whole answer to a prompt; arguments and errors are those of :meth:`stream`."""
        pieces = list(self._pieces(text, params, timeout, priority, stream=False))
        return Answer(
            "".join(p.text for p in pieces),
            sum(p.tokens for p in pieces),
            sum(p.drafted for p in pieces),
            pieces[-1].finish_reason,
            pieces[0].prompt_tokens,
        )

    def stream(
        self,
        text: str,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Iterator[Piece]:
        """The answer to a prompt as it comes. Closing the iterator cancels the request.

        Args:
            text: The prompt.
            params: How tokens are chosen; ``None``: the model's defaults.
            timeout: Seconds after which the answer ends with what there is, > 0; ``None``: never.
            priority: Higher ones come first.

        Raises:
            TritonError: There is no answer, or none in time.
        """
        return self._pieces(text, params, timeout, priority, stream=True)

    def _pieces(
        self, text: str, params: SamplingParams | None, timeout: float | None, priority: int, *, stream: bool
    ) -> Iterator[Piece]:
        inputs: dict[str, Any] = {"text_input": text, "priority": priority, "stream": stream}
        if params is not None:
            inputs["sampling_parameters"] = json.dumps(asdict(params))
        if timeout is not None:
            inputs["timeout"] = timeout
        deadline = None if timeout is None else time.monotonic() + timeout + _LATE
        found = None
        for found in self._responses(inputs, deadline):
            yield Piece(
                found["text_output"],
                found["num_output_tokens"],
                found["total_accepted_draft_tokens"],
                found["finish_reason"],
                found["num_input_tokens"],
            )
        if found is None or not found["finish_reason"]:
            raise TritonError(f"{self._address} ended the answer before its end.", busy=True)

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
                client.async_stream_infer(self._model, _tensors(inputs), enable_empty_final_response=True)
            while not is_over:
                result, error = events.get(timeout=_left(deadline))
                if error is not None:
                    is_over = True
                    is_gone = str(error.status()) == "StatusCode.UNAVAILABLE"
                    raise _refused(self._address, error.message(), gone=is_gone) from error
                message = result.get_response()
                if message.outputs:
                    yield {o.name: _scalar(result.as_numpy(o.name)) for o in message.outputs}
                is_over = message.parameters["triton_final_response"].bool_param
        except queue.Empty:
            raise TritonError(f"{self._address} does not answer in time.", busy=True) from None
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
                raise _refused(self._address, _message(reply.read()))
            for line in reply:
                if line.startswith(b"data:"):
                    found = json.loads(line[5:])
                    if "error" in found:
                        raise _refused(self._address, found["error"])
                    yield found
                if connection.sock is not None:
                    connection.sock.settimeout(_left(deadline))
        except TimeoutError as error:
            raise TritonError(f"{self._address} does not answer in time.", busy=True) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TritonError(f"{self._address} cannot be talked to: {error!r}", busy=True) from error
        finally:
            connection.close()


def _left(deadline: float | None) -> float | None:
    """Seconds until then, not quite 0 at least."""
    return None if deadline is None else max(deadline - time.monotonic(), 1e-3)


def _tensors(inputs: Mapping[str, Any]) -> list[Any]:
    """Inputs as tensors of one prompt; types are those of the server's table."""
    import numpy as np
    from tritonclient.grpc import InferInput

    kinds: dict[type, tuple[str, Any]] = {
        str: ("BYTES", np.object_),
        bool: ("BOOL", np.bool_),
        int: ("INT32", np.int32),
        float: ("FP32", np.float32),
    }
    tensors = []
    for name, value in inputs.items():
        kind, dtype = kinds[float if name == "timeout" else type(value)]
        array = np.array([[value.encode() if isinstance(value, str) else value]], dtype)
        tensor = InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def _scalar(array: Any) -> Any:
    value = array.ravel().tolist()[0]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content.removeprefix(b"data:"))["error"])
    except (ValueError, KeyError, TypeError):
        return content.decode("utf-8", "replace")


def _refused(address: str, message: str, *, gone: bool = False) -> TritonError:
    """What the server answers; `gone`: it is not there to answer."""
    return TritonError(f"{address}: {message}", busy=gone or message.startswith(_BUSY))
