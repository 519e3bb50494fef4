"""Whether a drafter and a target belong together: shape, name, revision, vocabulary.

Another target never changes the text, it only makes drafts that are not accepted; nothing else would tell.
"""

import hashlib
import json
import os
import re
import warnings
from functools import lru_cache

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_target(drafter: PreTrainedModel, target: PreTrainedModel, revision: str | None = None) -> None:
    """Raise `ValueError` where `drafter` was made for another model than `target`, and warn of another revision.

    Names are compared where both are ids on the Hub. A loaded model does not know its own commit: who does gives
    `revision`. `drafter.config.target = None` allows every target of the right shape.
    """
    ours, theirs = drafter.config, target.config.get_text_config()
    for name, expected, found in (
        ("vocabulary size", ours.vocab_size, theirs.vocab_size),
        ("hidden size", ours.target_hidden_size, theirs.hidden_size),
        ("number of layers", ours.target_num_hidden_layers, theirs.num_hidden_layers),
    ):
        if expected is not None and expected != found:
            raise ValueError(
                f"This drafter was made for {ours.target or 'a target'} with a {name} of {expected}, but the model "
                f"that generates has {found}: use the drafter of that model, or make one with `osprey convert`."
            )
    if ours.target is None:
        return
    found = target.config.name_or_path or ""
    if is_hub_id(ours.target) and is_hub_id(found) and ours.target.lower() != found.lower():
        raise ValueError(
            f"This drafter was made for {ours.target}, but {found} generates: use the drafter of that model, or set "
            "`drafter.config.target = None` (in its config.json: null) to draft for it all the same."
        )
    commit = ours.target_revision if re.fullmatch("[0-9a-f]{40}", ours.target_revision or "") else None
    if commit is not None and revision is not None and commit != revision:
        warnings.warn(
            f"This drafter was made for revision {commit[:12]} of {ours.target}, but {revision[:12]} generates: fewer "
            "drafts may be accepted; the text is not affected.",
            stacklevel=2,
        )


def check_tokenizer(drafter: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ValueError` where ids mean other tokens to `tokenizer` than to the target that `drafter` was made for."""
    expected = drafter.config.target_tokenizer_sha256
    if drafter.config.target is not None and expected not in (None, vocabulary_sha256(tokenizer)):
        raise ValueError(
            f"This drafter was made for the tokenizer of {drafter.config.target}, but one with another vocabulary was "
            f"given ({tokenizer.name_or_path or 'without a name'}): use the target's own, or set "
            "`drafter.config.target = None` (in its config.json: null) to draft for it all the same."
        )


@lru_cache(maxsize=1)  # `generate` asks in every call; a vocabulary of 150,000 tokens takes a good part of a second
def vocabulary_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of which token each id stands for, special and added ones included: all that a drafter knows of it."""
    tokens = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not os.path.isdir(name)
