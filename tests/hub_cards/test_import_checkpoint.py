"""Importing the authors' checkpoints: every logit is what the format's definition makes it, whatever the shape."""

import json

import pytest
import torch
from bytes_tokenizer import VOCABULARY as BYTES
from bytes_tokenizer import bytes_tokenizer
from hub_cache import cache_repo, put_into_hub_cache
from released import LLAMA3, block_names, released_config, released_tensors, step_by_step, write_released
from safetensors.torch import load_file, save_file
from tiny import assert_same_text, tiny_target
from transformers import AutoTokenizer

from osprey.cli.import_checkpoint import main
from osprey.cli.main import main as command
from osprey.modeling import OspreyDrafter

PADDED = BYTES + 5  # vocabularies are often padded past the tokenizer
WIDTH = 32  # of the target
FORMS = {
    "qwen3, two layers": ("qwen3", 2, {}),
    "llama, four layers": ("llama", 4, {"head_dim": 8, "rope_scaling": LLAMA3}),
    "one layer": ("llama", 1, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "pinned taps": ("qwen3", 2, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}),
}


@pytest.fixture
def target(tmp_path):
    model = tiny_target(vocab_size=PADDED, hidden_size=WIDTH, num_hidden_layers=8, seed=3, eos_token_id=2)
    model.save_pretrained(tmp_path / "target")
    bytes_tokenizer().save_pretrained(tmp_path / "target")
    return model


def write(folder, model_type="qwen3", layers=2, draft_ids=None, **changes):
    config = released_config(model_type, layers, PADDED, WIDTH, **changes)
    tensors = released_tensors(config, draft_ids)
    write_released(folder, config, tensors)
    return config, tensors


def run(tmp_path, checkpoint="released", *more):
    return main(
        [str(tmp_path / checkpoint), "--target", str(tmp_path / "target"), "--out", str(tmp_path / "out"), *more]
    )


