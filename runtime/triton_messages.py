# SPDX-License-Identifier: Apache-2.0
"""What clients of ``nemo-build triton``'s server send and get, whatever carries it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict, Unpack

from nemo_build.errors import UserError
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.sampling import TokenLogprobs

MODEL = "generate"
"""The model to ask."""

_BUSY, _FAULT = "busy: ", "fault: "
"""How errors begin of a server that has too much to do, and of one that does not work."""

LATE = 5.0
"""Seconds past a request's timeout, after which the server, which was to end it, is taken to be dead."""

_NUMBERS = ("timeout",)
"""Inputs that are no integers, even if their values are."""


class TritonError(UserError):
    """The server refuses a request, cannot be reached, or does not answer in time.

    Attributes:
        busy: Whether the same request may well be answered later, or by another server.
        fault: Whether it is the server that does not work; else it is the request that is wrong, or one too many.
        said: The headline as the server says it.
    """

    def __init__(
        self,
        headline: str,
        problems: Sequence[str] = (),
        hint: str = "",
        *,
        busy: bool = False,
        fault: bool = False,
        said: str = "",
    ) -> None:
        super().__init__(headline, problems, hint)
        self.busy, self.fault, self.said = busy, fault, said or headline


@dataclass(frozen=True)
class Details:
    """More of how the text of a piece came about.

    Attributes:
        token_ids: Its tokens.
        drafted: Which of these were drafts.
        ends: Where in the text each token's own part ends, in characters; what is behind the last came without a token.
        stop_reason: Of the last piece: the stop string, or the id of the end token, that ended the text.
        rejected: Of the last piece: how many drafts were judged and not accepted; else 0.
        cached_tokens: Of the first piece: tokens of the prompt that came from the prefix cache; else ``None``.
        queued: Of the first piece: seconds for which the request waited for a slot; else ``None``.
    """

    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    ends: tuple[int, ...]
    stop_reason: str | int | None
    rejected: int
    cached_tokens: int | None
    queued: float | None


@dataclass(frozen=True)
class Piece:
    """A piece of an answer.

    Attributes:
        text: New text, possibly empty.
        tokens: How many tokens it is.
        drafted: How many of these were drafts.
        finish_reason: Of the last one: ``stop``, ``length`` or ``timeout``; else empty.
        prompt_tokens: Of the first one: length of the prompt; else 0.
        logprobs: Log probabilities of its tokens, if they were asked for.
        details: If they were asked for.
    """

    text: str
    tokens: int
    drafted: int
    finish_reason: str
    prompt_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    details: Details | None = None


def scheme_of(address: str) -> tuple[str, str]:
    """``grpc`` or ``http``, and the rest of an address; gRPC if it does not say.

    Raises:
        TritonError: It is of another kind.
    """
    scheme, _, rest = address.rpartition("://")
    if scheme not in ("", "grpc", "http"):
        raise TritonError(f"{address} begins with {scheme}://; this client knows grpc:// and http://.")
    return scheme or "grpc", rest.rstrip("/")


def require_grpc() -> None:
    """Raise TritonError if the package for gRPC is not installed."""
    try:
        import tritonclient.grpc  # noqa: F401
    except ImportError as error:
        raise TritonError(
            "gRPC needs a package that is not installed: pip install 'tritonclient[grpc]'.",
            hint="HTTP needs none: http://HOST:PORT, where PORT is that of the server's HTTP interface.",
        ) from error


class Options(TypedDict, total=False):
    """What a request may say besides its prompt and how tokens are chosen.

    Attributes:
        timeout: Seconds after which the answer ends with what there is, > 0; ``None``: never.
        priority: Higher ones come first.
        salt: Whose prompt it is: the prefix cache shares nothing between different salts.
        speculate: Whether drafts are made for it, where the server has a speculator; they are unless it says so.
        skip_special_tokens: Leave control tokens out of the text; they are unless it says so.
        details: Have the pieces say which tokens they are.
    """

    timeout: float | None
    priority: int
    salt: str | None
    speculate: bool
    skip_special_tokens: bool
    details: bool


