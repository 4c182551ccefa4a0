# SPDX-License-Identifier: Apache-2.0
"""What makes plans the same to the byte each time: an allocator for the process that builds one (``addresses.cc``).

The library is optional: where it was not built (no compiler, a source checkout that was not installed), plans are as
good, and the order of some of their entries hangs on how the system schedules threads.
"""

from __future__ import annotations

import os
from pathlib import Path

from nemo_build.plugins.libraries import library_file


def environment() -> dict[str, str]:
    """Variables for the process: the library before all others, where there is one."""
    library = library_file(Path(__file__).parent, "addresses")
    if library is None:
        return {}
    others = os.environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{library}:{others}" if others else str(library)}
