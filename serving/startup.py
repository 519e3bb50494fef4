"""What the vLLM plugin refuses before a drafter is loaded, each fault in one sentence.

Another target's drafter would run all the same and have hardly a token accepted. vLLM's config objects are only read,
and nothing of vLLM is imported.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from osprey.serving.layout import check_config, check_target, vllm_tap_ids


def check_start_up(vllm_config: Any, load_tokenizer: Callable[[Any], Any]) -> None:
    """Raise `ValueError` where vLLM was not told to draft with an Osprey drafter for the target that it serves.

    Args:
        vllm_config: `vllm.config.VllmConfig`.
        load_tokenizer: gives the tokenizer of its `model_config`, None where vLLM runs without one.
    """
    check_speculation(vllm_config.speculative_config)
    config, target = vars(vllm_config.speculative_config.draft_model_config.hf_config), vllm_config.model_config
    check_config(config)
    check_target(config, target.get_vocab_size(), target.get_hidden_size(), target.get_total_num_hidden_layers())
    if config.get("eagle_aux_hidden_state_layer_ids") != vllm_tap_ids(config["target_layer_ids"]):
        raise ValueError(
            "vLLM read the drafter's config without Osprey's taps and would choose its own: another package has taken "
            "over the model type `osprey`; keep it out of vLLM's processes."
        )
    if config.get("target") is not None:  # else it drafts for every target of the right shape
        check_target_name(config, target.model)
        check_vocabulary(config, load_tokenizer(target))


def check_speculation(speculation: Any) -> None:
    """Raise `ValueError` where a drafter is served alone, or by another method than that which gives it its taps."""
    found = "is the served model itself" if speculation is None else f"has the method {speculation.method!r}"
    if speculation is None or speculation.method != "eagle3":
        raise ValueError(
            f"An Osprey drafter drafts beside its target, with the method 'eagle3', but here it {found}: run `vllm "
            'serve TARGET --speculative-config \'{"method": "eagle3", "model": DRAFTER, "num_speculative_tokens": 5}'
            "'`, or make a plain draft model of it with `osprey export --to causal-lm`."
        )
    if speculation.parallel_drafting:
        raise ValueError("An Osprey drafter drafts token by token: leave `parallel_drafting` out.")


def check_target_name(config: Mapping[str, Any], served: str) -> None:
    """Raise `ValueError` where both the drafter's target and what is served are ids on the Hub, and differ."""
    made_for = config["target"]
    if is_hub_id(made_for) and is_hub_id(served) and made_for.lower() != served.lower():
        raise ValueError(
            f"This drafter was made for {made_for}, but {served} is served: take the drafter of that model, or set "
            "`target` to null in the drafter's config.json to draft for it all the same."
        )


def check_vocabulary(config: Mapping[str, Any], tokenizer: Any) -> None:
    """Raise `ValueError` where ids mean other tokens to the served model than to the drafter's target.

    Mistral's own tokenizers name tokens in another way than transformers', which the hash is of: they are let pass.
    """
    expected = config.get("target_tokenizer_sha256")
    if expected is None or not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    if vocabulary_sha256(tokenizer.get_vocab()) != expected:
        raise ValueError(
            f"This drafter was made for the tokenizer of {config['target']}, but the served model's "
            f"({tokenizer.name_or_path or 'without a name'}) has another vocabulary: serve that target with its own "
            "tokenizer, or make a drafter for this one with `osprey convert`."
        )


def vocabulary_sha256(vocabulary: Mapping[str, int]) -> str:
    """As `osprey.modeling.vocabulary_sha256`, which vLLM's older transformers cannot import."""
    tokens = sorted((token_id, token) for token, token_id in vocabulary.items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def is_hub_id(name: str) -> bool:
    """As in `osprey.modeling.target_osprey`, which cannot be imported here either."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not os.path.isdir(name)
