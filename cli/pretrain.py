"""``osprey pretrain --model PRUNED --data FILE… --out DIR``: stage 2, next-token training that gives a backbone."""

import json
import logging
import os
from typing import Any

from osprey.cli.arguments import parse
from osprey.train.pretrain import PretrainArguments, pretrain


def main(argv: list[str]) -> int:
    arguments, as_json = parse(PretrainArguments, argv, "osprey pretrain", __doc__, positional="model")
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("osprey").setLevel(logging.INFO)
    record = pretrain(arguments)
    if os.environ.get("RANK", "0") != "0":  # one of several processes, the first of which speaks
        return 0
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
    elif arguments.dry_run:
        print("\n".join(dry_run_lines(record)))
    else:
        print("\n".join([f"{arguments.out}: {summary(record)}", *perplexity_lines(record)]))
    return 0


def summary(record: dict[str, Any]) -> str:
    return f"{record['tokens']} tokens in {record['steps']} steps, {record['seconds']:.0f} s"


def perplexity_lines(record: dict[str, Any]) -> list[str]:
    """Held-out perplexities before and after, one line a file."""
    if not record["perplexity_after"]:
        return []
    before, after = record["perplexity_before"], record["perplexity_after"]
    lines = [f"{'held out':12s} {'before':>10s} {'after':>10s}"]
    return lines + [
        f"{name:12s} {before[name]:10.2f} {value:10.2f}" for name, value in after.items() if name in before
    ]


def dry_run_lines(record: dict[str, Any]) -> list[str]:
    data = record["data"]
    read = f"{data['documents']} documents, {data['characters']} characters"
    if data["tokens"] is not None:
        read += f", {data['tokens']} tokens"
    if data["not_checked"] is not None:
        read = f"NOT CHECKED: {data['not_checked']}"
    speed = record["machine_flops_per_second"] / 1e9
    lines = {
        "model": f"{record['model_type']}, {record['layers']} blocks",
        "parameters": f"{record['parameters'] / 1e6:.1f}M, of them {record['body_parameters'] / 1e6:.1f}M in blocks",
        "tokens": f"{record['tokens']:,} in {record['steps']:,} steps of {record['step_tokens']:,}",
        "memory": f"about {record['memory_bytes'] / 2**30:.1f} GiB a process",
        "time": f"about {record['seconds'] / 3600:.1f} h: {record['flops']:.2e} FLOPs by {record['processes']} "
        f"process(es) at 60 % of {speed:.0f} GFLOPS",
        "data": read,
    }
    return [f"{name:12s}{value}" for name, value in lines.items()]
