"""What there is, which of it is best, and `OspreyDrafter.for_target`."""

import json
import shutil

import pytest
import torch
from cards import TARGET, card, save_backbone, save_drafter
from huggingface_hub import constants
from loopback_hub import answer

from osprey.cli.main import main as osprey
from osprey.hub_cards.zoo import best_drafter, zoo
from osprey.modeling import OspreyDrafter


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    save_drafter(folder / "drafter")
    save_backbone(folder / "backbone")
    return folder


@pytest.fixture
def published(hub, folders, tmp_path):
    """Drafters with other results in their cards, by name, and a backbone."""
    suites = {"a/all": 2.0, "a/chat": 9.0, "b/chat": 3.5, "b/code": 2.5}  # 2 and 3: `all` stands for its data set
    results = {"plain": {}, "wide": suites, "narrow": {"chat": 2.4}, "odd": {"chat": '"2.9 ± 1"'}}
    for name, lengths in results.items():
        folder = shutil.copytree(folders / "drafter", tmp_path / name)
        (folder / "README.md").write_text(card("drafter", TARGET, lengths))
        hub.add(f"loop/{name}", folder)
    hub.add("loop/backbone", folders / "backbone")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").write_text(card("model", TARGET).replace("osprey, ", ""))
    hub.add("loop/other", tmp_path / "other")
    return hub


def listed(capsys, *flags):
    capsys.readouterr()
    assert osprey(["zoo", *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("page", [1000, 2])
def test_best_first(published, capsys, page):
    published.page = page
    entries = listed(capsys)
    assert [entry["name"].removeprefix("loop/") for entry in entries] == ["wide", "narrow", "odd", "plain", "backbone"]
    assert [entry["mean_acceptance_length"] for entry in entries] == [
        2.5,
        2.4,
        None,
        None,
        None,
    ]  # the mean of its cells
    assert {entry["kind"] for entry in entries[:4]} == {"drafter"} and entries[4]["kind"] == "backbone"
    assert entries[0]["revision"] == published.repos["loop/wide"].branches["main"]
    assert [entry["base_model"] for entry in entries] == [TARGET] * 4 + ["loop/source"]
    assert best_drafter(TARGET).name == "loop/wide"


def test_by_target(published, capsys):
    assert {entry["base_model"] for entry in listed(capsys, "--target", TARGET)} == {TARGET}
    assert [entry["name"] for entry in listed(capsys, "--target", "loop/source")] == ["loop/backbone"]
    assert listed(capsys, "--target", "loop/unknown") == []
    with pytest.raises(ValueError, match="there is no drafter for loop/source on the Hub or in its local cache"):
        best_drafter("loop/source")


def test_what_lies_on_this_machine(published, folders, tmp_path, capsys):
    osprey(["pull", "loop/plain"])
    older = published.repos["loop/plain"].branches["main"]
    published.add("loop/plain", tmp_path / "narrow")
    osprey(["pull", "loop/narrow"])
    entries = listed(capsys, "--target", TARGET, "--folders", str(tmp_path), str(folders / "drafter"))
    found = {(entry["name"], entry["place"]): entry for entry in entries}
    assert found["loop/narrow", "hub"]["cached"] and not found["loop/plain", "hub"]["cached"]
    assert found["loop/plain", "cache"]["revision"] == older
    assert ("loop/narrow", "cache") not in found  # the same commit is listed once
    assert found[str(tmp_path / "wide"), "folder"]["mean_acceptance_length"] == 2.5
    assert (str(folders / "drafter"), "folder") in found
    osprey(["zoo", "--folders", str(tmp_path)])
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("loop/wide ")][0].split()[1:4] == ["drafter", TARGET, "2.50"]
    with pytest.raises(OSError, match="there is no folder"):
        zoo(folders=[tmp_path / "none"])


def test_where_nothing_was_found(hub, tmp_path, capsys, monkeypatch):
    osprey(["zoo", "--target", "loop/unknown"])
    found = "no drafter or backbone for loop/unknown was found on the Hub, in its local cache (--folders DIR looks"
    assert capsys.readouterr().out.startswith(found)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    osprey(["zoo", "--folders", str(tmp_path)])
    where = f"in the Hub's local cache or in {tmp_path}\n"
    assert capsys.readouterr().out == f"no drafter or backbone was found {where}"


def test_damaged_folders_are_passed_over(hub, folders, tmp_path):
    for name, file in (("one", "config.json"), ("two", "README.md")):
        folder = shutil.copytree(folders / "drafter", tmp_path / "zoo" / name)
        (folder / file).write_text("---\n[\n---\n")
    assert zoo(folders=[tmp_path / "zoo"]) == ([], True)


def test_without_the_hub(published, capsys, monkeypatch):
    osprey(["pull", "loop/narrow"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    capsys.readouterr()
    assert osprey(["zoo"]) == 0
    shown = capsys.readouterr()
    assert "The Hub cannot be reached" in shown.err and "loop/narrow" in shown.out and "loop/wide" not in shown.out


def test_the_hub_s_errors_are_not_hidden(published, capsys):
    published.fail("^GET /api/models", answer(500, "out of order"), times=100)
    assert osprey(["zoo"]) == 1
    assert "the Hub answered 500 for the list of models (out of order)" in capsys.readouterr().err


def test_for_target(published, tmp_path, folders):
    """The best one's weights in the installed package's class; what code the repo brings is not run."""
    (tmp_path / "wide" / "modeling_osprey.py").write_text("raise SystemExit('remote code ran')\n")
    save = OspreyDrafter.from_pretrained(folders / "drafter")
    with torch.no_grad():
        save.fc.weight.fill_(0.125)
    save.save_pretrained(tmp_path / "weights")
    shutil.copy(tmp_path / "weights" / "model.safetensors", tmp_path / "wide")
    published.add("loop/wide", tmp_path / "wide")
    drafter = OspreyDrafter.for_target(TARGET, dtype=torch.bfloat16)
    assert type(drafter) is OspreyDrafter and drafter.dtype == torch.bfloat16
    assert (drafter.fc.weight == 0.125).all()
    with pytest.raises(ValueError, match="there is no drafter for loop/unknown"):
        OspreyDrafter.for_target("loop/unknown")
