"""``osprey adapt BACKBONE --target TARGET --data ROWS… --out DIR``: convert, prepare and distill in one.

Run it again to go on where it was stopped. Recipes stand in `osprey/train/recipes`, for `--config`.
"""

import json
import logging

from osprey.cli.arguments import parse
from osprey.cli.targets import find_model, resolve_target
from osprey.train.adapt import AdaptArguments, adapt
from osprey.train.checkpoints import public_name
from osprey.train.distillation_config import OspreyDistillationConfig


def main(argv: list[str]) -> int:
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("osprey").setLevel(logging.INFO)
    kinds = [AdaptArguments, OspreyDistillationConfig]
    arguments, config, as_json = parse(kinds, argv, "osprey adapt", __doc__, ("backbone", "target"))
    arguments.target_name = arguments.target_name or public_name(arguments.target)
    arguments.target = resolve_target(arguments.target)
    arguments.backbone = find_model("backbone", arguments.backbone)
    records = adapt(arguments, config)
    if as_json:
        print(json.dumps(records, ensure_ascii=False))
        return 0
    record = records["distill"]
    held_out = ", ".join(f"{name.removeprefix('eval_')} {value:.3f}" for name, value in record["held_out"].items())
    print(f"{arguments.out}: {record['steps']} steps in {record['seconds']} s; held out: {held_out or 'nothing'}")
    return 0
