# SPDX-License-Identifier: Apache-2.0
"""``nemo-build check`` and ``nemo-build bisect`` on the demo engine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jsonschema
import numpy as np
import onnx
import pytest
import yaml
from click.testing import CliRunner, Result

from nemo_build.cli import cli
from nemo_build.engines.check.baseline import today
from nemo_build.engines.check.reports import SCHEMA
from nemo_build.engines.check.subject import Subject
from nemo_build.runtime.engine import Engine
from nemo_build.runtime.params import SamplingParams

from .faults import copy_engine, edit_graph, edit_tensor, kv_off_by_one, larger_file, set_attribute, sign

LIGHT = """
checks:
  provenance: {}
  structure: {}
  size: {}
  numerics: {sequences: 2, tokens: 32, every: 4}
"""
DAY = today().isoformat()


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def light(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("suite") / "light.yaml"
    path.write_text(LIGHT)
    return path


@pytest.fixture
def recorded(demo_engine_directory, light, tmp_path) -> list[object]:
    """Arguments of a check whose baseline was recorded."""
    options: list[object] = ["--suite", light, "--baseline", tmp_path / "baselines", "--speculate", "none"]
    done = invoke("check", demo_engine_directory, *options, "--record")
    assert done.exit_code == 0, done.output
    return options


def test_a_good_engine_passes(demo_engine_directory, recorded, tmp_path):
    files = {name: tmp_path / f"report.{name}" for name in ("json", "junit", "markdown", "html")}
    options = [part for name, path in files.items() for part in (f"--{name}", path)]
    done = invoke("check", demo_engine_directory, *recorded, *options)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("pass: engine")
    report = json.loads(files["json"].read_text())
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    assert [r["check"] for r in report["results"]] == ["provenance", "structure", "size", "numerics"]
    assert report["facts"]["changes"] == []
    assert files["junit"].read_text().startswith("<?xml")
    assert files["markdown"].read_text().startswith("### ")
    assert "<svg" in files["html"].read_text()


def test_baselines_are_small_text(recorded, tmp_path):
    files = list((tmp_path / "baselines").iterdir())
    assert [f.suffix for f in files] == [".yaml"]
    assert files[0].stat().st_size < 64 << 10
    assert max(map(len, files[0].read_text().splitlines())) < 200
    data = yaml.safe_load(files[0].read_text())
    assert data["key"]["target"] == "cpu"
    assert data["history"][0]["why"] == "first record"


def test_a_regression(demo_engine_directory, recorded, tmp_path):
    engine = copy_engine(demo_engine_directory, tmp_path / "engine")
    larger_file(engine, None)
    done = invoke("check", engine, *recorded)
    assert done.exit_code == 1
    assert "likely cause: file weights.bin grew" in done.output


def test_damage_is_broken(demo_engine_directory, recorded, tmp_path):
    engine = copy_engine(demo_engine_directory, tmp_path / "engine")
    (engine / "weights.bin").write_bytes(b"")
    done = invoke("check", engine, *recorded)
    assert done.exit_code == 2
    assert "should have" in done.output
    assert invoke("check", tmp_path / "nothing", *recorded).exit_code == 2


def test_a_check_that_fails_is_broken(demo_engine_directory, recorded, monkeypatch):
    from nemo_build.engines.check.checks import size

    monkeypatch.setattr(size, "measure", lambda *_: 1 / 0)
    done = invoke("check", demo_engine_directory, *recorded)
    assert done.exit_code == 2
    assert "ZeroDivisionError" in done.output
    assert "pass     numerics" in done.output


def test_nothing_recorded_is_skipped(demo_engine_directory, light, tmp_path):
    done = invoke("check", demo_engine_directory, "--suite", light, "--baseline", tmp_path)
    assert done.exit_code == 3
    assert "skipped  numerics" in done.output
    assert "--record" in done.output


def test_an_engine_of_another_kind_is_skipped(demo_engine_directory, recorded):
    options = [v if v != "none" else "mtp" for v in recorded]
    done = invoke("check", demo_engine_directory, *options)
    assert done.exit_code == 3
    assert "engines of other kinds that were: cpu.onnxruntime" in done.output


def test_other_settings_than_recorded(demo_engine_directory, recorded, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(LIGHT.replace("tokens: 32", "tokens: 40"))
    done = invoke("check", demo_engine_directory, *recorded, "--suite", other)
    assert done.exit_code == 2
    assert "tokens was 32, is 40" in done.output


def test_unlike_machines_are_not_compared(demo_engine_directory, tmp_path, monkeypatch):
    from nemo_build.engines.check import run

    options = ["--baseline", tmp_path, "--only", "memory", "--speculate", "none"]
    assert invoke("check", demo_engine_directory, *options, "--record").exit_code == 0
    there = run.machine()
    monkeypatch.setattr(run, "machine", lambda: {**there, "cpus": 3 + there["cpus"], "gpus": ["Big, 1.0"]})
    done = invoke("check", demo_engine_directory, *options)
    assert done.exit_code == 3
    assert "unlike machines are not compared" in done.output
    assert f"cpus there is {there['cpus']}, here {3 + there['cpus']}" in done.output
    assert "gpus there is [], here ['Big, 1.0']" in done.output


def test_update_shows_what_changes(demo_engine_directory, recorded, tmp_path):
    engine = copy_engine(demo_engine_directory, tmp_path / "engine")
    change_epsilon(engine)
    larger_file(engine, None)
    assert invoke("check", engine, *recorded, "--update").exit_code == 2
    done = invoke("check", engine, *recorded, "--update", "--why", "it must be larger")
    assert done.exit_code == 0, done.output
    assert "size.bytes" in done.output
    assert "nodes changed (ops, inputs or constants): target/norm_f" in done.output
    assert invoke("check", engine, *recorded).exit_code == 0
    report = tmp_path / "report.json"
    invoke("check", engine, *recorded, "--json", report)
    history = json.loads(report.read_text())["facts"]["baseline"]["history"]
    assert [e["why"] for e in history] == ["first record", "it must be larger"]


def change_epsilon(engine: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        set_attribute(next(n for n in graph.node if n.name == "norm_f"), "epsilon", 1.1e-5)

    edit_graph(engine, "target", change)


def test_record_adds_what_is_missing_only(demo_engine_directory, recorded, tmp_path):
    done = invoke("check", demo_engine_directory, *recorded, "--record")
    assert done.exit_code == 2
    assert "--update" in done.output
    more = tmp_path / "more.yaml"
    more.write_text(LIGHT + "  quality: {documents: 2, tokens: 20}\n")
    before = next((tmp_path / "baselines").iterdir()).read_text()
    assert invoke("check", demo_engine_directory, *recorded, "--suite", more, "--record").exit_code == 0
    after = yaml.safe_load(next((tmp_path / "baselines").iterdir()).read_text())
    assert after["checks"]["numerics"] == yaml.safe_load(before)["checks"]["numerics"]
    assert set(after["checks"]) - set(yaml.safe_load(before)["checks"]) == {"quality"}


def test_an_engine_that_fails_by_itself_is_not_recorded(demo_engine_directory, light, tmp_path):
    engine = copy_engine(demo_engine_directory, tmp_path / "engine")

    def change(data: np.ndarray) -> None:
        data[0] ^= 1

    edit_tensor(engine, "mtp.layers.0.eh_proj.weight.panels", change, signed=False)
    done = invoke("check", engine, "--suite", light, "--baseline", tmp_path / "b", "--record")
    assert done.exit_code == 2
    assert "damaged files is weights.bin" in done.output
    assert not (tmp_path / "b").exists()


def test_waivers(demo_engine_directory, recorded, tmp_path):
    engine = copy_engine(demo_engine_directory, tmp_path / "engine")
    larger_file(engine, None)
    options = [*recorded, "--why", "known"]
    assert invoke("check", *options, "--waive", "siez", "--expires", DAY).exit_code == 2
    assert invoke("check", *options, "--waive", "size", "--expires", "2020-01-01").exit_code == 2
    assert invoke("check", *options, "--waive", "size", "--expires", DAY).exit_code == 0
    done = invoke("check", engine, *recorded)
    assert done.exit_code == 0
    assert "(waived: size)" in done.output
    unused = invoke("check", demo_engine_directory, *recorded)
    assert unused.exit_code == 0
    assert "the waiver of size waives nothing" in unused.output
    path = tmp_path / "baselines" / "waivers.yaml"
    path.write_text(path.read_text().replace(DAY, "2020-01-01"))
    for subject in (engine, demo_engine_directory):
        expired = invoke("check", subject, *recorded)
        assert expired.exit_code == 1
        assert "the waiver of size expired on 2020-01-01: known" in expired.output


@pytest.mark.parametrize(
    "options",
    [
        ["--record", "--update", "--why", "x"],
        ["--update"],
        ["--update", "--why", " "],
        ["--waive", "size", "--why", "x"],
        ["--waive", "size", "--expires", DAY],
        ["--why", "x"],
        ["--expires", DAY],
        ["--only", "speling"],
        ["--suite", "/nowhere/suite.yaml"],
        ["--speculate", "magic"],
        ["--json", "/nowhere/report.json"],
    ],
)
def test_wrong_usage_is_no_verdict(demo_engine_directory, tmp_path, options):
    assert invoke("check", demo_engine_directory, "--baseline", tmp_path, *options).exit_code == 2


def test_engine_is_needed():
    assert invoke("check").exit_code == 2


def test_backend_that_cannot_run_here_is_skipped(demo_engine_directory, monkeypatch):
    from nemo_build.engines import backends
    from nemo_build.engines.check.checks import Skip
    from nemo_build.errors import BundleError

    def refuse(*_: object) -> None:
        raise BundleError("It needs a GPU.")

    monkeypatch.setattr(backends, "require_runnable", refuse)
    with pytest.raises(Skip, match="needs a GPU"):
        Subject(demo_engine_directory).engine()


def test_help_imports_nothing_heavy():
    code = """
