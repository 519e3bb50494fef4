"""What else `generate` takes and returns: processors, stopping criteria, streamers, outputs, threads."""

import threading

import pytest
import torch
from tiny import VOCABULARY, assert_same_text, oracle, tiny_drafter, tiny_prompt, tiny_target
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from osprey.modeling import record_acceptance

LETTERS = [chr(ord("A") + i) for i in range(VOCABULARY)]


class Bias(LogitsProcessor):
    """Depends on the whole text so far."""

    def __call__(self, input_ids, scores):
        return scores + 3.0 * torch.sin(torch.arange(VOCABULARY) * input_ids.sum())


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 1},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(0, VOCABULARY, 3))},
    "bad_words": {"bad_words_ids": [[i] for i in range(10)] + [[20, 21], [30, 5]]},
    "forced_eos": {"forced_eos_token_id": 4, "eos_token_id": 4},
    "forced_eos outside the shortlist": {"forced_eos_token_id": 5, "eos_token_id": 5},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda batch, ids: [int(ids.sum()) % 40, 7, 41, len(ids) % 48]},
    "one allowed": {"prefix_allowed_tokens_fn": lambda batch, ids: [len(ids) % 48]},
    "suppress": {"suppress_tokens": list(range(5, 30))},
    "begin_suppress": {"begin_suppress_tokens": list(range(5, 30))},
    "sequence_bias": {"sequence_bias": [[[7], 4.0], [[7, 9], 9.0]]},
    "exponential_decay": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 3},
    "custom": {"logits_processor": [Bias()]},
    "several": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[3]],
        "renormalize_logits": True,
    },
}
EVEN = list(range(0, VOCABULARY, 2))


@pytest.mark.parametrize("shortlist", [None, EVEN])
@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_processors(name, shortlist, monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target, shortlist=shortlist)
    kwargs = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0} | PROCESSORS[name]
    kwargs |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain = target.generate(tiny_prompt(), **kwargs)
    plain_text = target.generate(tiny_prompt(), max_new_tokens=16, do_sample=False)
    assert not torch.equal(plain.sequences, plain_text) or name == "begin_suppress"  # the option does something
    for rate in (0.0, 0.9):
        with monkeypatch.context() as patch:
            oracle(patch, plain.sequences, rate)
            assisted = target.generate(tiny_prompt(), assistant_model=drafter, **kwargs)
        assert torch.equal(plain.sequences, assisted.sequences)
        for ours, theirs in ((assisted.scores, plain.scores), (assisted.logits, plain.logits)):
            torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-3, atol=1e-3)


def test_processors_also_steer_the_draft(monkeypatch):
    """Drafts are drawn from processed logits: where a processor allows one token, the random drafter is right."""
    target = tiny_target()
    with record_acceptance() as calls:
        target.generate(
            tiny_prompt(),
            max_new_tokens=13,
            do_sample=False,
            assistant_model=tiny_drafter(target),
            prefix_allowed_tokens_fn=lambda batch, ids: [len(ids) % 48],
        )
    assert calls[0].rounds == [(5, 5), (5, 5)]


def test_every_output(monkeypatch):
    target = tiny_target(attn_implementation="eager")
    target.set_attn_implementation("eager")
    kwargs = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    flags = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    plain = target.generate(tiny_prompt(), **kwargs, **dict.fromkeys(flags, True))
    oracle(monkeypatch, plain.sequences, 0.8)
    drafter = tiny_drafter(target)
    assisted = target.generate(tiny_prompt(), assistant_model=drafter, **kwargs, **dict.fromkeys(flags, True))
    assert torch.equal(plain.sequences, assisted.sequences)
    assert plain.keys() == assisted.keys()
    for name in ("hidden_states", "attentions"):
        assert len(assisted[name]) == len(plain[name]) == 16
        for ours, theirs in zip(assisted[name], plain[name], strict=True):
            assert len(ours) == len(theirs)
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert assisted.cache.get_seq_length() == plain.cache.get_seq_length()
    alone = target.generate(tiny_prompt(), assistant_model=drafter, **kwargs)
    assert alone.hidden_states is None and alone.scores is None and torch.equal(alone.sequences, plain.sequences)


