# SPDX-License-Identifier: Apache-2.0
"""What docs/extending.md adds, section by section, is added to a copy of the package, and works there.

A block whose first line names a file is that file, or, ``behind`` a line of a file, goes in there. Blocks of commands
are run. What else is to hold of a section is below.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from nemo_build.cli import cli

from .docs_pages import ROOT, Block, blocks, words

PAGE = "docs/extending.md"
FOLDERS = ("export", "plugins", "engines", "runtime", "triton_repo", "deploy")
FILE = re.compile(r"(?:#|//) ([\w./-]+)(?:, behind `(.+)`)?:\n")


class Copy:
    """The package, made of links into the repository; what is added to it is not.

    Args:
        root: Where.
        shared: A directory with a bundle and an engine.
    """

    def __init__(self, root: Path, shared: Path) -> None:
        self.root, self.work = root / "copy", root / "work"
        package = self.root / "nemo_build"
        package.mkdir(parents=True)
        for path in [*(ROOT / "nemo_build").iterdir(), *(ROOT / f for f in FOLDERS)]:
            (package / path.name).symlink_to(path)
        self.work.mkdir()
        for name in ("bundle", "engine"):
            (self.work / name).symlink_to(shared / name)

    def add(self, block: Block) -> None:
        """Do what a block with a file's name says."""
        match = FILE.match(block.text)
        assert match, f"{block.place} names no file"
        name, text = match[1], block.text[match.end() :] + "\n"
        if "/" not in name:
            (self.work / name).write_text(text)
            return
        path = self.root / "nemo_build" / name.removeprefix("nemo_build/")
        self._own(path.parent)
        if match[2] is None:
            assert not path.exists(), f"{block.place}: {name} is there already"
            path.write_text(text)
            return
        old = path.read_text()
        assert old.count(f"{match[2]}\n") == 1, f"{block.place}: {name} has no line {match[2]!r}"
        path.unlink()  # a link into the repository, or what a block before has made of it
        path.write_text(old.replace(f"{match[2]}\n", f"{match[2]}\n{text}"))

    def own_files(self, folder: str) -> Path:
        """A folder of the package whose entries are this copy's own links."""
        path = self.root / "nemo_build" / folder
        self._own(path)
        return path

    def _own(self, folder: Path) -> None:
        """Make a folder one of this copy, and those above it."""
        if folder == self.root / "nemo_build":
            return
        self._own(folder.parent)
        if folder.is_symlink():
            original = folder.resolve()
            folder.unlink()
            folder.mkdir()
            for entry in original.iterdir():
                if entry.name != "__pycache__":
                    (folder / entry.name).symlink_to(entry)
        else:
            folder.mkdir(exist_ok=True)

    def run(self, *command: str, expect: tuple[int, ...] = (0,)) -> str:
        """Run something with this copy; returns what it printed."""
        variables = {**os.environ, "PYTHONPATH": f"{self.root}:{ROOT}"}
        done = subprocess.run(
            command, cwd=self.work, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode in expect, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def nemo_build(self, *lines: str, expect: tuple[int, ...] = (0,)) -> list[str]:
        """Run command lines of the page in one process, up to the first that fails; returns what each printed."""
        demo = str(ROOT / "nemo_build/demo/checkpoint")
        arguments = [[demo if w == "CHECKPOINT" else w for w in words(line)[1:]] for line in lines]
        printed: list[str] = json.loads(self.python(_RUN, json.dumps(arguments), expect=expect))
        return printed

    def python(self, code: str, *arguments: str, **how) -> str:
        """Run Python."""
        return self.run(sys.executable, "-c", code, *arguments, **how)


_RUN = """
import json, sys
from click.testing import CliRunner
from nemo_build.cli import cli
printed = []
for line in json.loads(sys.argv[1]):
    done = CliRunner().invoke(cli, line)
    printed.append(done.output if done.exit_code == 0 else f"{done.output}{done.exception!r}")
    if done.exit_code:
        break
print(json.dumps(printed))
sys.exit(done.exit_code)
"""


def sections() -> dict[str, list[Block]]:
    """The page's blocks by heading."""
    lines = (ROOT / PAGE).read_text(encoding="utf-8").splitlines()
    found: dict[str, list[Block]] = {}
    for block in blocks():
        if block.page == PAGE:
            above = [line for line in lines[: block.line] if line.startswith("## ")]
            found.setdefault(above[-1][3:], []).append(block)
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    from nemo_build.demo import CHECKPOINT
    from nemo_build.engines.build import BuildOptions, build_engine
    from nemo_build.export.exporter import export_bundle

    directory = tmp_path_factory.mktemp("extending")
    export_bundle(CHECKPOINT, directory / "bundle")
    build_engine(directory / "bundle", directory / "engine", options=BuildOptions(max_sequences=2))
    return directory


@pytest.fixture
def follow(shared, tmp_path):
    """Follow a section: add what it adds, then run its commands; gives the copy and what commands printed."""

    def follow_section(heading: str) -> tuple[Copy, list[str]]:
        copy, lines = Copy(tmp_path, shared), []
        for block in sections()[heading]:
            if block.language == "sh":
                lines += [_quick(line) for line in block.commands()]
            else:
                copy.add(block)
        return copy, copy.nemo_build(*lines) if lines else []

    return follow_section


def _quick(line: str) -> str:
    """A command with options that make it quick."""
    quick = " --calib-samples 2 --calib-length 64 --no-evaluate"
    return line + quick if "quantize" in line else line


def test_an_op(follow, shared):
    """Its body computes what NumPy does, a model with it runs, and the lowerings for GPUs are found."""
    copy, _ = follow("An op")
    copy.python(_OP)
    generate = "nemo-build generate {} 'import os' --max-tokens 12 --temperature 0"
    (*_, capped) = copy.nemo_build(
        "nemo-build export CHECKPOINT -o capped",
        "nemo-build build capped -o plain --weights plain",
        generate.format("plain"),
    )
    assert copy.python(_LAST).strip() == "SoftCap"
    uncapped = CliRunner().invoke(cli, ["generate", str(shared / "engine"), *words(generate)[3:]]).output
    assert capped.splitlines()[:-1] == uncapped.splitlines()[:-1], (
        "below a cap, the likeliest token is the same"
    )
    assert "signatures of the ops" in copy.nemo_build(generate.format("engine"), expect=(1,))[0]


_OP = """
import numpy as np, onnx, onnxruntime
from nemo_build.engines.gpu.ops import kernel_modules
from nemo_build.engines.trt.emitter import Emitter
from nemo_build.engines.trt.ops import Context, op_modules
from nemo_build.plugins.registry import plugins_by_name
from tests.op_models import run_function

x = np.linspace(-40, 40, 60, dtype=np.float32).reshape(3, 4, 5)
want = plugins_by_name()["SoftCap"].reference(x, cap=8.0)
np.testing.assert_allclose(run_function("SoftCap", [x], {"cap": 8.0})[0], want, atol=1e-5)
node = onnx.helper.make_node("SoftCap", ["x"], ["y"], domain="nemo", cap=8.0)
for lower in (op_modules()["SoftCap"].lower, lambda c, n: kernel_modules()["SoftCap"].lower(None, c, n)):
    c = Context(Emitter(), None, None, {}, ())
    lower(c, node)
    info = [onnx.helper.make_tensor_value_info(n, 1, [None] * 3) for n in "xy"]
    graph = onnx.helper.make_graph(c.g.nodes, "g", info[:1], info[1:], c.g.constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    np.testing.assert_allclose(session.run(None, {"x": x})[0], want, atol=1e-5)
"""

_LAST = """
import json, onnx
file = json.load(open("plain/engine.json"))["graphs"]["target"]["file"]
nodes = onnx.load(f"plain/{file}", load_external_data=False).graph.node
print(*(n.op_type for n in nodes if n.output[0] == "logits"))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_an_ops_kernel(follow):
    """``cpu.cc`` compiles as it is, computes what NumPy does, and an engine with packed weights runs it."""
    copy, _ = follow("An op")
    native = copy.own_files("plugins/native")
    for old in native.glob("_*.so"):
        old.unlink()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    plugins = copy.root / "nemo_build" / "plugins"
    sources = sorted(map(str, [*plugins.glob("*/cpu.cc"), *native.glob("*.cc")]))
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=off"]
    copy.run("g++", *flags, f"-I{ROOT / 'plugins/native'}", *sources, "-o", str(native / f"_plain{suffix}"))
    copy.python(_OP.replace('{"cap": 8.0})[0]', '{"cap": 8.0}, instruction_set="plain")[0]'))
    copy.nemo_build(
        "nemo-build export CHECKPOINT -o capped",
        "nemo-build build capped -o packed --weights packed",
        "nemo-build generate packed 'import os' --max-tokens 4",
    )


@pytest.mark.slow
def test_an_op_in_a_plan(follow):
    """TensorRT-RTX takes a graph with it."""
    pytest.importorskip("tensorrt_rtx")
    copy, _ = follow("An op")
    copy.nemo_build(
        "nemo-build export CHECKPOINT -o capped",
        "nemo-build build capped -o plans --target rtx-50 --phases decode --max-sequences 2",
    )


def test_a_target(follow):
    _, (table, plan) = follow("A target")
    assert re.search(
        r"^l4 +L4 +89 +24 GB +300 GB/s .*tensorrt-rtx, tensorrt, onnxruntime-cuda", table, re.MULTILINE
    )
    assert plan.startswith("l4: L4, 300 GB/s.")


def test_a_recipe(follow):
    """It is taken from where it lies, and from the folder of the shipped ones."""
    copy, _ = follow("A recipe")
    report = json.loads((copy.work / "quantized" / "quant_report.json").read_text())
    assert "fp8" in json.dumps(report)
    shipped = copy.own_files("export/quantize/recipes")
    shutil.copy(copy.work / "my-recipe.yaml", shipped)
    found = copy.python("from nemo_build.export.quantize.recipe import *; print(load_recipe('my-recipe'))")
    assert "weights='fp8'" in found


def test_a_speculator(follow):
    """The text is what it is without; some drafts are accepted; Triton has a model for it."""
    copy, (text, _) = follow("A speculator")
    same, length = json.loads(copy.python(_DRAFTS))
    assert same
    assert length > 1.1
    assert text.startswith("import os")
    assert (copy.work / "repository" / "draft_bigram" / "config.pbtxt").is_file()


_DRAFTS = """
import json
from nemo_build.runtime import Engine, SamplingParams
params = SamplingParams(max_tokens=60, temperature=0)
plain, drafted = Engine.load("engine"), Engine.load("engine", speculate="bigram", draft_length=2)
texts = [e.generate(["import os", "class A:"], params) for e in (plain, drafted)]
print(json.dumps([[c.text for c in texts[0]] == [c.text for c in texts[1]], drafted.acceptance.length]))
"""


def test_a_check(follow):
    """It is recorded, passes, and finds another tokenizer."""
    copy, (_, judged) = follow("A check")
    assert "compression" in judged
    (baseline,) = (copy.work / "baselines").glob("*.*")
    baseline.write_text(re.sub(r"(bytes_per_token\"?: *)[\d.]+", r"\g<1>99.0", baseline.read_text()))
    (worse,) = copy.nemo_build("nemo-build check engine --suite suite.yaml", expect=(1,))
    assert "a text takes more tokens" in worse


def test_a_verb(follow):
    copy, (tokens,) = follow("A verb")
    assert all(word.isdecimal() for word in tokens.split())
    assert "tokens " in copy.nemo_build("nemo-build --help")[0]


def test_the_table_names_the_sections():
    """Every kind of thing in the table has a section, and every section a test."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    named = re.findall(r"^\| \[(\w+ \w+)\]\(#", page, re.MULTILINE)
    assert [n.lower() for n in named] == [s.lower() for s in sections()]
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_a")}
    assert {n.replace(" ", "_") for n in named} <= tests


def _places() -> Iterator[str]:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    for path in re.findall(
        r"`((?:plugins|export|engines|runtime|nemo_build|tests|scripts)/[\w./]*\w/?)`", page
    ):
        if "NAME" not in path:
            yield path


def test_places_exist():
    """Files and folders that the page speaks of are in the repository."""
    assert not [p for p in _places() if not (ROOT / p).exists()]
