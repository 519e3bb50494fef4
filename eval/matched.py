"""Tables of matched runs (`osprey.train.matched_runs`): MAL by group, and the first arm's over each other's.

MAL is the mean over requests (DESIGN §3), then over seeds. Intervals are percentile bootstraps (95 %) over requests,
the same ones for all arms, and over seeds, drawn for each arm apart.
"""

from typing import Any

import numpy as np

from osprey.eval.markdown import table as table_of

SAMPLES = 4000


def parse_groups(texts: list[str]) -> dict[str, tuple[str, ...]]:
    """`NAME=PREFIX,…` as names and prefixes; raises `ValueError` for anything else."""
    groups = {}
    for text in texts:
        name, equals, prefixes = text.partition("=")
        if not (name and equals and prefixes):
            raise ValueError(f"--groups: {text!r} is not NAME=PREFIX,PREFIX,…")
        groups[name] = tuple(prefixes.split(","))
    return groups


def compare(results: dict[str, Any], groups: dict[str, tuple[str, ...]], seed: int = 0) -> dict[str, Any]:
    """For each arm and group the MAL, its interval, and the ratio of the first arm's to it with an interval.

    Raises:
        ValueError: a group has no answers.
    """
    answers = _answers(results)  # by arm: [seeds, requests] of tokens and rounds
    ids = answers.pop("ids")
    first = next(iter(answers))
    table: dict[str, Any] = {"target": results["settings"]["target"], "arms": {}, "groups": {}}
    for name, prefixes in groups.items():
        chosen = np.array([index for index, id in enumerate(ids) if id.startswith(prefixes)], dtype=int)
        if not len(chosen):
            raise ValueError(f"--groups: no test answer has an id that begins with {' or '.join(prefixes)}.")
        table["groups"][name] = {"prefixes": prefixes, "requests": len(chosen)}
        draws = np.random.default_rng(seed).integers(len(chosen), size=(SAMPLES, len(chosen)))
        drawn = {}
        for number, (arm, values) in enumerate(answers.items()):
            lengths = values[:, chosen, 0] / values[:, chosen, 1]  # [seeds, requests]
            seeds = np.random.default_rng([seed, number]).integers(len(lengths), size=(SAMPLES, len(lengths)))
            by_seed = np.stack([row[draws].mean(1) for row in lengths], 1)  # [samples, seeds]
            drawn[arm] = np.take_along_axis(by_seed, seeds, 1).mean(1)  # [samples]
            pooled = values[:, chosen].sum((0, 1))
            cell = {"mal": lengths.mean(), "interval": np.quantile(drawn[arm], [0.025, 0.975])}
            cell |= {"pooled": pooled[0] / pooled[1], "by_seed": lengths.mean(1)}
            if arm != first:
                base = answers[first][:, chosen, 0] / answers[first][:, chosen, 1]
                cell["ratio"] = base.mean() / lengths.mean()
                cell["ratio_interval"] = np.quantile(drawn[first] / drawn[arm], [0.025, 0.975])
            rounded = {key: np.round(value, 4).tolist() for key, value in cell.items()}
            table["arms"].setdefault(arm, {"groups": {}})["groups"][name] = rounded
    for arm, rate in results["chosen"].items():
        runs = _runs(results, arm)
        table["arms"][arm] |= {
            "learning_rate": rate,
            "swept": {f"{run['learning_rate']:g}": run["held_out"]["eval_mal"] for run in _swept(results, arm)},
            "seeds": [run["seed"] for run in runs],
            "steps": runs[0]["steps"],
            "parameters": runs[0]["parameters"],
            "seconds": [run["seconds"] for run in runs],
        }
    return table


def markdown(table: dict[str, Any]) -> str:
    """Two tables: MAL by group, and the first arm's MAL over each other's."""
    names = list(table["groups"])
    titles = [f"{name} ({table['groups'][name]['requests']})" for name in names]
    rows, ratios = [], []
    for arm, entry in table["arms"].items():
        cells = [entry["groups"][name] for name in names]
        lengths = ["{:.3f} [{:.3f}, {:.3f}]".format(cell["mal"], *cell["interval"]) for cell in cells]
        rate = f"{entry['learning_rate']:g}" if "learning_rate" in entry else ""
        rows.append([arm, str(entry.get("steps", "")), rate, *lengths])
        if "ratio" in cells[0]:
            ratios.append([arm, *("{:.3f} [{:.3f}, {:.3f}]".format(c["ratio"], *c["ratio_interval"]) for c in cells)])
    first = next(iter(table["arms"]))
    head = ["arm", "steps", "learning rate", *titles]
    return "\n\n".join([table_of(head, rows), table_of([f"{first} over", *names], ratios)])


def _answers(results: dict[str, Any]) -> dict[str, Any]:
    """`ids` of the test answers, and for each arm an array of tokens and rounds, `[seeds, requests, 2]`."""
    per_arm = {arm: [run["answers"] for run in _runs(results, arm)] for arm in results["chosen"]}
    per_arm |= {name: [answers] for name, answers in results["without_training"].items()}
    # An answer of one token has no round, hence no acceptance length.
    ids = [id for id, (_, rounds) in next(iter(per_arm.values()))[0].items() if rounds]
    arrays = {arm: np.array([[seed[id] for id in ids] for seed in seeds], float) for arm, seeds in per_arm.items()}
    return {**arrays, "ids": ids}


def _runs(results: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    """The arm's runs at its chosen rate, one for each of the seeds that were asked for last."""
    rate = results["chosen"][arm]
    runs = results["runs"].values()
    by_seed = {run["seed"]: run for run in runs if run["arm"] == arm and run["learning_rate"] == rate}
    return [by_seed[seed] for seed in results["seeds"]]


def _swept(results: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    seed = results["seeds"][0]
    return [run for run in results["runs"].values() if run["arm"] == arm and run["seed"] == seed]
