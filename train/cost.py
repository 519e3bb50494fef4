"""Parameters and arithmetic of a model, from its config alone."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig


def meta_parameters(config: PreTrainedConfig) -> int:
    """Parameters of the model that `config` describes, without memory for them; tied ones count once."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()


def flops_per_token(config: PreTrainedConfig, length: int, head_rows: int | None = None) -> int:
    """Floating-point operations of one token's forward pass in a row of `length` tokens (a training step: 3 times).

    Matrix products only, two operations a multiply-add; a token attends to half of the row on average. `head_rows`:
    how many rows of the LM head are computed (default: the whole vocabulary).
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    attention = 2 * config.hidden_size * queries + 2 * config.hidden_size * keys  # q, o; k, v
    scores = 2 * queries * length / 2
    ffn = 3 * config.hidden_size * config.intermediate_size
    head = config.hidden_size * (config.vocab_size if head_rows is None else head_rows)
    return round(2 * (config.num_hidden_layers * (attention + scores + ffn) + head))
