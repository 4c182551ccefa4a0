# SPDX-License-Identifier: Apache-2.0
"""Block drafters for the demo checkpoint: their configurations, and a training forward over many blocks at once.

DFlash (arXiv:2602.06036) and DSpark (arXiv:2607.05147) in the published checkpoint formats: parameters have the
released tensors' names. What a block sees is what it sees when it drafts; docs/drafters.md describes that.

B batch, L length of a text, A anchors (blocks) of a text, S tokens of a block, H hidden, V vocabulary, D head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import model
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_build.spec import ModelSpec
from nemo_build.spec_draft import DraftSpec
from nemo_build.spec_draft_config import build_draft

TAPS = [2, 8, 11]
MASK_TOKEN = 31  # the last of the tokenizer's reserved ids, which no text has
DRAFTS = 7  # a block drafts this many tokens

COMMON = {
    "attention_bias": False,
    "dtype": "bfloat16",
    "has_embed_tokens": False,
    "has_lm_head": False,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 192,
    "intermediate_size": 192,
    # A window learns sooner than everything does, and makes a drafter the same at any length of context.
    "layer_types": ["sliding_attention"] * 2,
    "max_position_embeddings": 8192,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 12,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_window": 64,
    "tie_word_embeddings": False,
    "vocab_size": 3072,
}

CONFIGS: dict[str, dict] = {
    # A token of a block sees the whole block. The anchor's own row drafts nothing.
    "dflash": COMMON
    | {
        "architectures": ["DFlashDraftModel"],
        "block_size": DRAFTS + 1,
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": TAPS},
        "sample_from_anchor": False,
    },
    # Every row drafts the token after it; a sequential head makes the tokens of a block fit each other.
    "dspark": COMMON
    | {
        "architectures": ["Qwen3DSparkModel"],
        "attention_sink_bias": True,
        "block_size": DRAFTS,
        "confidence_head_with_markov": True,
        "dflash_config": {"causal": True, "mask_token_id": MASK_TOKEN, "target_layer_ids": TAPS},
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 24,
        "sample_from_anchor": True,
    },
}
"""``config.json`` of each drafter; what trains them is a :class:`~nemo_build.spec_draft.DraftSpec` read from it."""


@dataclass(frozen=True)
class Blocks:
    """Blocks behind their contexts.

    Attributes:
        ids: The texts, int64 [B, L + 1].
        anchors: Positions of the blocks' first tokens, int64 [B, A], from 1 to L - DRAFTS.
        drafts: Tokens that each block drafts, int64 [B, A], from 1 to DRAFTS. Its later rows are not there: where rows
            see later ones, a block of fewer drafts is another block.
    """

    ids: Tensor
    anchors: Tensor
    drafts: Tensor

    def tokens(self, first: int, count: int) -> Tensor:
        """Tokens of the text at positions anchor + first and on, int64 [B, A, count]."""
        at = self.anchors[..., None] + first + torch.arange(count)
        return self.ids.gather(1, at.flatten(1)).view(at.shape)


@dataclass(frozen=True)
class View:
    """What the rows of blocks see, and where everything is.

    Attributes:
        context: Whether a row sees a position of the text, bool [B, 1, A * S, L].
        block: Whether a row sees a row of its block, bool [B, 1, A, S, S].
        positions: Of the rows, [B, A, S].
    """

    context: Tensor
    block: Tensor
    positions: Tensor

    @classmethod
    def of(cls, blocks: Blocks, size: int, length: int, causal: bool, window: int) -> View:
        """That of a layer: the context is what lies before the anchor, blocks do not see each other."""
        steps = torch.arange(size)
        positions = blocks.anchors[..., None] + steps
        before = torch.arange(length) < blocks.anchors[..., None, None]
        if window:
            before = before & (positions[..., None] - torch.arange(length) < window)
        there = steps <= blocks.drafts[..., None, None]
        inside = (steps <= steps[:, None]) if causal else there
        inside = inside.expand(*blocks.anchors.shape, size, size)
        context = before.expand(-1, -1, size, -1).flatten(1, 2)
        return cls(context[:, None], inside[:, None], positions)


def turn(x: Tensor, positions: Tensor, spec: DraftSpec) -> Tensor:
    """Rotate heads [..., heads, D] at ``positions [...]``; components i and i + D/2 are a pair."""
    angles = positions[..., None, None].float() * torch.tensor(spec.rotary.frequencies())
    cos, sin = angles.cos(), angles.sin()
    low, high = x.float().chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class Attention(nn.Module):
    """Grouped-query attention of blocks over context and block, with normed heads and rotary positions."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.spec = spec
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = model.Linear(spec.hidden_size, queries)
        self.k_proj, self.v_proj = (model.Linear(spec.hidden_size, keys) for _ in "kv")
        self.o_proj = model.Linear(queries, spec.hidden_size)
        self.q_norm, self.k_norm = (model.Norm(spec.head_dim, spec.norm_eps) for _ in "qk")
        if spec.sinks:
            self.attention_sink_bias = nn.Parameter(torch.zeros(spec.num_heads))

    def heads(self, x: Tensor, projection: model.Linear) -> Tensor:
        """[..., H] -> [..., heads, D]."""
        return projection(x).unflatten(-1, (-1, self.spec.head_dim))

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of ``x [B, ..., H]``, repeated per query head: each [B, query heads, ..., D]."""
        share = self.spec.num_heads // self.spec.num_kv_heads
        keys = turn(self.k_norm(self.heads(x, self.k_proj)), positions, self.spec).to(x.dtype)
        both = keys, self.heads(x, self.v_proj)
        keys, values = (t.movedim(-2, 1).repeat_interleave(share, 1) for t in both)
        return keys, values

    def forward(self, context: Tensor, x: Tensor, view: View) -> Tensor:
        """Context [B, L, H] and rows [B, A, S, H] -> [B, A, S, H]."""
        length, size = context.shape[1], x.shape[2]
        q = (
            turn(self.q_norm(self.heads(x, self.q_proj)), view.positions, self.spec)
            .to(x.dtype)
            .movedim(-2, 1)
        )
        far_keys, far_values = self.keys_values(context, torch.arange(length))
        near_keys, near_values = self.keys_values(x, view.positions)
        far = (q.flatten(2, 3) @ far_keys.mT).float().masked_fill(~view.context, -math.inf)
        near = (q @ near_keys.mT).float().masked_fill(~view.block, -math.inf).flatten(2, 3)
        scores = torch.cat([far, near], -1) * self.spec.scale
        if self.spec.sinks:
            sinks = self.attention_sink_bias.view(-1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1).to(x.dtype)
        near = weights[..., length : length + size].unflatten(2, x.shape[1:3]) @ near_values
        y = (weights[..., :length] @ far_values).view_as(near) + near
        return self.o_proj(y.movedim(1, -2).flatten(-2))


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            model.Linear(spec.hidden_size, spec.intermediate_size) for _ in range(2)
        )
        self.down_proj = model.Linear(spec.intermediate_size, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each with a norm before; the residual stream is FP32."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            model.Norm(spec.hidden_size, spec.norm_eps) for _ in range(2)
        )
        self.self_attn, self.mlp = Attention(spec), Mlp(spec)

    def forward(self, context: Tensor, x: Tensor, view: View) -> Tensor:
        """FP32 rows [B, A, S, H] -> FP32 [B, A, S, H]; the context's dtype is what it computes in."""
        x = x + self.self_attn(context, self.input_layernorm(x).to(context.dtype), view).float()
        return x + self.mlp(self.post_attention_layernorm(x).to(context.dtype)).float()


