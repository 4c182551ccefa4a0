# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, how it fails, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from nemo_build import __version__
from nemo_build.cli import cli

VERBS = [
    "bench",
    "bisect",
    "build",
    "chat",
    "check",
    "demo",
    "diff",
    "doctor",
    "export",
    "generate",
    "inspect",
    "quantize",
    "serve",
    "targets",
    "triton",
]


def run(*arguments: object, **kwargs):
    """Run in this process; the result's ``stdout`` holds what it printed."""
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False, **kwargs)


def shell(*arguments: object, **kwargs) -> subprocess.CompletedProcess[str]:
    """Run as a user would, in a process of its own."""
    words = [a if isinstance(a, bytes) else str(a) for a in arguments]
    command = [sys.executable, "-c", "from nemo_build.cli import main; main()", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)


def test_help_lists_every_verb_and_imports_nothing_heavy():
    code = (
        "import sys; from nemo_build.cli import cli; cli.main(['--help'], standalone_mode=False);"
        "heavy = {'numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'rich', 'torch', 'jinja2', 'tokenizers'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.split("Commands:\n")[1].splitlines()] == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(verb):
    assert run(verb, "--help").stdout.startswith("Usage: cli " + verb)


def test_version():
    assert __version__ in run("--version").stdout


def test_export_build_inspect(tiny_checkpoint, tmp_path):
    bundle, engine = tmp_path / "bundle", tmp_path / "engine"
    exported = json.loads(run("export", tiny_checkpoint, "-o", bundle, "--json").stdout)
    assert exported["weights"] == "link"
    assert set(exported["graphs"]) == {"target", "mtp"}
    sizes = ["--max-sequences", 2, "--max-context", 128]
    built = json.loads(run("build", bundle, "-o", engine, *sizes, "--json").stdout)
    assert built["plan"]["context"] == 128
    for path, kind in ((tiny_checkpoint, "checkpoint"), (bundle, "model bundle"), (engine, "engine")):
        report = json.loads(run("inspect", path, "--json").stdout)
        assert report["kind"] == kind
        assert report["parameters"] == exported["parameters"]
        assert "does not fit" not in run("inspect", path).stdout
    assert "2 sequences of 128 positions" in run("inspect", engine, "--verify").stdout


def test_human_output_of_export_and_build(tiny_checkpoint, tmp_path):
    text = run("export", tiny_checkpoint, "-o", tmp_path / "b").stdout
    assert "target (" in text
    assert "weights by hard links" in text
    sizes = ["--max-sequences", 3, "--max-context", 99]
    run("build", tmp_path / "b", "-o", tmp_path / "e", *sizes)
    assert "(from the build cache)" in run("build", tmp_path / "b", "-o", tmp_path / "f", *sizes).stdout


def test_doctor():
    found = json.loads(run("doctor", "--json").stdout)
    backends = {b["name"]: b["works"] for b in found["backends"]}
    assert backends["onnxruntime (cpu)"]
    assert found["versions"]["nemo-build"] == __version__
    assert "onnxruntime (cpu)" in run("doctor").stdout


def test_generate(demo_engine_directory):
    options = ["--max-tokens", 12, "--temperature", 0]
    one = run("generate", demo_engine_directory, "import os", *options)
    assert one.stdout.startswith("import os")
    several = json.loads(
        run("generate", demo_engine_directory, "import os", "def f", *options, "--json").stdout
    )
    texts = [c["prompt"] + c["text"] for c in several["completions"]]
    assert one.stdout == texts[0] + "\n"
    assert "tokens/s" in one.stderr
    assert run("generate", demo_engine_directory, *options, input="import os").stdout == one.stdout
    plain = run("generate", demo_engine_directory, "import os", "def f", *options).stdout
    assert all(text in plain for text in texts)


def test_chat(demo_engine_directory):
    lines = "What is a list?\n/reset\n\nAnd a tuple?\n/exit\nnever read\n"
    options = ["--no-thinking", "--max-tokens", 20, "--seed", 1]
    text = run("chat", demo_engine_directory, *options, input=lines).stdout
    assert "> What is a list?" in text
    assert "> And a tuple?" in text
    assert "never read" not in text
    assert "<|im_end|>" not in text
    long = run("chat", demo_engine_directory, *options, input="word " * 3000 + "\nHello?\n")
    assert "prompt 0 has" in long.stderr
    assert "> Hello?" in long.stdout


def test_demo(tmp_path):
    text = run("demo", "-o", tmp_path / "demo", "--max-tokens", 8).stdout
    for verb in ("export", "build", "inspect", "generate"):
        assert f"$ nemo-build {verb}" in text
    assert (tmp_path / "demo" / "engine" / "engine.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "/nowhere", "-o", "OUT"], "/nowhere"),
        (["build", "/nowhere", "-o", "OUT"], "not a model bundle"),
        (["generate", "/nowhere", "x"], "not an engine"),
        (["inspect", "/nowhere"], "neither a checkpoint"),
        (["generate", "ENGINE", "x", "--temperature", "-1"], "temperature"),
        (["generate", "ENGINE", ""], "prompt 0 has no tokens"),
        (["generate", "ENGINE", b"\xff"], "not UTF-8"),
        (["export", "/nowhere", "-o", "OUT/" + "x" * 300], "/nowhere"),
    ],
)
def test_mistakes_get_one_clear_message(arguments, words, demo_engine_directory, tmp_path):
    places = {"OUT": str(tmp_path / "out"), "ENGINE": str(demo_engine_directory)}
    done = shell(*(places.get(a, a) if isinstance(a, str) else a for a in arguments))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_standard_input_that_is_not_text(demo_engine_directory):
    command = [
        sys.executable,
        "-c",
        "from nemo_build.cli import main; main()",
        "generate",
        demo_engine_directory,
    ]
    done = subprocess.run(command, input=b"\xff", capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: standard input is not UTF-8")


def test_system_errors_name_the_file(tiny_checkpoint, tmp_path):
    """What the operating system refuses is told in one line, with the file."""
    (tmp_path / "file").write_text("")
    done = shell("export", tiny_checkpoint, "-o", tmp_path / "file" / "out")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert str(tmp_path / "file") in done.stderr
    done = shell("export", tiny_checkpoint, "-o", tmp_path / ("x" * 300))
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    done = shell("inspect", tmp_path / ("x" * 300))
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)


@pytest.mark.parametrize("options", [["--memory", "nan"], ["--memory", "-1"], ["--max-context", "x"]])
def test_wrong_numbers(tiny_bundle, tmp_path, options):
    assert shell("build", tiny_bundle, "-o", tmp_path / "engine", *options).returncode == 2


def test_wrong_usage_exits_with_2():
    done = shell("build")
    assert done.returncode == 2
    assert "Usage:" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_a_build_leaves_nothing(tiny_bundle, tmp_path, number):
    """The process is stopped in the middle of packing; neither output nor cache keep anything of it."""
    code = f"""
import time
from nemo_build.cli import main
from nemo_build.engines import build
def slow(*a):
    print("packing", flush=True)
    time.sleep(60)
build.write_packed = slow
main(["build", {str(tiny_bundle)!r}, "-o", {str(tmp_path / "engine")!r}])
"""
    environment = {**os.environ, "NEMO_BUILD_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "packing\n"
    time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == (143 if number == signal.SIGTERM else 130)
    assert "Traceback" not in errors
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]
    left = {p.suffix for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.name != "digests.json"}
    assert left == {".lock"}
