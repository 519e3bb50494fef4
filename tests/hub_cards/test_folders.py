"""Published folders: whole, small, and with exactly the code of `modeling/`."""

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "hub_cards").glob("*/config.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_remote_code_is_the_package_s(folder):
    ours = {path.name: path.read_bytes() for path in (ROOT / "modeling").glob("*_osprey.py")}
    theirs = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []  # else stale: copy them again


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_draft_setting_is_read(folder):
    """One that transformers drops would silently leave the default in its place."""
    loaded = GenerationConfig.from_pretrained(folder)
    for name, value in json.loads((folder / "generation_config.json").read_text()).items():
        assert name == "transformers_version" or getattr(loaded, name) == value, name


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_training_record_has_every_stage_and_no_local_path(folder):
    text = (folder / "training.json").read_text()
    stages = [stage["stage"] for stage in json.loads(text)["stages"]]
    assert list(dict.fromkeys(stages)) == ["prune", "pretrain", "convert", "distill"]  # some of them in several legs
    assert "/root" not in text and "/home" not in text and "/work" not in text


def test_weights_stay_small():
    assert FOLDERS
    assert sum(path.stat().st_size for path in (ROOT / "hub_cards").rglob("*")) <= 80e6
