"""``osprey import REPO[/SUBFOLDER] --out DIR``: the authors' released checkpoint as a drafter folder."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from osprey.cli.arguments import parse
from osprey.cli.targets import check_on_hub, local_folder, resolve_target
from osprey.hub_cards.import_checkpoint import REPO, TARGETS, load_weights, read_checkpoint
from osprey.modeling import OspreyDrafter
from osprey.train.align import load_tokenizer
from osprey.train.checkpoints import (
    TRAINING_FILE,
    atomic_folder,
    public_name,
    save_drafter,
    versions,
    weights_sha256,
    write_json,
)
from osprey.train.convert import ConvertArguments, drafter_config, identify_target
from osprey.train.prune import refuse_windows


@dataclass
class ImportArguments:
    checkpoint: str = field(metadata={"help": "REPO or REPO/SUBFOLDER on the Hub, or a local folder"})
    out: str = field(metadata={"help": "drafter folder to write"})
    target: str | None = field(default=None, metadata={"help": f"target: Hub id or folder (known for {REPO})"})
    target_name: str | None = field(default=None, metadata={"help": "name of the target in the drafter's config"})
    target_revision: str | None = field(default=None, metadata={"help": "revision of the target on the Hub"})
    revision: str | None = field(default=None, metadata={"help": "revision of the checkpoint on the Hub"})
    overwrite: bool = field(default=False, metadata={"help": "replace the folder if it exists"})


def main(argv: list[str]) -> int:
    arguments, as_json = parse(ImportArguments, argv, "osprey import", __doc__, positional="checkpoint")
    record = import_checkpoint(arguments)
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
        return 0
    print(f"{arguments.out}: {record['source']} for {record['target']}, taps {record['target_layer_ids']}")
    print(f"{record['tensors']} tensors, each of them accounted for")
    if record["ignored_config_keys"]:
        print(f"keys of its config that were not read: {', '.join(record['ignored_config_keys'])}")
    return 0


def import_checkpoint(arguments: ImportArguments) -> dict[str, Any]:
    """Writes the drafter folder and returns what `training.json` says about it."""
    with atomic_folder(arguments.out, arguments.overwrite, (arguments.checkpoint, arguments.target)) as work:
        folder, commit = local_folder("checkpoint", arguments.checkpoint, subfolders=True), None
        target = arguments.target or default_target(arguments.checkpoint)
        if folder is None:
            folder, commit = fetch(arguments.checkpoint, arguments.revision)
        checkpoint = read_checkpoint(folder)
        refuse_windows(checkpoint.blocks, list(range(checkpoint.blocks.num_hidden_layers)))

        target_folder = resolve_target(target)
        revision = arguments.target_revision
        target_config = AutoConfig.from_pretrained(target_folder, revision=revision or "main").get_text_config()
        for what, ours, theirs in (
            ("vocab_size", checkpoint.blocks.vocab_size, target_config.vocab_size),
            ("target_hidden_size", checkpoint.target_hidden_size, target_config.hidden_size),
        ):
            if ours != theirs:
                raise ValueError(
                    f"{arguments.checkpoint} has {what} {ours}, but the target {target} has {theirs}: name its own "
                    "target with --target."
                )
        tokenizer = load_tokenizer(target_folder, revision)
        like_convert = ConvertArguments(
            backbone=arguments.checkpoint,
            target=target_folder,
            out=arguments.out,
            target_name=arguments.target_name or public_name(target),
            target_revision=revision,
            target_layer_ids=checkpoint.target_layer_ids,
            draft_vocab_size=checkpoint.draft_vocab_size if checkpoint.has_shortlist else None,
            untie=True,  # its two tables are both in the file
        )
        config = drafter_config(checkpoint.blocks, target_config, tokenizer, like_convert)
        identify_target(config, target_folder, tokenizer)
        drafter = OspreyDrafter(config)
        count = load_weights(checkpoint, drafter)
        drafter.generation_config.update(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id)

        record = {
            "stage": "import",
            "source": config.backbone,
            "revision": commit,
            "weights_sha256": weights_sha256(str(folder)),
            "tensors": count,
            "ignored_config_keys": checkpoint.ignored,
            "target": config.target,
            "target_layer_ids": config.target_layer_ids,
            "versions": versions(),
        }
        save_drafter(drafter, tokenizer, work)
        write_json(work / TRAINING_FILE, {"stages": [record]})
    return record


def default_target(checkpoint: str) -> str:
    """The target of a checkpoint in the authors' repository, whose folders are named for it."""
    first = checkpoint.removeprefix(f"{REPO}/").split("/")[0]
    if not checkpoint.startswith(f"{REPO}/") or first not in TARGETS:
        raise ValueError(f"{checkpoint} does not say which target it was trained for: name it with --target.")
    return TARGETS[first]


def fetch(checkpoint: str, revision: str | None) -> tuple[Path, str]:
    """A checkpoint from the Hub: its local folder, and its commit.

    Raises `OSError` or `ValueError` with one sentence where the Hub does not serve it.
    """
    from huggingface_hub import snapshot_download

    *repo, subfolder = (*checkpoint.split("/", 2), "") if checkpoint.count("/") == 1 else checkpoint.split("/", 2)
    if len(repo) != 2:
        raise OSError(f"unknown checkpoint {checkpoint!r}: there is no such folder.")
    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    check_on_hub("checkpoint", "/".join(repo), f"{prefix}config.json", revision)
    patterns = [f"{prefix}{name}" for name in ("config.json", "*.safetensors", "*.safetensors.index.json")]
    snapshot = Path(snapshot_download("/".join(repo), revision=revision, allow_patterns=patterns))
    return snapshot / prefix, snapshot.name
