"""Which pruned start restores best: every strategy at every depth, for the same number of tokens each."""

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from osprey.train.checkpoints import file_sha256, write_json
from osprey.train.data import check_source, parse_sources
from osprey.train.linear_loss import use_linear_cross_entropy
from osprey.train.perplexity import held_out_losses, perplexities
from osprey.train.precision import default_device_type
from osprey.train.pretrain import PretrainArguments, pretrain, recipe_settings
from osprey.train.prune import STRATEGIES, PruneArguments, load_source, prune

RESULTS_FILE = "comparison.json"


@dataclass
class CompareArguments:
    """What is compared; everything else is a recipe of `pretrain`, whose `model` is the source and `out` a folder."""

    strategies: list[str] = field(
        default_factory=lambda: ["first", "uniform", "ends", "influence"],
        metadata={"help": f"of {', '.join(STRATEGIES)}"},
    )
    depths: list[int] = field(default_factory=lambda: [2, 4], metadata={"help": "numbers of blocks to keep"})
    calibration: list[str] = field(
        default_factory=list, metadata={"help": "text for influence and angular (default: the files of --data)"}
    )


def compare_pruning(comparison: CompareArguments, recipe: PretrainArguments) -> dict[str, Any]:
    """Prunes and restores each combination, and returns what `recipe.out`/comparison.json holds.

    Started again, it goes on with what is missing: finished combinations are kept, an unfinished one resumes from its
    last checkpoint.

    Raises:
        ValueError: no held-out files, an unknown strategy, or the folder holds a comparison by another recipe.
    """
    unknown = [name for name in comparison.strategies if name not in STRATEGIES]
    if unknown:
        raise ValueError(f"the strategy {unknown[0]!r} is unknown: choose from {', '.join(STRATEGIES)}.")
    if not recipe.held_out:
        raise ValueError("a comparison needs text that is not trained on: give files with --held_out.")
    settings = _settings(comparison, recipe)
    folder = Path(recipe.out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS_FILE
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"settings": settings, "cells": {}}
    old = results["settings"]
    changed = [name for name in sorted(old.keys() & settings.keys()) if old[name] != settings[name]]
    if changed:
        listed = "; ".join(f"{name} was {old[name]}, is {settings[name]}" for name in changed)
        raise ValueError(f"{path} was made with other settings ({listed}): give the same, or another --out.")
    if "source" not in results:
        results["source"] = _source_perplexities(recipe)
        write_json(path, results)
    for depth in comparison.depths:
        for strategy in comparison.strategies:
            name = f"{strategy}-{depth}"
            if name not in results["cells"]:
                results["cells"][name] = _cell(folder / name, strategy, depth, comparison, recipe)
                write_json(path, results)
    return results


def _settings(comparison: CompareArguments, recipe: PretrainArguments) -> dict[str, Any]:
    """What all cells have in common, as it comes back from JSON."""
    return json.loads(
        json.dumps(
            recipe_settings(recipe, parse_sources(recipe.data, recipe.data_root))
            | {"data": recipe.data, "held_out": recipe.held_out}  # as files below --data_root
            | {"calibration": [[Path(path).name, file_sha256(path)] for path in comparison.calibration]}
        )
    )


def _cell(
    out: Path, strategy: str, depth: int, comparison: CompareArguments, recipe: PretrainArguments
) -> dict[str, Any]:
    pruned, run = Path(f"{out}-pruned"), Path(f"{out}.run")
    if not pruned.exists():
        calibration = comparison.calibration or [
            str(source.path) for source in parse_sources(recipe.data, recipe.data_root) if source.path is not None
        ]
        prune(
            PruneArguments(
                source=recipe.model, out=str(pruned), layers=depth, strategy=strategy, calibration=calibration
            )
        )
    begun = any(run.glob("checkpoint-*/data_state.json"))
    record = pretrain(replace(recipe, model=str(pruned), out=str(out), resume=begun, overwrite=True))
    shutil.rmtree(run, ignore_errors=True)
    cut = json.loads((pruned / "training.json").read_text(encoding="utf-8"))["stages"][-1]
    return {
        "strategy": strategy,
        "depth": depth,
        **{name: cut[name] for name in ("layer_ids", "influence", "parameters")},
        "pruned": record["perplexity_before"],
        **{name: record[name] for name in ("norm_scale", "perplexity_during", "tokens", "seconds")},
        "restored": record["perplexity_after"],
    }


def _source_perplexities(recipe: PretrainArguments) -> dict[str, float]:
    held_out = [check_source(Path(recipe.data_root) / path) for path in recipe.held_out]
    model, tokenizer = load_source(recipe.model)
    model: PreTrainedModel = model.to(default_device_type())
    use_linear_cross_entropy(model)
    losses = held_out_losses(model, tokenizer, held_out, recipe.length, recipe.final_eval_tokens, recipe.precision)
    return perplexities(losses)


def markdown(results: dict[str, Any]) -> str:
    """Two tables: how each start restores (mean over the files), and the perplexities of each file."""
    cells = list(results["cells"].values())
    marks = [entry["tokens"] for entry in cells[0]["perplexity_during"]] if cells else []
    head = ["strategy", "blocks", "layers", "parameters", "pruned"]
    head += [f"{tokens / 1e6:.2g}M tokens" for tokens in marks] + ["restored", "seconds"]
    rows = []
    for cell in cells:
        during = {entry["tokens"]: _short(entry["mean"]) for entry in cell["perplexity_during"]}
        start = [cell["strategy"], str(cell["depth"]), " ".join(map(str, cell["layer_ids"]))]
        start += [f"{cell['parameters'] / 1e6:.1f}M", _short(cell["pruned"]["mean"])]
        end = [_short(cell["restored"]["mean"]), f"{cell['seconds']:.0f}"]
        rows.append([*start, *(during.get(tokens, "") for tokens in marks), *end])
    names = list(results["source"])
    files = [["source", "", *(_short(results["source"][name]) for name in names)]]
    for cell in cells:
        label = f"{cell['strategy']} {cell['depth']}"
        files += [[label, stage, *(_short(cell[stage][name]) for name in names)] for stage in ("pruned", "restored")]
    return "\n".join([*_table(head, rows), "", *_table(["model", "stage", *names], files)])


def _short(perplexity: float) -> str:
    return f"{perplexity:.2f}" if perplexity < 1000 else f"{perplexity:.1e}".replace("e+0", "e").replace("e+", "e")


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
