"""What engines are told of a drafter: tap ids, complete configs, complete weights, and the plugin that tells vLLM."""

import importlib
import tomllib
from pathlib import Path

import pytest
from tiny import tiny_drafter, tiny_target
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from osprey.modeling import OspreyConfig, default_target_layer_ids
from osprey.serving import vllm_plugin
from osprey.serving.layout import check_config, check_target, check_tensors, from_vllm_tap_ids, vllm_tap_ids

FORMS = {
    "full, tied": {"tie_word_embeddings": True},
    "full, untied": {},
    "one layer": {"num_hidden_layers": 1},
    "shortlist, tied": {"tie_word_embeddings": True, "shortlist": [1, 2, 3, 7, 8, 20, 47]},
    "shortlist, untied": {"shortlist": [1, 2, 3, 7, 8, 20, 47]},
    "padded": {"target_num_tokens": 40},
    "qk-norm, yarn": {"qk_norm": True, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
    "biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
}


def config_of(**changes):
    return tiny_drafter(tiny_target()).config.to_dict() | changes


@pytest.mark.parametrize("num_layers", [30, 32, 62, 80])
def test_default_taps_are_those_of_vllm(num_layers):
    # The layers that vLLM reads for an EAGLE-3 drafter whose config names none: 2, L // 2 and L - 3 as it counts.
    assert vllm_tap_ids(default_target_layer_ids(num_layers)) == [2, num_layers // 2, num_layers - 3]


def test_taps_of_the_papers_target():
    assert vllm_tap_ids([1, 30, 58]) == [2, 31, 59]
    assert from_vllm_tap_ids([2, 31, 59]) == [1, 30, 58]


@pytest.mark.parametrize("form", FORMS)
def test_a_drafters_tensors_are_the_expected_ones(form, tmp_path):
    from safetensors.torch import load_file

    drafter = tiny_drafter(tiny_target(), **FORMS[form])
    drafter.save_pretrained(tmp_path)
    config = OspreyConfig.from_pretrained(tmp_path).to_dict()
    check_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    check_tensors(config, shapes)
    for name in shapes:
        with pytest.raises(ValueError, match=f"missing: {name}"):
            check_tensors(config, {other: shape for other, shape in shapes.items() if other != name})
    with pytest.raises(ValueError, match="unexpected: layers.0.bias.*another shape: norm.weight"):
        check_tensors(config, shapes | {"layers.0.bias": (24,), "norm.weight": (25,)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": None}, "no rms_norm_eps, which an engine would fill"),
        ({"target_layer_ids": None}, "no target_layer_ids"),
        ({"target_layer_ids": [0, 1, 4]}, "three different layers in rising order from 0 to 3"),
        ({"target_layer_ids": [0, 1]}, "three different layers"),
        ({"target_layer_ids": [2, 1, 3]}, "in rising order"),
        ({"target_layer_ids": [0, 1, 2], "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, r"are \[1, 2, 3\] as vLLM"),
        ({"format_version": 3}, "format_version is 3"),
        ({"no_rope_layers": [1]}, "1 entries for 2 layers"),
    ],
)
def test_a_config_that_an_engine_would_complete_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_config(config_of(**changes))


def test_another_target_is_refused():
    config = config_of(target="org/model")
    check_target(config, 48, 32, 5)
    for shape, message in (
        ((49, 32, 5), "made for org/model with a vocabulary size of 48, but the served model has 49"),
        ((48, 64, 5), "hidden size of 32"),
        ((48, 32, 6), "number of layers of 5"),
    ):
        with pytest.raises(ValueError, match=message):
            check_target(config, *shape)


def test_plugin_does_nothing_without_vllm(monkeypatch):
    monkeypatch.setattr(vllm_plugin, "find_spec", lambda name: None)
    vllm_plugin.register()
    vllm_plugin.register()
    assert CONFIG_MAPPING["osprey"] is OspreyConfig


def test_the_entry_point_names_the_plugin():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, function = project["entry-points"]["vllm.general_plugins"]["osprey"].split(":")
    assert getattr(importlib.import_module(module), function) is vllm_plugin.register
