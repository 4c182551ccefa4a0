# SPDX-License-Identifier: Apache-2.0
"""A dashboard for Grafana, over what servers tell Prometheus."""
