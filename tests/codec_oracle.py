# SPDX-License-Identifier: Apache-2.0
"""ModelOpt as a filter: pickled requests on standard input, what it exports on standard output.

A process of its own, because ModelOpt patches PyTorch while it quantizes. Its static NVFP4 quantizer runs on GPUs
only; here its own kernel source is executed on CPU tensors, with PyTorch standing in for triton.language.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import types
import warnings

import numpy as np
import torch

RECIPE = {  # modelopt_recipes/…/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16/ptq/w4a16_nvfp4_4o6.yaml
    "method": "mse",
    "fp8_scale_sweep": False,
    "start_multiplier": 1.0,
    "stop_multiplier": 1.5,
    "step_size": 0.5,
}
FOUR_OVER_SIX = {
    "num_bits": (2, 1),
    "block_sizes": {-1: 16, "type": "static", "scale_bits": (4, 3), "four_over_six": True},
}
FP8 = {"num_bits": (4, 3), "axis": None}


def stand_in_for_triton() -> dict[str, types.ModuleType]:
    """Modules under which the kernels' functions are plain functions of tensors."""
    names = ("triton", "triton.language", "triton.language.extra", "triton.language.extra.cuda")
    triton, language, extra, cuda = (types.ModuleType(name) for name in names)
    triton.jit = lambda function: function
    triton.language, language.extra, extra.cuda = language, extra, cuda
    language.float32, language.float16, language.bfloat16 = torch.float32, torch.float16, torch.bfloat16
    language.constexpr, language.abs, language.where = int, torch.abs, torch.where
    cuda.libdevice = types.SimpleNamespace(isnan=torch.isnan)
    return dict(zip(names, (triton, language, extra, cuda), strict=True))


def load_static_kernel():
    """ModelOpt's fake quantization of static blocks, from its own source."""
    modules = stand_in_for_triton()
    sys.modules.update(modules)
    try:
        kernel = importlib.import_module("modelopt.torch.kernels.quantization.gemm.fp4_kernel")
    finally:
        for name in modules:
            del sys.modules[name]

    def fake_quant(x, amax, global_amax, quantize_scales, fp8_max, out_dtype):
        scale = kernel.compute_fp4_scales(amax, global_amax, quantize_scales, fp8_max).reshape(-1, 1)
        return kernel.nvfp4_scalar_quant(x.reshape(len(scale), -1), scale, 16).reshape(x.shape).to(out_dtype)

    return fake_quant


def export(weight: torch.Tensor, number_format: dict, algorithm: object) -> dict[str, torch.Tensor]:
    """Quantize and export one linear layer; what its state dict then holds."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.unified_export_hf import _export_quantized_weight

    model = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    model[0].weight = torch.nn.Parameter(weight.clone())
    quantizers = (
        ["*weight_quantizer"] if number_format is FOUR_OVER_SIX else ["*weight_quantizer", "*input_quantizer"]
    )
    rules = [{"quantizer_name": name, "enable": True, "cfg": number_format} for name in quantizers]
    config = {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *rules], "algorithm": algorithm}
    inputs = torch.arange(weight.shape[1], dtype=weight.dtype)[None]
    mtq.quantize(model, config, forward_loop=lambda m: m(inputs))
    _export_quantized_weight(model[0], weight.dtype)
    return dict(model[0].state_dict())


def answer(kind: str, weight: torch.Tensor) -> tuple[np.ndarray, ...]:
    """(codes, scales, scale_2) of NVFP4, its decoded values, or (codes, scale) of FP8; 8-bit floats as bytes."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    if kind == "plain":
        quantized, scales, scale_2 = NVFP4QTensor.quantize(weight, 16)
        return quantized._quantized_data.numpy(), scales.view(torch.uint8).numpy(), scale_2.numpy()
    if kind == "decoded":
        quantized, scales, scale_2 = NVFP4QTensor.quantize(weight, 16)
        values = quantized.dequantize(torch.float32, scale=scales, double_scale=scale_2, block_sizes={-1: 16})
        return (values.numpy(),)
    if kind == "4/6":
        got = export(weight, FOUR_OVER_SIX, RECIPE)
        return (
            got["weight"].numpy(),
            got["weight_scale"].view(torch.uint8).numpy(),
            got["weight_scale_2"].numpy(),
        )
    got = export(weight, FP8, {"fp8": "max", "fp8 recipe": RECIPE}[kind])
    return got["weight"].view(torch.uint8).numpy(), got["weight_scale"].numpy()


def to_tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def main() -> None:
    replies, sys.stdout = sys.stdout.buffer, sys.stderr
    warnings.simplefilter("ignore")
    import modelopt.torch.quantization.tensor_quant as tensor_quant

    kernel = types.SimpleNamespace(IS_AVAILABLE=True, static_blockwise_fp4_fake_quant=load_static_kernel())
    tensor_quant.triton_kernel = kernel
    torch.set_grad_enabled(False)
    while True:
        try:
            kind, array = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(answer(kind, to_tensor(array)), replies)
        replies.flush()


if __name__ == "__main__":
    main()
