# SPDX-License-Identifier: Apache-2.0
"""The configurations that are written, read by the server's own messages."""

from __future__ import annotations

import pytest

protobuf = pytest.importorskip("google.protobuf.text_format")
model_config = pytest.importorskip("tritonclient.grpc.model_config_pb2")


def configs(repository):
    found = {}
    for path in repository.glob("*/config.pbtxt"):
        found[path.parent.name] = protobuf.Parse(path.read_text(), model_config.ModelConfig())
        assert found[path.parent.name].name == path.parent.name
    return found


def types(tensors):
    return {t.name: (t.data_type, list(t.dims)) for t in tensors}


def test_models_of_a_step_fit_together(mtp):
    found = configs(mtp.repository)
    assert set(found) == {"generate", "draft_mtp", "verify", "accept", "plain_step", "spec_step_mtp"}
    for name in ("plain_step", "spec_step_mtp"):
        step = found[name]
        known = types(step.input)
        for part in step.ensemble_scheduling.step:
            model = found[part.model_name]
            takes, gives = types(model.input), types(model.output)
            for key, value in part.input_map.items():
                assert takes[key] == known[value], (name, part.model_name, key)
            left_out = [t for t in model.input if t.name not in part.input_map]
            assert all(t.optional for t in left_out)
            known |= {value: gives[key] for key, value in part.output_map.items()}
        assert types(step.output).items() <= known.items()
    for name, config in found.items():
        assert not config.HasField("dynamic_batching"), "the scheduler makes the batches"
        assert not config.HasField("sequence_batching")
        if config.platform != "ensemble":
            [group] = config.instance_group
            assert (config.backend, group.count) == ("python", 1), name


def test_the_front_takes_any_number_of_answers_to_one_prompt(mtp):
    front = configs(mtp.repository)["generate"]
    assert front.max_batch_size == 1
    assert front.model_transaction_policy.decoupled
    assert all(t.optional for t in front.input), "a prompt is a text or token ids"
    assert {"text_output", "finish_reason"} <= set(types(front.output))


def test_the_server_has_them_as_they_are_written(mtp):
    grpc = pytest.importorskip("tritonclient.grpc")
    with grpc.InferenceServerClient(mtp.grpc) as client:
        for name, config in configs(mtp.repository).items():
            served = client.get_model_config(name).config
            assert types(served.input) == types(config.input)
            assert types(served.output) == types(config.output)
