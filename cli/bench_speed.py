"""``osprey bench --speed``: how much faster the drafter is than other ways to generate, and where its time goes.

All figures of a table are ratios from one run, in which everybody answers the same prompts in turn. ``--profile`` adds
what a round costs by part, and the bound that these costs leave.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from osprey.cli.arguments import parse
from osprey.cli.parser import check_bounds
from osprey.cli.targets import DEFAULT_TARGET, find_model
from osprey.train.checkpoints import public_name

if TYPE_CHECKING:
    from osprey.cli.generate import Pair
    from osprey.eval.rounds import Parts
    from osprey.eval.speed import Clock, Contestant, Ratio
    from osprey.eval.suites import Item

DRAFTER, ASSISTANT, BASELINE = "drafter", "assistant", "baseline"
PATHS = ("target", "drafter", "assistant", "baseline", "suite")


@dataclass
class SpeedArguments:
    target: str = field(default=DEFAULT_TARGET, metadata={"help": "target model: folder, Hub id or the built-in one"})
    drafter: str | None = field(default=None, metadata={"help": "Osprey drafter: folder or Hub id (default: ours)"})
    assistant: str | None = field(default=None, metadata={"help": "a plain language model to assist as one more way"})
    baseline: str | None = field(default=None, metadata={"help": "a trained drafter of `osprey baseline`, likewise"})
    suite: str = field(default="builtin", metadata={"help": "builtin, a public suite, a JSONL file, or a folder"})
    limit: int | None = field(default=None, metadata={"help": "prompts of each file, taken spread over it"})
    max_new_tokens: int = field(default=128, metadata={"help": "new tokens of a request"})
    repeats: int = field(default=3, metadata={"help": "times that each prompt is run; medians count"})
    weights: list[str] = field(
        default_factory=lambda: ["fp16", "fp32"], metadata={"help": "linear weights on a CPU; a run for each"}
    )
    threads: list[int] = field(
        default_factory=list, metadata={"help": "CPU threads; a run for each (default: torch's)"}
    )
    draft_lengths: list[str] = field(
        default_factory=lambda: ["default"],
        metadata={"help": "of the drafter: default, adaptive, and fixed ones (of copies too), such as 3 or 1-8"},
    )
    context_lengths: list[int] = field(
        default_factory=list, metadata={"help": "also some prompts behind others that fill so many tokens"}
    )
    context_prompts: int = field(default=4, metadata={"help": "how many prompts are lengthened"})
    clock: str = field(default="wall", metadata={"help": "wall, or process: CPU seconds of all threads"})
    profile: bool = field(default=False, metadata={"help": "also what a round costs by part"})


def main(argv: list[str]) -> int:
    arguments, as_json = parse(SpeedArguments, argv, "osprey bench --speed", __doc__)
    check_arguments(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging

    from osprey.cli.bench import environment, load_items
    from osprey.cli.generate import find_drafter

    logging.disable_progress_bar()
    items = load_items(arguments.suite, arguments.limit)
    drafter = find_drafter(arguments.drafter)  # refused before a target is fetched
    runs = []
    for run in all_runs(arguments, drafter, items):
        runs.append(run)
        if not as_json:
            print(describe(run), flush=True)
    if as_json:
        settings = asdict(arguments)
        settings |= {name: public_name(value) for name, value in settings.items() if name in PATHS and value}
        made_by = environment(["--speed", *argv])
        print(json.dumps({"settings": settings, "environment": made_by, "runs": [asdict(run) for run in runs]}))
    return 0


def check_arguments(arguments: SpeedArguments) -> None:
    from osprey.cli.bench import expand_lengths

    for name in ("max_new_tokens", "repeats", "threads", "context_lengths", "context_prompts"):
        check_bounds((f"--{name}", getattr(arguments, name), 1))
    if not arguments.weights or set(arguments.weights) - {"fp16", "fp32"}:
        raise ValueError(f"--weights is {' '.join(arguments.weights)}, but must be fp16, fp32 or both.")
    if arguments.clock not in ("wall", "process"):
        raise ValueError(f"--clock is {arguments.clock}, but must be wall or process.")
    arguments.draft_lengths = expand_lengths(arguments.draft_lengths)


@dataclass
class SpeedRun:
    """The figures of one precision with one number of threads."""

    weights: str
    threads: int
    groups: dict[str, list["Ratio"]]
    parts: "Parts | None"


def all_runs(arguments: SpeedArguments, drafter: str, items: list["Item"]) -> Iterator[SpeedRun]:
    import torch

    from osprey.eval.speed import make_clock

    for weights in arguments.weights:
        print(f"Loading target and drafter ({weights}) ...", file=sys.stderr, flush=True)
        pair, contestants = load_contestants(arguments, drafter, weights, items)
        clock = make_clock(arguments.clock, pair.target.device)
        long = lengthened(arguments, pair, items)
        for threads in arguments.threads or [torch.get_num_threads()]:
            torch.set_num_threads(threads)
            groups = measure(arguments, pair, contestants, [*items, *long], clock)
            parts = profile(arguments, pair, contestants, items, clock) if arguments.profile else None
            yield SpeedRun(pair.weights, threads, groups, parts)


def lengthened(arguments: SpeedArguments, pair: "Pair", items: list["Item"]) -> list["Item"]:
    """Some of the prompts at each context length, behind the others."""
    from osprey.cli.bench import load_items
    from osprey.eval.contexts import lengthen
    from osprey.eval.suites import spread

    suite = load_items(arguments.suite, None) if arguments.context_lengths else []
    long: list[Item] = []
    for length in arguments.context_lengths:
        fitting, _ = lengthen(items, suite, [length], pair.tokenizer, arguments.max_new_tokens)
        long += spread(fitting, arguments.context_prompts)
    return long


def load_contestants(
    arguments: SpeedArguments, drafter_path: str, weights: str, items: list["Item"]
) -> tuple["Pair", list["Contestant"]]:
    """The target with its drafter, and who is timed: plain first, then the drafter at each length, then the others."""
    import torch

    from osprey.cli.generate import load_pair
    from osprey.eval.peers import PLAIN, PROMPT_LOOKUP, Peer, drafter_peer, load_peer
    from osprey.eval.speed import Contestant

    own = ("num_assistant_tokens", "confidence_threshold", "lookup_num_tokens", "adaptive")
    on_cpu = not torch.accelerator.is_available()
    options = argparse.Namespace(
        target=arguments.target, weights=weights if on_cpu else None, no_compare=True, **dict.fromkeys(own)
    )
    pair = load_pair(options, drafter_path, [item.prompt for item in items])
    drafter = drafter_peer(DRAFTER, pair.drafter)
    contestants = [Contestant(Peer(PLAIN, "plain"))]
    contestants += [Contestant(drafter, length) for length in arguments.draft_lengths]
    contestants.append(Contestant(Peer(PROMPT_LOOKUP, "prompt lookup")))
    for name, path in ((ASSISTANT, arguments.assistant), (BASELINE, arguments.baseline)):
        if path is not None:
            folder = find_model(name, path)
            peer = load_peer(name, folder, pair.target, pair.tokenizer, drafter, pair.weights == "fp16")
            contestants.append(Contestant(peer))
    return pair, contestants


def measure(
    arguments: SpeedArguments, pair: "Pair", contestants: list["Contestant"], items: list["Item"], clock: "Clock"
) -> dict[str, list["Ratio"]]:
    """Ratios by group of prompts and, where there are several, over all that were not lengthened."""
    from tqdm import tqdm

    from osprey.eval.peers import PLAIN, PROMPT_LOOKUP
    from osprey.eval.speed import by_group, race, ratios

    trials = race(pair.target, pair.tokenizer, contestants, items, arguments.max_new_tokens, arguments.repeats, clock)
    count = len(items) * arguments.repeats * len(contestants)
    trials = list(tqdm(trials, total=count, unit="run", desc=f"{pair.weights} weights"))
    groups = by_group(trials)
    own = {item.prompt.domain for item in items if item.context_length is None}
    if len(own) > 1:
        groups["all"] = [trial for trial in trials if trial.group in own]
    order = [contestant.name for contestant in contestants]
    return {
        name: sorted(ratios(some, PLAIN, PROMPT_LOOKUP), key=lambda one: order.index(one.contestant))
        for name, some in groups.items()
    }


def profile(
    arguments: SpeedArguments, pair: "Pair", contestants: list["Contestant"], items: list["Item"], clock: "Clock"
) -> "Parts":
    """Plain generation and the drafter (at its first length) once more, watched from inside."""
    from osprey.eval.rounds import summarize_parts, watch_passes
    from osprey.eval.speed import time_generate

    passes: tuple[list, list] = ([], [])
    for item in items:
        for contestant, drafter, some in zip(contestants, (None, pair.drafter), passes, strict=False):
            with watch_passes(pair.target, drafter, clock) as seen:
                time_generate(pair.target, pair.tokenizer, contestant, item, arguments.max_new_tokens, clock)
            some.append(seen)
    return summarize_parts(*passes)


def describe(run: SpeedRun) -> str:
    lines = [f"\n{run.weights} weights, threads: {run.threads}\n"]
    head = ["group", "way", "prompts", "tok/s", "over plain", "over lookup", "MAL", "first token", "other text"]
    rows = [
        [name if index == 0 else "", one.contestant, *figures_of(one)]
        for name, some in run.groups.items()
        for index, one in enumerate(some)
    ]
    lines += table(head, rows)
    own = [(name, one) for name, some in run.groups.items() for one in some if one.contestant.startswith(DRAFTER)]
    name, least = min(own, key=lambda entry: entry[1].speedup)
    lines.append(f"\nleast gain of the drafter: {least.speedup:.2f} times plain ({name}, {least.contestant})")
    name, least = min(own, key=lambda entry: entry[1].over_lookup)
    lines.append(f"and {least.over_lookup:.2f} times prompt lookup ({name}, {least.contestant})")
    if run.parts is not None:
        lines += ["", *describe_parts(run.parts)]
    return "\n".join(lines)


def figures_of(one: "Ratio") -> list[str]:
    return [
        str(one.prompts),
        f"{one.tokens_per_second:.1f}",
        f"{one.speedup:.2f}x",
        "-" if one.over_lookup is None else f"{one.over_lookup:.2f}x",
        "-" if one.mal is None else f"{one.mal:.2f}",
        f"{one.first_token:.2f}",
        str(one.different),
    ]


def describe_parts(parts: "Parts") -> list[str]:
    def of_plain(seconds: float | None) -> list[str]:
        return ["-", "-"] if seconds is None else [f"{1e3 * seconds:.2f}", f"{seconds / parts.plain_step:.3f}"]

    rows = [["plain step", *of_plain(parts.plain_step)], ["around a plain step", *of_plain(parts.plain_outside)]]
    rows += [[f"verification of {width}", *of_plain(cost)] for width, cost in parts.verification.items()]
    rows += [
        ["draft step", *of_plain(parts.draft_step)],
        ["first draft step of a round", *of_plain(parts.first_step)],
        ["outside the models, a round", *of_plain(parts.outside)],
    ]
    prefill = f"{parts.drafter_prefill / parts.target_prefill:.1%} of the target's prefill"
    return [
        *table(["part", "ms", "plain steps"], rows),
        "",
        f"{parts.rounds} rounds: {parts.drafting_share:.1%} drafting, {parts.verifying_share:.1%} verifying, "
        f"{parts.outside_share:.1%} outside the models; the drafter's prefill is {prefill}",
        f"of the bound MAL / (verify + k * draft): {parts.of_bound:.1%}",
    ]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table, its columns aligned."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(head), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)]
