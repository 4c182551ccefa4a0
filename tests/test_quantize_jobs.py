# SPDX-License-Identifier: Apache-2.0
"""Jobs of quantization: workers, stopping and going on, one at a time, and what may be replaced."""

from __future__ import annotations

import fcntl
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_build.errors import CheckpointError, UserError
from nemo_build.export.quantize import quantizer, streaming

from .quantized import TOKENS, make_source, run


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A random checkpoint to quantize. Treat as read-only."""
    return make_source(tmp_path_factory.mktemp("quantize") / "checkpoint")


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(source, tmp_path, workers):
    run(source, tmp_path / "a", "lightning")
    run(source, tmp_path / "b", "lightning", workers=workers)
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_quantized_checkpoint_is_not_quantized_again(source, tmp_path):
    run(source, tmp_path / "once", "w4a16")
    with pytest.raises(CheckpointError, match="quantized already"):
        run(tmp_path / "once", tmp_path / "twice", "fp8")
    with pytest.raises(UserError, match="exists already"):
        run(source, tmp_path / "once", "fp8")
    run(source, tmp_path / "once", "fp8", force=True)
    with pytest.raises(UserError, match="cannot be the output"):
        run(source, source, "fp8", force=True)


def test_stopped_job_goes_on(source, tmp_path, monkeypatch):
    """After a failure in the second shard the first is kept, not written again, and the bytes are the same."""
    run(source, tmp_path / "whole", "lightning")
    original, done = streaming.run_job, []

    def fail_later(job, threads=1):
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(job.target.name)
        return original(job, threads)

    monkeypatch.setattr(streaming, "run_job", fail_later)
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", "lightning")
    first = tmp_path / ".out.quantize" / done[0]
    stamp = first.stat().st_mtime_ns
    monkeypatch.setattr(streaming, "run_job", original)
    monkeypatch.setattr("nemo_build.export.quantize.quantizer.calibrate", None)  # measured already
    run(source, tmp_path / "out", "lightning")
    assert (tmp_path / "out" / done[0]).stat().st_mtime_ns == stamp
    for path in sorted((tmp_path / "whole").iterdir()):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


def test_another_job_does_not_take_over(source, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(quantizer, "_write_metadata", stop)
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "out", "fp8")
    run(source, tmp_path / "out", "w4a16")
    run(source, tmp_path / "fresh", "w4a16")
    for path in sorted((tmp_path / "fresh").iterdir()):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_killed_at_random_moments(source, tmp_path):
    """Killed again and again while it works, and started again, a job ends with the same bytes."""
    code = f"""
import sys, time
from pathlib import Path
from nemo_build.export.quantize import streaming
from nemo_build.export.quantize.quantizer import quantize_checkpoint
from nemo_build.export.quantize.recipe import load_recipe
write = streaming._quantize
def slow(*a):
    time.sleep(0.03)
    return write(*a)
streaming._quantize = slow
quantize_checkpoint(Path({str(source)!r}), Path(sys.argv[1]), load_recipe("lightning"),
                    sequences={TOKENS!r}, sequences_source="test")
"""
    run(source, tmp_path / "whole", "lightning")
    rng = random.Random(0)
    work, kills = tmp_path / ".out.quantize", 0
    for _ in range(40):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "out")], stderr=subprocess.PIPE
        )
        while process.poll() is None and not any(work.glob("*.partial")):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        if kills < 6:
            process.kill()
        process.communicate(timeout=120)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
    assert kills >= 2
    for path in sorted((tmp_path / "whole").iterdir()):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


def test_lock_that_is_removed_before_it_is_held(tmp_path, monkeypatch):
    """Its last holder removes the file, maybe after another process has opened it; that process takes the next."""
    work, real, locked = tmp_path / ".out.quantize", fcntl.flock, []

    def flock(file, operation):
        if not locked:
            Path(file.name).unlink()
        locked.append(file)
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with quantizer._exclusive(work):
        assert len(locked) == 2
        with pytest.raises(UserError, match="Another process"), quantizer._exclusive(work):
            pass
    assert list(tmp_path.iterdir()) == []


def test_one_job_at_a_time(source, tmp_path):
    with quantizer._exclusive(tmp_path / ".out.quantize"), pytest.raises(UserError, match="Another process"):
        run(source, tmp_path / "out", "w4a16")
