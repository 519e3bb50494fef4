"""Dataclasses as command lines: flags over a YAML recipe (`--config`) over the dataclass's own defaults."""

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from osprey.cli.help import HelpFormatter, prepare_help
from osprey.cli.parser import Parser


class DataclassParser(Parser, HfArgumentParser):
    """Options from dataclasses' fields."""


def parse(
    kinds: type | list[type],
    argv: list[str],
    prog: str,
    description: str | None,
    positional: str | tuple[str, ...] = (),
) -> tuple[Any, ...]:
    """The arguments of a verb, one object for each dataclass of `kinds`, and whether `--json` was given.

    `positional` names fields that may also come first, in this order, without their flags.

    Raises:
        ValueError, OSError: a flag is wrong or missing, or the recipe cannot be read or has an unknown key.
    """
    # No abbreviations: what looks for `--config` before (and for `--features`, `--speed`) does not know them.
    parser = DataclassParser(
        kinds, prog=prog, description=description, formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", help="YAML file with values for these options; flags override it")
    parser.add_argument("--json", action="store_true", help="print the result as JSON (takes no file name)")
    names = [positional] if isinstance(positional, str) else positional
    prepare_help(parser, parser.dataclass_types, names)
    leading = next((index for index, argument in enumerate(argv) if argument.startswith("-")), len(argv))
    if leading > len(names):
        parser.error(f"unexpected argument {argv[len(names)]!r}")
    flags = [word for name, value in zip(names, argv[:leading], strict=False) for word in (f"--{name}", value)]
    argv = flags + argv[leading:]
    early = Parser(add_help=False, allow_abbrev=False, prog=prog)
    early.add_argument("--config")
    config = early.parse_known_args(argv)[0].config
    if config is not None:
        known = {field.name: str(field.type) for kind in parser.dataclass_types for field in fields(kind)}
        recipe = read_recipe(config, set(known))
        for name, value in recipe.items():
            action = next(action for action in parser._actions if action.dest == name)
            try:
                recipe[name] = _checked(parser, action, known[name], value)
            except argparse.ArgumentError as error:
                raise ValueError(f"the recipe {config}: {name}: {error.message}.") from error
        parser.set_defaults(**recipe)
    refuse_missing_and_unknown(parser, argv, names)
    *arguments, namespace = parser.parse_args_into_dataclasses(argv)
    return *arguments, namespace.json


def refuse_missing_and_unknown(parser: DataclassParser, argv: list[str], positional: Sequence[str]) -> None:
    """Raises `ValueError` as argparse would, but names what comes without a flag as the usage does.

    What is required is required no more afterwards: it is there.
    """
    required = [action for action in parser._actions if action.required]
    for action in required:
        action.required = False
    namespace, unknown = parser.parse_known_args(argv)
    if wrong := next((word for word in unknown if word.startswith("-")), None):
        options = [option for action in parser._actions for option in action.option_strings]
        close = difflib.get_close_matches(wrong, options, n=1)
        parser.error(f"there is no option {wrong}" + (f", did you mean {close[0]}" if close else ""))
    missing = [action.dest for action in required if getattr(namespace, action.dest) is None]
    if missing:
        names = [f"{n.upper()} (before all options)" if n in positional else f"--{n}" for n in missing]
        parser.error(f"the following arguments are required: {', '.join(names)}")
    if unknown:
        parser.error(f"unexpected argument {unknown[0]!r}")


def _checked(parser: DataclassParser, action: argparse.Action, annotation: str, value: Any) -> Any:
    """A value of a recipe as argparse would have it from a flag; raises `argparse.ArgumentError` where it would."""
    if value is None:
        if action.required or action.default is not None:
            raise argparse.ArgumentError(action, "there is no value")
        return None
    if isinstance(value, dict) and "dict" in annotation:
        return value
    if action.nargs in ("+", "*"):
        if not isinstance(value, list):
            raise argparse.ArgumentError(action, f"must be a list, such as [{value}]")
    elif isinstance(value, list | dict):
        raise argparse.ArgumentError(action, f"must be one value, not {value}")
    values = [parser._get_value(action, str(part)) for part in (value if isinstance(value, list) else [value])]
    for part in values:
        parser._check_value(action, part)
    return values if isinstance(value, list) else values[0]


def read_recipe(path: str, known: set[str]) -> dict[str, Any]:
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"the recipe {path} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"the recipe {path} is not a list of `option: value` lines.")
    unknown = sorted(set(recipe) - known)
    if unknown:
        raise ValueError(f"the recipe {path} has unknown options: {', '.join(unknown)}.")
    return recipe
