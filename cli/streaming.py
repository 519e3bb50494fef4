"""Streaming of assisted generation, with the drafter's tokens coloured apart from the target's own."""

import os
from typing import TextIO

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

DRAFTED = "\x1b[36m"  # cyan
RESET = "\x1b[0m"


def wants_colour(stream: TextIO) -> bool:
    """Colours only on a terminal, and not where NO_COLOR (no-color.org) is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


class DraftStreamer(BaseStreamer):
    """Writes text as it is generated.

    After each verification assisted generation puts the accepted draft and behind it one token of the target's own;
    the former is coloured. The first `put` is the prompt, which is not written.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stream: TextIO, colour: bool):
        self.tokenizer = tokenizer
        self.stream = stream
        self.colour = colour
        self.prompt_seen = False
        self.pending: list[int] = []  # tokens since the last line break
        self.written = 0  # characters of `pending` that are already out

    def put(self, value: torch.Tensor) -> None:
        """`value`: `[1, n]` or `[n]` token ids."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        *drafted, own = value.flatten().tolist()
        for token in drafted:
            self.write_token(token, DRAFTED)
        self.write_token(own, "")
        self.stream.flush()

    def write_token(self, token: int, colour: str) -> None:
        self.pending.append(token)
        text = self.tokenizer.decode(self.pending, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if text.endswith("\ufffd"):  # the character goes on in the next token
            return
        self.write(text[self.written :], colour)
        self.written = len(text)
        if text.endswith("\n"):
            self.pending, self.written = [], 0

    def write(self, text: str, colour: str) -> None:
        if text:
            self.stream.write(f"{colour}{text}{RESET}" if self.colour and colour else text)

    def end(self) -> None:
        rest = self.tokenizer.decode(self.pending, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.write(rest[self.written :], "")
        self.stream.write("\n")
        self.stream.flush()
        self.prompt_seen, self.pending, self.written = False, [], 0
