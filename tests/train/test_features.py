"""Offline features equal what the target computes online; shards resume, and other settings are refused."""

import json
from pathlib import Path

import pytest
import torch
from bf16_machine import pretend_bf16
from bytes_tokenizer import VOCABULARY as BYTES
from bytes_tokenizer import bytes_tokenizer
from tiny import tiny_target
from transformers import AutoModelForCausalLM

from osprey.train import features as module
from osprey.train.feature_data import FeatureDataset, split_rows
from osprey.train.features import FeatureArguments, prepare_features

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"


@pytest.fixture
def arguments(tmp_path):
    target = tiny_target(vocab_size=BYTES, eos_token_id=2, bos_token_id=1)
    target.save_pretrained(tmp_path / "target")
    bytes_tokenizer(TEMPLATE).save_pretrained(tmp_path / "target")
    rows = [
        {
            "id": f"p-{number}",
            "language": "en",
            "temperature": 0.0,
            "prompt": f"hi {number}",
            "response": "yes" * number,
        }
        for number in range(1, 9)
    ]
    rows[0]["finish"] = "stop"
    (tmp_path / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FeatureArguments(
        target=str(tmp_path / "target"),
        data=[str(tmp_path / "responses.jsonl")],
        features=str(tmp_path / "features"),
        tokens_per_batch=64,
        tokens_per_shard=60,
        precision="fp32",
    )


@torch.no_grad()
def test_features_are_the_targets(arguments):
    dataset = FeatureDataset([prepare_features(arguments)])
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    taps_ids = dataset.settings["target_layer_ids"]
    assert len(dataset) == 8
    assert len(list(Path(arguments.features).glob("features-*"))) > 1
    for row, item in zip(dataset.rows, dataset, strict=True):
        ids = item["input_ids"][None]
        outputs = target(ids, output_hidden_states=True)
        assert row["length"] == ids.shape[1]
        taps = torch.cat([outputs.hidden_states[i + 1] for i in taps_ids], dim=-1)[0]
        torch.testing.assert_close(item["taps"].float(), taps, rtol=2e-3, atol=2e-3)
        first = row["prompt_length"] - 1
        log_p = item["hidden"].float() @ dataset.head().float().T - item["logsumexp"][:, None]
        torch.testing.assert_close(log_p[first:].exp().sum(-1), torch.ones(len(ids[0]) - first))
        exact = outputs.logits[0, first:].softmax(-1)
        torch.testing.assert_close(log_p[first:].exp(), exact, rtol=0, atol=0.02)
        assert (item["top1"][:first] == -1).all()
        assert torch.equal(item["top1"][first:], log_p[first:].argmax(-1))
        assert item["response_mask"].tolist() == [t > first for t in range(ids.shape[1])]


def test_texts_count_whole_and_are_never_held_out(arguments):
    texts = [json.dumps({"id": f"t-{number}", "text": "x" * 50}) for number in range(30)]
    Path(arguments.data[0]).with_name("texts.jsonl").write_text("\n".join(texts))
    arguments.data.append(str(Path(arguments.data[0]).with_name("texts.jsonl")))
    arguments.max_length = 20
    dataset = FeatureDataset([prepare_features(arguments)])
    texts = [index for index, row in enumerate(dataset.rows) if row["kind"] == "text"]
    assert sum(dataset.rows[index]["length"] for index in texts) == 30 * 50  # 20, 20 and 10 tokens
    item = dataset[texts[0]]
    assert item["response_mask"].tolist() == [False] + [True] * (len(item["response_mask"]) - 1)
    assert (item["top1"] >= 0).all()
    train, held_out = split_rows(dataset, 100)
    assert train.indices == texts
    assert len(held_out) == 8


def test_a_stopped_preparation_goes_on(arguments, monkeypatch):
    written = []
    run_target = module.run_target

    def stop_at_the_second(*inputs):
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(1)
        return run_target(*inputs)

    monkeypatch.setattr(module, "run_target", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        prepare_features(arguments)
    with pytest.raises(ValueError, match="not finished"):
        FeatureDataset([arguments.features])
    first = (Path(arguments.features) / "features-00000.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(module, "run_target", run_target)
    assert len(FeatureDataset([prepare_features(arguments)])) == 8
    assert (Path(arguments.features) / "features-00000.safetensors").stat().st_mtime_ns == first
    assert not list(Path(arguments.features).glob(".*"))  # no temporary file is left


def test_what_auto_meant_is_kept(arguments, monkeypatch):
    pretend_bf16(monkeypatch, False)
    arguments.precision = "auto"
    prepare_features(arguments)
    pretend_bf16(monkeypatch, True)
    with pytest.raises(ValueError, match="another precision: give an empty folder, or the same settings"):
        prepare_features(arguments)
    path = Path(arguments.features) / "index.json"
    index = json.loads(path.read_text())
    index["settings"]["precision"] = "auto"  # as earlier versions kept it
    path.write_text(json.dumps(index))
    prepare_features(arguments)
    assert len(FeatureDataset([arguments.features])) == 8


def test_refusals(arguments, tmp_path):
    prepare_features(arguments)
    arguments.dtype = "bfloat16"
    with pytest.raises(ValueError, match="another dtype"):
        prepare_features(arguments)
    arguments.features = str(tmp_path / "other")
    arguments.target_layer_ids = [0, 1, 4]
    with pytest.raises(ValueError, match="last tap allowed is 3"):
        prepare_features(arguments)
    (tmp_path / "long.jsonl").write_text(json.dumps({"id": "t", "text": "x" * 300}))
    arguments.data, arguments.target_layer_ids = [str(tmp_path / "long.jsonl")], None
    with pytest.raises(ValueError, match="Row 't' has 300 tokens, but the target's context is 256"):
        prepare_features(arguments)
    arguments.data = [str(tmp_path / "responses.jsonl")]
    (tmp_path / "responses.jsonl").write_text("{broken\n")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        prepare_features(arguments)
    with pytest.raises(ValueError, match="not a feature folder"):
        FeatureDataset([tmp_path])
    capped = tiny_target("gemma3", vocab_size=BYTES, final_logit_softcapping=2.0)
    capped.save_pretrained(tmp_path / "capped")
    bytes_tokenizer(TEMPLATE).save_pretrained(tmp_path / "capped")
    (tmp_path / "responses.jsonl").write_text('{"id": "p", "prompt": "a", "response": "bcd"}\n')
    arguments.target, arguments.target_layer_ids = str(tmp_path / "capped"), None
    with pytest.raises(ValueError, match="behind the head"):
        prepare_features(arguments)
