"""Half-precision weights for CPU inference.

`F.linear` in float32 costs several times more at 2 to 16 rows than at one row on many CPUs, which makes a
verification dear. FBGEMM's linear with float16 weights and float32 activations does not have that step.
"""

import warnings

import torch
from torch import nn


def fp16_linears(model: nn.Module) -> nn.Module:
    """Store the weights of every `nn.Linear` in `model` as float16, in place, and return `model`.

    Activations stay float32, so a token's logits do not depend on how many rows are computed beside it but for float
    noise (about 5e-5): assisted greedy text stays what plain decoding with the same weights gives.

    Raises:
        ValueError: `model` is not a float32 model on the CPU.
    """
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
        raise ValueError(
            f"fp16_linears takes a float32 model on the CPU, but this one is {parameter.dtype} on "
            f"{parameter.device}: load it with dtype=torch.float32 and device_map='cpu'."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao announces its successor package
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.float16, inplace=True)
