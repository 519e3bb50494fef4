"""``osprey align SOURCE TARGET``: counts and examples of the alignment of two vocabularies."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from osprey.cli.arguments import parse
from osprey.cli.targets import DEFAULT_TARGET, resolve_target
from osprey.train.align import KINDS, VocabularyAlignment, cached_alignment, load_tokenizer

EXAMPLES = 5


@dataclass
class AlignArguments:
    source: str = field(metadata={"help": "tokenizer of the backbone: Hub id, folder or tokenizer.json"})
    target: str = field(metadata={"help": "tokenizer of the target"})
    force: bool = field(default=False, metadata={"help": "go on where fewer than half of the tokens are mapped"})


def main(argv: list[str]) -> int:
    arguments, as_json = parse(AlignArguments, argv, "osprey align", __doc__, ("source", "target"))
    source, target = (
        load_tokenizer(resolve_target(name) if name == DEFAULT_TARGET else name)
        for name in (arguments.source, arguments.target)
    )
    start = time.perf_counter()
    alignment = cached_alignment(source, target)
    seconds = round(time.perf_counter() - start, 2)
    if not arguments.force:
        alignment.refuse_if_poor()
    counts = alignment.counts()
    examples = {kind: pick(alignment, kind, source, target) for kind in counts}
    if as_json:
        print(json.dumps({**counts, "examples": examples, "seconds": seconds}, ensure_ascii=False))
        return 0
    for kind, count in counts.items():
        shown = "  ".join(f"{one['target']!r} ← {' + '.join(map(repr, one['source']))}" for one in examples[kind])
        print(f"{kind:9s} {count:8d}  {shown}")
    print(f"{sum(counts.values())} target tokens in {seconds} s")
    return 0


def pick(
    alignment: VocabularyAlignment, kind: str, source: PreTrainedTokenizerFast, target: PreTrainedTokenizerFast
) -> list[dict[str, Any]]:
    """A few target tokens of a kind, from the whole vocabulary, and the source tokens that make their rows."""
    ids = (alignment.kinds == KINDS.index(kind)).nonzero().flatten()
    places = torch.linspace(0, max(len(ids) - 1, 0), min(EXAMPLES, len(ids))).long()
    examples = []
    for token_id in ids[places].tolist():
        begin, end = alignment.offsets[token_id : token_id + 2].tolist()
        sources = source.convert_ids_to_tokens(alignment.source_ids[begin:end].tolist())
        examples.append({"target": target.convert_ids_to_tokens(token_id), "source": sources})
    return examples
