# SPDX-License-Identifier: Apache-2.0
"""Measuring an engine: latencies, throughput, and what comes of speculation (``nemo-build bench``).

``prompts`` has what is asked, ``load`` asks it and notes when each token came, ``measure`` makes statistics of that,
``run`` takes the settings in turn, ``report`` and ``plots`` show the result. docs/bench.md defines every figure.
"""

from nemo_build.runtime.bench.run import Bench, BenchOptions, Results, Setting

__all__ = ["Bench", "BenchOptions", "Results", "Setting"]
