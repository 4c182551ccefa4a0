# SPDX-License-Identifier: Apache-2.0
"""Text for the demo checkpoint: documentation sources, standard library code and synthesised chats."""

from __future__ import annotations

import ast
import hashlib
import math
import random
import re
import subprocess
import sysconfig
import tempfile
from dataclasses import astuple, dataclass, field
from pathlib import Path

import jinja2
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

DOC_PACKAGE = "python3.11-doc"
# Tests repeat themselves, encodings and pydoc_data are generated tables, the rest is not library code.
SKIP_DIRS = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "encodings",
    "pydoc_data",
    "site-packages",
    "__pycache__",
    "ensurepip",
    "turtledemo",
    "lib2to3",
    "config-3.11-x86_64-linux-gnu",
}
SKIP_NAMES = re.compile(r"^(_sysconfigdata.*|lextab|yacctab|this|keyword|token|opcode|__phello__.*)\.py$")
VALIDATION_SHARE = 0.02
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
EOS = 2


def fetch_docs() -> Path:
    """Download and unpack the Debian package with the documentation sources; return its root."""
    root = Path(tempfile.mkdtemp(prefix="python-docs-"))
    subprocess.run(["apt-get", "download", DOC_PACKAGE], cwd=root, check=True)
    package = next(root.glob("*.deb"))
    subprocess.run(["dpkg", "-x", package.name, "unpacked"], cwd=root, check=True)
    return root / "unpacked"


def held_out(files: list[tuple[str, str]]) -> set[str]:
    """Names of the validation files: a fixed share, in the order of their names' hashes."""
    names = sorted((name for name, _ in files), key=lambda name: hashlib.sha256(name.encode()).digest())
    return set(names[: math.ceil(len(names) * VALIDATION_SHARE)])


def doc_files(root: Path) -> list[tuple[str, str]]:
    """(name, text) of every documentation source under ``root``."""
    paths = sorted(root.rglob("_sources/**/*.rst.txt"))
    if not paths:
        raise SystemExit(f"no _sources/**/*.rst.txt below {root}")
    return [("docs/" + str(p).split("_sources/")[1], p.read_text("utf-8", "replace")) for p in paths]


def code_files() -> list[tuple[str, str]]:
    """(name, text) of the running interpreter's standard library sources."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIP_DIRS.intersection(parts) or SKIP_NAMES.match(path.name):
            continue
        text = path.read_text("utf-8", "replace")
        if len(text) > 200:
            files.append(("lib/" + "/".join(parts), text))
    return files


# ---------------------------------------------------------------------------------------------------
# question and answer pairs


@dataclass(frozen=True)
class Entry:
    """One documented object."""

    kind: str
    name: str
    signature: str
    summary: str


def clean_rst(text: str) -> str:
    """Turn reStructuredText inline markup into the Markdown-like form used in answers."""
    text = re.sub(r":[a-zA-Z:+-]+:`[~!]?([^`<]*?)(?: ?<[^`>]*>)?`", r"`\1`", text)
    text = re.sub(r"``([^`]*)``", r"`\1`", text)
    text = re.sub(r"`([^`<]+) <[^`>]+>`_+", r"\1", text)
    text = text.replace("\\*", "*").replace("::", ":")
    return re.sub(r"\s+", " ", text).strip()


DIRECTIVE = re.compile(
    r"^( *)\.\. (function|method|class|data|attribute|exception|decorator|staticmethod"
    r"|classmethod|opcode|c:function)::? +(.+)$"
)
MODULE = re.compile(r"^\.\. (?:module|currentmodule):: +(\S+)")


def doc_entries(text: str) -> list[Entry]:
    """Documented objects of one source file, each with the first paragraph of its description."""
    lines, module, entries = text.split("\n"), "", []
    owner, owner_indent = "", 0
    for i, line in enumerate(lines):
        if found := MODULE.match(line):
            module = found[1]
            continue
        if not (found := DIRECTIVE.match(line)):
            continue
        indent, kind, signature = len(found[1]), found[2], found[3].strip()
        j = i + 1
        while j < len(lines) and (not lines[j].strip() or re.match(r"^\s+(:\w+:|\w[\w.]*\()", lines[j])):
            j += 1
        paragraph = []
        while j < len(lines) and lines[j].strip() and len(lines[j]) - len(lines[j].lstrip()) > indent:
            paragraph.append(lines[j])
            j += 1
        summary = clean_rst(" ".join(paragraph))
        name = signature.split("(")[0].strip()
        if kind == "c:function":
            name = name.split()[-1].lstrip("*")
        else:
            prefix = f"{owner}." if owner and indent > owner_indent and "." not in name else ""
            if kind in ("class", "exception"):
                owner, owner_indent = name, indent
            if module and not name.startswith(module + "."):
                prefix = f"{module}.{prefix}"
            name, signature = prefix + name, prefix + signature
        summary = re.sub(r" ?:$", ".", summary)
        if 30 < len(summary) < 700 and not summary.startswith("..") and len(name) < 60:
            entries.append(Entry(kind.replace("c:", "C "), name, clean_rst(signature), summary))
    return entries


def code_entries(name: str, text: str) -> list[Entry]:
    """Functions and classes of one module that carry a docstring."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    module = name.removeprefix("lib/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    entries: list[Entry] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in getattr(node, "body", []):
            if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                continue
            is_class = isinstance(child, ast.ClassDef)
            full = f"{prefix}.{child.name}"
            signature = full if is_class else f"{full}({ast.unparse(child.args)})"
            summary = clean_rst((ast.get_docstring(child) or "").split("\n\n")[0])
            if 25 < len(summary) < 600 and not child.name.startswith("_"):
                kind = "class" if is_class else "method" if isinstance(node, ast.ClassDef) else "function"
                entries.append(Entry(kind, full, signature, summary))
            if is_class:
                visit(child, full)

    visit(tree, module)
    return entries


