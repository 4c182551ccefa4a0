# SPDX-License-Identifier: Apache-2.0
"""Text that is JSON of a schema. The grammar's text is the schema, as JSON.

Members come in the order of the schema. Between them there may be a space, or a new line with up to 80 spaces, so that
a model cannot go on with blanks for ever. What the library cannot hold to is refused, and nothing is taken loosely.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from nemo_build.errors import RequestError
from nemo_build.runtime.constraints.vocabulary import Vocabulary

__all__ = ["EXACTLY", "check_multiples", "grammar", "parse_json"]

EXACTLY: Mapping[str, Any] = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ ]|\n[ ]{0,80}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
"""How the library reads a schema, whatever the schema itself says of that (``x-guidance``)."""

_MOST_MULTIPLE = 100_000
"""The library makes a state machine of as many states as ``multipleOf`` says, zeros at its end aside; where schemas
come together, of as many as their least common multiple. A million take seconds and hundreds of megabytes."""


def grammar(text: str, vocabulary: Vocabulary) -> str:
    """The library's grammar.

    Args:
        text: A JSON schema, an object or ``true``.
        vocabulary: The model's tokens.

    Raises:
        RequestError: It is no JSON, or no schema.
    """
    from llguidance import LLMatcher

    schema = parse_json(text, "The JSON schema")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(f"The JSON schema must be an object, not {json.dumps(schema)[:80]}.")
    check_multiples(schema)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=dict(EXACTLY))  # type: ignore[arg-type]


def check_multiples(schema: Any) -> None:
    """Refuse schemas with which the library would be busy for long.

    Each ``multipleOf`` counts wherever it stands, also within ``default`` and the like: references may lead there.

    Args:
        schema: The value of a JSON text that holds them all.

    Raises:
        RequestError: The numbers in ``multipleOf`` are too large together.
    """
    together, waiting = 1, [schema]
    while waiting:
        found = waiting.pop()
        if isinstance(found, list):
            waiting += found
        elif isinstance(found, dict):
            multiple = found.get("multipleOf")
            if isinstance(multiple, (int, float)):
                together = math.lcm(together, _states(multiple))
                if together > _MOST_MULTIPLE:
                    raise RequestError(
                        f"multipleOf is {str(multiple)[:40]}; the least common multiple of all of them, without the "
                        f"decimal point and zeros at the end, may be at most {_MOST_MULTIPLE}."
                    )
            waiting += found.values()


def _states(multiple: float) -> int:
    """The digits of a number, without zeros at their end."""
    digits = Decimal(repr(multiple)).as_tuple().digits
    number = int("".join(map(str, digits)))
    while number and number % 10 == 0:
        number //= 10
    return number or 1  # zero and infinity are left to the library, which refuses them


def parse_json(text: str, what: str) -> Any:
    """The value of a JSON text; `what` says whose in the error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{what} is no JSON: {error}") from None
