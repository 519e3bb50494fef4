"""Plans for the paper's three targets, from their real shapes and on the meta device."""

import json

import pytest
import torch
from transformers import LlamaConfig, MiniMaxM2Config, Qwen3Config

from osprey.cli.plan import main
from osprey.train import plan as module
from osprey.train.features import STORED_DTYPES

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TARGETS = {
    "qwen3-8b": Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=False,
    ),
    "llama-3.3-70b-instruct": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE,
    ),
    "minimax-m2.5": MiniMaxM2Config(quantization_config={"quant_method": "fp8"}),
}  # fmt: skip
BACKBONE = Qwen3Config(
    hidden_size=2560, intermediate_size=9728, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture
def plan(tmp_path, capsys):
    BACKBONE.save_pretrained(tmp_path / "backbone")

    def run(recipe, target, *flags):
        target.save_pretrained(tmp_path / "target")
        command = [str(tmp_path / "backbone"), "--target", str(tmp_path / "target"), "--config", recipe, "--json"]
        assert main([*command, "--measure", "false", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(
    ("name", "gpus", "memory", "billions", "per_parameter"),
    [("qwen3-8b", 1, 24, 8.19, 2), ("llama-3.3-70b-instruct", 4, 80, 70.55, 2), ("minimax-m2.5", 4, 180, 228.7, 1)],
)
def test_the_recipes_fit(plan, name, gpus, memory, billions, per_parameter):
    result = plan(f"train/recipes/{name}.yaml", TARGETS[name], "--gpus", str(gpus), "--memory", str(memory))
    assert result["parameters"]["target"] / 1e9 == pytest.approx(billions, rel=2e-3)
    assert result["memory"]["prepare"]["target_weights"] == result["parameters"]["target"] * per_parameter
    assert result["fits"]["prepare"] and result["fits"]["distill_offline"]
    assert result["step_tokens"] == {"qwen3-8b": 2, "llama-3.3-70b-instruct": 8, "minimax-m2.5": 4}[name] * 4096
    hidden = TARGETS[name].hidden_size
    assert result["bytes_per_token_on_disk"] == 4 * hidden * STORED_DTYPES["bfloat16"].itemsize + 13


def test_the_drafter_is_the_papers(plan):
    """Two widened Qwen3-4B blocks and `fc`: 265M parameters (arXiv 2609.09338)."""
    result = plan("train/recipes/qwen3-8b.yaml", TARGETS["qwen3-8b"], "--memory", "24", "--data_tokens", "1e6")
    assert result["parameters"]["drafter_body"] / 1e6 == pytest.approx(265, abs=0.5)
    parts = result["memory"]["distill_offline"]
    trained = result["parameters"]["drafter_trained"]
    assert parts["optimizer"] == 8 * trained  # AdamW's two moments
    assert parts["drafter_weights"] == 4 * result["parameters"]["drafter"]
    assert result["disk"] == 1e6 * result["bytes_per_token_on_disk"] + 2 * 151936 * 4096


def test_advice_makes_it_fit(plan):
    flags = ("--memory", "24", "--per_device_train_batch_size", "8")
    result = plan("train/recipes/qwen3-8b.yaml", TARGETS["qwen3-8b"], *flags)
    assert not result["fits"]["distill_offline"]
    advice = next(sentence for sentence in result["advice"] if sentence.startswith("distill_offline"))
    rows = advice.split("per_device_train_batch_size from 8 to ")[1].split()[0]
    flags = ("--memory", "24", "--per_device_train_batch_size", rows)
    assert plan("train/recipes/qwen3-8b.yaml", TARGETS["qwen3-8b"], *flags)["fits"]["distill_offline"]
    result = plan("train/recipes/llama-3.3-70b-instruct.yaml", TARGETS["llama-3.3-70b-instruct"], "--memory", "80")
    advice = next(sentence for sentence in result["advice"] if sentence.startswith("prepare"))
    cards = advice.split("over ")[1].split()[0]
    flags = ("--memory", "80", "--gpus", cards)
    name = "llama-3.3-70b-instruct"
    assert plan(f"train/recipes/{name}.yaml", TARGETS[name], *flags)["fits"]["prepare"]


@pytest.fixture
def tiny(tmp_path, capsys):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"head_dim": 8, "vocab_size": 60, "max_position_embeddings": 256}
    Qwen3Config(**shape, num_hidden_layers=2).save_pretrained(tmp_path / "b")
    MiniMaxM2Config(**shape, num_hidden_layers=5, num_local_experts=4, num_experts_per_tok=2, bos_token_id=1,
                    eos_token_id=2).save_pretrained(tmp_path / "t")  # fmt: skip

    def run(*flags):
        command = [str(tmp_path / "b"), "--target", str(tmp_path / "t"), "--max_length", "32", "--precision", "fp32"]
        assert main([*command, *flags]) == 0
        return capsys.readouterr().out

    return run


def test_times_of_the_whole(tiny, monkeypatch):
    """With a clock by which the drafter's 32 tokens take 3.2 s, and those of one of the target's 5 layers 1.6 s."""
    monkeypatch.setattr(module, "timed", lambda step, device: 3.2 if step.__name__ == "train_step" else 1.6)
    batch = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "3", "--json")  # 192 tokens
    epochs = json.loads(tiny(*batch, "--data_tokens", "1000", "--num_train_epochs", "2"))["measured"]
    assert epochs == {
        "drafter_tokens_per_second": 10,
        "target_tokens_per_second": 4,
        "step_seconds_offline": 19.2,
        "step_seconds_online": 67.2,  # 192 * (0.1 + 0.25)
        "prepare_seconds": 250,
        "distill_seconds_offline": 200,
        "distill_seconds_online": 700,
    }
    whole = ("prepare_seconds", "distill_seconds_offline", "distill_seconds_online")
    steps = json.loads(tiny(*batch, "--max_steps", "10"))
    assert [steps["measured"][name] for name in whole] == [None, 192, 672]
    assert steps["disk"] is None
    unknown = json.loads(tiny(*batch))["measured"]
    assert [unknown[name] for name in whole] == [None, None, None]


def test_a_measured_step_is_one_of_the_recipes(tiny, monkeypatch):
    """A quarter of the 30 positions with a response token before and two behind them go past step 0."""
    unroll, anchors = module.unroll, []

    def counting(drafter, ids, taps, chains, steps):
        anchors.append(int((chains.num_steps > 0).sum()))
        return unroll(drafter, ids, taps, chains, steps)

    monkeypatch.setattr(module, "unroll", counting)
    measured = json.loads(tiny("--unroll_fraction", "0.25", "--json"))["measured"]
    assert set(anchors) == {8}
    assert measured["step_seconds_online"] > measured["step_seconds_offline"] > 0


def test_the_table_says_what_is_unknown(tiny):
    lines = {line[:28].strip(): line[28:].strip() for line in tiny().splitlines()}
    assert lines["distill seconds offline"] == lines["prepare seconds"] == "-"
    assert float(lines["step seconds offline"]) > 0
    assert any(line.endswith("- GB with the head") for line in tiny().splitlines())


def test_activations_are_those_of_a_real_step():
    """Counted on the meta device, kept on a real one: the same bytes."""
    from tiny import tiny_drafter, tiny_target

    from osprey.train.distillation_config import OspreyDistillationConfig
    from osprey.train.memory import activations
    from osprey.train.unroll import Chains, unroll

    drafter = tiny_drafter(tiny_target()).train()  # attention takes another way where nothing is trained
    config = OspreyDistillationConfig(
        output_dir="x", max_length=20, unroll_steps=3, precision="fp32", per_device_train_batch_size=2
    )
    kept = {}

    def keep(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    anchors = torch.arange(18).expand(2, -1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = unroll(
            drafter, torch.zeros(2, 20, dtype=torch.long), torch.randn(2, 20, 96), Chains(anchors, anchors), 3
        )
    assert outputs
    total = sum(size for _, size in kept.values())
    assert activations(drafter, config) == pytest.approx(total, rel=0.1)
