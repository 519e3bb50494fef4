"""What a published folder holds: its files, its card, its remote code. Imports neither torch nor transformers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
FILES = (
    *("README.md", "LICENSE", "LICENSE.*", "NOTICE", "NOTICE.*", "config.json", "generation_config.json"),
    *("training.json", "results.json", "figures/*.png", "figures/*.svg", ".eval_results/*.yaml", *WEIGHTS),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)
CODE = ("*_osprey.py", "custom_generate/generate.py", "custom_generate/requirements.txt")
METRIC = "mean_acceptance_length"  # the type of the metric in a card's `model-index` that drafters are compared by
EVAL_RESULTS = f".eval_results/{METRIC}.yaml"  # the same figures in the Hub's newer format
PULL_RECORD = "pulled.json"  # what `osprey pull --out` notes beside the files; it stays on the machine


def belongs(name: str) -> bool:
    return any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in (*FILES, *CODE))


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): correct it.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object: correct it.")
    return content


def card_data(path: Path) -> ModelCardData:
    """The metadata at the head of a card, results included."""
    with card_sentences(path):
        return ModelCard.load(path).data


@contextmanager
def card_sentences(path: Path) -> Iterator[None]:
    """Turns what reading the metadata of the card `path` raises into `ValueError`, with one sentence."""
    try:
        yield
    except Exception as error:  # of YAML, or of the form of model-index
        raise ValueError(
            f"the metadata at the head of {path} cannot be read: {' '.join(str(error).split())}"
        ) from error


def own_code_folder() -> Path:
    """Where the installed `osprey.modeling` lies."""
    return Path(find_spec("osprey.modeling").origin).parent


def remote_code(folder: str | Path) -> dict[str, bytes]:
    """The modeling files of a folder that travel with a drafter, by their paths."""
    folder = Path(folder)
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for pattern in CODE for path in folder.glob(pattern)
    }


def differing_code(folder: str | Path) -> list[str]:
    """Files of a folder's remote code that are not the installed package's, or missing (`custom_generate` may be)."""
    ours, theirs = remote_code(own_code_folder()), remote_code(folder)
    needed = {name for name in ours if "/" not in name}
    return sorted(name for name in theirs.keys() | needed if theirs.get(name) != ours.get(name))
