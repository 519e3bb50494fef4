"""Training speed of stage 4 against what the machine's matrix products allow."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback

from osprey.train.distill import load_drafter
from osprey.train.distillation_config import OspreyDistillationConfig
from osprey.train.distillation_trainer import OspreyDistillationTrainer
from osprey.train.feature_data import FeatureDataset, split_rows
from osprey.train.precision import compute_dtype
from osprey.train.throughput import (
    FIRST_STEPS,
    StepTimes,
    ThroughputArguments,
    against_bound,
    clocks_for,
    matmul_speeds,
)


@dataclass
class DistillThroughputArguments:
    """What is measured; how it trains is in `OspreyDistillationConfig`."""

    drafter: str = field(metadata={"help": "drafter folder"})
    features: list[str] = field(metadata={"help": "feature folders of its target (`osprey distill --prepare`)"})


def distillation_throughput(
    measured: ThroughputArguments, arguments: DistillThroughputArguments, config: OspreyDistillationConfig
) -> dict[str, Any]:
    """Takes the same steps twice: once counting the arithmetic of their matrix products, once by the clock.

    `share_of_bound` is that arithmetic, forward, backward and the optimizer's, in the time it took, over the speed of
    square products before and after. Attention scores are not in it on a CPU, whose fused attention torch's counter
    does not know: the true share is a little higher.
    """
    config.max_steps, config.save_strategy, config.eval_strategy = measured.measured_steps + FIRST_STEPS, "no", "no"
    train, _ = split_rows(FeatureDataset(arguments.features), held_out_percent=0)

    def run(callback: TrainerCallback) -> OspreyDistillationTrainer:
        drafter = load_drafter(arguments.drafter)
        trainer = OspreyDistillationTrainer(drafter, copy.copy(config), train)  # seeds itself: the same steps
        trainer.add_callback(callback)
        trainer.train()
        return trainer

    with FlopCounterMode(display=False) as counter:
        counts = _StepCounts(counter)
        run(counts)
    flops = (counts.totals[-1] - counts.totals[FIRST_STEPS - 1]) / measured.measured_steps

    device_type = config.device.type
    dtype = compute_dtype(config.precision, device_type)
    clocks = clocks_for(device_type)
    before = matmul_speeds(device_type, dtype, clocks)
    times = StepTimes(clocks)
    trainer = run(times)
    after = matmul_speeds(device_type, dtype, clocks)
    result = {
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "step_rows": trainer.args.train_batch_size,
        "step_gflops": round(flops / 1e9, 6),
    }
    for name, ends in times.ends.items():
        seconds = (ends[-1] - ends[FIRST_STEPS - 1]) / measured.measured_steps
        result[name] = against_bound(flops, seconds, before[name], after[name])
    return result


class _StepCounts(TrainerCallback):
    """Operations that were counted until the end of each optimizer step."""

    def __init__(self, counter: FlopCounterMode):
        self.counter, self.totals = counter, []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.totals.append(self.counter.get_total_flops())
