# SPDX-License-Identifier: Apache-2.0
"""A fast training forward of Nemotron-H: same parameters as the checkpoint, experts stacked.

B batch, L length, H hidden, V vocabulary; E experts of width I; N state, P head width of the Mamba layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Spec:
    """Dimensions; the names follow config.json."""

    pattern: str = "MEM*EMEM*EME"
    hidden_size: int = 192
    vocab_size: int = 3072
    mamba_num_heads: int = 12
    mamba_head_dim: int = 32
    ssm_state_size: int = 32
    n_groups: int = 2
    conv_kernel: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 64
    moe_shared_expert_intermediate_size: int = 128
    routed_scaling_factor: float = 2.5
    eps: float = 1e-5


class Norm(nn.Module):
    """RMSNorm computed in FP32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> FP32 [..., H]."""
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Linear(nn.Linear):
    """A bias-free linear layer that computes in its input's dtype."""

    def __init__(self, inputs: int, outputs: int, std: float = 0.02) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, self.weight.to(x.dtype))


def chunk_scan(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """State-space scan h_t = exp(decay_t) h_{t-1} + dt_t x_t b_t', y_t = h_t c_t, by chunks.

    x [B, L, heads, P], dt and decay [B, L, heads], b and c [B, L, groups, N] -> y [B, L, heads, P], all FP32.
    L must be a multiple of ``chunk``.
    """
    size, length, heads, width = x.shape
    groups, state = b.shape[2:]
    count, share = length // chunk, heads // groups
    # [B, C, G, (S,) Q, ...]: chunks outermost, positions innermost: every product is a batched matmul.
    x = (x * dt[..., None]).view(size, count, chunk, groups, share, width).permute(0, 1, 3, 4, 2, 5)
    b, c = (t.view(size, count, chunk, groups, state).transpose(2, 3) for t in (b, c))
    total = decay.view(size, count, chunk, groups, share).permute(0, 1, 3, 4, 2).cumsum(-1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    weights = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -math.inf).exp()
    within = ((c @ b.mT)[:, :, :, None] * weights) @ x
    last = total[..., -1]
    # State that each chunk adds, then the state at each chunk's start (strictly earlier chunks, decayed).
    added = (x * (last[..., None] - total).exp()[..., None]).mT @ b[:, :, :, None]
    ends = last.permute(0, 2, 3, 1).cumsum(-1)
    earlier = torch.ones(count, count, dtype=torch.bool, device=x.device).tril(-1)
    starts = F.pad(ends, (1, 0))[..., :-1]
    carry = (starts[..., :, None] - ends[..., None, :]).masked_fill(~earlier, -math.inf).exp()
    added = added.permute(0, 2, 3, 1, 4, 5).reshape(size, groups, share, count, width * state)
    before = (carry @ added).view(size, groups, share, count, width, state).permute(0, 3, 1, 2, 4, 5)
    across = (c[:, :, :, None] @ before.mT) * total.exp()[..., None]
    return (within + across).permute(0, 1, 4, 2, 3, 5).reshape(size, length, heads, width)


class Mamba(nn.Module):
    """Mamba-2 mixer."""

    def __init__(self, spec: Spec, chunk: int = 32) -> None:
        super().__init__()
        self.spec, self.chunk = spec, chunk
        self.inner = spec.mamba_num_heads * spec.mamba_head_dim
        self.channels = self.inner + 2 * spec.n_groups * spec.ssm_state_size
        self.in_proj = Linear(spec.hidden_size, self.inner + self.channels + spec.mamba_num_heads)
        self.conv1d = nn.Conv1d(self.channels, self.channels, spec.conv_kernel, groups=self.channels)
        self.out_proj = Linear(self.inner, spec.hidden_size, 0.02 / math.sqrt(len(spec.pattern)))
        self.norm = Norm(self.inner, spec.eps)
        # As in Mamba-2: time steps log-uniform in [0.001, 0.1] (through the inverse of softplus), A in 1..16.
        step = torch.exp(torch.empty(spec.mamba_num_heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(spec.mamba_num_heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(spec.mamba_num_heads))

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        spec, (size, length, _) = self.spec, x.shape
        gate, mixed, dt = self.in_proj(x).split([self.inner, self.channels, spec.mamba_num_heads], -1)
        padded = F.pad(mixed, (0, 0, spec.conv_kernel - 1, 0))
        taps = self.conv1d.weight.squeeze(1).T
        conv = self.conv1d.bias + sum(padded[:, i : i + length] * taps[i] for i in range(spec.conv_kernel))
        conv = F.silu(conv.float())
        state = spec.n_groups * spec.ssm_state_size
        value, b, c = conv.split([self.inner, state, state], -1)
        value = value.view(size, length, spec.mamba_num_heads, spec.mamba_head_dim)
        b, c = (t.view(size, length, spec.n_groups, spec.ssm_state_size) for t in (b, c))
        dt = F.softplus(dt.float() + self.dt_bias)
        y = chunk_scan(value, dt, -self.A_log.exp() * dt, b, c, self.chunk) + self.D[:, None] * value
        y = y.reshape(size, length, self.inner) * F.silu(gate.float())
        grouped = y.view(size, length, spec.n_groups, -1)
        y = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + spec.eps)
        return self.out_proj((y.reshape(size, length, self.inner) * self.norm.weight).to(x.dtype))


class Attention(nn.Module):
    """Grouped-query attention without positional encoding."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        queries, keys = (n * spec.head_dim for n in (spec.num_attention_heads, spec.num_key_value_heads))
        self.q_proj = Linear(spec.hidden_size, queries)
        self.k_proj, self.v_proj = Linear(spec.hidden_size, keys), Linear(spec.hidden_size, keys)
        self.o_proj = Linear(queries, spec.hidden_size, 0.02 / math.sqrt(len(spec.pattern)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, query heads, L, head_dim]; keys and values repeated per query head."""
        q, k, v = (
            p(x).unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        share = self.spec.num_attention_heads // self.spec.num_key_value_heads
        return q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        q, k, v = self.project(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Router(nn.Module):
    """Sigmoid router with a selection-only bias."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.n_routed_experts, spec.hidden_size).normal_(std=0.02))
        self.register_buffer("e_score_correction_bias", torch.zeros(spec.n_routed_experts))

    def forward(self, x: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
        """[T, H] -> weights [T, E], zero for experts not chosen, and the number of tokens per expert [E]."""
        scores = F.linear(x.float(), self.weight).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(spec.num_experts_per_tok, sorted=False).indices
        mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
        picked = scores * mask
        weights = picked / (picked.sum(-1, keepdim=True) + 1e-20) * spec.routed_scaling_factor
        return weights, mask.sum(0).detach()


class Experts(nn.Module):
    """Stacked expert weights."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        shape = spec.n_routed_experts, spec.moe_intermediate_size, spec.hidden_size
        std = 0.02 / math.sqrt(len(spec.pattern))
        self.up_proj = nn.Parameter(torch.empty(shape).normal_(std=0.02))
        self.down_proj = nn.Parameter(torch.empty(shape).mT.contiguous().normal_(std=std))


class Mlp(nn.Module):
    """Squared-ReLU MLP."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.up_proj = Linear(spec.hidden_size, width)
        self.down_proj = Linear(width, spec.hidden_size, 0.02 / math.sqrt(len(spec.pattern)))

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(F.relu(self.up_proj(x)).square())


class Moe(nn.Module):
    """Mixture of experts, computed densely: at this size one wide product beats sixteen gathered ones."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.gate, self.experts = Router(spec), Experts(spec)
        self.shared_experts = Mlp(spec, spec.moe_shared_expert_intermediate_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L, H] -> [B, L, H] and the tokens per expert [E]."""
        flat = x.flatten(0, 1)
        weights, load = self.gate(flat, self.spec)
        up = self.experts.up_proj.flatten(0, 1).to(x.dtype)
        down = self.experts.down_proj.permute(1, 0, 2).flatten(1).to(x.dtype)
        hidden = F.relu(F.linear(flat, up)).square().unflatten(-1, (self.spec.n_routed_experts, -1))
        hidden = (hidden * weights[..., None].to(x.dtype)).flatten(1)
        return (F.linear(hidden, down).view_as(x) + self.shared_experts(x)), load


class Block(nn.Module):
    """Pre-norm residual block around one mixer; the residual stream is FP32."""

    def __init__(self, spec: Spec, kind: str) -> None:
        super().__init__()
        self.norm = Norm(spec.hidden_size, spec.eps)
        self.mixer = {"M": Mamba, "*": Attention, "E": Moe}[kind](spec)

    def forward(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """FP32 [B, L, H] -> FP32 [B, L, H] and the expert load [E] of a MoE block."""
        y = self.mixer(self.norm(x).to(dtype))
        y, load = y if isinstance(y, tuple) else (y, None)
        return x + y.float(), load


class Backbone(nn.Module):
    """Embeddings, blocks and the final norm."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(spec.vocab_size, spec.hidden_size)
        nn.init.normal_(self.embeddings.weight, std=0.02)
        self.layers = nn.ModuleList(Block(spec, kind) for kind in spec.pattern)
        self.norm_f = Norm(spec.hidden_size, spec.eps)

    def residuals(self, ids: Tensor, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Token ids [B, L] -> the residual stream FP32 [B, L, H] after each layer, and the MoE layers' loads."""
        x, outputs, loads = self.embeddings(ids), [], []
        for layer in self.layers:
            x, load = layer(x, dtype)
            outputs.append(x)
            if load is not None:
                loads.append(load)
        return outputs, loads

    def forward(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Token ids [B, L] -> final hidden FP32 [B, L, H] and the expert loads of the MoE layers."""
        outputs, loads = self.residuals(ids, dtype)
        return self.norm_f(outputs[-1]), loads


class Trunk(nn.Module):
    """The language model."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.backbone = Backbone(spec)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size)

    def routers(self) -> list[Router]:
        """The routers in layer order."""
        return [layer.mixer.gate for layer in self.backbone.layers if isinstance(layer.mixer, Moe)]


class MtpInput(nn.Module):
    """First half of the MTP module: joins token and hidden, then attention."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = (Norm(spec.hidden_size, spec.eps) for _ in range(3))
        self.eh_proj = Linear(2 * spec.hidden_size, spec.hidden_size)
        self.mixer = Attention(spec)


class MtpOutput(nn.Module):
    """Second half of the MTP module: mixture of experts, then the final norm."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.norm, self.final_layernorm = Norm(spec.hidden_size, spec.eps), Norm(spec.hidden_size, spec.eps)
        self.mixer = Moe(spec)


class Mtp(nn.Module):
    """The multi-token-prediction module, applied again and again to draft further ahead."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleList([MtpInput(spec), MtpOutput(spec)])

    def forward(
        self, embedded: Tensor, hidden: Tensor, past: list[tuple[Tensor, Tensor]], dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """One depth for every anchor position p at once.

        embedded [B, L, H]: the token at p + depth; hidden [B, L, H]: the trunk's h_p at depth 1, else the
        previous depth's result. ``past`` holds keys and values [B, heads, L, head_dim] of the earlier depths.
        As at inference, an anchor sees the depth-1 entries up to p, made from true hiddens, and the entries
        of its own chain. Returns FP32 h' [B, L, H], this depth's keys and values, and the expert load.
        """
        first, second = self.layers
        joined = torch.cat([first.enorm(embedded), first.hnorm(hidden)], -1)
        x = first.eh_proj(joined.to(dtype)).float()
        q, k, v = first.mixer.project(first.norm(x).to(dtype))
        x = x + first.mixer.o_proj(self.attend(q, [*past, (k, v)])).float()
        y, load = second.mixer(second.norm(x).to(dtype))
        return second.final_layernorm(x + y.float()), (k, v), load

    def attend(self, q: Tensor, entries: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Causal over the first depth's entries, only the own position of later ones: [B, L, query width]."""
        (keys, values), chain = entries[0], entries[1:]
        scale, length = self.spec.head_dim**-0.5, q.shape[2]
        causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        scores = ((q @ keys.mT).float() * scale).masked_fill(~causal, -math.inf)
        own = [((q * k).float().sum(-1, keepdim=True) * scale) for k, _ in chain]
        weights = torch.cat([scores, *own], -1).softmax(-1).to(q.dtype)
        y = weights[..., :length] @ values
        for i, (_, v) in enumerate(chain):
            y = y + weights[..., length + i : length + i + 1] * v
        return y.transpose(1, 2).flatten(2)


def token_loss(trunk: Trunk, hidden: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean cross-entropy in nats of targets [B, L] given final hiddens [B, L, H]."""
    logits = trunk.lm_head(hidden.to(dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
