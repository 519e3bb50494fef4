"""What generates beside an Osprey drafter on the same target, all through `generate`, and what each round did.

Peers are plain decoding, prompt lookup, a plain assistant model, and drafters: Osprey's, the EAGLE-3-style baseline's
and ablations'. One recorder serves all of them, so that MAL means the same for each: tokens emitted by verifications
per verification. The first forward, which runs over the prompt, is not counted, nor is what it emits; prompt lookup
and plain assistants let it verify a draft too.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import osprey.eval.baselines  # noqa: F401, makes their folders loadable
from osprey.eval.acceptance import Run, timed_generate
from osprey.modeling import OspreyDrafter, check_target, fp16_linears, int8_linears
from osprey.modeling.generation_osprey import draft_settings

PLAIN = "plain"
PROMPT_LOOKUP = "prompt-lookup"
DEFAULT, ADAPTIVE = "default", "adaptive"  # draft lengths that are not a number
# What transformers' own settings are where nothing is set.
LOOKUP_TOKENS, ASSISTANT_TOKENS, ASSISTANT_THRESHOLD = 10, 20, 0.4
DRAFTER_TYPES = ("osprey", "osprey_eagle3_baseline")


@dataclass(frozen=True)
class Round:
    """A verification: tokens drafted for it and accepted by it, seconds of drafting and of verifying."""

    drafted: int
    accepted: int
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class Peer:
    """A way to generate. `settings` go to the model's generation config before each run, and are never shared."""

    name: str
    kind: Literal["plain", "prompt lookup", "assistant", "drafter"]
    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None  # an assistant's, where it is not the target's
    settings: dict[str, Any] = field(default_factory=dict)

    def draft_lengths(self, wanted: list[str]) -> list[str]:
        """Those of `wanted` (`default`, `adaptive`, numbers) that this peer has."""
        if self.kind == "plain":
            return [DEFAULT]
        return [length for length in wanted if length != ADAPTIVE or self.kind == "drafter"]

    def prepare(self, length: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Sets the draft length, and returns the arguments for `generate`.

        A number is a fixed length, and the most that is copied: MAL is at most one more, whoever drafts.
        """
        if self.kind == "plain":
            return {}
        if self.kind == "prompt lookup":
            return {"prompt_lookup_num_tokens": LOOKUP_TOKENS if length == DEFAULT else int(length)}
        settings = dict(self.settings)
        if length == ADAPTIVE:
            settings["adaptive_draft_length"] = True
        elif length != DEFAULT:
            settings |= {"num_assistant_tokens": int(length), "assistant_confidence_threshold": 0.0}
            if self.kind == "drafter":
                settings |= {"adaptive_draft_length": False}
                settings |= {"lookup_num_tokens": min(settings["lookup_num_tokens"], int(length))}
        for name, value in settings.items():
            setattr(self.model.generation_config, name, value)
        # For a target and an assistant of one vocabulary `generate` refuses to be told the tokenizers.
        tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": self.tokenizer}
        return {"assistant_model": self.model} | (tokenizers if self.tokenizer is not None else {})


def drafter_peer(name: str, drafter: PreTrainedModel) -> Peer:
    """A loaded drafter with the settings that its generation config has now."""
    settings = draft_settings(drafter.generation_config)
    settings["assistant_confidence_threshold"] = settings.pop("confidence_threshold")
    return Peer(name, "drafter", drafter, settings=settings)


def without_copies(peer: Peer) -> Peer:
    """The drafter's network alone: nothing is copied from the text so far."""
    return replace(peer, name=f"{peer.name} without copies", settings={**peer.settings, "lookup_num_tokens": 0})


def load_peer(
    name: str, path: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, like: Peer, quantize: bool
) -> Peer:
    """A drafter or, of any other model type, a plain assistant model, from a folder or the Hub.

    Drafters draft with the settings of `like`, so that only the networks differ. With `quantize` the weights take the
    forms that the Osprey drafter's have on a CPU (int8), or the target's (fp16, for an assistant).

    Raises:
        ValueError: the drafter is of another target, or the assistant has another tokenizer with the same number of
            ids, which transformers takes for the same.
    """
    config = PretrainedConfig.get_config_dict(path)[0]
    is_drafter = config.get("model_type") in DRAFTER_TYPES
    loader = OspreyDrafter if config.get("model_type") == "osprey" else AutoModelForCausalLM
    model = loader.from_pretrained(path, dtype=target.dtype).to(target.device).eval()
    if is_drafter:
        check_target(model, target)
        return Peer(name, "drafter", int8_linears(model) if quantize else model, settings=like.settings)
    own = model.generation_config
    threshold = own.assistant_confidence_threshold
    settings = {
        "num_assistant_tokens": own.num_assistant_tokens or ASSISTANT_TOKENS,
        "assistant_confidence_threshold": ASSISTANT_THRESHOLD if threshold is None else threshold,
        "num_assistant_tokens_schedule": "constant",  # another would carry a length over from request to request
    }
    other = AutoTokenizer.from_pretrained(path)
    same_size = model.config.get_text_config().vocab_size == target.config.get_text_config().vocab_size
    if same_size and other.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the assistant {name} has another vocabulary than the target, of the same size, which transformers "
            "takes for the same: choose another assistant."
        )
    model = fp16_linears(model) if quantize else model
    return Peer(name, "assistant", model, None if same_size else other, settings)


@contextmanager
def watch_rounds(target: PreTrainedModel) -> Iterator[list[Round]]:
    """Collects the verifications of the assisted `generate` calls of `target` inside, whoever drafts."""
    make, rounds = target._get_candidate_generator, []

    def clock() -> float:
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def make_watched(*args, **kwargs):
        generator = make(*args, **kwargs)
        get_candidates, update = generator.get_candidates, generator.update_candidate_strategy
        at = {"prefill": True, "asked": 0.0, "drafted": 0.0}

        def watched_candidates(*args, **kwargs):
            at["asked"] = clock()
            candidates = get_candidates(*args, **kwargs)
            at["drafted"] = clock()
            return candidates

        def watched_update(input_ids, scores, num_matches):
            if not at["prefill"]:
                drafting, verifying = at["drafted"] - at["asked"], clock() - at["drafted"]
                rounds.append(Round(scores.shape[1] - 1, int(num_matches), drafting, verifying))
            at["prefill"] = False
            return update(input_ids, scores, num_matches)

        generator.get_candidates, generator.update_candidate_strategy = watched_candidates, watched_update
        return generator

    target._get_candidate_generator = make_watched  # hides the method of this model
    try:
        yield rounds
    finally:
        del target._get_candidate_generator


def run_peer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    peer: Peer,
    length: str,
    inputs: dict[str, torch.Tensor],
    **generate_kwargs,
) -> tuple[Run, list[Round]]:
    """One timed `generate` call on `inputs` (`[1, T]`); `generate_kwargs` as in `timed_generate`."""
    arguments = peer.prepare(length, tokenizer)
    drafter = arguments.pop("assistant_model", None)
    with watch_rounds(target) as rounds:
        run = timed_generate(target, inputs, drafter, **arguments, **generate_kwargs)
    run.rounds = [(round.drafted, round.accepted) for round in rounds]
    return run, rounds