@torch.no_grad()
def assert_computes(drafter, config, tensors, target, draft_ids=None):
    """Two draft steps after nine known tokens: contexts from taps at first, then the drafter's own output."""
    ids = torch.randint(3, BYTES, (11,), generator=torch.Generator().manual_seed(1))
    states = target(ids[None], output_hidden_states=True).hidden_states
    taps = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)[:, :9]  # [1, 9, 3H]
    context = taps[0] @ tensors["fc.weight"].T
    torch.testing.assert_close(drafter.project_taps(taps)[0], context, rtol=1e-4, atol=1e-4)
    columns = torch.arange(BYTES) if draft_ids is None else draft_ids
    rows = slice(0, BYTES) if draft_ids is None else slice(None)  # the rows behind pad the vocabulary
    for length in (9, 10):
        logits, last = step_by_step(config, tensors, ids[1 : length + 1], context)
        output = drafter(ids[None, 1 : length + 1], context[None])
        torch.testing.assert_close(output.logits[0][:, columns], logits[:, rows], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(output.last_hidden_state[0], last, rtol=1e-3, atol=1e-3)
        assert output.logits.isfinite().sum() == length * len(columns)
        context = torch.cat([context, last[-1:]])
    assert last.std() > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_definition(tmp_path, target, form, capsys):
    family, layers, changes = FORMS[form]
    config, tensors = write(tmp_path / "released", family, layers, **changes)
    assert run(tmp_path, "released", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tensors"] == len(tensors) and record["ignored_config_keys"] == []
    drafter = OspreyDrafter.from_pretrained(tmp_path / "out")
    taps = [0, 2, 5] if "eagle_config" in changes else [1, 3, 4]  # by default [1, L // 2 - 1, L - 4] with L = 8
    assert drafter.config.target_layer_ids == record["target_layer_ids"] == taps
    assert (drafter.config.vocab_size, drafter.config.draft_vocab_size) == (PADDED, None)
    assert_computes(drafter, config, tensors, target)


def test_the_two_input_norms_are_not_what_they_are_called(tmp_path, target):
    """Guards the comparison above: with the two exchanged, it fails."""
    config, tensors = write(tmp_path / "released")
    run(tmp_path)
    for prefix in block_names(config):
        one, two = (f"{prefix}{name}.weight" for name in ("hidden_norm", "input_layernorm"))
        tensors[one], tensors[two] = tensors[two], tensors[one]
    with pytest.raises(AssertionError):
        assert_computes(OspreyDrafter.from_pretrained(tmp_path / "out"), config, tensors, target)


def test_a_shortlist_keeps_its_ids(tmp_path, target):
    ids = torch.tensor([0, 2, 3, 50, 51, 200, BYTES - 1])
    config, tensors = write(tmp_path / "released", draft_ids=ids, draft_vocab_size=len(ids))
    run(tmp_path)
    drafter = OspreyDrafter.from_pretrained(tmp_path / "out")
    assert torch.equal(drafter.draft_ids, ids)
    assert_computes(drafter, config, tensors, target, ids)


def test_the_folder_is_a_drafter_s(tmp_path, target):
    config, tensors = write(tmp_path / "released", pad_like="this")
    bf16 = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file(bf16, tmp_path / "released" / "model.safetensors")
    run(tmp_path, "released", "--target_name", "org/target")
    drafter = OspreyDrafter.from_pretrained(tmp_path / "out", dtype="auto")
    assert drafter.dtype == torch.bfloat16 and drafter.config.target == "org/target"
    stages = json.loads((tmp_path / "out" / "training.json").read_text())["stages"]
    assert [stage["stage"] for stage in stages] == ["import"]
    assert stages[0]["ignored_config_keys"] == ["pad_like"]
    assert str(tmp_path) not in (tmp_path / "out" / "training.json").read_text()
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == bytes_tokenizer().get_vocab()
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        theirs = name.replace("input_layernorm", "hidden_norm").replace("ctx_norm", "input_layernorm")
        assert torch.equal(tensor, bf16[theirs])  # bit by bit

    prompt = torch.randint(3, BYTES, (1, 9), generator=torch.Generator().manual_seed(2))
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    drafter = OspreyDrafter.from_pretrained(tmp_path / "out")
    assert_same_text(
        target, plain, target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=drafter)
    )


def test_shards(tmp_path, target):
    config, tensors = write(tmp_path / "released")
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, tmp_path / "released" / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "released" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "released" / "model.safetensors").unlink()
    run(tmp_path)
    assert_computes(OspreyDrafter.from_pretrained(tmp_path / "out"), config, tensors, target)
    (tmp_path / "released" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="has no model-00002-of-00002.safetensors: fetch it again"):
        run(tmp_path, "released", "--overwrite", "true")


