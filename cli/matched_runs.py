"""``python -m osprey.cli.matched_runs --config RECIPE --out FOLDER``: Osprey beside its baselines, trained alike.

Distils every arm on the same data (`osprey.train.matched_runs`) and prints a Markdown table with 95 % intervals (or
JSON). Started again, it goes on where it was.
"""

import json
import logging
import sys
from dataclasses import dataclass, field

from osprey.cli.arguments import parse
from osprey.cli.main import guarded
from osprey.eval.matched import compare, markdown, parse_groups


@dataclass
class TableArguments:
    groups: list[str] = field(
        metadata={"help": "NAME=PREFIX,…: the test answers that a column is about, by the start of their ids"}
    )


def main(argv: list[str]) -> int:
    from osprey.eval import baselines  # noqa: F401  (their folders are arms)
    from osprey.train.distillation_config import OspreyDistillationConfig  # needs the extra `train`
    from osprey.train.matched_runs import MatchedArguments, matched_runs

    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("osprey").setLevel(logging.INFO)
    kinds = [MatchedArguments, TableArguments, OspreyDistillationConfig]
    matched, table, config, as_json = parse(kinds, argv, "matched_runs", __doc__)
    groups = parse_groups(table.groups)
    results = matched_runs(matched, config)
    compared = compare(results, groups)
    print(json.dumps(compared, ensure_ascii=False) if as_json else markdown(compared))
    return 0


if __name__ == "__main__":
    sys.exit(guarded("matched_runs", lambda: main(sys.argv[1:])))
