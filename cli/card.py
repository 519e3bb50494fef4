"""``osprey card DRAFTER --results RESULT.json``: puts a benchmark's figures into a drafter's model card.

The tables go between two markers of its README.md (behind its text the first time), mean acceptance lengths into the
`model-index` of its metadata and into `.eval_results/`. Everything else in the card stays as it was written.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osprey.cli.arguments import parse
from osprey.train.checkpoints import weights_sha256


@dataclass
class CardArguments:
    drafter: str = field(metadata={"help": "the drafter's folder, with a README.md"})
    results: list[str] = field(metadata={"help": "result files of `osprey bench` for this drafter"})
    force: bool = field(default=False, metadata={"help": "put in the figures of fewer than 20 requests too"})


def main(argv: list[str]) -> int:
    arguments, as_json = parse(CardArguments, argv, "osprey card", __doc__, positional="drafter")
    from osprey.hub_cards.results import eval_results, refresh_results, refuse_few_requests

    folder = Path(arguments.drafter).expanduser()
    if not folder.is_dir():
        raise OSError(f"there is no drafter folder {arguments.drafter}.")
    results = [result_of(path, folder) for path in arguments.results]
    if not arguments.force:
        for path, result in zip(arguments.results, results, strict=True):
            refuse_few_requests(path, result)
    entries = [entry for result in results for entry in eval_results(result)]
    section = "\n\n".join(["## Results", *map(tables, results)])
    refresh_results(folder / "README.md", section, entries, folder.resolve().name)
    if as_json:
        print(json.dumps({"card": str(folder / "README.md"), "model_index": [vars(entry) for entry in entries]}))
    else:
        print(f"{folder / 'README.md'}: {len(entries)} results, from {', '.join(arguments.results)}")
    return 0


def result_of(path: str, folder: Path) -> dict[str, Any]:
    """A result file, which must be of the weights in `folder`."""
    from osprey.eval.journal import check_schema, read_result

    result = read_result(path)
    check_schema(path, result)
    settings = result["settings"]
    measured = settings["models"][settings["drafter"]]["sha256"]
    if measured != weights_sha256(str(folder)):
        raise ValueError(f"{path} was measured with other weights than those in {folder}: run `osprey bench` again.")
    return result


def tables(result: dict[str, Any]) -> str:
    """The report of `osprey bench`, its headings a level lower and its title that of the suite."""
    from osprey.eval.markdown import to_markdown

    _, *lines = to_markdown(result).rstrip().splitlines()
    lines = [f"#{line}" if line.startswith("#") else line for line in lines]
    return "\n".join([f"### Suite {result['settings']['suite']}", *lines])
