# SPDX-License-Identifier: Apache-2.0
"""What grammar masks cost a token: llguidance and xgrammar side by side, on 131,072 tokens of byte-level BPE.

A text that each grammar allows goes through its matcher token by token. Measured are the mask before each token, taking
the token, and compiling the grammar, in CPU time of the thread; and how much memory a process has with the library, its
vocabulary and all of the grammars. Each library runs in a process of its own, one thread each. The vocabulary is
trained on the source text that comes with Python and the installed packages, once, and kept in the given file.

    python scripts/bench/masks.py --tokenizer FILE [--rounds N] [--out docs/results/masks.json]

xgrammar is no dependency of nemo-build: `pip install xgrammar` for this.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from _quiet import machine
from tokenizers import decoders, models, pre_tokenizers, trainers

from nemo_build.runtime.constraints.kinds import KINDS
from nemo_build.runtime.constraints.vocabulary import Vocabulary
from nemo_build.runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
SIZE, END, TEXT = 131072, 2, 70_000_000
LIBRARIES = ("llguidance", "xgrammar")

NESTED = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "status": {"enum": ["open", "closed", "in progress"]},
        "lines": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "item": {"type": "string"},
                    "price": {"type": "number"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["item", "price", "tags"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["title", "status", "lines"],
    "additionalProperties": False,
}
LARGE = {
    "type": "object",
    "properties": {f"member_{i}": NESTED if i % 4 == 0 else {"type": "string"} for i in range(80)},
    "required": [f"member_{i}" for i in range(80)],
    "additionalProperties": False,
}
SIMPLE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ORDER = {
    "title": "An order, which somebody placed on the phone and then confirmed by a letter of two pages.",
    "status": "in progress",
    "lines": [
        {"item": 'Ein grüner Stuhl \\u2013 with "arms"', "price": 12.75 * i, "tags": ["wood", "new"]}
        for i in range(4)
    ],
}
EVERYTHING = {f"member_{i}": ORDER if i % 4 == 0 else f"This is text number {i}." for i in range(80)}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["text", "count"],
            },
        },
    }
    for name in ("search", "weather", "write_file")
]
CALL = (
    "<tool_call>\n<function=write_file>\n<parameter=text>\ndef f(a, b):\n    return a + b if a < b\n</parameter>\n"
    "<parameter=count>\n12\n</parameter>\n<parameter=unit>\ncelsius\n</parameter>\n</function>\n</tool_call>"
)
# The same language, but that text may not hold "</": this notation cannot say that a string does not occur.
CALL_IN_EBNF = r"""
root ::= "<tool_call>\n<function=" name text count unit? "</function>\n</tool_call>"
name ::= "search>\n" | "weather>\n" | "write_file>\n"
text ::= "<parameter=text>\n" ([^<] | "<" [^/])* "</parameter>\n"
count ::= "<parameter=count>\n" "-"? [0-9]+ "\n</parameter>\n"
unit ::= "<parameter=unit>\n" ("celsius" | "fahrenheit") "\n</parameter>\n"
"""


@dataclass(frozen=True)
class Case:
    """A grammar of a kind, and a text that it allows."""

    kind: str
    text: str
    sample: str


CASES = {
    "simple": Case("json_schema", json.dumps(SIMPLE), json.dumps({"name": "Ada Lovelace", "age": 36})),
    "nested": Case("json_schema", json.dumps(NESTED), json.dumps(ORDER, ensure_ascii=False)),
    "large": Case("json_schema", json.dumps(LARGE), json.dumps(EVERYTHING, ensure_ascii=False)),
    "regex": Case("regex", r"[A-Z]{2}-[0-9]{4,8}(-[a-z]+){1,3}", "QX-20471193-alpha-beta-gamma"),
    "tools": Case("tools", json.dumps({"tools": TOOLS, "choice": "required"}), CALL),
}


class Matcher(Protocol):
    """A text on its way through a grammar."""

    def mask(self) -> object: ...

    def take(self, token: int) -> bool: ...


def train(path: Path) -> None:
    """Train a vocabulary, with the control tokens that the model has."""
    files = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*"))
    files += sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    random.Random(0).shuffle(files)

    def texts() -> Iterator[str]:
        room = TEXT
        for file in files:
            if (
                file.suffix in (".py", ".md", ".rst", ".txt", ".json", ".html")
                and file.stat().st_size < 400_000
            ):
                text = file.read_text(encoding="utf-8", errors="ignore")
                room -= len(text)
                if room < 0:
                    return
                yield text

    special = [f"<SPECIAL_{i}>" for i in range(1000)]
    special[1:3] = ["<s>", "</s>"]
    special[10:16] = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts(), trainer)
    backend.save(str(path))


def llguidance_matchers(vocabulary: Vocabulary) -> Callable[[Case], Callable[[], Matcher]]:
    """Compiles a case; what it gives makes matchers."""
    import llguidance

    tokenizer = vocabulary.for_grammars()
    limits = llguidance.LLParserLimits(verbose_errors=False)

    class Guided:
        def __init__(self, matcher: llguidance.LLMatcher) -> None:
            self.mask, self.take = matcher.compute_bitmask, matcher.consume_token

    def compile_case(case: Case) -> Callable[[], Matcher]:
        matcher = llguidance.LLMatcher(tokenizer, KINDS[case.kind](case.text, vocabulary), limits=limits)
        if matcher.is_error():
            raise SystemExit(matcher.get_error())
        return lambda: Guided(matcher.deep_copy())

    return compile_case


def xgrammar_matchers(vocabulary: Vocabulary) -> Callable[[Case], Callable[[], Matcher]]:
    """As :func:`llguidance_matchers`."""
    import torch
    import xgrammar

    torch.set_num_threads(1)
    tokens = [vocabulary.tokenizer.token_bytes(i) for i in range(SIZE)]
    info = xgrammar.TokenizerInfo(tokens, vocab_size=SIZE, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    class Matched:
        def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
            self._matcher = xgrammar.GrammarMatcher(compiled)
            self._bits = xgrammar.allocate_token_bitmask(1, SIZE)
            self.take = self._matcher.accept_token

        def mask(self) -> object:
            return self._matcher.fill_next_token_bitmask(self._bits)

    def compile_case(case: Case) -> Callable[[], Matcher]:
        if case.kind == "json_schema":
            compiled = compiler.compile_json_schema(case.text)
        elif case.kind == "regex":
            compiled = compiler.compile_regex(case.text)
        else:
            compiled = compiler.compile_grammar(CALL_IN_EBNF)
        return lambda: Matched(compiled)

    return compile_case


def resident() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(library: str, path: Path, rounds: int) -> dict[str, Any]:
    """The figures of one library."""
    backend = tokenizers.Tokenizer.from_file(str(path))
    vocabulary = Vocabulary(Tokenizer(backend, {"eos_token": "</s>"}), SIZE, [END])
    vocabulary.tokenizer.token_bytes(0)
    before, start = resident(), time.perf_counter()
    compile_case = {"llguidance": llguidance_matchers, "xgrammar": xgrammar_matchers}[library](vocabulary)
    seconds = time.perf_counter() - start
    loaded = resident()
    cases = {name: measure_case(name, case, vocabulary, compile_case, rounds) for name, case in CASES.items()}
    return {
        "version": version(library),
        "vocabulary_seconds": seconds,
        "library_and_vocabulary_bytes": loaded - before,
        "grammars_bytes": resident() - loaded,
        "cases": cases,
    }


def measure_case(
    name: str,
    case: Case,
    vocabulary: Vocabulary,
    compile_case: Callable[[Case], Callable[[], Matcher]],
    rounds: int,
) -> dict[str, Any]:
    """The figures of one grammar."""
    start = time.thread_time()
    begin = compile_case(case)
    first = begin()
    first.mask()
    compiling = time.thread_time() - start
    masks: list[float] = []
    takes: list[float] = []
    # Text of a mark is tokens of text for xgrammar's grammar, and its own token for the other's: both as it encodes.
    sample = vocabulary.tokenizer.encode(case.sample)
    for _ in range(rounds):
        matcher = begin()
        for token in sample:
            start = time.thread_time()
            matcher.mask()
            between = time.thread_time()
            if not matcher.take(token):
                raise SystemExit(f"{name}: the matcher refuses token {token} of its text")
            takes.append(time.thread_time() - between)
            masks.append(between - start)
    ranked = sorted(masks)
    return {
        "tokens": len(sample),
        "compile_ms": compiling * 1e3,
        "mask_us": {
            "median": statistics.median(masks) * 1e6,
            "mean": statistics.fmean(masks) * 1e6,
            "p99": ranked[int(len(ranked) * 0.99)] * 1e6,
            "most": ranked[-1] * 1e6,
        },
        "take_us": statistics.median(takes) * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="tokenizer.json; it is made if it is not there"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "masks.json")
    parser.add_argument("--library", choices=LIBRARIES, help="measure one, and print the figures as JSON")
    options = parser.parse_args()
    if options.library:
        print(json.dumps(measure(options.library, options.tokenizer, options.rounds)))
        return
    if not options.tokenizer.exists():
        train(options.tokenizer)
    found = {}
    for library in LIBRARIES:
        command = [
            sys.executable,
            __file__,
            "--tokenizer",
            str(options.tokenizer),
            "--rounds",
            str(options.rounds),
        ]
        done = subprocess.run([*command, "--library", library], stdout=subprocess.PIPE, check=True, text=True)
        found[library] = json.loads(done.stdout.splitlines()[-1])
        for name, case in found[library]["cases"].items():
            mask = case["mask_us"]
            print(
                f"{library}, {name}: compiled in {case['compile_ms']:.1f} ms, "
                f"mask {mask['median']:.0f} us (p99 {mask['p99']:.0f}), token {case['take_us']:.1f} us"
            )
    record = {
        **machine(),
        "command": "python scripts/bench/masks.py --tokenizer FILE",
        "vocabulary": SIZE,
        "rounds": options.rounds,
        "libraries": found,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
