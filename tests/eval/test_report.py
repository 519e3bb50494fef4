"""Figures of a benchmark from runs that were counted by hand."""

import pytest
from bench_runs import ENVIRONMENT, SETTINGS, a_run, journal_of, plain_run, random_runs

from osprey.eval.markdown import to_markdown
from osprey.eval.report import DIMENSIONS, SETTING, make_result, matrix, select


def result_of(tmp_path, runs, **changes):
    settings = SETTINGS | changes
    tmp_path.mkdir(exist_ok=True)
    return make_result(journal_of(tmp_path / "x.runs.jsonl", runs, settings), settings, ENVIRONMENT, [], 0)


@pytest.fixture
def two(tmp_path):
    """Two requests: rounds that emit 4 + 1 + 2 = 7 tokens in 3, and 3 in 1; 8 and 4 tokens with the prefill's."""
    return result_of(
        tmp_path,
        [
            plain_run("a", 8, seconds=4.0),
            a_run("a", "osprey", [(3, 3), (3, 0), (2, 1)], seconds=2.0),
            plain_run("b", 4, seconds=2.0, domain="code"),
            a_run("b", "osprey", [(2, 2)], seconds=2.0, domain="code", peak_memory_bytes=5000),
            a_run("b", "eagle3", [(2, 0), (2, 0), (2, 0)], seconds=3.0, domain="code"),
        ],
    )


def test_hand_counted_figures(two):
    (row,) = select(two, peer="osprey", domain=None, language=None, file=None)
    assert row["requests"] == 2 and row["tokens"] == 12 and row["verifications"] == 4
    assert row["mal_mean"]["value"] == pytest.approx((7 / 3 + 3) / 2)
    assert row["mal_pooled"]["value"] == (7 + 3) / (3 + 1)
    assert row["acceptance_by_position"] == [3 / 4, 2 / 3, 1.0]
    assert row["accepted_share"] == (3 + 0 + 1 + 2) / 12
    assert row["drafted_per_verification"] == (3 + 3 + 2 + 2) / 4
    assert (row["draft_ms"], row["verify_ms"]) == (2.0, 20.0)
    assert row["tokens_per_second"] == 12 / 4 and row["tokens_per_second_plain"] == 12 / 6
    assert row["speedup"]["value"] == 1.5
    assert row["identical"] == 2 and row["near_ties"] == 0
    assert two["peak_memory_bytes"] == 5000 and two["requests"] == 2


def test_intervals_are_of_requests(two):
    (row,) = select(two, peer="osprey", domain=None, language=None, file=None)
    # Of two requests a resample has one, the other or both, with chances 1/4, 1/4 and 1/2.
    assert row["mal_mean"]["low"] == pytest.approx(7 / 3) and row["mal_mean"]["high"] == 3
    assert row["speedup"]["low"] == 1 and row["speedup"]["high"] == 2


def test_slices(two):
    assert [row["requests"] for row in select(two, peer="osprey", domain="code", language=None)] == [1]
    assert [row["requests"] for row in select(two, peer="osprey", domain="code", language="en")] == [1]
    assert [row["requests"] for row in select(two, peer="osprey", file="made-up")] == [2]
    (plain,) = select(two, peer="plain", domain=None, language=None, file=None)
    assert plain["speedup"] is plain["mal_mean"] is plain["identical"] is None
    assert plain["tokens_per_second"] == 2


def test_peers_are_compared_on_the_requests_of_both(two):
    (row,) = (
        row for row in two["comparisons"] if row["over"] == "eagle3" and row["domain"] == row["language"] is None
    )
    assert row["peer"] == "osprey" and row["requests"] == 1
    assert row["mal_ratio"] == {"value": 3.0, "low": 3.0, "high": 3.0}


def test_faster_plain_precision(tmp_path):
    journal = journal_of(tmp_path / "x.runs.jsonl", [plain_run("a", 2, 2.0), a_run("a", "osprey", [(1, 0)], 1.0)])
    journal.notes = {"plain_scale": 1.25}
    row = select(make_result(journal, SETTINGS, ENVIRONMENT, [], 0), peer="osprey", domain=None, file=None)[0]
    assert row["tokens_per_second_plain"] == 1.25 and row["speedup"]["value"] == pytest.approx(2 / 1.25)


