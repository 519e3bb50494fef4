"""Vocabulary alignment: which rows of a source vocabulary make each row of a target vocabulary.

One rule serves the embedding and the LM head. For each target token, in this order:

- *direct*: the same string is a source token, possibly after exchanging the space marks ``▁`` (SentencePiece) and
  ``Ġ`` (byte-level BPE); its row is copied. Byte-level tokens write byte E9 as ``é``, which is no text: between the
  two kinds of tokenizer only ASCII strings are the same;
- *single*: the token's text encodes to one source token; that row is copied;
- *averaged*: the text encodes to several source tokens; their mean is taken;
- *unmapped*: the text encodes to nothing (or only to the unknown token), or the row lies past the target tokenizer's
  length; zeros.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from osprey.train.checkpoints import cache_dir

KINDS = ("unmapped", "direct", "single", "averaged")
UNMAPPED, DIRECT, SINGLE, AVERAGED = range(4)
RULE_VERSION = 1  # of what is cached: to be raised when the rule changes


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

    def refuse_if_poor(self) -> None:
        """Raises `ValueError` where fewer than half of the target's tokens have a source."""
        mapped, length = int((self.kinds != UNMAPPED).sum()), len(self.kinds)
        if mapped < length / 2:
            raise ValueError(
                f"Only {mapped} of {length} target tokens can be made from the source vocabulary: these tokenizers "
                "do not go together; use --force to go on all the same."
            )

    def first(self, length: int) -> "VocabularyAlignment":
        """The alignment of the first ``length`` target ids, or of all if there are fewer."""
        end = int(self.offsets[: length + 1][-1])
        return VocabularyAlignment(self.kinds[:length], self.offsets[: length + 1], self.source_ids[:end])

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
    is_folder = Path(name_or_path).is_dir()
    if not is_folder and (Path(name_or_path).is_absolute() or str(name_or_path).count("/") > 1):
        raise ValueError(f"there is no folder or tokenizer.json {name_or_path}.")  # nor can it be a Hub id
    if is_folder and not any(Path(name_or_path).glob("tokenizer*")):
        raise ValueError(f"{name_or_path} has no tokenizer: give a folder with a tokenizer.json.")
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


def refuse_missing_rows(tokenizer: PreTrainedTokenizerBase, num_rows: int, name: str) -> None:
    """Raises ``ValueError`` where a model with ``num_rows`` rows of embeddings has none for a token of its tokenizer.

    Added tokens may be without one: text-only Gemma 3 comes with an image token that it cannot read.
    """
    added = tokenizer.get_added_vocab()
    if any(token_id >= num_rows and token not in added for token, token_id in tokenizer.get_vocab().items()):
        raise ValueError(
            f"The config of {name} says {num_rows} vocabulary rows but its tokenizer has {len(tokenizer)} tokens: "
            "give the config and the tokenizer of one model."
        )


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
    same_alphabet = _is_byte_level(source) == _is_byte_level(target)
    for token, token_id in target_vocabulary.items():
        source_id = _same_token(token, source_vocabulary, same_alphabet)
        if source_id is None:
            remaining.append((token_id, token))
        else:
            kinds[token_id], sources[token_id] = DIRECT, (source_id,)

    texts = [_token_text(target, token_id, token) for token_id, token in remaining]
    encodings = source.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    for (token_id, _), encoding in zip(remaining, encodings, strict=True):
        ids = [token for token in encoding.ids if token != source.unk_token_id]
        if ids:
            kinds[token_id], sources[token_id] = (SINGLE if len(ids) == 1 else AVERAGED), ids

    sizes = torch.tensor([0] + [len(ids) for ids in sources])
    return VocabularyAlignment(
        kinds=torch.tensor(kinds),
        offsets=sizes.cumsum(0),
        source_ids=torch.tensor([source_id for ids in sources for source_id in ids], dtype=torch.int64),
    )


def cached_alignment(source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> VocabularyAlignment:
    """`align_vocabularies`, kept in the cache under the hash of what the two tokenizers are."""
    content = (tokenizer.backend_tokenizer.to_str() for tokenizer in (source, target))
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in content]
    key = hashlib.sha256("".join([str(RULE_VERSION), *digests]).encode()).hexdigest()
    path = cache_dir() / "alignments" / f"{key}.safetensors"
    try:
        return VocabularyAlignment(**load_file(path))
    except (OSError, SafetensorError, TypeError):  # not there, or half of one
        alignment = align_vocabularies(source, target)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError, SafetensorError):  # where nothing can be kept, it is computed each time
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file({name: getattr(alignment, name) for name in ("kinds", "offsets", "source_ids")}, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return alignment


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether tokens are bytes, each written as one printable character, and not text."""
    return "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)


def _same_token(token: str, vocabulary: dict[str, int], same_alphabet: bool) -> int | None:
    if not same_alphabet and not token.replace("▁", "").replace("Ġ", "").isascii():
        return None
    for spelling in (token, token.replace("▁", "Ġ"), token.replace("Ġ", "▁")):
        if spelling in vocabulary:
            return vocabulary[spelling]
    return None


def _token_text(tokenizer: PreTrainedTokenizerBase, token_id: int, token: str) -> str:
    if token.startswith("▁"):  # SentencePiece decoders strip the first space of a text: of a token it is its own
        return token.replace("▁", " ")
    return tokenizer.backend_tokenizer.decode([token_id], skip_special_tokens=False)
