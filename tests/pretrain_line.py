"""A pruned model, data and held-out text on disk, and arguments of `pretrain` over them."""

import json

from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_target

from osprey.train.pretrain import PretrainArguments

PHRASE = "the quick brown fox jumps over the lazy dog. "


def make_files(tmp_path):
    model = tiny_target("llama", vocab_size=VOCABULARY, num_hidden_layers=2, initializer_range=0.1)
    model.save_pretrained(tmp_path / "pruned")
    bytes_tokenizer().save_pretrained(tmp_path / "pruned")
    rows = [{"text": PHRASE * (1 + n % 4)} for n in range(40)]
    (tmp_path / "en.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held_en.jsonl").write_text(json.dumps({"text": PHRASE * 2}) + "\n")
    (tmp_path / "held_fr.jsonl").write_text(json.dumps({"text": "le renard brun"}) + "\n")
    return tmp_path


def arguments(files, **changes):
    settings = {
        "model": str(files / "pruned"),
        "out": str(files / "backbone"),
        "data": ["en.jsonl"],
        "data_root": str(files),
        "tokens": 64 * 2 * 12,
        "length": 64,
        "batch_rows": 2,
        "learning_rate": 0.01,
        "precision": "fp32",
        "log_steps": 1,
    }
    return PretrainArguments(**{**settings, **changes})
