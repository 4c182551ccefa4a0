# SPDX-License-Identifier: Apache-2.0
"""Model repositories for Triton Inference Server: the models' sources, their configuration, and what renders them."""

FRONT = "generate"
"""The model that clients talk to."""

BUSY = "busy: "
"""How an error begins if the same request may well be answered later; not every protocol carries a status."""

FAULT = "fault: "
"""How errors begin that are no fault of the request's: the server does not work."""
