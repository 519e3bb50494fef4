"""Training speed of stage 2 against what the machine's matrix products allow."""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from osprey.train.cost import flops_per_token
from osprey.train.data import parse_sources
from osprey.train.dry_run import matmul_flops
from osprey.train.packing import PackedRows
from osprey.train.precision import compute_dtype
from osprey.train.pretrain import PretrainArguments
from osprey.train.pretrain_checks import refuse_settings
from osprey.train.pretrain_trainer import make_settings, make_trainer

FIRST_STEPS = 5  # which are not timed


@dataclass
class ThroughputArguments:
    """How long is measured."""

    measured_steps: int = field(
        default=20, metadata={"help": "optimizer steps that are timed, after five that are not"}
    )


def training_throughput(measured: ThroughputArguments, recipe: PretrainArguments) -> dict[str, Any]:
    """Times optimizer steps of `recipe` (the median counts) and square matrix products before and after them.

    `share_of_bound` is the arithmetic of a step's matrix products (`flops_per_token`, three times) in its time, over
    the speed of the square products: 1 would be a step that does nothing else, at their speed. On one thread of a
    CPU both are also measured in the time that it was given (`cpu`), which other processes do not change much.
    """
    refuse_settings(recipe)
    recipe = replace(recipe, tokens=(measured.measured_steps + FIRST_STEPS) * recipe.step_tokens)
    with tempfile.TemporaryDirectory() as run:
        settings = make_settings(recipe, Path(run))
        settings.save_strategy = "no"
        model = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.float32).to(settings.device)
        tokenizer = AutoTokenizer.from_pretrained(recipe.model)
        rows = PackedRows(parse_sources(recipe.data, recipe.data_root), tokenizer, recipe.length)
        trainer = make_trainer(recipe, settings, model, None, rows, dict, None)
        device_type = model.device.type
        clocks = clocks_for(device_type)
        times = StepTimes(clocks)
        trainer.add_callback(times)
        dtype = compute_dtype(recipe.precision, device_type)
        before = matmul_speeds(device_type, dtype, clocks)
        trainer.train()
        after = matmul_speeds(device_type, dtype, clocks)
        start = time.process_time()
        reading = sum(len(row["input_ids"]) for row in islice(rows.fresh(), 64)) / (time.process_time() - start)
    head_rows = min(recipe.softmax_ids or model.config.vocab_size, model.config.vocab_size)
    flops = 3 * flops_per_token(model.config, recipe.length, head_rows) * recipe.step_tokens
    result = {
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "step_tokens": recipe.step_tokens,
        "step_gflops": round(flops / 1e9, 6),
        "reading_tokens_per_cpu_second": round(reading),
    }
    for name in clocks:
        ends = times.ends[name][-measured.measured_steps - 1 :]
        step = median(end - begin for begin, end in pairwise(ends))
        result[name] = {"tokens_per_second": round(recipe.step_tokens / step, 1)}
        result[name] |= against_bound(flops, step, before[name], after[name])
    return result


def clocks_for(device_type: str) -> dict[str, Callable[[], float]]:
    """Wall time, and where one thread computes also the time that it was given."""
    clocks = {"wall": time.perf_counter}
    if device_type == "cpu" and torch.get_num_threads() == 1:  # several would not all be busy all the time
        clocks["cpu"] = time.process_time
    return clocks


def matmul_speeds(device_type: str, dtype: torch.dtype, clocks: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Operations a second of square matrix products now, by each clock."""
    return {name: matmul_flops(device_type, dtype, clock=clock) for name, clock in clocks.items()}


def against_bound(flops: float, seconds: float, before: float, after: float) -> dict[str, Any]:
    """A step of `flops` operations that took `seconds`, beside the speed of square products before and after it."""
    return {
        "seconds_per_step": round(seconds, 4),
        "gflops": round(flops / seconds / 1e9, 1),
        "matmul_gflops": [round(before / 1e9, 1), round(after / 1e9, 1)],
        "share_of_bound": round(2 * flops / seconds / (before + after), 3),
    }


class StepTimes(TrainerCallback):
    """When each optimizer step ended, by each clock."""

    def __init__(self, clocks: dict[str, Callable[[], float]]) -> None:
        self.clocks = clocks
        self.ends: dict[str, list[float]] = defaultdict(list)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        for name, clock in self.clocks.items():
            self.ends[name].append(clock())
