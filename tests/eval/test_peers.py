"""Peers of a drafter: that all of them are counted alike, and keep the target's text."""

import copy

import pytest
import torch
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import oracle, tiny_drafter, tiny_prompt, tiny_target
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator

from osprey.eval.acceptance import greedy_or_sampled, timed_generate
from osprey.eval.baselines import make_eagle3
from osprey.eval.peers import Peer, drafter_peer, load_peer, run_peer, without_copies
from osprey.modeling import record_acceptance

GREEDY = greedy_or_sampled(0)


def inputs_of(prompt):
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}


def run(target, peer, length, tokens, **changes):
    return run_peer(target, None, peer, length, inputs_of(tiny_prompt()), max_new_tokens=tokens, **GREEDY | changes)[0]


def mal(run):
    return sum(accepted + 1 for _, accepted in run.rounds) / len(run.rounds)


@pytest.mark.parametrize("drafted", [1, 3])
@pytest.mark.parametrize("right", [True, False])
def test_always_right_and_always_wrong(monkeypatch, drafted, right):
    target, prompt = tiny_target(), tiny_prompt()
    tokens = 1 + 4 * (drafted + 1)  # the prefill's, and four rounds if all is accepted
    truth = target.generate(**inputs_of(prompt), max_new_tokens=tokens, **GREEDY)
    proposed = truth if right else (truth + 1) % target.config.vocab_size
    oracle(monkeypatch, proposed, rate=1.0)
    found = run(target, drafter_peer("d", tiny_drafter(target)), str(drafted), tokens)
    assert mal(found) == (drafted + 1 if right else 1)
    assert found.token_ids == truth[0, prompt.shape[1] :].tolist()


def test_the_recorder_counts_as_the_drafter_does(monkeypatch):
    target = tiny_target()
    truth = target.generate(**inputs_of(tiny_prompt()), max_new_tokens=30, **GREEDY)
    oracle(monkeypatch, truth, rate=0.6)
    drafter = tiny_drafter(target)
    _, rounds = run_peer(
        target, None, drafter_peer("d", drafter), "4", inputs_of(tiny_prompt()), max_new_tokens=30, **GREEDY
    )
    with record_acceptance() as calls:
        target.generate(**inputs_of(tiny_prompt()), assistant_model=drafter, max_new_tokens=30, **GREEDY)
    assert [(each.drafted, each.accepted) for each in rounds] == calls[0].rounds
    assert 0 < sum(each.accepted for each in rounds) < sum(each.drafted for each in rounds)
    assert all(each.draft_seconds > 0 and each.verify_seconds > 0 for each in rounds)
    assert "_get_candidate_generator" not in vars(target)


def test_an_assistant_that_is_the_target_is_always_right():
    target = tiny_target()
    assistant = Peer(
        "twin", "assistant", copy.deepcopy(target), settings={"num_assistant_tokens_schedule": "constant"}
    )
    # The prefill verifies a draft as well here: 4 tokens, which do not count, before 4 rounds of as many.
    found = run(target, assistant, "3", 20)
    assert found.rounds == [(3, 3)] * 4 and mal(found) == 4
    assert found.token_ids == run(target, Peer("plain", "plain"), "default", 20).token_ids


def test_prompt_lookup_is_counted_too():
    target, tokens = tiny_target(seed=3), 60
    found = run(target, Peer("lookup", "prompt lookup"), "2", tokens)
    plain = run(target, Peer("plain", "plain"), "default", tokens)
    assert found.token_ids == plain.token_ids
    # The same drafts, asked for one after the other, and compared with the finished text.
    ids, at, rounds = [*tiny_prompt()[0].tolist(), *plain.token_ids], tiny_prompt().shape[1], []
    lookup = PromptLookupCandidateGenerator(num_output_tokens=2, max_length=len(ids))
    while at < len(ids):
        draft = lookup.get_candidates(torch.tensor([ids[:at]]))[0][0, at:].tolist()
        right = [token == own for token, own in zip(draft, ids[at : len(ids) - 1], strict=False)]
        rounds.append((len(draft), right.index(False) if False in right else len(right)))
        at += rounds[-1][1] + 1
    assert found.rounds == rounds[1:]  # the first is the prefill's
    assert sum(accepted for _, accepted in found.rounds) > 0


