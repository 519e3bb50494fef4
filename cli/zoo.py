"""``osprey zoo``: the drafters and backbones on the Hub, in its local cache and in given folders, best first."""

import json
import sys
from dataclasses import asdict, dataclass, field

from osprey.cli.arguments import parse
from osprey.hub_cards.reach import go_offline_without_network
from osprey.hub_cards.zoo import ZooEntry, zoo

HEADER = ("name", "kind", "for / from", "MAL", "commit", "where")


@dataclass
class ZooArguments:
    target: str | None = field(default=None, metadata={"help": "only what is made for this model (ORG/NAME)"})
    folders: list[str] = field(default_factory=list, metadata={"help": "folders to look into, one level deep"})


def main(argv: list[str]) -> int:
    arguments, as_json = parse(ZooArguments, argv, "osprey zoo", __doc__)
    go_offline_without_network()
    entries, reached = zoo(arguments.target, arguments.folders)
    if not reached:
        print("The Hub cannot be reached: this is what lies in its local cache and in --folders.", file=sys.stderr)
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], ensure_ascii=False))
    elif entries:
        print(format_zoo(entries))
    else:
        what = f" for {arguments.target}" if arguments.target else ""
        where = "on the Hub, in its local cache" if reached else "in the Hub's local cache"
        folders = (
            f"or in {', '.join(arguments.folders)}" if arguments.folders else "(--folders DIR looks into folders)"
        )
        print(f"no drafter or backbone{what} was found {where} {folders}")
    return 0


def format_zoo(entries: list[ZooEntry]) -> str:
    rows = [HEADER, *map(row, entries)]
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(HEADER))]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows)


def row(entry: ZooEntry) -> tuple[str, ...]:
    length = entry.mean_acceptance_length
    return (
        entry.name,
        entry.kind,
        entry.base_model or "-",
        "-" if length is None else f"{length:.2f}",
        (entry.revision or "-")[:8],
        "hub, cache" if entry.cached and entry.place == "hub" else entry.place,
    )
