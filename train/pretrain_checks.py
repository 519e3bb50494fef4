"""What stage 2 refuses before it begins: settings that cannot be meant, and files that its records would mix up."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from osprey.train.data import Source
from osprey.train.perplexity import held_out_name

if TYPE_CHECKING:
    from osprey.train.pretrain import PretrainArguments

LEAST = {
    **dict.fromkeys(("batch_rows", "accumulation", "max_passes", "softmax_ids", "log_steps", "save_steps"), 1),
    **dict.fromkeys(("eval_steps", "eval_tokens", "final_eval_tokens"), 1),
    **{"tokens": 1, "length": 2},
}


def refuse_settings(arguments: PretrainArguments) -> None:
    """Raises `ValueError` for a setting that cannot be meant."""
    for name, least in LEAST.items():
        value = getattr(arguments, name)
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"--{name} {value} must be at least {least} and finite.")
    if not 0 < arguments.distill_share <= 1:
        raise ValueError(f"--distill_share {arguments.distill_share} must be more than 0 and at most 1.")
    for name in ("warmup", "decay"):
        if not 0 <= getattr(arguments, name) <= 1:
            raise ValueError(
                f"--{name} {getattr(arguments, name)} is a share of the steps: give a number from 0 to 1."
            )
    if arguments.schedule == "wsd" and arguments.warmup + arguments.decay > 1:
        raise ValueError("--warmup and --decay are shares of the steps: together they must not exceed 1.")
    if arguments.schedule != "wsd" and arguments.decay != type(arguments).decay:
        raise ValueError(f"--decay {arguments.decay} means nothing to --schedule {arguments.schedule}: wsd decays.")


def refuse_collisions(sources: list[Source], held_out: list[Path]) -> None:
    """Raises `ValueError` for two files of one name, by which records tell them apart, or text used for both ends."""
    for flag, names in (
        ("--data", [source.name for source in sources]),
        ("--held_out", [held_out_name(path) for path in held_out] + ["mean"]),  # `mean` is that of all files
    ):
        name, count = Counter(names).most_common(1)[0]
        if count > 1:
            raise ValueError(f"{flag} has two entries that records call {name!r}: rename one, or join them.")
    trained = {source.path.resolve() for source in sources if source.path is not None}
    for path in held_out:
        if path.resolve() in trained:
            raise ValueError(f"{path} is in --data and in --held_out: held-out text must not be trained on.")