class Markov(nn.Module):
    """What the token before adds to a token's logits."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(spec.vocab_size, spec.markov_rank)
        self.markov_w2 = model.Linear(spec.markov_rank, spec.vocab_size)
        nn.init.normal_(self.markov_w1.weight, std=0.02)


class Confidence(nn.Module):
    """How likely the target is to accept a token, as a logit."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.proj = nn.Linear(spec.hidden_size + spec.markov_rank, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


class Drafter(nn.Module):
    """A drafter; embeddings and output head are the target's."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = model.Linear(len(spec.taps) * spec.hidden_size, spec.hidden_size)
        self.hidden_norm, self.norm = (model.Norm(spec.hidden_size, spec.norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(Layer(spec) for _ in spec.windows)
        if spec.markov_rank:
            self.markov_head = Markov(spec)
        if spec.confidence:
            self.confidence_head = Confidence(spec)

    def forward(self, taps: Tensor, blocks: Blocks, embeddings: Tensor) -> Tensor:
        """Hidden states FP32 [B, A, DRAFTS, H] of the rows that draft.

        ``taps [B, L, n * H]``, whose dtype it computes in, are the target's residual stream after the layers of
        ``spec.taps``; ``embeddings [V, H]`` its table.
        """
        size = DRAFTS + (not self.spec.sample_from_anchor)
        tokens = torch.full((*blocks.anchors.shape, size), self.spec.mask_token_id)
        tokens[..., 0] = blocks.tokens(0, 1)[..., 0]
        x = F.embedding(tokens, embeddings)
        context = self.hidden_norm(self.fc(taps)).to(taps.dtype)
        for layer, window in zip(self.layers, self.spec.windows, strict=True):
            x = layer(context, x, View.of(blocks, size, taps.shape[1], self.spec.causal, window))
        return self.norm(x)[..., size - DRAFTS :, :]

    def logits(self, hidden: Tensor, previous: Tensor, head: Tensor) -> Tensor:
        """Logits FP32 [..., V] of hidden states [..., H] after the tokens ``previous [...]``; head [V, H]."""
        logits = F.linear(hidden.to(head.dtype), head).float()
        if not self.spec.markov_rank:
            return logits
        vectors = self.markov_head.markov_w1(previous).to(head.dtype)
        return logits + self.markov_head.markov_w2(vectors).float()

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [...] of a draft's acceptance: hidden states [..., H] after the tokens ``previous [...]``."""
        vectors = self.markov_head.markov_w1(previous)
        return self.confidence_head.proj(torch.cat([hidden, vectors], -1))[..., 0]


def make(target: ModelSpec) -> nn.ModuleDict:
    """Both drafters of a target, untrained, by name."""
    specs = {n: build_draft(config, target, source=f"{n} of train_demo") for n, config in CONFIGS.items()}
    return nn.ModuleDict({name: Drafter(spec) for name, spec in specs.items()})
