"""Stage 2 in two processes (gloo, CPU): the losses, perplexities and weights of one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_target
from transformers import AutoModelForCausalLM

from osprey.cli.main import main

# `--multi_gpu` starts two processes of this machine (`--cpu` would want mpirun); without cards they use gloo.
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
LAUNCH += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]


@pytest.fixture
def flags(tmp_path):
    model = tiny_target("llama", vocab_size=VOCABULARY, num_hidden_layers=2, initializer_range=0.1)
    model.save_pretrained(tmp_path / "pruned")
    bytes_tokenizer().save_pretrained(tmp_path / "pruned")
    rows = [{"text": f"{n} the quick brown fox. " * (1 + n % 4)} for n in range(60)]
    (tmp_path / "en.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held_en.jsonl").write_text(json.dumps({"text": "the quick brown fox. " * 9}) + "\n")  # 3 rows
    flags = ["pretrain", str(tmp_path / "pruned"), "--data_root", str(tmp_path), "--data", "en.jsonl"]
    flags += ["--held_out", "held_en.jsonl", "--tokens", "3072", "--length", "64", "--accumulation", "2", "--json"]
    flags += ["--precision", "fp32", "--learning_rate", "0.01", "--log_steps", "1", "--save_steps", "4"]
    return [*flags, "--eval_steps", "3"]


def losses(folder):
    (last,) = folder.glob("checkpoint-12/trainer_state.json")
    log = json.loads(last.read_text())["log_history"]
    return {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry}


@pytest.mark.parametrize("strategy", ["DDP", "FSDP2"])
def test_two_processes_do_what_one_does(flags, tmp_path, capsys, strategy):
    assert main([*flags, "--batch_rows", "2", "--out", str(tmp_path / "one")]) == 0
    one = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    program = ["-m", "osprey.cli.main"] if strategy == "DDP" else [str(Path(__file__).parent / "fsdp2_on_cpu.py")]
    command = [*LAUNCH, *program, *flags, "--batch_rows", "1", "--out", str(tmp_path / "two")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    two = json.loads(run.stdout.strip().splitlines()[-1])
    assert (one["processes"], two["processes"]) == (1, 2)
    for name in ("steps", "tokens", "source_tokens", "norm_scale"):
        assert two[name] == one[name]
    for name in ("perplexity_before", "perplexity_after"):
        assert two[name] == pytest.approx(one[name], rel=1e-4)
    assert two["perplexity_during"][-1] == pytest.approx(one["perplexity_during"][-1], rel=1e-4)
    expected, found = losses(tmp_path / "one.run"), losses(tmp_path / "two.run")
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-4), step
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "two").state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(tmp_path / "one").state_dict().items():
        torch.testing.assert_close(state[name], weight, rtol=1e-3, atol=1e-4)
