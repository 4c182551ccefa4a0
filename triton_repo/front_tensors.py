# SPDX-License-Identifier: Apache-2.0
"""What clients send and get: the names that clients of TensorRT-LLM's, vLLM's and Dynamo's models use.

One table: the configuration of ``generate`` is made from it, and a request that names something else is refused.
"""

from __future__ import annotations

from nemo_build.triton_repo.tensors import TensorSpec


def _inputs(type_: str, *names: str, dims: int = 1) -> list[TensorSpec]:
    return [TensorSpec(name, type_, (dims,), optional=True) for name in names]


INPUTS = (
    *_inputs("STRING", "text_input"),
    *_inputs("INT32", "input_ids", dims=-1),
    *_inputs("INT32", "max_tokens", "min_tokens", "min_length", "top_k", "end_id", "pad_id", "priority"),
    *_inputs("FP32", "temperature", "top_p", "min_p", "timeout"),
    *_inputs("FP32", "repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty"),
    *_inputs("UINT64", "seed", "random_seed"),
    *_inputs("STRING", "stop_words", "bad_words", dims=-1),
    *_inputs("STRING", "sampling_parameters", "guided_decoding_guide", "guided_decoding_guide_type"),
    *_inputs("STRING", "salt"),
    *_inputs("BOOL", "stream", "streaming", "exclude_input_in_output", "ignore_eos", "skip_special_tokens"),
    *_inputs("BOOL", "return_num_input_tokens", "return_num_output_tokens", "return_finish_reason"),
    *_inputs(
        "BOOL",
        "return_log_probs",
        "return_logprobs",
        "return_details",
        "return_perf_metrics",
        "report",
        "speculate",
    ),
    *_inputs("INT32", "num_return_sequences", "beam_width", "num_draft_tokens", "logprobs"),
)
"""Inputs of ``generate``. A prompt is a text or token ids; all else may be left out."""

OUTPUTS = (
    *(TensorSpec(name, "STRING", (-1,)) for name in ("text_output", "finish_reason")),
    *(TensorSpec(name, "INT32", (-1,)) for name in ("num_input_tokens", "num_output_tokens")),
    TensorSpec("total_accepted_draft_tokens", "INT32", (-1,)),
    # Only for those who ask:
    *(TensorSpec(name, "STRING", (-1,)) for name in ("details", "logprobs")),
    TensorSpec("output_log_probs", "FP32", (-1,)),
)
"""Outputs of ``generate``: counts are those of the response, so that they can be summed over a stream."""
