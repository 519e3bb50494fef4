"""What the Trainer of stage 4 says, and when it stops. Standard output is the command's result alone."""

import logging

import torch
from transformers import ProgressCallback, TrainerCallback

logger = logging.getLogger(__name__)


class LogLine(TrainerCallback):
    """One line a log through `logging`, to standard error."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        logger.info("step %d/%d %s", state.global_step, state.max_steps, logs)


class SilentProgress(ProgressCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        """Nothing: the bar goes to standard error, but its logs would go to standard output."""


class StopAtNan(TrainerCallback):
    """Gradients that are not finite would spoil the weights, and a checkpoint of them, before a loss shows it."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        sums = [parameter.grad.sum() for parameter in model.parameters() if parameter.grad is not None]
        if not torch.stack(sums).isfinite().all():
            raise ValueError(
                f"The gradients of step {state.global_step + 1} are not finite: go on from the last checkpoint in "
                f"{args.output_dir} with a lower learning rate."
            )
