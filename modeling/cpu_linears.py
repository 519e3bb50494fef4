"""Smaller weights for CPU inference.

`F.linear` in float32 costs several times more at 2 to 16 rows than at one row on many CPUs, which makes a
verification dear. FBGEMM's linear with float16 weights and float32 activations does not have that step. A draft step
reads every weight for one row, so that its cost is the weights' bytes: there 8 bits halve it once more.
"""

import warnings

import torch
from torch import nn
from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic


def fp16_linears(model: nn.Module) -> nn.Module:
    """Store the weights of every `nn.Linear` in `model` as float16, in place, and return `model`.

    Activations stay float32, so a token's logits do not depend on how many rows are computed beside it but for float
    noise (about 5e-5): assisted greedy text stays what plain decoding with the same weights gives.

    Raises:
        ValueError: `model` is not a float32 model on the CPU.
    """
    prepare("fp16_linears", model)
    return quantized(model, {nn.Linear}, torch.float16)


def int8_linears(drafter: nn.Module) -> nn.Module:
    """Store the weights of a drafter's blocks and head as int8, a scale for each row, in place, and return it.

    For a drafter alone: its precision changes what it proposes, and never the text. A target must not take it: the
    activations are rounded to 8 bits too, with one scale for all rows, so that its logits would depend on the draft.
    `fc` takes float16: the target's states have a few entries so large that 8 bits leave nothing of the others.

    Raises:
        ValueError: `drafter` is not an Osprey drafter in float32 on the CPU.
    """
    if not hasattr(drafter, "fuse_projections"):
        raise ValueError(
            f"int8_linears takes an Osprey drafter, but this is a {type(drafter).__name__}: use fp16_linears, which "
            "keeps the text of a target as it is."
        )
    prepare("int8_linears", drafter)
    names = [name for name, module in drafter.named_modules() if type(module) is nn.Linear and name != "fc"]
    quantized(drafter, dict.fromkeys(names, per_channel_dynamic_qconfig), torch.qint8)
    return quantized(drafter, {nn.Linear}, torch.float16)


def prepare(name: str, model: nn.Module) -> None:
    """Refuse what cannot be quantised here; join a drafter's projections."""
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
        raise ValueError(
            f"{name} takes a float32 model on the CPU, but this one is {parameter.dtype} on "
            f"{parameter.device}: load it with dtype=torch.float32 and device_map='cpu'."
        )
    if hasattr(model, "fuse_projections"):
        model.fuse_projections()


def quantized(model: nn.Module, which: set | dict, dtype: torch.dtype) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao announces its successor package
        return quantize_dynamic(model, which, dtype=dtype, inplace=True)
