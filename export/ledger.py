# SPDX-License-Identifier: Apache-2.0
"""Every tensor accounted for: what a model needs against what a checkpoint holds."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from nemo_build.errors import CheckpointError
from nemo_build.export.checkpoint import Checkpoint, TensorInfo
from nemo_build.export.names import collapse, fill, template
from nemo_build.plugins.formats import INPUT_SCALE, LOW_RANK, SMOOTHING, format_of, formats

KINDS = ("missing", "unexpected", "wrong shape", "wrong dtype")


@dataclass(frozen=True)
class TensorRule:
    """What one tensor must be.

    Attributes:
        shape: Exact shape.
        dtypes: Allowed dtypes, by safetensors name.
        role: What it is in the model, such as "mamba.in_proj"; totals are kept by role.
        projection: Whether it is a projection's ``weight`` ``[N, K]``, which may be stored quantized.
        optional: Whether the checkpoint may be without it.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    role: str
    projection: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Discrepancy:
    """One tensor that is not as expected; ``expected`` or ``found`` is empty where there is none."""

    kind: str  # one of KINDS
    name: str
    expected: str
    found: str

    def line(self, name: str, count: int = 1) -> str:
        """The problem in words, for this `name` or a range of `count` names."""
        many = f" ({count} tensors)" if count > 1 else ""
        if self.expected and self.found:
            return f"{self.kind}: {name}: expected {self.expected}, found {self.found}{many}"
        return f"{self.kind}: {name} {self.expected or self.found}{many}"

    def __str__(self) -> str:
        return self.line(self.name)


class LedgerError(CheckpointError):
    """Checkpoint and model disagree. ``problems`` are written as ranges; ``details`` has each tensor."""

    def __init__(self, checkpoint: Checkpoint, details: tuple[Discrepancy, ...], hint: str) -> None:
        headline = f"{checkpoint.directory}: the tensors are not those of the configured model"
        super().__init__(headline, _collapsed(details), hint)
        self.details = details


