# SPDX-License-Identifier: Apache-2.0
"""Texts to calibrate on: files, and data sets of the real ``datasets`` library."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from nemo_build.bundle import sha256_file
from nemo_build.cli import cli
from nemo_build.demo import CHECKPOINT
from nemo_build.errors import UserError
from nemo_build.export.quantize.calibration import read_texts
from nemo_build.export.quantize.texts import open_texts


def write_rows(path: Path, **columns: list) -> None:
    """A parquet file."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


@pytest.fixture
def dataset(tmp_path) -> Path:
    """A directory with two splits, the first in two files."""
    directory = tmp_path / "dataset"
    write_rows(directory / "train-0.parquet", text=["one", "two"], article=["a", "b"])
    write_rows(directory / "train-1.parquet", text=["three"], article=["c"])
    write_rows(directory / "validation-0.parquet", text=["four"], article=["d"])
    return directory


def test_calibration_texts(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert read_texts(tmp_path / "a.jsonl") == ["one", "two"]
    (tmp_path / "u.jsonl").write_text('{"text": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert read_texts(tmp_path / "u.jsonl") == ["a\u2028b\u0085c"]
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(UserError, match="cannot be used"):
        read_texts(tmp_path / "empty.txt")
    (tmp_path / "b.txt").write_text("one\nline\n\ntwo\n\n\n")
    assert [t.strip() for t in read_texts(tmp_path / "b.txt")] == ["one\nline", "two"]
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n[]\n{"x": 1}\n')
    with pytest.raises(UserError) as caught:
        read_texts(tmp_path / "c.jsonl")
    assert len(caught.value.problems) == 2
    with pytest.raises(UserError, match="cannot be read"):
        read_texts(tmp_path / "none")


def test_splits_and_columns_of_a_directory(dataset):
    assert list(open_texts(str(dataset)).texts) == ["one", "two", "three"]
    found = open_texts(f"{dataset}:validation,column=article")
    assert list(found.texts) == ["d"]
    assert found.name == f"{dataset}:validation,column=article"
    identity = dict(found.dataset)
    assert identity.pop("fingerprint")
    wanted = {"name": str(dataset), "split": "validation", "config": "default", "column": "article"}
    assert identity == {**wanted, "revision": None}


def test_configurations_of_a_directory(dataset):
    """A data set whose card declares configurations."""
    card = "---\nconfigs:\n- {config_name: a, data_files: train-0.parquet}\n"
    card += "- {config_name: b, data_files: train-1.parquet}\n---\n"
    (dataset / "README.md").write_text(card)
    found = open_texts(f"{dataset},config=b")
    assert (list(found.texts), found.dataset["config"]) == (["three"], "b")
    with pytest.raises(UserError, match="cannot be opened") as caught:
        open_texts(str(dataset))
    assert "Config name is missing" in caught.value.problems[0]


def test_tables_and_directories_of_lines(tmp_path):
    (tmp_path / "table.csv").write_text("text,n\nhello,1\nworld,2\n")
    table = open_texts(str(tmp_path / "table.csv"))
    assert list(table.texts) == ["hello", "world"]
    assert table.dataset["fingerprint"] == sha256_file(tmp_path / "table.csv")
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_text(
        '{"text": "one", "body": "x"}\n{"text": "two", "body": "y"}\n'
    )
    assert list(open_texts(str(tmp_path / "lines")).texts) == ["one", "two"]
    lines = tmp_path / "lines" / "a.jsonl"
    assert open_texts(str(lines)).dataset is None
    assert list(open_texts(f"{lines},column=body").texts) == ["x", "y"]


def test_no_more_is_read_than_is_used(dataset):
    """The second file is damaged; the texts of the first are there all the same."""
    (dataset / "train-1.parquet").write_bytes(b"PAR1 not a table")
    texts = iter(open_texts(str(dataset)).texts)
    assert [next(texts), next(texts)] == ["one", "two"]
    with pytest.raises(UserError, match="cannot be read"):
        next(texts)


OPTIONS = "config, column, revision"
WRONG = {
    "unknown option": (
        ",colum=text,config",
        ["'colum' is not one of config, column, revision", "'config' has no value"],
    ),
    "no such split": (":test", ["Bad split: test. Available splits: ['train', 'validation']"]),
    "no such configuration": (",config=x", ["BuilderConfig 'x' not found. Available: ['default']"]),
    "no such column": (",column=body", ["text is str", "article is str"]),
}


@pytest.mark.parametrize(("suffix", "problems"), WRONG.values(), ids=WRONG)
def test_data_sets_that_cannot_be_used(dataset, suffix, problems):
    with pytest.raises(UserError) as caught:
        list(open_texts(f"{dataset}{suffix}").texts)
    assert list(caught.value.problems) == problems


def test_data_sets_that_are_not_there(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no/such-set is not a text file") as caught:
        open_texts("no/such-set:train")
    assert "no/such-set" in caught.value.problems[0]
    with pytest.raises(UserError, match=r"missing\.jsonl cannot be read"):
        open_texts(str(tmp_path / "missing.jsonl"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError) as caught:
        open_texts("no/such-set")
    assert caught.value.hint == "pip install 'nemo-build[quantize]'"


def test_command_line_with_a_data_set(dataset, tmp_path):
    """The report says which data set it was; the same texts from a file have the same digest."""
    (tmp_path / "same.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    reports = []
    for name, calib in (("a", f"{dataset}:train"), ("b", str(tmp_path / "same.jsonl"))):
        options = ["--recipe", "fp8", "--calib", calib, "--calib-samples", "2"]
        options += ["--eval", f"{dataset}:validation"]
        command = ["quantize", str(CHECKPOINT), "-o", str(tmp_path / name), *options]
        CliRunner().invoke(cli, command, catch_exceptions=False)
        reports.append(json.loads((tmp_path / name / "quant_report.json").read_text()))
    first, second = (report["calibration"] for report in reports)
    assert first["digest"] == second["digest"]
    assert (first["dataset"]["split"], second["dataset"]) == ("train", None)
    assert reports[1]["evaluation"]["dataset"]["split"] == "validation"
    assert first["dataset"]["fingerprint"] in (tmp_path / "a" / "quant_report.html").read_text()
