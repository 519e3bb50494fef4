"""How every verb refuses a wrong flag: in one sentence, as everything else is refused."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Raises `ValueError`, which the command prints, instead of a screenful of usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` lists the options.")
