"""What `prune --report` measures: each block's worth, and what a token costs before and after."""

from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from osprey.train.cost import flops_per_token
from osprey.train.perplexity import held_out_losses, perplexities

REPORT_FILE = "prune_report.json"
LENGTH = 512  # tokens in a row


def prune_report(
    model: PreTrainedModel,
    pruned: PreTrainedModel,
    layer_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    held_out: list[Path],
    tokens: int,
    precision: str,
) -> dict[str, Any]:
    """Perplexities of the source, of the source without each of its blocks, and of the pruned model; and sizes.

    Perplexities are given for each file and over all (`mean`); the counts of parameters leave nothing out, FLOPs are
    those of a forward pass in rows of `length` tokens.
    """

    def measure(measured: PreTrainedModel) -> dict[str, float]:
        return perplexities(held_out_losses(measured, tokenizer, held_out, LENGTH, tokens, precision))

    source = measure(model)
    blocks = list(model.base_model.layers)
    without = []
    try:
        for index in tqdm(range(len(blocks)), desc="without block", leave=False):
            model.base_model.layers = torch.nn.ModuleList(blocks[:index] + blocks[index + 1 :])
            model.config.num_hidden_layers = len(blocks) - 1
            without.append(measure(model))
    finally:
        model.base_model.layers = torch.nn.ModuleList(blocks)
        model.config.num_hidden_layers = len(blocks)
    return {
        "length": LENGTH,
        "tokens_per_file": tokens,
        "source": {**_sizes(model, model.config), "perplexity": source},
        "pruned": {**_sizes(pruned, pruned.config), "perplexity": measure(pruned)},
        "blocks": [
            {"block": index, "kept": index in layer_ids, "perplexity_without": perplexity}
            for index, perplexity in enumerate(without)
        ],
    }


def _sizes(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, int]:
    return {
        "layers": config.num_hidden_layers,
        "parameters": model.num_parameters(),
        "body_parameters": sum(weight.numel() for weight in model.base_model.layers.parameters()),
        "flops_per_token": flops_per_token(config, LENGTH),
    }
