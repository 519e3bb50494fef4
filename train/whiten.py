"""The start of `fc` from the target's own states: contexts without their common part, every dimension of one size.

A converted drafter's `fc` copies the deepest tap as it is. There one direction, the same at all positions, holds more
than half of the energy, and a few dimensions are ten times as large as the others (SmolLM2-135M-Instruct, layer 26):
behind `ctx_norm` little is left of what differs from position to position. The context halves of Q, K and V are zero
at that time, so that another `fc` changes nothing in what the drafter computes.
"""

import logging

import torch
from torch import Tensor

from osprey.modeling.modeling_osprey import OspreyDrafterForCausalLM
from osprey.train.feature_data import RowSubset

logger = logging.getLogger(__name__)

ROWS = 256
SINK = 4  # first positions of a row, whose states are far larger than all others


@torch.no_grad()
def whiten_context(drafter: OspreyDrafterForCausalLM, data: RowSubset) -> bool:
    """Sets `fc` to `S (I - m mᵀ / mᵀm)` on the deepest tap, if it still is what conversion made of it.

    `m` is the tap's mean over positions of `data` and `S` the diagonal of what makes every dimension's deviation one.
    Returns whether it did.
    """
    size, tap_size = drafter.config.hidden_size, drafter.config.target_hidden_size
    deepest = drafter.fc.weight[:, 2 * tap_size :]
    as_converted = torch.zeros_like(drafter.fc.weight)
    as_converted[:, 2 * tap_size :] = torch.eye(size, tap_size)
    halves = [
        projection.weight[:, :size]
        for layer in drafter.layers
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    ]
    if not torch.equal(drafter.fc.weight, as_converted) or any(half.any() for half in halves):
        return False
    step = max(1, len(data) // ROWS)
    states = torch.cat([data[i]["taps"][SINK:, 2 * tap_size :].float() for i in range(0, len(data), step)])  # [P, H]
    if len(states) < 2:
        return False
    white = whitening(states)[:size]  # a drafter wider than its target keeps zeros behind these
    deepest[: len(white)].copy_(white)
    logger.info("fc whitened by the states of %d positions", len(states))
    return True


def whitening(states: Tensor) -> Tensor:
    """The matrix `[H, H]` that takes the mean direction out of `states` `[P, H]` and scales every dimension."""
    mean = states.mean(0)  # [H]
    project = torch.eye(len(mean)) - torch.outer(mean, mean) / mean.dot(mean).clamp(min=1e-12)
    deviation = (states @ project.T).std(0)  # [H]
    return project / deviation.clamp(min=1e-6 * deviation.max())[:, None]
