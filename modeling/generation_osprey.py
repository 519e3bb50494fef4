"""Drafting inside transformers' assisted generation.

Each round of `_assisted_decoding` asks the candidate generator for a draft, verifies it with one forward of the
target, and hands back that forward's outputs. The target's hidden states at the accepted positions become the
drafter's contexts; keys and values from earlier drafting, which were computed from guessed contexts, are dropped.

Where the last tokens have occurred in the text before, what followed them is copied, which costs nothing, and the
drafter goes on where the copy is shorter than a draft may be.
"""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .controller_osprey import AdaptiveDraftLength, FixedDraftLength, statistics_of
from .decoding_osprey import new_acceptance
from .lookup_osprey import NgramIndex
from .runner_osprey import DynamicRunner, StaticRunner, check_cache_implementation, new_runner
from .target_osprey import check_target

DEFAULT_NUM_ASSISTANT_TOKENS = 5
DEFAULT_CONFIDENCE_THRESHOLD = 0.0
DEFAULT_ADAPTIVE_DRAFT_LENGTH = None  # where decoding is greedy: a sampled text should follow from its seed alone
# Own attributes of the drafter's generation config; what transformers calls prompt_lookup_num_tokens and
# max_matching_ngram_size belongs to the target's, and means decoding without a drafter.
DEFAULT_LOOKUP_NUM_TOKENS = 10
DEFAULT_LOOKUP_NGRAM_SIZE = 2
LONGEST_NGRAM = 5
# Last positions of a prompt that the drafter reads: it was trained on texts that short, and copies see all of it.
PROMPT_WINDOW = 1024
CHUNK = 512  # positions that the drafter runs over at once, and the most that wait for it