@dataclass(frozen=True)
class Ledger:
    """A checkpoint that holds exactly the expected tensors.

    Attributes:
        entries: By tensor name: the rule and where the tensor lies, in the order of the rules.
    """

    entries: Mapping[str, tuple[TensorRule, TensorInfo]]

    @cached_property
    def parameters(self) -> int:
        """Stored elements; two FP4 values packed in a byte count as one, and scales count too."""
        return sum(math.prod(info.shape) for _, info in self.entries.values())

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(info.nbytes for _, info in self.entries.values())

    @cached_property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes by safetensors dtype, largest first."""
        return _totals((info.dtype, info.nbytes) for _, info in self.entries.values())

    @cached_property
    def bytes_by_format(self) -> dict[str, dict[str, int]]:
        """Bytes by role and by format: ``nvfp4`` or ``fp8`` with their scales, else the dtype in small letters."""
        totals: dict[str, Counter[str]] = {}
        for name, (rule, info) in self.entries.items():
            totals.setdefault(rule.role, Counter())[self._format(name, info)] += info.nbytes
        return {role: dict(counts.most_common()) for role, counts in sorted(totals.items())}

    def _format(self, name: str, info: TensorInfo) -> str:
        """The format that a tensor is a part of, or its dtype."""
        prefix, _, suffix = name.rpartition(".")
        _, weight = self.entries.get(f"{prefix}.weight", (None, info))
        stored = format_of(weight.dtype)
        if stored is None or "weight_scale" not in stored.parts((1, 1)):
            return info.dtype.lower()
        scaled = suffix == INPUT_SCALE or suffix in stored.parts((1, 1))
        return str(stored.NAME) if scaled else info.dtype.lower()

    @cached_property
    def bytes_by_role(self) -> dict[str, int]:
        """Bytes by role, largest first."""
        return _totals((rule.role, info.nbytes) for rule, info in self.entries.values())

    @cached_property
    def parameters_by_role(self) -> dict[str, int]:
        """Stored elements by role, largest first."""
        return _totals((rule.role, math.prod(info.shape)) for rule, info in self.entries.values())


def resolve_formats(
    expected: Mapping[str, TensorRule], found: Mapping[str, TensorInfo]
) -> dict[str, TensorRule]:
    """Replace the rule of each projection's weight by the rules of the tensors its stored format consists of.

    The format follows from the dtype in which the checkpoint stores ``NAME.weight``, never from what a
    configuration says of it. A dtype of no format leaves the rule as it is, to be reported.
    """
    resolved: dict[str, TensorRule] = {}
    for name, rule in expected.items():
        info = found.get(name)
        stored = format_of(info.dtype) if info is not None and rule.projection else None
        if stored is None:
            resolved[name] = rule
            continue
        prefix = name.removesuffix(".weight")
        rows, columns = rule.shape
        for suffix, part in stored.parts((rows, columns)).items():
            resolved[f"{prefix}.{suffix}"] = TensorRule(part.shape, part.dtypes, rule.role)
        if stored.ACTIVATIONS != "none":
            resolved[f"{prefix}.{INPUT_SCALE}"] = TensorRule((), ("F32",), rule.role, optional=True)
            if not _is_routed(name):
                resolved |= _beside(prefix, rule, found)
    return resolved


def _is_routed(name: str) -> bool:
    """Whether a tensor is of a routed expert. Those of a layer are inputs of one op, which takes weights only."""
    return ".experts." in name


def _beside(prefix: str, rule: TensorRule, found: Mapping[str, TensorInfo]) -> dict[str, TensorRule]:
    """What may lie beside a quantized weight: smoothing, and both factors of a low-rank term or neither."""
    rows, columns = rule.shape
    plain: tuple[str, ...] = formats()["plain"].DTYPES
    rules = {f"{prefix}.{SMOOTHING}": TensorRule((columns,), plain, rule.role, optional=True)}
    names = [f"{prefix}.{suffix}" for suffix in LOW_RANK]
    if any(name in found for name in names):
        rank = _rank([found.get(name) for name in names])
        for name, shape in zip(names, ((rank, columns), (rows, rank)), strict=True):
            rules[name] = TensorRule(shape, plain, f"{rule.role}.low_rank")
    return rules


def _rank(factors: Iterable[TensorInfo | None]) -> int:
    """The rank that the first of A ``[r, K]`` and B ``[N, r]`` has; the other is measured by it."""
    shapes = [(axis, info.shape) for axis, info in enumerate(factors) if info and len(info.shape) == 2]
    return next((shape[axis] for axis, shape in shapes if shape[axis] > 0), 1)


def reconcile(checkpoint: Checkpoint, expected: Mapping[str, TensorRule]) -> Ledger:
    """Match each expected tensor, in the format it is stored in, with the one of that name.

    Raises LedgerError (a CheckpointError) with every missing or unexpected tensor, and every wrong shape or
    dtype, if there is any.
    """
    found = checkpoint.tensors
    expected = resolve_formats(expected, found)
    details: list[Discrepancy] = []
    for name, rule in expected.items():
        info = found.get(name)
        dtypes = " or ".join(rule.dtypes)
        if info is None:
            if rule.optional:
                continue
            details.append(Discrepancy("missing", name, f"{list(rule.shape)} {dtypes}", ""))
            continue
        if info.shape != rule.shape and not (rule.shape == () and info.shape == (1,)):  # both are scalars
            details.append(Discrepancy("wrong shape", name, str(list(rule.shape)), str(list(info.shape))))
        if info.dtype not in rule.dtypes:
            details.append(Discrepancy("wrong dtype", name, dtypes, info.dtype))
    for name, info in found.items():
        if name not in expected:
            details.append(Discrepancy("unexpected", name, "", f"{list(info.shape)} {info.dtype}"))
    if details:
        details.sort(key=lambda d: KINDS.index(d.kind))
        missing = [d.name for d in details if d.kind == "missing"]
        unexpected = [d.name for d in details if d.kind == "unexpected"]
        raise LedgerError(checkpoint, tuple(details), _hint(missing, unexpected))
    return Ledger({name: (rule, found[name]) for name, rule in expected.items() if name in found})


def _totals(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for key, amount in pairs:
        totals[key] += amount
    return dict(totals.most_common())


def _collapsed(details: Iterable[Discrepancy]) -> list[str]:
    """One line for each run of numbered names with the same discrepancy."""
    groups: dict[tuple[str, str, str], list[Discrepancy]] = {}
    for item in details:
        groups.setdefault((item.kind, item.expected, item.found), []).append(item)
    rows = [
        (KINDS.index(kind), text, items[0].line(text, count))
        for (kind, _, _), items in groups.items()
        for text, count in collapse(item.name for item in items)
    ]
    return [line for _, _, line in sorted(rows)]


def _hint(missing: list[str], unexpected: list[str]) -> str:
    """What probably happened, if names of the two lists resemble each other or say it themselves."""
    if any(_is_routed(n) and n.endswith((SMOOTHING, *LOW_RANK)) for n in unexpected):
        return "Routed experts have neither smoothing nor low-rank terms: quantize them without."
    if not missing or not unexpected:
        return ""
    prefix = _renamed_prefix(missing, unexpected)
    if prefix:
        was, should = prefix
        text = f'Names begin with "{was}"' + (
            f' where "{should}" is expected.' if should else ", which must go."
        )
        if was == "model.":
            text += (
                " These are the names transformers uses in memory: write the checkpoint with"
                " model.save_pretrained(), which restores the stored names and splits stacked experts."
            )
        return text
    wanted = {fill(parts, ["#"] * len(numbers)): parts for parts, numbers in map(template, missing)}
    pairs = []
    for parts, numbers in dict(map(template, reversed(unexpected))).items():
        near = difflib.get_close_matches(fill(parts, ["#"] * len(numbers)), wanted, n=1, cutoff=0.85)
        if near and wanted[near[0]].count(None) == len(numbers):
            texts = [str(number) for number in numbers]
            pairs.append(f"{fill(parts, texts)} for {fill(wanted[near[0]], texts)}")
    return f"Misspelt? {'; '.join(sorted(pairs)[:5])}." if pairs else ""


def _renamed_prefix(missing: list[str], unexpected: list[str]) -> tuple[str, str] | None:
    """The most common (prefix found, prefix expected) if most unexpected names differ by a prefix only."""
    heads: dict[str, str] = {}
    for name in missing:
        head, _, tail = name.partition(".")
        heads[tail] = head + "."
        heads[name] = ""
    renamed: Counter[tuple[str, str]] = Counter()
    for name in unexpected:
        head, _, tail = name.partition(".")
        if tail and tail in heads:
            renamed[head + ".", heads[tail]] += 1
    if not renamed:
        return None
    pair, count = renamed.most_common(1)[0]
    return pair if 2 * count >= len(unexpected) and count > 1 else None