def test_settings_of_one_run_do_not_reach_the_next(monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.generation_config.update(num_assistant_tokens=4, assistant_confidence_threshold=0.5)
    peer = drafter_peer("d", drafter)
    longest = {length: max(run(target, peer, length, 24).rounds)[0] for length in ("default", "6", "1")}
    assert longest["6"] == 6 and longest["1"] == 1 and longest["default"] <= 4
    peer.prepare("adaptive", None)
    assert drafter.generation_config.adaptive_draft_length is True
    peer.prepare("default", None)
    assert drafter.generation_config.adaptive_draft_length is False
    assert drafter.generation_config.assistant_confidence_threshold == 0.5


def test_without_copies():
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.generation_config.lookup_num_tokens = 7
    peer = drafter_peer("d", drafter)
    without_copies(peer).prepare("default", None)
    assert drafter.generation_config.lookup_num_tokens == 0
    peer.prepare("default", None)
    assert drafter.generation_config.lookup_num_tokens == 7


def test_a_fixed_length_bounds_the_copies_too():
    """A tiny target runs in circles: nearly every draft could be a long copy."""
    target = tiny_target(seed=3)
    drafter = tiny_drafter(target)
    drafter.generation_config.lookup_num_tokens = 7
    peer = drafter_peer("d", drafter)
    assert max(run(target, peer, "2", 60).rounds)[0] == 2
    peer.prepare("default", None)
    assert drafter.generation_config.lookup_num_tokens == 7


def test_an_assistant_drafts_as_it_does_without_us(folders):
    """Its own settings, and where it has none, those that transformers gives it."""
    root, target, osprey = folders
    peer = load_peer("small", str(root / "small"), target, bytes_tokenizer(), osprey, False)
    generator = AssistedCandidateGenerator(
        tiny_prompt(), peer.model, target.generation_config, {}, logits_processor=None
    )
    assert peer.settings["num_assistant_tokens"] == generator.num_assistant_tokens
    assert peer.settings["assistant_confidence_threshold"] == generator.assistant_confidence_threshold


def test_lengths_that_a_peer_has():
    wanted = ["default", "2", "adaptive"]
    assert Peer("plain", "plain").draft_lengths(wanted) == ["default"]
    assert Peer("l", "prompt lookup").draft_lengths(wanted) == ["default", "2"]
    assert Peer("d", "drafter").draft_lengths(wanted) == wanted


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("peers")
    target = tiny_target(vocab_size=VOCABULARY)
    drafter = tiny_drafter(target)
    make_eagle3(target, drafter, 1, 0).save_pretrained(root / "eagle3")
    drafter.save_pretrained(root / "ablation")
    for name, changes in (("small", {"num_hidden_layers": 4}), ("other", {"vocab_size": VOCABULARY + 8})):
        tiny_target(**{"vocab_size": VOCABULARY} | changes).save_pretrained(root / name)
        bytes_tokenizer().save_pretrained(root / name)
    tiny_target(vocab_size=VOCABULARY).save_pretrained(root / "swapped")
    swapped = bytes_tokenizer()
    swapped.add_tokens(["another"])
    swapped.save_pretrained(root / "swapped")
    tiny_drafter(tiny_target(vocab_size=VOCABULARY, hidden_size=40)).save_pretrained(root / "foreign")
    return root, target, drafter_peer("osprey", drafter)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"), [("eagle3", "drafter"), ("ablation", "drafter"), ("small", "assistant"), ("other", "assistant")]
)
def test_loaded_peers_keep_the_text(folders, name, kind, quantize):
    root, target, osprey = folders
    tokenizer = bytes_tokenizer()
    peer = load_peer(name, str(root / name), target, tokenizer, osprey, quantize)
    assert peer.kind == kind and (peer.tokenizer is not None) == (name == "other")
    inputs = inputs_of(tiny_prompt())
    found, _ = run_peer(target, tokenizer, peer, "3", inputs, max_new_tokens=12, **GREEDY)
    assert found.token_ids == timed_generate(target, inputs, max_new_tokens=12, **GREEDY).token_ids
    assert found.rounds
    if kind == "drafter":
        assert peer.settings == osprey.settings


def test_peers_that_do_not_fit(folders):
    root, target, osprey = folders
    with pytest.raises(ValueError, match="another vocabulary than the target, of the same size"):
        load_peer("swapped", str(root / "swapped"), target, bytes_tokenizer(), osprey, False)
    with pytest.raises(ValueError, match="made for a target with a hidden size of 40"):
        load_peer("foreign", str(root / "foreign"), target, bytes_tokenizer(), osprey, False)
