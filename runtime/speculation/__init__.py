# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: cheap drafts, exact verification, and how many tokens to draft."""
