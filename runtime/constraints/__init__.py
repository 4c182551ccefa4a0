# SPDX-License-Identifier: Apache-2.0
"""What may come next of a text: grammars and thinking budgets.

:class:`~nemo_build.runtime.constraints.making.Constraints` makes the constraint of a request from its parameters, which
:class:`~nemo_build.runtime.choice.TokenChooser` obeys wherever tokens or drafts are chosen.
"""
