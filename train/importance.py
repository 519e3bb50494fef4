"""What the blocks, head groups and FFN channels of a model do to the residual stream, on calibration text."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import PreTrainedConfig

from osprey.train.precision import autocast


@dataclass
class Importance:
    """Sums over calibration tokens become means; L blocks, G key-value groups, I FFN channels."""

    cosine: Tensor  # [L + 1, L + 1], between what enters two blocks (the last one: what leaves the last block)
    angle: Tensor  # [L + 1, L + 1], the same as an angle, in units of pi
    groups: Tensor  # [L, G], root mean square norm of what a group of query heads adds
    channels: Tensor  # [L, I], root mean square norm of what an FFN channel adds

    @property
    def influence(self) -> list[float]:
        """One minus the cosine between each block's input and output (ShortGPT, arXiv 2403.03853, eq. 1)."""
        return [round(1 - cosine, 6) for cosine in self.cosine.diagonal(1).tolist()]


@torch.no_grad()
def measure_importance(
    model: PreTrainedModel, rows: Iterable[dict[str, list[int]]], precision: str = "fp32"
) -> Importance:
    """Runs `rows` (as `PackedRows` gives them) through `model` and watches every block.

    Raises:
        ValueError: there are no rows.
    """
    config, layers = model.config, model.base_model.layers
    depth = len(layers)
    sums = Importance(
        torch.zeros(depth + 1, depth + 1),
        torch.zeros(depth + 1, depth + 1),
        torch.zeros(depth, config.num_key_value_heads),
        torch.zeros(depth, config.intermediate_size),
    )
    states: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(partial(_note_state, states)) for module in (*layers, model.base_model.norm)
    ]
    for index, layer in enumerate(layers):
        watch = partial(_note_groups, sums.groups[index], config)
        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(watch))
        hooks.append(layer.mlp.down_proj.register_forward_pre_hook(partial(_note_channels, sums.channels[index])))
    tokens = 0
    was_training = model.training
    model.eval()
    try:
        for row in rows:
            states.clear()
            batch = {
                name: torch.tensor([ids], device=model.device) for name, ids in row.items() if name != "labels"
            }  # [1, T]
            with autocast(precision, model.device.type):
                model.base_model(**batch, use_cache=False)
            unit = torch.nn.functional.normalize(torch.cat(states).float(), dim=-1).transpose(0, 1)  # [T, L + 1, h]
            cosines = (unit @ unit.transpose(1, 2)).clamp(-1, 1)  # [T, L + 1, L + 1]
            sums.cosine += cosines.sum(0).cpu()
            sums.angle += (cosines.acos() / torch.pi).sum(0).cpu()
            tokens += unit.shape[0]
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    if tokens == 0:
        raise ValueError("there is no calibration text: give files with --calibration.")
    return Importance(
        sums.cosine / tokens, sums.angle / tokens, (sums.groups / tokens).sqrt(), (sums.channels / tokens).sqrt()
    )


def _note_state(states: list[Tensor], module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
    states.append(args[0])  # [1, T, h]


def _note_groups(sums: Tensor, config: PreTrainedConfig, o_proj: torch.nn.Linear, args: tuple[Tensor, ...]) -> None:
    heads = args[0][0].float().unflatten(-1, (config.num_key_value_heads, -1))  # [T, G, heads per group * head_dim]
    weight = o_proj.weight.float().unflatten(
        -1, (config.num_key_value_heads, -1)
    )  # [h, G, heads per group * head_dim]
    for group in range(config.num_key_value_heads):
        sums[group] += (heads[:, group] @ weight[:, group].t()).square().sum().cpu()


def _note_channels(sums: Tensor, down_proj: torch.nn.Linear, args: tuple[Tensor, ...]) -> None:
    power = args[0][0].float().square().sum(0)  # [I]
    sums += (power * down_proj.weight.float().square().sum(0)).cpu()
