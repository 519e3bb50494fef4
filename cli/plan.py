"""``osprey plan --backbone B --target T [--gpus N --memory GB]``: what an adaptation needs, before it starts.

Only configs are read; `--config` takes the recipes of `osprey adapt`.
"""

import json

from osprey.cli.arguments import parse
from osprey.cli.targets import find_model, resolve_target
from osprey.train.distillation_config import OspreyDistillationConfig
from osprey.train.plan import PlanArguments, plan


def main(argv: list[str]) -> int:
    kinds = [PlanArguments, OspreyDistillationConfig]
    arguments, config, as_json = parse(kinds, argv, "osprey plan", __doc__, ("backbone", "target"))
    arguments.target = resolve_target(arguments.target)
    arguments.backbone = find_model("backbone", arguments.backbone)
    result = plan(arguments, config)
    if as_json:
        print(json.dumps(result))
        return 0
    for name, number in result["parameters"].items():
        print(f"{name.replace('_', ' '):24s} {number / 1e6:12.1f} M parameters")
    for phase, parts in result["memory"].items():
        fits = "fits" if result["fits"][phase] else "does not fit"
        share = result["memory_per_card"][phase]
        print(f"\n{phase.replace('_', ' ')}: {share / 1e9:.1f} GB a card of {result['card'] / 1e9:.1f} GB, {fits}")
        for part, size in parts.items():
            print(f"  {part.replace('_', ' '):22s} {size / 1e9:12.2f} GB")
    disk = "-" if result["disk"] is None else f"{result['disk'] / 1e9:.2f}"
    print(f"\nfeatures: {result['bytes_per_token_on_disk']} bytes a token, {disk} GB with the head")
    for name, value in (result["measured"] or {}).items():
        print(f"{name.replace('_', ' '):28s} {'-' if value is None else format(value, '.1f'):>14s}")
    for sentence in result["advice"]:
        print(sentence)
    return 0
