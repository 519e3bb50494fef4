"""Stages 3 and 4 in one, with each recipe on a tiny target of its architecture; what is done is not done again."""

import json
from pathlib import Path

import pytest
from bytes_tokenizer import VOCABULARY as BYTES
from bytes_tokenizer import bytes_tokenizer
from distill_line import TEMPLATE
from tiny import SHAPE, tiny_target
from transformers import AutoModelForCausalLM, MiniMaxM2Config

from osprey.cli.adapt import main
from osprey.modeling import OspreyDrafter
from osprey.train import adapt as module

RECIPES = Path(__file__).parents[2] / "train" / "recipes"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ENDS = {"eos_token_id": 2, "bos_token_id": 1, "vocab_size": BYTES}


def tiny_minimax():
    config = MiniMaxM2Config(**SHAPE | ENDS, num_local_experts=4, num_experts_per_tok=2)
    return AutoModelForCausalLM.from_config(config).eval()


TARGETS = {
    "qwen3-8b": lambda: tiny_target("qwen3", **ENDS),
    "llama-3.3-70b-instruct": lambda: tiny_target("untied", rope_parameters=LLAMA3_ROPE, **ENDS),
    "minimax-m2.5": tiny_minimax,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("OSPREY_CACHE", str(tmp_path_factory.mktemp("cache")))


def save_models(folder, target):
    tokenizer = bytes_tokenizer(TEMPLATE)
    for name, model in (("target", target), ("backbone", tiny_target("qwen3", 7, num_hidden_layers=2, **ENDS))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [{"id": f"p-{n}", "language": "en", "prompt": f"say {n}", "response": f"well, {n * 7}!"} for n in range(24)]
    rows.append({"id": "t", "text": "a text without a question " * 4})
    (folder / "data.jsonl").write_text("".join(json.dumps(row | {"temperature": 0.0}) + "\n" for row in rows))


def command(folder, *flags):
    base = [str(folder / "backbone"), "--target", str(folder / "target"), "--data", str(folder / "data.jsonl")]
    base += ["--out", str(folder / "out"), "--max_steps", "2", "--max_length", "40", "--held_out_percent", "20"]
    return [*base, "--precision", "fp32", "--disable_tqdm", "true", *flags]


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_the_recipes_run_on_tiny_targets(tmp_path, name, online):
    save_models(tmp_path, TARGETS[name]())
    recipe = ["--config", str(RECIPES / f"{name}.yaml"), "--teacher_model_init_kwargs", "{}"]
    assert main(command(tmp_path, *recipe, "--online", str(online))) == 0
    drafter = OspreyDrafter.from_pretrained(tmp_path / "out")
    start = OspreyDrafter.from_pretrained(tmp_path / "out.adapt" / "untrained")
    trained, untrained = (model.layers[0].self_attn.q_proj.weight for model in (drafter, start))
    assert (trained != untrained).any()  # `fc` follows a step later, when the context half is no longer zero
    stages = json.loads((tmp_path / "out" / "training.json").read_text())["stages"]
    assert [stage["stage"] for stage in stages] == ["convert", "distill"]
    assert stages[1]["recipe"]["learning_rate"] == 1e-4
    assert stages[1]["mode"] == ("online" if online else "offline")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    ids = bytes_tokenizer()("hello", return_tensors="pt")["input_ids"]
    plain = target.generate(ids, max_new_tokens=8, do_sample=False)
    assert (target.generate(ids, max_new_tokens=8, do_sample=False, assistant_model=drafter) == plain).all()


def test_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    save_models(tmp_path, TARGETS["qwen3-8b"]())
    monkeypatch.setattr(module, "distill", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        main(command(tmp_path))
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="another draft_vocab_size: choose another folder"):
        main(command(tmp_path, "--draft_vocab_size", "50"))
    kept = {name: (tmp_path / name).read_bytes() for name in ("backbone/model.safetensors", "target/config.json")}
    tiny_target("qwen3", 8, num_hidden_layers=2, **ENDS).save_pretrained(tmp_path / "backbone")  # of the same shape
    with pytest.raises(ValueError, match="another backbone_sha256: choose another folder"):
        main(command(tmp_path))
    (tmp_path / "backbone" / "model.safetensors").write_bytes(kept["backbone/model.safetensors"])
    settings = json.loads(kept["target/config.json"])
    (tmp_path / "target" / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-3}))
    with pytest.raises(ValueError, match="another target_config_sha256: choose another folder"):
        main(command(tmp_path))
    (tmp_path / "target" / "config.json").write_bytes(kept["target/config.json"])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out.adapt").rglob("*.safetensors")}
    assert len(before) == 3  # the untrained drafter, the head, one shard
    monkeypatch.setattr(module, "convert", lambda *_: pytest.fail("converted again"))
    assert main(command(tmp_path, "--json")) == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert json.loads(capsys.readouterr().out)["distill"]["steps"] == 2
    with pytest.raises(FileExistsError, match="exists already"):
        main(command(tmp_path))


def test_a_run_that_was_refused_may_be_mended(tmp_path):
    save_models(tmp_path, TARGETS["qwen3-8b"]())
    rows = (tmp_path / "data.jsonl").read_text()
    (tmp_path / "data.jsonl").write_text(rows + "{")
    with pytest.raises(ValueError, match="line 26: not JSON"):
        main(command(tmp_path))
    (tmp_path / "data.jsonl").write_text(rows)
    assert main(command(tmp_path)) == 0


def test_refusals(tmp_path):
    save_models(tmp_path, TARGETS["qwen3-8b"]())
    with pytest.raises(ValueError, match="--data and --out are needed"):
        main([str(tmp_path / "backbone"), str(tmp_path / "target")])
    with pytest.raises(ValueError, match="--output_dir has no effect on adapt"):
        main(command(tmp_path, "--output_dir", str(tmp_path / "elsewhere")))
    with pytest.raises(OSError, match="unknown backbone"):
        main([str(tmp_path / "none" / "x"), *command(tmp_path)[1:]])
