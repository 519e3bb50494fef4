"""`--help`: our own options, one line each, and with `--help-all` those of what they are built on."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from osprey.cli.arguments import parse


@dataclass
class Trainer:
    """Stands in for one of transformers: not ours."""

    num_train_epochs: float = field(default=3.0, metadata={"help": "passes over [`~data.Set`]"})
    learning_rate: float = field(default=1e-5, metadata={"help": "the trainer's"})
    warm_up: int = field(default=0, metadata={"help": "Steps of `warm-up` (default)."})
    push_to_hub: bool = field(default=False, metadata={"help": "Whether to `push`."})
    half: bool = field(default=False, metadata={"help": "refused"})


@dataclass
class Baking(Trainer):
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ("half",)

    learning_rate: float = field(default=0.5, metadata={"help": "of the baker"})
    warm_up: int = 3  # only another default
    crisp_crust: bool = field(default=True, metadata={"help": "brown it"})
    salt: float = field(default=0.0, metadata={"help": "grams"})
    spices: list[str] = field(default_factory=list, metadata={"help": "any (default: none)"})


@dataclass
class Cooking:
    dish: str = field(metadata={"help": "what"})
    out: str = field(metadata={"help": "where to"})
    guest: str | None = field(default=None, metadata={"help": "who"})


def printed(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse(
            [Cooking, Baking],
            list(argv),
            "osprey cook",
            "``osprey cook``: makes `food`.\n\nAnd more.",
            ("dish", "guest"),
        )
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


def test_our_options_stand_in_one_line_each(capsys):
    lines = printed(capsys, "--help").splitlines()
    assert lines[0] == "usage: osprey cook DISH [GUEST] --out OUT [options]"
    assert lines[2:5] == ["osprey cook: makes food.", "", "And more."]
    options = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith("  -")}
    assert options == {
        "-h,": "--help show this help message and exit",
        "--dish": "DISH what",
        "--out": "OUT where to",
        "--guest": "GUEST who",
        "--num_train_epochs": "X passes over data.Set (default: 3.0)",
        "--learning_rate": "X of the baker (default: 0.5)",
        "--crisp_crust": "[true|false] brown it (default: True); --no_crisp_crust turns it off",
        "--salt": "X grams (default: 0.0)",
        "--spices": "SPICES [SPICES ...] any (default: none)",
        "--config": "CONFIG YAML file with values for these options; flags override it",
        "--json": "print the result as JSON (takes no file name)",
        "--help-all": options["--help-all"],
    }
    assert "2 more options" in options["--help-all"]


def test_all_options(capsys):
    text = printed(capsys, "--help-all")
    assert "--push_to_hub [true|false]" in text and "Whether to push." in text
    assert "--warm_up N" in text and "(default: 3)" in text and "--half" not in text
    assert set(printed(capsys, "--help").splitlines()) < set(text.splitlines())


def test_hidden_options_are_taken_all_the_same():
    argv = ["soup", "--out", "o", "--push-to-hub", "--no-crisp-crust", "--warm_up", "4"]
    cooking, baking, _ = parse([Cooking, Baking], argv, "osprey cook", None, ("dish", "guest"))
    assert (cooking.dish, baking.push_to_hub, baking.crisp_crust, baking.warm_up) == ("soup", True, False, 4)


def test_without_inherited_options_there_is_nothing_to_unfold(capsys):
    with pytest.raises(SystemExit):
        parse(Cooking, ["--help"], "osprey cook", None, "dish")
    assert "--help-all" not in capsys.readouterr().out


@dataclass
class Serving:
    dish: str
    to: str = field(metadata={"choices": ("table", "bar")})


def test_choices_stand_in_the_usage(capsys):
    with pytest.raises(SystemExit):
        parse(Serving, ["--help"], "osprey serve", None, "dish")
    shown = capsys.readouterr().out
    assert shown.startswith("usage: osprey serve DISH --to table|bar [options]\n")
    assert "--to table|bar\n" in shown
