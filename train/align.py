"""Vocabulary alignment: which rows of a source vocabulary make each row of a target vocabulary.

One rule serves the embedding and the LM head. For each target token, in this order:

- *direct*: the same string is a source token, possibly after exchanging the space marks ``▁`` (SentencePiece) and
  ``Ġ`` (byte-level BPE); its row is copied;
- *single*: the token's text encodes to one source token; that row is copied;
- *averaged*: the text encodes to several source tokens; their mean is taken;
- *unmapped*: the text encodes to nothing, or the row lies past the target tokenizer's length; zeros.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

KINDS = ("unmapped", "direct", "single", "averaged")
UNMAPPED, DIRECT, SINGLE, AVERAGED = range(4)


@dataclass(frozen=True)
class VocabularyAlignment:
    """For every target id, the source ids whose mean row it takes (compressed sparse rows).

    Attributes:
        kinds: int64 ``[V_target]``, indices into ``KINDS``.
        offsets: int64 ``[V_target + 1]``; the sources of target id ``t`` are
            ``source_ids[offsets[t] : offsets[t + 1]]``.
        source_ids: int64 ``[offsets[-1]]``, flat.
    """

    kinds: Tensor
    offsets: Tensor
    source_ids: Tensor = field(repr=False)

    @property
    def mapped(self) -> Tensor:
        """Target ids that get a row, bool ``[V_target]``."""
        return self.kinds != UNMAPPED

    def counts(self) -> dict[str, int]:
        """Number of target ids of each kind: ``direct``, ``single``, ``averaged``, ``unmapped``."""
        return {KINDS[kind]: int((self.kinds == kind).sum()) for kind in (DIRECT, SINGLE, AVERAGED, UNMAPPED)}

    def apply(self, rows: Tensor, vocab_size: int | None = None) -> Tensor:
        """Builds the target's table from the source's.

        Args:
            rows: ``[V_source, h]``, a row for each source id.
            vocab_size: rows of the result; the rows past the target tokenizer's length (a padded vocabulary) are
                zero. Default: the tokenizer's length.

        Returns:
            ``[vocab_size, h]`` in the dtype of ``rows``.
        """
        length = self.kinds.numel()
        vocab_size = length if vocab_size is None else vocab_size
        if vocab_size < length:
            raise ValueError(
                f"The target's config says {vocab_size} vocabulary rows but its tokenizer has {length} tokens: "
                "give the config and the tokenizer of one model."
            )
        if self.source_ids.numel() and int(self.source_ids.max()) >= rows.shape[0]:
            raise ValueError(
                f"The source tokenizer has token id {int(self.source_ids.max())} but the source table only "
                f"{rows.shape[0]} rows: give the tokenizer and the weights of one model."
            )
        sizes = self.offsets.diff()  # [V_target]
        owners = torch.repeat_interleave(torch.arange(length), sizes)  # [nnz]
        table = torch.zeros(vocab_size, rows.shape[1], dtype=torch.float64)
        table.index_add_(0, owners, rows[self.source_ids].to(torch.float64))
        table[:length] /= sizes.clamp(min=1)[:, None]
        return table.to(rows.dtype)


def load_tokenizer(name_or_path: str | os.PathLike[str], revision: str | None = None) -> PreTrainedTokenizerFast:
    """Loads a fast tokenizer from a Hub id, a folder, or a ``tokenizer.json`` file.

    Raises:
        ValueError: there is none, or it is not a fast one.
    """
    if Path(name_or_path).is_file():
        return PreTrainedTokenizerFast(tokenizer_file=str(name_or_path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name_or_path), revision=revision or "main")
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"No tokenizer could be loaded from '{name_or_path}': {reason}") from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"The tokenizer of '{name_or_path}' is a slow one: alignment needs a fast tokenizer (tokenizer.json)."
        )
    return tokenizer


def align_vocabularies(source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> VocabularyAlignment:
    """Aligns the vocabularies of two fast tokenizers (added and special tokens included).

    Args:
        source: tokenizer of the rows that exist (the backbone's).
        target: tokenizer of the rows that are wanted.
    """
    source_vocabulary: dict[str, int] = source.get_vocab()
    target_vocabulary: dict[str, int] = target.get_vocab()
    length = max(target_vocabulary.values()) + 1  # ids may have holes; those rows stay unmapped
    sources: list[Sequence[int]] = [()] * length
    kinds = [UNMAPPED] * length

    remaining: list[tuple[int, str]] = []
    for token, token_id in target_vocabulary.items():
        source_id = _same_token(token, source_vocabulary)
        if source_id is None:
            remaining.append((token_id, token))
        else:
            kinds[token_id], sources[token_id] = DIRECT, (source_id,)

    texts = [_token_text(target, token_id, token) for token_id, token in remaining]
    encodings = source.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    for (token_id, _), encoding in zip(remaining, encodings, strict=True):
        ids = encoding.ids
        if ids:
            kinds[token_id], sources[token_id] = (SINGLE if len(ids) == 1 else AVERAGED), ids

    sizes = torch.tensor([0] + [len(ids) for ids in sources])
    return VocabularyAlignment(
        kinds=torch.tensor(kinds),
        offsets=sizes.cumsum(0),
        source_ids=torch.tensor([source_id for ids in sources for source_id in ids], dtype=torch.int64),
    )


def _same_token(token: str, vocabulary: dict[str, int]) -> int | None:
    for spelling in (token, token.replace("▁", "Ġ"), token.replace("Ġ", "▁")):
        if spelling in vocabulary:
            return vocabulary[spelling]
    return None


def _token_text(tokenizer: PreTrainedTokenizerBase, token_id: int, token: str) -> str:
    text = tokenizer.backend_tokenizer.decode([token_id], skip_special_tokens=False)
    # SentencePiece decoders strip the first space of a text, which is the space of a single token.
    if token.startswith("▁") and not text.startswith(" "):
        text = " " + text
    return text
