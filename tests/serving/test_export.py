"""Exports: each computes what the drafter computes, a damaged one is noticed, and what cannot be said is refused."""

import json

import pytest
import torch
from bytes_tokenizer import SPECIAL, bytes_tokenizer
from safetensors.torch import load_file, save_file
from tiny import SHAPE, copy_blocks, tiny_drafter, tiny_prompt, tiny_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GgufConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from osprey.cli.main import main
from osprey.modeling import OspreyConfig, OspreyDrafter
from osprey.serving.export import export, write_checkpoint
from osprey.serving.rebuild import check_rebuilt

SHORTLIST = [1, 2, 3, 7, 8, 20, 47]
QK_NORM = {"qk_norm": True, "backbone_model_type": "qwen3"}
YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FORMS = {
    "full, tied": {"tie_word_embeddings": True},
    "one layer, untied": {"num_hidden_layers": 1},
    "shortlist, tied": {"tie_word_embeddings": True, "shortlist": SHORTLIST},
    "shortlist, untied": {"shortlist": SHORTLIST},
    "padded, yarn": {"target_num_tokens": 40, **YARN},
    "qwen3, llama3 positions": {**QK_NORM, "rope_parameters": LLAMA3},
}
FAMILIES = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    "llama, biases": (
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True},
        {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    ),
    "qwen2": (Qwen2Config, {}, {"attention_bias": True}),
    "qwen3": (Qwen3Config, {}, {"qk_norm": True}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0]}, {"no_rope_layers": [1, 0]}),
}


def perturbed(drafter):
    """With norms and biases apart from one and zero: swapped or forgotten ones would not show otherwise."""
    torch.manual_seed(3)
    for name, tensor in drafter.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    return drafter


def saved(drafter, folder, tokenizer=None):
    drafter.save_pretrained(folder)
    (tokenizer or bytes_tokenizer()).save_pretrained(folder)
    return str(folder)


def drafter_of(form, folder):
    return saved(perturbed(tiny_drafter(tiny_target(), **FORMS[form])), folder)


@pytest.mark.parametrize("to", ["vllm", "sglang"])
@pytest.mark.parametrize("form", FORMS)
def test_eagle_layouts_compute_the_same(form, to, tmp_path):
    folder = tmp_path / "export"
    folder.mkdir()
    record = export(drafter_of(form, tmp_path / "drafter"), to, folder)
    assert record["largest_logit_difference"] < 1e-4
    config = json.loads((folder / "config.json").read_text())
    taps = OspreyConfig.from_pretrained(tmp_path / "drafter").target_layer_ids
    if to == "vllm":
        assert config["eagle_aux_hidden_state_layer_ids"] == [i + 1 for i in taps]
        assert "auto_map" not in config
    else:
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == taps
        assert config["swap_h_and_emb"] is True
        names = load_file(folder / "model.safetensors").keys()
        assert ("midlayer.hidden_norm.weight" in names) == (form == "one layer, untied")
        assert config["draft_vocab_size"] == {"padded, yarn": 40}.get(form, 7 if "shortlist" in form else 48)


def swap(tensors, a, b):
    tensors[a], tensors[b] = tensors[b], tensors[a]


def halves_swapped(tensors):
    tensors["layers.1.self_attn.k_proj.weight"] = tensors["layers.1.self_attn.k_proj.weight"].roll(24, dims=1)


