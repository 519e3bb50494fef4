"""`osprey bench --speed` from end to end on tiny models, and what it refuses."""

import json

import pytest
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_drafter, tiny_target

from osprey.cli import bench_speed
from osprey.eval.baselines import make_eagle3

TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = tiny_target(vocab_size=VOCABULARY)
    drafter = tiny_drafter(target)
    models = {
        "target": target,
        "drafter": drafter,
        "assistant": tiny_target(vocab_size=VOCABULARY, num_hidden_layers=2, seed=1),
        "baseline": make_eagle3(target, drafter, 1, 0),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
        bytes_tokenizer(TEMPLATE).save_pretrained(root / name)
    rows = [
        {"id": f"p{i}", "domain": ("chat", "code")[i % 2], "language": "en", "turns": [f"Say the word {i}."]}
        for i in range(6)
    ]
    (root / "suite.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture
def speed(root, capsys):
    def run(*flags):
        names = [word for name in ("target", "drafter") for word in (f"--{name}", str(root / name))]
        fixed = [*names, "--suite", str(root / "suite.jsonl"), "--max_new_tokens", "12", "--repeats", "1"]
        assert bench_speed.main([*fixed, *flags]) == 0
        return capsys.readouterr().out

    return run


def test_json_of_everything(speed, root):
    out = speed(
        *("--assistant", str(root / "assistant"), "--baseline", str(root / "baseline"), "--limit", "4"),
        *("--weights", "fp16", "fp32", "--threads", "1", "--draft_lengths", "default", "2", "adaptive"),
        *("--context_lengths", "140", "--context_prompts", "1", "--clock", "process", "--profile", "true", "--json"),
    )
    result = json.loads(out)
    assert [(run["weights"], run["threads"]) for run in result["runs"]] == [("fp16", 1), ("fp32", 1)]
    for run in result["runs"]:
        assert set(run["groups"]) == {"chat", "code", "context of 140", "all"}
        names = [one["contestant"] for one in run["groups"]["chat"]]
        own = ["drafter", "drafter, 2", "drafter, adaptive"]
        assert names == ["plain", *own, "prompt-lookup", "assistant", "baseline"]
        assert [one["prompts"] for one in run["groups"]["all"]] == [4] * 7
        assert [one["prompts"] for one in run["groups"]["context of 140"]] == [1] * 7
        for one in (one for some in run["groups"].values() for one in some):
            assert one["different"] == 0 and one["speedup"] > 0 and one["over_lookup"] > 0
        parts = run["parts"]
        shares = parts["drafting_share"] + parts["verifying_share"] + parts["outside_share"]
        assert shares == pytest.approx(1) and parts["draft_step"] > 0
    assert str(root) not in out  # no path of this machine
    assert result["environment"]["command"].startswith("osprey bench --speed ") and result["environment"]["machine"]


def test_tables(speed):
    out = speed("--weights", "fp16", "--limit", "2", "--profile", "true")
    for text in ("| drafter ", "| prompt-lookup", "| draft step ", "least gain of the drafter", "of the bound"):
        assert text in out
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows[: rows.index(next(row for row in rows if "| part" in row))]}) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repeats", "0"], "--repeats is 0, but must be at least 1 and finite"),
        (["--threads", "2", "0"], "--threads is 0, but must be at least 1 and finite"),
        (["--weights", "int8"], "must be fp16, fp32 or both"),
        (["--clock", "sun"], "must be wall or process"),
        (["--draft_lengths", "three"], "'three' is neither"),
        (["--suite", "nowhere.jsonl"], "unknown suite"),
    ],
)
def test_refusals(flags, message):
    with pytest.raises(ValueError, match=message):
        bench_speed.main(flags)
