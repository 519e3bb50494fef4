"""``osprey pretrain --model PRUNED --data FILE… --out DIR``: stage 2, next-token training that gives a backbone."""

import json
import logging

from osprey.cli.arguments import parse
from osprey.train.pretrain import PretrainArguments, pretrain


def main(argv: list[str]) -> int:
    arguments, as_json = parse(PretrainArguments, argv, "osprey pretrain", __doc__)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("osprey").setLevel(logging.INFO)
    record = pretrain(arguments)
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
        return 0
    print(f"{arguments.out}: {record['tokens']} tokens in {record['steps']} steps, {record['seconds']:.0f} s")
    if record["perplexity_after"]:
        print(f"{'held out':12s} {'before':>10s} {'after':>10s}")
        for name, value in record["perplexity_after"].items():
            print(f"{name:12s} {record['perplexity_before'][name]:10.2f} {value:10.2f}")
    return 0
