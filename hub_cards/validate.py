"""Whether a folder may be published: whole, loadable, described, and without anything that does not belong there."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from osprey.hub_cards.layout import (
    PULL_RECORD,
    WEIGHTS,
    belongs,
    card_data,
    differing_code,
    own_code_folder,
    read_json,
)
from osprey.modeling import OspreyConfig, OspreyDrafter
from osprey.train.align import refuse_missing_rows

CONFIG_KEYS = (
    *("auto_map", "backbone", "backbone_model_type", "format_version", "target"),
    *("target_hidden_size", "target_layer_ids", "target_num_hidden_layers"),
)
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")


@dataclass(frozen=True)
class CheckedFolder:
    """A folder that may be published: `kind` is drafter or backbone, `files` the repo's paths and their bytes."""

    folder: Path
    kind: str
    base_model: str
    files: dict[str, int]


def check_folder(folder: str | Path) -> CheckedFolder:
    """Checks everything that can be checked without the Hub.

    Raises:
        ValueError, OSError: with the first fault in one sentence.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise OSError(f"there is no folder {folder}: `osprey distill` and `osprey pretrain` make what is published.")
    files = list_files(folder)
    config = read_json(folder / "config.json")
    kind = "drafter" if config.get("model_type") == OspreyConfig.model_type else "backbone"
    base_model = check_card(folder, kind)
    if kind == "drafter":
        check_drafter_config(folder, config, base_model)
        check_remote_code(folder)
    elif code := [name for name in files if name.endswith(".py")]:
        raise ValueError(f"{folder} is a backbone, which needs no code of its own: remove {', '.join(code)}.")
    check_loads(folder, kind)
    return CheckedFolder(folder, kind, base_model, files)


def list_files(folder: Path) -> dict[str, int]:
    """Paths and bytes of what would be published; whatever does not belong into a repo is refused."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if not path.is_dir()}
    paths.pop(PULL_RECORD, None)
    strangers = [name for name, path in paths.items() if not belongs(name) or path.is_symlink()]
    if strangers:
        more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
        raise ValueError(
            f"{folder} has files that do not belong into a published folder: {', '.join(strangers[:3])}{more}; remove "
            "them (weights are safetensors, code is what `osprey convert` writes, links are not followed)."
        )
    missing = [name for name in ("README.md", "config.json", "tokenizer.json", "training.json") if name not in paths]
    if not any(fnmatchcase(name, WEIGHTS[0]) or fnmatchcase(name, WEIGHTS[1]) for name in paths):
        missing.append("model.safetensors")
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}: every published folder has them.")
    for name, path in paths.items():
        if not name.endswith((".safetensors", ".png")):
            refuse_secrets(path, name)
    return {name: path.stat().st_size for name, path in paths.items()}


def refuse_secrets(path: Path, name: str) -> None:
    """Access tokens, and where this machine keeps its files."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if TOKEN.search(text):
        raise ValueError(f"{path} holds what looks like a Hub token: remove it, and revoke the token if it is one.")
    home = f"{Path.home()}/"
    if home != "//" and home in text and name != "tokenizer.json":
        raise ValueError(f"{path} names a path of this machine ({home}...): say it without, for others to read.")


def check_card(folder: Path, kind: str) -> str:
    """Looks for what the Hub and `osprey zoo` find a repo by, and returns its `base_model`."""
    path = folder / "README.md"
    data = card_data(path)
    for key, meaning in (("license", "e.g. apache-2.0"), ("base_model", "ORG/NAME of the model it was made for")):
        if not data.get(key):
            raise ValueError(f"{path} has no `{key}` in the metadata at its head: add it ({meaning}).")
    missing = [tag for tag in ("osprey", kind) if tag not in (data.tags or [])]
    if missing:
        raise ValueError(
            f"{path} lacks the tag(s) {', '.join(missing)} in its metadata: `osprey zoo` finds it by them."
        )
    if data.get("library_name") != "transformers":
        raise ValueError(f"{path} has no `library_name: transformers` in its metadata: add it.")
    base = data.base_model if isinstance(data.base_model, str) else data.base_model[0]
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", base):
        raise ValueError(f"{path} has base_model {base!r}, which is no model on the Hub: name it as ORG/NAME.")
    return base


def check_drafter_config(folder: Path, config: dict[str, Any], base_model: str) -> None:
    path = folder / "config.json"
    missing = [key for key in CONFIG_KEYS if config.get(key) is None]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: make the drafter with `osprey convert`.")
    if config["target"] != base_model:
        raise ValueError(
            f"{path} has target {config['target']!r}, but the card's base_model is {base_model!r}: correct the one "
            "that is wrong (the target's name is its ORG/NAME on the Hub)."
        )


def check_remote_code(folder: Path) -> None:
    if stale := differing_code(folder):
        raise ValueError(
            f"the remote code in {folder} is not that of the installed osprey.modeling ({', '.join(stale[:4])}): copy "
            f"the files from {own_code_folder()}."
        )


def check_loads(folder: Path, kind: str) -> None:
    """Loads weights and tokenizer as a user would, without running any code of the folder."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        load = OspreyDrafter if kind == "drafter" else AutoModelForCausalLM
        model, info = load.from_pretrained(folder, dtype="auto", output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers raises many kinds for what a damaged file can hold
        raise ValueError(f"the {kind} in {folder} does not load: {' '.join(str(error).split())}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    faults = sorted(
        {str(name) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in info[key]}
    )
    if faults:
        raise ValueError(f"the weights in {folder} do not fit its config ({', '.join(faults[:4])}): make it again.")
    broken = [name for name, tensor in model.named_parameters() if not torch.isfinite(tensor).all()]
    if broken:
        raise ValueError(f"the weights in {folder} hold NaN or infinity ({', '.join(broken[:4])}): train it again.")
    refuse_missing_rows(tokenizer, model.config.vocab_size, str(folder))
