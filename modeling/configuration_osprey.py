"""Configuration of an Osprey drafter.

The files named `*_osprey.py` travel with every drafter on the Hub as remote code: they import torch and transformers
only.
"""

import transformers
from transformers import PreTrainedConfig
from transformers.generation.candidate_generator import CandidateGenerator

MINIMUM_TRANSFORMERS = "5.24.0"
FORMAT_VERSION = 2  # 2: `target_tokenizer_sha256`

if not hasattr(CandidateGenerator, "requires_model_outputs"):
    raise ImportError(
        f"Osprey needs transformers >= {MINIMUM_TRANSFORMERS}, whose assisted generation hands the target's hidden "
        f"states to the drafter, but {transformers.__version__} is installed: pip install -U transformers."
    )


def default_target_layer_ids(num_hidden_layers: int) -> list[int]:
    """The three decoder layers of a target whose outputs the drafter reads, counted from 0.

    `[1, L // 2 - 1, L - 4]` for a target of `L` layers (L = 62 gives 1, 30, 58), moved apart and kept off the last
    layer where the target is too shallow for that. The last layer's output is never used: what transformers
    returns for it is taken after the final norm.

    Raises:
        ValueError: the target has fewer than 4 layers, so that there are no three layers before its last.
    """
    if num_hidden_layers < 4:
        raise ValueError(
            f"A target needs at least 4 decoder layers to tap three below the last, but it has {num_hidden_layers}: "
            "choose a deeper target."
        )
    first = min(1, num_hidden_layers - 4)
    middle = max(num_hidden_layers // 2 - 1, first + 1)
    last = max(num_hidden_layers - 4, middle + 1)
    return [first, middle, last]


class OspreyConfig(PreTrainedConfig):
    r"""
    Configuration of [`OspreyDrafterForCausalLM`]: the backbone's shape, and what it must know of its target.

    Args:
        vocab_size (`int`): rows of the embedding, equal to the target's `config.vocab_size` (V).
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
        hidden_act, max_position_embeddings, rms_norm_eps, rope_parameters, attention_bias, mlp_bias,
        tie_word_embeddings, initializer_range, attention_dropout: as in the backbone's own family.
        attention_output_bias (`bool`): bias on `o_proj`; qwen2 has biases on q, k and v only.
        qk_norm (`bool`): RMSNorm over each query and key head before the rotation, as in qwen3.
        no_rope_layers (`list[int]`, *optional*): 1 for each block with rotary positions and 0 for one without, as in
            smollm3; `None`: all have them.
        draft_vocab_size (`int`, *optional*): size D of the shortlist of target ids that can be drafted; `None`: all.
        target (`str`), target_revision (`str`): the model that this drafter was adapted to.
        target_num_tokens (`int`, *optional*): ids that the target's tokenizer knows. Rows of the embedding from there
            on only pad the vocabulary, and are never drafted; `None`: there are none.
        target_tokenizer_sha256 (`str`, *optional*): hash of the target's vocabulary, see `vocabulary_sha256`.
        target_hidden_size (`int`), target_num_hidden_layers (`int`): its shape (H, L), checked before drafting.
        target_layer_ids (`list[int]`): three decoder layers of the target whose outputs are read, counted from 0.
        backbone (`str`), backbone_model_type (`str`): where the blocks came from, and their family.
        format_version (`int`): version of this checkpoint format; older ones, and configs without it, are read too.
    """

    model_type = "osprey"

    vocab_size: int = 32000
    hidden_size: int = 576
    intermediate_size: int = 1536
    num_hidden_layers: int = 2
    num_attention_heads: int = 9
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    qk_norm: bool = False
    no_rope_layers: list[int] | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    draft_vocab_size: int | None = None
    target: str | None = None
    target_revision: str | None = None
    target_num_tokens: int | None = None
    target_tokenizer_sha256: str | None = None
    target_hidden_size: int | None = None
    target_num_hidden_layers: int | None = None
    target_layer_ids: list[int] | None = None
    backbone: str | None = None
    backbone_model_type: str = "llama"
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.target_layer_ids is None and self.target_num_hidden_layers is not None:
            self.target_layer_ids = default_target_layer_ids(self.target_num_hidden_layers)
        super().__post_init__(**kwargs)
        if not 1 <= self.format_version <= FORMAT_VERSION:
            raise ValueError(
                f"format_version is {self.format_version}, but this code reads versions 1 to {FORMAT_VERSION} of the "
                "checkpoint format: update osprey-drafter."
            )
        self.format_version = FORMAT_VERSION  # what an older checkpoint lacks has its default: saved, it is a new one
        self._refuse_unknown_keys(kwargs)
        self._check_taps()
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, but it must be a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}: correct config.json."
            )
        if self.no_rope_layers is not None and len(self.no_rope_layers) != self.num_hidden_layers:
            raise ValueError(
                f"no_rope_layers has {len(self.no_rope_layers)} entries, but it must have one for each of the "
                f"{self.num_hidden_layers} blocks (1: rotary positions, 0: none): correct config.json."
            )
        if self.target_num_tokens is not None and not 0 < self.target_num_tokens <= self.vocab_size:
            raise ValueError(
                f"target_num_tokens is {self.target_num_tokens}, but it must lie between 1 and the target's "
                f"vocab_size {self.vocab_size}: correct it in config.json, or leave it out where no row is padding."
            )
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.num_draftable:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}, but it must lie between 1 and the "
                f"{self.num_draftable} tokens of the target (vocab_size, or target_num_tokens): correct it in "
                "config.json, or leave it out to draft over the whole vocabulary."
            )

    @property
    def num_draftable(self) -> int:
        """Target ids below this one are tokens and can be drafted; the rest of the vocabulary is padding."""
        return self.vocab_size if self.target_num_tokens is None else self.target_num_tokens

    def _refuse_unknown_keys(self, kwargs: dict) -> None:
        # Everything that transformers itself stores in a config is a field or a property of the base class; another
        # key is a typing error or a newer format, and either would silently change what the drafter computes.
        known = set(dir(PreTrainedConfig)) | set(PreTrainedConfig().to_dict()) | transformers_extras()
        unknown = sorted(key for key in kwargs if key not in known and not key.startswith("_"))
        if unknown:
            raise ValueError(
                f"Unknown key(s) {', '.join(unknown)} in the config of an Osprey drafter: correct the spelling in "
                "config.json, or update osprey-drafter if the checkpoint is newer than this code."
            )

    def _check_taps(self) -> None:
        ids, num_layers = self.target_layer_ids, self.target_num_hidden_layers
        if ids is None:
            return
        highest = num_layers - 2 if num_layers is not None else max(ids)
        if len(ids) != 3 or sorted(set(ids)) != list(ids) or ids[0] < 0 or ids[-1] > highest:
            raise ValueError(
                f"target_layer_ids is {ids}, but it must hold three different layers in rising order from 0 to "
                f"{highest} (the target has {num_layers} layers, and the output of its last is only seen after the "
                "final norm): correct it, or leave it out for the default."
            )


def transformers_extras() -> set[str]:
    """Keys that transformers writes into a config.json or accepts in one without declaring them."""
    return {
        *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type", "name_or_path"),
        *("rope_theta", "rope_scaling", "partial_rotary_factor", "attn_implementation", "experts_implementation"),
        *("output_attentions", "output_hidden_states", "return_dict", "num_labels", "quantization_config"),
    }
