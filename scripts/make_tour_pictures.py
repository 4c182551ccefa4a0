# SPDX-License-Identifier: Apache-2.0
"""Make the pictures of docs/tour.md anew: what commands print as SVG, and reports as PNG.

    python scripts/make_tour_pictures.py [NAME…]

It runs every command on the demo checkpoint, and plans on a checkpoint with the tensors of Nemotron 3.5 Lightning,
whose files are sparse. Reports are taken with Playwright's Python package and the Chromium of the system. All of it
takes a few minutes; figures of speed in the pictures are those of the machine, whatever else it does.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (safetensors needs it for bfloat16)
from numpy.typing import NDArray
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text
from safetensors.numpy import load_file, save_file

from nemo_build.demo import CHECKPOINT, DRAFTERS
from nemo_build.engines.check.suite import DEFAULT

Tensors = dict[str, NDArray[Any]]

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
MAIN = [sys.executable, "-c", "from nemo_build.cli import main; main()"]

# Hosts that show the pictures fetch no fonts for them.
SVG = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
SVG = re.sub(r"\s*<!-- Generated with Rich.*?-->", "", SVG).replace("Fira Code, monospace", "monospace")


@dataclass(frozen=True)
class Terminal:
    """A picture of a terminal.

    Attributes:
        commands: What is typed. Lines that begin with ``#`` are shown, and nothing else.
        columns: Its width.
        lines: Most lines that are shown of a command.
    """

    commands: tuple[str, ...]
    columns: int = 110
    lines: int = 60


@dataclass(frozen=True)
class Page:
    """A picture of a page that commands write.

    Attributes:
        commands: What makes it.
        file: The page.
        width: Of the window, in pixels.
        height: How much of it is shown, from the top.
    """

    commands: tuple[str, ...]
    file: str
    width: int = 1000
    height: int = 1100


SCENES: dict[str, Terminal | Page] = {
    "export.svg": Terminal(
        (
            "nemo-build export checkpoint -o bundle --draft dflash --draft dspark",
            "nemo-build export damaged -o other",
        )
    ),
    "quantize.png": Page(
        ("nemo-build quantize checkpoint -o nvfp4 --recipe lightning",), "nvfp4/quant_report.html"
    ),
    "plan.svg": Terminal(("nemo-build build release --target rtx-pro-6000 --plan",), 120),
    "inspect.svg": Terminal(("nemo-build inspect engine",), 100),
    "diff.png": Page(("nemo-build diff engine int8 --html diff.html",), "diff.html"),
    "generate.svg": Terminal(
        (
            "nemo-build generate engine 'The :mod:`json` module' --max-tokens 60 --seed 1 --temperature 0.7",
            "nemo-build generate engine 'The :mod:`json` module' --max-tokens 60 --seed 1 --temperature 0.7 "
            "--speculate mtp --draft-len 3",
        )
    ),
    "bench.png": Page(
        (
            "nemo-build bench engine --concurrency 1,4 --speculate all --draft-len 3 --output-len 64 --html bench.html",
        ),
        "bench.html",
        height=1300,
    ),
    "check.png": Page(
        (
            "nemo-build check engine --suite suite.yaml --record",
            "nemo-build check doubled --suite suite.yaml --html check.html",
        ),
        "check.html",
        height=1300,
    ),
    "bisect.svg": Terminal(("nemo-build bisect engine doubled",), 110),
    "triton.svg": Terminal(("nemo-build triton engine -o repository --speculate mtp", "ls repository"), 110),
}


def prepare(folder: Path) -> None:
    """Everything that the scenes start from, by the names that they show."""
    (folder / "checkpoint").symlink_to(CHECKPOINT)
    for name, path in DRAFTERS.items():
        (folder / name).symlink_to(path)
    shutil.copy(DEFAULT, folder / "suite.yaml")
    _changed(folder / "damaged", _damage)
    _changed(folder / "doubled-checkpoint", _double)
    run(f"{sys.executable} {ROOT}/scripts/synthetic_checkpoint.py --format nvfp4 sparse", folder)
    drafts = "--draft dflash --draft dspark"
    for line in (
        f"export checkpoint -o made {drafts}",
        f"export doubled-checkpoint -o doubled-bundle {drafts}",
        "export sparse -o release",
        "build made -o engine --target cpu",
        "build made -o int8 --target cpu --weights int8",
        "build doubled-bundle -o doubled --target cpu",
    ):
        run(f"nemo-build {line}", folder)


def _changed(folder: Path, change: Callable[[Tensors], None]) -> None:
    """A copy of the demo checkpoint with other tensors."""
    shutil.copytree(CHECKPOINT, folder)
    tensors = load_file(CHECKPOINT / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _damage(tensors: Tensors) -> None:
    """Misspell a tensor, cut one, leave one out."""
    tensors["backbone.layers.1.mixer.exprts.2.up_proj.weight"] = tensors.pop(
        "backbone.layers.1.mixer.experts.2.up_proj.weight"
    )
    tensors["backbone.layers.0.mixer.D"] = tensors["backbone.layers.0.mixer.D"][:-1].copy()
    del tensors["backbone.norm_f.weight"]


def _double(tensors: Tensors) -> None:
    """Double the weights of an expert."""
    name = "backbone.layers.1.mixer.experts.2.down_proj.weight"
    tensors[name] = (tensors[name].astype("float32") * 2).astype(tensors[name].dtype)


def run(command: str, folder: Path, columns: int = 0) -> str:
    """Run a command; returns what it writes to a terminal of so many columns, and then to standard error."""
    words = shlex.split(command)
    arguments = [*MAIN, *words[1:]] if words[0] == "nemo-build" else words
    if not columns:
        done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            sys.exit(f"{command}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 200, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    process = subprocess.Popen(arguments, cwd=folder, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    errors = process.communicate()[1]
    os.close(ours)
    return (shown.decode().replace("\r\n", "\n").rstrip("\n") + "\n" + errors.decode()).strip("\n")


def draw(scene: Terminal, folder: Path, path: Path) -> None:
    """Run a scene's commands and write its picture."""
    console = Console(record=True, width=scene.columns, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for i, command in enumerate(scene.commands):
        if i:
            console.print()
        console.print(Text(f"$ {command}", style="bold"))
        shown = run(command, folder, scene.columns).splitlines()
        for line in shown[: scene.lines]:
            console.print(Text.from_ansi(line))
        if len(shown) > scene.lines:
            console.print("…")
    console.print()  # what is drawn below a last line would be cut
    verb = shlex.split(scene.commands[0])[1]
    console.save_svg(str(path), title=f"nemo-build {verb}", code_format=SVG, unique_id=path.stem)


def photograph(scene: Page, folder: Path, path: Path) -> None:
    """Run a scene's commands and take a picture of the page that they write."""
    from playwright.sync_api import sync_playwright

    for command in scene.commands:
        run(command, folder)
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((found for found in map(shutil.which, names) if found), None)
    if browser is None:
        sys.exit(f"no browser: {', '.join(names)}")
    with sync_playwright() as tool:
        chromium = tool.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": scene.width, "height": scene.height})
        page.goto((folder / scene.file).as_uri())
        page.screenshot(path=str(path))
        chromium.close()


def main() -> None:
    """Make all pictures, or some."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *SCENES], metavar="NAME", help=", ".join(SCENES))
    wanted = parser.parse_args().names or list(SCENES)
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tour-") as temporary:
        folder = Path(temporary)
        prepare(folder)
        for name in wanted:
            scene = SCENES[name]
            make = draw if isinstance(scene, Terminal) else photograph
            make(scene, folder, PICTURES / name)  # type: ignore[arg-type]
            print(json.dumps({"picture": name, "bytes": (PICTURES / name).stat().st_size}), flush=True)


if __name__ == "__main__":
    main()
