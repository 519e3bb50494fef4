"""``osprey convert BACKBONE --target TARGET --out DIR``: stage 3, a backbone turned into an untrained drafter."""

import json

from osprey.cli.arguments import parse
from osprey.cli.targets import find_model, resolve_target
from osprey.train.checkpoints import public_name
from osprey.train.convert import ConvertArguments, convert


def main(argv: list[str]) -> int:
    arguments, as_json = parse(ConvertArguments, argv, "osprey convert", __doc__, positional="backbone")
    arguments.target_name = arguments.target_name or public_name(arguments.target)
    arguments.target = resolve_target(arguments.target)
    arguments.backbone = find_model("backbone", arguments.backbone)
    record = convert(arguments)
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
        return 0
    print(f"{arguments.out}: {record['backbone']} for {record['target']}, taps {record['target_layer_ids']}")
    print("alignment: " + ", ".join(f"{count} {kind}" for kind, count in record["alignment"].items()))
    if record["shortlist"]:
        shares = {name: share for name, share in record["shortlist"]["response_coverage"].items() if name != "?"}
        covered = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        print(f"draft vocabulary: {record['shortlist']['size']} ids; response tokens covered: {covered}")
    return 0
