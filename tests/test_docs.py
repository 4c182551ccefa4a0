# SPDX-License-Identifier: Apache-2.0
"""Generated pages are up to date."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "make_docs.py"


def test_generated_pages_are_up_to_date():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