def test_differing_texts_are_counted(tmp_path):
    tie = {"position": 0, "logit_gap": 0.0, "near_tie": True}
    runs = [
        plain_run("a", 3),
        a_run("a", "osprey", [(1, 0)], token_ids=[7, 8], difference=tie),
        plain_run("b", 3),
        a_run("b", "osprey", [(1, 1)]),
        plain_run("c", 1),
        a_run("c", "osprey", [], token_ids=[0]),  # ended with the prefill's token: no verification, no MAL
    ]
    row = select(result_of(tmp_path, runs), peer="osprey", domain=None, file=None)[0]
    assert (row["requests"], row["identical"], row["near_ties"]) == (3, 2, 1)
    assert row["mal_mean"]["value"] == 1.5


def test_sampled_texts_are_not_compared(tmp_path):
    runs = [plain_run("a", 3, temperature=1.0), a_run("a", "osprey", [(1, 0)], temperature=1.0)]
    row = select(result_of(tmp_path, runs, temperatures=[1.0]), peer="osprey", domain=None, file=None)[0]
    assert row["identical"] is None
    assert row["speedup"]["value"] == pytest.approx(2 / 3)  # two tokens beside three in the same time


def test_matrix_puts_domains_in_the_order_of_drafters(tmp_path):
    settings = {"peers": ["plain", "code", "chat"], "matrix": ["code", "chat"]}
    runs = []
    for domain, accepted in (("chat", (0, 2)), ("law", (1, 1)), ("code", (2, 0))):
        runs.append(plain_run(domain, 3, domain=domain))
        for peer, count in zip(("code", "chat"), accepted, strict=True):
            runs.append(a_run(domain, peer, [(2, count)], domain=domain))
    domains, cells = matrix(result_of(tmp_path, runs, **settings), settings["matrix"])
    assert domains == ["code", "chat", "law"]
    assert cells.tolist() == [[3, 1, 2], [1, 3, 2]]


def test_matrix_is_of_the_shortest_context(tmp_path):
    settings = {"peers": ["plain", "chat"], "matrix": ["chat"], "context_lengths": [1024, 512]}
    runs = []
    for context, accepted in ((512, 2), (1024, 0)):
        runs.append(plain_run(f"a@{context}", 4, context_length=context))
        runs.append(a_run(f"a@{context}", "chat", [(2, accepted)], context_length=context))
    assert matrix(result_of(tmp_path, runs, **settings), ["chat"])[1].tolist() == [[3]]


def test_the_order_of_runs_does_not_matter(tmp_path):
    runs = random_runs(SETTINGS, [("chat", "en"), ("code", "de")], 2)
    turned = runs[4:] + runs[:4]  # the same requests in another order, as when they were run in two starts
    first, second = (result_of(tmp_path / name, some)["groups"] for name, some in (("1", runs), ("2", turned)))
    assert first[0]["peer"] == second[0]["peer"] == "plain"
    for row in first:
        other = next(each for each in second if all(each[name] == row[name] for name in (*SETTING, *DIMENSIONS)))
        for name in ("mal_mean", "mal_pooled", "speedup"):
            assert (other[name] or {}).get("value") == pytest.approx((row[name] or {}).get("value"))


def test_markdown(tmp_path, two):
    text = to_markdown(two)
    assert "| osprey | 2.67 [2.33, 3.00] | 2.50 | 50 % |" in text
    assert "| code | 1 | 3.00 [3.00, 3.00] | 1.00 [1.00, 1.00] |" in text
    assert "| eagle3 | all | 1 | 3.00x [3.00, 3.00] |" in text
    two["skipped"]["longer_than_context"] = ["x", "y"]
    assert "longer than the target's context: 2 requests" in to_markdown(two)
    settings = {"draft_lengths": ["default", "2"], "context_lengths": [512, 1024], "matrix": ["osprey", "eagle3"]}
    runs = random_runs(SETTINGS | settings, [("chat", "en"), ("code", "en")], 2)
    text = to_markdown(result_of(tmp_path / "more", runs, **settings))
    for heading in ("MAL by draft length", "MAL by context length", "MAL of each drafter", "context of 512 tokens"):
        assert heading in text
