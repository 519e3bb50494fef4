"""Running a suite: every request under every setting, once, in turn, and on from where it was stopped."""

from dataclasses import replace

import pytest
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_drafter, tiny_target

from osprey.eval import bench
from osprey.eval.bench import Plan, in_turn, run_suite
from osprey.eval.contexts import count, lengthen
from osprey.eval.journal import Journal
from osprey.eval.peers import Peer, drafter_peer
from osprey.eval.prompts import Prompt
from osprey.eval.suites import Item

TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
PLAIN = Peer("plain", "plain")
PLAN = Plan([1.0, 0.0], ["default", "2"], max_new_tokens=6)


def item(name, *turns):
    return Item(Prompt(name, "chat", "en", turns), "file")


ITEMS = [item("a", "Hello?"), item("b", "One?", "Two?")]


@pytest.fixture(scope="module")
def models():
    target = tiny_target(vocab_size=VOCABULARY)
    return (
        target,
        bytes_tokenizer(TEMPLATE),
        [PLAIN, drafter_peer("d", tiny_drafter(target)), Peer("l", "prompt lookup")],
    )


def test_every_request_under_every_setting(models, tmp_path):
    journal, done = Journal(tmp_path / "runs.jsonl", {}), []
    assert run_suite(*models, ITEMS, PLAN, journal, done.append) == []
    assert set(journal.runs) == {
        (request, temperature, peer, length)
        for request in ("a", "b/turn-1", "b/turn-2")
        for temperature in (0.0, 1.0)
        for peer, length in [("plain", "default"), *((peer, length) for peer in "dl" for length in ("default", "2"))]
    }
    assert sum(done) == len(journal.runs) == 30
    for (request, temperature, peer, _), run in journal.runs.items():
        assert len(run["token_ids"]) == 6 and run["seconds"] > 0 and run["peak_memory_bytes"] > 10**6
        assert bool(run["rounds"]) == (peer != "plain")
        if temperature == 0:  # greedy: the target's text, whoever drafts
            assert run["token_ids"] == journal.runs[request, 0.0, "plain", "default"]["token_ids"]
            assert run["difference"] is None
    temperatures = [run["temperature"] for run in journal.runs.values()]
    assert temperatures == sorted(temperatures)


def without_times(runs):
    return {
        key: run | {"seconds": 0, "peak_memory_bytes": 0, "rounds": [each[:2] for each in run["rounds"]]}
        for key, run in runs.items()
    }


def test_goes_on_with_the_same_figures(models, tmp_path, monkeypatch):
    whole = Journal(tmp_path / "whole.jsonl", {})
    run_suite(*models, ITEMS, PLAN, whole)
    stopped = Journal(tmp_path / "stopped.jsonl", {})
    real, calls = bench.run_peer, []

    def run_peer(*args, **kwargs):
        calls.append(args)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(bench, "run_peer", run_peer)
    with pytest.raises(KeyboardInterrupt):
        run_suite(*models, ITEMS, PLAN, stopped)
    again, done = Journal(tmp_path / "stopped.jsonl", {}), []
    assert 6 <= len(again.runs) <= 7  # one may have waited to be compared with plain generation
    held = len(again.runs)
    run_suite(*models, ITEMS, PLAN, again, done.append)
    assert len(calls) == 8 + 30 - held and sum(done) == 30
    assert without_times(again.runs) == without_times(whole.runs)


def test_seeds(models, tmp_path):
    def texts(name, seed):
        journal = Journal(tmp_path / name, {})
        run_suite(*models, ITEMS[:1], replace(PLAN, seed=seed, temperatures=[1.0]), journal)
        return [run["token_ids"] for run in journal.runs.values()]

    assert texts("1", 0) == texts("2", 0) != texts("3", 1)


