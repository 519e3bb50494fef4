"""``osprey prune SOURCE --layers N --out DIR``: stage 1, a small language model cut to a few of its blocks."""

import json

from osprey.cli.arguments import parse
from osprey.cli.targets import DEFAULT_TARGET, resolve_target
from osprey.train.prune import PruneArguments, prune


def main(argv: list[str]) -> int:
    arguments, as_json = parse(PruneArguments, argv, "osprey prune", __doc__, positional="source")
    if arguments.source == DEFAULT_TARGET:
        arguments.source = resolve_target(arguments.source)
    record = prune(arguments)
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
        return 0
    kept = ", ".join(map(str, record["layer_ids"]))
    print(f"{arguments.out}: layers {kept} of {record['source_layers']}, {record['parameters'] / 1e6:.1f}M parameters")
    return 0
