"""Conversion: the drafter computes what the backbone computes, for any context, in the target's vocabulary."""

import json
import os
import shutil

import pytest
import torch
from bytes_tokenizer import VOCABULARY as BYTES
from bytes_tokenizer import bytes_tokenizer
from hub_cache import put_into_hub_cache
from tiny import tiny_target
from transformers import AutoTokenizer

from osprey.cli.convert import main
from osprey.modeling import OspreyDrafter, vocabulary_sha256
from osprey.modeling.target_osprey import check_tokenizer
from osprey.train import align
from osprey.train.checkpoints import cache_dir
from osprey.train.convert import ConvertArguments, convert

PADDED = BYTES + 5  # vocabularies are often padded past the tokenizer


@pytest.fixture
def folders(tmp_path, tmp_path_factory, monkeypatch):
    """Writes a backbone of a family and a target of twice its width with a padded vocabulary."""
    monkeypatch.setenv("OSPREY_CACHE", str(tmp_path_factory.mktemp("cache")))

    def write(family: str, **changes):
        backbone = tiny_target(family, vocab_size=BYTES, num_hidden_layers=2, eos_token_id=2, **changes)
        backbone.save_pretrained(tmp_path / "backbone")
        target = tiny_target(vocab_size=PADDED, hidden_size=64, num_hidden_layers=8, seed=3, eos_token_id=2)
        target.save_pretrained(tmp_path / "target")
        for name in ("backbone", "target"):
            bytes_tokenizer().save_pretrained(tmp_path / name)
        return backbone, target

    return write


def arguments(tmp_path, **changes):
    settings = {"backbone": "backbone", "target": "target", "out": "out"}
    paths = {name: str(tmp_path / folder) for name, folder in settings.items()}
    return ConvertArguments(**{**paths, **changes})


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("smollm3", {"tie_word_embeddings": True, "no_rope_layers": [1, 0]}),
    ],
)
def test_function_is_preserved_and_gradients_arrive(tmp_path, folders, family, changes):
    backbone, target = folders(family, **changes)
    for name, parameter in backbone.named_parameters():  # biases and norms start at 0 and 1: make them tell
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    backbone.save_pretrained(tmp_path / "backbone")
    convert(arguments(tmp_path))
    drafter = OspreyDrafter.from_pretrained(tmp_path / "out")
    assert drafter.config.vocab_size == PADDED
    assert drafter.config.target_layer_ids == [1, 3, 4]

    ids = torch.randint(3, BYTES, (2, 9))
    taps = torch.randn(2, 9, 3 * target.config.hidden_size)
    output = drafter(ids, drafter.project_taps(taps))
    with torch.no_grad():
        expected = backbone(ids).logits
    torch.testing.assert_close(output.logits[..., :BYTES], expected, rtol=1e-4, atol=1e-4)
    assert (output.logits[..., BYTES:] == -torch.inf).all()  # rows of the padding are never drafted
    # fc starts as the deepest tap, cut to the drafter's width.
    deepest = taps[..., 2 * target.config.hidden_size :][..., : drafter.config.hidden_size]
    torch.testing.assert_close(drafter.project_taps(taps), deepest)

    output.logits[..., :BYTES].logsumexp(-1).sum().backward()
    hidden = drafter.config.hidden_size
    for layer in drafter.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            assert projection.weight[:, :hidden].abs().max() == 0
            assert projection.weight.grad[:, :hidden].abs().max() > 0
    # Behind context halves that are zero, `fc` gets its gradient from the second step on.
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.grad is not None:
                parameter -= 1e-3 * parameter.grad
    drafter.zero_grad()
    drafter(ids, drafter.project_taps(taps)).logits[..., :BYTES].logsumexp(-1).sum().backward()
    assert drafter.fc.weight.grad.abs().max() > 0


def test_ctx_norm_may_start_from_a_constant(tmp_path, folders):
    backbone, target = folders("llama")
    convert(arguments(tmp_path, ctx_norm_weight=0.1))
    drafter = OspreyDrafter.from_pretrained(tmp_path / "out")
    assert all(torch.equal(layer.ctx_norm.weight, torch.full((32,), 0.1)) for layer in drafter.layers)
    ids = torch.randint(3, BYTES, (1, 9))
    context = torch.randn(1, 9, backbone.config.hidden_size)
    with torch.no_grad():
        torch.testing.assert_close(
            drafter(ids, context).logits[..., :BYTES], backbone(ids).logits, rtol=1e-4, atol=1e-4
        )