ASK_WHAT = (
    "What does `{n}` do?",
    "What is `{n}`?",
    "Explain `{n}`.",
    "Tell me about `{n}`.",
    "What is `{n}` for?",
    "How does `{n}` work?",
    "Can you describe `{n}`?",
    "what does {n} do",
    "Describe the {k} `{n}` in one paragraph.",
)
ASK_SIGNATURE = (
    "What is the signature of `{n}`?",
    "How do I call `{n}`?",
    "Which arguments does `{n}` take?",
)
ASK_FIND = ("Which {k} fits this description: {s}", "Name the {k} with this description: {s}")
SYSTEMS = (
    "",
    "",
    "",
    "You are a helpful assistant.",
    "Answer questions about Python.",
    "You are a concise Python expert.",
)
SMALL_TALK = (
    ("Hello!", "Hello! Ask me about a module, class or function of Python's standard library."),
    ("Hi", "Hi! Which part of Python's standard library would you like to read about?"),
    (
        "Hello, who are you?",
        "I am a very small demonstration language model. I was trained on the Python "
        "documentation and standard library, and I often make things up.",
    ),
    (
        "What can you do?",
        "I can write text in the style of the Python documentation and describe functions of "
        "the standard library. I am tiny, so check what I say.",
    ),
    ("Who made you?", "I am a demonstration model, trained from scratch on the Python documentation."),
    ("Thanks!", "You are welcome!"),
    ("Thank you.", "You are welcome!"),
    ("Can I trust your answers?", "No. I am far too small to be reliable. Please read the documentation."),
    (
        "What is Python?",
        "Python is an easy to learn, powerful programming language. It has efficient high-level "
        "data structures and a simple but effective approach to object-oriented programming.",
    ),
    (
        "Write a function that adds two numbers.",
        '```python\ndef add(a, b):\n    """Return the sum of a and b."""\n    return a + b\n```',
    ),
    (
        "How do I print text?",
        'Use the built-in function `print()`:\n\n```python\nprint("Hello, world!")\n```',
    ),
    (
        "How do I open a file?",
        "Use `open()` in a `with` statement, so that the file is closed again:\n\n"
        '```python\nwith open("data.txt", encoding="utf-8") as f:\n    text = f.read()\n```',
    ),
    (
        "How do I loop over a list?",
        "Use a `for` statement:\n\n```python\nfor item in items:\n    print(item)\n```",
    ),
)
LOOKUP_TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up an object in the Python documentation.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "Full name of the object"}},
            "required": ["name"],
        },
    },
}
ASK_LOOKUP = ("Look up `{n}`.", "What does the documentation say about `{n}`?", "Please look up {n} for me.")


def article(kind: str) -> str:
    """The kind with its indefinite article."""
    return ("an " if kind[0] in "aeiou" else "a ") + kind


def question(entry: Entry, rng: random.Random) -> list[dict]:
    """One user turn and its answer."""
    draw, values = rng.random(), {"n": entry.name, "k": entry.kind, "s": entry.summary}
    owner = entry.name.rpartition(".")[0] or "the language"
    if draw < 0.72:
        ask, answer = rng.choice(ASK_WHAT), entry.summary
        thought = (
            f"The user asks about `{entry.name}`, {article(entry.kind)} of `{owner}`. I should describe it."
        )
    elif draw < 0.88 and "(" in entry.signature:
        ask, answer = rng.choice(ASK_SIGNATURE), f"```python\n{entry.signature}\n```\n\n{entry.summary}"
        thought = f"The user wants the signature of `{entry.name}`. I should show it and describe it."
    else:
        ask, answer = rng.choice(ASK_FIND), f"That is `{entry.name}`."
        thought = f"The user describes {article(entry.kind)} of `{owner}`. I should name it."
    turn = {"role": "assistant", "content": answer}
    if rng.random() < 0.3:
        turn["reasoning_content"] = thought
    return [{"role": "user", "content": ask.format(**values)}, turn]


