# SPDX-License-Identifier: Apache-2.0
"""Makes the constraints of requests: grammars are compiled once, and kept as long as there is room."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as OutOfTimeError
from typing import TYPE_CHECKING

from nemo_build.errors import RequestError
from nemo_build.runtime.constraints.base import Constraint, Guide
from nemo_build.runtime.constraints.grammar import GrammarConstraint, first_lines
from nemo_build.runtime.constraints.thinking import ThinkingFirst
from nemo_build.runtime.constraints.vocabulary import Vocabulary
from nemo_build.runtime.params import Grammar, SamplingParams
from nemo_build.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

__all__ = ["Constraints"]

_MOST_KEPT = 64
"""Compiled grammars that are kept; a usual one takes well under a megabyte."""

_MOST_TEXT = 256 << 10
"""Characters of a grammar."""

_COMPILE_SECONDS = 10.0
"""For a grammar. Usual ones take a few milliseconds."""

_COMPILERS = 2
"""Grammars that are compiled at a time; the library lets other threads run meanwhile."""


class Constraints:
    """Makes the constraints of requests. Any thread may use it.

    Args:
        tokenizer: The model's.
        vocab_size: Width V of its logits.
        eos_ids: Ids that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocabulary = Vocabulary(tokenizer, vocab_size, eos_ids)
        self._lock = threading.Lock()
        self._waiting: dict[Future[_Compiled], Grammar] = {}  # to be compiled, in this order
        self._workers = 0
        self._compiled: OrderedDict[tuple[str, str], Future[_Compiled]] = OrderedDict()

    def guide(self, params: SamplingParams) -> Guide | None:
        """What the tokens of a request obey; ``None``: nothing.

        The first request with a grammar waits until that is compiled, and the very first until the library has read the
        vocabulary, which takes seconds for a large one; where waiting is bad, call this in another thread before.

        Raises:
            RequestError: The grammar is invalid, is not supported, or takes too long.
            UserError: The library is not installed.
        """
        grammar, thinking = params.grammar, params.thinking
        if grammar is None and thinking is None:
            return None
        ends = frozenset(self._vocabulary.eos_ids) | frozenset(params.stop_token_ids)
        then: Constraint | None = None
        if grammar is not None:
            compiled = self._compile(grammar)
            then = GrammarConstraint(compiled.begin, self._vocabulary, ends)
            if not grammar.after_thinking:
                return Guide(then)
        knows_calls = grammar is not None and grammar.kind == "tools"
        return Guide(ThinkingFirst(self._vocabulary, thinking, then, knows_calls=knows_calls, ends=ends))

    def _compile(self, grammar: Grammar) -> _Compiled:
        if len(grammar.text) > _MOST_TEXT:
            raise RequestError(
                f"The grammar has {len(grammar.text)} characters; at most {_MOST_TEXT} are taken."
            )
        until = time.monotonic() + _COMPILE_SECONDS
        while True:
            found = self._find(grammar)
            try:
                error = found.exception(until - time.monotonic())
                break
            except CancelledError:  # by another who waited for it longer
                continue
            except OutOfTimeError:
                if self._withdraw(grammar, found):
                    raise RequestError(
                        f"The grammar could not be compiled within {_COMPILE_SECONDS:g} seconds, because others were.",
                        hint="Try again later.",
                    ) from None
                raise RequestError(
                    f"The grammar takes more than {_COMPILE_SECONDS:g} seconds to compile.",
                    hint="Large bounds of lengths and numbers, and multiples of large ones, are what takes time.",
                ) from None
        if isinstance(error, RequestError):
            # Each asker gets one of its own, for the one that is kept would gather tracebacks.
            raise RequestError(error.headline, error.problems, error.hint)
        return found.result()

    def _find(self, grammar: Grammar) -> Future[_Compiled]:
        """The grammar that is compiled, or will be."""
        key = grammar.kind, grammar.text
        with self._lock:
            found = self._compiled.pop(key, None)
            if found is None:
                found = Future()
                self._waiting[found] = grammar
                if self._workers < _COMPILERS:
                    self._workers += 1
                    # The end of the process waits for no daemon, as it would for the threads of an executor.
                    threading.Thread(target=self._work, name="grammar", daemon=True).start()
            self._compiled[key] = found
            while len(self._compiled) > _MOST_KEPT:
                self._compiled.popitem(last=False)
        return found

    def _work(self) -> None:
        """Compile grammars while there are any."""
        while (taken := self._next()) is not None:
            grammar, found = taken
            try:
                compiled = _compile(grammar, self._vocabulary)
            except BaseException as error:  # whoever waits for it gets it
                found.set_exception(error)
            else:
                found.set_result(compiled)

    def _next(self) -> tuple[Grammar, Future[_Compiled]] | None:
        """The grammar that has waited longest; without any this thread is one less."""
        with self._lock:
            if not self._waiting:
                self._workers -= 1
                return None
            found = next(iter(self._waiting))
            found.set_running_or_notify_cancel()
            return self._waiting.pop(found), found

    def _withdraw(self, grammar: Grammar, found: Future[_Compiled]) -> bool:
        """Compile no grammar whose turn has not come; whether it had not."""
        key = grammar.kind, grammar.text
        with self._lock:
            if not found.cancel():
                return False
            del self._waiting[found]
            if self._compiled.get(key) is found:
                del self._compiled[key]
            return True


class _Compiled:
    """A grammar that matchers begin with.

    Args:
        matcher: One that has seen nothing.
    """

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._lock = threading.Lock()

    def begin(self) -> llguidance.LLMatcher:
        """A matcher of one's own that has seen nothing."""
        with self._lock:
            return self._matcher.deep_copy()


def _compile(grammar: Grammar, vocabulary: Vocabulary) -> _Compiled:
    """Compile a grammar, and compute its first mask, which is where the library finds out how hard it is."""
    tokenizer = vocabulary.for_grammars()
    from llguidance import LLMatcher, LLParserLimits

    from nemo_build.runtime.constraints.kinds import KINDS

    if grammar.kind not in KINDS:
        raise RequestError(f"There is no kind of grammar {grammar.kind!r}; there are {', '.join(KINDS)}.")
    try:
        text = KINDS[grammar.kind](grammar.text, vocabulary)
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
    except ValueError as error:  # of the library: nested too deeply, or half a surrogate pair
        raise RequestError(f"The {grammar.kind} grammar cannot be used.", [first_lines(str(error))]) from None
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise RequestError(f"The {grammar.kind} grammar cannot be used.", [first_lines(matcher.get_error())])
    return _Compiled(matcher)
