"""``osprey export DRAFTER --to vllm|sglang|causal-lm|gguf --out DIR``: a drafter in the files other engines read."""

import json

from osprey.cli.arguments import parse
from osprey.cli.targets import find_model
from osprey.serving.export import ExportArguments, export
from osprey.train.checkpoints import atomic_folder


def main(argv: list[str]) -> int:
    arguments, as_json = parse(ExportArguments, argv, "osprey export", __doc__, positional="drafter")
    drafter = find_model("drafter", arguments.drafter)
    with atomic_folder(arguments.out, arguments.overwrite, [drafter]) as work:
        record = export(drafter, arguments.to, work, arguments.tokenizer_pre)
    if as_json:
        print(json.dumps(record))
        return 0
    print(
        f"{arguments.out}: {arguments.to}, {record['dtype']}; loaded back, its logits differ from the drafter's by "
        f"{record['largest_logit_difference']:.1g} at most"
    )
    return 0
