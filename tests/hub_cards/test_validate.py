"""What may be published, and the sentence for everything that may not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from cards import card, save_backbone, save_drafter
from safetensors.torch import load_file, save_file

import osprey.modeling
from osprey.hub_cards.layout import differing_code
from osprey.hub_cards.validate import check_folder

COMMITTED = Path(__file__).parents[2] / "hub_cards" / "osprey-smollm2-135m-instruct"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    save_drafter(folder / "drafter", {"chat": 2.0})
    save_backbone(folder / "backbone")
    return folder


@pytest.fixture
def folder(originals, tmp_path):
    """A drafter's folder to damage."""
    return Path(shutil.copytree(originals / "drafter", tmp_path / "drafter"))


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_card(folder, old, new):
    text = (folder / "README.md").read_text()
    assert old in text
    (folder / "README.md").write_text(text.replace(old, new))


def edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def poison(weights):
    weights["norm.weight"][3] = torch.nan


DAMAGES = {
    "an optimiser's state": (lambda f: (f / "optimizer.pt").write_bytes(b""), "do not belong.*: optimizer.pt; remove"),
    "pickled weights": (lambda f: (f / "pytorch_model.bin").write_bytes(b""), "do not belong.*pytorch_model.bin"),
    "other code": (lambda f: (f / "setup.py").write_text(""), "do not belong.*setup.py"),
    "a deeper folder": (lambda f: shutil.copytree(f, f / "checkpoint-3"), "do not belong.*checkpoint-3/README.md"),
    "a hidden file": (lambda f: (f / ".env").write_text(""), "do not belong.*: .env;"),
    "a link": (lambda f: (f / "LICENSE").symlink_to("README.md"), "do not belong.*LICENSE"),
    "no card": (lambda f: (f / "README.md").unlink(), "lacks README.md"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "lacks model.safetensors"),
    "no training record": (lambda f: (f / "training.json").unlink(), "lacks training.json"),
    "a token": (lambda f: edit_card(f, "# Tiny", "hf_" + "a1" * 17), "looks like a Hub token"),
    "a path": (lambda f: edit_card(f, "# Tiny", f"in {Path.home()}/x"), "names a path of this machine"),
    "a broken config": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "no head": (lambda f: (f / "README.md").write_text("# Tiny"), "has no `license`"),
    "a broken head": (lambda f: edit_card(f, "license: ", "license: [ "), "metadata at the head of .* cannot be read"),
    "broken results": (lambda f: edit_card(f, "dataset: {type: chat, ", "dataset: {"), "cannot be read: Invalid"),
    "no licence": (lambda f: edit_card(f, "license: apache-2.0\n", ""), "has no `license`"),
    "no tag": (lambda f: edit_card(f, "[osprey, drafter]", "[drafter]"), "lacks the tag.s. osprey"),
    "another kind": (lambda f: edit_card(f, "[osprey, drafter]", "[osprey, backbone]"), "lacks the tag.s. drafter"),
    "no library": (lambda f: edit_card(f, "library_name: transformers\n", ""), "has no `library_name"),
    "a local target": (lambda f: edit_card(f, "loop/target", "target"), "which is no model on the Hub"),
    "two targets": (lambda f: edit_card(f, "loop/target", "loop/other"), "has target 'loop/target', but the card's"),
    "no target": (lambda f: edit_config(f, target=None), "config.json lacks target: "),
    "no taps": (lambda f: edit_config(f, target_layer_ids=None, auto_map=None), "lacks auto_map, target_layer_ids"),
    "stale code": (lambda f: (f / "layers_osprey.py").write_text(""), "is not that of the installed .*layers_osprey"),
    "missing code": (lambda f: (f / "lookup_osprey.py").unlink(), "is not that of the installed .*lookup_osprey"),
    "an odd key": (lambda f: edit_config(f, no_such_key=1), "does not load: Unknown key"),
    "a cut file": (lambda f: (f / "model.safetensors").write_bytes(b"12345678"), "does not load: The weights"),
    "a missing tensor": (
        lambda f: edit_weights(f, lambda w: w.pop("fc.weight")),
        "does not load: .*fc.weight",
    ),
    "not a number": (lambda f: edit_weights(f, poison), "hold NaN or infinity .norm.weight"),
    "a broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "does not load"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_refused(folder, case):
    damage, message = DAMAGES[case]
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        check_folder(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_folder(tmp_path):
    with pytest.raises(OSError, match="there is no folder"):
        check_folder(tmp_path / "none")


def test_a_backbone_brings_no_code(originals, tmp_path):
    backbone = shutil.copytree(originals / "backbone", tmp_path / "backbone")
    shutil.copy(originals / "drafter" / "lookup_osprey.py", backbone)
    with pytest.raises(ValueError, match="needs no code of its own: remove lookup_osprey.py"):
        check_folder(backbone)


def test_what_a_whole_folder_is(originals, folder):
    checked = check_folder(folder)
    assert (checked.kind, checked.base_model) == ("drafter", "loop/target")
    assert checked.files == {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / "pulled.json").write_text("{}")  # of `osprey pull --out`: stays here
    assert check_folder(folder).files == checked.files
    backbone = check_folder(originals / "backbone")
    assert (backbone.kind, backbone.base_model) == ("backbone", "loop/source")


def test_the_card_may_name_several_bases(folder):
    (folder / "README.md").write_text(card("drafter", "[loop/target, loop/source]"))
    assert check_folder(folder).base_model == "loop/target"


def test_the_committed_drafter_may_be_published():
    assert check_folder(COMMITTED).base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_whose_code_it_is(folder):
    assert differing_code(folder) == differing_code(Path(osprey.modeling.__file__).parent) == []
    (folder / "lookup_osprey.py").write_text("import os\n")
    (folder / "layers_osprey.py").unlink()
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text("import os\n")
    assert differing_code(folder) == ["custom_generate/generate.py", "layers_osprey.py", "lookup_osprey.py"]
