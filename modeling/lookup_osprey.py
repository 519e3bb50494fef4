"""Copying what followed, where the last tokens of a text occurred in it before."""


class NgramIndex:
    """A growing text, and for each of its n-grams the token that followed its latest occurrence.

    A token costs one dictionary entry for each n-gram size, a look-up at most one access for each: neither grows with
    the text.

    Args:
        shortest, longest: sizes of n-grams that are looked up; the longest that occurs is used.
    """

    def __init__(self, shortest: int, longest: int):
        self.sizes = range(shortest, longest + 1)
        self.tokens: list[int] = []
        self.follower: dict[tuple[int, ...], int] = {}  # n-gram to the position behind its latest occurrence

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            position = len(self.tokens)
            for size in self.sizes:
                if size <= position:
                    self.follower[tuple(self.tokens[position - size :])] = position
            self.tokens.append(token)

    def find(self) -> tuple[int, int]:
        """Position behind the latest earlier occurrence of the text's longest ending that has one, and its size.

        The size is 0 where no ending has occurred before.
        """
        for size in reversed(self.sizes):
            position = self.follower.get(tuple(self.tokens[-size:]))
            if position is not None:
                return position, size
        return 0, 0

    def copy(self, position: int, count: int) -> list[int]:
        """`count` tokens of the text from `position` on; what lies past its end repeats, as in a loop."""
        period = len(self.tokens) - position
        return [self.tokens[position + i % period] for i in range(count)]
