"""``osprey push DIR --repo ORG/NAME``: checks a drafter or a backbone, and publishes it on the Hub."""

import json

from osprey.cli.arguments import parse
from osprey.hub_cards.push import PushArguments, push


def main(argv: list[str]) -> int:
    arguments, as_json = parse(PushArguments, argv, "osprey push", __doc__, positional="folder")
    record = push(arguments)
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
        return 0
    width = max(map(len, record["files"]))
    for name, size in record["files"].items():
        print(f"{name:<{width}}  {size / 1e6:10.3f} MB")
    what = f"{record['kind']} for {record['base_model']}, {len(record['files'])} files, {record['bytes'] / 1e6:.1f} MB"
    if record["dry_run"]:
        print(f"{what}: fit to be published as {record['repo']}; nothing was sent")
        return 0
    print(f"{what}: {record['url']}, version {record['version']} (commit {record['revision']})")
    return 0
