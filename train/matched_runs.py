"""Matched runs: several untrained drafters, each distilled on the same data, for as long, at its own learning rate.

What is compared are *arms*: the drafter of `osprey convert`, the same with random blocks or without the restore stage,
the EAGLE-3-style baseline of `osprey baseline`. Each is trained at every learning rate with the first seed; the rate
whose held-out acceptance is best is its own, and gets the other seeds. Test answers take no part in that choice.
"""

import copy
import json
import logging
import re
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from osprey.train.checkpoints import versions, write_json
from osprey.train.distill import drafter_sha256, load_drafter, recipe
from osprey.train.distillation_config import OspreyDistillationConfig
from osprey.train.distillation_trainer import OspreyDistillationTrainer
from osprey.train.feature_data import FeatureDataset, RowSubset, split_rows
from osprey.train.text_drafters import NgramTable, prompt_lookup
from osprey.train.unroll import walk_rounds
from osprey.train.whiten import whiten_context

logger = logging.getLogger(__name__)

RESULTS_FILE = "runs.json"
ARM = re.compile(r"(?P<name>[\w.-]+)=(?P<folder>[^@]+)(@(?P<steps>\d+))?")


@dataclass
class MatchedArguments:
    """What is compared; how each is trained is in `OspreyDistillationConfig`, but for learning rate and seed."""

    arms: list[str] = field(
        metadata={
            "help": "NAME=FOLDER of untrained drafters, first the one that others are compared with; `{seed}` in a "
            "folder's name stands for the seed; NAME=FOLDER@STEPS is trained for another number of steps, at the "
            "rate found for the same folder without, and NAME=FOLDER@0 is measured as it is"
        }
    )
    features: list[str] = field(metadata={"help": "feature folders that all are trained on"})
    test_features: list[str] = field(
        metadata={"help": "feature folders of greedy answers to other prompts, with ids GROUP/…"}
    )
    out: str = field(metadata={"help": "folder for the results; started again, it goes on"})
    learning_rates: list[float] = field(default_factory=lambda: [5e-4, 1e-3, 2e-3], metadata={"help": "swept"})
    own_rates: list[str] = field(
        default_factory=list, metadata={"help": "NAME=RATE,RATE,…: what is swept for one arm instead"}
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "of data order and initial weights"})
    held_out_percent: int = field(
        default=8, metadata={"help": "share of the training rows that the rate is chosen on"}
    )


@dataclass(frozen=True)
class Arm:
    name: str
    folder: str
    steps: int | None  # None: as many as the recipe says


def matched_runs(matched: MatchedArguments, config: OspreyDistillationConfig) -> dict[str, Any]:
    """Trains what is missing and returns what `out`/runs.json holds: settings, `runs`, and drafters without training.

    Raises:
        ValueError: an arm cannot be read, or the folder holds runs with other settings.
    """
    arms = [parse_arm(text) for text in matched.arms]
    own_rates = parse_rates(matched.own_rates, {arm.name for arm in arms})
    check_arms(arms, own_rates)
    features, test = FeatureDataset(matched.features), FeatureDataset(matched.test_features)
    train, held_out = split_rows(features, matched.held_out_percent)
    if not held_out.rows:
        raise ValueError("No held-out row was written greedily (`temperature` 0): raise --held_out_percent.")
    path = Path(matched.out) / RESULTS_FILE
    settings = {
        "target": features.settings["target"],
        "features": features.identity(),
        "test_features": test.identity(),
        "held_out_percent": matched.held_out_percent,
        "recipe": {k: v for k, v in recipe(config).items() if k not in ("learning_rate", "seed")},
    }
    results = open_results(path, settings, config) | {"seeds": matched.seeds}
    if "without_training" not in results:
        results["without_training"] = without_training(train, test, config.unroll_steps)
        write_json(path, results)

    best: dict[str, float] = {}  # by folder
    for arm in sorted(arms, key=lambda arm: arm.steps is not None):
        if arm.folder not in best and arm.steps != 0:
            swept = {}
            for rate in own_rates.get(arm.name, matched.learning_rates):
                done = run_once(results, path, arm, rate, matched.seeds[0], config, (train, held_out, test))
                swept[rate] = done["held_out"]["eval_mal"]
            best[arm.folder] = max(swept, key=swept.__getitem__)
        rate = 0.0 if arm.steps == 0 else best[arm.folder]
        for seed in matched.seeds:
            run_once(results, path, arm, rate, seed, config, (train, held_out, test))
    results["chosen"] = {arm.name: 0.0 if arm.steps == 0 else best[arm.folder] for arm in arms}
    write_json(path, results)
    return results


