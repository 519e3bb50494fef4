"""Prompt suites: the built-in one, public ones from the Hub, a JSONL file, or a folder of such files.

A part of a file is always taken spread over it: the first prompts of a file are seldom like the rest (by 0.44 tokens
of MAL in one domain of arXiv 2609.09338).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TypeVar

from osprey.eval.prompts import Prompt, load_prompts
from osprey.eval.public_suites import PUBLIC, fetch_prompts

BUILTIN = "builtin"
T = TypeVar("T")

# ISO 639-1. Languages without a two-letter code have one of three (ISO 639-3), which are too many to list.
TWO_LETTER_CODES = """
aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo es et
eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk
kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny
oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te tg th ti tk
tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""
LANGUAGE_TAG = re.compile(r"(?P<language>[a-z]{2,3})(-[A-Za-z0-9]{2,8})*")  # BCP 47, as far as it matters here


@dataclass(frozen=True)
class Item:
    """A prompt of a suite; the name of its file, which tells apart sources of one domain.

    `context_length` is set where the prompt was lengthened to fill a context of that many tokens.
    """

    prompt: Prompt
    file: str
    context_length: int | None = None


def load_suite(name: str, limit: int | None = None) -> list[Item]:
    """The prompts of a suite.

    Args:
        name: `builtin`, a key of `PUBLIC` in any case, a JSONL file, or a folder of JSONL files (`.gz` too).
        limit: at most so many prompts of each file (of each language, in a public suite), spread over it.

    Raises:
        ValueError: there is no such suite, it is empty, a line is no prompt, or a language tag is unknown.
        OSError: the Hub cannot be reached.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit is {limit}, but must be at least 1.")
    path = Path(name).expanduser()
    if name.lower() in PUBLIC:
        sources = fetch_prompts(name.lower())
        return [Item(prompt, file) for file, prompts in sources.items() for prompt in spread(prompts, limit)]
    if name == BUILTIN:
        path = Path(str(resources.files("osprey.eval"))) / "suites" / f"{BUILTIN}.jsonl"
    if path.is_dir():
        files = sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")])
        if not files:
            raise ValueError(f"the suite {name} is a folder without .jsonl and .jsonl.gz files.")
        if len({stem(file) for file in files}) < len(files):
            raise ValueError(f"the suite {name} has a file both compressed and not: remove one of the two.")
    elif path.is_file():
        files = [path]
    else:
        raise ValueError(
            f"unknown suite {name!r}: it is no file or folder, nor one of {', '.join([BUILTIN, *PUBLIC])}."
        )
    items = [Item(prompt, stem(file)) for file in files for prompt in spread(checked(file), limit)]
    if len(files) > 1:  # ids are unique within a file only
        items = [replace(item, prompt=replace(item.prompt, id=f"{item.file}/{item.prompt.id}")) for item in items]
    return items


def stem(file: Path) -> str:
    return Path(file.name.removesuffix(".gz")).stem


def checked(file: Path) -> list[Prompt]:
    prompts = load_prompts(file)
    for prompt in prompts:
        if not is_language_tag(prompt.language):
            raise ValueError(
                f"{file}, prompt {prompt.id!r}: the language tag {prompt.language!r} is unknown; ISO 639 codes are "
                "due, such as en, de or zh-Hant."
            )
    return prompts


def is_language_tag(tag: str) -> bool:
    match = LANGUAGE_TAG.fullmatch(tag)
    return match is not None and (len(match["language"]) == 3 or match["language"] in TWO_LETTER_CODES.split())


def spread(values: Sequence[T], limit: int | None) -> list[T]:
    """At most `limit` of `values`: the middles of as many equal stretches."""
    if limit is None or limit >= len(values):
        return list(values)
    return [values[(2 * index + 1) * len(values) // (2 * limit)] for index in range(limit)]
