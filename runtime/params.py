# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a request are chosen and when it ends: the parameters and their ranges."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from nemo_build.errors import RequestError
from nemo_build.spec import GenerationDefaults

__all__ = ["Grammar", "SamplingParams", "Thinking"]

_LIMITS: tuple[tuple[str, type, str, Callable[[Any], bool]], ...] = (
    ("max_tokens", numbers.Integral, "an integer of at least 1", lambda v: v >= 1),
    ("temperature", numbers.Real, "a number from 0 to 100", lambda v: 0 <= v <= 100),
    ("top_p", numbers.Real, "a number above 0 and at most 1", lambda v: 0 < v <= 1),
    ("top_k", numbers.Integral, "an integer of at least 0 (0 or -1: off)", lambda v: v >= -1),
    ("min_p", numbers.Real, "a number from 0 to 1", lambda v: 0 <= v <= 1),
    ("repetition_penalty", numbers.Real, "a number from 0.01 to 100", lambda v: 0.01 <= v <= 100),
    ("presence_penalty", numbers.Real, "a number from -2 to 2", lambda v: -2 <= v <= 2),
    ("frequency_penalty", numbers.Real, "a number from -2 to 2", lambda v: -2 <= v <= 2),
    ("min_tokens", numbers.Integral, "an integer of at least 0", lambda v: v >= 0),
)

MOST_LOGPROBS = 20
"""Most likely tokens that a request may be told of at each position."""


def _is_number(value: object, kind: type) -> bool:
    # bool is an Integral, but `"top_k": true` is a mistake, not a one.
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    return isinstance(value, numbers.Integral) or math.isfinite(value)  # type: ignore[arg-type]


def _is_token_id(value: object) -> bool:
    return _is_number(value, numbers.Integral) and value >= 0  # type: ignore[operator]


def _taken(name: str, kind: type, value: object, problems: list[str]) -> Any:
    """A dataclass as it is, or made of a mapping of its fields, as it travels; ``None`` where that cannot be."""
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        problems.append(f"{name} must be a mapping, got {value!r}")
        return None
    unknown = sorted(str(key) for key in value if key not in {f.name for f in fields(kind)})
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in value]
    problems += [f"{name}.{key} is unknown" for key in unknown] + [
        f"{name}.{key} is missing" for key in missing
    ]
    if unknown or missing:
        return None
    try:
        return kind(**value)
    except RequestError as error:
        problems += error.problems
        return None


@dataclass(frozen=True)
class Grammar:
    """What the text, or what of it follows the thinking, has to look like.

    Attributes:
        kind: A name of :data:`nemo_build.runtime.constraints.kinds.KINDS`: ``json_schema``, ``json_object``, ``regex``,
            ``lark``, ``choice`` or ``tools``.
        text: What the kind makes the grammar of; see its module.
        after_thinking: The prompt has opened ``<think>``: the text is free up to ``</think>``, and the grammar begins
            behind that.

    Raises:
        RequestError: A value has the wrong type. Whether the grammar can be used is found out with the tokenizer, by
            :class:`~nemo_build.runtime.constraints.making.Constraints`.
    """

    kind: str
    text: str = ""
    after_thinking: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"grammar.{name} must be {kind_name}, got {getattr(self, name)!r}"
            for name, kind, kind_name in (
                ("kind", str, "a string"),
                ("text", str, "a string"),
                ("after_thinking", bool, "true or false"),
            )
            if not isinstance(getattr(self, name), kind)
        ]
        if problems:
            raise RequestError("The grammar is invalid.", problems)


