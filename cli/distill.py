"""``osprey distill DRAFTER --features DIR … --out DIR``: stage 4; ``osprey distill --prepare``: its offline data."""

import argparse
import json
import logging

import yaml
from transformers import HfArgumentParser

from osprey.train.distill import DistillArguments, OspreyDistillationConfig, distill
from osprey.train.features import FeatureArguments, prepare_features


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if "--prepare" in argv:
        parser = HfArgumentParser(FeatureArguments, prog="osprey distill --prepare", description=__doc__)
        parser.add_argument("--prepare", action="store_true")
        arguments, _ = parser.parse_args_into_dataclasses(argv)
        print(prepare_features(arguments))
        return 0
    parser = HfArgumentParser([DistillArguments, OspreyDistillationConfig], prog="osprey distill", description=__doc__)
    parser.add_argument("--config", help="YAML recipe; what is given on the command line goes before it")
    parser.add_argument("--json", action="store_true", help="print the training record as JSON")
    argv = ["--drafter", *argv] if argv and not argv[0].startswith("-") else argv
    arguments, config, namespace = parser.parse_args_into_dataclasses(with_recipe(argv))
    record = distill(arguments, config)
    if namespace.json:
        print(json.dumps(record, ensure_ascii=False))
    else:
        held_out = ", ".join(f"{name.removeprefix('eval_')} {value:.3f}" for name, value in record["held_out"].items())
        print(f"{arguments.out}: {record['steps']} steps in {record['wall_seconds']} s; held out: {held_out}")
    return 0


def with_recipe(argv: list[str]) -> list[str]:
    """Puts the recipe's settings before the flags, which then override them."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    path = finder.parse_known_args(argv)[0].config
    if path is None:
        return argv
    with open(path, encoding="utf-8") as file:
        recipe = yaml.safe_load(file)
    if not isinstance(recipe, dict):
        raise ValueError(f"The recipe {path} is not a list of `setting: value` lines.")
    flags: list[str] = []
    for name, value in recipe.items():
        values = value if isinstance(value, list) else [value]
        flags += [f"--{name}", *map(str, values)]
    return flags + argv
