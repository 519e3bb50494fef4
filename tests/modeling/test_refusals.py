"""Bad input gets one sentence that names what, where and the mend."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import SHAPE, tiny_drafter, tiny_prompt, tiny_target
from transformers import AutoModelForCausalLM

from osprey.modeling import OspreyConfig, OspreyDrafter, check_target, default_target_layer_ids
from osprey.modeling.configuration_osprey import FORMAT_VERSION


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "a hidden size of 32, but the model that generates has 64"),
        ({"vocab_size": 50}, "a vocabulary size of 48, but the model that generates has 50"),
        ({"num_hidden_layers": 6}, "a number of layers of 5, but the model that generates has 6"),
    ],
)
def test_another_target(change, message):
    drafter = tiny_drafter(tiny_target())
    drafter.config.target = "someone/target"
    with pytest.raises(ValueError, match="This drafter was made for someone/target with " + message) as error:
        tiny_target(**change).generate(tiny_prompt(), assistant_model=drafter, max_new_tokens=4)
    assert "osprey convert" in str(error.value) and "\n" not in str(error.value)
    check_target(drafter, tiny_target("qwen3"))  # another model of the same shape cannot be told apart


@pytest.fixture
def folder(tmp_path):
    tiny_drafter(tiny_target(), shortlist=[1, 2, 5]).save_pretrained(tmp_path)
    return tmp_path


LOADERS = [OspreyDrafter.from_pretrained, AutoModelForCausalLM.from_pretrained]


def one_sentence(error) -> bool:
    return "\n" not in str(error.value)


def test_another_kind_of_model(tmp_path):
    tiny_target().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is no Osprey drafter but a llama model: make one of it with `osprey conv"):
        OspreyDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("num_assistant_tokens", "x", "a whole number of at least 1"),
        ("num_assistant_tokens", 2.5, "a whole number of at least 1"),
        ("num_assistant_tokens", 0, "a whole number of at least 1"),
        ("lookup_num_tokens", -1, "a whole number of at least 0"),
        ("lookup_ngram_size", 0, "a whole number of at least 1"),
        ("assistant_confidence_threshold", "high", "a number of at least 0"),
        ("assistant_confidence_threshold", float("nan"), "a number of at least 0"),
        ("adaptive_draft_length", "yes", "True, False or None"),
    ],
)
def test_settings_that_mean_nothing(name, value, wanted):
    target = tiny_target()
    drafter = tiny_drafter(target)
    setattr(drafter.generation_config, name, value)
    with pytest.raises(ValueError, match=f"generation config has {name} {value!r}, but it must be {wanted}"):
        target.generate(tiny_prompt(), assistant_model=drafter, max_new_tokens=4)


@pytest.mark.parametrize("load", LOADERS)
def test_missing_weights(load, folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model.safetensors: fetch or make the drafter again") as error:
        load(folder)
    assert one_sentence(error) and str(folder) in str(error.value)


def test_missing_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="has no config.json: make one with `osprey convert`") as error:
        OspreyDrafter.from_pretrained(folder)
    assert one_sentence(error)
    with pytest.raises(ValueError, match="no config.json"):
        OspreyDrafter.from_pretrained(folder / "..", subfolder=folder.name)


def test_a_subfolder_loads(folder):
    assert OspreyDrafter.from_pretrained(folder.parent, subfolder=folder.name).draft_ids.tolist() == [1, 2, 5]


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_truncated_weights(load, keep, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="the file is truncated or damaged") as error:
        load(folder)
    assert one_sentence(error) and str(folder) in str(error.value)


def test_missing_shard(tmp_path):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path, max_shard_size="10KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises((ValueError, OSError), match="safetensors") as error:
        OspreyDrafter.from_pretrained(tmp_path)
    assert one_sentence(error)


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("fc.weight"), "missing keys: fc.weight"),
        (lambda state: state.pop("d2t"), "missing keys: d2t"),
        (lambda state: state.update(midlayer=torch.zeros(2)), "unexpected keys: midlayer"),
        (lambda state: state.update({"norm.weight": torch.zeros(7)}), "mismatched keys: .*norm.weight"),
    ],
)
def test_tensors_that_do_not_fit(load, change, message, folder):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    assert one_sentence(error) and str(folder) in str(error.value) and "again" in str(error.value)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_idx": [1, 2, 3]}, r"Unknown key\(s\) target_layer_idx in the config of an Osprey drafter"),
        ({"swap_h_and_emb": True, "zzz": 1}, r"Unknown key\(s\) swap_h_and_emb, zzz"),
        ({"target_layer_ids": [1, 2]}, r"target_layer_ids is \[1, 2\], but it must hold three different layers"),
        ({"target_layer_ids": [1, 1, 2]}, r"three different layers in rising order from 0 to 3"),
        ({"target_layer_ids": [2, 1, 3]}, "three different layers in rising order"),
        ({"target_layer_ids": [-1, 1, 2]}, "three different layers in rising order"),
        ({"target_layer_ids": [1, 2, 4]}, r"from 0 to 3 \(the target has 5 layers"),
        ({"draft_vocab_size": 49}, "draft_vocab_size is 49, but it must lie between 1 and the 48 tokens"),
        ({"target_num_tokens": 49}, "target_num_tokens is 49, but it must lie between 1 and .* vocab_size 48"),
        ({"target_num_tokens": 2}, "draft_vocab_size is 3, but it must lie between 1 and the 2 tokens"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        (
            {"format_version": FORMAT_VERSION + 1, "new": 1},
            "format_version is 3, but this code reads versions 1 to 2 of",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_config(load, changes, message, folder):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    assert one_sentence(error)


def test_config_that_is_not_json(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises((ValueError, OSError), match="config.json|JSON"):
        OspreyDrafter.from_pretrained(folder)


def test_no_taps_at_all():
    with pytest.raises(ValueError, match="needs target_num_hidden_layers or target_layer_ids in its config"):
        OspreyDrafter(OspreyConfig(**SHAPE))


@pytest.mark.parametrize(
    ("layers", "ids"),
    [
        (4, [0, 1, 2]),
        (5, [1, 2, 3]),
        (6, [1, 2, 3]),
        (8, [1, 3, 4]),
        (30, [1, 14, 26]),
        (36, [1, 17, 32]),
        (62, [1, 30, 58]),
    ],
)
def test_default_taps(layers, ids):
    """`[1, L // 2 - 1, L - 4]` where they are distinct, and never the last layer."""
    assert default_target_layer_ids(layers) == ids
    assert OspreyConfig(**SHAPE, target_num_hidden_layers=layers).target_layer_ids == ids


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_too_shallow_a_target(layers):
    with pytest.raises(ValueError, match=rf"at least 4 decoder layers .* but it has {layers}: choose a deeper target"):
        OspreyConfig(**SHAPE, target_num_hidden_layers=layers)


def test_draft_ids():
    drafter = tiny_drafter(tiny_target(), shortlist=[1, 2, 5])
    for ids in ([1, 2], [2, 1, 5], [1, 1, 5], [1, 2, 48], [-1, 2, 5]):
        with pytest.raises(ValueError, match="draft vocabulary of 3 takes that many different ids"):
            drafter.set_draft_ids(torch.tensor(ids))
    assert drafter.draft_ids.tolist() == [1, 2, 5] and int(drafter.t2d.sum()) == 3


OLD_TRANSFORMERS = """
import transformers
from transformers.generation.candidate_generator import CandidateGenerator
del CandidateGenerator.requires_model_outputs
transformers.__version__ = "4.50.0"
import osprey.modeling
"""


def test_transformers_without_the_hook():
    done = subprocess.run([sys.executable, "-c", OLD_TRANSFORMERS], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0
    assert last.startswith("ImportError: Osprey needs transformers >= 5.24.0"), last
    assert "4.50.0 is installed: pip install -U transformers." in last
