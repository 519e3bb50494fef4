"""``osprey align SOURCE TARGET``: counts and examples of the alignment of two vocabularies."""

import argparse
import json
import time

from osprey.cli.targets import DEFAULT_TARGET, resolve_target
from osprey.train.align import KINDS, align_vocabularies, load_tokenizer

EXAMPLES = 5


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="osprey align", description=__doc__)
    parser.add_argument("source", help="tokenizer of the backbone: Hub id, folder or tokenizer.json")
    parser.add_argument("target", help="tokenizer of the target")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args(argv)

    source, target = (
        load_tokenizer(resolve_target(name) if name == DEFAULT_TARGET else name)
        for name in (arguments.source, arguments.target)
    )
    start = time.perf_counter()
    alignment = align_vocabularies(source, target)
    counts = alignment.counts()
    examples = {
        KINDS[kind]: target.convert_ids_to_tokens((alignment.kinds == kind).nonzero().flatten()[:EXAMPLES].tolist())
        for kind in range(len(KINDS))
    }
    result = {**counts, "examples": examples, "seconds": round(time.perf_counter() - start, 2)}
    if arguments.json:
        print(json.dumps(result, ensure_ascii=False))
        return 0
    for kind, count in counts.items():
        print(f"{kind:9s} {count:8d}  {' '.join(token or '∅' for token in examples[kind])}")
    print(f"{sum(counts.values())} target tokens in {result['seconds']} s")
    return 0
