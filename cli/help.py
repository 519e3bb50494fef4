"""What `--help` prints of options that come from dataclasses: ours, and with `--help-all` those that they inherit."""

import argparse
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from transformers.hf_argparser import string_to_bool

# Of the many settings that a trainer's configuration brings, those that are often set.
COMMON = ("num_train_epochs", "max_steps", "gradient_accumulation_steps", "max_new_tokens", "seed")
METAVARS = {int: "N", float: "X"}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One spelling of each option, where the parser takes `--a_b` and `--a-b`."""

    def __init__(self, prog: str, **kwargs: Any):
        super().__init__(prog, max_help_position=34, **kwargs)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = {option.replace("-", "_"): option for option in reversed(action.option_strings)}
        names = ", ".join(reversed(shown.values()))
        if action.nargs == 0:
            return names
        return f"{names} {self._format_args(action, action.metavar or action.dest.upper())}"


class HelpAll(argparse.Action):
    """Prints the help with what was hidden, `const`, and ends as `--help` does."""

    def __call__(self, parser, namespace, values, option_string=None):
        for action, text in self.const.items():
            action.help = text
        parser.print_help()
        parser.exit()


def prepare_help(parser: argparse.ArgumentParser, kinds: list[type], positional: Iterable[str]) -> None:
    """Rewrites what the help of `parser` says, whose options are `--config`, `--json` and the fields of `kinds`."""
    inherited = {name for kind in kinds for name in inherited_fields(kind)}.difference(COMMON)
    actions = [action for action in parser._actions if action.dest != "help"]
    first = {action.dest: action for action in reversed(actions)}
    for action in actions:
        if action.type is string_to_bool:
            action.metavar = "true|false"
        elif action.choices is not None:
            action.metavar = "|".join(map(str, action.choices))
        else:
            action.metavar = METAVARS.get(action.type, action.dest.rpartition("_")[2].upper())
        action.help = help_text(action)
        if isinstance(action, argparse._StoreFalseAction):  # the --no_ form, told in the text of the other
            first[action.dest].help += f"; {action.option_strings[0]} turns it off"
            action.help = argparse.SUPPRESS
    useless = {name for kind in kinds for name in getattr(kind, "WITHOUT_EFFECT", ())}
    hidden = {action: action.help for name, action in first.items() if name in inherited - useless}
    for action in (*hidden, *(first[name] for name in useless)):
        action.help = argparse.SUPPRESS
    if hidden:
        what = (
            f"this, and {len(hidden)} more options of the trainers of transformers and TRL that this one is built on"
        )
        parser.add_argument("--help-all", action=HelpAll, nargs=0, const=hidden, help=what, default=argparse.SUPPRESS)
    words = [name.upper() if first[name].required else f"[{name.upper()}]" for name in positional]
    words += [
        f"--{action.dest} {action.metavar}" for action in actions if action.required and action.dest not in positional
    ]
    parser.usage = " ".join(["%(prog)s", *words, "[options]"])
    parser.description = paragraphs(parser.description or "")


def inherited_fields(kind: type) -> set[str]:
    """Names of the fields that come from bases which are not ours; one that we explain anew is no longer of them."""
    ours = [kind, *(base for base in kind.__mro__ if base.__module__.startswith("osprey."))]
    declared = {name for each in ours for name in inspect.get_annotations(each)}
    theirs = {f.name for base in kind.__mro__ if base not in ours and is_dataclass(base) for f in fields(base)}
    return {f.name for f in fields(kind) if f.name in theirs and not (f.name in declared and "help" in f.metadata)}


def help_text(action: argparse.Action) -> str:
    """Without markup, and with the default at the end where it is one, and not said already."""
    text = plain(action.help or "")
    unset = action.required or action.default is False or action.default in (None, argparse.SUPPRESS, [], "")
    if unset or "(default" in text:
        return text
    return f"{text} (default: %(default)s)".strip()


def plain(text: str) -> str:
    """`text` without the marks of reStructuredText around code."""
    return re.sub(r"\[?`+~?([^`]*)`+\]?", r"\1", text)


def paragraphs(text: str) -> str:
    width = shutil.get_terminal_size().columns - 2
    return "\n\n".join(textwrap.fill(plain(part), width) for part in inspect.cleandoc(text).split("\n\n"))
