"""Runs that go on where they were stopped."""

import json

import pytest
from bench_runs import SETTINGS, a_run, journal_of

from osprey.eval.journal import SCHEMA_VERSION, Journal, check_schema, key_of


def test_goes_on(tmp_path):
    path, run = tmp_path / "x.runs.jsonl", a_run("a", "osprey", [(3, 1)])
    journal_of(path, [run])
    again = Journal(path, SETTINGS, {"plain_scale": 9.0})
    assert again.runs == {("a", 0.0, "osprey", "3"): run}
    assert again.notes == {"plain_scale": 1.0}  # those of the first start
    again.append(a_run("b", "osprey", []))
    assert len(Journal(path, SETTINGS).runs) == 2
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("kept", [1, 2])
def test_a_line_cut_short_is_dropped(tmp_path, kept):
    path = tmp_path / "x.runs.jsonl"
    journal_of(path, [a_run("a", "osprey", [(3, 1)]), a_run("b", "osprey", [(3, 1)])])
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[: kept + 1])[:-5])
    again = Journal(path, SETTINGS)
    assert [key[0] for key in again.runs] == ["a", "b"][: kept - 1]
    for name in ["a", "b"][kept - 1 :]:
        again.append(a_run(name, "osprey", [(3, 1)]))
    assert path.read_bytes() == whole


def test_a_head_cut_short_starts_anew(tmp_path):
    path = tmp_path / "x.runs.jsonl"
    path.write_text('{"schema_ver')
    assert Journal(path, SETTINGS).runs == {}
    assert json.loads(path.read_text())["settings"] == SETTINGS


def test_other_settings_are_refused(tmp_path):
    path = tmp_path / "x.runs.jsonl"
    journal_of(path, [])
    with pytest.raises(ValueError, match=r"other settings \(max_new_tokens, seed changed\)"):
        Journal(path, SETTINGS | {"seed": 1, "max_new_tokens": 2})
    assert Journal(path, json.loads(json.dumps(SETTINGS))).runs == {}


def test_damage_and_other_schemas_are_refused(tmp_path):
    path = tmp_path / "x.runs.jsonl"
    journal_of(path, [a_run("a", "osprey", [])])
    head, run = path.read_text().splitlines()
    path.write_text(f"{head}\nnonsense\n{run}\n")
    with pytest.raises(ValueError, match="x.runs.jsonl, line 2: not JSON"):
        Journal(path, SETTINGS)
    path.write_text(json.dumps(json.loads(head) | {"schema_version": SCHEMA_VERSION + 1}) + "\n")
    with pytest.raises(ValueError, match=f"schema version {SCHEMA_VERSION + 1}, and this osprey reads version"):
        Journal(path, SETTINGS)
    for content in ({}, [], None):
        with pytest.raises(ValueError, match="has no schema version"):
            check_schema("r.json", content)


def test_keys_tell_settings_apart():
    runs = [a_run("a", "osprey", [], **change) for change in ({}, {"draft_length": "4"}, {"temperature": 1.0})]
    assert len({key_of(run) for run in runs}) == 3
