"""The Osprey drafter: a few decoder blocks whose Q, K and V also read the target's hidden states.

Sizes in the comments: B batch, T positions, S cached + new positions, h drafter hidden, H target hidden, V target
vocabulary, D draft vocabulary (without a shortlist all of V but the rows that only pad it).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import ModelOutput

from .configuration_osprey import OspreyConfig
from .decoding_osprey import AssistedCall, install
from .generation_osprey import OspreyCandidateGenerator
from .layers_osprey import OspreyDecoderLayer
from .target_osprey import check_target, check_tokenizer


@dataclass
class OspreyOutput(ModelOutput):
    """
    Args:
        logits (`[B, T, V]`): scores for the token two positions on (see [`OspreyDrafterForCausalLM`]), `-inf` outside
            the draft vocabulary.
        last_hidden_state (`[B, T, h]`): the last block's output before the final norm, which is the context of the
            next draft step.
        cache: the drafter's own keys and values.
    """

    logits: torch.FloatTensor | None = None
    last_hidden_state: torch.FloatTensor | None = None
    cache: Cache | None = None


class OspreyPreTrainedModel(PreTrainedModel):
    config_class = OspreyConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = False  # recomputing a block would extend the cache of a training unroll twice
    _no_split_modules = ["OspreyDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_attention_backend = True


class OspreyDrafterForCausalLM(OspreyPreTrainedModel, GenerationMixin):
    """
    An Osprey drafter: a shallow language model in its target's vocabulary that reads the target's hidden states.

    Position `t` takes the embedding of token `t + 1` and the context of the target's state at `t`, and predicts token
    `t + 2` (arXiv 2609.09338; the alignment is EAGLE's). Pass it to a target as `assistant_model`:

    ```python
    drafter = OspreyDrafterForCausalLM.from_pretrained("org/osprey-…")
    target.generate(**inputs, assistant_model=drafter)
    ```

    How to draft is read from the drafter's own generation config, as for every assistant in transformers; see
    `OspreyCandidateGenerator`.
    """

    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}

    def __init__(self, config: OspreyConfig):
        super().__init__(config)
        if config.target_layer_ids is None:
            raise ValueError(
                "An Osprey drafter needs target_num_hidden_layers or target_layer_ids in its config to know which "
                "hidden states of its target to read: make one with `osprey convert`."
            )
        if self.has_tied_shortlist:
            # The head's rows are a copy of the shortlist's embedding rows: rebuilt at load, never stored.
            self._tied_weights_keys = {}
            self._keys_to_ignore_on_save = ["lm_head.weight"]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(3 * config.target_hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(OspreyDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        draft_vocab_size = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False)
        if config.draft_vocab_size is not None:
            # As in EAGLE-3 checkpoints: target id = i + d2t[i], and t2d marks the target ids that can be drafted.
            self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < draft_vocab_size)
        self.post_init()
        self.freeze_tied_shortlist()

    @property
    def has_tied_shortlist(self) -> bool:
        """Whether the head is a derived, frozen copy of the shortlist's embedding rows."""
        return self.config.tie_word_embeddings and self.config.draft_vocab_size is not None

    @property
    def draft_ids(self) -> torch.LongTensor:
        """Target ids that can be drafted, in the order of the head's rows, `[D]`."""
        arange = torch.arange(self.config.draft_vocab_size or self.config.num_draftable, device=self.device)
        return arange if self.config.draft_vocab_size is None else arange + self.d2t

    @property
    def head_weight(self) -> torch.Tensor:
        """Rows of the head, `[D, h]`; those of a tied shortlist come from the embedding and carry its gradient."""
        if self.has_tied_shortlist:
            return self.embed_tokens.weight[self.draft_ids]
        return self.lm_head.weight[: self.config.num_draftable]

    def set_draft_ids(self, ids: torch.LongTensor) -> None:
        """Make `ids` (`[D]`, rising target ids) the draft vocabulary; a tied head follows, another keeps its rows."""
        size, limit = self.config.draft_vocab_size, self.config.num_draftable
        if size != len(ids) or not torch.equal(ids, ids.unique()) or ids[0] < 0 or ids[-1] >= limit:
            raise ValueError(
                f"A draft vocabulary of {size} takes that many different ids from 0 to {limit - 1} in rising order, "
                f"but {len(ids)} were given: sort them, drop repeats and ids outside, or change draft_vocab_size."
            )
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids.to(self.t2d.device)] = True
        self.tie_weights()

    def tie_weights(self, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        super().tie_weights(missing_keys=missing_keys, recompute_mapping=recompute_mapping)
        if not self.has_tied_shortlist:
            return
        if missing_keys is not None:
            missing_keys.discard("lm_head.weight")
        rows = self.embed_tokens.weight
        if rows.device.type != "meta" and self.d2t.device.type != "meta":
            self.lm_head.weight = nn.Parameter(rows.detach()[self.draft_ids].clone(), requires_grad=False)

    def freeze_tied_shortlist(self) -> None:
        """Fix the embedding of which the head is a copy: the default, as training it would leave the copy behind.

        Who trains it all the same reads the head from `head_weight` and calls `tie_weights` when done.
        """
        if self.has_tied_shortlist:
            self.embed_tokens.requires_grad_(False)

    def fuse_projections(self) -> None:
        """Join Q, K and V, and the MLP's gate and up, into one matrix product each: fewer, larger products a step.

        For inference alone: names in the state dict change, so that a fused drafter cannot be saved.
        """
        for layer in self.layers:
            if layer.self_attn.qkv_proj is None:
                layer.self_attn.fuse()
                layer.mlp.fuse()

    def project_taps(self, taps: torch.Tensor) -> torch.Tensor:
        """Contexts `[B, T, h]` from the target's three tapped layer outputs, concatenated: `[B, T, 3H]`."""
        return self.fc(taps)

    def draft_logits(self, last_hidden_state: torch.Tensor) -> torch.Tensor:
        """Scores over the draft vocabulary, `[B, T, D]`, from the last block's output `[B, T, h]`."""
        return self.lm_head(self.norm(last_hidden_state))[..., : self.config.num_draftable]

    def widen_logits(self, draft_logits: torch.Tensor) -> torch.Tensor:
        """Scores over the target's vocabulary, `[..., V]`, `-inf` outside the draft vocabulary, from `[..., D]`."""
        if draft_logits.shape[-1] == self.config.vocab_size:
            return draft_logits
        shape = (*draft_logits.shape[:-1], self.config.vocab_size)
        wide = draft_logits.new_full(shape, float("-inf"))
        wide[..., self.draft_ids] = draft_logits
        return wide

    def run_layers(
        self,
        input_ids: torch.LongTensor,
        context: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """The blocks alone: last hidden state before the final norm, `[B, T, h]`.

        Arguments as in `forward`; `position_embeddings`, which `rotary_emb` gives for `position_ids`, can stand in
        for these. With `last_only` the result is that of the last position, `[B, 1, h]`, and the last block computes
        no more than keys and values of the others: it takes a cache, and no padding.
        """
        hidden_states = self.embed_tokens(input_ids)  # [B, T, h]
        context = torch.zeros_like(hidden_states) if context is None else context.to(hidden_states.dtype)
        if position_ids is None and position_embeddings is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)[None]  # [1, T]
        if attention_mask is not None or input_ids.shape[1] > 1:  # one unpadded query sees every key: no mask
            attention_mask = create_causal_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=attention_mask,
                cache=cache,
                position_ids=position_ids,
            )
        if (
            attention_mask is not None
            and attention_mask.dtype == torch.bool
            and self.config._attn_implementation == "eager"
        ):
            blocked = torch.finfo(hidden_states.dtype).min
            attention_mask = torch.zeros_like(attention_mask, dtype=hidden_states.dtype).masked_fill(
                ~attention_mask, blocked
            )
        if position_embeddings is None:
            position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers[:-1]:
            hidden_states = layer(hidden_states, context, position_embeddings, attention_mask, cache)
        if last_only and hidden_states.shape[1] > 1:
            before = [states[:, :-1] for states in (hidden_states, context, *position_embeddings)]
            self.layers[-1].extend_cache(*before[:2], before[2:], cache)
            hidden_states, context, *position_embeddings = (
                states[:, -1:] for states in (hidden_states, context, *position_embeddings)
            )
            attention_mask = None  # the last position sees every key
        return self.layers[-1](hidden_states, context, position_embeddings, attention_mask, cache)

    def forward(
        self,
        input_ids: torch.LongTensor,
        context: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs,
    ) -> OspreyOutput:
        """
        Args:
            input_ids (`[B, T]`): tokens `1 … T` of a sequence whose contexts belong to tokens `0 … T-1`.
            context (`[B, T, h]`): `project_taps(taps)` for positions that the target has seen, the last hidden state
                of the step before for drafted ones; zeros when left out (a plain language model).
            attention_mask: `[B, S]` padding mask, or a ready `[B, 1, T, S]` mask, which is used as it is.
            position_ids (`[B, T]`): counted from 0 on from the cache's length when left out.
            cache: keys and values of earlier positions; extended in place.
            logits_to_keep (`int`): scores for that many last positions only; 0 for all.
        """
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        hidden_states = self.run_layers(input_ids, context, attention_mask, position_ids, cache)  # [B, T, h]
        logits = self.widen_logits(self.draft_logits(hidden_states[:, -logits_to_keep:]))  # [B, T or kept, V]
        return OspreyOutput(logits=logits, last_hidden_state=hidden_states, cache=cache)

    # What `target.generate(assistant_model=self)` asks of a drafter, whichever copy of this code was installed first.

    def osprey_check_target(self, target: PreTrainedModel) -> None:
        check_target(self, target)

    def osprey_check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        check_tokenizer(self, tokenizer)

    def osprey_candidate_generator(self, target: PreTrainedModel, **kwargs) -> OspreyCandidateGenerator:
        return OspreyCandidateGenerator(self, target, **kwargs)

    def osprey_decode(
        self, assisted_decoding: Callable, input_ids: torch.LongTensor, stopping_criteria, streamer=None, **kwargs
    ):
        call = AssistedCall(self, stopping_criteria, streamer, kwargs.get("cache"), input_ids.shape[1])
        return call.run(assisted_decoding, input_ids, **kwargs)

    def save_pretrained(self, *args, **kwargs):
        # A generation config that says it was made from a model's config loses our own attributes when it is loaded.
        self.generation_config._from_model_config = None
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in transformers, but a folder with missing files or tensors is refused instead of filled at random.

        Without a `dtype` and without an accelerator the weights are loaded as float32, whatever they are stored as:
        most CPUs have no fast bfloat16.

        Raises:
            ValueError: a file or tensor is missing, truncated, unexpected or of another shape.
        """
        path = str(pretrained_model_name_or_path)
        if os.path.isdir(path):
            refuse_incomplete_folder(os.path.join(path, kwargs.get("subfolder") or ""), cls.config_class.model_type)
        if "dtype" not in kwargs and "torch_dtype" not in kwargs and not torch.accelerator.is_available():
            kwargs["dtype"] = torch.float32
        kwargs["use_safetensors"] = True  # nothing is ever unpickled
        return_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("ignore_mismatched_sizes", True)  # reported below, with the other faults
        try:
            model, info = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        except Exception as error:
            if type(error).__name__ == "SafetensorError":
                raise ValueError(
                    f"The weights in {path} cannot be read ({error}): the file is truncated or damaged; fetch or "
                    "make the drafter again."
                ) from error
            raise
        faults = {
            name: sorted(map(str, info[name]))
            for name in ("missing_keys", "unexpected_keys", "mismatched_keys")
            if info[name]
        }
        if faults:
            listed = "; ".join(f"{name.replace('_', ' ')}: {', '.join(keys[:4])}" for name, keys in faults.items())
            raise ValueError(
                f"The weights in {path} do not fit its config ({listed}): fetch or make the drafter again."
            )
        model.freeze_tied_shortlist()
        return (model, info) if return_info else model


def refuse_incomplete_folder(folder: str, model_type: str) -> None:
    """Raise `ValueError` where a local folder lacks a config of that type, or weights."""
    weights = ("model.safetensors", "model.safetensors.index.json")
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(f"{folder} is not a drafter folder, it has no config.json: make one with `osprey convert`.")
    kind = PreTrainedConfig.get_config_dict(folder)[0].get("model_type")
    if kind != model_type:
        raise ValueError(f"{folder} is no Osprey drafter but a {kind} model: make one of it with `osprey convert`.")
    if not any(os.path.isfile(os.path.join(folder, name)) for name in weights):
        raise ValueError(f"The drafter folder {folder} has no model.safetensors: fetch or make the drafter again.")


OspreyConfig.register_for_auto_class()
OspreyDrafterForCausalLM.register_for_auto_class("AutoModelForCausalLM")
install()
