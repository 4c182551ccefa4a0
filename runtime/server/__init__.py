# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible HTTP server. It needs the extra ``serve``; nothing else of the package imports it."""
