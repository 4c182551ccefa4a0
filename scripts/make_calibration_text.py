# SPDX-License-Identifier: Apache-2.0
"""Make the default calibration text: passages of the Python documentation and standard library.

    python scripts/make_calibration_text.py DOCS export/quantize/calibration.jsonl

DOCS is a directory with the documentation's ``*.rst.txt`` sources, as Debian's python3.11-doc package has them. The
text is under the Python Software Foundation licence.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from pathlib import Path

PROSE, CODE, LENGTH = 64, 32, 1200


def passages(files: list[Path], count: int, rng: random.Random) -> list[str]:
    """`count` passages of about LENGTH characters, cut at blank lines, each of another file."""
    found = []
    for path in rng.sample(files, len(files)):
        text = path.read_text(encoding="utf-8", errors="ignore")
        starts = [i for i in range(len(text) - LENGTH) if text.startswith("\n\n", i)]
        if starts:
            start = rng.choice(starts) + 2
            end = text.rfind("\n", start, start + LENGTH)
            found.append(text[start:end])
        if len(found) == count:
            return found
    raise SystemExit(f"only {len(found)} of {count} passages found")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("docs", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    rng = random.Random(0)
    prose = passages(sorted(options.docs.rglob("*.rst.txt")), PROSE, rng)
    code = passages(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), CODE, rng)
    texts = [t for pair in zip(prose[::2], prose[1::2], code, strict=True) for t in pair]
    options.out.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")


if __name__ == "__main__":
    main()
