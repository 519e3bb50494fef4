"""The matched baseline: a drafter as EAGLE-3 builds it (arXiv 2503.01840), which trains and drafts as Osprey's does.

It differs from an Osprey drafter in what that paper does otherwise, and in nothing else: the residual stream starts
from the fused taps instead of the token embedding, only layer 0 reads both (its Q, K and V are twice as wide), the
blocks start at random, and the embedding is the target's own, frozen. So its width is the target's. Trainer, data,
unroll, draft vocabulary and candidate generator are the same.
"""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from osprey.modeling.configuration_osprey import OspreyConfig
from osprey.modeling.modeling_osprey import OspreyDecoderLayer, OspreyDrafterForCausalLM


class Eagle3Config(OspreyConfig):
    """An `OspreyConfig` for `Eagle3Drafter`."""

    model_type = "osprey_eagle3_baseline"
    _auto_class = None  # not remote code: baselines are measured, not published


class Eagle3FirstLayer(OspreyDecoderLayer):
    """A block over `[context | embedding]` whose residual is the context."""

    def forward(self, hidden_states, context, position_embeddings, attention_mask, cache):
        widened = self.widen(hidden_states, context)
        hidden_states = context + self.self_attn(widened, position_embeddings, attention_mask, cache)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))  # [B, T, h]


class Eagle3Layer(LlamaDecoderLayer):
    """An ordinary block behind the first, called as an Osprey block is."""

    def forward(self, hidden_states, context, position_embeddings, attention_mask, cache: Cache | None):
        return super().forward(
            hidden_states, attention_mask=attention_mask, cache=cache, position_embeddings=position_embeddings
        )

    def extend_cache(self, hidden_states, context, position_embeddings, cache: Cache):
        attention, hidden_states = self.self_attn, self.input_layernorm(hidden_states)
        key, value = (  # [B, kv heads, T, head_dim]
            linear(hidden_states).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for linear in (attention.k_proj, attention.v_proj)
        )
        _, key = apply_rotary_pos_emb(key, key, *position_embeddings)
        cache.update(key, value, attention.layer_idx)


class Eagle3Drafter(OspreyDrafterForCausalLM):
    """EAGLE-3's drafter behind Osprey's interface: the same forward, taps, draft vocabulary and generator."""

    config_class = Eagle3Config
    _auto_class = None
    _no_split_modules = ["Eagle3FirstLayer", "Eagle3Layer"]

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        others = [Eagle3Layer(config, index) for index in range(1, config.num_hidden_layers)]
        self.layers = nn.ModuleList([Eagle3FirstLayer(config, 0), *others])
        self.post_init()

    def fuse_projections(self) -> None:
        """As in the base class, of the first layer alone: the others are plain Llama blocks."""
        first = self.layers[0]
        if first.self_attn.qkv_proj is None:
            first.self_attn.fuse()
            first.mlp.fuse()


def make_eagle3(target: PreTrainedModel, like: OspreyDrafterForCausalLM, layers: int, seed: int) -> Eagle3Drafter:
    """An untrained baseline for `target`, with the taps and the draft vocabulary of the Osprey drafter `like`.

    Blocks have the shape of the target's and random weights. The embedding is the target's. The head is too: tied and
    frozen where both the target's and `like`'s are, otherwise a copy that is trained.
    """
    shape = target.config.get_text_config()
    rope = shape.rope_parameters  # by kind of layer in some families: the drafter attends fully
    tied = bool(shape.tie_word_embeddings and like.config.tie_word_embeddings)
    config = Eagle3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads,
        max_position_embeddings=shape.max_position_embeddings,
        initializer_range=shape.initializer_range,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters=rope.get("full_attention", rope),
        tie_word_embeddings=tied,
        target_hidden_size=shape.hidden_size,
        **{
            name: getattr(like.config, name)
            for name in ("draft_vocab_size", "target", "target_revision", "target_num_hidden_layers")
            + ("target_num_tokens", "target_layer_ids", "bos_token_id", "eos_token_id", "pad_token_id")
        },
    )
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(config)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        if not tied:
            rows = target.get_output_embeddings().weight[like.draft_ids]
            drafter.lm_head.weight[: len(rows)].copy_(rows)  # rows of a padded vocabulary come behind these
    if config.draft_vocab_size is not None:
        drafter.set_draft_ids(like.draft_ids)
    drafter.generation_config.update(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        num_assistant_tokens=like.generation_config.num_assistant_tokens,
        assistant_confidence_threshold=like.generation_config.assistant_confidence_threshold,
    )
    return drafter
