"""Public prompt suites by name, through `datasets`: where each lies, and which columns make the prompt."""

from dataclasses import dataclass
from typing import Any

from osprey.eval.prompts import Prompt


@dataclass(frozen=True)
class HubSuite:
    """Where a public suite lies. `configs` maps its configs (or files) to languages."""

    repo: str
    split: str
    domain: str
    columns: tuple[str, ...]  # what makes the prompt: a text, or a list of turns; several are put under each other
    configs: dict[str | None, str]
    reader: dict[str, Any] | None = None  # where the repo is only files: arguments of `load_dataset`, {} is the config


MGSM_LANGUAGES = "bn de en es fr ja ru sw te th zh"
GLOBAL_MMLU_LANGUAGES = (
    "am ar bn cs de el en es fa fil fr ha he hi id ig it ja ko ky lt mg ms ne nl ny pl pt ro ru si sn so sr sv sw te "
    "tr uk vi yo zh"
)
MMLU_COLUMNS = ("question", "option_a", "option_b", "option_c", "option_d")
SPEC_BENCH_FILE = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
PUBLIC = {
    "mt-bench": HubSuite("HuggingFaceH4/mt_bench_prompts", "train", "chat", ("prompt",), {None: "en"}),
    "humaneval": HubSuite("openai/openai_humaneval", "test", "code", ("prompt",), {None: "en"}),
    "gsm8k": HubSuite("openai/gsm8k", "test", "math", ("question",), {"main": "en"}),
    "math-500": HubSuite("HuggingFaceH4/MATH-500", "test", "math", ("problem",), {None: "en"}),
    "mgsm": HubSuite(
        "csv",
        "train",
        "math",
        ("question",),
        {name: name for name in MGSM_LANGUAGES.split()},
        {"data_files": "hf://datasets/juletxara/mgsm/mgsm_{}.tsv", "sep": "\t", "names": ["question", "answer"]},
    ),
    "spec-bench": HubSuite("json", "train", "", ("turns",), {None: "en"}, {"data_files": SPEC_BENCH_FILE}),
    "global-mmlu": HubSuite(
        "CohereLabs/Global-MMLU",
        "test",
        "knowledge",
        MMLU_COLUMNS,
        {name: name for name in GLOBAL_MMLU_LANGUAGES.split()},
    ),
}


def fetch_prompts(name: str) -> dict[str, list[Prompt]]:
    """The prompts of a public suite (a key of `PUBLIC`), by source: one for each of its languages.

    Raises `OSError` where the Hub cannot be reached, or the suite is not as it was.
    """
    suite, sources = PUBLIC[name], {}
    for config, language in suite.configs.items():
        source = f"{name}-{language}" if len(suite.configs) > 1 else name
        sources[source] = [
            Prompt(f"{source}/{number}", suite.domain or row["category"], language, turns_of(row, suite.columns))
            for number, row in enumerate(fetch_rows(name, config), 1)
        ]
    return sources


def turns_of(row: dict[str, Any], columns: tuple[str, ...]) -> tuple[str, ...]:
    first = row[columns[0]]
    if isinstance(first, list):
        return tuple(first)
    options = [f"{letter}. {row[column]}" for letter, column in zip("ABCD", columns[1:], strict=False)]
    return ("\n".join([first.strip(), *options]),)


def fetch_rows(name: str, config: str | None) -> list[dict[str, Any]]:
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar
    from huggingface_hub.utils import logging

    disable_progress_bar()
    logging.set_verbosity_error()  # its retries would be announced one by one
    suite = PUBLIC[name]
    arguments: dict[str, Any] = {"name": config}
    if suite.reader is not None:
        arguments = {**suite.reader, "data_files": suite.reader["data_files"].format(config)}
    try:
        rows = load_dataset(suite.repo, split=suite.split, **arguments)
    # `datasets` raises whatever its layers raise: of requests, httpx, fsspec, huggingface_hub.
    except Exception as error:
        place = arguments.get("data_files", suite.repo)
        raise OSError(
            f"the suite {name} could not be fetched ({place}: {type(error).__name__}): the Hub cannot be reached, or "
            "does not serve it; check the network, or name a JSONL file with --suite."
        ) from error
    needed = suite.columns if suite.domain else (*suite.columns, "category")
    if missing := [column for column in needed if column not in rows.column_names]:
        raise OSError(f"the suite {name} has changed on the Hub: {suite.repo} has no column {missing[0]!r} any more.")
    return list(rows)
