# SPDX-License-Identifier: Apache-2.0
"""Names as ranges, and checkpoints against the tensors a model needs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.errors import CheckpointError
from nemo_build.export.checkpoint import Checkpoint, TensorInfo
from nemo_build.export.ledger import Discrepancy, LedgerError, TensorRule, reconcile
from nemo_build.export.names import collapse, fill, template

Table = dict[str, TensorRule]
Found = dict[str, tuple[tuple[int, ...], str]]


def rules(experts: int = 4) -> Table:
    """A small hybrid: mamba, moe, mamba, moe."""
    table = {
        "backbone.embeddings.weight": TensorRule((96, 32), ("BF16", "F32"), "embeddings"),
        "backbone.norm_f.weight": TensorRule((32,), ("BF16", "F32"), "norm"),
        "lm_head.weight": TensorRule((96, 32), ("BF16", "F32"), "lm_head"),
    }
    for i in range(4):
        table[f"backbone.layers.{i}.norm.weight"] = TensorRule((32,), ("BF16", "F32"), "norm")
        mixer = f"backbone.layers.{i}.mixer"
        if i % 2 == 0:
            table[f"{mixer}.A_log"] = TensorRule((8,), ("BF16", "F32"), "mamba.A_log")
            table[f"{mixer}.in_proj.weight"] = TensorRule((104, 32), ("BF16",), "mamba.in_proj")
            continue
        table[f"{mixer}.gate.weight"] = TensorRule((experts, 32), ("F32",), "moe.router")
        for k in range(experts):
            table[f"{mixer}.experts.{k}.up_proj.weight"] = TensorRule((16, 32), ("BF16",), "moe.up_proj")
            table[f"{mixer}.experts.{k}.down_proj.weight"] = TensorRule((32, 16), ("BF16",), "moe.down_proj")
    return table


def sound(table: Table) -> Found:
    return {name: (rule.shape, rule.dtypes[0]) for name, rule in table.items()}


def checkpoint(found: Mapping[str, tuple[tuple[int, ...], str]]) -> Checkpoint:
    """A checkpoint with these tensors; no files, since the ledger reads none."""
    infos, offset = {}, 0
    for name, (shape, dtype) in found.items():
        size = {"BF16": 2, "F32": 4, "U8": 1, "F16": 2}[dtype]
        for dim in shape:
            size *= dim
        infos[name] = TensorInfo(name, dtype, shape, "model.safetensors", offset, size)
        offset += size
    return Checkpoint(Path("DIR"), infos, {}, "")


def golden(file: str) -> dict[str, str]:
    """The messages of a golden file: ``## name`` on a line, then the text."""
    text = (Path(__file__).parent / "golden" / file).read_text(encoding="utf-8")
    return {name: body.strip() for name, body in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", text, re.M)}


# --- ranges -----------------------------------------------------------------------------------------------

parts = st.integers(0, 12).map(str) | st.sampled_from(["a", "layers", "007", "w"])
names = st.lists(parts, min_size=1, max_size=4).map(".".join)


def expand(text: str) -> list[str]:
    """All names that a line of `collapse` stands for."""
    pieces = re.split(r"\{([^}]*)\}", text)
    sets = []
    for spec in pieces[1::2]:
        numbers: list[str] = []
        for item in spec.split(","):
            first, _, last = item.partition("..")
            numbers += map(str, range(int(first), int(last or first) + 1))
        sets.append(numbers)
    return [
        "".join(itertools.chain(*zip(pieces[::2], (*choice, ""), strict=True)))
        for choice in itertools.product(*sets)
    ]


@given(st.lists(names, max_size=40))
def test_collapse_covers_each_name_once(some: list[str]) -> None:
    lines = collapse(some)
    expanded = [name for text, _ in lines for name in expand(text)]
    assert sorted(expanded) == sorted(set(some))
    assert [len(expand(text)) for text, _ in lines] == [count for _, count in lines]


@given(st.sets(st.integers(0, 9), min_size=1), st.sets(st.integers(0, 9), min_size=1))
def test_a_product_is_one_line(layers: set[int], experts: set[int]) -> None:
    product = [f"layers.{i}.experts.{k}.w" for i in layers for k in experts]
    assert len(collapse(product)) == 1


def test_template() -> None:
    parts, numbers = template("backbone.layers.3.experts.12.w2")
    assert numbers == (3, 12)
    assert fill(parts, ["a", "b"]) == "backbone.layers.a.experts.b.w2"
    assert template("a.007") == (("a", "007"), ())
    assert collapse(["{}.1", "{}.2", ""]) == [("", 1), ("{}.{1,2}", 2)]


# --- ledgers ----------------------------------------------------------------------------------------------


def test_totals() -> None:
    table = rules()
    ledger = reconcile(checkpoint(sound(table)), table)
    assert list(ledger.entries) == list(table)
    assert ledger.bytes_by_dtype == {"BF16": ledger.nbytes - 2 * 4 * 32 * 4, "F32": 2 * 4 * 32 * 4}
    assert ledger.bytes_by_role["mamba.in_proj"] == 2 * 104 * 32 * 2
    assert ledger.parameters_by_role["moe.up_proj"] == 8 * 16 * 32
    assert sum(ledger.bytes_by_role.values()) == ledger.nbytes
    assert sum(ledger.parameters_by_role.values()) == ledger.parameters


@given(st.data())
def test_every_change_is_reported(data: st.DataObject) -> None:
    table = rules()
    found = sound(table)
    expected = set()
    for name in data.draw(st.sets(st.sampled_from(sorted(table)))):
        rule = table[name]
        shape, dtype = found.pop(name)
        change = data.draw(st.sampled_from(["missing", "wrong shape", "wrong dtype", "renamed"]))
        if change == "renamed":
            found[f"{name}_2"] = (shape, dtype)
            expected.add(("unexpected", f"{name}_2"))
        if change in ("missing", "renamed"):
            expected.add(("missing", name))
            continue
        found[name] = ((*shape, 1), dtype) if change == "wrong shape" else (shape, "U8")
        expected.add((change, name))
        assert rule.shape != found[name][0] or found[name][1] not in rule.dtypes
    shuffled = {name: found[name] for name in data.draw(st.permutations(sorted(found)))}
    if not expected:
        assert list(reconcile(checkpoint(shuffled), table).entries) == list(table)
        return
    with pytest.raises(CheckpointError) as caught:
        reconcile(checkpoint(shuffled), table)
    assert isinstance(caught.value, LedgerError)
    assert {(d.kind, d.name) for d in caught.value.details} == expected
    assert len(caught.value.details) == len(expected)
    counts = [int(m[1]) if (m := re.search(r"\((\d+) tensors\)$", p)) else 1 for p in caught.value.problems]
    assert sum(counts) == len(expected)


def test_thousands_of_missing_tensors_are_few_lines() -> None:
    table = {
        f"backbone.layers.{i}.mixer.experts.{k}.{p}.weight": TensorRule((1856, 2688), ("BF16",), "moe")
        for i in range(1, 52, 2)
        for k in range(128)
        for p in ("up_proj", "down_proj")
    }
    with pytest.raises(LedgerError) as caught:
        reconcile(checkpoint({}), table)
    assert len(caught.value.problems) == 2
    assert len(caught.value.details) == len(table)
    assert str(caught.value.details[0]) == (
        "missing: backbone.layers.1.mixer.experts.0.up_proj.weight [1856, 2688] BF16"
    )


def test_discrepancy_in_words() -> None:
    item = Discrepancy("wrong dtype", "a", "BF16 or F32", "U8")
    assert str(item) == "wrong dtype: a: expected BF16 or F32, found U8"


def _drop(found: Found, pattern: str) -> Found:
    return {name: value for name, value in found.items() if not re.search(pattern, name)}


def _rename(found: Found, pattern: str, new: str) -> Found:
    return {re.sub(pattern, new, name): value for name, value in found.items()}


def _change(found: Found, pattern: str, shape: tuple[int, ...] | None, dtype: str | None) -> Found:
    return {
        name: (shape or s, dtype or d) if re.search(pattern, name) else (s, d)
        for name, (s, d) in found.items()
    }


def _stacked(found: Found) -> Found:
    """As transformers holds them in memory."""
    kept = _rename(_drop(found, r"experts\."), r"^backbone\.", "model.")
    for i in (1, 3):
        kept[f"model.layers.{i}.mixer.experts.up_proj"] = ((4, 16, 32), "BF16")
        kept[f"model.layers.{i}.mixer.experts.down_proj"] = ((4, 32, 16), "BF16")
    return kept


SOUND = sound(rules())
BAD: dict[str, Found] = {
    "experts missing": _drop(SOUND, r"layers\.1\.mixer\.experts"),
    "some experts missing": _drop(SOUND, r"layers\.(1\.mixer\.experts\.[13]|3\.mixer\.experts\.2)\."),
    "unexpected": SOUND | {f"mtp.layers.{i}.norm.weight": ((32,), "BF16") for i in range(3)},
    "shape": _change(SOUND, r"in_proj", (104, 16), None),
    "dtype": _change(SOUND, r"norm", None, "U8"),
    "shape and dtype": _change(SOUND, r"lm_head", (48, 32), "F16"),
    "misspelt": _rename(SOUND, "embeddings", "embedding"),
    "misspelt in every layer": _rename(SOUND, "in_proj", "in_porj"),
    "names in memory": _stacked(SOUND),
    "wrapped model": _rename(SOUND, "^", "language_model."),
    "another model": {"transformer.h.0.attn.weight": ((4, 4), "F32")},
    "everything": _change(_drop(SOUND, "A_log"), r"lm_head|layers\.0\.norm", (7,), "U8")
    | {"x": ((1,), "F32")},
}


@pytest.mark.parametrize("name", BAD)
def test_golden_errors(name: str) -> None:
    with pytest.raises(LedgerError) as caught:
        reconcile(checkpoint(BAD[name]), rules())
    assert str(caught.value) == golden("ledger_errors.txt")[name]
