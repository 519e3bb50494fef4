"""Drafters that are no networks, to compare with: copies from the text so far, and a table of n-grams."""

from collections import Counter, defaultdict

MAX_NGRAM = 3


def prompt_lookup(ids: list[int], steps: int, longest: int = 2) -> list[int]:
    """What followed the first earlier place of the last tokens, as `generate(prompt_lookup_num_tokens=steps)` drafts.

    The last `longest` tokens are looked for, then fewer; a place with nothing behind it is passed over.
    """
    for size in range(min(longest, len(ids) - 1), 0, -1):
        suffix = ids[-size:]
        for begin in range(len(ids) - size):
            if ids[begin : begin + size] == suffix:
                return ids[begin + size : begin + size + steps]
    return []


class NgramTable:
    """The most frequent next token behind the last three, two or one tokens, counted on training answers."""

    def __init__(self, answers: list[list[int]]):
        counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for answer in answers:
            for position in range(1, len(answer)):
                for size in range(1, min(MAX_NGRAM, position) + 1):
                    counts[tuple(answer[position - size : position])][answer[position]] += 1
        self.next = {gram: counter.most_common(1)[0][0] for gram, counter in counts.items()}

    def draft(self, ids: list[int], steps: int) -> list[int]:
        """Up to `steps` tokens; the draft ends where not even the last token was seen."""
        text = list(ids[-MAX_NGRAM:])
        for _ in range(steps):
            found = (self.next.get(tuple(text[-size:])) for size in range(min(MAX_NGRAM, len(text)), 0, -1))
            token = next((token for token in found if token is not None), None)
            if token is None:
                break
            text.append(token)
        return text[min(MAX_NGRAM, len(ids)) :]
