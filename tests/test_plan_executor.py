# SPDX-License-Identifier: Apache-2.0
"""What plans of TensorRT-RTX and TensorRT are told at run time, by a library that writes it down."""

from __future__ import annotations

import gc
import importlib.util
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_build.engines import backends
from nemo_build.engines.gpu.executor import Binding
from nemo_build.engines.tensorrt_rtx import LIBRARY
from nemo_build.engines.trt import Library, executor
from nemo_build.engines.trt.executor import opener
from nemo_build.errors import BundleError, PlanError

from .fake_cuda import HostDevice

TENSORS = ("input_ids", "ssm.0", "w", "logits", "ssm.0.out")
ENTRY = {
    "file": "a.engine",
    "sha256": "d1",
    "state": [{"name": "key.0", "kind": "key"}, {"name": "ssm.0", "kind": "ssm"}],
}


class Mode(Enum):
    INPUT = 0
    OUTPUT = 1


class Context:
    """An execution context; `told` is what was set, in order."""

    def __init__(self, how: Any, refuses: str) -> None:
        self.how, self.told, self._refuses = how, [], refuses

    def set_device_memory(self, address: int, size: int) -> None:
        self.scratch = address, size

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.told.append((name, address))
        return name != self._refuses

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert name not in ("logits", "ssm.0.out"), "an output's shape follows from the inputs"
        self.told.append((name, shape))
        return True

    def execute_async_v3(self, stream: int) -> bool:
        self.told.append(stream)
        return self._refuses != "run"


class RuntimeCache:
    """Compiled kernels; what it is given it takes unless it is of something else."""

    def __init__(self, module: Any) -> None:
        self._module, self.data = module, b""

    def deserialize(self, data: bytes) -> bool:
        if data.startswith(b"other"):
            return False
        self.data = data
        return True

    def serialize(self) -> bytes:
        return self.data + self._module.compiled


class Plan:
    """An engine of the library."""

    num_io_tensors = len(TENSORS)

    def __init__(self, module: Any, size: int) -> None:
        self.device_memory_size_v2, self._module = size, module
        self.contexts: list[Context] = []

    def get_tensor_name(self, i: int) -> str:
        return TENSORS[i]

    def get_tensor_mode(self, name: str) -> Mode:
        return Mode.INPUT if TENSORS.index(name) < 3 else Mode.OUTPUT

    def create_runtime_config(self) -> SimpleNamespace:
        config = SimpleNamespace()
        config.set_execution_context_allocation_strategy = lambda s: setattr(config, "strategy", s)
        config.create_runtime_cache = lambda: RuntimeCache(self._module)
        config.set_runtime_cache = lambda cache: setattr(config, "cache", cache)
        return config

    def create_execution_context(self, how: Any) -> Context:
        self.contexts.append(Context(how, self._module.refuses))
        return self.contexts[-1]


@pytest.fixture(params=["own graphs", "captured"])
def module(request, monkeypatch, tmp_path) -> Any:
    """A library, with graphs of its own or without; plans are files with the size of their scratch memory."""
    found = SimpleNamespace(TensorIOMode=Mode, ILogger=object, refuses="", plans=[], compiled=b"")
    found.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="ours")
    if request.param == "own graphs":
        found.CudaGraphStrategy = SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole")

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self.logger = logger

        def deserialize_cuda_engine(self, data: Any) -> Plan | None:
            if data[:] == b"broken":
                self.logger.log("Severity.INFO", "hello")
                self.logger.log("Severity.ERROR", " it is broken ")
                return None
            found.plans.append(Plan(found, int(data[:])))
            return found.plans[-1]

    found.Runtime = Runtime
    monkeypatch.setitem(sys.modules, "a_library", found)
    monkeypatch.setenv("NEMO_BUILD_CACHE", str(tmp_path / "cache"))
    return found


