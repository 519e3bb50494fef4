"""The Python of every committed card, run as pasted: only names of models are replaced by folders on this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from no_package import NO_OSPREY

CARDS = sorted((Path(__file__).resolve().parents[2] / "hub_cards").glob("*/README.md"))
FENCED = re.compile(r"^ *```(?:python|py)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
MODEL = re.compile(r'(?<=from_pretrained\(")[^"]+(?=")')

# Behind the blocks, in the names that they leave: some of what is drafted is accepted, and the text is the same.
CHECK = """
import sys

drafter.generation_config.adaptive_draft_length = False  # on a slow machine drafting may not pay, and is left out
code = sys.modules[type(drafter).osprey_decode.__globals__["AssistedCall"].__module__]
with code.record_acceptance() as calls:
    assisted = target.generate(**inputs, assistant_model=drafter, max_new_tokens=16)
assert len(calls) == 1 and sum(accepted for _, accepted in calls[0].rounds) > 0, calls
assert assisted.tolist() == target.generate(**inputs, max_new_tokens=16).tolist()
"""


def blocks(card: Path, target: str) -> list[str]:
    """The card's Python blocks, the base model's name replaced by `target`, any other model's by the card's folder."""
    base = ModelCard.load(card).data.base_model

    def folder(match: re.Match) -> str:
        return target if match[0] == base else str(card.parent)

    return [MODEL.sub(folder, block) for block in FENCED.findall(card.read_text(encoding="utf-8"))]


def needs_package(block: str) -> bool:
    return re.search(r"^ *(from|import) osprey\b", block, re.MULTILINE) is not None


def run(script: str, folder: Path) -> str:
    """What a fresh process prints that pasted `script`, without network and with empty caches."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    for name in ("HF_MODULES_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(name, None)
    (folder / "pasted.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-I", "pasted.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("package", [False, True], ids=["without the package", "with the package"])
@pytest.mark.parametrize(
    "card",
    [card for card in CARDS if (card.parent / "model.safetensors").is_file()],
    ids=lambda card: card.parent.name,
)
def test_a_drafter_card_runs_as_pasted(card, package, smollm2, tmp_path):
    """All blocks one after the other, as a reader pastes them; where there is no package, those that need none."""
    pasted = [block for block in blocks(card, smollm2) if package or not needs_package(block)]
    assert pasted and any(map(needs_package, pasted)) == package  # every card shows both ways
    printed = run("\n".join([*([] if package else [NO_OSPREY]), *pasted, CHECK]), tmp_path)
    assert "sky" in printed and len(printed) > 150  # the question, and an answer


def test_a_card_without_weights_has_no_python_that_nobody_runs():
    assert len(CARDS) > 1
    assert [card for card in CARDS if not (card.parent / "model.safetensors").is_file() and blocks(card, "")] == []
