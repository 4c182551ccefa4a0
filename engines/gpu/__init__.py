# SPDX-License-Identifier: Apache-2.0
"""What the backends with GPU kernels of our own share: kernel nodes, lowering to them, and the session."""