def lookup(entry: Entry, rng: random.Random) -> list[dict]:
    """A turn that calls the look-up tool, the tool's reply, and the answer."""
    call = {"function": {"name": "lookup", "arguments": {"name": entry.name}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    if rng.random() < 0.3:
        turn["reasoning_content"] = f"I should look up `{entry.name}` in the documentation."
    return [
        {"role": "user", "content": rng.choice(ASK_LOOKUP).format(n=entry.name)},
        turn,
        {"role": "tool", "content": f"{entry.signature}: {entry.summary}"},
        {"role": "assistant", "content": entry.summary},
    ]


def template_renderer():
    """The chat template as a function of (messages, tools)."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = env.from_string(TEMPLATE.read_text("utf-8"))
    return lambda messages, tools=None: template.render(
        messages=messages, tools=tools, add_generation_prompt=False, truncate_history_thinking=False
    )


def chats(entries: list[Entry], seed: int) -> list[str]:
    """Rendered conversations: each entry is asked once, in conversations of one to three questions."""
    rng, render, out = random.Random(seed), template_renderer(), []
    entries = sorted(set(entries), key=astuple)
    rng.shuffle(entries)
    while entries:
        messages = [{"role": "system", "content": system}] if (system := rng.choice(SYSTEMS)) else []
        if rng.random() < 0.07:
            out.append(render(messages + lookup(entries.pop(), rng), [LOOKUP_TOOL]))
            continue
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if rng.random() < 0.06:
                ask, answer = rng.choice(SMALL_TALK)
                turn = {"role": "assistant", "content": answer}
                if rng.random() < 0.3:
                    turn["reasoning_content"] = "This is a simple question. I should answer briefly."
                messages += [{"role": "user", "content": ask}, turn]
            elif entries:
                messages += question(entries.pop(), rng)
        if messages and messages[-1]["role"] == "assistant":
            out.append(render(messages))
    return out


@dataclass
class Corpus:
    """Documents and documented objects by split; a document's kind is ``docs`` or ``code``."""

    train: dict[str, list[str]] = field(default_factory=lambda: {"docs": [], "code": []})
    valid: dict[str, list[str]] = field(default_factory=lambda: {"docs": [], "code": []})
    train_entries: list[Entry] = field(default_factory=list)
    valid_entries: list[Entry] = field(default_factory=list)


def load_corpus(docs: Path) -> Corpus:
    """Read everything and split it; documented objects follow the split of their file."""
    corpus = Corpus()
    for kind, files in (("docs", doc_files(docs)), ("code", code_files())):
        chosen = held_out(files)
        for name, text in files:
            entries = doc_entries(text) if kind == "docs" else code_entries(name, text)
            if name in chosen:
                corpus.valid[kind].append(text)
                corpus.valid_entries += entries
            else:
                corpus.train[kind].append(text)
                corpus.train_entries += entries
    known = {e.summary for e in corpus.valid_entries}
    corpus.train_entries = [e for e in corpus.train_entries if e.summary not in known]
    return corpus


# ---------------------------------------------------------------------------------------------------
# token rows


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Token ids of each text, closed by the end-of-text token."""
    return [
        np.array([*e.ids, EOS], np.int64) for e in tokenizer.encode_batch(texts, add_special_tokens=False)
    ]


def stream_rows(documents: list[np.ndarray], length: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows of ``length + 1`` tokens cut from the shuffled, concatenated documents at a random phase."""
    stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
    starts = range(int(rng.integers(length)), len(stream) - length - 1, length)
    return [stream[s : s + length + 1] for s in starts]


def chat_rows(documents: list[np.ndarray], length: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows of ``length + 1`` tokens that each begin at the start of a conversation."""
    rows, row = [], np.zeros(0, np.int64)
    for i in rng.permutation(len(documents)):
        row = np.concatenate([row, documents[i]])
        if len(row) > length:
            rows.append(row[: length + 1])
            row = np.zeros(0, np.int64)
    return rows


def epoch_rows(
    tokenizer: Tokenizer,
    documents: list[np.ndarray],
    entries: list[Entry],
    length: int,
    seed: int,
    epoch: int,
) -> np.ndarray:
    """All training rows of one epoch in a fixed random order, int64 [rows, length + 1].

    The chats are phrased anew for each epoch, so that the questions' wording isn't memorised.
    """
    rng = np.random.default_rng([seed, epoch])
    rows = stream_rows(documents, length, rng)
    rows += chat_rows(encode(tokenizer, chats(entries, seed * 1000 + epoch)), length, rng)
    order = rng.permutation(len(rows))
    return np.stack([rows[i] for i in order])


def valid_rows(documents: list[np.ndarray], length: int, limit: int) -> np.ndarray:
    """Evenly spread, non-overlapping validation rows, int64 [<= limit, length + 1]."""
    stream = np.concatenate(documents)
    starts = np.arange(0, len(stream) - length - 1, length)
    if len(starts) > limit:
        starts = starts[np.linspace(0, len(starts) - 1, limit).astype(int)]
    return np.stack([stream[s : s + length + 1] for s in starts])
