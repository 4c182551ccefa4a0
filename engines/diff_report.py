# SPDX-License-Identifier: Apache-2.0
"""A difference as text, and as one self-contained page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nemo_build.engines.diff import Change, Difference, TensorChange

_TEMPLATE = Path(__file__).parent / "diff.html.jinja"
_DIGEST = 64  # characters of a sha256 in hex
_SHOWN = 12  # of them that are shown


def diff_text(found: Difference) -> str:
    """The difference in lines: ``-`` only before, ``+`` only after, ``~`` changed."""
    if found.equal:
        return f"{found.before} and {found.after} are equal: {found.kind}s with the same contents."
    lines = [f"{found.kind}s: {found.before} -> {found.after}"]
    for section, changes in found.facts.items():
        lines += ["", section, *(_line(c) for c in changes)]
    for graph, changes in found.nodes.items():
        lines += ["", f"nodes of {graph}", *(_line(c) for c in changes)]
    for graph, changes in found.operations.items():
        lines += ["", f"launches of {graph}", *(_line(c) for c in changes)]
    for graph, layers in found.precisions.items():
        lines += ["", f"types multiplied in {graph}", *_lines_alike(layers)]
    if found.tensors:
        lines += ["", "tensors", *_lines_alike(found.tensors)]
    if any(c.before != c.after for c in found.formats):
        lines += ["", "bytes by format"]
        lines += [f"  {c.name}: {c.before or 0:,} -> {c.after or 0:,}" for c in found.formats]
    return "\n".join(lines)


def diff_page(found: Difference) -> str:
    """The difference as an HTML page that needs nothing else."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(found=found, shown=shown)


def shown(value: Any) -> str:
    """A value in few characters: digests shortened, ``None`` (absent) as a dash."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(shown(v) for v in value)
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    is_digest = len(text) == _DIGEST and all(c in "0123456789abcdef" for c in text)
    return f"{text[:_SHOWN]}…" if is_digest else text


def _lines_alike(changes: Iterable[TensorChange]) -> Iterator[str]:
    for c in changes:
        many = f" ({c.count})" if c.count > 1 else ""
        yield _line(Change(c.names + many, c.before or None, c.after or None))


def _line(change: Change) -> str:
    if change.before is None:
        return f"+ {change.name}: {shown(change.after)}"
    if change.after is None:
        return f"- {change.name}: {shown(change.before)}"
    return f"~ {change.name}: {shown(change.before)} -> {shown(change.after)}"
