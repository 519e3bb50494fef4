"""Packing, mixing and reading of pretraining data."""

import gzip
import json
from itertools import islice

import pytest
import torch
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from datasets import Dataset
from tiny import tiny_target

from osprey.train.data import encode, parse_sources
from osprey.train.linear_loss import IGNORE
from osprey.train.packing import PackedRows, pack

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


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "smollm3"])
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


def write_repository(folder, shards=3):
    """A data set repository as the Hub has them: Parquet shards, read in their order (`hub:` takes a folder too)."""
    folder.mkdir()
    for shard in range(shards):
        texts = [{"text": f"{shard}.{row} " * (2 + row % 3), "url": "x"} for row in range(9)]
        Dataset.from_list(texts).to_parquet(folder / f"train-{shard:05d}-of-{shards:05d}.parquet", batch_size=4)
    return f"hub:{folder}"


def test_parquet_and_repositories(tmp_path):
    repository = write_repository(tmp_path / "repository")
    tokenizer = bytes_tokenizer()
    for entry, documents in ((repository, 27), (str(tmp_path / "repository" / "train-00001-of-00003.parquet"), 9)):
        rows = PackedRows(parse_sources([entry]), tokenizer, 16, max_passes=1)
        tokens = []
        with pytest.raises(ValueError, match="ends early: 1 passes gave"):
            for row in rows:
                tokens += row["input_ids"]
        text = tokenizer.decode(tokens)
        assert text.count("</s>") in (documents, documents - 1)  # the last row is not full
        assert text.startswith("0.0 0.0 </s>0.1 0.1 0.1 </s>" if documents == 27 else "1.0 1.0 </s>")


def test_data_that_ends_early_is_refused_after_its_passes(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", sample_texts("a", 4))
    one_pass = sum(len(row["text"]) + 1 for row in sample_texts("a", 4))
    rows = PackedRows(parse_sources([path]), bytes_tokenizer(), 8, max_passes=3)
    given = []
    with pytest.raises(ValueError, match=rf"a\.jsonl ends early: 3 passes gave {3 * one_pass} tokens"):
        given.extend(rows)
    assert len(given) == 3 * one_pass // 8


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'org/name' on the Hub (ConnectError)")

    monkeypatch.setattr("osprey.train.data.load_dataset", unreachable)
    with pytest.raises(OSError) as refusal:
        next(iter(PackedRows(parse_sources(["hub:org/name:part:train"]), bytes_tokenizer(), 8)))
    assert str(refusal.value) == (
        "the data set org/name:part cannot be streamed from the Hub (Couldn't reach 'org/name' on the Hub "
        "(ConnectError)): check its name and the network, or give local files."
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("stop", [1, 7, 40])
def test_goes_on_exactly_where_it_was(tmp_path, stop, kind):
    if kind == "jsonl":
        paths = [write_rows(tmp_path / f"{name}.jsonl", sample_texts(name, 11)) for name in "abc"]
    else:
        paths = [write_repository(tmp_path / name) for name in "abc"]
    entries = [f"{path}={weight}" for path, weight in zip(paths, (1, 2, 5), strict=True)]
    rows = PackedRows(parse_sources(entries), bytes_tokenizer(), 16)
    # As a data loader does, it has read ahead of what was trained on.
    expected = list(islice(rows, 60))[stop:]
    state = json.loads(json.dumps(rows.state_dict(stop)))
    again = PackedRows(parse_sources(entries), bytes_tokenizer(), 16)
    again.load_state_dict(state)
    assert list(islice(again, 60 - stop)) == expected
    with pytest.raises(ValueError, match="was trained on other data"):
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
    assert tokenizer.decode(encode(row, tokenizer, "a.jsonl")) == "[p]>r</s>"
    assert tokenizer.decode(encode({**row, "finish": "length"}, tokenizer, "a.jsonl")) == "[p]>r"


def test_refusals(tmp_path):
    good = write_rows(tmp_path / "good.jsonl", sample_texts("a", 3))
    whole = gzip.compress(("".join(json.dumps({"text": str(n) * 50}) + "\n" for n in range(2000))).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "latin.txt").write_bytes("é".encode() * 10**6 + b"caf\xe9 ol\xe9")
    (tmp_path / "cut.txt").write_bytes(b"caf" + "é".encode()[:1])
    (tmp_path / "blank.jsonl.gz").write_bytes(gzip.compress(b"\n \n"))
    Dataset.from_dict({"text": []}).to_parquet(tmp_path / "empty.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    cases = {
        "none.jsonl": "there is no data file",
        "cut.jsonl.gz": "is truncated or damaged",
        "empty.jsonl": "is empty",
        "a.csv": "is not a data file: .jsonl, .jsonl.gz, .txt, .txt.gz and .parquet are read",
        "good.jsonl=x": "the weight after = must be a number",
        "good.jsonl=0": "the weight must be more than zero",
        "latin.txt": r"latin.txt, line 1: not UTF-8 \(at byte 2000004 of it\); convert the file",
        "cut.txt": r"cut.txt, line 1: not UTF-8 \(at byte 4 of it\)",
        "blank.jsonl.gz": "is empty",
        "empty.parquet": "is empty",
        "broken.parquet": "is no Parquet file or a damaged one",
        "none.parquet": "there is no data file",
        "hub:": r"is named hub:REPO\[:CONFIG\[:SPLIT\]\]",
        "hub:a:b:c:d": r"is named hub:REPO\[:CONFIG\[:SPLIT\]\]",
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
    other = write_rows(tmp_path / "other.jsonl", [{"words": "a"}])
    with pytest.raises(ValueError, match="neither `text` "):
        next(iter(PackedRows(parse_sources([other]), bytes_tokenizer(), 8)))
    assert parse_sources([good])[0].weight == 1