@dataclass(frozen=True)
class Thinking:
    """How long the model may think. The prompt has opened ``<think>``.

    Attributes:
        budget: Tokens of thinking, >= 0, counted from the start of the output; then ``</think>`` is forced, token by
            token. 0 closes at once.
        grace: Tokens, >= 0, for which the end waits beyond the budget until a line ends.
        calls: Names of the functions that may be called: a ``<tool_call>`` of one of them ends the thinking as
            ``</think>`` does. Where one may be beginning the end waits for at most
            :data:`~nemo_build.runtime.constraints.thinking.MOST_BEGINNING` tokens more. Without any, thinking never
            takes more than budget and grace.

    Raises:
        RequestError: A number is no integer or below 0, or a name is no string.
    """

    budget: int
    grace: int = 0
    calls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = [
            f"thinking.{name} must be an integer of at least 0, got {getattr(self, name)!r}"
            for name in ("budget", "grace")
            if not (_is_number(getattr(self, name), numbers.Integral) and getattr(self, name) >= 0)
        ]
        calls: object = self.calls
        if not isinstance(calls, (list, tuple)) or not all(isinstance(name, str) for name in calls):
            problems.append(f"thinking.calls must be a list of names, got {calls!r}")
        if problems:
            raise RequestError("The thinking budget is invalid.", problems)
        object.__setattr__(self, "calls", tuple(self.calls))

    @classmethod
    def with_grace(cls, budget: int, calls: Sequence[str] = ()) -> Thinking:
        """With the grace that fronts give who names a budget alone: a tenth of it, at most 16 tokens."""
        return cls(budget, min(budget // 10, 16), tuple(calls))


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        max_tokens: Most tokens to generate, >= 1.
        temperature: Divides the logits, [0, 100]; 0 is greedy. Values in (0, 1e-6) act as 1e-6.
        top_p: Nucleus mass in (0, 1]; 1 is off.
        top_k: Number of most likely tokens kept; 0 (or -1) is off.
        min_p: Tokens below this fraction of the most likely one are dropped, [0, 1]; 0 is off.
        repetition_penalty: [0.01, 100]; 1 is off. Counts prompt and output.
        presence_penalty: [-2, 2]; 0 is off. Counts output only.
        frequency_penalty: [-2, 2]; 0 is off. Counts output only.
        logit_bias: Token id to a value in [-100, 100] that is added to its logit.
        seed: Any 64-bit integer, signed or unsigned; ``None`` lets the engine choose one.
        stop: Strings that end the text; a plain string counts as one. None may be empty.
        stop_token_ids: Token ids that end the text, besides the model's own.
        include_stop: Keep the stop string, or the text of the token in `stop_token_ids`, in the output.
        ignore_eos: The model's own end ids do not end the text, unless a grammar lets nothing follow.
        min_tokens: The first ``min_tokens`` tokens do not end the text (but ``max_tokens`` does).
        logprobs: ``None``: none; n from 0 to 20: the log-probability of each token, and the n most likely ones there.
        grammar: What the text has to look like, or ``None``. A mapping of its fields is taken as well.
        thinking: How long the model may think, or ``None``: as it likes. A mapping of its fields is taken as well.

    Raises:
        RequestError: Listing every value of a wrong type or out of range.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    grammar: Grammar | None = None
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be {text}, got {getattr(self, name)!r}"
            for name, kind, text, within in _LIMITS
            if not (_is_number(getattr(self, name), kind) and within(getattr(self, name)))
        ]
        if not problems and self.min_tokens > self.max_tokens:
            problems.append(f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})")
        for name in ("include_stop", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name} must be true or false, got {getattr(self, name)!r}")
        seed = self.seed
        if seed is not None and not (_is_number(seed, numbers.Integral) and -(2**63) <= seed < 2**64):
            problems.append(f"seed must be a 64-bit integer, got {seed!r}")
        wanted = self.logprobs
        if wanted is not None and not (_is_number(wanted, numbers.Integral) and 0 <= wanted <= MOST_LOGPROBS):
            problems.append(f"logprobs must be an integer from 0 to {MOST_LOGPROBS}, got {wanted!r}")
        problems += self._check_stops() + self._check_bias()
        grammar = _taken("grammar", Grammar, self.grammar, problems)
        thinking = _taken("thinking", Thinking, self.thinking, problems)
        if problems:
            raise RequestError("The sampling parameters are invalid.", problems)
        # Own, plain copies: the caller's list or dict may change while the request runs.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        object.__setattr__(self, "logit_bias", {int(i): float(b) for i, b in self.logit_bias.items()})
        object.__setattr__(self, "top_k", max(int(self.top_k), 0))
        object.__setattr__(self, "grammar", grammar)
        object.__setattr__(self, "thinking", thinking)

    @classmethod
    def of_checkpoint(cls, defaults: GenerationDefaults) -> SamplingParams:
        """What a checkpoint says of sampling; the rest as above."""
        wanted = {name: getattr(defaults, name) for name in ("temperature", "top_p", "top_k")}
        return cls(**{name: value for name, value in wanted.items() if value is not None})

    def _check_stops(self) -> list[str]:
        problems = []
        stop: object = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(s, str) for s in stop):
            problems.append(f"stop must be a string or a list of strings, got {stop!r}")
        elif "" in stop:
            problems.append("stop holds an empty string")
        ids: object = self.stop_token_ids
        if not isinstance(ids, (list, tuple)) or not all(map(_is_token_id, ids)):
            problems.append(f"stop_token_ids must be a list of token ids (integers >= 0), got {ids!r}")
        return problems

    def _check_bias(self) -> list[str]:
        if not isinstance(self.logit_bias, Mapping):
            return [f"logit_bias must map token ids to numbers, got {self.logit_bias!r}"]
        problems = []
        for token, bias in self.logit_bias.items():
            if not _is_token_id(token):
                problems.append(f"logit_bias: {token!r} is no token id (integer >= 0)")
            if not (_is_number(bias, numbers.Real) and -100 <= bias <= 100):
                problems.append(f"logit_bias[{token!r}] must be a number from -100 to 100, got {bias!r}")
        return problems

    @property
    def uses_counts(self) -> bool:
        """Whether any penalty is on, so that the request needs a ``TokenCounts``."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check the token ids of the request against the model.

        Args:
            vocab_size: Width ``V`` of the model's logits.

        Raises:
            RequestError: Listing every id in ``logit_bias`` and ``stop_token_ids`` that is not below
                ``vocab_size``.
        """
        named = {"logit_bias": self.logit_bias, "stop_token_ids": self.stop_token_ids}
        problems = [f"{name}: token id {i}" for name, ids in named.items() for i in ids if i >= vocab_size]
        if problems:
            raise RequestError(f"The model has only token ids 0 to {vocab_size - 1}.", problems)