def open_two(tmp_path: Path, gpu: HostDevice, constants: dict[str, Binding]) -> dict[str, Any]:
    (tmp_path / "a.engine").write_text("1000")
    (tmp_path / "b.engine").write_text("3000")
    entries = {"decode": ENTRY, "prefill": {**ENTRY, "file": "b.engine"}}
    library = Library("x", "X", "a_library", "x", "1", "x")
    return dict(opener(library)(tmp_path, entries, gpu, constants))


def bindings(side: int = 0, rows: int = 2) -> dict[str, Binding]:
    return {
        "input_ids": Binding(0x100, (rows, 1), "int64"),
        "ssm.0": Binding(0x1000 + side, (rows, 4), "float32"),
        "ssm.0.out": Binding(0x1001 - side, (rows, 4), "float32"),
        "logits": Binding(0x300, (1, 96), "float32"),
    }


WEIGHTS = {"w": Binding(0x4000, (3,), "bfloat16"), "other": Binding(0x4001, (3,), "bfloat16")}


def test_what_a_run_is_told(module, tmp_path):
    gpu = HostDevice()
    opened = open_two(tmp_path, gpu, WEIGHTS)
    decode = opened["decode"]
    own = hasattr(module, "CudaGraphStrategy")
    assert decode.capturable is not own
    first = bindings()
    decode.run(first, 7)
    (context,) = module.plans[0].contexts
    if own:
        assert (context.how.strategy, context.how.cuda_graph_strategy) == ("ours", "whole")
    else:
        assert context.how == "ours"
    assert context.told[0] == ("w", 0x4000), "once, and nothing of other graphs"
    assert sorted(map(str, context.told[1:-1])) == sorted(
        map(
            str,
            [
                *((n, b.address) for n, b in first.items()),
                *((n, first[n].shape) for n in ("input_ids", "ssm.0")),
            ],
        )
    )
    assert context.told[-1] == 7
    context.told.clear()
    decode.run(first, 7)
    assert context.told == [7], "the same again"
    context.told.clear()
    decode.run({**bindings(rows=3), "logits": Binding(0x500, (1, 96), "float32")}, 7)
    assert sorted(map(str, context.told)) == sorted(
        map(str, [("input_ids", (3, 1)), ("ssm.0", (3, 4)), ("logits", 0x500), 7])
    ), "what changed"


def test_each_side_of_a_state_has_a_context_and_all_share_scratch_memory(module, tmp_path):
    gpu = HostDevice()
    opened = open_two(tmp_path, gpu, WEIGHTS)
    for side in (0, 1, 0, 1):
        opened["decode"].run(bindings(side), 7)
    opened["prefill"].run(bindings(), 7)
    contexts = [c for plan in module.plans for c in plan.contexts]
    assert [len(p.contexts) for p in module.plans] == [2, 1]
    assert len({c.scratch for c in contexts}) == 1
    assert contexts[0].scratch[1] == 3000
    assert [len(a) for a in gpu.live.values()] == [3000]
    contexts[0].told.clear()
    opened["decode"].run(bindings(0), 7)
    assert len(contexts[0].told) == 1, "addresses of a side stay"


@pytest.mark.parametrize("module", ["own graphs"], indirect=True)
def test_compiled_kernels_are_kept_for_later_processes(module, tmp_path):
    kept = tmp_path / "cache" / "kernels" / "d1-sm120.bin"

    def open_and_close(compiled: bytes) -> bytes:
        opened, module.compiled = open_two(tmp_path, HostDevice(), WEIGHTS), compiled
        opened["decode"].run(bindings(), 7)
        found = module.plans[-2].contexts[0].how.cache.data
        del opened
        module.plans.clear()
        gc.collect()
        return found

    assert open_and_close(b"") == b""
    assert not kept.exists(), "nothing was compiled"
    assert open_and_close(b"one ") == b""
    assert kept.read_bytes() == b"one "
    assert open_and_close(b"two ") == b"one "
    assert kept.read_bytes() == b"one two "
    kept.write_bytes(b"other driver")
    assert open_and_close(b"three") == b""
    assert kept.read_bytes() == b"three"
    assert [p.name for p in kept.parent.iterdir()] == [kept.name], "both phases have one plan here"
    kept.unlink()
    kept.mkdir()  # no file can take its place
    with pytest.warns(UserWarning, match="cannot be kept"):
        open_and_close(b"four")


