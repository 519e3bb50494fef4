"""``python -m osprey.cli.startup``: what importing `osprey.modeling` costs, and how soon a drafter drafts.

Every figure is of a fresh process, and the kinds of processes alternate; the first round only warms the disk's cache.
`load` is the drafter's `from_pretrained`, `first_draft` the time from there to the first drafted token: `generate`,
and in it the target's prefill of 32 tokens. The target is loaded before.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from statistics import median

from osprey.cli.arguments import parse
from osprey.cli.main import guarded
from osprey.cli.targets import DEFAULT_TARGET, find_model, resolve_target

BEGIN = """
import json, sys
from time import {clock} as now
start = now()
"""
# Transformers loads its parts when they are asked for; these, and torch with them, every user of a model needs.
TRANSFORMERS = """
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
seconds = {"import_transformers": now() - start}
"""
OSPREY = """
import osprey.modeling
seconds = {"import_osprey_modeling": now() - start}
"""
FIRST_DRAFT = """
start = now()
import osprey.modeling
seconds["import_osprey_modeling_after_transformers"] = now() - start
import torch
from osprey.modeling import OspreyCandidateGenerator, OspreyDrafter

target = AutoModelForCausalLM.from_pretrained(sys.argv[1])
drafted, choose = [], OspreyCandidateGenerator.choose
OspreyCandidateGenerator.choose = lambda *args: (choose(*args), drafted.append(now()))[0]
start = now()
drafter = OspreyDrafter.from_pretrained(sys.argv[2])
loaded = now()
prompt = torch.arange(10, 42)[None]  # 32 tokens
target.generate(prompt, assistant_model=drafter, max_new_tokens=4, do_sample=False)
seconds |= {"load": loaded - start, "first_draft": drafted[0] - loaded, "load_to_first_draft": drafted[0] - start}
"""
END = "print(json.dumps(seconds))"


@dataclass
class StartupArguments:
    target: str = field(default=DEFAULT_TARGET, metadata={"help": "model: folder or Hub id"})
    drafter: str = field(default="hub_cards/osprey-smollm2-135m-instruct", metadata={"help": "its drafter, likewise"})
    cpu: bool = field(default=False, metadata={"help": "CPU time of the process instead of wall time"})
    rounds: int = field(default=5, metadata={"help": "measured rounds; medians are given"})


def main(argv: list[str]) -> int:
    arguments, as_json = parse(StartupArguments, argv, "startup", __doc__)
    models = [resolve_target(arguments.target), find_model("drafter", arguments.drafter)]
    begin = BEGIN.format(clock="process_time" if arguments.cpu else "perf_counter")
    scripts = [begin + OSPREY + END, begin + TRANSFORMERS + FIRST_DRAFT + END]
    rounds = [run(scripts[0], models) | run(scripts[1], models) for _ in range(arguments.rounds + 1)][1:]
    result = {name: round(median(one[name] for one in rounds), 3) for name in rounds[0]}
    print(json.dumps(result) if as_json else "\n".join(f"{name:<41} {value:8.3f} s" for name, value in result.items()))
    return 0


def run(script: str, models: list[str]) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", script, *models], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"a measuring process failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(guarded("startup", lambda: main(sys.argv[1:])))