def test_later_turns_follow_plain_generation(models, tmp_path, monkeypatch):
    seen = []
    encode = bench.encode
    monkeypatch.setattr(
        bench, "encode", lambda tokenizer, messages: seen.append(list(messages)) or encode(tokenizer, messages)
    )
    journal = Journal(tmp_path / "runs.jsonl", {})
    run_suite(*models, ITEMS[1:], replace(PLAN, temperatures=[0.0]), journal)
    answer = models[1].decode(journal.runs["b/turn-1", 0.0, "plain", "default"]["token_ids"], skip_special_tokens=True)
    assert [message["content"] for message in seen[-1]] == ["One?", answer, "Two?"]


def test_too_long_is_skipped_and_named(models, tmp_path):
    long = item("long", "x" * 300, "And?")  # the tiny target has 256 positions
    edge = item("edge", "x" * (256 - 6 - len("u:\n")))
    journal, done = Journal(tmp_path / "runs.jsonl", {}), []
    assert run_suite(*models, [long, edge], PLAN, journal, done.append) == ["long/turn-1", "long/turn-2"]
    assert {key[0] for key in journal.runs} == {"edge"}
    assert sum(done) == 30


def test_a_difference_is_explained(models, tmp_path, monkeypatch):
    real = bench.run_peer

    def run_peer(target, tokenizer, peer, *args, **kwargs):
        run, rounds = real(target, tokenizer, peer, *args, **kwargs)
        if peer.name == "d":
            run.token_ids[3] = (run.token_ids[3] + 1) % VOCABULARY
        return run, rounds

    monkeypatch.setattr(bench, "run_peer", run_peer)
    journal = Journal(tmp_path / "runs.jsonl", {})
    run_suite(*models, ITEMS, replace(PLAN, temperatures=[0.0]), journal)
    for (_, _, peer, _), run in journal.runs.items():
        assert (run["difference"] is not None) == (peer == "d")
        if peer == "d":
            assert run["difference"]["position"] == 3 and not run["difference"]["near_tie"]


def test_all_take_turns():
    for names in ("abc", "ab"):
        cells = [(name, "1") for name in names]
        orders = [in_turn("plain", cells, index) for index in range(2 * len(cells))]
        assert all(sorted(map(str, order)) == sorted(map(str, orders[0])) for order in orders)
        starts = [
            ("plain" if order[0] == "plain" else "cell", next(cell[0] for cell in order if cell != "plain"))
            for order in orders
        ]
        assert sorted(starts) == [(kind, name) for kind in ("cell", "plain") for name in names]
    assert in_turn("plain", [], 3) == ["plain"]


def test_contexts_are_filled_with_other_prompts(models):
    tokenizer = models[1]
    texts = [letter * 150 for letter in "pqr"]
    items = [item(text[0], text, "later turn") for text in texts]
    long, misfits = lengthen(items, items, [300, 400], tokenizer, new_tokens=20)
    assert misfits == [] and [each.prompt.id for each in long] == [
        "p@300",
        "q@300",
        "r@300",
        "p@400",
        "q@400",
        "r@400",
    ]
    for each in long:
        assert count(tokenizer, each.prompt.turns[0]) == each.context_length - 20  # bytes: cuts change no token
        assert texts["pqr".index(each.prompt.id[0])] in each.prompt.turns[0] and len(each.prompt.turns) == 1
    assert lengthen(items[:1], items, [400], tokenizer, new_tokens=20)[0] == [long[3]]  # notes of the whole suite
    assert "q" * 61 in long[3].prompt.turns[0] and "p" * 151 not in long[3].prompt.turns[0]
    assert lengthen(items, items, [200, 300], tokenizer, new_tokens=20)[1] == ["p@200", "q@200", "r@200"]
    with pytest.raises(ValueError, match="no prompt of the suite fits into 200 tokens together with 20 new ones"):
        lengthen(items, items, [200], tokenizer, new_tokens=20)
    with pytest.raises(ValueError, match="too little text to fill such a context: 302 tokens"):
        lengthen(items, items, [900], tokenizer, new_tokens=20)


def test_warm_up_runs_every_peer(models, monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "run_peer", lambda target, tokenizer, peer, *args, **kwargs: seen.append(peer.name))
    bench.warm_up(*models, ITEMS[0])
    assert seen == ["plain", "d", "l"]
