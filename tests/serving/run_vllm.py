"""Run by the tests in vLLM's own environment: greedy generation as a JSON file says, one engine after the other.

    python run_vllm.py SPEC.json OUT.json

SPEC: by name `engine` (arguments of vLLM's `LLM`), `prompts` (lists of token ids) and `max_tokens`. OUT: by name
`token_ids` of the completions and, with a drafter, `num_drafts` and `accepted_by_position` (counts), or `error`.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process: importing vLLM is most of the time


def generate(engine: dict, prompts: list[list[int]], max_tokens: int) -> dict:
    from vllm import LLM, SamplingParams

    defaults = {"dtype": "float32", "enforce_eager": True, "seed": 0, "distributed_executor_backend": "uni"}
    llm = LLM(**defaults | engine, disable_log_stats=False)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False),
        use_tqdm=False,
    )
    result = {"token_ids": [list(output.outputs[0].token_ids) for output in outputs]}
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            result["num_drafts"] = metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            result["accepted_by_position"] = list(metric.values)
    return result


def main(spec_path: str, out_path: str) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    spec = json.loads(Path(spec_path).read_text())
    results = {}
    for name, run in spec.items():
        try:
            results[name] = generate(**run)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        cleanup_dist_env_and_memory()
        Path(out_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