def test_from_the_hub(tmp_path, target, monkeypatch, capsys):
    """A folder of a repository in the Hub's cache; the authors' own repository also tells the target."""
    repo = "BobbieBieee/Osprey-Speculative-Decoding"
    config, tensors = write(tmp_path / "files" / "qwen3-8b" / "osprey-chat")
    commit = put_into_hub_cache(tmp_path / "hub", repo, tmp_path / "files", monkeypatch)
    target_commit = put_into_hub_cache(tmp_path / "hub", "Qwen/Qwen3-8B", tmp_path / "target", monkeypatch)
    assert command(["import", f"{repo}/qwen3-8b/osprey-chat", "--out", str(tmp_path / "out"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["source"] == f"{repo}/qwen3-8b/osprey-chat"
    assert (record["target"], record["revision"]) == ("Qwen/Qwen3-8B", commit)
    drafter = OspreyDrafter.from_pretrained(tmp_path / "out")
    assert drafter.config.target_revision == target_commit
    assert_computes(drafter, config, tensors, target)

    cache_repo(tmp_path / "hub", "org/one", tmp_path / "files" / "qwen3-8b" / "osprey-chat")  # not in a subfolder
    assert command(["import", "org/one", "--target", "Qwen/Qwen3-8B", "--out", str(tmp_path / "one")]) == 0
    assert f"{len(tensors)} tensors, each of them accounted for" in capsys.readouterr().out
    for name, message in (
        (f"{repo}/qwen3-8b/nothing", "neither a local folder nor in the Hub's local cache"),
        (f"{repo}/other/osprey", "does not say which target it was trained for: name it with --target"),
        ("org/one", "does not say which target it was trained for"),
        ("./nowhere", "unknown checkpoint './nowhere': there is no such folder"),
    ):
        assert command(["import", name, "--out", str(tmp_path / "other")]) == 1
        shown = capsys.readouterr().err
        assert message in shown and shown.count("\n") == 1
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swap_h_and_emb": False}, "is an ordinary EAGLE-3 drafter, its config does not say `swap_h_and_emb: true`"),
        ({"swap_h_and_emb": ...}, "is an ordinary EAGLE-3 drafter"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "holds Qwen3ForCausalLM, .* hand it to `osprey convert`"),
        ({"architectures": ["BertModel"]}, "holds BertModel, .* only the authors' drafters can be imported"),
        ({"architectures": ...}, "holds a model without `architectures`"),
        ({"model_type": "llama"}, "with model_type 'llama', but 'qwen3' belongs to it"),
        ({"num_key_value_heads": ..., "rms_norm_eps": ...}, "lacks num_key_value_heads, rms_norm_eps: fetch"),
        ({"rope_theta": ...}, "lacks rope_theta: fetch"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "attend in a sliding window"),
        ({"vocab_size": 48, "draft_vocab_size": 48}, f"has vocab_size 48, but the target .* has {PADDED}"),
        ({"target_hidden_size": 16}, f"has target_hidden_size 16, but the target .* has {WIDTH}"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, r"taps \[1, 3, 7\] do not fit"),
        ({"intermediate_size": 48}, r"mlp\.\w+\.weight in .* has the shape"),
        ({"num_hidden_layers": 3}, "lacks layers.2.hidden_norm.weight, .* and 8 more: it is damaged"),
        ({"hidden_size": "24"}, "config.json is no qwen3 config: .*hidden_size"),
        ({"num_hidden_layers": 1}, "lacks midlayer.hidden_norm.weight"),
    ],
)
def test_configs_that_do_not_fit(tmp_path, target, capsys, changes, message):
    config, tensors = write(tmp_path / "released")
    config = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    (tmp_path / "released" / "config.json").write_text(json.dumps(config))
    refused(tmp_path, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("fc.weight"), "lacks fc.weight: it is damaged, or of another format"),
        (lambda state: state.pop("layers.1.self_attn.k_norm.weight"), "lacks layers.1.self_attn.k_norm.weight"),
        (lambda state: state.pop("t2d"), "lacks t2d"),
        (lambda state: state.update({"layers.2.hidden_norm.weight": torch.ones(24)}), "also holds layers.2.hidden"),
        (lambda state: state.update({"norm.weight": torch.ones(7)}), r"norm.weight in .* has the shape \[7\]"),
        (lambda state: state.update(d2t=torch.ones(PADDED, dtype=torch.long)), "d2t and t2d .* do not name the same"),
        (lambda state: state["t2d"].fill_(False), "d2t and t2d .* do not name the same"),
        (lambda state: state.update({"fc.weight": torch.ones(24, 96).char()}), "stored as torch.int8: import"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, target, change, message):
    _, tensors = write(tmp_path / "released")
    change(tensors)
    save_file(tensors, tmp_path / "released" / "model.safetensors")
    refused(tmp_path, message)


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_truncated_weights(tmp_path, target, keep):
    write(tmp_path / "released")
    path = tmp_path / "released" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(tmp_path, "model.safetensors cannot be read .* the file is truncated or damaged, fetch it again")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"{", "config.json is not JSON"),
        ("config.json", b"[1]", "config.json is not a JSON object: fetch"),
        ("model.safetensors", None, "has no model.safetensors: fetch it again .* other formats"),
        ("model.safetensors.index.json", b"{}", "is no index of weights"),
    ],
)
def test_files_that_are_missing_or_no_such_files(tmp_path, target, file, content, message):
    write(tmp_path / "released")
    path = tmp_path / "released" / file
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    torch.save({}, tmp_path / "released" / "pytorch_model.bin")  # is never read
    refused(tmp_path, message)


def refused(tmp_path, message):
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises((ValueError, OSError), match=message) as error:
        run(tmp_path)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before  # nothing half-written stays
