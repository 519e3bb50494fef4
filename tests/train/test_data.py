"""Packing, mixing and reading of pretraining data."""

import gzip
import json
from itertools import islice

import pytest
import torch
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_target

from osprey.train.data import PackedRows, encode, pack, parse_sources
from osprey.train.linear_loss import IGNORE

END = 2  # of the bytes tokenizer


def write_rows(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


def sample_texts(letter, number, length=20):
    return [{"text": letter * (length + 7 * (n % 3)), "source": f"s{n % 2}"} for n in range(number)]


def test_positions_and_labels_of_a_packed_row():
    # The rest of a document (positions 5, 6), a whole one, and the beginning of another.
    row = pack([(10, 5), (11, 6), (20, 0), (21, 1), (22, 2), (30, 0)])
    assert row["position_ids"] == [0, 1, 0, 1, 2, 0]
    assert row["labels"] == [IGNORE, 11, IGNORE, 21, 22, IGNORE]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_documents_logits_do_not_change_with_its_neighbours(family):
    model = tiny_target(family, vocab_size=VOCABULARY)
    document = [50, 60, 70, 80, 90]
    alone = model(input_ids=torch.tensor([document]), use_cache=False).logits[0]
    for before, after in (([5, 6, 7], [8, 9]), ([9], [7, 7, 7]), ([], [4])):
        parts = [(token, place) for part in (before, document, after) for place, token in enumerate(part)]
        batch = {name: torch.tensor([ids]) for name, ids in pack(parts).items() if name != "labels"}
        packed = model(**batch, use_cache=False).logits[0, len(before) : len(before) + len(document)]
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    # The check can fail: without the positions the neighbours are seen.
    del batch["position_ids"]
    batch["input_ids"] = torch.tensor([[5, 6, 7, *document]])
    seen = model(**batch, use_cache=False).logits[0, 3:]
    assert (seen - alone).abs().max() > 0.01


def test_rows_hold_every_token_in_order(tmp_path):
    tokenizer = bytes_tokenizer()
    texts = ["abcdefgh", "ij", "klmnopqrstuvwxyz" * 3, "A"]
    sources = parse_sources([write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])])
    rows = list(islice(PackedRows(sources, tokenizer, 8), 7))
    expected = [token for text in texts for token in [*tokenizer(text)["input_ids"], END]]
    assert [token for row in rows for token in row["input_ids"]] == expected[:56]


def test_mixture_keeps_its_weights_and_starts_files_again(tmp_path):
    a = write_rows(tmp_path / "a.jsonl", sample_texts("a", 5))
    b = write_rows(tmp_path / "b.jsonl.gz", sample_texts("b", 50))
    rows = PackedRows(parse_sources([f"{a}=3", f"{b}=1"]), bytes_tokenizer(), 64)
    tokens = [token for row in islice(rows, 100) for token in row["input_ids"]]
    a_id, b_id = (bytes_tokenizer()(letter)["input_ids"][0] for letter in "ab")
    assert tokens.count(a_id) / tokens.count(b_id) == pytest.approx(3, rel=0.05)
    assert rows.cursors[0].epoch > 1


def test_excluded_sources(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "aaa", "source": "x/good"}, {"text": "b", "source": "x/bad"}])
    rows = PackedRows(parse_sources([path]), bytes_tokenizer(), 8, ("bad",))
    b_id = bytes_tokenizer()("b")["input_ids"][0]
    assert b_id not in [token for row in islice(rows, 5) for token in row["input_ids"]]
    nothing = PackedRows(parse_sources([path]), bytes_tokenizer(), 8, ("x/",))
    with pytest.raises(ValueError, match="has no rows that are not excluded"):
        next(iter(nothing))


@pytest.mark.parametrize("stop", [1, 7, 40])
def test_goes_on_exactly_where_it_was(tmp_path, stop):
    paths = [write_rows(tmp_path / f"{name}.jsonl", sample_texts(name, 11)) for name in "abc"]
    entries = [f"{path}={weight}" for path, weight in zip(paths, (1, 2, 5), strict=True)]
    rows = PackedRows(parse_sources(entries), bytes_tokenizer(), 16)
    # As a data loader does, it has read ahead of what was trained on.
    expected = list(islice(rows, 60))[stop:]
    state = json.loads(json.dumps(rows.state_dict(stop)))
    again = PackedRows(parse_sources(entries), bytes_tokenizer(), 16)
    again.load_state_dict(state)
    assert list(islice(again, 60 - stop)) == expected
    with pytest.raises(ValueError, match="was trained on other data files"):
        PackedRows(parse_sources(entries[:2]), bytes_tokenizer(), 16).load_state_dict(state)


def test_text_files_give_paragraphs(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree")
    rows = PackedRows(parse_sources([str(tmp_path / "a.txt")]), bytes_tokenizer(), 14)
    assert bytes_tokenizer().decode(next(iter(rows))["input_ids"]) == "one\ntwo</s>three</s>"


def test_responses_are_put_behind_their_prompt(tmp_path):
    tokenizer = bytes_tokenizer(
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    row = {"prompt": "p", "response": "r", "finish": "stop"}
    assert tokenizer.decode(encode(row, tokenizer, tmp_path)) == "[p]>r</s>"
    assert tokenizer.decode(encode({**row, "finish": "length"}, tokenizer, tmp_path)) == "[p]>r"


def test_refusals(tmp_path):
    good = write_rows(tmp_path / "good.jsonl", sample_texts("a", 3))
    whole = gzip.compress(("".join(json.dumps({"text": str(n) * 50}) + "\n" for n in range(2000))).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.csv").write_text("x")
    cases = {
        "none.jsonl": "there is no data file",
        "cut.jsonl.gz": "is truncated or damaged",
        "empty.jsonl": "is empty",
        "a.csv": "is not a data file: .jsonl, .jsonl.gz, .txt and .txt.gz are read",
        "good.jsonl=x": "the weight after = must be a number",
        "good.jsonl=0": "the weight must be more than zero",
    }
    for entry, message in cases.items():
        with pytest.raises((ValueError, OSError), match=message):
            parse_sources([entry], str(tmp_path))
    with pytest.raises(ValueError, match="no training data"):
        parse_sources([])

    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\nnot json\n')
    with pytest.raises(ValueError, match=r"broken\.jsonl cannot be read"):
        list(islice(PackedRows(parse_sources([str(broken)]), bytes_tokenizer(), 8), 9))
    other = write_rows(tmp_path / "other.jsonl", [{"content": "a"}])
    with pytest.raises(ValueError, match="neither `text` nor `prompt` and `response`"):
        next(iter(PackedRows(parse_sources([other]), bytes_tokenizer(), 8)))
    assert parse_sources([good])[0].weight == 1
