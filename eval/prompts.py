"""Prompt files: one JSON object a line with `id`, `domain`, `language` and `turns` (the user's turns, in order).

They may be gzipped (`.jsonl.gz`). The files of `osprey respond`, rows with `id` and `prompt`, are read too: one turn,
and `any` for what is not said.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osprey.train.jsonl import json_lines

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


FORMS = "'id', 'domain', 'language' and a list 'turns', or only 'id' and 'prompt'"


@dataclass(frozen=True)
class Prompt:
    id: str
    domain: str
    language: str
    turns: tuple[str, ...]


def load_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a JSONL file; keys beyond the four are ignored.

    Raises `OSError` where there is no such file, and `ValueError` naming the line where a row is not a prompt.
    """
    path = Path(path)
    if not path.is_file():
        raise OSError(f"there is no prompt file {path}.")
    prompts = [parse_prompt(row, where) for where, row in json_lines(path)]
    if not prompts:
        raise ValueError(f"{path} holds no prompts.")
    repeated, times = Counter(prompt.id for prompt in prompts).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{path}: the id {repeated!r} stands on several lines; ids must be unique.")
    return prompts


def parse_prompt(row: Any, where: str) -> Prompt:
    if isinstance(row, dict) and "turns" not in row and "prompt" in row:
        row = {"domain": "any", "language": "any", "turns": [row["prompt"]], **row}
    fields = row if isinstance(row, dict) else {}
    if wrong := [key for key in ("id", "domain", "language") if not isinstance(fields.get(key), str)]:
        raise ValueError(f"{where}: a prompt needs the texts {FORMS}; {wrong[0]!r} is missing or no text.")
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(
            f"{where}: 'turns' must be a list of one or more texts, and 'prompt' a text, none of them blank."
        )
    return Prompt(row["id"], row["domain"], row["language"], tuple(turns))


def encode(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]]) -> dict[str, "torch.Tensor"]:
    """`input_ids` and `attention_mask` (`[1, T]`) of a conversation; its bare text where there is no chat template."""
    if tokenizer.chat_template is None:
        text = "\n".join(message["content"] for message in messages)
        encoded = tokenizer(text, return_tensors="pt")
    else:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def max_positions(target: "PreTrainedModel") -> int | None:
    """Of prompt and answer together; None where the target does not say."""
    return getattr(target.config.get_text_config(), "max_position_embeddings", None)


def check_length(inputs: dict[str, "torch.Tensor"], target: "PreTrainedModel", prompt: str, new_tokens: int) -> None:
    """Raises `ValueError` where a prompt and its answer do not fit into the target's positions."""
    limit, length = max_positions(target), inputs["input_ids"].shape[1]
    if limit is not None and length + new_tokens > limit:
        raise ValueError(
            f"prompt {prompt!r} has {length} tokens, which with {new_tokens} new ones is more than the target's "
            f"{limit} positions."
        )
