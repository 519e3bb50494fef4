"""The drafter as a model: a backbone's function, attention implementations, masks, gradients."""

import pytest
import torch
from tiny import SHAPE, DraftLog, copy_blocks, tiny_drafter, tiny_prompt, tiny_target
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, SmolLM3Config
from transformers.cache_utils import Cache, DynamicCache

from osprey.modeling import OspreyConfig, OspreyDrafter
from osprey.modeling.layers_osprey import BufferedLayer

FAMILIES = {
    "llama": (LlamaConfig, {}, {}),
    "llama, all biases": (
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True},
        {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    ),
    "llama, one head's keys": (LlamaConfig, {"num_key_value_heads": 1}, {"num_key_value_heads": 1}),
    "llama, wide heads": (LlamaConfig, {"head_dim": 16}, {"head_dim": 16}),
    "llama, gelu": (LlamaConfig, {"hidden_act": "gelu"}, {"hidden_act": "gelu"}),
    "qwen2": (Qwen2Config, {}, {"attention_bias": True}),
    "qwen3": (Qwen3Config, {}, {"qk_norm": True}),
    "smollm3, one block without rotary": (
        SmolLM3Config,
        {"no_rope_layers": [1, 0], "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"no_rope_layers": [1, 0], "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "qwen3, attention bias": (
        Qwen3Config,
        {"attention_bias": True},
        {"qk_norm": True, "attention_bias": True, "attention_output_bias": True},
    ),
}
ROPES = {
    "default": {"rope_theta": 500.0},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def backbone_and_drafter(config_class, backbone_changes=None, drafter_changes=None, **changes):
    shape = SHAPE | {"num_hidden_layers": 2, "max_position_embeddings": 64} | changes
    torch.manual_seed(0)
    backbone = AutoModelForCausalLM.from_config(config_class(**{**shape, **(backbone_changes or {})})).eval()
    for name, tensor in backbone.named_parameters():
        if "norm" in name or name.endswith(
            "bias"
        ):  # ones and zeros at first: swapped or forgotten ones would not show
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    config = shape | {"target_num_hidden_layers": 6, **(drafter_changes or {})}
    return backbone, copy_blocks(backbone, OspreyDrafter(OspreyConfig(**config)).eval())


@torch.no_grad()
def assert_same_function(backbone, drafter, length):
    ids = tiny_prompt(length)
    expected = backbone(ids).logits
    for context in (None, torch.randn(1, length, drafter.config.hidden_size)):
        torch.testing.assert_close(drafter(ids, context).logits, expected, rtol=1e-4, atol=1e-4)
    # The same in two parts through a cache.
    cache = DynamicCache(config=drafter.config)
    first, rest = drafter(ids[:, :5], cache=cache).logits, drafter(ids[:, 5:], cache=cache).logits
    if "dynamic" not in str(drafter.config.rope_parameters) and length < 30:  # those rotate keys anew on long input
        torch.testing.assert_close(torch.cat([first, rest], dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_starts_as_its_backbone(family, tie):
    backbone, drafter = backbone_and_drafter(*FAMILIES[family], tie_word_embeddings=tie)
    assert_same_function(backbone, drafter, length=20)


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_projections_compute_the_same(family):
    backbone, drafter = backbone_and_drafter(*FAMILIES[family])
    names = drafter.state_dict().keys()
    drafter.fuse_projections()
    drafter.fuse_projections()  # a second call finds nothing left to do
    assert len(drafter.state_dict()) < len(names)
    assert_same_function(backbone, drafter, length=20)


@pytest.mark.parametrize("length", [12, 90])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_type_is_the_backbone_s(rope, length):
    parameters = {"rope_type": rope, "rope_theta": 10000.0, **ROPES[rope]}
    backbone, drafter = backbone_and_drafter(LlamaConfig, rope_parameters=parameters)
    assert_same_function(backbone, drafter, length)


def test_every_rope_type_changes_the_function():
    """Without this the test above could pass with a rope type that is silently ignored on both sides."""
    seen = []
    for rope, own in ROPES.items():
        parameters = {"rope_type": rope, "rope_theta": 10000.0, **own}
        _, drafter = backbone_and_drafter(LlamaConfig, rope_parameters=parameters)
        with torch.no_grad():
            seen.append(drafter(tiny_prompt(90)).logits)
    for i, one in enumerate(seen):
        assert all((one - other).abs().max() > 1e-2 for other in seen[:i])


def test_left_padding_changes_nothing():
    drafter = tiny_drafter(tiny_target())
    ids, context = tiny_prompt(9), torch.randn(1, 9, 24)
    padded = F.pad(ids, (4, 0))
    mask = F.pad(torch.ones_like(ids), (4, 0))
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = drafter(ids, context).logits
        found = drafter(padded, F.pad(context, (0, 0, 4, 0), value=7.0), mask, position_ids).logits
    torch.testing.assert_close(found[:, 4:], expected, rtol=1e-4, atol=1e-4)


def unroll_mask(length: int, step: int) -> torch.Tensor:
    """Keys of a training unroll: causal over block 0, the own column of each later block (`[1, 1, T, (k+1)T]`)."""
    blocks = [torch.ones(length, length).tril()] + [torch.eye(length)] * step
    return torch.cat(blocks, dim=1).bool()[None, None]


@pytest.mark.parametrize("form", ["none", "padding", "unroll, boolean", "unroll, additive"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_eager_and_sdpa_agree(form, qk_norm):
    drafter = tiny_drafter(tiny_target(), qk_norm=qk_norm)
    ids, context = tiny_prompt(8), torch.randn(1, 8, 24)
    found = []
    for implementation in ("eager", "sdpa"):
        drafter.set_attn_implementation(implementation)
        assert drafter.config._attn_implementation == implementation
        cache = DynamicCache(config=drafter.config)
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]) if form == "padding" else None
        with torch.no_grad():
            output = drafter(ids, context, attention_mask=mask, cache=cache)
            if form.startswith("unroll"):
                mask = unroll_mask(8, 1)
                if form.endswith("additive"):
                    mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
                position_ids = torch.arange(8)[None] + 1
                output = drafter(ids.roll(-1, 1), output.last_hidden_state, mask, position_ids, cache)
        found.append(output.logits[:, 3:])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_flash_attention_is_selectable_or_missing():
    drafter = tiny_drafter(tiny_target())
    try:
        drafter.set_attn_implementation("flash_attention_2")
    except (ImportError, ValueError) as error:
        assert "flash" in str(error).lower() and "support" not in str(error).lower(), error
    else:
        assert drafter.config._attn_implementation == "flash_attention_2"


@torch.no_grad()
def test_an_unrolled_step_is_a_draft_step():
    """Column t of unroll step k equals drafting k tokens behind position t, one at a time, without a mask."""
    drafter = tiny_drafter(tiny_target())
    ids, context = tiny_prompt(12), torch.randn(1, 12, 24)
    length, steps = 8, 3
    cache = DynamicCache(config=drafter.config)
    unrolled, state = [], context[:, :length]
    for k in range(steps):
        mask = unroll_mask(length, k)
        output = drafter(ids[:, k : k + length], state, mask, torch.arange(length)[None] + k, cache)
        state = output.last_hidden_state
        unrolled.append(output.logits)
    for t in range(length):
        cache = DynamicCache(config=drafter.config)
        output = drafter(ids[:, : t + 1], context[:, : t + 1], cache=cache)
        for k in range(steps):
            if k > 0:
                output = drafter(ids[:, t + k : t + k + 1], output.last_hidden_state[:, -1:], cache=cache)
            torch.testing.assert_close(output.logits[:, -1], unrolled[k][:, t], rtol=1e-4, atol=1e-4)


def test_logits_outside_the_shortlist_are_minus_infinity():
    shortlist = [2, 5, 6, 17, 40]
    drafter = tiny_drafter(tiny_target(), shortlist=shortlist)
    with torch.no_grad():
        output = drafter(tiny_prompt(6), logits_to_keep=2)
    assert output.logits.shape == (1, 2, 48) and output.last_hidden_state.shape == (1, 6, 24)
    finite = torch.zeros(48, dtype=torch.bool)
    finite[shortlist] = True
    assert torch.equal(torch.isfinite(output.logits[0, 0]), finite) and torch.equal(drafter.t2d, finite)
    assert torch.equal(drafter.d2t + torch.arange(5), torch.tensor(shortlist))
    narrow = drafter.draft_logits(output.last_hidden_state)[:, -2:]
    torch.testing.assert_close(output.logits[..., shortlist], narrow)


@pytest.mark.parametrize("tie", [True, False])
def test_rows_that_pad_the_vocabulary_are_never_drafted(tie):
    """Their rows are zero, so that they would win wherever all tokens score below zero."""
    target = tiny_target()
    drafter = tiny_drafter(target, target_num_tokens=40, tie_word_embeddings=tie)
    with torch.no_grad():
        drafter.lm_head.weight[40:] = 0
        drafter.norm.weight.fill_(1.0)
        logits = drafter(tiny_prompt(6)).logits
        narrow = drafter.draft_logits(drafter.run_layers(tiny_prompt(6)))
    assert logits.shape == (1, 6, 48) and narrow.shape == (1, 6, 40)
    assert torch.isfinite(logits[..., :40]).all() and (logits[..., 40:] == -torch.inf).all()
    assert drafter.draft_ids.tolist() == list(range(40)) and drafter.head_weight.shape[0] == 40
    drafter.norm.weight.data.zero_()  # all scores equal, those of padding too
    for do_sample in (False, True):
        log = DraftLog()
        with pytest.MonkeyPatch.context() as patch:
            log.start(patch)
            target.generate(tiny_prompt(), max_new_tokens=60, do_sample=do_sample, assistant_model=drafter)
        drafted = {step[1][0, -1].item() for step in log.steps if step[1].shape[1] > step[0]}
        assert drafted and max(drafted) < 40


def test_gradients_reach_fc_and_the_context_halves_at_the_first_step():
    """`fc` learns because the context half is zero but `fc` is not; the half learns because its input is not zero."""
    _, drafter = backbone_and_drafter(LlamaConfig)
    h = drafter.config.hidden_size
    with torch.no_grad():  # the initial value in the definition: the identity on the deepest tap
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, 2 * h :] = torch.eye(h)
    taps = torch.randn(1, 10, 3 * h)
    loss = drafter(tiny_prompt(10), drafter.project_taps(taps)).logits.logsumexp(-1).mean()
    loss.backward()
    for layer in drafter.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            assert projection.weight.grad[:, :h].abs().max() > 0
    # Behind halves that are exactly zero fc's own gradient is zero at step 0; one update of the halves opens it.
    assert drafter.fc.weight.grad.abs().max() == 0
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter -= 0.1 * parameter.grad
    drafter.zero_grad()
    drafter(tiny_prompt(10), drafter.project_taps(taps)).logits.logsumexp(-1).mean().backward()
    assert drafter.fc.weight.grad.abs().max() > 0


def test_gradients_flow_through_an_unroll_to_the_first_context():
    drafter = tiny_drafter(tiny_target())
    ids, context = tiny_prompt(10), torch.randn(1, 10, 24, requires_grad=True)
    cache, state = DynamicCache(config=drafter.config), context[:, :7]
    for k in range(3):
        output = drafter(ids[:, k : k + 7], state, unroll_mask(7, k), torch.arange(7)[None] + k, cache)
        state = output.last_hidden_state
    output.logits[:, 4].sum().backward()  # reads columns 0..4 of block 0 and column 4 of the later blocks
    assert context.grad[:, :5].abs().amin(dim=(1, 2)).isfinite().all()
    assert (context.grad[0].abs().amax(dim=-1) > 0).tolist() == [True] * 5 + [False] * 5


def test_buffered_keys_and_values_are_those_of_a_dynamic_cache():
    ours, theirs = Cache(layer_class_to_replicate=BufferedLayer), DynamicCache()
    generator = torch.Generator().manual_seed(0)
    length = 0
    for new, dropped in ((5, 0), (1, 1), (1, 0), (3, 2), (40, 0), (1, 30), (1, 0), (200, 1), (1, 0)):
        length += new - dropped
        for layer in (0, 1):
            states = torch.randn(2, 1, 3, new, 4, generator=generator)
            for one, other in zip(ours.update(*states, layer), theirs.update(*states, layer), strict=True):
                assert torch.equal(one, other)
        ours.crop(-dropped)
        theirs.crop(-dropped)
        assert ours.get_seq_length() == theirs.get_seq_length() == length
    before = ours.layers[0].buffers[0].data_ptr()
    ours.crop(-100)
    ours.update(*torch.zeros(2, 1, 3, 100, 4), 0)
    assert ours.layers[0].buffers[0].data_ptr() == before  # room is used again, nothing was copied


def test_gradient_checkpointing_is_refused():
    with pytest.raises(ValueError, match="does not support activation checkpointing"):
        tiny_drafter(tiny_target()).activation_checkpointing_enable()
