"""The optimizer of stage 4: which weights move at which rate."""

import torch
from tiny import tiny_drafter, tiny_target

from osprey.train.muon import MuonAdamW


def stepped(matrix_lr, other_lr, context_lr=None):
    """How far every weight of a drafter moves in one step with given gradients."""
    drafter = tiny_drafter(tiny_target())
    optimizer = MuonAdamW(drafter, matrix_lr, other_lr, (0.9, 0.95), context_lr=context_lr)
    before = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return {name: parameter.detach() - before[name] for name, parameter in drafter.named_parameters()}


def test_context_halves_and_fc_learn_at_a_rate_of_their_own():
    moved = stepped(matrix_lr=0.0, other_lr=0.0, context_lr=0.1)
    for name, change in moved.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            context, own = change.chunk(2, dim=1)
            assert context.abs().max() > 0 and own.abs().max() == 0, name
        else:
            assert bool(change.abs().max() > 0) == name.startswith("fc."), name
    faster = stepped(matrix_lr=0.0, other_lr=0.0, context_lr=0.2)
    torch.testing.assert_close(faster["fc.weight"], 2 * moved["fc.weight"], rtol=1e-4, atol=1e-6)


def test_steps_are_as_large_as_adamws_would_be():
    """`match_rms_adamw`: the root mean square of a step is 0.2 times the rate (Liu et al. 2025, arXiv 2502.16982)."""
    change = stepped(matrix_lr=0.1, other_lr=0.0)["layers.0.mlp.gate_proj.weight"]
    assert 0.7 < change.square().mean().sqrt().item() / (0.2 * 0.1) < 1.2  # Newton-Schulz is approximate


def test_a_causal_language_models_blocks_learn_at_the_matrix_rate():
    model = tiny_target()
    optimizer = MuonAdamW(model, 0.1, 0.0, (0.9, 0.95))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        is_matrix = ".layers." in name and parameter.ndim == 2
        assert torch.equal(parameter, before[name]) != is_matrix, name
