"""Draft steps unrolled in training (EAGLE-3's training-time test, arXiv 2503.01840, section 3.2).

A chain starts at an anchor position `t`: step 0 reads the embedding of token `t + 1` and the target's state at `t`
and predicts token `t + 2`; step k reads the teacher-forced token `t + 1 + k` and, as its context, the output of step
k - 1, sits at position `t + k` and predicts token `t + 2 + k`. It sees the step-0 keys up to `t` and the chain's own
keys of the steps since. Chains do not see each other, so the later steps may be computed for some anchors only,
exactly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from osprey.modeling.modeling_osprey import OspreyDrafterForCausalLM


@dataclass(frozen=True)
class Chains:
    """Anchors `[B, A]` (positions, rising in a row) and how many steps each may take, `[B, A]`; 0 is padding."""

    anchors: Tensor
    num_steps: Tensor


def find_chains(response_mask: Tensor, steps: int, fraction: float = 1.0) -> Chains:
    """Chooses the anchors of a batch: each predicts, at its step 0, a response token with a response token before it.

    Args:
        response_mask: bool `[B, T]`, contiguous in each row (padding is outside of it).
        steps: longest chain.
        fraction: share of the anchors taken in each row, at random.
    """
    batch, length = response_mask.shape
    positions = torch.arange(length, device=response_mask.device)
    end = (positions * response_mask).amax(1)  # [B], last response token
    first = torch.where(response_mask, positions, length).amin(1) - 1  # [B], state before the first response token
    available = (positions >= first[:, None]) & (positions + 2 <= end[:, None])  # [B, T]
    count = available.sum(1)  # [B]
    if fraction < 1.0:
        count = (count * fraction).ceil().long()
        order = torch.rand(batch, length, device=response_mask.device).masked_fill(~available, 2.0).argsort(1)
        rank = order.argsort(1)
        available &= rank < count[:, None]
    size = int(count.max())
    anchors = torch.where(available, positions, length).sort(1).values[:, :size]  # [B, A]
    num_steps = (end[:, None] - 1 - anchors).clamp(0, steps)  # step k needs token t + 2 + k <= end
    return Chains(anchors.clamp(max=max(length - 2, 0)), num_steps.masked_fill(anchors == length, 0))


def unroll(
    drafter: OspreyDrafterForCausalLM, input_ids: Tensor, taps: Tensor, chains: Chains, steps: int
) -> list[Tensor]:
    """Last hidden states (before the final norm) of every draft step.

    Args:
        input_ids: `[B, T]`, right-padded.
        taps: `[B, T, 3H]`, the target's.
        chains: where steps 1 and later are computed.
        steps: number of draft steps, at least 1.

    Returns:
        `[B, T - 1, h]` for step 0 (every position), then `[B, A, h]` for each later one; where a chain has no such
        step the values mean nothing.
    """
    length = input_ids.shape[1]
    cache = DynamicCache(config=drafter.config)
    # No mask is needed for right padding: what a causal position sees is never padding unless it is padding itself.
    hidden = drafter.run_layers(input_ids[:, 1:], drafter.project_taps(taps[:, :-1]), cache=cache)  # [B, T-1, h]
    outputs = [hidden]
    anchors = chains.anchors
    batch, num_anchors = anchors.shape
    if steps == 1 or num_anchors == 0:
        return outputs + [hidden.new_zeros(batch, num_anchors, hidden.shape[2]) for _ in range(steps - 1)]
    context = hidden.gather(1, anchors[..., None].expand(-1, -1, hidden.shape[2]))  # [B, A, h]
    prefix = torch.arange(length - 1, device=anchors.device) <= anchors[..., None]  # [B, A, T-1]
    own = torch.eye(num_anchors, dtype=torch.bool, device=anchors.device).expand(batch, -1, -1)  # [B, A, A]
    for step in range(1, steps):
        tokens = input_ids.gather(1, (anchors + 1 + step).clamp(max=length - 1))  # [B, A]
        mask = torch.cat([prefix] + [own] * step, dim=-1)[:, None]  # [B, 1, A, T-1 + step·A]
        context = drafter.run_layers(tokens, context, mask, position_ids=anchors + step, cache=cache)  # [B, A, h]
        outputs.append(context)
    return outputs


def accepted_lengths(correct: Tensor) -> Tensor:
    """How many draft tokens of each chain are accepted: those before the first wrong one.

    Args:
        correct: bool `[..., K]`, whether the draft token of step k is the target's (False past the chain's end).
    """
    return correct.long().cumprod(-1).sum(-1)


def walk_rounds(accepted: list[int], steps: int) -> list[tuple[int, int]]:
    """The verification rounds, (drafted, accepted), of a response that is generated with this drafter, greedily.

    Args:
        accepted: draft tokens accepted by a round that starts at the i-th response token's state (i from 0 on).
        steps: draft tokens in a round.
    """
    rounds, position = [], 0
    while position < len(accepted):
        # Where the response ends inside the draft, its last token stands for the bonus token: nothing follows.
        rounds.append((steps, min(accepted[position], len(accepted) - position - 1)))
        position += rounds[-1][1] + 1
    return rounds
