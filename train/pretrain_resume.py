"""Which checkpoint a pretraining run goes on from, and whether it is one of the same run."""

import json
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

STATE_FILE = "data_state.json"  # written last: a checkpoint without it was cut short
# What may change between the parts of a run: nothing of it changes a step that both would have taken.
FREE = {
    *("log_steps", "report_to", "save_steps", "eval_steps", "eval_tokens", "final_eval_tokens", "max_passes"),
}
# May change as long as their product over the processes, `step_rows`, stays; not with a sampled softmax, which draws
# its ids for each forward pass.
BATCH_SHAPE = {"batch_rows", "accumulation"}


def whole_checkpoints(run: Path) -> list[Path]:
    return [path.parent for path in run.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{STATE_FILE}")]


def refuse_checkpoints(run: Path) -> None:
    """Raises `FileExistsError` where a new run would go on top of another's checkpoints."""
    if whole_checkpoints(run):
        raise FileExistsError(
            f"{run} holds checkpoints of a run: give --resume to go on from them, or --overwrite to clear them."
        )


def to_clear(run: Path) -> list[Path]:
    """A run's checkpoints, half ones too, and its TensorBoard logs."""
    return [*run.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), run / "runs"]


def clear_checkpoints(run: Path) -> None:
    """Removes what is `to_clear`; whatever else is there stays."""
    for folder in to_clear(run):
        shutil.rmtree(folder, ignore_errors=True)


def last_checkpoint(run: Path) -> Path:
    """The newest whole checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    whole = whole_checkpoints(run)
    if not whole:
        raise FileNotFoundError(f"there is no checkpoint in {run} to go on from; run without --resume.")
    return max(whole, key=lambda path: int(path.name.rsplit("-", 1)[1]))


def read_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """The position in the data, and what the run knew of itself."""
    path = checkpoint / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); remove {checkpoint} to go on from the one before.") from error
    for source in state["sources"]:  # version 0.1.0 stored the path
        if "path" in source:
            source["name"] = Path(source.pop("path")).name
    return state


def refuse_another_recipe(
    recipe: dict[str, Any], old: dict[str, Any] | None, checkpoint: Path, defaults: dict[str, Any]
) -> None:
    """Raises `ValueError` unless `recipe` continues the run whose recipe was `old` (None: version 0.1.0 kept none).

    `tokens` may grow, which makes a run longer; its schedule is then that of the longer run from here on.
    """
    if old is None:
        return
    old = defaults | json.loads(json.dumps(old))
    recipe = json.loads(json.dumps(recipe))
    if recipe["tokens"] < old["tokens"]:
        raise ValueError(
            f"{checkpoint} belongs to a run of {old['tokens']:g} tokens: --tokens {recipe['tokens']:g} is fewer."
        )
    # A setting that one of them lacks came with a later version: its default is what the earlier one did.
    free = FREE | BATCH_SHAPE if recipe["softmax_ids"] is None else FREE
    if old.get("precision") == "auto":  # an earlier version did not keep what it meant
        free = free | {"precision"}
    shared = old.keys() & recipe.keys() - free - {"tokens"}
    changed = sorted(name for name in shared if old[name] != recipe[name])
    if changed:
        listed = "; ".join(f"{name} was {old[name]}, is {recipe[name]}" for name in changed)
        raise ValueError(
            f"{checkpoint} belongs to another recipe ({listed}): give the same settings, or another --out."
        )
