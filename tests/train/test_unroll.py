"""The unrolled training forward is what drafting computes."""

import pytest
import torch
from tiny import DraftLog, oracle, tiny_drafter, tiny_prompt, tiny_target
from transformers.cache_utils import DynamicCache

from osprey.train.unroll import Chains, accepted_lengths, find_chains, unroll, walk_rounds

STEPS = 4


def target_taps(target, drafter, ids):
    states = target(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)


def draft_by_hand(drafter, ids, taps, anchor, steps):
    """One chain as in generation: true contexts up to the anchor, then token by token on the drafter's own output."""
    cache = DynamicCache(config=drafter.config)
    context = drafter.project_taps(taps[:, : anchor + 1])
    hidden = drafter.run_layers(ids[:, 1 : anchor + 2], context, cache=cache)
    outputs = [hidden[:, -1]]
    for step in range(1, steps):
        token, position = ids[:, anchor + 1 + step, None], torch.tensor([[anchor + step]])
        hidden = drafter.run_layers(token, outputs[-1][:, None], position_ids=position, cache=cache)
        outputs.append(hidden[:, -1])
    return outputs


@pytest.mark.parametrize("fraction", [1.0, 0.4])
@torch.no_grad()
def test_unrolled_steps_are_draft_steps(fraction):
    target = tiny_target()
    drafter = tiny_drafter(target)
    ids, lengths, prompt = torch.cat([tiny_prompt(13, 0), tiny_prompt(13, 1)]), [13, 10], [5, 3]
    taps = target_taps(target, drafter, ids)
    mask = torch.stack([(torch.arange(13) >= prompt[row]) & (torch.arange(13) < lengths[row]) for row in range(2)])
    ids[1, lengths[1] :] = 0  # padding must not matter
    taps[1, lengths[1] :] = 1e3

    torch.manual_seed(0)
    chains = find_chains(mask, STEPS, fraction)
    outputs = unroll(drafter, ids, taps, chains, STEPS)
    compared = 0
    for row in range(2):
        for column, anchor in enumerate(chains.anchors[row].tolist()):
            num_steps = int(chains.num_steps[row, column])
            if num_steps == 0:
                continue
            expected = draft_by_hand(drafter, ids[row : row + 1], taps[row : row + 1], anchor, num_steps)
            for step in range(num_steps):
                actual = outputs[step][row, anchor if step == 0 else column]
                torch.testing.assert_close(actual, expected[step][0], rtol=1e-4, atol=1e-5)
                compared += 1
    assert compared == int(chains.num_steps.sum()) > 0


def test_unrolled_steps_are_the_generators(monkeypatch):
    """The same against assisted generation itself, whose drafts are steered to the target's own text."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.generation_config.update(num_assistant_tokens=STEPS, assistant_confidence_threshold=0.0)
    prompt = tiny_prompt()
    truth = target.generate(prompt, max_new_tokens=16, do_sample=False)
    oracle(monkeypatch, truth, rate=1.0)
    log = DraftLog().start(monkeypatch)
    target.generate(prompt, max_new_tokens=16, do_sample=False, assistant_model=drafter)

    with torch.no_grad():
        taps = target_taps(target, drafter, truth)
        anchors = torch.arange(truth.shape[1] - STEPS - 1)[None]
        outputs = unroll(drafter, truth, taps, Chains(anchors, torch.full_like(anchors, STEPS)), STEPS)
        deepest = 0
        for verified, ids, logits in log.steps:
            step = ids.shape[1] - verified
            anchor = verified - 2  # the state before the last verified token
            if anchor >= anchors.shape[1]:
                continue
            expected = drafter.draft_logits(outputs[step][:, anchor])
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            deepest = max(deepest, step)
    assert deepest == STEPS - 1


def test_chains_start_and_end_inside_the_response():
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1]], dtype=torch.bool)
    chains = find_chains(mask, steps=2)
    # Row 0: state 2 precedes the first response token 3 and predicts 4; state 4 predicts the last, 6.
    assert chains.anchors[0].tolist() == [2, 3, 4]
    assert chains.num_steps.tolist() == [[2, 2, 1], [2, 1, 0], [0, 0, 0]]
    assert chains.anchors[1, :2].tolist() == [0, 1]
    torch.manual_seed(0)
    some = find_chains(mask, steps=2, fraction=0.5)
    assert (some.num_steps > 0).sum(1).tolist() == [2, 1, 0]
    assert set(some.anchors[0].tolist()) < {2, 3, 4}


def test_accepted_lengths_and_rounds():
    correct = torch.tensor([[True, True, False, True], [False, True, True, True], [True] * 4])
    assert accepted_lengths(correct).tolist() == [2, 0, 4]
    # Round 1 at state 0 emits 3 tokens, the next starts at state 3.
    assert walk_rounds([2, 9, 9, 0, 1, 9], 4) == [(4, 2), (4, 0), (4, 1)]
    assert walk_rounds([3, 2, 1], 4) == [(4, 2)]  # three tokens and no more: the draft would go on
