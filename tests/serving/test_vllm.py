"""An unmodified vLLM with the plugin: the same greedy texts, the same acceptance, and refusals at start-up.

vLLM has an environment of its own, whose Python `OSPREY_VLLM_PYTHON` names: `make test-serving` makes it and runs
these tests. One process there runs all engines, since importing vLLM takes longest.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import SHAPE, copy_blocks, tiny_prompt, tiny_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from osprey.eval.acceptance import timed_generate
from osprey.eval.prompts import load_prompts
from osprey.modeling import OspreyConfig, OspreyDrafter
from osprey.serving.export import export

VLLM_PYTHON = os.environ.get("OSPREY_VLLM_PYTHON")
REPOSITORY = Path(__file__).parents[2]
DRAFTER = REPOSITORY / "hub_cards" / "osprey-smollm2-135m-instruct"
NUM_PROMPTS, MAX_TOKENS, DRAFT_LENGTH = 30, 48, 5

pytestmark = pytest.mark.skipif(
    not VLLM_PYTHON, reason="vLLM is missing: `make test-serving` installs it apart and runs these tests"
)


def changed_config(folder: Path, **changes) -> str:
    """A copy of the drafter with another config; a key whose value is None is left out."""
    shutil.copytree(DRAFTER, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return str(folder)


def changed_tensors(folder: Path, *, drop: str) -> str:
    shutil.copytree(DRAFTER, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[drop]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def refused_drafters(root: Path) -> dict[str, str]:
    return {
        "taps behind the final norm": changed_config(root / "taps", target_layer_ids=[1, 14, 29]),
        "taps counted otherwise": changed_config(root / "count", eagle_aux_hidden_state_layer_ids=[1, 14, 26]),
        "a key left out": changed_config(root / "key", rms_norm_eps=None),
        "another target": changed_config(root / "target", target_num_hidden_layers=32),
        "another vocabulary size": changed_config(root / "vocabulary", vocab_size=49151),
        "another tokenizer": changed_config(root / "tokenizer", target_tokenizer_sha256="0" * 64),
        "a tensor missing": changed_tensors(root / "tensor", drop="layers.1.self_attn.k_proj.weight"),
    }


def sharded_runs(root: Path) -> dict[str, dict]:
    """A tiny target and a drafter that often agrees with it, on one and on two processes."""
    shape = {"vocab_size": 512, "hidden_size": 128, "head_dim": 32, "num_hidden_layers": 4, "initializer_range": 0.1}
    target = tiny_target("untied", **shape)
    config = {**SHAPE, **shape, "target_hidden_size": 128, "target_num_hidden_layers": 4}
    full = copy_blocks(target, OspreyDrafter(OspreyConfig(**config)))
    drafter = OspreyDrafter(OspreyConfig(**config, draft_vocab_size=500))
    drafter.set_draft_ids(torch.arange(12, 512))
    shortlist = {"lm_head.weight": full.lm_head.weight[12:], "d2t": drafter.d2t, "t2d": drafter.t2d}
    drafter.load_state_dict(full.state_dict() | shortlist)
    with torch.no_grad():  # enough of the context to be missed, too little to spoil the drafts
        for layer in drafter.layers:
            layer.self_attn.q_proj.weight[:, :128].normal_(std=0.02)
    target.save_pretrained(root / "target")
    drafter.save_pretrained(root / "drafter")
    speculation = {"method": "eagle3", "model": str(root / "drafter"), "num_speculative_tokens": 2}
    engine = {
        "model": str(root / "target"),
        "max_num_seqs": 2,
        "max_model_len": 256,
        "skip_tokenizer_init": True,
        "speculative_config": speculation,
    }
    prompts = [tiny_prompt(20, seed, 512)[0].tolist() for seed in range(2)]
    shards = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    return {
        "one shard": {"engine": engine, "prompts": prompts, "max_tokens": 6},
        "two shards": {"engine": engine | shards, "prompts": prompts, "max_tokens": 6},
    }


@pytest.fixture(scope="module")
def prompts(smollm2) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    suite = load_prompts(REPOSITORY / "eval" / "suites" / "lossless_50.jsonl")[:NUM_PROMPTS]
    chats = [[{"role": "user", "content": prompt.turns[0]}] for prompt in suite]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]


@pytest.fixture(scope="module")
def runs(smollm2, prompts, tmp_path_factory) -> dict[str, dict]:
    """What vLLM made of every engine, by name."""
    root = tmp_path_factory.mktemp("vllm")
    for to in ("vllm", "causal-lm"):
        (root / to).mkdir()
        export(str(DRAFTER), to, root / to)

    def engine(method: str, drafter: str) -> dict:
        speculation = {"method": method, "model": drafter, "num_speculative_tokens": DRAFT_LENGTH}
        return plain | {"speculative_config": speculation}

    plain = {"model": smollm2, "max_model_len": 1024, "max_num_seqs": 8}
    engines = {
        "plain": plain,
        "drafter": engine("eagle3", str(DRAFTER)),
        "export": engine("eagle3", str(root / "vllm")),
        "draft model": engine("draft_model", str(root / "causal-lm")),
    }
    engines |= {name: engine("eagle3", drafter) for name, drafter in refused_drafters(root).items()}
    engines["a plain draft model"] = engine("draft_model", str(DRAFTER))
    engines["no target"] = plain | {"model": str(DRAFTER)}
    spec, out = root / "spec.json", root / "out.json"
    jobs = {name: {"engine": e, "prompts": prompts, "max_tokens": MAX_TOKENS} for name, e in engines.items()}
    spec.write_text(json.dumps(jobs | sharded_runs(root / "sharded")))
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two shards on one core as well
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3000",  # shards that share a core wait for each other
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [VLLM_PYTHON, str(Path(__file__).with_name("run_vllm.py")), str(spec), str(out)]
    with open(root / "log", "w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    assert done.returncode == 0, (root / "log").read_text()[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", ["drafter", "export", "draft model"])
def test_greedy_text_is_that_of_vllm_without_speculation(runs, name):
    assert runs[name].get("error") is None
    assert len(runs["plain"]["token_ids"]) == NUM_PROMPTS
    assert runs[name]["token_ids"] == runs["plain"]["token_ids"]
    assert sum(runs[name]["accepted_by_position"]) > 0


def shares(accepted: list[float], num_drafts: float) -> list[float]:
    return [count / num_drafts for count in accepted]


def test_acceptance_is_that_of_transformers(runs, prompts, smollm2):
    """Of all drafts, the share in which at least the first d tokens were accepted, for d = 1 to 5."""
    target = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    drafter = OspreyDrafter.from_pretrained(DRAFTER).eval()
    settings = drafter.generation_config
    settings.num_assistant_tokens, settings.assistant_confidence_threshold = DRAFT_LENGTH, 0.0
    settings.lookup_num_tokens, settings.adaptive_draft_length = 0, False
    num_drafts, accepted = 0, [0] * DRAFT_LENGTH
    for ids in prompts:
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        # Longer, because transformers shortens the last draft to what may still be written, and vLLM does not.
        run = timed_generate(target, inputs, drafter, max_new_tokens=MAX_TOKENS + DRAFT_LENGTH + 1, do_sample=False)
        written = 1
        for _, matches in run.rounds:
            if written >= MAX_TOKENS:
                break
            num_drafts += 1
            accepted = [count + (matches > d) for d, count in enumerate(accepted)]
            written += matches + 1
    expected = shares(accepted, num_drafts)
    print("transformers", expected, num_drafts)
    for name in ("drafter", "export"):
        found = shares(runs[name]["accepted_by_position"], runs[name]["num_drafts"])
        print(name, found, runs[name]["num_drafts"])
        assert found == pytest.approx(expected, abs=0.02)


def test_two_shards_compute_what_one_does(runs):
    one, two = runs["one shard"], runs["two shards"]
    assert one.get("error") is None and two.get("error") is None
    assert one["token_ids"] == two["token_ids"]
    assert one["accepted_by_position"][0] > 0.1 * one["num_drafts"]  # by chance it would be 0.002
    assert two["num_drafts"] == one["num_drafts"]
    assert two["accepted_by_position"] == one["accepted_by_position"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taps behind the final norm", "must be three different layers in rising order from 0 to 28"),
        ("taps counted otherwise", "are [2, 15, 27] as vLLM counts"),
        ("a key left out", "has no rms_norm_eps, which an engine would fill with a default"),
        ("another target", "with a number of layers of 32, but the served model has 30"),
        ("another tokenizer", "has another vocabulary: serve that target with its own tokenizer"),
        ("a plain draft model", "with the method 'eagle3', but here it has the method 'draft_model'"),
        ("no target", "but here it is the served model itself"),
        ("another vocabulary size", "with a vocabulary size of 49151, but the served model has 49152"),
        ("a tensor missing", "tensors missing: layers.1.self_attn.k_proj.weight"),
    ],
)
def test_start_up_refuses(runs, name, message):
    assert message in runs[name].get("error", "it started")
