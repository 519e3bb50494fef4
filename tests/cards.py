"""Folders as they are published: tiny drafters and backbones with tokenizer, training record and card."""

import json
from pathlib import Path

from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_drafter, tiny_target

TARGET = "loop/target"


def card(kind: str, base_model: str, lengths: dict[str, float] | None = None) -> str:
    """A card with one result of `mean_acceptance_length` for each domain of `lengths` (suite or suite/domain)."""
    results = [
        f"""  - task: {{type: text-generation}}
    dataset: {{type: {domain.partition("/")[0]}, name: {domain}, config: {domain.partition("/")[2] or "null"}}}
    metrics: [{{type: mean_acceptance_length, value: {length}}}]
"""
        for domain, length in (lengths or {}).items()
    ]
    index = "model-index:\n- name: tiny\n  results:\n" + "".join(results) if results else ""
    head = (
        f"license: apache-2.0\nlibrary_name: transformers\nbase_model: {base_model}\ntags: [osprey, {kind}]\n{index}"
    )
    return f"---\n{head}---\n\n# Tiny {kind}\n"


def save_target(folder: Path):
    target = tiny_target(vocab_size=VOCABULARY, eos_token_id=2)
    target.save_pretrained(folder)
    bytes_tokenizer().save_pretrained(folder)
    return target


def save_drafter(folder: Path, lengths: dict[str, float] | None = None, shard: str = "1GB", seed: int = 1):
    target = tiny_target(vocab_size=VOCABULARY, eos_token_id=2)
    drafter = tiny_drafter(target, seed, eos_token_id=2, bos_token_id=1)
    drafter.config.update({"target": TARGET, "backbone": "tiny-2l"})
    drafter.save_pretrained(folder, max_shard_size=shard)
    finish(folder, "drafter", TARGET, lengths)
    return drafter


def save_backbone(folder: Path) -> None:
    backbone = tiny_target("qwen3", 7, num_hidden_layers=2, vocab_size=VOCABULARY)
    backbone.save_pretrained(folder)
    finish(folder, "backbone", "loop/source")


def finish(folder: Path, kind: str, base_model: str, lengths: dict[str, float] | None = None) -> None:
    bytes_tokenizer().save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps({"stages": []}) + "\n")
    (folder / "README.md").write_text(card(kind, base_model, lengths))
