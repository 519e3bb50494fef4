"""Two small lighteval tasks with data of our own, for `--custom-tasks`: they run without the Hub.

`osprey_arithmetic` (40 word problems, generated answers) and `osprey_everyday` (30 questions of four choices, scored
by log-likelihood) show that a drafter leaves a score alone. They are too easy and too few to rank models.
"""

import re
from pathlib import Path

import numpy as np
from lighteval.metrics.metrics import Metrics
from lighteval.metrics.metrics_sample import ExactMatches
from lighteval.metrics.utils.metric_utils import SampleLevelMetric
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc, SamplingMethod

DATA = Path(__file__).resolve().parent / "lighteval_data"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> str:
    """The last number of a text, without thousands separators and a fraction of zeros; empty where there is none."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return ""
    number = numbers[-1].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def word_problem(row: dict, task_name: str) -> Doc:
    return Doc(
        task_name=task_name,
        query=f"{row['question']} Think briefly and end with the number.",
        choices=[row["answer"]],
        gold_index=0,
    )


def everyday_question(row: dict, task_name: str) -> Doc:
    return Doc(
        task_name=task_name,
        query=f"Question: {row['question']}\nAnswer:",
        choices=[f" {choice}" for choice in row["choices"]],
        gold_index=row["answer"],
    )


LOCAL = {
    "hf_subset": "default",
    "hf_avail_splits": ["train", "test"],
    "evaluation_splits": ["test"],
    "few_shots_split": "train",
    "few_shots_select": "sequential",
}
TASKS_TABLE = [
    LightevalTaskConfig(
        name="osprey_arithmetic",
        prompt_function=word_problem,
        hf_repo=str(DATA / "arithmetic"),
        generation_size=64,
        metrics=[
            SampleLevelMetric(
                metric_name="last_number",
                sample_level_fn=ExactMatches(normalize_pred=last_number),
                category=SamplingMethod.GENERATIVE,
                corpus_level_fn=np.mean,
                higher_is_better=True,
            )
        ],
        **LOCAL,
    ),
    LightevalTaskConfig(
        name="osprey_everyday",
        prompt_function=everyday_question,
        hf_repo=str(DATA / "everyday"),
        metrics=[Metrics.loglikelihood_acc],
        **LOCAL,
    ),
]
