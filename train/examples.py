"""Rows of training data as tokens: what the target reads, and which tokens the drafter learns to draft.

A row has one of three forms, told by its keys:

- `prompt` and `response`: one question and the target's answer; `response_ids`, where they are known, are the very
  tokens that the target wrote (its end token among them), and go before the text;
- `messages`: a chat of `role` and `content`. Each assistant turn gives one example, behind what the chat template
  shows of the turns before it. That is what the target sees when it writes that turn: templates of reasoning models,
  which drop the reasoning of earlier turns, are followed exactly;
- `text`: plain text, all of which counts, cut into windows.
"""

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Example:
    """Tokens of a prompt and of what follows it; `meta` has `id`, `language`, `temperature`, `finish`, `kind`."""

    input_ids: list[int]
    prompt_length: int
    meta: dict[str, Any]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Messages in the chat template, with the head of the answer behind them."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def user_prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """A prompt as the only message of a chat (the template adds its own system prompt, if it has one)."""
    return prompt_ids(tokenizer, [{"role": "user", "content": prompt}])


@functools.cache
def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that ends an answer: what the chat template puts behind one, else the end of sequence.

    Where these differ, as in Gemma (`<end_of_turn>`) and Llama 3 (`<|eot_id|>`), the target writes the template's.
    """
    if tokenizer.chat_template is None:
        return tokenizer.eos_token_id
    content = "The answer."
    chat = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": content}]
    behind = tokenizer.apply_chat_template(chat, tokenize=False).rpartition(content)[2]
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else tokenizer.eos_token_id


def tokenize_row(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], max_length: int, prompts: bool = False
) -> list[Example]:
    """The examples of a row, none of them longer than `max_length`.

    With `prompts`, a row may also lack the answer: a `prompt` alone, or `messages` that end with the user's.

    Raises:
        ValueError: the row has none of these forms, or its prompt leaves no room within `max_length`.
    """
    if prompts and (messages := _open_messages(row)):
        return [_example(row, prompt_ids(tokenizer, messages), [], "prompt", max_length)]
    if "messages" in row:
        return _chat_turns(tokenizer, row, max_length)
    if "prompt" not in row and isinstance(row.get("text"), str):
        return _text_windows(tokenizer, row, max_length)
    if not isinstance(row.get("prompt"), str) or not isinstance(row.get("response"), str):
        raise ValueError(f"Row {row.get('id', '?')!r} lacks a text `prompt` or `response` (or `messages`, or `text`).")
    prompt = user_prompt_ids(tokenizer, row["prompt"])
    return [_example(row, prompt, _response_ids(tokenizer, row), "response", max_length)]


def _open_messages(row: dict[str, Any]) -> list[dict[str, str]] | None:
    """The chat that waits for an answer, or None."""
    if isinstance(row.get("prompt"), str) and "response" not in row:
        return [{"role": "user", "content": row["prompt"]}]
    messages = row.get("messages")
    return messages if isinstance(messages, list) and messages and messages[-1].get("role") != "assistant" else None


def _response_ids(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> list[int]:
    """The ids that the target wrote, or else its text tokenised apart from the prompt, with the end of turn.

    A text that was cut inside a character ends in a replacement character, which the target never wrote: it is
    dropped.
    """
    if row.get("response_ids") is not None:
        return list(row["response_ids"])
    stopped = row.get("finish") == "stop"
    ids = tokenizer(row["response"] if stopped else row["response"].rstrip("\ufffd"), add_special_tokens=False)
    return ids["input_ids"] + ([end_of_turn(tokenizer)] if stopped else [])


def _chat_turns(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], max_length: int) -> list[Example]:
    messages, name = row["messages"], f"Row {row.get('id', '?')!r}"
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{name}: `messages` must be a list of objects with `role` and `content`.")
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise ValueError(f"{name}: `messages` holds no assistant turn to learn.")
    examples: list[Example] = []
    for turn in turns:
        prompt = prompt_ids(tokenizer, messages[:turn])
        if len(prompt) >= max_length and examples:
            break  # the later turns of a long chat are left out
        text = _turn_text(tokenizer, messages, turn, name)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        examples.append(_example(row, prompt, ids + [end_of_turn(tokenizer)], "chat", max_length))
    return examples


def _turn_text(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], turn: int, name: str) -> str:
    """What the target writes in an assistant turn: its content as it stands, after its reasoning as the template has
    it where that is given apart (`reasoning_content`)."""
    message = messages[turn]
    if not isinstance(message.get("content"), str):
        raise ValueError(f"{name}: an assistant turn of `messages` has no text `content`.")
    if not message.get("reasoning_content"):
        return message["content"]
    prompt = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
    reasoning, end = message["reasoning_content"].strip(), whole.rfind(message["content"].strip())
    if not whole.startswith(prompt) or reasoning not in whole[len(prompt) : end]:
        raise ValueError(
            f"{name}: the chat template does not show `reasoning_content`; put the reasoning into `content`, written "
            "as the target writes it."
        )
    return whole[len(prompt) : end + len(message["content"].strip())]


def _text_windows(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], max_length: int) -> list[Example]:
    ids = tokenizer(row["text"])["input_ids"]
    start = ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []  # of every window: targets lean on it
    size = max_length - len(start)
    if size < 1:
        raise ValueError(f"max_length {max_length} leaves no room for text: raise it.")
    body = ids[len(start) :]
    windows = [start + body[begin : begin + size] for begin in range(0, len(body), size)]
    # The first token of a window is the prompt: nothing comes before it that could predict it.
    return [_example(row, window[:1], window[1:], "text", max_length) for window in windows]


def _example(row: dict[str, Any], prompt: list[int], response: list[int], kind: str, max_length: int) -> Example:
    if len(prompt) >= max_length:
        raise ValueError(
            f"The prompt of row {row.get('id', '?')!r} has {len(prompt)} tokens, which leaves no room for a response "
            f"within max_length {max_length}: raise max_length or leave the row out."
        )
    meta = {key: row.get(key) for key in ("id", "language", "temperature", "finish")} | {"kind": kind}
    if meta["id"] is None:  # all answers to a prompt have one id: they are held out, or trained on, together
        content = next(row[key] for key in ("prompt", "messages", "text") if key in row)
        meta["id"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    return Example((prompt + response)[:max_length], len(prompt), meta)