def test_random_blocks_are_a_random_backbones(tmp_path, folders):
    """The ablation keeps the tables and the zero context halves; nothing else of the backbone is left."""
    folders("qwen3")
    convert(arguments(tmp_path))
    for name, seed in (("first", 5), ("again", 5), ("other", 6)):  # the backbone is made with seed 0
        convert(arguments(tmp_path, out=str(tmp_path / name), random_blocks=True, seed=seed))
    whole, first, again, other = (
        OspreyDrafter.from_pretrained(tmp_path / name).state_dict() for name in ("out", "first", "again", "other")
    )
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        if name.startswith("layers.") and weight.ndim == 2:
            assert not torch.equal(weight, whole[name]) and not torch.equal(weight, other[name])
            if ".q_proj" in name:
                half = weight.shape[1] // 2
                assert not weight[:, :half].any() and weight[:, half:].any()
        elif not name.startswith("layers."):
            assert torch.equal(weight, whole[name])


def test_shortlist(tmp_path, folders, capsys):
    backbone, _ = folders("llama", tie_word_embeddings=True)
    tokenizer = bytes_tokenizer()
    a, b, c = tokenizer("abc")["input_ids"]
    responses, text = tmp_path / "responses.jsonl", tmp_path / "text.jsonl"
    responses.write_text(
        json.dumps({"response": "aab", "language": "en", "finish": "stop"})
        + "\n"
        + json.dumps({"response": "bx", "language": "de", "finish": "length"})
    )
    text.write_text(json.dumps({"text": "cccccccccccc"}))
    command = [
        "--draft_vocab_size",
        "4",
        "--response_weight",
        "10",
        "--frequencies",
        str(responses),
        str(text),
        "--json",
    ]
    paths = [str(tmp_path / "backbone"), "--target", str(tmp_path / "target"), "--out", str(tmp_path / "out")]
    assert main([*paths, *command]) == 0
    record = json.loads(capsys.readouterr().out)
    # weighted by 10: a 20, b 20, end 10 (and special), x 10; c 12
    drafter = OspreyDrafter.from_pretrained(tmp_path / "out")
    assert drafter.draft_ids.tolist() == sorted([tokenizer.eos_token_id, a, b, c])
    assert record["shortlist"]["response_coverage"] == {"en": 1.0, "de": 0.5, "all": round(5 / 6, 4)}
    assert json.loads((tmp_path / "out" / "training.json").read_text()) == {"stages": [record]}
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == BYTES
    ids = torch.randint(3, BYTES, (1, 5))
    logits = drafter(ids).logits
    with torch.no_grad():
        torch.testing.assert_close(logits[..., [a, b, c]], backbone(ids).logits[..., [a, b, c]], rtol=1e-4, atol=1e-4)
    assert torch.isinf(logits).sum() == 5 * (PADDED - 4)


def test_the_shortlist_counts_the_targets_own_ids_and_can_end(tmp_path, folders):
    """Ends are those of the generation config too; the ids that the target wrote go before its text."""
    _, target = folders("llama")
    a, b, c, d = bytes_tokenizer()("abcd")["input_ids"]
    target.generation_config.eos_token_id = [2, d]
    target.save_pretrained(tmp_path / "target")
    row = {"response": "aaab", "response_ids": [c, c, b, d], "finish": "stop", "language": "en"}
    (tmp_path / "responses.jsonl").write_text(json.dumps(row))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "aa"}))
    files = [str(tmp_path / name) for name in ("responses.jsonl", "text.jsonl")]
    # By count, weighted by 30: c 60, b 30, d 30, a 2; the end of sequence does not occur.
    record = convert(arguments(tmp_path, draft_vocab_size=4, frequencies=files))
    assert OspreyDrafter.from_pretrained(tmp_path / "out").draft_ids.tolist() == sorted([2, d, c, b])
    assert record["shortlist"]["response_coverage"] == {"en": 1.0, "all": 1.0}
    convert(arguments(tmp_path, draft_vocab_size=2, frequencies=files, overwrite=True))
    assert OspreyDrafter.from_pretrained(tmp_path / "out").draft_ids.tolist() == [2, d]
    with pytest.raises(ValueError, match="2 end tokens, which are always in it"):
        convert(arguments(tmp_path, draft_vocab_size=1, frequencies=files, overwrite=True))


