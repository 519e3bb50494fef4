"""The built-in suite is what its README says: domains, languages, counts and lengths."""

from collections import Counter
from pathlib import Path

import pytest

from osprey.eval import prompts as prompts_module
from osprey.eval.prompts import Prompt, load_prompts

WITH_PASSAGE = ["summary", "extraction", "legal", "medical", "finance"]
DOMAINS = ["chat", "code", "maths", "reasoning", "translation", "roleplay", *WITH_PASSAGE]
LANGUAGES = ["en", "es", "fr", "de", "it", "pt", "zh", "ja", "ko", "ru", "ar", "hi"]

# Unicode ranges: what a text in the language is written in, beside digits and punctuation.
SCRIPTS = {
    "zh": ("\u4e00", "\u9fff"),
    "ja": ("\u3040", "\u30ff"),
    "ko": ("\uac00", "\ud7a3"),
    "ru": ("\u0400", "\u04ff"),
    "ar": ("\u0600", "\u06ff"),
    "hi": ("\u0900", "\u097f"),
}


@pytest.fixture(scope="module")
def suite() -> list[Prompt]:
    return load_prompts(Path(prompts_module.__file__).parent / "suites" / "builtin.jsonl")  # refuses repeated ids


def test_every_domain_is_half_english_and_every_language_stands_in_seven_domains(suite):
    cells = Counter((prompt.domain, prompt.language) for prompt in suite)
    assert {domain for domain, _ in cells} == set(DOMAINS)
    assert {language for _, language in cells} == set(LANGUAGES)
    for domain in DOMAINS:
        assert cells[domain, "en"] == 7
        assert sum(cells[domain, language] for language in LANGUAGES[1:]) == 7
    for language in LANGUAGES[1:]:
        assert [cells[domain, language] for domain in DOMAINS].count(1) == 7
        assert sum(cells[domain, language] for domain in DOMAINS) == 7


def test_ids_name_domain_and_language_and_texts_are_unique(suite):
    for prompt in suite:
        assert prompt.id.rsplit("-", 1)[0] == f"{prompt.domain}-{prompt.language}"
    assert len({prompt.turns[0] for prompt in suite}) == len(suite)


def test_lengths(suite):
    assert sum(len(prompt.turns) > 1 for prompt in suite) == 16
    assert sum(len(prompt.turns[0].split()) > 600 for prompt in suite) == 2
    for prompt in suite:
        text = prompt.turns[0]
        # A Chinese or Japanese character stands for about three Latin ones, a Korean one for two.
        width = {"zh": 3.0, "ja": 2.5, "ko": 2.0}.get(prompt.language, 1.0) * len(text)
        assert width < 4500, prompt.id
        if prompt.domain in WITH_PASSAGE:
            assert "\n\n" in text and width > 550, prompt.id
        assert all(turn == turn.strip() for turn in prompt.turns), prompt.id


def test_texts_are_written_in_their_language(suite):
    for prompt in suite:
        if prompt.domain in ("translation", "code"):  # carry a text in another language
            continue
        text = "".join(prompt.turns)
        for language, (first, last) in SCRIPTS.items():
            share = sum(first <= character <= last for character in text) / len(text)
            if language == prompt.language:
                assert share > 0.2, prompt.id
            elif (prompt.language, language) != ("ja", "zh"):  # Japanese is written with both
                assert share == 0, (prompt.id, language)
