# SPDX-License-Identifier: Apache-2.0
"""The wheel holds every package and the demo checkpoint."""

import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nemo_build.plugins import native

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_wheel_is_complete(tmp_path):
    """Built from the files under version control, it has what a checkout has."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "source" / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        tmp_path,
        tmp_path / "source",
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    for name in listed.splitlines():
        folder = name.split("/")[0]
        place = name if folder == "nemo_build" else f"nemo_build/{name}"
        if folder in ("nemo_build", "export", "plugins", "engines", "runtime") and not name.endswith(
            (".cc", ".h")
        ):
            assert place in packed, name
    libraries = ["nemo_build/plugins/codecs/_pack", "nemo_build/plugins/gpu/_launch"]
    if platform.machine() == "x86_64":
        libraries += [f"nemo_build/plugins/native/_{name}." for name in native.INSTRUCTION_SETS]
        libraries.append("nemo_build/engines/tensorrt_rtx/_addresses")
    for library in libraries:
        assert any(name.startswith(library) for name in packed), library
