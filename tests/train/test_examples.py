"""The tokens of each form of row, worked out by hand with a tokenizer of single bytes."""

import pytest
from bytes_tokenizer import bytes_tokenizer

from osprey.train.examples import end_of_turn, tokenize_row

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
# As of reasoning models: only the last turn shows its reasoning.
REASONING = (
    "{% for m in messages %}<s>{% if m.reasoning_content and loop.last %}<t>{{ m.reasoning_content }}</t>{% endif %}"
    "{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


def encode(text):
    return bytes_tokenizer()(text)["input_ids"]


def test_prompt_and_response():
    tokenizer = bytes_tokenizer(TEMPLATE)
    row = {"id": "p", "prompt": "ab", "response": "cd", "temperature": 0.0, "language": "en"}
    prompt = encode("<s>ab</s><s>")
    (stopped,) = tokenize_row(tokenizer, row | {"finish": "stop"}, 99)
    assert stopped.input_ids == prompt + encode("cd</s>")
    assert stopped.prompt_length == len(prompt) == 5
    assert stopped.meta == {"id": "p", "language": "en", "temperature": 0.0, "finish": "stop", "kind": "response"}
    (cut,) = tokenize_row(tokenizer, row | {"finish": "length", "response": "cd\ufffd"}, 99)
    assert cut.input_ids == prompt + encode("cd")  # the half character was never a token
    assert tokenize_row(tokenizer, row, 6)[0].input_ids == prompt + encode("c")


def test_the_targets_own_ids_go_before_the_text():
    row = {"id": "p", "prompt": "ab", "response": "cd", "response_ids": [77, 2], "finish": "stop"}
    (example,) = tokenize_row(bytes_tokenizer(TEMPLATE), row, 99)
    assert example.input_ids == encode("<s>ab</s><s>") + [77, 2]


def test_answers_end_as_in_the_chat_template():
    """Gemma's template ends a turn with a token that is not the end of sequence."""
    tokenizer = bytes_tokenizer(TEMPLATE.replace("</s>", "<e>\n"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<e>"]})
    end = tokenizer.convert_tokens_to_ids("<e>")
    assert end != tokenizer.eos_token_id
    (response,) = tokenize_row(tokenizer, {"id": "p", "prompt": "a", "response": "b", "finish": "stop"}, 99)
    assert response.input_ids[response.prompt_length :] == [*encode("b"), end]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (turn,) = tokenize_row(tokenizer, {"id": "m", "messages": messages}, 99)
    assert turn.input_ids[turn.prompt_length :] == [*encode("b"), end]
    # Without a token of its own behind an answer, as in templates of plain text.
    assert end_of_turn(bytes_tokenizer("{% for m in messages %}{{ m['content'] }} {% endfor %}")) == 2
    assert end_of_turn(bytes_tokenizer()) == 2


def test_rows_without_an_id_are_told_apart_by_their_prompt():
    tokenizer, row = bytes_tokenizer(TEMPLATE), {"prompt": "a", "response": "b"}
    others = [row | {"response": "c"}, row | {"prompt": "d"}, {"text": "e"}, {"text": "e", "id": "t"}]
    first, same, other, text, named = (tokenize_row(tokenizer, one, 99)[0].meta["id"] for one in [row, *others])
    assert first == same
    assert len({None, first, other, text}) == 4
    assert named == "t"


def test_every_assistant_turn_stands_behind_its_chat():
    turns = [("system", "s"), ("user", "a"), ("assistant", "<t>x</t>b"), ("user", "c"), ("assistant", "de")]
    row = {"id": "m", "messages": [{"role": role, "content": content} for role, content in turns]}
    first, second = tokenize_row(bytes_tokenizer(TEMPLATE), row, 99)
    assert first.input_ids == encode("<s>s</s><s>a</s><s><t>x</t>b</s>")
    assert first.input_ids[first.prompt_length :] == encode("<t>x</t>b</s>")
    assert second.input_ids == encode("<s>s</s><s>a</s><s><t>x</t>b</s><s>c</s><s>de</s>")
    assert second.input_ids[second.prompt_length :] == encode("de</s>")
    assert len(tokenize_row(bytes_tokenizer(TEMPLATE), row, first.prompt_length + 4)) == 1  # the second does not fit


def test_reasoning_is_kept_where_the_target_wrote_it():
    row = {
        "id": "m",
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "why"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d", "reasoning_content": "so"},
        ],
    }
    first, second = tokenize_row(bytes_tokenizer(REASONING), row, 99)
    assert first.input_ids == encode("<s>a</s><s><t>why</t>b</s>")
    assert second.input_ids == encode("<s>a</s><s>b</s><s>c</s><s><t>so</t>d</s>")
    assert second.input_ids[second.prompt_length :] == encode("<t>so</t>d</s>")
    with pytest.raises(ValueError, match="does not show `reasoning_content`"):
        tokenize_row(bytes_tokenizer(TEMPLATE), row, 99)


def test_text_is_cut_into_windows():
    windows = tokenize_row(bytes_tokenizer(), {"id": "t", "text": "abcde"}, 2)
    assert [window.input_ids for window in windows] == [encode("ab"), encode("cd"), encode("e")]
    assert [window.prompt_length for window in windows] == [1, 1, 1]
    assert {window.meta["kind"] for window in windows} == {"text"}


def test_refusals():
    tokenizer = bytes_tokenizer(TEMPLATE)
    cases = {
        "leaves no room": {"id": "p", "prompt": "ab", "response": "cd"},
        "lacks a text": {"id": "p", "prompt": "x"},
        "no assistant turn": {"id": "p", "messages": [{"role": "user", "content": "x"}]},
        "has no text `content`": {"id": "p", "messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]},
        "list of objects": {"id": "p", "messages": ["x"]},
    }
    for message, row in cases.items():
        with pytest.raises(ValueError, match=message):
            tokenize_row(tokenizer, row, 5)
