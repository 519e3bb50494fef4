"""``osprey convert BACKBONE --target TARGET --out DIR``: stage 3."""

import json

from transformers import HfArgumentParser

from osprey.train.convert import ConvertArguments, convert


def main(argv: list[str]) -> int:
    parser = HfArgumentParser(ConvertArguments, prog="osprey convert", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments, namespace = parser.parse_args_into_dataclasses(["--backbone", *argv] if _positional(argv) else argv)
    record = convert(arguments)
    if namespace.json:
        print(json.dumps(record, ensure_ascii=False))
        return 0
    print(f"{arguments.out}: {record['backbone']} for {record['target']}, taps {record['target_layer_ids']}")
    print("alignment: " + ", ".join(f"{count} {kind}" for kind, count in record["alignment"].items()))
    if record["shortlist"]:
        covered = ", ".join(f"{name} {share:.1%}" for name, share in record["shortlist"]["response_coverage"].items())
        print(f"draft vocabulary: {record['shortlist']['size']} ids; response tokens covered: {covered}")
    return 0


def _positional(argv: list[str]) -> bool:
    return bool(argv) and not argv[0].startswith("-")
