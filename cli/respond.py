"""``osprey respond --target T --prompts FILE… --out FILE``: the target's own answers, as training text for stage 4."""

import json

from osprey.cli.arguments import parse
from osprey.cli.targets import resolve_target
from osprey.train.responses import RespondArguments, respond


def main(argv: list[str]) -> int:
    arguments, as_json = parse(RespondArguments, argv, "osprey respond", __doc__)
    arguments.target = resolve_target(arguments.target)
    counts = respond(arguments)
    if as_json:
        print(json.dumps(counts))
        return 0
    ends = ", ".join(f"{counts[reason]} {reason}" for reason in ("stop", "length", "loop"))
    speed = counts["tokens"] / max(counts["seconds"], 1e-9)
    print(f"{arguments.out}: {counts['prompts']} responses ({ends}), {counts['tokens']} tokens, {speed:.0f} tokens/s")
    return 0
