# SPDX-License-Identifier: Apache-2.0
"""The part of the build that pyproject.toml cannot say: top-level folders are packages of ``nemo_build``."""

from pathlib import Path

from setuptools import setup

FOLDERS = {
    "nemo_build": "nemo_build",
    **{f"nemo_build.{name}": name for name in ("export", "plugins", "engines", "runtime")},
}
PACKAGES = [
    ".".join([package, *path.parent.relative_to(folder).parts])
    for package, folder in FOLDERS.items()
    for path in sorted(Path(folder).rglob("__init__.py"))
]

setup(packages=PACKAGES, package_dir=FOLDERS)
