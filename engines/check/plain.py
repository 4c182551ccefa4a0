# SPDX-License-Identifier: Apache-2.0
"""Plain data that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """The same with lists for tuples, and with words (``nan``, ``inf``) for numbers that JSON has none for."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value
