"""`osprey generate`: a target and its drafter at work, beside the target alone.

Streams each answer with the drafted tokens coloured, and ends with a table of speed and acceptance.
"""

import argparse
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osprey.cli.parser import Parser, check_bounds
from osprey.cli.targets import DEFAULT_TARGET, find_model, resolve_target
from osprey.eval.prompts import Prompt, check_length, encode, load_prompts
from osprey.train.checkpoints import hub_commit, public_name, write_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from osprey.eval.acceptance import Measurement

DEFAULT_DRAFTER = "osprey-smollm2-135m-instruct"
PROBE_TOKENS = 16
PROBE_CHARACTERS = 400  # of the first prompt: a long one would be read four times before anything is shown


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="osprey generate", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--target", default=DEFAULT_TARGET, help=f"a Hub id, a local folder, or {DEFAULT_TARGET} (the default)"
    )
    parser.add_argument(
        "--drafter", help="a local folder or a Hub id (default: the one that comes with the repository)"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", metavar="FILE.jsonl", help="prompts to run instead of the eight of the demo")
    source.add_argument("--prompt", metavar="TEXT", help="one prompt to run instead")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument(
        "--weights",
        choices=("fp16", "fp32"),
        help="the target's linear weights on the CPU, activations are fp32 (default: fp16, much the faster, with an "
        "int8 drafter)",
    )
    parser.add_argument("--num_assistant_tokens", type=int, help="longest draft (default: the drafter's own)")
    parser.add_argument(
        "--confidence_threshold", type=float, help="end a draft below this confidence (default: the drafter's own)"
    )
    parser.add_argument(
        "--lookup_num_tokens",
        type=int,
        help="longest copy of what followed the last tokens before, 0 for none (default: the drafter's own)",
    )
    parser.add_argument(
        "--adaptive",
        action=argparse.BooleanOptionalAction,
        help="let measured costs and acceptance choose each draft's length (default: the drafter's own)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    parser.add_argument("--seed", type=int, default=0, help="for sampling")
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=Path,
        help="write the figures as JSON to this file (elsewhere --json takes no file name, and prints)",
    )
    parser.add_argument("--no_compare", action="store_true", help="only assisted generation, nothing beside it")
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    from osprey.cli.tables import check_writable

    check_bounds(
        ("--max_new_tokens", arguments.max_new_tokens, 1),
        ("--threads", arguments.threads, 1),
        ("--num_assistant_tokens", arguments.num_assistant_tokens, 1),
        ("--lookup_num_tokens", arguments.lookup_num_tokens, 0),
        ("--temperature", arguments.temperature, 0),
    )
    threshold = arguments.confidence_threshold
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"--confidence_threshold is {threshold}, but must lie between 0 and 1.")
    if arguments.json is not None:
        check_writable(arguments.json)


def find_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    if arguments.prompt is not None:
        if not arguments.prompt.strip():
            raise ValueError("--prompt is empty.")
        return [Prompt("prompt", "prompt", "prompt", (arguments.prompt,))]
    if arguments.prompts is not None:
        return load_prompts(arguments.prompts)
    return load_prompts(Path(str(resources.files("osprey.cli"))) / "prompts" / "demo.jsonl")


def find_drafter(name: str | None) -> str:
    """The folder or Hub id of the drafter; the default lies in a clone of the repository."""
    if name is None:
        folder = Path(__file__).resolve().parent.parent / "hub_cards" / DEFAULT_DRAFTER
        if not folder.is_dir():
            raise OSError(
                f"no drafter: the default, hub_cards/{DEFAULT_DRAFTER}, lies in a clone of the repository and not in "
                "an installed wheel; name a folder or Hub id with --drafter, or make one with `osprey convert` and "
                "`osprey distill`."
            )
        return str(folder)
    return find_model("drafter", name)