def inputs_of(
    prompt: str | Sequence[int], params: SamplingParams | None, *, stream: bool, **options: Unpack[Options]
) -> dict[str, Any]:
    """The inputs of a request by name."""
    inputs: dict[str, Any] = {"priority": options.get("priority", 0), "stream": stream}
    inputs |= {"text_input": prompt} if isinstance(prompt, str) else {"input_ids": [int(t) for t in prompt]}
    if params is not None:
        # What is not said is left out, so that a server of an earlier version understands the rest.
        said = {name: value for name, value in asdict(params).items() if value is not None}
        inputs["sampling_parameters"] = json.dumps(said)
    for name in ("timeout", "salt"):
        if (value := options.get(name)) is not None:
            inputs[name] = value
    for name in ("speculate", "skip_special_tokens"):
        if not options.get(name, True):
            inputs[name] = False
    if options.get("details"):
        inputs["return_details"] = True
    return inputs


def deadline_of(timeout: float | None) -> float | None:
    """When the server is taken to be dead, of :func:`time.monotonic`."""
    return None if timeout is None else time.monotonic() + timeout + LATE


def piece_of(outputs: Mapping[str, Any]) -> Piece:
    """A piece from the outputs of a response."""
    return Piece(
        outputs["text_output"],
        outputs["num_output_tokens"],
        outputs["total_accepted_draft_tokens"],
        outputs["finish_reason"],
        outputs["num_input_tokens"],
        tuple(map(_logprobs, json.loads(outputs.get("logprobs", "[]")))),
        _details(json.loads(outputs["details"])) if "details" in outputs else None,
    )


def _logprobs(found: Mapping[str, Any]) -> TokenLogprobs:
    top = tuple((token, logprob) for token, logprob in found["top"])
    return TokenLogprobs(found["token"], found["logprob"], top)


def _details(found: Mapping[str, Any]) -> Details:
    return Details(
        tuple(found["token_ids"]),
        tuple(map(bool, found["drafted"])),
        tuple(found["ends"]),
        found.get("stop_reason"),
        found.get("rejected", 0),
        found.get("cached_tokens"),
        found.get("queued"),
    )


def tensors(inputs: Mapping[str, Any]) -> list[Any]:
    """Inputs as gRPC's tensors of one prompt; types are those of the server's table."""
    import numpy as np
    from tritonclient.grpc import InferInput

    kinds: dict[type, tuple[str, Any]] = {
        str: ("BYTES", np.object_),
        bool: ("BOOL", np.bool_),
        int: ("INT32", np.int32),
        float: ("FP32", np.float32),
    }
    made = []
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        kind, dtype = kinds[float if name in _NUMBERS else type(values[0]) if values else int]
        array = np.array([[v.encode() if isinstance(v, str) else v for v in values]], dtype)
        tensor = InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def outputs_of(result: Any) -> dict[str, Any]:
    """The outputs of one of gRPC's responses."""
    return {o.name: _scalar(result.as_numpy(o.name)) for o in result.get_response().outputs}


def _scalar(array: Any) -> Any:
    values = array.ravel().tolist()
    value = values[0] if values else None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def message_of(content: bytes) -> str:
    """What an error of HTTP says."""
    try:
        return str(json.loads(content.removeprefix(b"data:"))["error"])
    except (ValueError, KeyError, TypeError):
        return content.decode("utf-8", "replace")


def refused(address: str, message: str, *, gone: bool = False) -> TritonError:
    """What the server answers; `gone`: it is not there to answer."""
    is_busy, is_fault = message.startswith(_BUSY), message.startswith(_FAULT)
    # The errors of the front are those of the runtime, as text.
    headline, *lines = message.split("\n")
    problems = [line.removeprefix("  - ") for line in lines if line.startswith("  - ")]
    hint = "\n".join(line for line in lines if not line.startswith("  - "))
    is_dead = gone or bool(_DEAD.search(message))
    return TritonError(
        f"{address}: {headline}",
        problems,
        hint,
        busy=is_busy or is_dead,
        fault=is_fault or is_dead,
        said=headline.removeprefix(_BUSY).removeprefix(_FAULT),
    )


_DEAD = re.compile(r"is not healthy|is not ready|unknown model|no available versions")
"""What the server itself says of a model that it does not have, or whose process has died."""


def no_answer(address: str, what: str) -> TritonError:
    """The server does not answer, or no more."""
    return TritonError(f"{address} {what}", busy=True, fault=True)
