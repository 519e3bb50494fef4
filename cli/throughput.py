"""``python -m osprey.cli.throughput MODEL --config RECIPE``: training speed against the machine's matrix products.

``python -m osprey.cli.throughput DRAFTER --features DIR…`` measures distillation instead of pretraining.
"""

import json
import sys

from osprey.cli.arguments import parse
from osprey.cli.main import guarded


def main(argv: list[str]) -> int:
    from osprey.train.throughput import ThroughputArguments, training_throughput  # needs the extra `train`

    if any(argument.split("=")[0] == "--features" for argument in argv):
        from osprey.train.distill_throughput import DistillThroughputArguments, distillation_throughput
        from osprey.train.distillation_config import OspreyDistillationConfig

        kinds = [ThroughputArguments, DistillThroughputArguments, OspreyDistillationConfig]
        measured, arguments, config, _ = parse(kinds, argv, "throughput", __doc__, positional="drafter")
        print(json.dumps(distillation_throughput(measured, arguments, config), indent=2))
        return 0
    from osprey.train.pretrain import PretrainArguments

    kinds = [ThroughputArguments, PretrainArguments]
    measured, recipe, _ = parse(kinds, [*argv, "--out", "unused"], "throughput", __doc__, positional="model")
    print(json.dumps(training_throughput(measured, recipe), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(guarded("throughput", lambda: main(sys.argv[1:])))
