# SPDX-License-Identifier: Apache-2.0
"""The allocator of processes that build TensorRT-RTX plans."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nemo_build.engines.tensorrt_rtx.addresses import environment

pytestmark = pytest.mark.skipif(not environment(), reason="it was not built")

CHECKS = """
import ctypes, random, threading

libc = ctypes.CDLL(None)
for name in ("malloc", "calloc", "realloc", "memalign", "aligned_alloc", "valloc"):
    getattr(libc, name).restype = ctypes.c_void_p
libc.malloc_usable_size.restype = ctypes.c_size_t
size_t, pointer = ctypes.c_size_t, ctypes.c_void_p

def check(seed, told):
    dice, held = random.Random(seed), {}
    for step in range(3000):
        size = dice.choice((0, 1, 15, 16, 17, 1000, 1024, 1025, 5000, 1 << 16, (1 << 20) + 5, 3 << 20))
        kind = dice.randrange(6)
        if kind == 0 and held:
            address = dice.choice(list(held))
            old = held.pop(address)
            new = libc.realloc(pointer(address), size_t(size + 1))
            kept = min(len(old), size + 1)
            assert ctypes.string_at(new, kept) == old[:kept]
            address, size = new, size + 1
        elif kind == 1:
            address = libc.calloc(size_t(3), size_t(size))
            size *= 3
            assert ctypes.string_at(address, size) == bytes(size)
        elif kind == 2:
            alignment = dice.choice((32, 64, 4096, 1 << 16))
            address = libc.memalign(size_t(alignment), size_t(size))
            assert address % alignment == 0
        else:
            address = libc.malloc(size_t(size))
        assert address and address % 16 == 0 and address not in held
        assert libc.malloc_usable_size(pointer(address)) >= size
        text = (step.to_bytes(4, "little") * (size // 4 + 1))[: min(size, 64)]
        ctypes.memmove(address, text, len(text))
        held[address] = text
        told.append(address)
        while len(held) > 40 or (held and dice.random() < 0.4):
            address = dice.choice(list(held))
            text = held.pop(address)
            assert ctypes.string_at(address, len(text)) == text
            libc.free(pointer(address))

lists = [[] for _ in range(3)]
threads = [threading.Thread(target=check, args=(i, told)) for i, told in enumerate(lists)]
for t in threads:
    t.start()
for t in threads:
    t.join()
assert not libc.malloc(size_t((1 << 64) - 1))
assert not libc.calloc(size_t(1 << 40), size_t(1 << 40))
main = {libc.malloc(size_t(1)) >> 40}  # a thread also gets again what it freed of the main thread's
regions = [{a >> 40 for a in told} - main for told in lists]
assert all(len(r) == 1 for r in regions) and len(set.union(*regions)) == 3, regions
"""


def run_checks(**variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECKS],
        env={**os.environ, **environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_blocks_are_what_was_asked_for_and_threads_have_regions_of_their_own():
    run_checks(PYTHONMALLOC="malloc")
    run_checks()


def test_numpy_and_its_threads_work():
    code = "import numpy as np; a = np.random.rand(900, 900); print(np.allclose(np.linalg.inv(a) @ a, np.eye(900)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"


def test_a_preloaded_library_stays(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    assert environment()["LD_PRELOAD"].endswith(":/lib/other.so")
