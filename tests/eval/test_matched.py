"""Tables of matched runs: values worked out by hand."""

import pytest

from osprey.eval.matched import compare, markdown, parse_groups

IDS = ["chat/1", "chat/2", "code/1"]


def run(arm, seed, answers, rate=0.1, held_out=1.5):
    return {
        "arm": arm,
        "seed": seed,
        "learning_rate": rate,
        "held_out": {"eval_mal": held_out},
        "answers": dict(zip(IDS, answers, strict=True)),
        "steps": 10,
        "parameters": 5,
        "seconds": 1.0,
    }


@pytest.fixture
def results():
    runs = [
        run("ours", 0, [[30, 10], [20, 10], [12, 6]]),  # 3, 2, 2
        run("ours", 1, [[20, 10], [30, 10], [18, 6]]),  # 2, 3, 3
        run("ours", 0, [[10, 10], [10, 10], [10, 10]], rate=0.2, held_out=1.1),  # not the chosen rate
        run("theirs", 0, [[10, 10], [10, 5], [6, 6]]),  # 1, 2, 1
        run("theirs", 1, [[10, 10], [10, 5], [6, 6]]),
    ]
    return {
        "settings": {"target": "org/target"},
        "seeds": [0, 1],
        "chosen": {"ours": 0.1, "theirs": 0.1},
        "runs": {str(number): entry for number, entry in enumerate(runs)},
        "without_training": {"n-gram": dict(zip(IDS, [[10, 10], [10, 10], [10, 10]], strict=True))},
    }


def test_means_over_requests_then_seeds(results):
    table = compare(results, parse_groups(["talk=chat", "all=chat,code"]))
    ours, theirs = table["arms"]["ours"]["groups"], table["arms"]["theirs"]["groups"]
    assert ours["talk"]["mal"] == 2.5 and ours["talk"]["by_seed"] == [2.5, 2.5]
    assert theirs["talk"]["mal"] == 1.5
    assert theirs["talk"]["ratio"] == pytest.approx(2.5 / 1.5, abs=1e-4)
    assert ours["all"]["mal"] == 2.5 and theirs["all"]["mal"] == pytest.approx(4 / 3, abs=1e-4)
    assert ours["talk"]["pooled"] == 2.5  # 100 tokens in 40 rounds
    assert theirs["talk"]["pooled"] == pytest.approx(40 / 30, abs=1e-4)
    assert table["arms"]["n-gram"]["groups"]["all"]["mal"] == 1.0
    assert table["arms"]["ours"]["swept"] == {"0.1": 1.5, "0.2": 1.1}
    text = markdown(table)
    assert "| theirs | 10 | 0.1 | 1.500 [" in text and "| ours over | talk | all |" in text


def test_an_interval_holds_its_mean_and_is_a_point_where_nothing_varies(results):
    cells = compare(results, {"talk": ("chat",), "code": ("code",)})["arms"]
    low, high = cells["theirs"]["groups"]["talk"]["interval"]
    assert (low, high) == (1.0, 2.0)  # requests of 1 and 2: both twice in a quarter of the draws each
    assert cells["theirs"]["groups"]["code"]["interval"] == [1.0, 1.0]
    assert cells["theirs"]["groups"]["code"]["ratio_interval"] == [2.0, 3.0]  # the two seeds of ours


def test_requests_are_drawn_alike_for_both_arms(results):
    """An arm that is twice as good on every request is so in every draw."""
    for key, entry in list(results["runs"].items()):
        if entry["arm"] == "ours":
            del results["runs"][key]
    doubled = [[2 * tokens, rounds] for tokens, rounds in ([10, 10], [10, 5], [6, 6])]
    results["runs"] = {"a": run("ours", 0, doubled), **results["runs"]}
    cell = compare(results | {"seeds": [0]}, {"talk": ("chat",)})["arms"]["theirs"]["groups"]["talk"]
    assert cell["ratio_interval"] == [2.0, 2.0]


def test_seeds_of_an_earlier_start_do_not_count(results):
    entry = compare(results | {"seeds": [1]}, {"talk": ("chat",)})["arms"]["ours"]
    assert entry["seeds"] == [1] and entry["groups"]["talk"]["by_seed"] == [2.5]
    assert compare(results | {"seeds": [0]}, {"code": ("code",)})["arms"]["ours"]["groups"]["code"]["mal"] == 2.0


def test_groups_without_answers_are_refused(results):
    with pytest.raises(ValueError, match="no test answer has an id that begins with maths"):
        compare(results, {"maths": ("maths",)})
    with pytest.raises(ValueError, match="'chat' is not NAME=PREFIX"):
        parse_groups(["chat"])
