"""Dataclasses as command lines: what goes before what, and one sentence for every mistake."""

import argparse
from dataclasses import dataclass, field

import pytest

from osprey.cli.arguments import parse
from osprey.cli.main import main
from osprey.cli.parser import Parser


@dataclass
class Cooking:
    dish: str
    guest: str = "nobody"
    minutes: int = field(default=5, metadata={"help": "how long"})
    heat: str = field(default="low", metadata={"choices": ("low", "high")})
    spices: list[str] = field(default_factory=list)
    salt: float | None = None
    stirred: bool = True
    oven: dict | None = None


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
        ([], r"the following arguments are required: DISH \(before all options\)"),
        (["--minutes", "3", "soup"], r"the following arguments are required: DISH \(before all options\)"),
        (["--spices", "thyme", "soup"], r"the following arguments are required: DISH \(before all options\)"),
        (["soup", "--minutes", "3", "me"], "unexpected argument 'me'"),
        (["soup", "me"], "unexpected argument 'me'"),
        (["soup", "--minuts", "3"], "there is no option --minuts, did you mean --minutes"),
        (["soup", "--minutes", "long"], "invalid int value: 'long'"),
        (["soup", "--conf", "recipe.yaml"], "there is no option --conf, did you mean --config"),
        (["soup", "--config"], "expected one argument"),
        (["soup", "--config", "none.yaml"], "none.yaml"),
    ],
)
def test_mistakes(argv, message):
    with pytest.raises((ValueError, OSError), match=message) as error:
        parse(Cooking, argv, "cook", None, "dish")
    assert "usage" not in str(error.value)


def test_a_recipe_is_converted_as_flags_are(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{heat: high, spices: [thyme, 7], salt: 1e-3, stirred: false, oven: {celsius: 200}, guest: 5}")
    expected = Cooking("soup", "5", 5, "high", ["thyme", "7"], 0.001, False, {"celsius": 200})
    assert parse(Cooking, ["soup", "--config", str(recipe)], "cook", None, "dish")[0] == expected
    recipe.write_text("{salt: null}")
    assert parse(Cooking, ["soup", "--config", str(recipe)], "cook", None, "dish")[0] == Cooking("soup")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("heat: hgh", "heat: invalid choice: 'hgh'"),
        ("minutes: 7.5", "minutes: invalid int value: '7.5'"),
        ("minutes: true", "minutes: invalid int value: 'True'"),
        ("minutes: null", "minutes: there is no value"),
        ("dish: null", "dish: there is no value"),
        ("spices: thyme", "spices: must be a list, such as .thyme."),
        ("guest: [you, me]", r"guest: must be one value, not \['you', 'me'\]"),
        ("salt: much", "salt: invalid float value: 'much'"),
        ("stirred: 5", "stirred: "),
    ],
)
def test_mistakes_in_a_recipe(tmp_path, entry, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(entry + "\n")
    with pytest.raises(ValueError, match=f"the recipe .*recipe.yaml: {message}"):
        parse(Cooking, ["--config", str(recipe)], "cook", None)


def test_both_spellings_of_an_option():
    parser = Parser(prog="cook")
    parser.add_argument("--oven_heat")
    parser.add_argument("--add-salt", action=argparse.BooleanOptionalAction)
    for argv in (["--oven_heat", "low", "--no-add-salt"], ["--oven-heat=low", "--no_add_salt"]):
        assert vars(parser.parse_args(argv)) == {"oven_heat": "low", "add_salt": False}
    assert parser.parse_args(["--oven-heat", "in_a_-_row"]).oven_heat == "in_a_-_row"
    with pytest.raises(ValueError, match="unrecognized arguments: --oven-cold"):
        parser.parse_args(["--oven-cold"])


def test_the_command_prints_one_line(capsys):
    assert main(["convert", "backbone", "--nonsense"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("osprey convert: ")
    assert output.err.count("\n") == 1
