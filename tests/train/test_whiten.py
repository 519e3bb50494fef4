"""Whitening: from the tap's statistics, without a change in what the drafter computes, and only at the start."""

import pytest
import torch
from bytes_tokenizer import VOCABULARY as BYTES
from distill_line import make_line
from tiny import tiny_drafter, tiny_target

from osprey.train.distill import load_drafter
from osprey.train.feature_data import FeatureDataset, RowSubset
from osprey.train.whiten import SINK, whiten_context, whitening


def test_whitening_takes_the_mean_out_and_evens_the_dimensions():
    torch.manual_seed(0)
    states = torch.randn(400, 6) * torch.tensor([1.0, 2, 30, 4, 5, 6]) + torch.tensor([50.0, 0, 10, 0, 0, 1])
    white = states @ whitening(states).T
    torch.testing.assert_close(white.std(0), torch.ones(6))
    torch.testing.assert_close(white.mean(0), torch.zeros(6), rtol=0, atol=1e-4)


@pytest.mark.parametrize("width", [24, 40])  # narrower and wider than the target
def test_fc_of_a_converted_drafter_only(tmp_path, width):
    line = make_line(tmp_path)
    tiny_drafter(tiny_target(vocab_size=BYTES), hidden_size=width).save_pretrained(line / "drafter")
    drafter = load_drafter(str(line / "drafter"))
    features = FeatureDataset([line / "features"])
    data = RowSubset(features, list(range(len(features))))
    before = drafter.fc.weight.detach().clone()
    assert not whiten_context(drafter, data)  # the test's drafter has random weights, as if it were trained
    assert torch.equal(drafter.fc.weight, before)

    size, tap_size = drafter.config.hidden_size, drafter.config.target_hidden_size
    with torch.no_grad():
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, 2 * tap_size :] = torch.eye(size, tap_size)
        for layer in drafter.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.weight[:, :size] = 0
    ids = data[0]["input_ids"][None]
    taps = data[0]["taps"][None].float()
    with torch.no_grad():
        logits = drafter(ids, drafter.project_taps(taps)).logits
        assert whiten_context(drafter, data)
        assert torch.equal(drafter(ids, drafter.project_taps(taps)).logits, logits)
        contexts = torch.cat([drafter.project_taps(data[i]["taps"][SINK:].float()) for i in range(len(data))])
    expected = (torch.arange(size) < tap_size).float()
    torch.testing.assert_close(contexts.std(0), expected, rtol=1e-3, atol=1e-3)
    assert not whiten_context(drafter, data)