@pytest.mark.parametrize(("refuses", "what"), [("logits", "logits"), ("run", "to run a step")])
def test_what_the_library_refuses(module, tmp_path, refuses, what):
    module.refuses = refuses
    opened = open_two(tmp_path, HostDevice(), WEIGHTS)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"refuses {what}: it does not say why"):
            opened["decode"].run(bindings(), 7)
    (context,) = module.plans[0].contexts
    context._refuses = ""
    opened["decode"].run(bindings(), 7)
    context.told.clear()
    context._refuses = "logits"
    with pytest.raises(RuntimeError, match="refuses logits"):
        opened["decode"].run({**bindings(1), "ssm.0": bindings()["ssm.0"], "logits": WEIGHTS["w"]}, 7)
    context._refuses = ""
    context.told.clear()
    opened["decode"].run(bindings(), 7)
    assert len(context.told) == 7, "all of it: who knows what the library has kept"


def test_what_cannot_be_opened(module, tmp_path, monkeypatch):
    with pytest.raises(BundleError, match="multiples of 256 bytes") as caught:
        open_two(tmp_path, HostDevice(), {"w": Binding(0x4001, (3,), "bfloat16")})
    assert caught.value.problems == ("w",)
    with pytest.raises(PlanError, match="are needed") as short:
        open_two(tmp_path, HostDevice(2000), WEIGHTS)
    assert short.value.problems == ("0.0 MB for scratch memory of a step",)
    original = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda self, text: original(self, "broken"))
    with pytest.raises(BundleError, match=r"a\.engine cannot be loaded on a pretended GPU") as broken:
        open_two(tmp_path, HostDevice(), WEIGHTS)
    assert broken.value.problems == ("it is broken",)


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed")
def test_the_library_itself_takes_a_mapped_file(tmp_path):
    """It reads the plan, and refuses it: it is none."""
    (tmp_path / "a.engine").write_bytes(b"vtrt" + bytes(4092))
    with pytest.raises(BundleError, match="cannot be loaded") as caught:
        opener(LIBRARY)(tmp_path, {"decode": ENTRY}, HostDevice(), {})
    assert caught.value.problems


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed")
def test_the_library_itself_has_all_that_is_used():
    trt = importlib.import_module("tensorrt_rtx")
    used = {
        trt.Runtime: ["deserialize_cuda_engine"],
        trt.ICudaEngine: [
            *("device_memory_size_v2", "num_io_tensors", "get_tensor_name", "get_tensor_mode"),
            *("create_runtime_config", "create_execution_context"),
        ],
        trt.IRuntimeConfig: [
            *("set_execution_context_allocation_strategy", "cuda_graph_strategy"),
            *("create_runtime_cache", "set_runtime_cache"),
        ],
        trt.IRuntimeCache: ["serialize", "deserialize"],
        trt.IExecutionContext: [
            *("set_device_memory", "set_tensor_address", "set_input_shape", "execute_async_v3"),
        ],
        trt.CudaGraphStrategy: ["WHOLE_GRAPH_CAPTURE"],
        trt.ExecutionContextAllocationStrategy: ["USER_MANAGED"],
        trt.TensorIOMode: ["INPUT"],
    }
    assert [f"{c.__name__}.{n}" for c, names in used.items() for n in names if not hasattr(c, n)] == []
    assert executor.ALIGNMENT == 256


@pytest.mark.parametrize("name", ["tensorrt-rtx", "tensorrt"])
def test_a_missing_package_is_among_the_reasons(name, tmp_path, monkeypatch):
    monkeypatch.setattr(Library, "installed_version", lambda self: None)
    manifest = {"backend": {"name": name, "sms": [120]}}
    with pytest.raises(BundleError, match="cannot be run here") as caught:
        backends.require_runnable(tmp_path, manifest)
    assert any("pip install" in p and name in p for p in caught.value.problems)
