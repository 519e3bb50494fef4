"""Vocabulary alignment on small hand-made tokenizers, where every count can be worked out by hand."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from osprey.cli.align import main
from osprey.train.align import AVERAGED, DIRECT, SINGLE, UNMAPPED, align_vocabularies, load_tokenizer


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


def test_cli_and_loading(tmp_path, capsys):
    tokenizer = wordlevel(["ab"])
    tokenizer.save_pretrained(tmp_path)
    file = str(tmp_path / "tokenizer.json")
    assert len(load_tokenizer(file)) == len(load_tokenizer(tmp_path)) == len(tokenizer)
    assert main([str(tmp_path), file, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["direct"], result["single"], result["averaged"], result["unmapped"]) == (len(tokenizer), 0, 0, 0)
    with pytest.raises(ValueError, match="No tokenizer could be loaded"):
        load_tokenizer(tmp_path / "absent")