@dataclass
class Pair:
    """A target with its drafter, ready to generate."""

    target: "PreTrainedModel"
    drafter: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    weights: str  # how the target's linear weights are kept; beside fp16 the drafter's are int8
    plain_scale: float = 1.0  # how much faster plain generation is with fp32 weights; 1 where it is not
    probe: dict[str, float] | None = None  # plain tokens/s with fp32 and with fp16 weights


def load_pair(arguments: argparse.Namespace, drafter_path: str, prompts: list[Prompt]) -> Pair:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

    from osprey.modeling import OspreyDrafter, check_target, check_tokenizer, fp16_linears, int8_linears

    target_path = resolve_target(arguments.target)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    on_cpu = device.type == "cpu"
    if not on_cpu and arguments.weights is not None:
        raise ValueError(f"--weights is for the CPU; on {device.type} the target keeps the precision it is stored in.")
    dtype = torch.float32 if on_cpu else "auto"
    kind = PretrainedConfig.get_config_dict(drafter_path)[0].get("model_type")
    if kind != "osprey":
        raise ValueError(
            f"{drafter_path} is no Osprey drafter but a {kind} model: make one of it with `osprey convert`."
        )
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=dtype).to(device).eval()
    drafter = OspreyDrafter.from_pretrained(drafter_path, dtype=target.dtype).to(device).eval()
    check_target(drafter, target, hub_commit(target_path))
    check_tokenizer(drafter, tokenizer)
    if arguments.num_assistant_tokens is not None:
        drafter.generation_config.num_assistant_tokens = arguments.num_assistant_tokens
    if arguments.confidence_threshold is not None:
        drafter.generation_config.assistant_confidence_threshold = arguments.confidence_threshold
    if arguments.lookup_num_tokens is not None:
        drafter.generation_config.lookup_num_tokens = arguments.lookup_num_tokens
    if arguments.adaptive is not None:
        drafter.generation_config.adaptive_draft_length = arguments.adaptive

    pair = Pair(target, drafter, tokenizer, str(target.dtype).removeprefix("torch."))
    if on_cpu:
        pair.weights = arguments.weights or "fp16"
        compare = pair.weights == "fp16" and not arguments.no_compare
        probe = encode(tokenizer, [{"role": "user", "content": prompts[0].turns[0][:PROBE_CHARACTERS]}])
        fp32 = plain_rate(target, probe) if compare else None
        if pair.weights == "fp16":
            fp16_linears(target)
            int8_linears(drafter)  # its precision never changes the text
        if fp32 is not None:
            pair.probe = {"fp32": fp32, "fp16": plain_rate(target, probe)}
            pair.plain_scale = max(1.0, pair.probe["fp32"] / pair.probe["fp16"])
    return pair


def plain_rate(target: "PreTrainedModel", inputs: dict[str, "torch.Tensor"]) -> float:
    """Plain greedy tokens per second over a few tokens, which is also the target's warm-up."""
    from osprey.eval.acceptance import greedy_or_sampled, timed_generate

    kwargs = greedy_or_sampled(0)
    timed_generate(target, inputs, max_new_tokens=2, **kwargs)
    run = timed_generate(target, inputs, max_new_tokens=PROBE_TOKENS, min_new_tokens=PROBE_TOKENS, **kwargs)
    return len(run.token_ids) / run.seconds


