"""``osprey bench --suite S --out RESULT.json``: acceptance and speed by domain and language, beside baselines.

Writes RESULT.json, the same as tables in RESULT.md, and every run to RESULT.runs.jsonl; started again with the same
options it goes on where it was. ``osprey bench --plots RESULT.json … --out DIR`` draws the figures (of a run's
trainer_state.json, its training curves). ``osprey bench --speed`` measures where the time goes; see its own --help.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osprey.cli.arguments import parse
from osprey.cli.parser import check_bounds
from osprey.cli.targets import DEFAULT_TARGET, find_model
from osprey.train.checkpoints import hub_commit, public_name, versions, weights_sha256, write_json

if TYPE_CHECKING:
    from osprey.cli.generate import Pair
    from osprey.eval.peers import Peer
    from osprey.eval.suites import Item

DEFAULT_NAME = "osprey"


@dataclass
class BenchArguments:
    target: str = field(default=DEFAULT_TARGET, metadata={"help": "target model: folder, Hub id or the built-in one"})
    drafter: str | None = field(default=None, metadata={"help": "Osprey drafter, DIR or NAME=DIR (default: ours)"})
    baseline: list[str] = field(
        default_factory=list,
        metadata={"help": "prompt-lookup, and [NAME=]DIR of other drafters (baselines, ablations) or of plain LMs"},
    )
    matrix: list[str] = field(default_factory=list, metadata={"help": "DOMAIN=DIR of drafters trained on one domain"})
    suite: str = field(
        default="builtin", metadata={"help": "builtin, a public suite, a JSONL file, or a folder of them"}
    )
    out: str | None = field(default=None, metadata={"help": "result file (.json), or with --plots a folder"})
    limit: int | None = field(default=None, metadata={"help": "prompts of each file, taken spread over it"})
    temperatures: list[float] = field(default_factory=lambda: [0.0], metadata={"help": "0 is greedy"})
    draft_lengths: list[str] = field(
        default_factory=lambda: ["default"],
        metadata={"help": "default, adaptive, and fixed ones, which bound copies too, such as 3 or 1-8"},
    )
    context_lengths: list[int] = field(
        default_factory=list, metadata={"help": "fill a context of so many tokens with other prompts of the suite"}
    )
    without_copies: bool = field(default=False, metadata={"help": "the drafter's network alone as one more peer"})
    lookup_num_tokens: int | None = field(default=None, metadata={"help": "longest copy of all drafters, 0 for none"})
    max_new_tokens: int = field(default=128, metadata={"help": "new tokens of a request"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads (default: torch's choice)"})
    weights: str | None = field(default=None, metadata={"help": "fp16 (default) or fp32 linear weights on a CPU"})
    seed: int = field(default=0, metadata={"help": "of sampling and of the intervals"})
    plots: list[str] = field(default_factory=list, metadata={"help": "result files, and trainer_state.json, to draw"})


def main(argv: list[str]) -> int:
    if "--speed" in argv:
        from osprey.cli import bench_speed

        return bench_speed.main([word for word in argv if word != "--speed"])
    arguments, as_json = parse(BenchArguments, argv, "osprey bench", __doc__)
    if arguments.plots:
        return draw(arguments.plots, arguments.out)
    check_arguments(arguments)
    from osprey.eval.markdown import to_markdown
    from osprey.hub_cards.results import write_text

    out = Path(arguments.out)
    items = load_items(arguments.suite, arguments.limit)
    result = measure(arguments, items, out.with_suffix(".runs.jsonl"), argv)
    write_json(out, result)
    text = to_markdown(result)
    write_text(out.with_suffix(".md"), text)
    print(json.dumps(result, ensure_ascii=False) if as_json else text)
    return 0


def load_items(suite: str, limit: int | None) -> list["Item"]:
    """`load_suite`, with public suites from the cache at once where the Hub does not answer."""
    from osprey.eval.public_suites import PUBLIC
    from osprey.eval.suites import load_suite
    from osprey.hub_cards.reach import go_offline_without_network

    if suite.lower() in PUBLIC:
        go_offline_without_network()  # before `datasets` is imported, which copies the setting
    return load_suite(suite, limit)


def check_arguments(arguments: BenchArguments) -> None:
    from osprey.cli.tables import check_writable

    if arguments.out is None or not arguments.out.endswith(".json"):
        raise ValueError("--out names the result file, and must end in .json.")
    out = Path(arguments.out)
    check_writable(out)
    if out.with_suffix(".md").exists() and not out.with_suffix(".runs.jsonl").exists():
        raise FileExistsError(
            f"{out.with_suffix('.md')} would be replaced, and has no runs beside it that would make it a result of "
            "`osprey bench`: choose another --out, or remove it first."
        )
    check_bounds(
        ("--max_new_tokens", arguments.max_new_tokens, 1),
        ("--threads", arguments.threads, 1),
        ("--lookup_num_tokens", arguments.lookup_num_tokens, 0),
        ("--temperatures", arguments.temperatures, 0),
        ("--context_lengths", arguments.context_lengths, 1),
    )
    if arguments.weights not in (None, "fp16", "fp32"):
        raise ValueError(f"--weights is {arguments.weights}, but must be fp16 or fp32.")
    arguments.draft_lengths = expand_lengths(arguments.draft_lengths)


def expand_lengths(words: list[str]) -> list[str]:
    """`default`, `adaptive` and numbers, with ranges such as 1-8 written out."""
    lengths: list[str] = []
    for word in words:
        first, _, last = word.partition("-")
        if word in ("default", "adaptive"):
            lengths.append(word)
        elif first.isdecimal() and (last or first).isdecimal() and 0 < int(first) <= int(last or first):
            lengths += [str(length) for length in range(int(first), int(last or first) + 1)]
        else:
            raise ValueError(f"--draft_lengths: {word!r} is neither default, adaptive, a number nor a range like 1-8.")
    return list(dict.fromkeys(lengths))


def measure(arguments: BenchArguments, items: list["Item"], runs: Path, argv: list[str]) -> dict[str, Any]:
    """Loads the models, runs what `runs` does not hold yet, and makes the result."""
    import torch
    from tqdm import tqdm
    from transformers.utils import logging

    from osprey.eval.bench import Plan, cells_of, run_suite, warm_up
    from osprey.eval.contexts import lengthen
    from osprey.eval.journal import Journal
    from osprey.eval.report import make_result

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # generation warns of what transformers itself does with an assistant
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    plan = Plan(arguments.temperatures, arguments.draft_lengths, arguments.max_new_tokens, arguments.seed)
    named = named_models(arguments)
    print("Loading target and drafters ...", file=sys.stderr, flush=True)
    pair, peers = load_peers(arguments, named, items)
    misfits: list[str] = []
    if arguments.context_lengths:
        suite = load_items(arguments.suite, None)
        items, misfits = lengthen(items, suite, arguments.context_lengths, pair.tokenizer, plan.max_new_tokens)
    settings = settings_of(arguments, pair, peers, named, items)
    notes = {"plain_scale": pair.plain_scale, "plain_probe": pair.probe}
    journal = Journal(runs, settings, notes)
    warm_up(pair.target, pair.tokenizer, peers, items[0])
    turns = sum(len(item.prompt.turns) for item in items) * len(plan.temperatures)
    with tqdm(total=turns * (1 + len(cells_of(peers[1:], plan))), unit="run", desc="bench") as bar:
        skipped = run_suite(pair.target, pair.tokenizer, peers, items, plan, journal, bar.update)
    if not journal.runs:
        raise ValueError("every prompt of the suite is longer than the target's context: there is nothing to report.")
    return make_result(journal, settings, environment(argv), misfits + skipped, plan.seed)


def named_models(arguments: BenchArguments) -> dict[str, str]:
    """Folders or Hub ids by name: the drafter first, then baselines and the drafters of the matrix."""
    from osprey.cli.generate import find_drafter
    from osprey.eval.peers import PLAIN, PROMPT_LOOKUP

    if any("=" not in word for word in arguments.matrix):
        raise ValueError("--matrix takes drafters as DOMAIN=DIR, named for the domain that each was trained on.")
    first = [arguments.drafter] if arguments.drafter is not None else arguments.matrix[:1]
    others = [*arguments.baseline, *arguments.matrix]
    words = first + [word for word in others if word not in (*first, PROMPT_LOOKUP)]
    models = {} if first else {DEFAULT_NAME: find_drafter(None)}
    for word in words:
        name, equals, path = word.partition("=")
        name, path = (name, path) if equals else (public_name(word), word)
        if name in (*models, PLAIN, PROMPT_LOOKUP):
            raise ValueError(f"two peers are called {name!r}: give one another name, as NAME=DIR.")
        models[name] = find_model("drafter", path)
    return models


def load_peers(arguments: BenchArguments, named: dict[str, str], items: list["Item"]) -> tuple["Pair", list["Peer"]]:
    """The target with the first drafter, and all peers: plain generation, this drafter, the others."""
    from osprey.cli.generate import load_pair
    from osprey.eval.peers import PLAIN, PROMPT_LOOKUP, Peer, drafter_peer, load_peer, without_copies

    (name, path), *others = named.items()
    own = dict.fromkeys(("num_assistant_tokens", "confidence_threshold", "adaptive"))
    options = argparse.Namespace(
        target=arguments.target,
        weights=arguments.weights,
        lookup_num_tokens=arguments.lookup_num_tokens,
        no_compare=False,
        **own,
    )
    pair = load_pair(options, path, [item.prompt for item in items])
    drafter = drafter_peer(name, pair.drafter)
    peers = [Peer(PLAIN, "plain"), drafter]
    if arguments.without_copies:
        peers.append(without_copies(drafter))
    if PROMPT_LOOKUP in arguments.baseline:
        peers.append(Peer(PROMPT_LOOKUP, "prompt lookup"))
    quantize = pair.weights == "fp16"
    peers += [load_peer(name, path, pair.target, pair.tokenizer, drafter, quantize) for name, path in others]
    return pair, peers


def settings_of(
    arguments: BenchArguments, pair: "Pair", peers: list["Peer"], named: dict[str, str], items: list["Item"]
) -> dict[str, Any]:
    """Whatever the figures depend on, but for the machine."""
    import torch

    from osprey.cli.targets import resolve_target

    prompts = json.dumps([asdict(item) for item in items], ensure_ascii=False, sort_keys=True)
    target = resolve_target(arguments.target)
    return {
        "target": public_name(arguments.target),
        "target_sha256": weights_sha256(target),
        "target_revision": hub_commit(target),
        "drafter": peers[1].name,
        "peers": [peer.name for peer in peers],
        "kinds": {peer.name: peer.kind for peer in peers},
        "draft_settings": {peer.name: peer.settings for peer in peers if peer.settings},
        "models": {
            name: {"name": public_name(path), "sha256": weights_sha256(path), "revision": hub_commit(path)}
            for name, path in named.items()
        },
        "matrix": [word.partition("=")[0] for word in arguments.matrix],
        "suite": public_name(arguments.suite),
        "suite_sha256": hashlib.sha256(prompts.encode()).hexdigest(),
        "limit": arguments.limit,
        "temperatures": sorted(arguments.temperatures),
        "draft_lengths": arguments.draft_lengths,
        "context_lengths": arguments.context_lengths,
        "max_new_tokens": arguments.max_new_tokens,
        "seed": arguments.seed,
        "weights": pair.weights,
        "device": str(pair.target.device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "code_sha256": code_sha256(),
    }


def code_sha256() -> str:
    """Of all that drafts, decodes and counts: runs of two versions do not belong into one result."""
    from osprey import modeling
    from osprey.eval import acceptance, baselines, bench, peers

    files = [path for package in (modeling, baselines) for path in sorted(Path(package.__file__).parent.glob("*.py"))]
    files += [Path(module.__file__) for module in (acceptance, bench, peers)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def environment(argv: list[str]) -> dict[str, Any]:
    """Where the figures come from; folders by their names alone."""
    words = []
    for word in argv:
        name, equals, path = word.rpartition("=")
        place = Path(path).expanduser()
        words.append(f"{name}{equals}{place.name}" if place.is_absolute() or place.exists() else word)
    return {
        "command": f"osprey bench {shlex.join(words)}",
        "commit": own_commit(Path(__file__).resolve()),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "versions": versions(),
    }


def own_commit(file: Path) -> str | None:
    """The commit that `file` is checked out at, with `-dirty` where tracked files differ from it.

    None for a wheel, also one that is installed inside somebody's repository, and without git.
    """
    git = ["git", "-C", str(file.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", file.name], capture_output=True, check=True)
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def draw(files: list[str], out: str | None) -> int:
    from osprey.eval.plots import draw_all

    if out is None:
        raise ValueError("--plots needs --out, the folder for the figures.")
    for path in draw_all(files, out):
        print(path)
    return 0
