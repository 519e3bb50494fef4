"""Drafting inside transformers' assisted generation.

Each round of `_assisted_decoding` asks the candidate generator for a draft, verifies it with one forward of the
target, and hands back that forward's outputs. The target's hidden states at the accepted positions become the
drafter's contexts; keys and values from earlier drafting, which were computed from guessed contexts, are dropped.
"""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .decoding_osprey import new_acceptance

DEFAULT_NUM_ASSISTANT_TOKENS = 5
DEFAULT_CONFIDENCE_THRESHOLD = 0.0


def check_target(drafter: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raise `ValueError` where `drafter` was made for a model of another shape than `target`."""
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


class OspreyCandidateGenerator(CandidateGenerator):
    """Drafts a chain of tokens from the target's hidden states, one draft step a token.

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
        self.logits_processor = logits_processor if logits_processor is not None else LogitsProcessorList()
        refuse_history_keepers(self.logits_processor)
        self.drafter = drafter
        self.hidden_state_ids = [i + 1 for i in drafter.config.target_layer_ids]
        # A caller who wants the hidden states gets them all; else the target keeps only those that are tapped.
        wants_all = generation_config.output_hidden_states and generation_config.return_dict_in_generate
        self.output_hidden_states = True if wants_all else self.hidden_state_ids
        self.model_kwargs_overrides = {"output_hidden_states": self.output_hidden_states}
        self.mask_length = getattr(generation_config, "_mask_length", None)  # where generate dropped an idle mask

        own = drafter.generation_config
        self.num_assistant_tokens = own.num_assistant_tokens or DEFAULT_NUM_ASSISTANT_TOKENS
        threshold = own.assistant_confidence_threshold
        self.confidence_threshold = DEFAULT_CONFIDENCE_THRESHOLD if threshold is None else threshold
        self.max_length = generation_config.max_length
        self.do_sample = generation_config.do_sample
        # Scores are only read by speculative sampling, and by greedy decoding with an ensemble weight.
        self.returns_scores = self.do_sample or generation_config.assistant_ensemble_weight is not None
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self.eos_token_ids = set() if eos is None else set(eos.flatten().tolist())
        self.draft_ids = drafter.draft_ids

        self.cache = DynamicCache(config=drafter.config)
        self.num_cached = 0  # positions whose keys and values come from true contexts
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
        self.is_prefill = is_first_iteration
        self.model_kwargs_overrides = {"output_hidden_states": self.output_hidden_states}
        if is_first_iteration:  # the target has not run yet, there is nothing to read
            self.model_kwargs_overrides |= self.uncached_inputs(input_ids, model_kwargs or {})
            return input_ids, None
        budget = min(self.num_assistant_tokens, self.max_length - input_ids.shape[1] - 1)
        if budget <= 0:
            self.num_drafted = 0
            return input_ids, None
        tokens, context, position_ids = self.read_target(input_ids, model_kwargs or {}, model_outputs, n_last_matches)
        self.cache.crop(self.num_cached - self.cache.get_seq_length())
        self.num_cached += tokens.shape[1]

        drafted: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        candidate_ids = input_ids  # the processors' own tensors lie on its device
        confidence = 1.0
        while True:
            hidden = self.drafter.run_layers(tokens, context, position_ids=position_ids, cache=self.cache)
            context = hidden[:, -1:]  # [1, 1, h]
            token, score, probability = self.choose(candidate_ids, self.drafter.draft_logits(context)[:, -1])
            if token is None:
                break
            drafted.append(token)
            scores.append(score)
            confidence *= probability
            candidate_ids = torch.cat([candidate_ids, token.to(candidate_ids.device)], dim=-1)  # [1, L + drafted]
            if len(drafted) == budget or confidence < self.confidence_threshold:
                break
            if self.eos_token_ids and token.item() in self.eos_token_ids:
                break
            tokens, position_ids = token.to(position_ids.device), position_ids[:, -1:] + 1  # [1, 1]
        self.num_drafted = len(drafted)
        if not drafted:
            return input_ids, None
        return candidate_ids, torch.stack(scores, dim=1) if self.returns_scores else None

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
    ) -> tuple[torch.LongTensor, torch.Tensor, torch.LongTensor]:
        """Tokens (`[1, T]`), contexts (`[1, T, h]`) and positions (`[1, T]`) that the last verification made known.

        At the prefill these are all positions that the target has just computed: the whole prompt, or what follows
        a cache that the caller brought (earlier positions have no taps, and the drafter does without them, counting
        its positions from there). Left padding is dropped, so that the drafter needs no mask.
        """
        states = [model_outputs.hidden_states[i] for i in self.hidden_state_ids]
        device = self.drafter.device
        if self.num_cached > 0:
            count = n_last_matches + 1
            states = [state[:, :count] for state in states]
        else:  # after `inputs_embeds` only the first generated token has an id
            count = min(states[0].shape[1], input_ids.shape[1])
            states = [state[:, -count:] for state in states]
        tokens = input_ids[:, -count:].to(device)  # [1, T]: position t holds token t + 1
        taps = torch.cat([state.to(device) for state in states], dim=-1)  # [1, T, 3H]
        mask = model_kwargs.get("attention_mask")
        if self.num_cached == 0 and mask is not None:
            keep = mask[0, -count - 1 : -1].bool().to(device)  # [T]
            tokens, taps = tokens[:, keep], taps[:, keep]
        position_ids = torch.arange(self.num_cached, self.num_cached + tokens.shape[1], device=device)[None]  # [1, T]
        return tokens, self.drafter.project_taps(taps.to(self.drafter.dtype)), position_ids

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
            if self.confidence_threshold > 0:
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
            self.acceptance.rounds.append((self.num_drafted, int(num_matches)))


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
