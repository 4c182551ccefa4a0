# SPDX-License-Identifier: Apache-2.0
"""The runtime: load an engine and generate text.

from nemo_build.runtime import Engine, SamplingParams

engine = Engine.load("engine")
print(engine.generate("The list type", SamplingParams(max_tokens=50, temperature=0))[0].text)
"""

from nemo_build.runtime.engine import Chunk, Completion, Engine
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.stopping import FinishReason

__all__ = ["Chunk", "Completion", "Engine", "FinishReason", "SamplingParams"]
