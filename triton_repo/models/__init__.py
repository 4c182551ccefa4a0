# SPDX-License-Identifier: Apache-2.0
"""What a repository's ``model.py`` files import: one module a model, with the class that Triton looks for.

Only the server's Python backend can import them, as ``triton_python_backend_utils`` exists nowhere else.
"""