def letters() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="A"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class Recorder(BaseStreamer):
    def __init__(self):
        self.puts, self.ended = [], False

    def put(self, value):
        assert not self.ended
        self.puts.append(value)

    def end(self):
        self.ended = True


class SumStop(StoppingCriteria):
    """Stateful on purpose: it must be asked about every token of the text once, in order, and about nothing else."""

    def __init__(self, modulus):
        self.modulus, self.asked = modulus, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append((input_ids.tolist(), None if scores is None else len(scores)))
        return torch.tensor([int(input_ids[0, 11:].sum()) % self.modulus == 0])


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    ("family", "modulus"), [("llama", n) for n in (5, 7, 11, 13, 1000)] + [("gemma3", n) for n in (7, 11, 19)]
)
def test_custom_stopping_criterion_inside_a_draft(family, modulus, rate, monkeypatch):
    target = tiny_target(family)
    flags = dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states"), True)
    results = []
    truth = target.generate(tiny_prompt(), max_new_tokens=24, do_sample=False)
    for assistant in (None, tiny_drafter(target)):
        if assistant is not None:
            oracle(monkeypatch, truth, rate)
        criterion, streamer = SumStop(modulus), Recorder()
        with record_acceptance() as calls:
            output = target.generate(
                tiny_prompt(),
                max_new_tokens=24,
                do_sample=False,
                assistant_model=assistant,
                stopping_criteria=[criterion],
                streamer=streamer,
                **flags,
            )
        assert streamer.ended
        streamed = torch.cat([value.flatten() for value in streamer.puts])
        assert torch.equal(streamed, output.sequences[0])
        lengths = [len(output[name]) for name in ("scores", "logits", "hidden_states")]
        results.append((output.sequences.tolist(), criterion.asked, lengths, output.cache.get_seq_length()))
    assert results[0] == results[1]
    # A round counts what it emitted, not what follows the stop in its draft.
    assert 1 + sum(right + 1 for _, right in calls[0].rounds) == output.sequences.shape[1] - 11
    # The cache that comes back can be continued.
    cache = output.cache
    assert "crop" not in vars(cache)
    ids = torch.cat([output.sequences, tiny_prompt(4, seed=2)], dim=1)
    continued = target.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)
    assert_same_text(target, target.generate(ids, max_new_tokens=8, do_sample=False), continued)


@pytest.mark.parametrize("place", range(1, 12))
def test_stop_strings_inside_a_draft(place, monkeypatch):
    target, tokenizer = tiny_target(), letters()
    truth = target.generate(tiny_prompt(), max_new_tokens=24, do_sample=False)
    stop = tokenizer.decode(truth[0, 11 + place : 13 + place])
    assert len(stop) == 2
    kwargs = {"max_new_tokens": 24, "do_sample": False, "stop_strings": [stop], "tokenizer": tokenizer}
    plain = target.generate(tiny_prompt(), **kwargs)
    assert plain.shape[1] < truth.shape[1]
    oracle(monkeypatch, truth, 1.0)
    for length in (2, 5):
        drafter = tiny_drafter(target)
        drafter.generation_config.num_assistant_tokens = length
        assert torch.equal(plain, target.generate(tiny_prompt(), assistant_model=drafter, **kwargs))


def test_max_time_stops_at_once():
    target = tiny_target()
    kwargs = {"max_new_tokens": 24, "do_sample": False, "max_time": 0.0}
    plain = target.generate(tiny_prompt(), **kwargs)
    assert torch.equal(plain, target.generate(tiny_prompt(), assistant_model=tiny_drafter(target), **kwargs))


