# SPDX-License-Identifier: Apache-2.0
"""Low-rank terms beside quantized weights: ModelOpt's SVDQuant on this architecture.

SVDQuant (arXiv:2411.05007) smooths a projection as AWQ does, takes the part of rank r with the largest singular
values out of the smoothed weight, and rounds what is left::

    y = round(W' - B A) round(x') + B (A x')     with x' = s x, W' = W / s

ModelOpt 0.47 does that to each linear module whose weight is quantized. Routed experts are no such modules
(transformers fuses those of a layer), so it calibrates them as without. The layout that it documents for the rest
(``quant_algo`` NVFP4_SVD) has ``pre_quant_scale`` (s), ``svdquant_lora_a`` (A) and ``svdquant_lora_b`` (B) beside an
NVFP4 weight. Scales are not folded: the layout has a place for them. Query, key and value of a layer share s and A.

:func:`restricted` leaves out weights in other formats, for which the layout has no name. :func:`exportable` mends what
keeps ModelOpt from writing it for this architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

from nemo_build.errors import UserError
from nemo_build.plugins.formats import LOW_RANK

METHOD = "svdquant"
"""ModelOpt's name of the algorithm."""

_NVFP4_BITS = (2, 1)


def restricted(model: Any, algorithm: Any) -> Any:
    """The algorithm, told to leave out what cannot have a low-rank term; others are given back as they are.

    Args:
        model: The model with its quantizers in place, not calibrated yet.
        algorithm: ModelOpt's calibration algorithm: its name, a mapping with its options, or a list of them.

    Raises:
        UserError: No projection can have a low-rank term, or its rank makes no sense.
    """
    if isinstance(algorithm, (list, tuple)):
        return [restricted(model, step) for step in algorithm]
    options = dict(algorithm) if isinstance(algorithm, Mapping) else {"method": algorithm}
    if options.get("method") != METHOD:
        return algorithm
    rank = options.get("lowrank", 1)
    if not isinstance(rank, int) or rank < 1:
        raise UserError(f"The rank of {METHOD} (lowrank) is {rank}; it must be a whole number above 0.")
    linears = _quantized_linears(model)
    others = [name for name, module in linears.items() if _bits(module) != _NVFP4_BITS]
    skipped = [*(options.get("skip_layers") or []), *others]
    if all(any(fnmatch(name, pattern) for pattern in skipped) for name in linears):
        raise UserError(
            f"{METHOD} would give no projection a low-rank term: only one in NVFP4 can have it, and no routed expert.",
            hint="Let the recipe quantize other projections to NVFP4 too, or take another algorithm.",
        )
    return {**options, "skip_layers": skipped}


@contextmanager
def exportable(model: Any) -> Iterator[None]:
    """While it lasts, ModelOpt's export can take a model with low-rank terms; others it takes as ever.

    - To average the smoothing of a layer's experts, the export lists their modules, and fails since they are fused.
      There is no smoothing of them to average; it is given an empty list.
    - For language models it would store the factors as attributes of a quantizer. They get the documented names.

    What is changed in ModelOpt is private to it; :func:`modelopt_cpu.enable` refuses versions this was not tested with.
    """
    import modelopt.torch.export.unified_export_hf as modelopt_export

    list_of_experts = modelopt_export.get_experts_list
    modelopt_export.get_experts_list = lambda module, model_type: []
    hooks = [module.register_state_dict_post_hook(_rename) for module in _quantized_linears(model).values()]
    try:
        yield
    finally:
        modelopt_export.get_experts_list = list_of_experts
        for hook in hooks:
            hook.remove()


def _quantized_linears(model: Any) -> dict[str, Any]:
    """The modules that SVDQuant and AWQ work on, by name."""
    from modelopt.torch.quantization.utils import is_quantized_linear

    return {
        name: module
        for name, module in model.named_modules()
        if is_quantized_linear(module) and module.weight_quantizer.is_enabled
    }


def _bits(module: Any) -> Any:
    """Exponent and mantissa bits of a module's weight; None where several quantizers follow each other."""
    return getattr(module.weight_quantizer, "num_bits", None)


def _rename(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook of torch's: the factors of a module's low-rank term under the names they are stored by."""
    for name in LOW_RANK:
        factor = state_dict.pop(f"{prefix}weight_quantizer._{name}", None)
        if factor is not None:
            state_dict[f"{prefix}{name}"] = factor
