"""Mean acceptance length and throughput behind vLLM's OpenAI-compatible server, with and without a drafter.

    python -m osprey.serving.measure TARGET --drafter DRAFTER [--draft-model CAUSAL_LM] --prompts PROMPTS.jsonl

Runs anywhere, with the standard library alone; `--serve` says how vLLM is started there. Each engine is started once,
answers some prompts to warm up, and then all of them at each concurrency, without a prefix cache, which would spare
all levels but the first their prefills. Greedy. *MAL* is 1 + accepted tokens / drafts, from the server's own counters,
pooled over all requests.
"""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from osprey.eval.suites import spread  # these three bring no more than the standard library along
from osprey.train.endings import Terminated, sigterm_as_interrupt
from osprey.train.jsonl import json_lines

START_SECONDS = 1800  # importing vLLM takes minutes on a busy machine
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m osprey.serving.measure", description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--drafter", help="Osprey drafter (method eagle3)")
    parser.add_argument("--draft-model", help="causal-lm export (method draft_model)")
    parser.add_argument("--prompts", required=True, help="JSONL with `turns`, whose first is asked, or `prompt`")
    parser.add_argument("--limit", type=positive, help="only that many prompts, taken spread over the file")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--serve", default="vllm serve {target}", help="the command that starts vLLM, as one text")
    parser.add_argument("--port", type=int, default=8077)
    parser.add_argument("--json", help="write everything, texts included, to this file, after each engine")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too small, it must be at least 1")
    return number


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    prompts = spread(load_prompts(Path(args.prompts)), args.limit)
    results: dict[str, Any] = {}
    for name, method, model in (
        ("none", None, None),
        ("drafter", "eagle3", args.drafter),
        ("draft model", "draft_model", args.draft_model),
    ):
        if method is not None and model is None:
            continue
        speculation = {"method": method, "model": model, "num_speculative_tokens": args.num_speculative_tokens}
        with server(args, speculation if method else None) as url:
            results[name] = measure_engine(url, args, prompts)
        print_engine(name, results[name], results["none"])
        if args.json:  # after each, so that an engine which does not start costs no other its figures
            write_json(Path(args.json), results)
    return 0


def load_prompts(path: Path) -> list[str]:
    """The first turn of each row. Raises `ValueError` naming the line where a row has none."""
    prompts = []
    for where, row in json_lines(path):
        turns = row.get("turns", [row.get("prompt")]) if isinstance(row, dict) else None
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
            raise ValueError(f"{where}: a row needs `turns`, a list of texts, or the text `prompt`, not a blank one.")
        prompts.append(turns[0])
    if not prompts:
        raise ValueError(f"{path} holds no prompts.")
    return prompts


def write_json(path: Path, results: dict[str, Any]) -> None:
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        work.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)


def measure_engine(url: str, args: argparse.Namespace, prompts: list[str]) -> list[dict[str, Any]]:
    """One record a concurrency: tokens per second, MAL, acceptance by position, and the texts."""
    run_prompts(url, args, prompts[: max(args.concurrency)], max(args.concurrency))  # warm-up
    records = []
    for concurrency in args.concurrency:
        before, start = counters(url), time.perf_counter()
        answers = run_prompts(url, args, prompts, concurrency)
        seconds = time.perf_counter() - start
        after = counters(url)
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        drafts = grown.get(DRAFTS, 0.0)
        tokens = sum(count for _, count in answers)
        positions = sorted(int(name.partition("|")[2]) for name in grown if name.startswith(ACCEPTED_BY_POSITION))
        records.append(
            {
                "concurrency": concurrency,
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "mal": 1 + grown[ACCEPTED] / drafts if drafts else None,
                "accepted_by_position": [grown[f"{ACCEPTED_BY_POSITION}|{p}"] / drafts for p in positions if drafts],
                "texts": [text for text, _ in answers],
            }
        )
    return records


def run_prompts(url: str, args: argparse.Namespace, prompts: list[str], concurrency: int) -> list[tuple[str, int]]:
    """Text and number of tokens of each answer, `concurrency` requests at a time."""

    def ask(prompt: str) -> tuple[str, int]:
        body = {
            "model": args.target,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": args.max_tokens,
        }
        headers = {"Content-Type": "application/json"}
        request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urlopen(request) as response:
            answer = json.load(response)
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, prompts))


def counters(url: str) -> dict[str, float]:
    """The server's speculation counters, summed over its engines; those by position are named `counter|position`."""
    with urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        name, _, rest = line.partition("{")
        if name in (DRAFTS, ACCEPTED, ACCEPTED_BY_POSITION):
            labels, _, value = rest.rpartition("}")
            position = labels.partition('position="')[2].partition('"')[0]
            key = f"{name}|{position}" if name == ACCEPTED_BY_POSITION else name
            found[key] = found.get(key, 0.0) + float(value)  # data-parallel engines differ by the label `engine`
    return found


@contextmanager
def server(args: argparse.Namespace, speculation: dict[str, Any] | None) -> Iterator[str]:
    """The server's address, once it answers; the server ends with the block."""
    url = f"http://127.0.0.1:{args.port}"
    if is_taken(args.port):  # its answers would be taken for ours
        raise OSError(f"something answers at {url} already: stop it, or give another --port.")
    command = [word.replace("{target}", args.target) for word in shlex.split(args.serve)]
    command += ["--port", str(args.port), "--no-enable-prefix-caching"]
    if speculation is not None:
        command += ["--speculative-config", json.dumps(speculation)]
    print("+", shlex.join(command), file=sys.stderr)
    process = subprocess.Popen(command, stdout=2)  # our own output is the figures
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers_at(url):
            if process.poll() is not None:
                raise OSError(f"`{shlex.join(command)}` ended with {process.returncode}; its last lines say why.")
            if time.monotonic() > deadline:
                raise OSError(f"vLLM did not answer at {url} within {START_SECONDS} s.")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers_at(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def is_taken(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def print_engine(name: str, records: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    for record, reference in zip(records, plain, strict=True):
        mal = "" if record["mal"] is None else f", MAL {record['mal']:.2f}"
        same = sum(a == b for a, b in zip(record["texts"], reference["texts"], strict=True))
        print(
            f"{name}, {record['concurrency']} at a time: {record['tokens_per_second']:.1f} tokens/s "
            f"({record['tokens_per_second'] / reference['tokens_per_second']:.2f}x){mal}, "
            f"{same} of {len(record['texts'])} texts as without a drafter",
            flush=True,
        )


if __name__ == "__main__":
    try:
        with sigterm_as_interrupt():  # else it would leave vLLM running
            sys.exit(main())
    except (OSError, ValueError) as error:
        sys.exit(f"osprey.serving.measure: {error}")
    except Terminated:
        sys.exit(143)