def test_the_shortlist_counts_what_the_assistant_says_in_chats(tmp_path, folders):
    folders("llama")
    a, b, c = bytes_tokenizer()("abc")["input_ids"]
    turns = [("user", "aaaa"), ("assistant", "bbb"), ("user", "aaaa"), ("assistant", "cc")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(row))
    convert(arguments(tmp_path, draft_vocab_size=3, frequencies=[str(tmp_path / "chats.jsonl")]))
    assert OspreyDrafter.from_pretrained(tmp_path / "out").draft_ids.tolist() == sorted([2, b, c])


def test_the_target_is_known_again(tmp_path, folders, monkeypatch):
    """By its tokenizer, and on the Hub by the commit that a branch or tag was at."""
    folders("llama")
    convert(arguments(tmp_path))
    config = OspreyDrafter.from_pretrained(tmp_path / "out").config
    assert (config.target, config.target_revision) == ("target", None)
    assert config.target_tokenizer_sha256 == vocabulary_sha256(bytes_tokenizer())
    assert config.target_num_tokens == BYTES
    commit = put_into_hub_cache(tmp_path / "hub", "org/target", tmp_path / "target", monkeypatch)
    for revision, recorded in ((None, commit), ("main", commit), (commit, commit)):
        convert(arguments(tmp_path, target="org/target", target_revision=revision, overwrite=True))
        assert OspreyDrafter.from_pretrained(tmp_path / "out").config.target_revision == recorded


def test_alignments_are_kept(tmp_path, folders, monkeypatch):
    folders("llama")
    convert(arguments(tmp_path))
    assert len(list((cache_dir() / "alignments").iterdir())) == 1
    monkeypatch.setattr(align, "align_vocabularies", lambda *_: pytest.fail("aligned again"))
    convert(arguments(tmp_path, overwrite=True))


def test_an_added_token_may_lie_past_the_targets_rows(tmp_path, folders):
    """As the image token of text-only Gemma 3 does; any other token there is of another model's tokenizer."""
    folders("llama")
    target = tiny_target(vocab_size=BYTES, hidden_size=64, num_hidden_layers=8, seed=3, eos_token_id=2)
    target.save_pretrained(tmp_path / "target")
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokenizer.convert_tokens_to_ids("<image>") == BYTES
    tokenizer.save_pretrained(tmp_path / "target")
    record = convert(arguments(tmp_path))
    drafter = OspreyDrafter.from_pretrained(tmp_path / "out")
    assert len(drafter.draft_ids) == drafter.config.vocab_size == BYTES
    assert record["alignment"] == {"direct": BYTES, "single": 0, "averaged": 0, "unmapped": 0}
    check_tokenizer(drafter, AutoTokenizer.from_pretrained(tmp_path / "target"))

    tiny_target(vocab_size=BYTES - 1, num_hidden_layers=8, eos_token_id=2).save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match=f"{BYTES - 1} vocabulary rows but its tokenizer has {BYTES + 1} tokens"):
        convert(arguments(tmp_path, overwrite=True))


def test_sliding_windows_are_refused(tmp_path, folders):
    backbone, _ = folders("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert backbone.config.layer_types == ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="layers 1 of the source attend in a sliding window"):
        convert(arguments(tmp_path))


def test_refusals(tmp_path, folders):
    folders("llama")
    with pytest.raises(ValueError, match=r"\[1, 2, 7\].*between 0 and 6"):  # 7 is seen behind the final norm only
        convert(arguments(tmp_path, target_layer_ids=[1, 2, 7]))
    with pytest.raises(ValueError, match="give response or text files"):
        convert(arguments(tmp_path, draft_vocab_size=8))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match="neither a text"):
        convert(arguments(tmp_path, draft_vocab_size=8, frequencies=[str(tmp_path / "rows.jsonl")]))
    with pytest.raises(ValueError, match="--ctx_norm_weight is nan, but must be finite"):
        convert(arguments(tmp_path, ctx_norm_weight=float("nan")))
    shutil.copytree(tmp_path / "backbone", tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 1000)
    with pytest.raises(OSError, match=r"The weights of \S*cut cannot be read .*truncated or damaged"):
        convert(arguments(tmp_path, backbone=str(tmp_path / "cut")))
    shutil.rmtree(tmp_path / "cut")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="exists already"):
        convert(arguments(tmp_path))
    convert(arguments(tmp_path, overwrite=True))
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "out" / "custom_generate" / "generate.py").exists()
    folders("gemma3")
    with pytest.raises(ValueError, match="'gemma3_text'.*llama, qwen2, qwen3"):
        convert(arguments(tmp_path, overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backbone", "out", "rows.jsonl", "target"]
