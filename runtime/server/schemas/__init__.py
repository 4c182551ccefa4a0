# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests: one module a route, and what they share in ``common``."""
