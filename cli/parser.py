"""What all verbs' options have in common: both spellings, and refusals in one sentence, as everything else's."""

import argparse
import math
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Takes `--a_b` and `--a-b` alike, and raises `ValueError` instead of printing a screenful of usage."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        return super().parse_known_args(None if args is None else [self.spelt(word) for word in args], namespace)

    def spelt(self, word: str) -> str:
        """An option as it was declared, where `word` is one in the other spelling."""
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        same = [one for one in self._option_string_actions if one.replace("_", "-") == name.replace("_", "-")]
        return f"{same[0]}{equals}{value}" if same else word

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` lists the options.")


def check_bounds(*bounds: tuple[str, Any, float]) -> None:
    """Raises `ValueError` for the first flag whose value, or one of its values, is below its least or not finite.

    Args:
        bounds: flag, value or list of values (None: not given), and the least that is allowed.
    """
    for flag, given, least in bounds:
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"{flag} is {value}, but must be at least {least} and finite.")
