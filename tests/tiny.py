"""Tiny random targets and drafters, and what tests compare them by."""

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from osprey.modeling import OspreyCandidateGenerator, OspreyConfig, OspreyDrafter

VOCABULARY = 48
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.35,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
TARGET_CONFIGS = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "untied": (LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0, 1, 1, 0]}),  # 0: a block without rotary positions
    # Five layers, the last of which attends fully, and prompts longer than the window.
    "gemma3": (Gemma3TextConfig, {"sliding_window": 7, "sliding_window_pattern": 5, "query_pre_attn_scalar": 8}),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, **EXPERTS}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def tiny_target(family: str = "llama", seed: int = 0, **changes) -> PreTrainedModel:
    config_class, own = TARGET_CONFIGS[family]
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config_class(**{**SHAPE, **own, **changes})).eval()


def tiny_drafter(target: PreTrainedModel, seed: int = 1, shortlist: list[int] | None = None, **changes):
    """A drafter of another width than its target, with random weights."""
    text = target.config.get_text_config()
    config = {
        **SHAPE,
        "initializer_range": 0.25,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "vocab_size": text.vocab_size,
    }
    config |= {"target_hidden_size": text.hidden_size, "target_num_hidden_layers": text.num_hidden_layers}
    if shortlist is not None:
        config["draft_vocab_size"] = len(shortlist)
    torch.manual_seed(seed)
    drafter = OspreyDrafter(OspreyConfig(**config | changes)).eval()
    if shortlist is not None:
        drafter.set_draft_ids(torch.tensor(shortlist))
    drafter.generation_config.adaptive_draft_length = False  # the clock has no part in what is drafted
    drafter.generation_config.lookup_num_tokens = 0  # tiny targets run in circles: copies would do all the drafting
    return drafter


def tiny_prompt(length: int = 11, seed: int = 0, vocabulary: int = VOCABULARY) -> torch.LongTensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocabulary, (1, length), generator=generator)


def copy_blocks(backbone: PreTrainedModel, drafter: OspreyDrafter) -> OspreyDrafter:
    """Put a backbone's weights into a drafter's x half, zeros into its context half, by the definition."""
    state = drafter.state_dict()
    for name, tensor in backbone.state_dict().items():
        ours = name.removeprefix("model.")
        if ours.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensor = torch.cat([torch.zeros_like(tensor), tensor], dim=1)  # [out, 2h]: [context | x]
        state[ours] = tensor
        if ours.endswith("input_layernorm.weight"):
            state[ours.replace("input_layernorm", "ctx_norm")] = tensor
    drafter.load_state_dict(state)
    return drafter


def oracle(monkeypatch, truth: torch.LongTensor, rate: float, seed: int = 0) -> None:
    """Make every drafter propose the token of `truth` (`[1, L]`) at a fixed, seeded share of the positions.

    The draft logits are tilted before they reach the real `choose`, so that processors, sampling and bookkeeping
    stay the product's own; a random drafter's own proposals would hardly ever be accepted.
    """
    choose = OspreyCandidateGenerator.choose
    coin = torch.rand(truth.shape[1], generator=torch.Generator().manual_seed(seed)) < rate

    def tilted(self, candidate_ids, draft_logits):
        position = candidate_ids.shape[1]
        if position < truth.shape[1] and coin[position]:
            draft_logits = draft_logits + 1e3 * (self.draft_ids == truth[0, position])
        return choose(self, candidate_ids, draft_logits)

    monkeypatch.setattr(OspreyCandidateGenerator, "choose", tilted)


def assert_same_text(
    target: PreTrainedModel,
    plain: torch.LongTensor,
    assisted: torch.LongTensor,
    process: Callable[[torch.LongTensor, torch.Tensor], torch.Tensor] | None = None,
    tolerance: float = 1e-4,
) -> None:
    """Equal ids (`[1, L]`), or a first difference at a near-tie of the target's own (processed) logits."""
    if torch.equal(plain, assisted):
        return
    shorter = min(plain.shape[1], assisted.shape[1])
    unequal = (plain[0, :shorter] != assisted[0, :shorter]).nonzero()
    assert len(unequal) > 0, f"lengths differ: {plain.shape[1]} plain, {assisted.shape[1]} assisted"
    first = int(unequal[0])
    with torch.no_grad():
        logits = target(plain[:, :first]).logits[:, -1].float()  # [1, V]
    if process is not None:
        logits = process(plain[:, :first], logits)
    gap = (logits.max() - logits[0, [plain[0, first], assisted[0, first]]].min()).item()
    assert gap < tolerance, f"texts differ at position {first}, {gap:.3g} from a tie"


class DraftLog:
    """Every draft step of the `generate` calls after `start`: the ids it saw and the draft logits it computed."""

    def __init__(self):
        self.steps: list[tuple[int, torch.LongTensor, torch.Tensor]] = []  # (verified, ids [1, L + k], logits [1, D])

    def start(self, monkeypatch) -> "DraftLog":
        """To be called after `oracle`, whose tilt would else be logged as the drafter's."""
        get_candidates, choose = OspreyCandidateGenerator.get_candidates, OspreyCandidateGenerator.choose

        def noting_length(generator, input_ids, *args, **kwargs):
            generator.verified = input_ids.shape[1]
            return get_candidates(generator, input_ids, *args, **kwargs)

        def noting_logits(generator, candidate_ids, draft_logits):
            self.steps.append((generator.verified, candidate_ids.clone(), draft_logits.clone()))
            return choose(generator, candidate_ids, draft_logits)

        monkeypatch.setattr(OspreyCandidateGenerator, "get_candidates", noting_length)
        monkeypatch.setattr(OspreyCandidateGenerator, "choose", noting_logits)
        return self

    @torch.no_grad()
    def assert_follows_definition(self, target, drafter, start: int = 0, tolerance: float = 1e-2, **inputs) -> None:
        """Compare with drafting by the definition: no caches, true contexts wherever the target has verified.

        `start`: first position whose tap the drafter can have seen (left padding, a cache brought along). A wrong
        context or position changes these logits by about 1; float noise grows to 1e-3 in random weights.
        """
        assert self.steps
        for verified, ids, found in self.steps:
            known = verified - 1  # the target has not seen its newest token yet
            states = target(ids[:, :known], output_hidden_states=True, **inputs).hidden_states
            taps = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
            context = drafter.project_taps(taps[:, start:].to(drafter.dtype))
            for length in range(verified, ids.shape[1] + 1):
                last = drafter.run_layers(ids[:, start + 1 : length], context)[:, -1:]
                context = torch.cat([context, last], dim=1)
            expected = drafter.draft_logits(last)[:, -1]
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
