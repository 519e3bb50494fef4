"""Dataclasses as command lines: flags over a YAML recipe (`--config`) over the dataclass's own defaults."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser


def parse(
    kinds: type | list[type], argv: list[str], prog: str, description: str | None, positional: str | None = None
) -> tuple[Any, ...]:
    """The arguments of a verb, one object for each dataclass of `kinds`, and whether `--json` was given.

    `positional` names a field that may also come first, without its flag. Wrong flags end the process, as argparse
    does; a recipe that cannot be read, or that has an unknown key, raises ValueError or OSError.
    """
    parser = HfArgumentParser(kinds, prog=prog, description=description)
    parser.add_argument("--config", help="YAML file with values for these options; flags override it")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    if positional and argv and not argv[0].startswith("-"):
        argv = [f"--{positional}", *argv]
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config")
    config = early.parse_known_args(argv)[0].config
    if config is not None:
        known = {field.name for kind in parser.dataclass_types for field in fields(kind)}
        recipe = read_recipe(config, known)
        parser.set_defaults(**recipe)
        for action in parser._actions:
            action.required = action.required and action.dest not in recipe
    *arguments, namespace = parser.parse_args_into_dataclasses(argv)
    return *arguments, namespace.json


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