def test_streamers_get_exactly_the_text(monkeypatch, capsys):
    target, tokenizer = tiny_target(), letters()
    drafter = tiny_drafter(target)
    plain = target.generate(tiny_prompt(), max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(plain[0, 11:])
    oracle(monkeypatch, plain, 0.8)
    kwargs = {"max_new_tokens": 24, "do_sample": False, "assistant_model": drafter}
    target.generate(tiny_prompt(), streamer=TextStreamer(tokenizer, skip_prompt=True), **kwargs)
    assert capsys.readouterr().out.strip() == text
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = threading.Thread(target=target.generate, args=(tiny_prompt(),), kwargs={"streamer": streamer, **kwargs})
    thread.start()
    assert "".join(streamer) == text
    thread.join()
    # One call per round: the accepted tokens and, last, the target's own.
    recorder = Recorder()
    with record_acceptance() as calls:
        target.generate(tiny_prompt(), streamer=recorder, **kwargs)
    assert [value.shape[1] for value in recorder.puts[2:]] == [right + 1 for _, right in calls[0].rounds]


@pytest.mark.parametrize("weight", [0.3, 0.99])
def test_ensemble_weight(weight, monkeypatch):
    """Greedy with a weight keeps a draft where it is the mixture's best; by hand from the two models' logits."""
    target = tiny_target()
    drafter = tiny_drafter(target, shortlist=EVEN)
    drafter.generation_config.num_assistant_tokens = 1
    kwargs = {"max_new_tokens": 16, "do_sample": False, "assistant_ensemble_weight": weight}
    text = target.generate(tiny_prompt(), assistant_model=drafter, **kwargs)
    ids, mixed = tiny_prompt(), 0
    with torch.no_grad():
        ids = torch.cat([ids, target(ids).logits[:, -1:].argmax(-1)], dim=1)
        while ids.shape[1] < 27:
            output = target(ids, output_hidden_states=True)
            p = output.logits[:, -1].softmax(-1)
            if ids.shape[1] < 26:
                taps = [output.hidden_states[i + 1][:, :-1] for i in drafter.config.target_layer_ids]
                q = drafter(ids[:, 1:], drafter.project_taps(torch.cat(taps, -1))).logits[:, -1].softmax(-1)
                choice = (weight * p + (1 - weight) * q).argmax(-1)
                accepted = (choice == q.argmax(-1)).all()
            else:
                choice, accepted = p.argmax(-1), False
            mixed += int((choice != p.argmax(-1)).all())
            ids = torch.cat([ids, choice[None]], dim=1)
            if accepted:
                ids = torch.cat([ids, target(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(text, ids[:, :27])
    assert weight > 0.9 or mixed > 0  # the weight does something


@pytest.mark.parametrize("shared", [True, False])
def test_threads_with_their_own_targets(shared):
    targets = [tiny_target("llama", seed) for seed in range(3)]
    drafters = [tiny_drafter(targets[0])] * 3 if shared else [tiny_drafter(target) for target in targets]
    prompts = [tiny_prompt(6 + i, i) for i in range(3)]
    kwargs = {"max_new_tokens": 32, "do_sample": False}
    plain = [target.generate(prompt, **kwargs) for target, prompt in zip(targets, prompts, strict=True)]
    alone = []
    for target, drafter, prompt in zip(targets, drafters, prompts, strict=True):
        with record_acceptance() as calls:
            target.generate(prompt, assistant_model=drafter, **kwargs)
        alone.append(calls[0].rounds)
    found, barrier = [[] for _ in targets], threading.Barrier(3)

    def work(i):
        barrier.wait()
        for _ in range(3):
            with record_acceptance() as calls:
                text = targets[i].generate(prompts[i], assistant_model=drafters[i], **kwargs)
            found[i].append((text, calls[0].rounds))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(3):
        assert len(found[i]) == 3
        for text, rounds in found[i]:
            assert torch.equal(text, plain[i]) and rounds == alone[i]


def test_processors_that_keep_a_history_are_refused():
    target = tiny_target()
    with pytest.raises(ValueError, match="guidance_scale keeps a history .* generate without assistant_model"):
        target.generate(tiny_prompt(), max_new_tokens=4, guidance_scale=1.5, assistant_model=tiny_drafter(target))
