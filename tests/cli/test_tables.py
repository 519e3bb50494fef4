"""The closing table, the line of totals and the JSON file."""

import json

import pytest

from osprey.cli.tables import check_writable, format_table, report, totals_line
from osprey.eval.acceptance import Difference, Measurement, Run, summarize
from osprey.train.checkpoints import write_json


@pytest.fixture
def measurements():
    def one(id, group, rounds, seconds, **kwargs):
        return Measurement(id, group, Run([7] * 10, seconds, rounds), Run([7] * 10, 4.0), **kwargs)

    return [
        one("chat-en", "en", [(2, 2), (2, 1)], 2.0, identical=True),
        one("code-en", "en", [(2, 0), (2, 0)], 4.0, identical=True),
        one("chat-fr", "fr", [], 2.0, identical=False, difference=Difference(3, 1e-6, near_tie=True)),
    ]


def test_table(measurements):
    lines = format_table(measurements).splitlines()
    rows = {line.split("  ")[0].strip(): line.split() for line in lines if not line.startswith("---")}
    assert list(rows) == ["prompt", "chat-en", "code-en", "chat-fr", "group en", "all"]
    #            name, tokens, plain, assisted, speedup, MAL, identical, by position
    assert rows["chat-en"] == ["chat-en", "10", "2.5", "5.0", "2.00x", "2.50", "yes", "1.00", ".50"]
    assert rows["code-en"] == ["code-en", "10", "2.5", "2.5", "1.00x", "1.00", "yes", ".00", "-"]
    assert rows["chat-fr"] == ["chat-fr", "10", "2.5", "5.0", "2.00x", "-", "no", "(1", "near-tie)", "-"]
    assert rows["group en"] == ["group", "en", "20", "2.5", "3.3", "1.33x", "1.75", "yes", ".50", ".50"]
    assert rows["all"] == ["all", "30", "2.5", "3.8", "1.50x", "1.75", "no", "(1", "near-tie)", ".50", ".50"]


def test_long_copies_do_not_widen_the_table():
    runs = Run([7] * 50, 2.0, [(32, 32), (32, 16)]), Run([7] * 50, 4.0)
    difference = Difference(3, 1e-6, near_tie=True)
    some = [Measurement(f"translation-de-{n}", "de", *runs, False, difference) for n in range(3)]
    lines = format_table(some).splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[2].endswith("  no (1 near-tie)  1.00 1.00 1.00 1.00 1.00")
    assert len(report(some, 1.0, {})["acceptance_by_position"]) == 32


def test_totals_line(measurements):
    assert totals_line(summarize(measurements[:2])) == (
        "plain 2.5 tok/s, assisted 3.3 tok/s, speedup 1.33x, MAL 1.75 mean 1.75 pooled, identical yes"
    )


def test_one_prompt_has_no_group_row(measurements):
    assert "group" not in format_table(measurements[:1])


def test_json_keys(measurements, tmp_path):
    path = tmp_path / "figures.json"
    write_json(path, report(measurements, 1.0, {"threads": 2}))
    figures = json.loads(path.read_text())
    assert figures["tokens_per_second_plain"] == 2.5
    assert figures["tokens_per_second_assisted"] == 30 / 8
    assert figures["speedup"] == 1.5
    assert figures["mal_mean"] == (2.5 + 1.0) / 2
    assert figures["mal_pooled"] == 7 / 4
    assert figures["identical"] is False
    assert set(figures["groups"]) == {"en", "fr"}
    assert figures["settings"] == {"threads": 2}
    third = figures["prompts"][2]
    assert third["id"] == "chat-fr" and third["plain_seconds"] == 4.0 and third["assisted_tokens"] == 10
    assert third["difference"] == {"position": 3, "logit_gap": 1e-6, "near_tie": True}
    assert figures["prompts"][0]["rounds"] == [[2, 2], [2, 1]]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "figures.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_json(path, {"not JSON": object()})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_places_are_refused_first(tmp_path):
    with pytest.raises(OSError, match="is a folder"):
        check_writable(tmp_path)
    with pytest.raises(OSError, match="there is no folder"):
        check_writable(tmp_path / "none" / "figures.json")
