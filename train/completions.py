"""Completions that are written while training: by the target, or by the drafter itself.

The target writes with assisted generation (`seq_kd`), so that its text costs less; the text is the target's own. What
a drafter writes are drafts, behind the target's states and a token of the target's. So the drafter's own text
(`lmbda`) is assisted generation whose drafts are all kept as they were drafted: each round drafts
`num_assistant_tokens` tokens, the target reads them, and adds one of its own.
"""

import dataclasses

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper

from osprey.modeling.modeling_osprey import OspreyDrafterForCausalLM
from osprey.train.examples import Example


def target_completion(
    target: PreTrainedModel, drafter: OspreyDrafterForCausalLM, prompt: Tensor, config: GenerationConfig
) -> Tensor:
    """Ids `[1, P + new]` of a prompt `[1, P]` and what the target writes behind it."""
    mask = torch.ones_like(prompt)
    return target.generate(prompt, attention_mask=mask, generation_config=config, assistant_model=drafter)


def greedy_answer(
    target: PreTrainedModel, drafter: OspreyDrafterForCausalLM, example: Example, max_new_tokens: int
) -> Example:
    """A prompt with the target's greedy answer."""
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=target.generation_config.eos_token_id
    )
    prompt = torch.tensor([example.input_ids], device=target.device)
    ids = target_completion(target, drafter, prompt, config)[0].tolist()
    return dataclasses.replace(example, input_ids=ids, meta=example.meta | {"temperature": 0.0})


@torch.no_grad()
def drafter_completion(
    target: PreTrainedModel, drafter: OspreyDrafterForCausalLM, prompt: Tensor, config: GenerationConfig
) -> Tensor:
    """Ids `[1, P + new]` of a prompt `[1, P]` and of drafts that nobody verified (see above), sampled."""
    end = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    end_ids = torch.tensor([token for token in end if token is not None], dtype=torch.long, device=prompt.device)
    processors = LogitsProcessorList([TemperatureLogitsWarper(config.temperature)])
    own = GenerationConfig(do_sample=True, max_length=prompt.shape[1] + config.max_new_tokens)
    generator = drafter.osprey_candidate_generator(target, generation_config=own, logits_processor=processors)
    generator.lookup_num_tokens = 0  # copies of earlier text are no drafts of the drafter's
    cache = DynamicCache(config=target.config.get_text_config())
    ids, _ = generator.get_candidates(prompt, {}, is_first_iteration=True)  # nothing yet: the target has not run
    unread, drafted = ids, 0
    while True:
        outputs = target(unread, cache=cache, use_cache=True, **generator.model_kwargs_overrides)
        probabilities = processors(ids, outputs.logits[:, -1].float()).softmax(-1)  # [1, V]
        ids = torch.cat([ids, torch.multinomial(probabilities, 1).to(ids.device)], dim=1)
        ended = torch.isin(ids[0, prompt.shape[1] :], end_ids).nonzero()
        if len(ended):
            return ids[:, : prompt.shape[1] + int(ended[0]) + 1]
        if ids.shape[1] >= own.max_length:
            return ids[:, : own.max_length]
        length = ids.shape[1]
        ids, _ = generator.get_candidates(
            ids, {}, model_outputs=outputs, is_first_iteration=False, n_last_matches=drafted
        )
        drafted = ids.shape[1] - length
        unread = ids[:, length - 1 :]  # [1, 1 + drafted]
