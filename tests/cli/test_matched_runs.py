"""Matched runs on a tiny target: the rate is chosen on held-out rows, and a second start trains nothing."""

import json
import shutil

import pytest
from distill_line import flags, make_line

from osprey.cli.baseline import main as baseline
from osprey.cli.matched_runs import main
from osprey.train import matched_runs


@pytest.fixture
def line(tmp_path):
    make_line(tmp_path)
    for seed in (0, 1):
        name = str(tmp_path / f"eagle-{seed}")
        assert baseline([str(tmp_path / "target"), "--like", str(tmp_path / "drafter"), "--out", name]) == 0
    return tmp_path


def arms(line, longer=3):
    return [f"ours={line / 'drafter'}", f"eagle={line}/eagle-{{seed}}", f"longer={line}/eagle-{{seed}}@{longer}"]


def command(line, **changes):
    removed = ("out", "output_dir", "eval_steps", "held_out_percent")
    settings = flags(line, "out", "runs", max_steps=2)[1:]
    pairs = [pair for pair in zip(settings[::2], settings[1::2], strict=True) if pair[0][2:] not in removed]
    extra = {"out": line / "matched", "output_dir": line / "run", "test_features": line / "features"} | changes
    words = [*sum(pairs, ()), *(str(part) for name, value in extra.items() for part in (f"--{name}", value))]
    words += ["--arms", *arms(line), "--groups", "all=p-", "--learning_rates", "0.01", "0.05", "--seeds", "0", "1"]
    return [*words, "--held_out_percent", "30", "--eval_strategy", "no", "--save_strategy", "no", "--json"]


def test_runs_are_made_once_and_compared(line, monkeypatch, capsys):
    assert main(command(line)) == 0
    table = json.loads(capsys.readouterr().out.splitlines()[-1])
    runs = json.loads((line / "matched" / "runs.json").read_text())
    # Two rates with the first seed, the better one with the second; the longer arm has no sweep of its own.
    assert len(runs["runs"]) == 3 + 3 + 2
    swept = table["arms"]["ours"]["swept"]
    assert swept[f"{table['arms']['ours']['learning_rate']:g}"] == max(swept.values())
    assert [table["arms"][arm]["steps"] for arm in ("ours", "eagle", "longer")] == [2, 2, 3]
    assert table["arms"]["longer"]["learning_rate"] == table["arms"]["eagle"]["learning_rate"]
    assert table["groups"]["all"]["requests"] == 24
    for arm in ("ours", "eagle", "prompt lookup", "n-gram"):
        assert 1.0 <= table["arms"][arm]["groups"]["all"]["mal"] <= 4.0

    assert main([*command(line), "--own_rates", "ours=0.05"]) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert alone["arms"]["ours"]["learning_rate"] == 0.05
    assert alone["arms"]["eagle"] == table["arms"]["eagle"] | {"groups": alone["arms"]["eagle"]["groups"]}

    monkeypatch.setattr(matched_runs, "train_and_test", lambda *_: pytest.fail("trained again"))
    assert main(command(line)) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == table

    trained = []
    monkeypatch.setattr(
        matched_runs, "train_and_test", lambda folder, config, *_: trained.append(config.max_steps) or runs["longer"]
    )
    longer = next(run for run in runs["runs"].values() if run["arm"] == "longer")
    runs["longer"] = {name: longer[name] for name in ("parameters", "seconds", "held_out", "answers")} | {"steps": 4}
    assert main([*command(line), "--arms", *arms(line, longer=4)]) == 0
    assert trained == [4, 4]  # both seeds of the arm whose steps changed, and no other


def test_a_run_of_some_steps_is_no_run_of_whole_epochs(line, monkeypatch):
    trained = []

    def train(folder, config, *_):
        trained.append(config.max_steps)
        return {"steps": 2, "held_out": {"eval_mal": 1.0}, "answers": {"p-1": [3, 2]}, "parameters": 1, "seconds": 1.0}

    monkeypatch.setattr(matched_runs, "train_and_test", train)
    monkeypatch.setattr(matched_runs, "without_training", lambda *_: {})
    whole = [*command(line, max_steps=-1, num_train_epochs=1), "--learning_rates", "0.01", "--seeds", "0"]
    for steps in ("@2", "", ""):
        assert main([*whole, "--arms", f"eagle={line}/eagle-0{steps}"]) == 0
    assert trained == [2, -1]


def test_a_drafter_is_measured_as_it_is(line, monkeypatch, capsys):
    monkeypatch.setattr(matched_runs.OspreyDistillationTrainer, "train", lambda _: pytest.fail("trained"))
    monkeypatch.setattr(matched_runs, "whiten_context", lambda *_: pytest.fail("changed"))
    arms = [f"{name}={line}/{name}@0" for name in ("eagle-0", "eagle-1")]
    assert main([*command(line), "--arms", *arms, f"same={line}/eagle-0@0"]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])["arms"]
    assert [arm["steps"] for arm in measured.values() if "steps" in arm] == [0, 0, 0]
    one, same = (measured[name]["groups"]["all"] for name in ("eagle-0", "same"))
    assert one["by_seed"] == same["by_seed"] and same["ratio"] == 1.0


def test_another_recipe_or_a_bad_arm_is_refused(line):
    shutil.rmtree(line / "eagle-1")
    with pytest.raises(OSError, match="eagle-1"):
        main(command(line, learning_rate=0.5))
    with pytest.raises(ValueError, match="another recipe"):
        main(command(line, unroll_steps=2))
    path = line / "matched" / "runs.json"
    results = json.loads(path.read_text())
    del results["settings"]["recipe"]["context_learning_rate"]  # of a file from before there was this setting
    path.write_text(json.dumps(results))
    with pytest.raises(ValueError, match="another recipe"):
        main(command(line, context_learning_rate=0.5))
    with pytest.raises(OSError, match="eagle-1"):
        main(command(line))
    with pytest.raises(ValueError, match="'ours=fast' is not NAME=RATE"):
        main([*command(line), "--own_rates", "ours=fast"])
    with pytest.raises(ValueError, match="no arm 'theirs'"):
        main([*command(line), "--own_rates", "theirs=0.1"])
    with pytest.raises(ValueError, match="longer takes the rate found for eagle, which has the same folder"):
        main([*command(line), "--own_rates", "longer=0.1"])
    with pytest.raises(ValueError, match="two arms have one name among ours, ours: rename one"):
        main([*command(line), "--arms", f"ours={line / 'drafter'}", f"ours={line}/eagle-{{seed}}"])
    with pytest.raises(ValueError, match="'nonsense' is not NAME=FOLDER"):
        main([*command(line), "--arms", "nonsense"])