def run_prompts(pair: Pair, prompts: list[Prompt], arguments: argparse.Namespace) -> list["Measurement"]:
    """Every turn of every prompt; later turns follow the target's own answers to the earlier ones."""
    from osprey.cli.streaming import DRAFTED, RESET, DraftStreamer, wants_colour
    from osprey.cli.tables import identical_text, number
    from osprey.eval.acceptance import measure, summarize

    colour = wants_colour(sys.stdout)
    if colour:
        print(f"{DRAFTED}drafted and accepted{RESET}, the target's own")
    measurements: list[Measurement] = []
    for index, prompt in enumerate(prompts):
        messages: list[dict[str, str]] = []
        for turn_index, turn in enumerate(prompt.turns):
            name = prompt.id if len(prompt.turns) == 1 else f"{prompt.id}/{turn_index + 1}"
            print(f"\n[{index + 1}/{len(prompts)}] {name}: {shorten(turn)}", flush=True)
            messages.append({"role": "user", "content": turn})
            inputs = encode(pair.tokenizer, messages)
            check_length(inputs, pair.target, name, arguments.max_new_tokens)
            measurement = measure(
                pair.target,
                pair.drafter,
                {key: value.to(pair.target.device) for key, value in inputs.items()},
                id=name,
                group=prompt.language,
                max_new_tokens=arguments.max_new_tokens,
                temperature=arguments.temperature,
                compare=not arguments.no_compare,
                plain_first=len(measurements) % 2 == 0,
                streamer=DraftStreamer(pair.tokenizer, sys.stdout, colour),
                seed=arguments.seed,
            )
            measurements.append(measurement)
            figures = summarize([measurement], pair.plain_scale)
            print(
                f"    plain {number(figures.tokens_per_second_plain, 1)} tok/s, "
                f"assisted {number(figures.tokens_per_second_assisted, 1)} tok/s, "
                f"speedup {number(figures.speedup, unit='x')}, MAL {number(figures.mal_mean)}, "
                f"identical {identical_text(figures)}"
            )
            reply = pair.tokenizer.decode(measurement.assisted.token_ids, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": reply})
    return measurements


def shorten(text: str, width: int = 90) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


def settings_of(pair: Pair, arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from osprey.modeling.generation_osprey import draft_settings

    return {
        "target": public_name(arguments.target),
        "drafter": public_name(arguments.drafter or DEFAULT_DRAFTER),
        "device": str(pair.target.device),
        "weights": pair.weights,
        "threads": torch.get_num_threads(),
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "drafter_weights": "int8" if pair.weights == "fp16" else pair.weights,
        **draft_settings(pair.drafter.generation_config),
        "plain_probe": pair.probe,
        "plain_scale": pair.plain_scale,
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("osprey-drafter", "torch", "transformers")},
        },
    }


def describe(settings: dict[str, Any]) -> str:
    """The line over the table: what was measured, and how."""
    decoding = "greedy" if settings["temperature"] == 0 else f"sampled at temperature {settings['temperature']}"
    text = (
        f"{settings['target']} with {Path(settings['drafter']).name}: {decoding}, "
        f"at most {settings['max_new_tokens']} new tokens, drafts of at most {settings['num_assistant_tokens']}, "
        f"copies of at most {settings['lookup_num_tokens']}, {settings['weights']} weights "
        f"({settings['drafter_weights']} in the drafter), {settings['device']}, threads: {settings['threads']}"
    )
    probe = settings["plain_probe"]
    if probe is None:
        return text
    text += (
        f"\nplain generation of {PROBE_TOKENS} tokens: {probe['fp16']:.1f} tok/s with fp16 weights, "
        f"{probe['fp32']:.1f} with fp32"
    )
    if settings["plain_scale"] > 1:
        text += f"; fp32 is faster, so plain rates below are raised by {settings['plain_scale']:.2f}"
    return text


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    check_arguments(arguments)
    prompts = find_prompts(arguments)
    drafter_path = find_drafter(arguments.drafter)  # refused before a target is fetched
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    import torch
    from transformers.utils import logging

    from osprey.cli.tables import format_table, report, totals_line
    from osprey.eval.acceptance import summarize

    logging.disable_progress_bar()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    print("Loading target and drafter ...", file=sys.stderr, flush=True)
    pair = load_pair(arguments, drafter_path, prompts)
    measurements = run_prompts(pair, prompts, arguments)
    settings = settings_of(pair, arguments)
    print(f"\n{describe(settings)}\n\n{format_table(measurements, pair.plain_scale)}\n")
    if arguments.json is not None:
        write_json(arguments.json, report(measurements, pair.plain_scale, settings))
    print(totals_line(summarize(measurements, pair.plain_scale)))
    return 0
