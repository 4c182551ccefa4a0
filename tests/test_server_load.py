# SPDX-License-Identifier: Apache-2.0
"""The load run of scripts/bench/server.py, in short: nothing is lost and nothing is left behind."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from .serving import process

BENCH = Path(__file__).parent.parent / "scripts" / "bench"


def numbers(url: str) -> dict[str, float]:
    """The server's metrics without labels."""
    text = httpx.get(f"{url}/metrics").text
    return {name: float(value) for name, value in re.findall(r"^nemo:(\w+)\{[^}]*\} (\S+)$", text, re.M)}


def test_clients_that_come_and_go(monkeypatch, tmp_path, demo_engine_directory):
    monkeypatch.syspath_prepend(BENCH)
    import _load

    options = ["--threads", 1, "--speculate", "ngram", "--log-format", "json"]
    with process(demo_engine_directory, *options, log=tmp_path / "log") as (running, url):
        port = int(url.rsplit(":", 1)[1])
        found = _load.load(port, clients=12, seconds=2.0, leaving=0.3, tokens=120)
        assert found["errors"] == []
        assert found["complete"] > 0 < found["left"]
        for _ in range(100):
            after = numbers(url)
            if after["num_slots_used"] == 0:
                break
        assert after["num_requests_running"] == after["num_requests_waiting"] == after["num_slots_used"] == 0
        assert after["request_aborted_total"] == pytest.approx(found["left"], abs=12)
        files = len(list(Path(f"/proc/{running.pid}/fd").iterdir()))
        _load.load(port, clients=12, seconds=0.5, leaving=1.0, tokens=120)
        assert len(list(Path(f"/proc/{running.pid}/fd").iterdir())) <= files + 12
        running.terminate()
        assert running.wait(20) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
