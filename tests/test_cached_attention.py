# SPDX-License-Identifier: Apache-2.0
"""``CachedAttention``: function and kernels against the reference, its options, and what must not change a bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.plugins import native
from nemo_build.plugins.registry import plugins_by_name

from .op_models import EVERY_KERNEL, check, many, normal, one_node_model, run_function, seeds, step_control


class Attention:
    """Sizes, with options: a window, sinks, rotary components, and tokens that see each other."""

    def __init__(self, rng, kv_heads, group, head_dim, context, *, window=0, causal=1, sinks=False, half=0):
        self.rng, self.kv_heads, self.group, self.head_dim = rng, kv_heads, group, head_dim
        self.context = context
        self.attributes = {"scale": head_dim**-0.5, "window": window, "causal": causal}
        angles = np.arange(context)[:, None] * 0.7 ** np.arange(half)
        self.options = [
            normal(rng, kv_heads * group) * 2 if sinks else None,
            np.cos(angles).astype(np.float32) if half else None,
            np.sin(angles).astype(np.float32) if half else None,
        ]
        while self.options and self.options[-1] is None:
            self.options.pop()

    def tokens(self, batch: int, steps: int) -> list[np.ndarray]:
        heads = (self.kv_heads * self.group, self.kv_heads, self.kv_heads)
        return [normal(self.rng, batch, steps, h * self.head_dim) for h in heads]

    def caches(self, slots: int) -> list[np.ndarray]:
        return [normal(self.rng, slots, self.kv_heads, self.context, self.head_dim) for _ in range(2)]

    def step(self, tokens, caches, slots, past, lengths=None, **how) -> list[np.ndarray]:
        full = np.full(len(slots), tokens[0].shape[1])
        inputs = [*tokens, *caches, slots, past, full if lengths is None else lengths, *self.options]
        return run_function("CachedAttention", inputs, self.attributes, **how)

    def check(self, batch: int, steps: int) -> None:
        order, past, _, lengths = step_control(self.rng, batch, batch + 1, steps, 0, self.context)
        inputs = [*self.tokens(batch, steps), *self.caches(batch + 1), order, past, lengths, *self.options]
        check("CachedAttention", inputs, self.attributes, lengths)


@many
@given(
    seed=seeds,
    batch=st.integers(1, 4),
    steps=st.sampled_from([1, 2, 5, 9, 40]),
    context=st.sampled_from([40, 150, 300]),
    head_dim=st.sampled_from([1, 2, 3, 8, 16, 21, 50, 128]),
    window=st.sampled_from([0, 0, 1, 6, 200]),
    causal=st.booleans(),
    sinks=st.booleans(),
    rotary=st.sampled_from([0, 0.3, 1]),
)
def test_against_the_reference(seed, batch, steps, context, head_dim, window, causal, sinks, rotary):
    rng = np.random.default_rng(seed)
    kv_heads, group = (int(v) for v in rng.integers(1, 7, 2))
    half = int(rotary * head_dim) // 2
    options = {"window": window, "causal": int(causal), "sinks": sinks, "half": half}
    Attention(rng, kv_heads, group, head_dim, context, **options).check(batch, steps)


@pytest.mark.parametrize("options", [{}, {"window": 1500, "sinks": True}], ids=["all", "window and sinks"])
@pytest.mark.parametrize("steps", [1, 5, 200])
def test_long_contexts(steps, options):
    """Several spans of the context, as one task and as several."""
    Attention(np.random.default_rng(1), 2, 3, 8, 2500, **options).check(2, steps)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sinks_as_they_are_stored(dtype):
    attention = Attention(np.random.default_rng(2), 2, 2, 4, 20, sinks=True)
    attention.options[0] = attention.options[0].astype(dtype)
    attention.check(2, 3)


OPTIONS = {
    "plain": {},
    "all": {"window": 70, "sinks": True, "half": 5},
    "long window": {"window": 1100},
}


@pytest.mark.parametrize("kind", native.instruction_sets())
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_division_into_steps_changes_no_bit(kind, options):
    """One row in one step, and in several beside another row; the context crosses tiles and a span."""
    rng = np.random.default_rng(3)
    past, total = 900, 260
    attention = Attention(rng, 2, 5, 21, past + total, **options)
    tokens, caches = attention.tokens(1, total), attention.caches(3)
    y, keys, values = attention.step(
        tokens, caches, np.array([1]), np.array([past]), instruction_set=kind, threads=3
    )
    pieces, running, at = [], caches, 0
    for i, length in enumerate((1, 3, 1, 120, 2, 1, 132)):
        part = [a[:, at : at + length] for a in tokens]
        beside = [np.concatenate([b, a]) for a, b in zip(part, attention.tokens(1, length), strict=True)]
        slots, before = np.array([2, 1]), np.array([0, past + at])
        y_part, *running = attention.step(
            beside, running, slots, before, instruction_set=kind, threads=1 + i % 2
        )
        pieces.append(y_part[1:])
        at += length
    assert at == total
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), y)
    np.testing.assert_array_equal(running[0][1], keys[1])
    np.testing.assert_array_equal(running[1][1], values[1])


@pytest.mark.parametrize("kind", EVERY_KERNEL)
@pytest.mark.parametrize("causal", [0, 1])
def test_what_no_query_sees_may_be_anything(kind, causal):
    """NaN at and past a row's end, before its window and in its padding reaches no output."""
    rng = np.random.default_rng(4)
    attention = Attention(rng, 2, 2, 5, 300, window=7, causal=causal, half=2)
    past, lengths = np.array([200, 10, 0, 3]), np.array([4, 1, 2, 0])
    tokens, caches = attention.tokens(4, 4), attention.caches(4)
    for row, (p, n) in enumerate(zip(past, lengths, strict=True)):
        for cache in caches:
            cache[row, :, p + n :] = np.nan
            cache[row, :, : max(p - 6, 0)] = np.nan
        for new in tokens:
            new[row, n:] = np.nan
    y, *_ = attention.step(tokens, caches, np.arange(4), past, lengths, instruction_set=kind)
    assert np.isfinite(y[np.arange(4) < lengths[:, None]]).all()


