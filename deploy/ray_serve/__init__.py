# SPDX-License-Identifier: Apache-2.0
"""Engines on a Ray cluster: :mod:`.application` serves them, :mod:`.batch` works through files.

Only these modules import Ray, which is installed by ``pip install 'nemo-build[ray]'``.
"""
