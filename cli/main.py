"""The `osprey` command: finds the verb and hands over; every verb lives in `cli/<verb>.py` (but see `MODULES`).

Nothing heavy is imported before the verb is known, so that `osprey --help` answers at once.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from importlib import metadata

from osprey.train.endings import Terminated, reader_has_gone, sigterm_as_interrupt

VERBS = {
    "prune": "stage 1: cut a small language model to its first few blocks",
    "pretrain": "stage 2: restore the pruned model by next-token training (gives a backbone)",
    "align": "show how a target's vocabulary maps onto a backbone's",
    "convert": "stage 3: turn a backbone into an untrained drafter for one target",
    "respond": "let a target answer prompts: training text for stage 4",
    "distill": "stage 4: train the drafter to match its target",
    "adapt": "convert, prepare and distill in one: a backbone becomes a drafter",
    "plan": "sizes, memory and time of an adaptation, before it starts",
    "export": "write a drafter for vLLM, SGLang, llama.cpp or as a plain draft model",
    "baseline": "an untrained EAGLE-3-style drafter, to distill and compare with",
    "push": "publish a drafter or a backbone on the Hub",
    "pull": "fetch one from the Hub, by name or the best for a target",
    "zoo": "list the drafters and backbones on the Hub, in its local cache and in given folders",
    "import": "turn a checkpoint that the paper's authors released into a drafter folder",
    "bench": "acceptance and speed by domain and language, beside baselines; plots",
    "card": "put a benchmark's figures into a drafter's model card",
    "generate": "generate with a target and its drafter, and compare with plain generation",
}
MODULES = {"import": "import_checkpoint"}  # a keyword cannot be a module's name


def usage() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {what}" for verb, what in VERBS.items())
    return (
        "usage: osprey VERB [options]\n\n"
        "Speculative-decoding drafters: pretrained once, adapted to any target.\n\n"
        f"{verbs}\n\n"
        "`osprey VERB --help` lists a verb's options, which take _ and - alike (--max_new_tokens, --max-new-tokens);\n"
        "`osprey generate` alone runs the demo.\n"
        "OSPREY_DEBUG=1 shows the traceback behind an error."
    )


def main(argv: list[str] | None = None) -> int:
    """Runs one verb and returns the exit status.

    0 done, 1 the verb refused, 2 no such verb; as a shell has it 130 interrupted, 143 terminated, 141 nobody reads on.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        return guarded("osprey", lambda: show(usage()))
    if argv[0] == "--version":
        return guarded("osprey", lambda: show(f"osprey {metadata.version('osprey-drafter')}"))
    verb, *rest = argv
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the verbs are {', '.join(VERBS)}."
        print(f"osprey: there is no verb {verb!r}; {hint}", file=sys.stderr)
        return 2
    if not sys.stderr.isatty():  # in a log the bars of transformers and the Hub's client are one long line
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    module = f"osprey.cli.{MODULES.get(verb, verb)}"
    return guarded(f"osprey {verb}", lambda: importlib.import_module(module).main(rest))


def show(text: str) -> int:
    print(text)
    return 0


def guarded(name: str, command: Callable[[], int]) -> int:
    """What `command` returns, and one line for what it refuses."""
    try:
        with sigterm_as_interrupt():
            try:
                status = command()
            except SystemExit:  # argparse's, behind --help
                flush()
                raise
            flush()
            return status
    except ModuleNotFoundError as error:
        if os.environ.get("OSPREY_DEBUG") == "1" or (error.name or "").split(".")[0] == "osprey":
            raise
        extra = "dev" if error.name == "matplotlib" else "train"  # `eval` wants an environment of its own
        print(
            f"{name} needs the package {error.name}, which is not installed: it comes with the extra `{extra}` "
            f"(in a clone: .venv/bin/pip install -e '.[{extra}]').",
            file=sys.stderr,
        )
        return 1
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError) and reader_has_gone():
            return 141
        if os.environ.get("OSPREY_DEBUG") == "1":
            raise
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except Terminated:
        print(f"{name}: terminated", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    finally:
        reader_has_gone()  # then what an error left unprinted is dropped: at exit it would be one more traceback


def flush() -> None:
    """Now and not at exit, where a reader that has gone would be a traceback."""
    if sys.stdout is not None:  # closed by `>&-`
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
