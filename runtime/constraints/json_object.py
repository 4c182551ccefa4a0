# SPDX-License-Identifier: Apache-2.0
"""Text that is a JSON object, whatever it holds. The grammar's text means nothing."""

from __future__ import annotations

from nemo_build.runtime.constraints import json_schema
from nemo_build.runtime.constraints.vocabulary import Vocabulary

__all__ = ["grammar"]


def grammar(text: str, vocabulary: Vocabulary) -> str:
    """The library's grammar; arguments as of :func:`nemo_build.runtime.constraints.json_schema.grammar`."""
    return json_schema.grammar('{"type": "object"}', vocabulary)
