"""``osprey distill DRAFTER --features DIR … --out DIR``: stage 4, a drafter trained to match its target.

``osprey distill --prepare --target TARGET --data RESPONSES… --features DIR`` writes the features first;
``osprey distill DRAFTER --target TARGET --data ROWS… --out DIR`` does without, the target runs in every step.
"""

import json
import logging

from osprey.cli.arguments import parse
from osprey.cli.targets import find_model, resolve_target
from osprey.eval import baselines  # noqa: F401  (their folders can be distilled too)
from osprey.train.distill import DistillArguments, distill
from osprey.train.distillation_config import OspreyDistillationConfig
from osprey.train.features import FeatureArguments, prepare_features


def main(argv: list[str]) -> int:
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("osprey").setLevel(logging.INFO)
    if "--prepare" in argv:
        argv = [argument for argument in argv if argument != "--prepare"]
        arguments, as_json = parse(FeatureArguments, argv, "osprey distill --prepare", __doc__)
        arguments.target = resolve_target(arguments.target)
        folder = prepare_features(arguments)
        print(json.dumps({"features": str(folder)}) if as_json else folder)
        return 0
    kinds = [DistillArguments, OspreyDistillationConfig]
    arguments, config, as_json = parse(kinds, argv, "osprey distill", __doc__, positional="drafter")
    arguments.drafter = find_model("drafter", arguments.drafter)
    if arguments.target is not None:
        arguments.target = resolve_target(arguments.target)
    record = distill(arguments, config)
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
    else:
        held_out = ", ".join(f"{name.removeprefix('eval_')} {value:.3f}" for name, value in record["held_out"].items())
        print(f"{arguments.out}: {record['steps']} steps in {record['seconds']} s; held out: {held_out or 'nothing'}")
    return 0
