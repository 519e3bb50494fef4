"""``python -m osprey.cli.compare_pruning SOURCE --config RECIPE --out FOLDER``: which blocks to keep, measured.

Prunes SOURCE by every strategy to every depth, restores each by the same recipe, and prints Markdown tables (or JSON).
Started again, it goes on where it was.
"""

import json
import logging
import sys

from osprey.cli.arguments import parse
from osprey.cli.main import guarded


def main(argv: list[str]) -> int:
    from osprey.train.compare_pruning import CompareArguments, compare_pruning, markdown  # needs the extra `train`
    from osprey.train.pretrain import PretrainArguments

    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("osprey").setLevel(logging.INFO)
    kinds = [CompareArguments, PretrainArguments]
    comparison, recipe, as_json = parse(kinds, argv, "compare_pruning", __doc__, positional="model")
    results = compare_pruning(comparison, recipe)
    print(json.dumps(results, ensure_ascii=False) if as_json else markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(guarded("compare_pruning", lambda: main(sys.argv[1:])))
