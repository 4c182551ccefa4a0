# SPDX-License-Identifier: Apache-2.0
"""The MTP module in torch, from the blocks of transformers, which itself ignores MTP weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm

from .tiny import fix_time_step_clamp, randomize, reference_model


class MtpReference(torch.nn.Module):
    """``eh_proj([enorm(embedding) | hnorm(hidden)])``, the layers, the final norm; embedding first."""

    def __init__(self, trunk: NemotronHForCausalLM, kinds: list[str]) -> None:
        super().__init__()
        config = type(trunk.config)(**{**trunk.config.to_dict(), "layers_block_type": kinds})
        hidden, eps = config.hidden_size, config.layer_norm_epsilon
        self.enorm = NemotronHRMSNorm(hidden, eps)
        self.hnorm = NemotronHRMSNorm(hidden, eps)
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        config._attn_implementation = "eager"
        self.blocks = torch.nn.ModuleList(NemotronHBlock(config, i) for i in range(len(kinds)))
        self.final_layernorm = NemotronHRMSNorm(hidden, eps)
        self.trunk = [trunk]  # not a submodule

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[L]`` (each one after its hidden state's position), hidden ``[L, H]``: logits and hidden."""
        trunk = self.trunk[0]
        x = torch.cat([self.enorm(trunk.model.embeddings(tokens)), self.hnorm(hidden)], dim=-1)
        x = self.eh_proj(x)[None]
        length = len(tokens)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        for block in self.blocks:
            x = block(x, attention_mask=mask if block.block_type == "full_attention" else None)
        out = self.final_layernorm(x)[0]
        return trunk.lm_head(out), out

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The weights under the names of the release."""
        last = len(self.blocks) - 1
        names = {f"mtp.layers.0.{n}.weight": getattr(self, n).weight for n in ("enorm", "hnorm", "eh_proj")}
        names[f"mtp.layers.{last}.final_layernorm.weight"] = self.final_layernorm.weight
        for i, block in enumerate(self.blocks):
            for name, tensor in block.state_dict().items():
                if name.startswith("mixer.experts."):
                    kind = name.rsplit(".", 1)[1]
                    for e, expert in enumerate(tensor):
                        names[f"mtp.layers.{i}.mixer.experts.{e}.{kind}.weight"] = expert
                else:
                    names[f"mtp.layers.{i}.{name}"] = tensor
        return {n: t.detach().clone().contiguous() for n, t in names.items()}


def save_with_mtp(directory: Path, **config: Any) -> tuple[NemotronHForCausalLM, MtpReference]:
    """A random model with an MTP module, saved as a checkpoint."""
    model = reference_model(**config, num_nextn_predict_layers=1, mtp_layers_block_type=["attention", "moe"])
    mtp = MtpReference(model, ["full_attention", "moe"])
    randomize(mtp, seed=7)
    fix_time_step_clamp(model)
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    save_file({**load_file(path), **mtp.named_tensors()}, path, metadata={"format": "pt"})
    return model, mtp
