# SPDX-License-Identifier: Apache-2.0
"""Model repositories for Triton Inference Server: the models' sources, their configuration, and what renders them."""
