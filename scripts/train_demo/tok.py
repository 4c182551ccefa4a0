# SPDX-License-Identifier: Apache-2.0
"""The byte-level BPE tokenizer of the demo checkpoint."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 3072
NAMED = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    10: "<|im_start|>",
    11: "<|im_end|>",
    12: "<think>",
    13: "</think>",
    14: "<tool_call>",
    15: "</tool_call>",
}
# Tags that carry structure in the text itself: they must survive decoding without special tokens.
VISIBLE = (12, 13, 14, 15)
RESERVED = [NAMED.get(i, f"<SPECIAL_{i}>") for i in range(32)]
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train on ``texts``; ids 0..31 are reserved, then 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=RESERVED,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["id"] not in VISIBLE
    return Tokenizer.from_str(json.dumps(state))


def check_round_trip(tokenizer: Tokenizer, texts: list[str]) -> None:
    """Fail unless encoding and decoding give every text back, including arbitrary code points."""
    rng = random.Random(0)
    pool = [c for c in range(1, 0x110000, 7) if not 0xD800 <= c < 0xE000]
    odd = ["".join(map(chr, rng.sample(pool, 200))) for _ in range(20)]
    for text in [*texts, *odd, "", " a", "\r\n\t  x", "<think>\n</think>", "né\u0301 🙂 中文"]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text, repr(text[:80])


def save_tokenizer(tokenizer: Tokenizer, template: str, out: Path) -> None:
    """Write ``tokenizer.json`` and the files around it."""
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert all(tokenizer.token_to_id(name) == i for i, name in enumerate(RESERVED))
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", "utf-8")
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "unk_token": "<unk>"}
    added = {
        str(i): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": i not in VISIBLE,
        }
        for i, name in enumerate(RESERVED)
    }
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        **named,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (out / "special_tokens_map.json").write_text(json.dumps(named, indent=2) + "\n", "utf-8")
    (out / "chat_template.jinja").write_text(template, "utf-8")
