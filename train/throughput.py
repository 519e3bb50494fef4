"""Training speed of stage 2 against what the machine's matrix products allow."""

import tempfile
import time
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from osprey.train.cost import flops_per_token
from osprey.train.data import parse_sources
from osprey.train.dry_run import matmul_flops
from osprey.train.packing import PackedRows
from osprey.train.precision import use_bf16
from osprey.train.pretrain import PretrainArguments
from osprey.train.pretrain_trainer import make_settings, make_trainer


@dataclass
class ThroughputArguments:
    """How long is measured; everything else is a recipe of `pretrain`."""

    measured_steps: int = field(
        default=20, metadata={"help": "optimizer steps that are timed, after five that are not"}
    )


def training_throughput(measured: ThroughputArguments, recipe: PretrainArguments) -> dict[str, Any]:
    """Times optimizer steps of `recipe` (the median counts) and square matrix products before and after them.

    `share_of_bound` is the arithmetic of a step's matrix products (`flops_per_token`, three times) in its time, over
    the speed of the square products: 1 would be a step that does nothing else, at their speed.
    """
    settings_only = replace(recipe, tokens=(measured.measured_steps + 5) * recipe.step_tokens)
    with tempfile.TemporaryDirectory() as run:
        settings = make_settings(settings_only, Path(run))
        settings.save_strategy = "no"
        model = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.float32).to(settings.device)
        tokenizer = AutoTokenizer.from_pretrained(recipe.model)
        rows = PackedRows(parse_sources(recipe.data, recipe.data_root), tokenizer, recipe.length)
        dtype = torch.bfloat16 if use_bf16(recipe.precision, model.device.type) else torch.float32
        bounds = [matmul_flops(model.device.type, dtype)]
        start = time.perf_counter()
        reading = sum(len(row["input_ids"]) for row in islice(rows.fresh(), 64)) / (time.perf_counter() - start)
        trainer = make_trainer(settings_only, settings, model, None, rows, dict, None)
        times = _StepTimes()
        trainer.add_callback(times)
        trainer.train()
        bounds.append(matmul_flops(model.device.type, dtype))
    seconds = [after - before for before, after in zip(times.ends, times.ends[1:], strict=False)][
        -measured.measured_steps :
    ]
    step = median(seconds)
    head_rows = min(recipe.softmax_ids or model.config.vocab_size, model.config.vocab_size)
    flops = 3 * flops_per_token(model.config, recipe.length, head_rows) * recipe.step_tokens
    bound = sum(bounds) / len(bounds)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "step_tokens": recipe.step_tokens,
        "tokens_per_second": round(recipe.step_tokens / step, 1),
        "seconds_per_step": {
            "median": round(step, 4),
            "least": round(min(seconds), 4),
            "most": round(max(seconds), 4),
        },
        "reading_tokens_per_second": round(reading),
        "gflops": round(flops / step / 1e9, 1),
        "matmul_gflops": [round(value / 1e9, 1) for value in bounds],
        "share_of_bound": round(flops / step / bound, 3),
    }


class _StepTimes(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
