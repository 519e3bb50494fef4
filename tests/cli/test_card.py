"""`osprey card`: a benchmark's figures in a card, and everything else in the card as it was."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, parse_eval_result_entries

from osprey.cli.main import main
from osprey.eval.report import make_result
from osprey.hub_cards.layout import belongs
from osprey.hub_cards.results import BEGIN, END
from osprey.train.checkpoints import weights_sha256

CARD = """---
license: apache-2.0
library_name: transformers
base_model: org/target
language: [en, de]
tags: [osprey, drafter]
---

# A drafter

Written by hand.

## Limits

Many.
"""


def run_of(request: str, domain: str, peer: str, rounds: list[list]) -> dict:
    return {
        **{"request": request, "domain": domain, "language": "en", "file": "suite.jsonl", "peer": peer},
        **{"temperature": 0.0, "draft_length": "default", "context_length": None, "rounds": rounds},
        **{"token_ids": list(range(12)), "seconds": 2.0 if peer == "plain" else 1.0},
        **{"peak_memory_bytes": 1, "difference": None},
    }


def result_of(folder: Path, suite: str = "builtin") -> dict:
    """Hand-counted: chat 1 has verifications that emit 4 + 2 tokens (MAL 3), chat 2 emits 1, code 5 + 4 (4.5)."""
    rounds = {"chat-1": [[3, 3, 1, 1], [3, 1, 1, 1]], "chat-2": [[3, 0, 1, 1]], "code-1": [[4, 4, 1, 1], [4, 3, 1, 1]]}
    runs = [
        run_of(request, request[:4], peer, rounds[request] if peer == "ours" else [])
        for peer in ("plain", "ours")
        for request in rounds
    ]
    journal = SimpleNamespace(runs=dict(enumerate(runs)), notes={})
    settings = {
        **{"target": "target", "drafter": "ours", "peers": ["plain", "ours"], "draft_lengths": ["default"]},
        **{"temperatures": [0.0], "context_lengths": [], "matrix": [], "suite": suite, "suite_sha256": "0" * 64},
        **{"max_new_tokens": 12, "weights": "fp32", "device": "cpu", "threads": 1, "seed": 0},
        "models": {"ours": {"name": "drafter", "sha256": weights_sha256(str(folder))}},
    }
    environment = {"command": "osprey bench --suite builtin --out result.json", "commit": "0123456789ab"}
    return make_result(journal, settings, environment, [], 0)


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text(CARD)
    (tmp_path / "result.json").write_text(json.dumps(result_of(folder)))
    return folder


@pytest.fixture
def card(folder, capsys, monkeypatch):
    monkeypatch.delenv("OSPREY_DEBUG", raising=False)

    def run(*flags: str) -> tuple[int, str]:
        results = flags or ("--results", str(folder.parent / "result.json"))
        return main(["card", str(folder), *results, "--force"]), capsys.readouterr().err  # of three requests

    return run


def test_figures_stand_in_metadata_and_text(folder, card):
    assert card() == (0, "")
    written = ModelCard.load(folder / "README.md")
    assert {each.dataset_config: each.metric_value for each in written.data.eval_results} == {
        "all": round((3 + 1 + 4.5) / 3, 3),
        "chat": 2.0,
        "code": 4.5,
    }
    assert {each.metric_type for each in written.data.eval_results} == {"mean_acceptance_length"}
    assert written.data.model_name == "drafter"
    before = ModelCard(CARD).data.to_dict()
    after = written.data.to_dict()
    assert {key: after[key] for key in before} == before and set(after) - set(before) == {"model-index"}
    assert written.text.startswith(ModelCard(CARD).text.rstrip())
    section = written.text.partition(BEGIN)[2].partition(END)[0]
    assert "| chat | 2 | 2.00 [" in section and "| code | 1 | 4.50 [" in section
    assert "osprey bench --suite builtin" in section and "0123456789ab" in section
    assert [line for line in section.splitlines() if line.startswith("# ")] == []  # the card has one title


def test_figures_stand_in_the_hubs_newer_format(folder, card):
    assert card() == (0, "")
    name = ".eval_results/mean_acceptance_length.yaml"
    assert belongs(name)  # or it would neither be pushed nor pulled
    read = parse_eval_result_entries(yaml.safe_load((folder / name).read_text()))
    settings = "Mean acceptance length (greedy, draft length default, {} requests)"
    assert read == [
        EvalResultEntry("osprey/builtin", "mean_acceptance_length", 2.833, notes=settings.format(3)),
        EvalResultEntry("osprey/builtin", "mean_acceptance_length_chat", 2.0, notes=settings.format(2)),
        EvalResultEntry("osprey/builtin", "mean_acceptance_length_code", 4.5, notes=settings.format(1)),
    ]
    card()
    assert parse_eval_result_entries(yaml.safe_load((folder / name).read_text())) == read
    assert [path.name for path in (folder / ".eval_results").iterdir()] == ["mean_acceptance_length.yaml"]


def test_a_second_time_replaces(folder, card):
    card()
    once = (folder / "README.md").read_text()
    card()
    assert (folder / "README.md").read_text() == once
    (folder / "README.md").write_text(once.replace("Many.", "Few.") + "\nA last word.\n")
    (folder.parent / "other.json").write_text(json.dumps(result_of(folder, "other-suite")))
    assert card("--results", str(folder.parent / "other.json"))[0] == 0
    text = (folder / "README.md").read_text()
    assert text.count("### Suite other-suite") == 1 and "### Suite builtin" not in text
    assert "Few." in text and text.endswith(f"{END}\n\nA last word.\n")
    assert {each.dataset_type for each in ModelCard(text).data.eval_results} == {"osprey/other-suite"}


def test_several_results_and_those_of_others(folder, card):
    data = ModelCard(CARD).data
    own = EvalResult("text-generation", "org/data", "Data", "accuracy", 0.5)
    data.model_name, data.eval_results = "its name", [own]
    (folder / "README.md").write_text(f"---\n{data}\n---\n\n# A drafter\n")
    (folder.parent / "other.json").write_text(json.dumps(result_of(folder, "other")))
    assert card("--results", str(folder.parent / "result.json"), str(folder.parent / "other.json"))[0] == 0
    written = ModelCard.load(folder / "README.md")
    assert written.data.model_name == "its name"
    assert own in written.data.eval_results and len(written.data.eval_results) == 1 + 3 + 3
    assert [line for line in written.text.splitlines() if line.startswith("### Suite")] == [
        "### Suite builtin",
        "### Suite other",
    ]


def test_a_result_by_context_length_gives_that_of_the_first(folder, card):
    result = result_of(folder)
    result["settings"] |= {"context_lengths": [1024, 2048]}
    groups = [row | {"context_length": context} for row in result["groups"] for context in (1024, 2048)]
    (folder.parent / "result.json").write_text(json.dumps(result | {"groups": groups}))
    assert card() == (0, "")
    entries = ModelCard.load(folder / "README.md").data.eval_results
    assert [each.dataset_config for each in entries] == ["all", "chat", "code"]
    name = "Mean acceptance length (greedy, draft length default, context of 1024 tokens, 3 requests)"
    assert entries[0].metric_name == name


def test_few_requests_do_not_rank_a_drafter(folder, capsys):
    results = folder.parent / "result.json"
    command = ["card", str(folder), "--results", str(results)]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "measured 3 request(s)" in error and "at least 20" in error and "--force" in error
    assert (folder / "README.md").read_text() == CARD and not (folder / ".eval_results").exists()
    result = json.loads(results.read_text())
    groups = [row | ({"requests": 20} if row["domain"] is None else {}) for row in result["groups"]]
    results.write_text(json.dumps(result | {"groups": groups}))
    assert main(command) == 0  # its domains may have fewer
    assert "mean_acceptance_length" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda card: card.unlink(), "there is no card"),
        (lambda card: card.write_text("# A drafter\n"), "has no metadata at its head"),
        (lambda card: card.write_text("---\nlicense: [\n---\n"), "cannot be read"),
        (lambda card: card.write_text(CARD + BEGIN), "mend the card"),
        (lambda card: card.write_text(CARD + f"{END}\n{BEGIN}"), "mend the card"),
        (lambda card: card.write_text(CARD + f"{BEGIN}{END}" * 2), "mend the card"),
        (lambda card: (card.parent / "model.safetensors").write_bytes(b"others"), "measured with other weights"),
        (lambda card: (card.parent.parent / "result.json").write_text("{"), "is not JSON"),
        (lambda card: (card.parent.parent / "result.json").write_text('{"schema_version": 99}'), "version 99"),
        (lambda card: (card.parent.parent / "result.json").unlink(), "result.json"),
        (lambda card: shutil.rmtree(card.parent), "there is no drafter folder"),
    ],
)
def test_refusals_leave_the_card(folder, card, damage, sentence):
    path = folder / "README.md"
    damage(path)
    before = path.read_bytes() if path.exists() else None
    status, error = card()
    assert status == 1 and sentence in error and error.count("\n") == 1
    assert not (path.parent / ".eval_results").exists()
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_failed_write_leaves_the_card(folder, card, monkeypatch):
    def fail(source, target):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    assert card() == (1, "osprey card: no space left\n")
    assert (folder / "README.md").read_text() == CARD
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "model.safetensors"]
