"""A drafter's config as vLLM reads it.

vLLM asks for an older transformers than the drafter's own config class works with, so this one stands alone.
"""

from transformers import PreTrainedConfig

from osprey.serving.layout import check_config, vllm_tap_ids


class OspreyVllmConfig(PreTrainedConfig):
    """The keys of a drafter's `config.json`, checked, and the taps as vLLM counts them.

    Raises:
        ValueError: a key that vLLM would fill with a default of its own is missing, or keys contradict each other.
    """

    model_type = "osprey"

    def __init__(self, **kwargs):
        optional = {"draft_vocab_size": None, "target_num_tokens": None, "no_rope_layers": None}
        super().__init__(**optional | kwargs)
        if not kwargs:  # transformers makes an empty one to compare with
            return
        check_config(vars(self))
        self.eagle_aux_hidden_state_layer_ids = vllm_tap_ids(kwargs["target_layer_ids"])
