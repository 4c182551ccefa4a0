# SPDX-License-Identifier: Apache-2.0
"""Serving on more than one machine: a Helm chart, manifests for KServe, and an application of Ray Serve."""
