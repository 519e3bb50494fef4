"""The measured part of a card: tables between two markers, and the figures in both of the Hub's own formats.

A card (README.md of a drafter's folder) is written by a person; only what stands between the markers, and the results
of our metric in its metadata (`model-index`), are replaced. The same results are a file under `.eval_results/`. The
source is a result file of `osprey bench`.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import (
    EvalResult,
    EvalResultEntry,
    ModelCard,
    eval_result_entries_to_yaml,
    parse_eval_result_entries,
)

from osprey.hub_cards.layout import EVAL_RESULTS, METRIC, card_sentences

LEAST_REQUESTS = 20  # fewer tell drafters apart by chance
BEGIN, END = "<!-- osprey card: results -->", "<!-- osprey card: end of results -->"


def rows_for_card(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The measured drafter's figures at the first temperature and draft length: over all requests, then by domain."""
    settings = result["settings"]
    rows = [
        row
        for row in result["groups"]
        if row["peer"] == settings["drafter"]
        and row["temperature"] == settings["temperatures"][0]
        and row["draft_length"] == settings["draft_lengths"][0]
        and row["language"] is None
        and row["file"] is None
        and row["context_length"] == (settings["context_lengths"] or [None])[0]
        and row["mal_mean"] is not None
    ]
    domains = [row for row in rows if row["domain"] is not None]
    return [row for row in rows if row["domain"] is None] + (domains if len(domains) > 1 else [])


def refuse_few_requests(path: str, result: dict[str, Any]) -> None:
    """Raises `ValueError` where a card's first figure, which ranks drafters, would be of a handful of requests."""
    requests = max((row["requests"] for row in rows_for_card(result)), default=0)
    if requests < LEAST_REQUESTS:
        raise ValueError(
            f"{path} measured {requests} request(s), and a card ranks its drafter by at least {LEAST_REQUESTS}: run "
            "`osprey bench` on more prompts, or give --force to put these figures in all the same."
        )


def eval_results(result: dict[str, Any]) -> list[EvalResult]:
    """Mean acceptance length of the measured drafter over all requests, and by domain where there are several.

    At the first temperature and draft length of the result; in the metadata a suite's domains are its configurations.
    """
    settings = result["settings"]
    decoding = "greedy" if settings["temperatures"][0] == 0 else f"temperature {settings['temperatures'][0]:g}"
    decoding += f", draft length {settings['draft_lengths'][0]}"
    if settings["context_lengths"]:
        decoding += f", context of {settings['context_lengths'][0]} tokens"
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=f"osprey/{settings['suite']}",
            dataset_name=f"{settings['suite']}, {row['domain'] or 'all domains'}",
            dataset_config=row["domain"] or "all",
            dataset_revision=settings["suite_sha256"],
            metric_type=METRIC,
            metric_name=f"Mean acceptance length ({decoding}, {row['requests']} requests)",
            metric_value=round(row["mal_mean"]["value"], 3),
        )
        for row in rows_for_card(result)
    ]


def eval_entries(results: list[EvalResult]) -> list[EvalResultEntry]:
    """The results as entries of `.eval_results/*.yaml` (https://huggingface.co/docs/hub/eval-results).

    That format names no metric, so the task is the metric, with the domain behind it. The data set is never that of a
    public benchmark, on whose leaderboard an acceptance length would be read as a score.
    """
    return [
        EvalResultEntry(
            dataset_id=result.dataset_type,
            task_id=METRIC if result.dataset_config == "all" else f"{METRIC}_{result.dataset_config}",
            value=result.metric_value,
            notes=result.metric_name,
        )
        for result in results
    ]


def refresh_results(card_path: Path, section: str, results: list[EvalResult], model_name: str) -> None:
    """Replaces the section and our metric's results in a card, and their file under `.eval_results/` beside it.

    Each in one rename; the first time the section is appended.

    Raises:
        OSError: there is no card, or it cannot be written.
        ValueError: its metadata or its markers are damaged.
    """
    if not card_path.is_file():
        raise OSError(f"there is no card {card_path}: write one, with the metadata of its model at the head.")
    text = card_path.read_text(encoding="utf-8")
    card = read_card(text, card_path)
    others = [found for found in card.data.eval_results or [] if found.metric_type != METRIC]
    card.data.eval_results = others + results
    card.data.model_name = card.data.model_name or model_name
    card.text = replace_section(card.text, section, card_path)
    content = str(card)
    written = read_card(content, card_path).data.eval_results  # as the Hub will read them
    lost = [found for found in card.data.eval_results if found not in written]
    if lost:
        raise ValueError(f"{card_path}: the result {lost[0]} does not survive being written as model-index.")
    entries = eval_entries(results)
    entries_text = yaml.safe_dump(
        eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True, width=1000
    )
    if parse_eval_result_entries(yaml.safe_load(entries_text)) != entries:
        raise ValueError(f"{card_path}: the results do not survive being written as {EVAL_RESULTS}.")
    write_text(card_path, content)
    entries_path = card_path.parent / EVAL_RESULTS
    entries_path.parent.mkdir(exist_ok=True)
    write_text(entries_path, entries_text)


def read_card(content: str, path: Path) -> ModelCard:
    with card_sentences(path):
        card = ModelCard(content)
    if not card.data.to_dict():
        raise ValueError(
            f"{path} has no metadata at its head (YAML between lines of ---): add license and base_model."
        )
    return card


def replace_section(text: str, section: str, path: Path) -> str:
    """`text` with what stands between the markers replaced, or with markers and section behind it."""
    block = f"{BEGIN}\n\n{section.strip()}\n\n{END}"  # blank lines, else a table would take the marker in
    begins, ends = text.count(BEGIN), text.count(END)
    if begins == ends == 0:
        return f"{text.rstrip()}\n\n{block}\n"
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if (begins, ends) != (1, 1) or not end:
        raise ValueError(
            f"{path} must hold the line {BEGIN} once and {END} once behind it, or neither: mend the card."
        )
    return before + block + after


def write_text(path: Path, text: str) -> None:
    """Through a temporary name, so that a failed write leaves the old file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