class OspreyCandidateGenerator(CandidateGenerator):
    """Drafts a chain of tokens: a copy from the text so far, then one draft step a token from the target's states.

    What it reads from the drafter's generation config: `num_assistant_tokens` (the longest draft),
    `assistant_confidence_threshold` (a draft ends where the drafter's probability of all of it is below),
    `lookup_num_tokens` (the longest copy, 0 for none), `lookup_ngram_size` (how many last tokens must recur),
    `adaptive_draft_length` (whether measured costs and acceptance choose each round's length instead of the threshold;
    None, the default: where decoding is greedy) and `cache_implementation` ("static": shapes that never change, for
    `torch.compile`; see `StaticRunner`).

    Args:
        drafter: an `OspreyDrafterForCausalLM`; nothing is stored on it, so that threads may share one.
        target: the model that generates.
        generation_config, logits_processor: those of the target's `generate` call.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: PreTrainedModel,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
    ):
        check_target(drafter, target)
        check_cache_implementation(drafter)
        self.logits_processor = logits_processor if logits_processor is not None else LogitsProcessorList()
        refuse_history_keepers(self.logits_processor)
        self.drafter = drafter
        self.device, self.dtype = drafter.device, drafter.dtype  # looked for among all parameters, at each access
        self.hidden_state_ids = [i + 1 for i in drafter.config.target_layer_ids]
        # A caller who wants the hidden states gets them all; else the target keeps only those that are tapped.
        wants_all = generation_config.output_hidden_states and generation_config.return_dict_in_generate
        self.output_hidden_states = True if wants_all else self.hidden_state_ids
        self.model_kwargs_overrides = {"output_hidden_states": self.output_hidden_states}
        self.mask_length = getattr(generation_config, "_mask_length", None)  # where generate dropped an idle mask

        settings = draft_settings(drafter.generation_config)
        self.num_assistant_tokens = settings["num_assistant_tokens"]
        adaptive = settings["adaptive_draft_length"]
        if adaptive or (adaptive is None and not generation_config.do_sample):
            self.policy = AdaptiveDraftLength(statistics_of(target, drafter), self.num_assistant_tokens)
        else:
            self.policy = FixedDraftLength(self.num_assistant_tokens, settings["confidence_threshold"])
        self.lookup_num_tokens = settings["lookup_num_tokens"]
        self.ngrams = NgramIndex(settings["lookup_ngram_size"], max(LONGEST_NGRAM, settings["lookup_ngram_size"]))
        self.max_length = generation_config.max_length
        self.do_sample = generation_config.do_sample
        # Scores are only read by speculative sampling, and by greedy decoding with an ensemble weight.
        self.returns_scores = self.do_sample or generation_config.assistant_ensemble_weight is not None
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self.eos_token_ids = set() if eos is None else set(eos.flatten().tolist())
        self.draft_ids = drafter.draft_ids

        self.runner: DynamicRunner | StaticRunner | None = None  # made where the prompt's length is known
        self.unread: list[tuple[torch.Tensor, torch.Tensor]] = []  # tokens and taps of the positions that follow
        self.is_prefill = True  # whether the target's current forward is its first, which verifies nothing
        self.num_drafted = 0  # tokens of the draft that the target is verifying
        self.acceptance = new_acceptance()

    @torch.no_grad()
    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = True,
        n_last_matches: int = 0,
        **kwargs,
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """`input_ids` (`[1, L]`) with a draft behind it, and the draft's processed scores (`[1, drafted, V]`)."""
        length = input_ids.shape[1]
        self.is_prefill, self.num_drafted = is_first_iteration, 0
        self.model_kwargs_overrides = {"output_hidden_states": self.output_hidden_states}
        if is_first_iteration:  # the target has not run yet, there is nothing to read
            self.model_kwargs_overrides |= self.uncached_inputs(input_ids, model_kwargs or {})
            return input_ids, None
        cache = (model_kwargs or {}).get("cache")  # it knows of positions that came without ids
        self.policy.start_round(max(length, int(cache.get_seq_length()) + 1 if cache is not None else 0))
        room = self.max_length - length - 1
        if room <= 0:
            return input_ids, None
        self.read_target(input_ids, model_kwargs or {}, model_outputs, n_last_matches)
        copied, budget = self.plan(input_ids, room)  # [1, copied]
        candidate_ids = torch.cat([input_ids, copied], dim=-1)
        scores = [self.certain_scores(copied)] if copied.shape[1] > 0 and self.returns_scores else []
        ended = copied.shape[1] > 0 and copied[0, -1].item() in self.eos_token_ids
        if copied.shape[1] < budget and not ended:
            candidate_ids, scores = self.draft(candidate_ids, scores, length, budget)
        self.num_drafted = candidate_ids.shape[1] - length
        self.policy.end_round()
        return candidate_ids, torch.cat(scores, dim=1) if scores else None

    def plan(self, input_ids: torch.LongTensor, room: int) -> tuple[torch.LongTensor, int]:
        """A copy to start the draft with (`[1, at most room]`, often empty), and the longest draft with it."""
        copied, size = self.look_up(input_ids, room) if self.lookup_num_tokens > 0 else ([], 0)
        num_copied, budget = self.policy.plan(size, len(copied))
        copied = torch.tensor([copied[:num_copied]], dtype=input_ids.dtype, device=input_ids.device)
        return copied, min(budget, room)

    def look_up(self, input_ids: torch.LongTensor, room: int) -> tuple[list[int], int]:
        """What followed where the last tokens occurred before, up to an end token, and how many of them did."""
        self.ngrams.extend(input_ids[0, len(self.ngrams.tokens) :].tolist())
        position, size = self.ngrams.find()
        copied = self.ngrams.copy(position, min(self.lookup_num_tokens, room)) if size > 0 else []
        end = next((i for i, token in enumerate(copied) if token in self.eos_token_ids), len(copied))
        return copied[: end + 1], size

    def certain_scores(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Scores (`[1, n, V]`) of which the softmax is 1 at `tokens` (`[1, n]`): no chance had a part in copying."""
        shape = (*tokens.shape, self.drafter.config.vocab_size)
        return torch.full(shape, -torch.inf, device=tokens.device).scatter_(-1, tokens[..., None], 0.0)

    def draft(
        self, candidate_ids: torch.LongTensor, scores: list[torch.Tensor], length: int, budget: int
    ) -> tuple[torch.LongTensor, list[torch.Tensor]]:
        """`candidate_ids` (`[1, length + copied]`) and `scores`, extended to a draft of at most `budget` tokens.

        The drafter runs over the copied tokens as over its own, each with the state of the one before as context.
        """
        self.policy.start_draft(self.num_unread)
        state = self.read_unread(budget - 1)  # [1, 1, h]
        for step in range(budget):
            if step > 0:
                token = candidate_ids[:, length + step - 1 : length + step].to(state.device)  # [1, 1]
                state = self.runner.step(token, state)
            if length + step == candidate_ids.shape[1]:
                token, score, probability = self.choose(candidate_ids, self.runner.logits(state))
                if token is None:
                    break
                candidate_ids = torch.cat([candidate_ids, token.to(candidate_ids.device)], dim=-1)
                if score is not None:
                    scores.append(score[:, None])
                if not self.policy.wants_more(probability):
                    break
        return candidate_ids, scores

    def read_unread(self, ahead: int) -> torch.Tensor:
        """Run over the positions that wait, so that none is left: the state of the last, `[1, 1, h]`.

        `ahead`: draft steps that may follow.
        """
        tokens = torch.cat([tokens for tokens, _ in self.unread], dim=1)  # [1, T]
        taps = torch.cat([taps for _, taps in self.unread], dim=1)  # [1, T, 3H]
        self.unread.clear()
        return self.runner.read(tokens, taps.to(self.dtype), ahead)

    def uncached_inputs(self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Inputs of the first forward without the positions that a cache brought by the caller holds already.

        Plain decoding leaves them out in `GenerationMixin._prefill`; `_assisted_decoding` (5.24) feeds them again.
        """
        cache = model_kwargs.get("cache")
        past = int(cache.get_seq_length()) if cache is not None else 0
        embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
        length = input_ids.shape[1] if embeds is None else embeds.shape[1]
        if past == 0 or (mask.shape[1] if mask is not None else self.mask_length) != length:
            return {}  # no such cache, or the caller left them out
        names = ("position_ids", "token_type_ids", "mm_token_type_ids")
        inputs = {name: model_kwargs[name][..., past - length :] for name in names if name in model_kwargs}
        inputs |= {"input_ids": input_ids[:, past:]} if embeds is None else {"inputs_embeds": embeds[:, past:]}
        return inputs | {"attention_mask": mask}

    def read_target(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], model_outputs: Any, n_last_matches: int
    ) -> None:
        """Keep the tokens (`[1, T]`) and taps (`[1, T, 3H]`) that the last verification made known.

        At the prefill these are the last `PROMPT_WINDOW` of the positions that the target has just computed: of the
        prompt, or of what follows a cache that the caller brought (earlier positions have no taps). The drafter does
        without those before, and counts its positions from there. Left padding is dropped, so that the drafter needs
        no mask. Where more than a chunk would wait, the drafter runs over what does: its memory does not grow with the
        prompt, nor with a text that is all copies.
        """
        states = [model_outputs.hidden_states[i] for i in self.hidden_state_ids]
        is_first = self.runner is None
        if is_first:  # after `inputs_embeds` only the first generated token has an id
            count = min(states[0].shape[1], input_ids.shape[1], PROMPT_WINDOW)
            self.runner = new_runner(self.drafter, count + self.max_length - input_ids.shape[1])
            states = [state[:, -count:] for state in states]
        else:
            count = n_last_matches + 1
            states = [state[:, :count] for state in states]
        tokens = input_ids[:, -count:].to(self.device)  # [1, T]: position t holds token t + 1
        mask = model_kwargs.get("attention_mask")
        if is_first and mask is not None:
            keep = mask[0, -count - 1 : -1].bool()  # [T]
            tokens = tokens[:, keep.to(self.device)]
            states = [state[:, keep.to(state.device)] for state in states] if not keep.all() else states
        for start in range(0, tokens.shape[1], CHUNK):
            part = slice(start, start + CHUNK)
            if self.unread and self.num_unread + tokens[:, part].shape[1] > CHUNK:
                self.read_unread(0)
            taps = torch.cat([state[:, part].to(self.device) for state in states], dim=-1)  # [1, up to CHUNK, 3H]
            self.unread.append((tokens[:, part], taps))

    def release(self) -> None:
        """Let go of the drafter's keys and values: the call is over."""
        if self.runner is not None:
            self.runner.release()
        self.runner = None

    @property
    def num_unread(self) -> int:
        return sum(tokens.shape[1] for tokens, _ in self.unread)

    def choose(
        self, candidate_ids: torch.LongTensor, draft_logits: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
        """The next drafted token (`[1, 1]`), its processed scores (`[1, V]`) and the probability the drafter gave it.

        A sampled token comes from exactly the scores that are returned, which keeps speculative sampling lossless.
        No token where the processors leave none of the draft vocabulary.
        """
        if not self.returns_scores and len(self.logits_processor) == 0:
            best = draft_logits.argmax(dim=-1)  # [1]
            probability = 1.0
            if self.policy.needs_probabilities:
                probability = draft_logits.float().softmax(dim=-1)[0, best[0]].item()
            return self.draft_ids[best][None], None, probability
        scores = self.drafter.widen_logits(draft_logits.float()).to(candidate_ids.device)  # [1, V]
        scores = self.logits_processor(candidate_ids, scores)
        if not torch.isfinite(scores).any():
            return None, None, 0.0
        probabilities = scores.softmax(dim=-1)  # [1, V]
        token = torch.multinomial(probabilities, 1) if self.do_sample else probabilities.argmax(-1, keepdim=True)
        return token, scores, probabilities[0, token[0, 0]].item()

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """Called after each forward of the target; all but the prefill are verifications."""
        if not self.is_prefill:
            self.policy.verified(int(num_matches))
            self.acceptance.rounds.append((self.num_drafted, int(num_matches)))


def draft_settings(own: GenerationConfig) -> dict[str, Any]:
    """How to draft, from the drafter's generation config and the defaults; `ValueError` for what means nothing."""
    num_tokens, threshold = own.num_assistant_tokens, own.assistant_confidence_threshold
    settings = {
        "num_assistant_tokens": DEFAULT_NUM_ASSISTANT_TOKENS if num_tokens is None else num_tokens,
        "confidence_threshold": DEFAULT_CONFIDENCE_THRESHOLD if threshold is None else threshold,
        "adaptive_draft_length": getattr(own, "adaptive_draft_length", DEFAULT_ADAPTIVE_DRAFT_LENGTH),
        "lookup_num_tokens": getattr(own, "lookup_num_tokens", DEFAULT_LOOKUP_NUM_TOKENS),
        "lookup_ngram_size": getattr(own, "lookup_ngram_size", DEFAULT_LOOKUP_NGRAM_SIZE),
    }
    wrong, place = None, "The drafter's generation config has"
    for name, least in (("num_assistant_tokens", 1), ("lookup_num_tokens", 0), ("lookup_ngram_size", 1)):
        if not isinstance(settings[name], int) or settings[name] < least:
            wrong = f"{place} {name} {settings[name]!r}, but it must be a whole number of at least {least}."
    threshold, adaptive = settings["confidence_threshold"], settings["adaptive_draft_length"]
    if not isinstance(threshold, int | float) or not threshold >= 0:
        wrong = f"{place} assistant_confidence_threshold {threshold!r}, but it must be a number of at least 0."
    if adaptive not in (None, True, False):
        wrong = f"{place} adaptive_draft_length {adaptive!r}, but it must be True, False or None."
    if wrong is not None:
        raise ValueError(wrong)
    return settings


def refuse_history_keepers(logits_processor: LogitsProcessorList) -> None:
    """Raise `ValueError` for a processor that remembers what it was called with: a rejected draft would stay in it."""
    for kind, option in (
        (UnbatchedClassifierFreeGuidanceLogitsProcessor, "guidance_scale"),
        (SynthIDTextWatermarkLogitsProcessor, "watermarking_config with SynthID"),
    ):
        if any(isinstance(processor, kind) for processor in logits_processor):
            raise ValueError(
                f"{option} keeps a history that cannot be rolled back when a draft is rejected: generate without "
                "assistant_model, or without it."
            )