DAMAGE = {
    "norms swapped": lambda t: swap(t, "layers.1.input_layernorm.weight", "layers.1.ctx_norm.weight"),
    "halves swapped": halves_swapped,
    "context lost": lambda t: t["fc.weight"].zero_(),
    "final norm": lambda t: t["norm.weight"].mul_(1.01),
    "another shortlist": lambda t: t["d2t"].__setitem__(-1, t["d2t"][-1] - 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_export_is_noticed(damage, tmp_path):
    drafter = perturbed(tiny_drafter(tiny_target(), shortlist=SHORTLIST))
    export(saved(drafter, tmp_path / "drafter"), "vllm", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    DAMAGE[damage](tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="computes something else"):
        check_rebuilt(drafter, tmp_path)


def test_other_taps_are_noticed(tmp_path):
    drafter = tiny_drafter(tiny_target())
    export(saved(drafter, tmp_path / "drafter"), "vllm", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = list(drafter.config.target_layer_ids)  # as another engine counts
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="names the taps"):
        check_rebuilt(drafter, tmp_path)


def merging_tokenizer():
    """A byte tokenizer with one merge, which every GGUF file holds: 260 tokens."""
    vocabulary = bytes_tokenizer().get_vocab() | {"ab": 256 + len(SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=512
    )


def backbone_and_drafter(family, **changes):
    """A backbone with random weights, and the drafter of its blocks with noise in the context half."""
    config_class, backbone_changes, drafter_changes = FAMILIES[family]
    shape = SHAPE | {"num_hidden_layers": 2} | changes
    torch.manual_seed(0)
    backbone = perturbed(AutoModelForCausalLM.from_config(config_class(**shape | backbone_changes)).eval())
    same = {"rope_parameters": backbone.config.rope_parameters, "backbone_model_type": backbone.config.model_type}
    config = OspreyConfig(**shape | drafter_changes | same, target_num_hidden_layers=6)
    drafter = copy_blocks(backbone, OspreyDrafter(config).eval())
    with torch.no_grad():
        for layer in drafter.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.weight[:, : config.hidden_size].normal_()
    return backbone, drafter


@torch.no_grad()
def assert_same_logits(backbone, folder, **kwargs):
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs)
    assert type(loaded) is type(backbone)
    ids = tiny_prompt(11)
    torch.testing.assert_close(loaded(ids).logits, backbone(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_causal_lm_is_the_backbone(family, tmp_path):
    backbone, drafter = backbone_and_drafter(family)
    export(saved(drafter, tmp_path / "drafter"), "causal-lm", tmp_path)
    assert_same_logits(backbone, tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_is_the_backbone(family, tmp_path):
    # Four rows that only pad, and the one head size that transformers' reader knows for qwen3.
    backbone, drafter = backbone_and_drafter(family, vocab_size=264, head_dim=128 if family == "qwen3" else 8)
    export(saved(drafter, tmp_path / "drafter", merging_tokenizer()), "gguf", tmp_path)
    quantization = GgufConfig(dequantize=True)
    assert_same_logits(backbone, tmp_path, gguf_file="model.gguf", quantization_config=quantization)


def test_weights_keep_their_dtype(tmp_path):
    drafter = tiny_drafter(tiny_target(), shortlist=SHORTLIST).to(torch.bfloat16)
    export(saved(drafter, tmp_path / "drafter"), "sglang", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert (tensors["d2t"] + torch.arange(7)).tolist() == SHORTLIST
    assert tensors["t2d"].nonzero()[:, 0].tolist() == SHORTLIST


def test_what_is_no_json_is_not_written_as_text(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_checkpoint({"stray": torch.float32}, {}, tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("to", "changes", "message"),
    [
        ("causal-lm", {"shortlist": SHORTLIST}, "a head of its own for 7 of 48 tokens"),
        ("gguf", {"shortlist": SHORTLIST}, "a head of its own for 7 of 48 tokens"),
        ("causal-lm", {"backbone_model_type": "mamba"}, "of family 'mamba'"),
        ("sglang", {"backbone_model_type": "qwen2", "attention_bias": True}, "of family qwen2, with biases in some"),
        ("sglang", {"attention_bias": True}, "blocks are with biases in some of the attention's projections only,"),
        ("sglang", {"no_rope_layers": [1, 0]}, "blocks are without rotary positions in some layers,"),
        ("gguf", YARN, "with yarn rotary positions"),
        ("gguf", {"attention_bias": True}, "with biases"),
        ("gguf", QK_NORM, "with heads of 8 instead of 128"),
    ],
)
def test_what_a_format_cannot_say_is_refused(to, changes, message, tmp_path, capsys):
    drafter = saved(tiny_drafter(tiny_target(), **changes), tmp_path / "drafter")
    assert main(["export", drafter, "--to", to, "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]  # nothing half-written


def test_gguf_refuses_other_vocabularies(tmp_path, capsys):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    drafter = saved(tiny_drafter(tiny_target()), tmp_path / "drafter", tokenizer)
    assert main(["export", drafter, "--to", "gguf", "--out", str(tmp_path / "out")]) == 1
    assert "WordLevel one, and only byte-level BPE" in capsys.readouterr().err


def test_command(tmp_path, capsys):
    drafter, out = drafter_of("full, tied", tmp_path / "drafter"), str(tmp_path / "out")
    assert main(["export", drafter, "--to", "vllm", "--out", out, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["to"] == "vllm" and record["dtype"] == "float32"
    assert main(["export", drafter, "--to", "vllm", "--out", out]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main(["export", drafter, "--to", "tensorrt", "--out", out]) == 1
    assert "invalid choice" in capsys.readouterr().err


def test_an_export_does_not_replace_its_drafter(tmp_path, capsys):
    drafter = drafter_of("full, tied", tmp_path / "drafter")
    before = sorted(path.name for path in (tmp_path / "drafter").iterdir())
    for out in (drafter, str(tmp_path)):
        assert main(["export", drafter, "--to", "vllm", "--out", out, "--overwrite"]) == 1
        assert "which would be lost: choose another --out" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "drafter").iterdir()) == before
