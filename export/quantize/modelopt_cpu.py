# SPDX-License-Identifier: Apache-2.0
"""ModelOpt's NVFP4 fake quantization on a CPU.

ModelOpt 0.47 quantizes weights to NVFP4 on any device, but two of the functions that its calibration and its
quantized forward pass call exist for CUDA only:

- ``tensorrt::dynamic_block_quantize_op``, a torch operator, for blocks whose scales follow the data;
- ``tensor_quant.triton_kernel.static_blockwise_fp4_fake_quant``, for blocks with given largest values.

:func:`enable` gives both an implementation in plain torch. It touches nothing else, and refuses other versions of
ModelOpt than those it was tested with.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from nemo_build.errors import UserError

TESTED_VERSIONS = ("0.47.0",)

_E4M3_MAX, _E4M3_MIN = 448.0, 2.0**-9
_E2M1_MAX = 6.0
_NVFP4 = (4, 2, 8, 4)  # bits and exponent bits of values and of scales, as the operator counts them

_library: list[torch.library.Library] = []


@cache
def enable() -> None:
    """Install the two functions in this process (idempotent).

    Raises:
        UserError: ModelOpt is not installed, or is of a version this was not tested with.
    """
    try:
        import modelopt
        import modelopt.torch.quantization.tensor_quant as tensor_quant
    except ImportError as error:
        hint = "pip install 'nemo-build[quantize]'"
        raise UserError(f"ModelOpt cannot be imported: {error}", hint=hint) from error
    if modelopt.__version__ not in TESTED_VERSIONS:
        raise UserError(
            f"ModelOpt is {modelopt.__version__}; its CPU functions were tested with {', '.join(TESTED_VERSIONS)}.",
            hint="pip install 'nemo-build[quantize]'",
        )
    library = torch.library.Library("tensorrt", "IMPL")
    library.impl("dynamic_block_quantize_op", _dynamic, "CPU", allow_override=True)
    _library.append(library)  # the registration ends with the object
    tensor_quant.triton_kernel = _StaticKernels


def fake_quantize(x: torch.Tensor, block_amax: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """Blocks ``[n, b]`` rounded to E2M1 below E4M3 block scales.

    Args:
        x: Blocks, float32.
        block_amax: Their largest values ``[n, 1]``.
        scale_2: The tensor's scale, a scalar above 0.
    """
    wanted = block_amax / (_E2M1_MAX * scale_2)
    wanted = torch.where(wanted == 0, torch.ones_like(wanted), wanted).clamp(_E4M3_MIN, _E4M3_MAX)
    step = wanted.to(torch.float8_e4m3fn).float() * scale_2
    return _round_e2m1(x / step) * step


def _round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """To the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign; halves to even."""
    size = x.abs()
    rounded = torch.where(
        size < 2,
        (size * 2).round() / 2,
        torch.where(size < 4, size.round(), ((size / 2).round() * 2).clamp(max=_E2M1_MAX)),
    )
    return torch.copysign(rounded, x)


def _dynamic(
    inputs: torch.Tensor,
    block_size: int,
    amax: torch.Tensor,
    num_bits: int,
    exponent_bits: int,
    scale_num_bits: int,
    scale_exponent_bits: int,
) -> torch.Tensor:
    if (num_bits, exponent_bits, scale_num_bits, scale_exponent_bits) != _NVFP4:
        raise NotImplementedError("only NVFP4 has a CPU function here")
    width = inputs.shape[-1]
    scale_2 = amax.float().max() / (_E2M1_MAX * _E4M3_MAX)
    if scale_2 == 0:
        return torch.zeros_like(inputs)
    padded = torch.nn.functional.pad(inputs.float(), (0, -width % block_size))
    blocks = padded.reshape(-1, block_size)
    out = fake_quantize(blocks, blocks.abs().amax(-1, keepdim=True), scale_2)
    return out.reshape(padded.shape)[..., :width].to(inputs.dtype)


class _StaticKernels:
    """Stands in for ModelOpt's module of Triton kernels."""

    IS_AVAILABLE = True

    @staticmethod
    def static_blockwise_fp4_fake_quant(
        x: torch.Tensor,
        amax: torch.Tensor,
        global_amax: torch.Tensor | None = None,
        quantize_block_scales: bool = True,
        fp8max: float = _E4M3_MAX,
        out_dtype: Any = None,
    ) -> torch.Tensor:
        """Blocks whose largest values are given; their scales are rounded to E4M3 unless told otherwise.

        The scales go through ModelOpt's own E4M3 rounding, so that a search over candidates decides as it would
        on a GPU with exact division.
        """
        from modelopt.torch.quantization.tensor_quant import scaled_e4m3_impl

        block_amax = amax.float().reshape(-1, 1)
        scale = block_amax / _E2M1_MAX
        if quantize_block_scales:
            overall = block_amax.max() if global_amax is None else global_amax.float().max()
            scale = scaled_e4m3_impl(scale, overall * (_E4M3_MAX / fp8max) / _E2M1_MAX)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        blocks = x.float().reshape(len(block_amax), -1)
        return (_round_e2m1(blocks / scale) * scale).reshape(x.shape).to(out_dtype or x.dtype)
