"""``osprey pull NAME`` or ``osprey pull --target TARGET``: fetches a drafter or a backbone from the Hub."""

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from osprey.cli.arguments import parse
from osprey.hub_cards.layout import PULL_RECORD
from osprey.hub_cards.pull import pull, pull_for_target
from osprey.hub_cards.reach import go_offline_without_network
from osprey.train.checkpoints import atomic_folder, write_json


@dataclass
class PullArguments:
    name: str | None = field(default=None, metadata={"help": "repo on the Hub, ORG/NAME"})
    target: str | None = field(default=None, metadata={"help": "fetch the best drafter for this model (ORG/NAME)"})
    out: str | None = field(
        default=None, metadata={"help": "folder to copy it to (default: the Hub's local cache only)"}
    )
    revision: str | None = field(default=None, metadata={"help": "branch, tag or commit of the repo (default: main)"})
    overwrite: bool = field(default=False, metadata={"help": "replace the folder if it exists"})


def main(argv: list[str]) -> int:
    arguments, as_json = parse(PullArguments, argv, "osprey pull", __doc__, positional="name")
    if (arguments.name is None) == (arguments.target is None):
        raise ValueError("give either the name of a repo (ORG/NAME) or --target MODEL; `osprey zoo` lists both.")
    go_offline_without_network()
    if arguments.name is not None:
        pulled = pull(arguments.name, arguments.revision)
    else:
        pulled = pull_for_target(arguments.target, arguments.revision)
    record = {
        "repo": pulled.repo,
        "revision": pulled.revision,
        "kind": pulled.kind,
        "base_model": pulled.base_model,
        "mean_acceptance_length": pulled.mean_acceptance_length,
        "own_code": pulled.own_code,
    }
    path = pulled.path
    if arguments.out is not None:
        path = Path(arguments.out)
        with atomic_folder(path, arguments.overwrite, [pulled.path]) as work:
            shutil.copytree(pulled.path, work, dirs_exist_ok=True)  # links of the cache become files
            write_json(work / PULL_RECORD, record)
    if not pulled.own_code:
        print(
            f"{pulled.repo} brings other code than the installed osprey.modeling: OspreyDrafter.from_pretrained does "
            "not run it, trust_remote_code=True would.",
            file=sys.stderr,
        )
    if as_json:
        print(json.dumps(record | {"path": str(path)}, ensure_ascii=False))
    else:
        print(f"{pulled.kind} for {pulled.base_model}: {pulled.repo} at commit {pulled.revision}\n{path}")
    return 0