import sys
from nemo_build.cli import main
for verb in ("check", "bisect"):
    try:
        main([verb, "--help"])
    except SystemExit:
        pass
print([m for m in ("numpy", "onnx", "onnxruntime", "yaml", "rich", "jinja2") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]"), done.stdout


# --- bisect -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(demo_engine_directory) -> Path:
    return demo_engine_directory.parent / "bundle"


def test_bisect_finds_nothing_in_equals(demo_engine_directory, bundle):
    done = invoke("bisect", demo_engine_directory, demo_engine_directory, "--tolerance", 0, "--json")
    assert done.exit_code == 0
    found = json.loads(done.output)
    assert found["first"] is None
    assert len(found["steps"]) > 150
    done = invoke("bisect", bundle, demo_engine_directory)
    assert done.exit_code == 0, done.output
    assert "nothing differs" in done.output


def test_bisect_finds_the_op(demo_engine_directory, bundle, tmp_path):
    engine = copy_engine(demo_engine_directory, tmp_path / "engine")

    def change(graph: onnx.GraphProto) -> None:
        set_attribute(next(n for n in graph.node if n.name == "backbone.layers.5/scan"), "dt_max", 0.01)

    edit_graph(engine, "target", change)
    for before in (demo_engine_directory, bundle):
        done = invoke("bisect", before, engine, "--json")
        assert done.exit_code == 1
        found = json.loads(done.output)
        assert found["first"]["name"] == found["source"]["name"] == "backbone.layers.5/scan:0"
        assert found["first"]["op"] == "nemo.SelectiveScan"
    assert "-> " in invoke("bisect", bundle, engine, "--text", "def f():").output


def test_bisect_tells_from_which_token(demo_engine_directory, tmp_path):
    engine = copy_engine(demo_engine_directory, tmp_path / "engine")
    kv_off_by_one(engine, None)
    found = json.loads(
        invoke("bisect", demo_engine_directory, engine, "--tokens", "5,6,7,8", "--json").output
    )
    assert found["tokens"] == [5, 6, 7, 8]
    assert found["first"]["name"] == "backbone.layers.3/attention:0"
    assert found["first"]["position"] == 0


def test_bisect_of_the_mtp_graph(demo_engine_directory, tmp_path):
    engine = copy_engine(demo_engine_directory, tmp_path / "engine")
    edit_tensor(engine, "mtp.layers.0.eh_proj.weight.panels", lambda data: data.fill(0))
    assert invoke("bisect", demo_engine_directory, engine).exit_code == 0
    done = invoke("bisect", demo_engine_directory, engine, "--graph", "mtp", "--json")
    assert json.loads(done.output)["first"]["name"] == "eh_proj"


def test_bisect_of_what_cannot_be_compared(demo_engine_directory, tmp_path):
    engine = copy_engine(demo_engine_directory, tmp_path / "engine")
    manifest = json.loads((engine / "engine.json").read_text())
    sign(engine, backend={"name": "tensorrt-rtx"})
    for options, problem in (
        ((engine,), "ONNX graphs for the CPU only"),
        ((tmp_path,), "neither an engine nor a model bundle"),
        ((demo_engine_directory, "--graph", "mtpp"), "no graph"),
        ((demo_engine_directory, "--graph", "dflash_context"), "nothing to put into taps"),
        ((demo_engine_directory, "--tokens", "1,x"), "whole numbers"),
        ((demo_engine_directory, "--tokens", "999999"), "not all within"),
        ((demo_engine_directory, "--tokens", "1", "--text", "a"), "say the same"),
    ):
        done = invoke("bisect", demo_engine_directory, *options)
        assert done.exit_code == 2, (options, done.output)
        assert problem in done.output
    spec = {**manifest["spec"], "vocab_size": 7}
    sign(engine, spec=spec)
    assert "different models" in invoke("bisect", demo_engine_directory, engine).output


# --- lm-eval ----------------------------------------------------------------------------------------------------


@pytest.fixture
def harness(monkeypatch) -> ModuleType:
    """The adapter, with lm-eval's documented base class in the place of lm-eval where that is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        names = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.tasks")
        modules = {name: ModuleType(name) for name in names}
        vars(modules["lm_eval"])["simple_evaluate"] = None
        vars(modules["lm_eval.api.model"])["LM"] = type("LM", (), {})
        vars(modules["lm_eval.tasks"])["TaskManager"] = None
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "nemo_build.engines.check.harness", raising=False)
    from nemo_build.engines.check import harness

    return harness


def request(*arguments: object) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


def test_likelihoods(harness, demo_engine_directory):
    engine = Engine.load(demo_engine_directory)
    model = harness.EngineModel(engine)
    text = "def read(path):\n    return path"
    (whole,) = model.loglikelihood_rolling([request(text)])
    tokens = engine.tokenizer.encode(text, add_special_tokens=True)
    cut = engine.tokenizer.decode(tokens[:1], skip_special_tokens=False)
    ((rest, greedy), (unlikely, _)) = model.loglikelihood(
        [request(cut, text[len(cut) :]), request(cut, " zebra zebra")]
    )
    assert rest == pytest.approx(whole, rel=1e-5)
    assert not greedy
    assert unlikely < 0
    (answer,) = model.generate_until([request("def read(path):\n", {"until": ["("], "max_gen_toks": 12})])
    assert "(" not in answer
    assert len(answer) > 0


def test_what_greedy_decoding_gives(harness, demo_engine_directory):
    engine = Engine.load(demo_engine_directory)
    context = "def read(path):"
    answer = engine.generate([context], SamplingParams(max_tokens=1, temperature=0))[0].text
    model = harness.EngineModel(engine)
    ((_, greedy), (_, other)) = model.loglikelihood([request(context, answer), request(context, "zebra")])
    assert greedy
    assert not other


def test_outcomes_must_be_zero_or_one(harness):
    from nemo_build.errors import UserError

    samples = [{"doc_id": 1, "acc": 0.0}, {"doc_id": 0, "acc": 1.0}]
    assert harness._outcomes("t", samples, "acc") == "10"
    with pytest.raises(UserError, match="it has acc"):
        harness._outcomes("t", samples, "f1")


def test_tasks_without_lm_eval_are_skipped(demo_engine_directory, monkeypatch):
    from nemo_build.engines.check.checks import Skip, tasks
    from nemo_build.errors import UserError

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    subject = Subject(demo_engine_directory)
    with pytest.raises(Skip, match=r"nemo-build\[lm-eval\]"):
        tasks.measure(subject, tasks.Settings(tasks=("arc_easy",)))
    with pytest.raises(UserError, match="no tasks"):
        tasks.measure(subject, tasks.Settings())


TASK = """
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{c}}}}"
doc_to_target: "{{{{a}}}}"
metric_list:
  - metric: acc
