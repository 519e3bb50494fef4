"""``osprey baseline TARGET --like DRAFTER --out DIR``: an untrained EAGLE-3-style drafter, to distil and compare with.

It takes the taps, the draft vocabulary and the tokenizer from the Osprey drafter; `osprey distill` trains it.
"""

import json
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from osprey.cli.arguments import parse
from osprey.cli.targets import find_model, resolve_target
from osprey.eval.baselines import make_eagle3
from osprey.modeling import OspreyDrafter
from osprey.train.checkpoints import TRAINING_FILE, atomic_folder, versions, write_json


@dataclass
class BaselineArguments:
    target: str = field(metadata={"help": "target model: folder or Hub id"})
    like: str = field(metadata={"help": "drafter whose taps, draft vocabulary and tokenizer it gets"})
    out: str = field(metadata={"help": "drafter folder to write"})
    layers: int = field(default=1, metadata={"help": "number of blocks"})
    seed: int = field(default=0, metadata={"help": "seed of the initial weights"})
    overwrite: bool = field(default=False, metadata={"help": "replace the folder if it exists"})


def main(argv: list[str]) -> int:
    arguments, as_json = parse(BaselineArguments, argv, "osprey baseline", __doc__, "target")
    if arguments.layers < 1:
        raise ValueError("--layers must be at least 1.")
    with atomic_folder(arguments.out, arguments.overwrite, (arguments.target, arguments.like)) as work:
        like_folder = find_model("drafter", arguments.like)
        target = AutoModelForCausalLM.from_pretrained(resolve_target(arguments.target), dtype=torch.float32)
        drafter = make_eagle3(target, OspreyDrafter.from_pretrained(like_folder), arguments.layers, arguments.seed)
        record = {
            "stage": "baseline",
            "kind": "eagle3",
            "layers": arguments.layers,
            "seed": arguments.seed,
            "target": drafter.config.target,
            "target_layer_ids": drafter.config.target_layer_ids,
            "versions": versions(),
        }
        drafter.save_pretrained(work)
        AutoTokenizer.from_pretrained(like_folder).save_pretrained(work)
        write_json(work / TRAINING_FILE, {"stages": [record]})
    if as_json:
        print(json.dumps(record))
        return 0
    body = sum(parameter.numel() for name, parameter in drafter.named_parameters() if name.startswith("layers."))
    print(f"{arguments.out}: {arguments.layers} layer(s), {body / 1e6:.1f} M parameters, for {record['target']}")
    return 0
