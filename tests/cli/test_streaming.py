"""Streaming: whose token is coloured, and characters that take several tokens."""

import io

import pytest
import torch
from bytes_tokenizer import bytes_tokenizer

from osprey.cli.streaming import DRAFTED, RESET, DraftStreamer, wants_colour


@pytest.fixture(scope="module")
def tokenizer():
    return bytes_tokenizer()


def stream(tokenizer, puts: list[str | bytes], colour: bool) -> str:
    out = io.StringIO()
    streamer = DraftStreamer(tokenizer, out, colour)
    streamer.put(torch.tensor([tokenizer("the prompt")["input_ids"]]))
    for put in puts:
        streamer.put(torch.tensor([tokenizer(put)["input_ids"] if isinstance(put, str) else put]))
    streamer.end()
    return out.getvalue()


def test_last_token_of_each_verification_is_the_targets_own(tokenizer):
    shown = stream(tokenizer, ["a", "bcd", "e"], colour=True)
    assert shown == f"a{DRAFTED}b{RESET}{DRAFTED}c{RESET}de\n"


def test_no_colour(tokenizer):
    assert stream(tokenizer, ["a", "bcd", "e\nf"], colour=False) == "abcde\nf\n"


def test_a_character_waits_for_its_last_token(tokenizer):
    # The two bytes of "é": drafted first, the target's own second; the character appears with the latter.
    first, second = tokenizer("é")["input_ids"]
    assert stream(tokenizer, [[*tokenizer("a")["input_ids"], first], [second]], colour=True) == f"{DRAFTED}a{RESET}é\n"


def test_an_unfinished_character_is_still_shown_at_the_end(tokenizer):
    first, _ = tokenizer("é")["input_ids"]
    assert stream(tokenizer, [[first]], colour=False) == "\ufffd\n"


def test_special_tokens_are_not_shown(tokenizer):
    assert stream(tokenizer, ["a", [*tokenizer("b")["input_ids"], tokenizer.eos_token_id]], colour=False) == "ab\n"


def test_one_streamer_serves_several_calls(tokenizer):
    out = io.StringIO()
    streamer = DraftStreamer(tokenizer, out, colour=False)
    for text in ("x", "y"):
        streamer.put(torch.tensor([tokenizer("prompt")["input_ids"]]))
        streamer.put(torch.tensor([tokenizer(text)["input_ids"]]))
        streamer.end()
    assert out.getvalue() == "x\ny\n"


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert wants_colour(Terminal()) and not wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())