metadata:
  version: 1
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_a_task_of_lm_eval(demo_engine_directory, tmp_path, monkeypatch):
    """A task of files alone, so that nothing is fetched; the engine passes, and one that knows less does not."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data.jsonl"
    lines = [{"q": f"def f{i}(x):\n    return", "c": ["x\n", "i\n"], "a": int(i % 5 == 4)} for i in range(24)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "task.yaml").write_text(TASK.format(data=data))
    suite = tmp_path / "suite.yaml"
    suite.write_text(f"checks:\n  tasks: {{tasks: [{tmp_path / 'task.yaml'}], limit: 20}}\n")
    options = ["--suite", suite, "--baseline", tmp_path / "baselines"]
    assert invoke("check", demo_engine_directory, *options, "--record").exit_code == 0
    (record,) = (tmp_path / "baselines").iterdir()
    found = yaml.safe_load(record.read_text())["checks"]["tasks"]["found"]
    assert found == {"local_choice": "11110" * 4}
    assert invoke("check", demo_engine_directory, *options).exit_code == 0
    engine = copy_engine(demo_engine_directory, tmp_path / "engine")

    def negate(data: np.ndarray) -> None:
        data.view(np.uint16)[:] ^= 0x8000  # bfloat16

    edit_tensor(engine, "lm_head.weight.panels", negate)
    done = invoke("check", engine, *options)
    assert done.exit_code == 1, done.output
    assert "worse at local_choice" in done.output
