"""Dataclasses as command lines: what goes before what, and one sentence for every mistake."""

from dataclasses import dataclass, field

import pytest

from osprey.cli.arguments import parse
from osprey.cli.main import main


@dataclass
class Cooking:
    dish: str
    guest: str = "nobody"
    minutes: int = field(default=5, metadata={"help": "how long"})


def test_positionals_recipe_and_flags(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("minutes: 7\nguest: you\n")
    both = ("dish", "guest")
    assert parse(Cooking, ["soup"], "cook", None, "dish") == (Cooking("soup"), False)
    assert parse(Cooking, ["soup", "me", "--json"], "cook", None, both) == (Cooking("soup", "me"), True)
    assert parse(Cooking, ["soup", "--config", str(recipe)], "cook", None, both)[0] == Cooking("soup", "you", 7)
    flags = ["--dish", "soup", "--minutes", "9", "--config", str(recipe)]
    assert parse(Cooking, flags, "cook", None)[0] == Cooking("soup", "you", 9)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: --dish"),
        (["soup", "me"], "unexpected argument 'me'"),
        (["soup", "--minuts", "3"], "there is no option --minuts, did you mean --minutes"),
        (["soup", "--minutes", "long"], "invalid int value: 'long'"),
        (["soup", "--config"], "expected one argument"),
        (["soup", "--config", "none.yaml"], "none.yaml"),
    ],
)
def test_mistakes(argv, message):
    with pytest.raises((ValueError, OSError), match=message) as error:
        parse(Cooking, argv, "cook", None, "dish")
    assert "usage" not in str(error.value)


def test_the_command_prints_one_line(capsys):
    assert main(["convert", "backbone", "--nonsense"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("osprey convert: ")
    assert output.err.count("\n") == 1
