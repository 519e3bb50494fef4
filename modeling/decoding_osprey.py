"""What surrounds the rounds of assisted generation: stops inside a draft, records of acceptance, installation.

Several copies of this file can live in one process: the package's, and one for each drafter that was loaded with
`trust_remote_code`. What they share hangs on `GenerationMixin`; the rest each drafter brings itself, through its
methods `osprey_check_target`, `osprey_decode` and `osprey_candidate_generator`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .attention_osprey import grouped_attention, install_grouped_attention


@dataclass
class Acceptance:
    """What verification made of one `generate` call's drafts; the prefill verifies nothing and is not counted.

    Attributes:
        rounds: per verification forward of the target, (tokens drafted, drafted tokens accepted). A round that the
            text's end cuts short counts the tokens it emitted less one as accepted.
    """

    rounds: list[tuple[int, int]] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per verification forward, the target's own (bonus) token included; NaN without a round."""
        emitted = sum(accepted + 1 for _, accepted in self.rounds)
        return emitted / len(self.rounds) if self.rounds else float("nan")


if not hasattr(GenerationMixin, "_osprey_recording"):
    GenerationMixin._osprey_recording = ContextVar("osprey_recording", default=None)


@contextmanager
def record_acceptance() -> Iterator[list[Acceptance]]:
    """Collect one [`Acceptance`] for each assisted `generate` call that is made inside, in this thread."""
    calls: list[Acceptance] = []
    token = GenerationMixin._osprey_recording.set(calls)
    try:
        yield calls
    finally:
        GenerationMixin._osprey_recording.reset(token)


def new_acceptance() -> Acceptance:
    """The record of a `generate` call that starts now, known to the `record_acceptance` around it."""
    acceptance = Acceptance()
    calls = GenerationMixin._osprey_recording.get()
    if calls is not None:
        calls.append(acceptance)
    return acceptance


class AssistedCall(BaseStreamer):
    """One `generate` call with an Osprey drafter: stands in for its criteria, its streamer and its assistant.

    `_assisted_decoding` adds a whole accepted draft to the text, crops the cache to it, shows it to the streamer, and
    only then asks the stopping criteria, once. Plain decoding asks after each token. This asks about each accepted
    token in turn, before the streamer sees it, and lets the cache's crop wait for the answer: a layer with a sliding
    window, once cropped, has forgotten the oldest keys that a shorter text needs.

    Attributes:
        length: tokens that have been asked about and kept, the prompt's included.
    """

    def __init__(
        self,
        drafter: PreTrainedModel,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        cache: Cache | None,
        prompt_length: int,
    ):
        self.drafter, self.criteria, self.streamer, self.cache = drafter, criteria, streamer, cache
        self.prompt_length = self.length = prompt_length
        self.tokens_to_remove = 0
        self.generator: CandidateGenerator | None = None

    def osprey_candidate_generator(self, target: PreTrainedModel, **kwargs) -> CandidateGenerator:
        self.generator = self.drafter.osprey_candidate_generator(target, **kwargs)
        return self.generator

    def run(self, assisted_decoding: Callable, input_ids: torch.LongTensor, **kwargs) -> Any:
        """What `assisted_decoding` returns for this call, without what follows a stop inside the last draft."""
        kwargs |= {"stopping_criteria": self, "streamer": self if self.streamer is not None else None}
        if self.cache is not None:
            self.crop_cache = self.cache.crop
            self.cache.crop = self.postpone_crop  # hides the method of this cache
        try:
            with grouped_attention():
                output = assisted_decoding(input_ids, assistant_model=self, **kwargs)
        finally:
            if self.cache is not None:
                del self.cache.crop
            if self.generator is not None:
                self.generator.release()
        return self.crop_output(output)

    def postpone_crop(self, tokens_to_remove: int) -> None:
        self.tokens_to_remove = tokens_to_remove  # zero or negative

    def put(self, value: torch.LongTensor) -> None:
        self.waiting = value  # [1, accepted + 1]

    def end(self) -> None:
        self.streamer.end()

    def __call__(self, input_ids: torch.LongTensor, scores: tuple[torch.Tensor, ...] | None, **kwargs):
        start = self.length
        for self.length in range(start + 1, input_ids.shape[1] + 1):
            so_far = None if scores is None else scores[: self.length - self.prompt_length]
            stop = self.criteria(input_ids[:, : self.length], so_far, **kwargs)  # [1]
            if stop.all():
                break
        excess = input_ids.shape[1] - self.length
        self.crop_cache(self.tokens_to_remove - excess)
        if excess > 0:
            drafted, accepted = self.generator.acceptance.rounds[-1]
            self.generator.acceptance.rounds[-1] = (drafted, accepted - excess)
        if self.streamer is not None:
            self.streamer.put(self.waiting[:, : self.length - start])
        return stop

    def crop_output(self, output: Any) -> Any:
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        excess = sequences.shape[1] - self.length
        if excess == 0:
            return output
        if isinstance(output, torch.Tensor):
            return output[:, :-excess]
        output.sequences = sequences[:, :-excess]
        for name in ("scores", "logits", "attentions", "hidden_states"):
            if output.get(name) is not None:
                output[name] = output[name][:-excess]
        return output


def install() -> None:
    """Teach assisted generation about Osprey drafters; a second call, also from another copy, does nothing.

    Whatever is done for a drafter is a method of that drafter, so that drafters whose code comes from different
    revisions work side by side; every other assistant is passed through.
    """
    install_grouped_attention()
    if getattr(GenerationMixin, "_osprey_installed", False):
        return
    get_candidate_generator = GenerationMixin._get_candidate_generator
    validate_generation_mode = GenerationMixin._validate_generation_mode
    assisted_decoding = GenerationMixin._assisted_decoding

    @wraps(get_candidate_generator)
    def get_candidate_generator_or_osprey(self, generation_config, *args, assistant_model=None, **kwargs):
        make = getattr(assistant_model, "osprey_candidate_generator", None)
        if make is None:
            return get_candidate_generator(self, generation_config, *args, assistant_model=assistant_model, **kwargs)
        return make(self, generation_config=generation_config, logits_processor=kwargs.get("logits_processor"))

    @wraps(validate_generation_mode)
    def validate_generation_mode_or_osprey(self, generation_mode, generation_config, generation_mode_kwargs):
        # Before transformers compares vocabularies: its advice, to pass two tokenizers, does not apply here.
        assistant = generation_mode_kwargs.get("assistant_model")
        if hasattr(assistant, "osprey_check_target"):
            assistant.osprey_check_target(self)
        if "tokenizer" in generation_mode_kwargs and hasattr(assistant, "osprey_check_tokenizer"):
            assistant.osprey_check_tokenizer(generation_mode_kwargs["tokenizer"])
        return validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs)

    @wraps(assisted_decoding)
    def assisted_decoding_or_osprey(self, *args, assistant_model=None, **kwargs):
        decode = getattr(assistant_model, "osprey_decode", None)
        if decode is None:
            return assisted_decoding(self, *args, assistant_model=assistant_model, **kwargs)
        return decode(partial(assisted_decoding, self), *args, **kwargs)

    GenerationMixin._get_candidate_generator = get_candidate_generator_or_osprey
    GenerationMixin._validate_generation_mode = validate_generation_mode_or_osprey
    GenerationMixin._assisted_decoding = assisted_decoding_or_osprey
    GenerationMixin._osprey_installed = True
