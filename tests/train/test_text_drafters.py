"""Copies and n-grams: what transformers' own prompt lookup drafts, and counts made by hand."""

import random

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from osprey.train.text_drafters import NgramTable, prompt_lookup


@pytest.mark.parametrize("seed", range(5))
def test_prompt_lookup_drafts_what_generate_would(seed):
    rng = random.Random(seed)
    copied = 0
    for length in range(2, 40):
        ids = [rng.randrange(6) for _ in range(length)]
        generator = PromptLookupCandidateGenerator(num_output_tokens=4, max_matching_ngram_size=2, max_length=1000)
        candidates = generator.get_candidates(torch.tensor([ids]))[0][0, length:].tolist()
        assert prompt_lookup(ids, 4) == candidates
        copied += bool(candidates)
    assert copied > 20


def test_an_ngram_table_follows_the_longest_gram_that_it_knows():
    table = NgramTable([[1, 2, 3, 4], [9, 2, 3, 5], [8, 2, 3, 5]])
    assert table.draft([1, 2, 3], 1) == [4]  # behind 1 2 3 always
    assert table.draft([7, 2, 3], 1) == [5]  # 1 2 3 does not fit: behind 2 3 more often
    assert table.draft([7, 7, 9], 3) == [2, 3, 5]
    assert table.draft([3, 5], 3) == []  # nothing was ever behind 5
