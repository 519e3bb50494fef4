"""Width pruning: fewer key-value groups and FFN channels in every block, the least important ones cut (one-shot).

The shapes are those of Sheared LLaMA (arXiv 2310.06694), with the hidden size left as it is: embedding, norms and head
stay. What is kept is chosen block by block by `importance`, without its training of masks.
"""

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from osprey.train.importance import Importance


def narrow_config(
    config: PreTrainedConfig, num_key_value_heads: int | None, intermediate_size: int | None
) -> PreTrainedConfig:
    """The config of the narrower model; None leaves a size as it is.

    Raises:
        ValueError: the model is not as wide as what is to be kept, or its family does not allow that number of heads.
    """
    for name, kept in (("num_key_value_heads", num_key_value_heads), ("intermediate_size", intermediate_size)):
        if kept is not None and not 1 <= kept <= getattr(config, name):
            raise ValueError(f"--{name} {kept} is out of range: the source has {getattr(config, name)}.")
    groups = num_key_value_heads or config.num_key_value_heads
    changes = {
        "num_key_value_heads": groups,
        "num_attention_heads": groups * config.num_attention_heads // config.num_key_value_heads,
        "intermediate_size": intermediate_size or config.intermediate_size,
        # Where a family derives it from the number of heads, it would change with them.
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    }
    try:
        return type(config)(**{**config.to_dict(), **changes})
    except StrictDataclassError as error:  # llama wants a hidden size that is a multiple of the number of heads
        raise ValueError(
            f"--num_key_value_heads {groups} leaves {changes['num_attention_heads']} attention heads, with which a "
            f"{config.model_type} model of hidden size {config.hidden_size} cannot be loaded; choose another number."
        ) from error


def narrow(
    model: PreTrainedModel,
    importance: Importance,
    layer_ids: list[int],
    num_key_value_heads: int | None,
    intermediate_size: int | None,
) -> PreTrainedModel:
    """A new model whose blocks keep that many groups and channels; each block's rows and columns keep their order.

    `layer_ids` says which block of the measured model each block of `model` is.
    """
    config = narrow_config(model.config, num_key_value_heads, intermediate_size)
    head_dim, heads_per_group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    state = model.state_dict()
    for new, layer in enumerate(layer_ids):
        groups = _best(importance.groups[layer], config.num_key_value_heads)
        channels = _best(importance.channels[layer], config.intermediate_size)
        keys = _rows_of(groups, head_dim)
        queries = _rows_of(groups, heads_per_group * head_dim)
        prefix = f"{model.base_model_prefix}.layers.{new}."
        kept = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": channels, "up_proj": channels}
        for name in [name for name in state if name.startswith(prefix)]:
            module, kind = name.split(".")[-2:]
            if module in kept:
                state[name] = state[name][kept[module]]
            elif module in ("o_proj", "down_proj") and kind == "weight":
                state[name] = state[name][:, queries if module == "o_proj" else channels]
    narrower = type(model)(config).to(model.dtype)
    narrower.load_state_dict(state)
    narrower.generation_config = model.generation_config
    return narrower.eval()


def _best(scores: Tensor, number: int) -> Tensor:
    return scores.topk(number).indices.sort().values


def _rows_of(groups: Tensor, size: int) -> Tensor:
    """Rows of a projection that belong to `groups`, each of which has `size` of them."""
    return (groups[:, None] * size + torch.arange(size)).flatten()
