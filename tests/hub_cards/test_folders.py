"""Published folders: whole, small, and with exactly the code of `modeling/`."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "hub_cards").glob("*/config.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_remote_code_is_the_package_s(folder):
    for name in ("configuration_osprey.py", "modeling_osprey.py", "generation_osprey.py"):
        assert (folder / name).read_bytes() == (ROOT / "modeling" / name).read_bytes(), f"{folder / name} is stale"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_training_record_has_every_stage_and_no_local_path(folder):
    text = (folder / "training.json").read_text()
    assert [stage["stage"] for stage in json.loads(text)["stages"]] == ["prune", "pretrain", "convert", "distill"]
    assert "/root" not in text and "/home" not in text and "/work" not in text


def test_weights_stay_small():
    assert FOLDERS
    assert sum(path.stat().st_size for path in (ROOT / "hub_cards").rglob("*")) <= 80e6
