# SPDX-License-Identifier: Apache-2.0
"""The runtime: load an engine and generate text.

from nemo_build.runtime import Engine, SamplingParams

engine = Engine.load("engine")
print(engine.generate("The list type", SamplingParams(max_tokens=50, temperature=0))[0].text)
"""

from nemo_build.runtime.async_engine import AsyncEngine
from nemo_build.runtime.engine import Engine
from nemo_build.runtime.output import Chunk, Completion
from nemo_build.runtime.params import Grammar, SamplingParams, Thinking
from nemo_build.runtime.request import Scheduling
from nemo_build.runtime.sampling import TokenLogprobs
from nemo_build.runtime.stopping import FinishReason

__all__ = [
    "AsyncEngine",
    "Chunk",
    "Completion",
    "Engine",
    "FinishReason",
    "Grammar",
    "SamplingParams",
    "Scheduling",
    "Thinking",
    "TokenLogprobs",
]
