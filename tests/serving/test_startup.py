"""What the plugin refuses at start-up, on stand-ins for vLLM's config objects."""

from types import SimpleNamespace

import pytest
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_drafter, tiny_target

from osprey.modeling import target_osprey, vocabulary_sha256
from osprey.serving import startup
from osprey.serving.startup import check_start_up
from osprey.serving.vllm_config import OspreyVllmConfig


def vllm_config(served="org/target", shape=(VOCABULARY, 32, 5), speculation=(), **changes):
    """As vLLM has it for a drafter made for org/target, whose tokenizer is `bytes_tokenizer`."""
    drafter = tiny_drafter(tiny_target(vocab_size=VOCABULARY)).config.to_dict()
    drafter |= {"target": "org/target", "target_tokenizer_sha256": vocabulary_sha256(bytes_tokenizer())}
    vocab_size, hidden_size, num_layers = shape
    target = SimpleNamespace(
        model=served,
        get_vocab_size=lambda: vocab_size,
        get_hidden_size=lambda: hidden_size,
        get_total_num_hidden_layers=lambda: num_layers,
    )
    read = OspreyVllmConfig(**drafter | changes)
    speculative = {"method": "eagle3", "parallel_drafting": False} | dict(speculation)
    speculative = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=read), **speculative)
    return SimpleNamespace(model_config=target, speculative_config=speculative)


def check(config, tokenizer=None):
    check_start_up(config, lambda target: tokenizer or bytes_tokenizer())


def other_tokenizer():
    """With one token more, which is another vocabulary."""
    tokenizer = bytes_tokenizer()
    tokenizer.add_tokens(["<other>"])
    tokenizer.name_or_path = "org/other"
    return tokenizer


def test_the_right_target_is_served(tmp_path):
    check(vllm_config())
    check(vllm_config(served="Org/Target"))  # the Hub's names have no case
    check(vllm_config(served=str(tmp_path)))  # a folder has no name to compare
    check_start_up(vllm_config(), lambda target: None)  # vLLM's skip_tokenizer_init
    check_start_up(vllm_config(), lambda target: SimpleNamespace(get_vocab=dict))  # not transformers'
    check(vllm_config(target_tokenizer_sha256=None), other_tokenizer())  # an older drafter


def test_a_drafter_for_every_target(tmp_path):
    check(vllm_config(served="org/other", target=None), other_tokenizer())
    with pytest.raises(ValueError, match="made for a target with a hidden size of 32"):
        check(vllm_config(target=None, shape=(VOCABULARY, 64, 5)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"served": "org/other"}, "made for org/target, but org/other is served: .* to draft for it all the same"),
        ({"shape": (VOCABULARY, 32, 6)}, "made for org/target with a number of layers of 5, .* served model has 6"),
        ({"speculation": {"method": "draft_model"}}, "'eagle3', but here it has the method 'draft_model': run `vllm"),
        ({"speculation": {"parallel_drafting": True}}, "token by token: leave `parallel_drafting` out"),
    ],
)
def test_what_does_not_belong_together(changes, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        check(vllm_config(**changes))
    assert "\n" not in str(error.value)


def test_another_tokenizer():
    with pytest.raises(ValueError, match=r"the tokenizer of org/target, but the served model's \(org/other\)"):
        check(vllm_config(), other_tokenizer())


def test_a_drafter_alone():
    config = vllm_config()
    config.speculative_config = None
    with pytest.raises(ValueError, match="but here it is the served model itself: run `vllm serve TARGET"):
        check(config)


def test_taps_that_vllm_would_choose():
    """A config class of another package keeps the keys of config.json, but not the taps as vLLM counts them."""
    config = vllm_config()
    del config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
    with pytest.raises(ValueError, match="read the drafter's config without Osprey's taps"):
        check(config)


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_parameters", "target_layer_ids", "qk_norm"])
def test_a_config_with_a_gap_is_refused_where_vllm_reads_it(key):
    with pytest.raises(ValueError, match=f"has no {key}, which an engine would fill with a default"):
        vllm_config(**{key: None})


def test_hashes_agree_with_those_in_drafters():
    for tokenizer in (bytes_tokenizer(), other_tokenizer()):
        assert startup.vocabulary_sha256(tokenizer.get_vocab()) == vocabulary_sha256(tokenizer)


def test_both_agree_on_what_is_a_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "folder").mkdir(parents=True)
    names = ("org/target", "org/folder", "target", "org/target/sub", "./target", "/target", "~/target", "")
    found = [name for name in names if startup.is_hub_id(name)]
    assert found == [name for name in names if target_osprey.is_hub_id(name)] == ["org/target"]
