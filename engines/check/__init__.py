# SPDX-License-Identifier: Apache-2.0
"""The gate: whether an engine is as good as one that was recorded (``nemo-build check``); see docs/check.md.

``suite`` says what is checked, ``checks`` has a module for each kind of check, ``baseline`` keeps what was recorded,
``run`` measures and judges, ``verdict`` is what comes out, ``reports`` shows it.
"""
