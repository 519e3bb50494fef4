"""A benchmark of which nothing is left to run: its result comes from its journal, and no model is loaded."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osprey.cli.targets import resolve_target
from osprey.train.checkpoints import file_sha256, hub_commit, weights_sha256

if TYPE_CHECKING:
    from osprey.cli.bench import BenchArguments
    from osprey.eval.suites import Item


def asked_sha256(arguments: "BenchArguments", named: dict[str, str], items: list["Item"], versions: list[Any]) -> str:
    """Hash of all that the runs depend on and that is known before a model is loaded.

    `versions` are those of code and packages; of the models it is what their files hold.
    """
    import torch

    flags = {name: value for name, value in asdict(arguments).items() if name not in ("out", "plots")}
    models = [contents(path) for path in (resolve_target(arguments.target), *named.values())]
    machine = [torch.cuda.is_available(), torch.get_num_threads()]
    asked = [flags, models, [asdict(item) for item in items], machine, versions]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def contents(model: str) -> list[Any]:
    """The commit of a model on the Hub, and hashes of the weights and the settings in a folder."""
    settings = {path.name: file_sha256(path) for path in sorted(Path(model).expanduser().glob("*.json*"))}
    return [hub_commit(model), weights_sha256(model), settings]


def finished_result(
    out: Path, runs: Path, asked: str, environment: dict[str, Any], seed: int
) -> dict[str, Any] | None:
    """The result of the runs in `runs`; None unless `out` is of exactly these runs, and was asked for the same."""
    from osprey.eval.journal import Journal
    from osprey.eval.report import make_result

    if not out.is_file() or not runs.is_file():
        return None
    try:
        old = json.loads(out.read_text(encoding="utf-8"))
        found = {name: old["environment"][name] for name in ("asked_sha256", "runs_sha256")}
    except (ValueError, TypeError, KeyError):  # whatever lies there is written anew
        return None
    if found != made_from(asked, runs):
        return None
    journal, skipped = Journal(runs, old["settings"]), old["skipped"]["longer_than_context"]
    return make_result(journal, old["settings"], environment | found, skipped, seed)


def made_from(asked: str, runs: Path) -> dict[str, str]:
    """What a result's `environment` keeps for the next start to see that nothing is left to run."""
    return {"asked_sha256": asked, "runs_sha256": file_sha256(runs)}