def open_results(path: Path, settings: dict[str, Any], config: OspreyDistillationConfig) -> dict[str, Any]:
    """What earlier starts have done; raises `ValueError` where they did it with other settings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text()) if path.exists() else {"settings": settings, "runs": {}}
    # A setting that is younger than the file had its default.
    old = {option.name: option.default for option in fields(config)} | results["settings"]["recipe"]
    results["settings"]["recipe"] = {name: old[name] for name in settings["recipe"]}
    if results["settings"] != settings:
        raise ValueError(f"{path} holds runs with other features or another recipe: give another --out.")
    return results


def run_once(
    results: dict[str, Any],
    path: Path,
    arm: Arm,
    rate: float,
    seed: int,
    config: OspreyDistillationConfig,
    data: tuple[RowSubset, RowSubset, FeatureDataset],
) -> dict[str, Any]:
    """The run of `results` at this rate and with this seed, trained and written to `path` where it is missing."""
    key = f"{arm.name} {rate:g} {seed}"
    folder = arm.folder.replace("{seed}", str(seed))
    made_from = {"drafter": drafter_sha256(folder), "max_steps": config.max_steps if arm.steps is None else arm.steps}
    done = results["runs"].get(key, {})
    if {"drafter": done.get("drafter"), "max_steps": done.get("max_steps", done.get("steps"))} != made_from:
        logger.info("%s: learning rate %g, seed %d", arm.name, rate, seed)
        settings = copy.copy(config)  # its checks ran, and changed it: they are not run again
        settings.learning_rate, settings.seed, settings.max_steps = rate, seed, made_from["max_steps"]
        run = {"arm": arm.name, "learning_rate": rate, "seed": seed, "versions": versions(), **made_from}
        results["runs"][key] = run | train_and_test(folder, settings, *data)
        write_json(path, results)
    return results["runs"][key]


def check_arms(arms: list[Arm], own_rates: dict[str, list[float]]) -> None:
    """Raise `ValueError` for two arms of one name, and for rates of an arm whose folder has been swept before it."""
    if len({arm.name for arm in arms}) < len(arms):
        raise ValueError(f"--arms: two arms have one name among {', '.join(arm.name for arm in arms)}: rename one.")
    swept: dict[str, str] = {}
    for arm in sorted((arm for arm in arms if arm.steps != 0), key=lambda arm: arm.steps is not None):
        first = swept.setdefault(arm.folder, arm.name)
        if first != arm.name and arm.name in own_rates:
            raise ValueError(
                f"--own_rates: {arm.name} takes the rate found for {first}, which has the same folder: leave it out."
            )


def parse_arm(text: str) -> Arm:
    match = ARM.fullmatch(text)
    if match is None:
        raise ValueError(f"--arms: {text!r} is not NAME=FOLDER or NAME=FOLDER@STEPS.")
    return Arm(match["name"], match["folder"], int(match["steps"]) if match["steps"] is not None else None)


def parse_rates(texts: list[str], names: set[str]) -> dict[str, list[float]]:
    rates = {}
    for text in texts:
        name, _, values = text.partition("=")
        try:
            rates[name] = [float(value) for value in values.split(",")]
        except ValueError:
            raise ValueError(f"--own_rates: {text!r} is not NAME=RATE,RATE,…") from None
        if name not in names:
            raise ValueError(f"--own_rates: there is no arm {name!r} among {', '.join(sorted(names))}.")
    return rates


def train_and_test(
    folder: str, config: OspreyDistillationConfig, train: RowSubset, held_out: RowSubset, test: FeatureDataset
) -> dict[str, Any]:
    """One run (of no steps, the drafter as it is): what it took, its acceptance on held-out rows and test answers."""
    drafter = load_drafter(folder)
    if config.whiten_context and config.max_steps:
        whiten_context(drafter, train)
    trainer = OspreyDistillationTrainer(drafter, config, train, held_out)
    start = time.perf_counter()
    if config.max_steps:
        trainer.train()
    seconds = time.perf_counter() - start
    simulated, _ = trainer.simulate(test)
    return {
        "parameters": sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad),
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "held_out": trainer.evaluate(),
        "answers": {
            test.rows[index]["id"]: emitted(walk_rounds(answer.accepted, config.unroll_steps))
            for index, answer in sorted(simulated.items())
        },
    }


def without_training(train: RowSubset, test: FeatureDataset, steps: int) -> dict[str, dict[str, list[int]]]:
    """The rounds of drafters that are no networks on each test answer: prompt lookup, and an n-gram table."""
    table = NgramTable([_answer(train[index]) for index in range(len(train))])
    found: dict[str, dict[str, list[int]]] = {"prompt lookup": {}, "n-gram": {}}
    for index in range(len(test)):
        item = test[index]
        ids, begin = item["input_ids"].tolist(), test.rows[index]["prompt_length"]
        for name, draft in (("prompt lookup", prompt_lookup), ("n-gram", table.draft)):
            # The first token of an answer comes from the prefill; a draft follows it and every later one but the last.
            accepted = [common_prefix(draft(ids[:known], steps), ids[known:]) for known in range(begin + 1, len(ids))]
            found[name][item["id"]] = emitted(walk_rounds(accepted, steps))
    return found


def common_prefix(draft: list[int], answer: list[int]) -> int:
    """How many tokens of a draft are the answer's, up to the first that is not."""
    pairs = enumerate(zip(draft, answer, strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(draft), len(answer)))


def emitted(rounds: list[tuple[int, int]]) -> list[int]:
    """Tokens emitted by verifications, bonus tokens included, and the number of verifications."""
    return [sum(accepted + 1 for _, accepted in rounds), len(rounds)]


def _answer(item: dict[str, Any]) -> list[int]:
    return item["input_ids"][item["response_mask"]].tolist()
