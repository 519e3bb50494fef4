"""Muon for the matrices of the blocks, AdamW for everything else.

Muon (Jordan et al., 2024; `torch.optim.Muon`) steps along the orthogonalised momentum, so that directions with small
gradients move as fast as the others. In distillation these are the context halves of Q, K and V: they start at zero
beside pretrained weights, and AdamW at a rate that the pretrained half bears hardly moves them. In pretraining few
tokens go further with it.
"""

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon

WIDENED = ("q_proj.weight", "k_proj.weight", "v_proj.weight")  # [context half | own half]


class MuonAdamW(torch.optim.Optimizer):
    """One optimizer of two: `matrix_lr` for `fc` and the matrices of the blocks, `other_lr` for the other parameters.

    The size of Muon's steps is matched to AdamW's (`match_rms_adamw`), so that `matrix_lr` reads like an AdamW rate.
    Norm weights, embedding and head go with `other_lr`: SmolLM2's first norm weighs 0.006 in the median, and a step of
    a matrix's size would overturn it. Weight decay is decoupled, times the rate, and spares norms and biases.

    With a `context_lr` of their own, `fc` and the context halves of Q, K and V, which are new, may learn faster than
    what was pretrained. The halves then are two matrices to Muon.
    """

    def __init__(
        self,
        model: nn.Module,
        matrix_lr: float,
        other_lr: float,
        betas: tuple[float, float],
        weight_decay: float = 0.0,
        fused: bool = True,
        context_lr: float | None = None,
    ):
        matrices, others = [], []
        new: list[nn.Parameter] = []
        self.halves: list[tuple[nn.Parameter, nn.Parameter, nn.Parameter]] = []  # a matrix, its context and own half
        for name, parameter in model.named_parameters():  # a tied head comes once, as the embedding
            if parameter.requires_grad:
                # `model.layers.` in a causal language model, `layers.` in a drafter
                is_matrix = parameter.ndim == 2 and name.removeprefix("model.").startswith(("fc.", "layers."))
                if context_lr is not None and name.endswith(WIDENED):
                    self.halves.append(
                        (parameter, *map(nn.Parameter, parameter.data.chunk(2, dim=1)))
                    )  # of its storage
                    new.append(self.halves[-1][1])
                    matrices.append(self.halves[-1][2])
                elif context_lr is not None and name.startswith("fc."):
                    new.append(parameter)
                else:
                    (matrices if is_matrix else others).append(parameter)
        groups = [{"params": others, "weight_decay": 0.0}]
        if weight_decay:
            tables = [parameter for parameter in others if parameter.ndim > 1]
            vectors = [parameter for parameter in others if parameter.ndim < 2]
            groups = [{"params": vectors, "weight_decay": 0.0}, {"params": tables, "weight_decay": weight_decay}]
        muon_groups = [{"params": matrices}] + ([{"params": new, "lr": context_lr}] if new else [])
        self.parts = [
            Muon(muon_groups, lr=matrix_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            AdamW(groups, lr=other_lr, betas=betas, fused=fused),
        ]
        # The groups are those of the parts, so that a scheduler that sets a group's rate sets theirs.
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter, *halves in self.halves:
            for half, gradient in zip(halves, parameter.grad.chunk(2, dim=1), strict=True):
                half.grad = gradient
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]  # loading made new ones