@pytest.mark.parametrize("kind", native.instruction_sets())
def test_caches_in_place(kind):
    rng = np.random.default_rng(5)
    attention = Attention(rng, 2, 3, 5, 30, half=1)
    slots, past, lengths = np.array([2, 0, 1]), np.array([20, 0, 3]), np.array([4, 3, 0])
    inputs = [*attention.tokens(3, 4), *attention.caches(4), slots, past, lengths, *attention.options]
    names = plugins_by_name()["CachedAttention"].input_names(len(inputs))
    used = {n: a for n, a in zip(names, inputs, strict=True) if a is not None}
    apart = run_function("CachedAttention", inputs, attention.attributes, instruction_set=kind)

    options = ort.SessionOptions()
    options.register_custom_ops_library(str(native.library_file(kind)))
    model = one_node_model("CachedAttention", inputs, attention.attributes)
    binding = (session := ort.InferenceSession(model.SerializeToString(), options)).io_binding()
    tensors = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in used.items()}
    for name, value in tensors.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y")
    for name in ("key_cache", "value_cache"):
        binding.bind_ortvalue_output(f"{name}_out", tensors[name])
    session.run_with_iobinding(binding)
    valid = np.arange(4) < lengths[:, None]
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy()[valid], apart[0][valid])
    np.testing.assert_array_equal(tensors["key_cache"].numpy(), apart[1])
    np.testing.assert_array_equal(tensors["value_cache"].numpy(), apart[2])


@pytest.mark.parametrize("kind", native.instruction_sets())
@pytest.mark.parametrize(
    ("what", "slot", "past", "length"),
    [("lengths", 0, 0, 4), ("slots", 2, 0, 1), ("the cache", 0, 8, 3), ("the cache", 0, -1, 1)],
)
def test_kernels_refuse_what_is_out_of_range(kind, what, slot, past, length):
    attention = Attention(np.random.default_rng(6), 1, 1, 2, 10)
    tokens, caches = attention.tokens(1, 3), attention.caches(2)
    with pytest.raises(Exception, match=what):
        attention.step(
            tokens, caches, np.array([slot]), np.array([past]), np.array([length]), instruction_set=kind
        )


@pytest.mark.slow
def test_options_mean_what_transformers_means():
    """Sinks as in gpt-oss, rotation as in Qwen3 with YaRN's tables, a sliding window: against transformers."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen3Config
    from transformers.masking_utils import sliding_window_causal_mask_function
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    kv_heads, group, head_dim, n, window = 2, 3, 16, 40, 9
    attention = Attention(np.random.default_rng(7), kv_heads, group, head_dim, n, window=window, sinks=True)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 10}
    config = Qwen3Config(
        head_dim=head_dim, num_attention_heads=6, max_position_embeddings=40, rope_parameters=yarn
    )
    tokens = attention.tokens(1, n)
    q, k, v = (torch.tensor(a).view(1, n, -1, head_dim).transpose(1, 2) for a in tokens)
    cos, sin = Qwen3RotaryEmbedding(config)(v, torch.arange(n)[None])
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    seen = sliding_window_causal_mask_function(window)(0, 0, torch.arange(n)[:, None], torch.arange(n))
    mask = torch.where(seen, 0.0, -1e30)
    module = torch.nn.Module()
    module.sinks, module.num_key_value_groups = torch.tensor(attention.options[0]), group
    module.eval()
    want, _ = eager_attention_forward(module, q, k, v, mask[None, None], scaling=head_dim**-0.5)

    attention.options += [t[0, :, : head_dim // 2].contiguous().numpy() for t in (cos, sin)]
    for kind in EVERY_KERNEL:
        got = attention.step(tokens, attention.caches(1), np.array([0]), np.array([0]), instruction_set=kind)[
            0
        ]
        np.testing.assert_allclose(got.reshape(want.shape), want.numpy(), atol=1e-5)


def test_real_widths():
    Attention(np.random.default_rng(8), 2, 16, 128, 1500, window=1024, sinks=True, half=64).check(2, 70)
