"""`osprey generate` from end to end on a tiny target and drafter, and everything it refuses."""

import json
import re
import shutil
import warnings

import pytest
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from hub_cache import put_into_hub_cache
from tiny import tiny_drafter, tiny_target

from osprey.cli import generate
from osprey.cli.main import main
from osprey.modeling import vocabulary_sha256

TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = tiny_target(vocab_size=VOCABULARY)
    target.save_pretrained(root / "target")
    bytes_tokenizer(TEMPLATE).save_pretrained(root / "target")
    tiny_drafter(target).save_pretrained(root / "drafter")
    tiny_drafter(tiny_target(vocab_size=VOCABULARY, hidden_size=40)).save_pretrained(root / "other")
    return root


@pytest.fixture
def osprey(folders, capsys, monkeypatch):
    monkeypatch.delenv("OSPREY_DEBUG", raising=False)

    def run(*flags, target="target", drafter="drafter"):
        status = main(
            [
                "generate",
                "--target",
                str(folders / target),
                "--drafter",
                str(folders / drafter),
                "--max-new-tokens",
                "9",
            ]
            + list(flags)
        )
        out, err = capsys.readouterr()
        return status, out, err

    return run


def write_prompts(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("weights", ["fp16", "fp32"])
def test_run_with_json(osprey, tmp_path, weights):
    prompts = write_prompts(
        tmp_path / "p.jsonl",
        [
            {"id": "one", "domain": "chat", "language": "en", "turns": ["Hello?"]},
            {"id": "two", "domain": "chat", "language": "fr", "turns": ["Oui ?", "Et puis ?"]},
        ],
    )
    path = tmp_path / "figures.json"
    status, out, _ = osprey("--prompts", prompts, "--json", str(path), "--weights", weights)
    assert status == 0
    figures = json.loads(path.read_text())
    assert figures["identical"] is True
    assert [record["id"] for record in figures["prompts"]] == ["one", "two/1", "two/2"]
    assert set(figures["groups"]) == {"en", "fr"}
    assert figures["settings"]["weights"] == weights
    assert (figures["settings"]["plain_probe"] is not None) == (weights == "fp16")
    for key in ("tokens_per_second_plain", "tokens_per_second_assisted", "speedup", "mal_mean", "mal_pooled"):
        assert figures[key] > 0
    last = out.splitlines()[-1]
    assert re.fullmatch(r"plain .* tok/s, assisted .* tok/s, speedup .*x, MAL .* mean .* pooled, identical yes", last)
    assert f"{weights} weights" in out
    assert "\x1b" not in out  # not a terminal


def test_another_tokenizer_or_revision(osprey, folders, tmp_path, monkeypatch):
    target = tiny_target(vocab_size=VOCABULARY)
    commit = put_into_hub_cache(tmp_path / "hub", "org/target", folders / "target", monkeypatch)
    for name, changes in (
        ("same", {"target_tokenizer_sha256": vocabulary_sha256(bytes_tokenizer()), "target_revision": commit}),
        ("tokenizer", {"target_tokenizer_sha256": "0" * 64}),
        ("revision", {"target_revision": "0" * 40}),
    ):
        drafter = tiny_drafter(target, **changes)
        drafter.config.target = "org/target"
        drafter.save_pretrained(tmp_path / name)
    monkeypatch.setattr(generate, "resolve_target", lambda name: "org/target")
    run = ("--prompt", "Hello?", "--no-compare", "--max-new-tokens", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert osprey(*run, drafter=tmp_path / "same")[0] == 0
    status, _, err = osprey(*run, drafter=tmp_path / "tokenizer")
    assert status == 1 and "for the tokenizer of org/target, but one with another vocabulary was given" in err
    with pytest.warns(UserWarning, match=f"for revision 000000000000 of org/target, but {commit[:12]} generates"):
        assert osprey(*run, drafter=tmp_path / "revision")[0] == 0


def test_one_prompt_without_comparison(osprey, tmp_path):
    path = tmp_path / "figures.json"
    status, out, _ = osprey("--prompt", "Hello?", "--no-compare", "--json", str(path))
    assert status == 0
    figures = json.loads(path.read_text())
    assert figures["tokens_per_second_plain"] is figures["speedup"] is figures["identical"] is None
    assert figures["settings"]["plain_probe"] is None
    assert out.splitlines()[-1].startswith("plain - tok/s, assisted ")


def test_sampling_is_repeatable(osprey):
    texts = [osprey("--prompt", "Hi", "--temperature", "1", "--seed", seed, "--no-compare")[1] for seed in "112"]
    answers = [text.split("\n\n")[0] for text in texts]
    answers = [re.sub(r" {4}plain.*", "", answer) for answer in answers]
    assert answers[0] == answers[1] != answers[2]


def test_draft_settings_reach_the_drafter(osprey, tmp_path):
    path = tmp_path / "figures.json"
    osprey("--prompt", "Hi", "--num-assistant-tokens", "2", "--confidence-threshold", "0", "--json", str(path))
    figures = json.loads(path.read_text())
    assert max(drafted for drafted, _ in figures["prompts"][0]["rounds"]) == 2
    assert figures["settings"]["num_assistant_tokens"] == 2


def test_later_turns_follow_the_answer(folders, monkeypatch):
    seen = []
    encode = generate.encode
    monkeypatch.setattr(
        generate, "encode", lambda tokenizer, messages: seen.append(list(messages)) or encode(tokenizer, messages)
    )
    target = tiny_target(vocab_size=VOCABULARY)
    pair = generate.Pair(target, tiny_drafter(target), bytes_tokenizer(TEMPLATE), "fp32")
    arguments = generate.build_parser().parse_args(["--max_new_tokens", "3"])
    generate.run_prompts(pair, [generate.Prompt("a", "chat", "en", ("x", "y"))], arguments)
    assert [[message["role"] for message in messages] for messages in seen] == [
        ["user"],
        ["user", "assistant", "user"],
    ]


def test_bare_text_without_a_chat_template():
    tokenizer = bytes_tokenizer()
    encoded = generate.encode(tokenizer, [{"role": "user", "content": "ab"}])
    assert encoded["input_ids"].tolist() == [tokenizer("ab")["input_ids"]]


def test_probe_scales_plain_when_fp32_is_faster(folders, monkeypatch):
    rates = iter([12.0, 8.0])  # fp32, then fp16
    monkeypatch.setattr(generate, "plain_rate", lambda target, inputs: next(rates))
    arguments = generate.build_parser().parse_args(
        ["--target", str(folders / "target"), "--drafter", str(folders / "drafter")]
    )
    pair = generate.load_pair(arguments, arguments.drafter, [generate.Prompt("a", "chat", "en", ("x",))])
    assert pair.plain_scale == 1.5
    assert "plain rates below are raised by 1.50" in generate.describe(generate.settings_of(pair, arguments))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-new-tokens", "0"], "--max_new_tokens is 0, but must be at least 1"),
        (["--threads", "0"], "--threads is 0"),
        (["--num-assistant-tokens", "0"], "--num_assistant_tokens is 0"),
        (["--temperature", "nan"], "--temperature is nan, but must be at least 0 and finite"),
        (["--temperature", "inf"], "--temperature is inf, but must be at least 0 and finite"),
        (["--temperature", "-1"], "--temperature is -1.0, but must be at least 0"),
        (["--confidence-threshold", "2"], "must lie between 0 and 1"),
        (["--prompt", " "], "--prompt is empty"),
        (["--prompts", "none.jsonl"], "there is no prompt file none.jsonl"),
        (["--json", "no/such/folder/x.json"], "there is no folder"),
        (["--weights", "int3"], "invalid choice: 'int3'"),
        (["--max-new-tokens", "many"], "invalid int value: 'many'"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--prompt", "x", "--prompts", "y"], "not allowed with argument"),
        (["--prompt", "x" * 300], "prompt 'prompt' has 303 tokens, which with 9 new ones is more than"),
    ],
)
def test_refusals_are_one_line(osprey, flags, message):
    status, _, err = osprey(*flags)
    assert status == 1
    refusal = err.splitlines()[-1]
    assert refusal.startswith("osprey generate: ") and message in refusal


def test_no_default_drafter(capsys, monkeypatch):
    monkeypatch.setattr(generate, "DEFAULT_DRAFTER", "no-such-drafter")
    assert main(["generate"]) == 1
    err = capsys.readouterr().err
    assert "no drafter: the default, hub_cards/no-such-drafter" in err
    assert "installed wheel" in err and "--drafter" in err and "osprey distill" in err


@pytest.mark.parametrize("name", ["/no/such/drafter", "./none", "a/b/c"])
def test_unknown_drafter(capsys, name):
    assert main(["generate", "--drafter", name]) == 1
    assert f"unknown drafter {name!r}" in capsys.readouterr().err


def test_drafter_of_another_target(osprey):
    status, _, err = osprey("--prompt", "x", drafter="other")
    assert status == 1
    assert "This drafter was made for" in err and "hidden size of 40" in err


def test_a_model_that_is_no_drafter(osprey):
    status, _, err = osprey(drafter="target")
    assert status == 1
    assert "is no Osprey drafter but a llama model: make one of it with `osprey convert`." in err


def test_truncated_drafter(osprey, folders, tmp_path):
    broken = shutil.copytree(folders / "drafter", tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    status, _, err = osprey("--prompt", "x", drafter=broken)
    assert status == 1 and "truncated or damaged" in err.splitlines()[-1]


def test_drafter_without_weights(osprey, folders, tmp_path):
    broken = shutil.copytree(folders / "drafter", tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    status, _, err = osprey("--prompt", "x", drafter=broken)
    assert status == 1 and "model.safetensors" in err.splitlines()[-1]
