"""``osprey prune SOURCE --layers N --out DIR``: stage 1, a small language model cut to a few of its blocks."""

import json
from pathlib import Path
from typing import Any

from osprey.cli.arguments import parse
from osprey.cli.targets import DEFAULT_TARGET, check_on_hub, resolve_target
from osprey.train.prune import PruneArguments, locate, prune


def main(argv: list[str]) -> int:
    arguments, as_json = parse(PruneArguments, argv, "osprey prune", __doc__, positional="source")
    if arguments.source == DEFAULT_TARGET:
        arguments.source = resolve_target(arguments.source)
    elif not Path(locate(arguments.source, arguments.revision)[0]).exists():
        check_on_hub("source", arguments.source, revision=arguments.revision)
    record = prune(arguments)
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
        return 0
    if "report" in record:
        print("\n".join(report_lines(record["report"], record["influence"])), end="\n\n")
    kept = ", ".join(map(str, record["layer_ids"]))
    print(f"{arguments.out}: layers {kept} of {record['source_layers']}, {record['parameters'] / 1e6:.1f}M parameters")
    return 0


def report_lines(report: dict[str, Any], influence: list[float] | None) -> list[str]:
    """The report as text: one line a block, then sizes and perplexities before and after."""
    lines = [f"{'block':>5s}  {'perplexity without it':>21s}  {'influence':>9s}  kept"]
    for block in report["blocks"]:
        index = block["block"]
        turn = f"{influence[index]:9.4f}" if influence is not None else f"{'-':>9s}"
        kept = "yes" if block["kept"] else ""
        lines.append(f"{index:5d}  {block['perplexity_without']['mean']:21.2f}  {turn}  {kept}".rstrip())
    lines += ["", f"{'':24s}{'source':>12s}{'pruned':>12s}"]
    source, pruned = report["source"], report["pruned"]
    for name, key in (("parameters, M", "parameters"), ("of them in blocks, M", "body_parameters")):
        lines.append(f"{name:24s}{source[key] / 1e6:12.1f}{pruned[key] / 1e6:12.1f}")
    flops = "flops_per_token"
    lines.append(f"{'MFLOPs a token, forward':24s}{source[flops] / 1e6:12.1f}{pruned[flops] / 1e6:12.1f}")
    for name in source["perplexity"]:
        before, after = source["perplexity"][name], pruned["perplexity"][name]
        lines.append(f"{'perplexity ' + name:24s}{before:12.2f}{after:12.2f}")
    return lines
