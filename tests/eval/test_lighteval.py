"""The model and the local tasks for `lighteval custom`, on tiny models and without a network.

Run by `make test-lighteval`: lighteval needs an older huggingface_hub than the rest is tested with.
"""

import json
from pathlib import Path
from string import ascii_lowercase

import pytest
import torch
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_drafter, tiny_target

pytest.importorskip("lighteval", reason="lighteval is not installed here; `make test-lighteval` has it")

import lighteval
from lighteval.main_custom import custom
from lighteval.models.custom.custom_model import CustomModelConfig
from lighteval.tasks.requests import Doc

from osprey.eval import lighteval_osprey, lighteval_tasks
from osprey.eval.acceptance import Run
from osprey.eval.lighteval_osprey import OspreyLightevalModel, parse_model
from osprey.eval.lighteval_tasks import last_number

TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module", autouse=True)
def no_network(tmp_path_factory):
    """lighteval's registry downloads this file unless it is there, and reads it only for tasks that are not ours."""
    pickle = Path(lighteval.__file__).parent / "tasks" / "tasks" / "tinyBenchmarks.pkl"
    ours = not pickle.exists()
    if ours:
        pickle.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield
    if ours:
        pickle.unlink()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    target = tiny_target(vocab_size=VOCABULARY, initializer_range=0.2)
    drafter = tiny_drafter(target)
    drafter.generation_config.lookup_num_tokens = 8  # a target like this runs in circles: copies are accepted
    for name, template in (("target", TEMPLATE), ("untemplated", None)):
        target.save_pretrained(root / name)
        bytes_tokenizer(template).save_pretrained(root / name)
    drafter.save_pretrained(root / "drafter")
    tiny_drafter(tiny_target(vocab_size=VOCABULARY, hidden_size=40)).save_pretrained(root / "other")
    return root


def load(folders: Path, drafter: str | None = "drafter", target: str = "target") -> OspreyLightevalModel:
    spec = f"target={folders / target}" + (f",drafter={folders / drafter}" if drafter else "")
    return OspreyLightevalModel(CustomModelConfig(model_name=spec, model_definition_file_path="unused"))


def request(query: str, task: str = "task", **fields) -> Doc:
    fields = {"choices": [""], "gold_index": 0, "generation_size": 24, "stop_sequences": ()} | fields
    return Doc(query=query, task_name=task, id="0", **fields)


def evaluate(folders: Path, spec: str, out: Path) -> dict:
    """The result file of the real command, over four requests of each local task."""
    custom(
        model_name=spec.format(folders),
        model_definition_file_path=lighteval_osprey.__file__,
        tasks="osprey_arithmetic|0,osprey_everyday|2",
        custom_tasks=lighteval_tasks.__file__,
        output_dir=str(out),
        max_samples=4,
    )
    (path,) = out.rglob("results_*.json")
    return json.loads(path.read_text())


def test_the_command_gives_the_target_s_own_score_and_the_acceptance(folders, tmp_path, capsys):
    plain = evaluate(folders, "target={0}/target", tmp_path / "plain")
    assisted = evaluate(folders, "target={0}/target,drafter={0}/drafter", tmp_path / "assisted")
    assert assisted["results"] == plain["results"]
    assert set(plain["results"]) >= {"osprey_arithmetic|0", "osprey_everyday|2"}
    for task, summary in plain["summary_tasks"].items():  # hashes of prompts and of every generated token
        assert assisted["summary_tasks"][task]["hashes"] == summary["hashes"]
    assert plain["config_general"]["model_config"]["acceptance"] == {}
    model = assisted["config_general"]["model_config"]
    assert model["model_name"] == "target+drafter"
    figures = model["acceptance"]["osprey_arithmetic|0"]
    assert figures["requests"] == 4
    assert figures["mal_mean"] > 1.2 and figures["mal_pooled"] > 1.2
    assert model["acceptance"]["all"] == figures  # nothing else was generated
    assert "pooled over 4 requests" in capsys.readouterr().out


def test_acceptance_by_hand(folders, monkeypatch):
    # Task a: verifications emit 4 + 1 tokens and 2; task b: 3 and 3.
    runs = iter([[(3, 3), (3, 0)], [(3, 1)], [(2, 2), (3, 2)]])
    monkeypatch.setattr(lighteval_osprey, "timed_generate", lambda *args, **kwargs: Run([70, 71], 1.0, next(runs)))
    model = load(folders)
    model.greedy_until([request("x", "a"), request("y", "a"), request("z", "b")])
    acceptance = model.config.acceptance
    assert list(acceptance) == ["all", "a", "b"]
    assert acceptance["a"] == {
        "requests": 2,
        "mal_mean": (5 / 2 + 2) / 2,
        "mal_pooled": 7 / 3,
        "acceptance_by_position": [2 / 3, 1 / 2, 1.0],
    }
    assert acceptance["b"]["mal_mean"] == acceptance["b"]["mal_pooled"] == 3
    assert acceptance["all"]["mal_pooled"] == 13 / 5


def test_stop_sequences_end_an_answer(folders):
    model = load(folders)
    (whole,) = model.greedy_until([request("count")])
    text = whole.text[0]
    stop = next(letter for letter in text[3:] if letter.isascii() and letter not in text[:3])
    (response,) = model.greedy_until([request("count", stop_sequences=(stop,))])
    assert response.text == [text[: text.index(stop)]]
    ids = response.output_tokens[0]
    assert ids == whole.output_tokens[0][: len(ids)] and len(ids) < len(whole.output_tokens[0])
    assert model.tokenizer.decode(ids).endswith(stop)


def test_a_long_prompt_is_cut_on_the_left(folders):
    model = load(folders)
    prompt = "u:" + "a" * 300 + "\n"
    (response,) = model.greedy_until([request("a" * 300)])
    assert response.truncated_tokens_count == len(prompt) - (256 - 24)
    assert response.input_tokens == model.tokenizer.encode(prompt)[-(256 - 24) :]
    assert len(response.output_tokens[0]) == 24


# lighteval counts white space at the end of a prompt to the choices.
@pytest.mark.parametrize(("target", "prompt", "space"), [("target", "u:Is it?", "\n"), ("untemplated", "Is it?", "")])
def test_log_likelihoods_are_the_target_s(folders, target, prompt, space):
    model = load(folders, None, target)
    choices = [" yes", " not at all", " n"]
    (response,) = model.loglikelihood([request("Is it?", choices=choices)])
    for choice, logprob, greedy in zip(choices, response.logprobs, response.argmax_logits_eq_gold, strict=True):
        expected, best, text = 0.0, True, space + choice
        for end in range(len(text)):  # token by token: every byte is one
            scores = next_scores(model, prompt + text[:end])
            token = model.tokenizer.encode(text[end], add_special_tokens=False)[0]
            expected += scores[token].item()
            best &= scores.argmax().item() == token
        assert logprob == pytest.approx(expected, abs=1e-3)
        assert greedy == best


def test_the_greedy_choice_is_marked(folders):
    model = load(folders, None, "untemplated")
    for query in ascii_lowercase:
        favourite = model.tokenizer.decode([next_scores(model, query).argmax().item()])
        if favourite.isascii() and favourite.isprintable():
            break
    (response,) = model.loglikelihood([request(query, choices=[favourite, "~" if favourite != "~" else "|"])])
    assert response.argmax_logits_eq_gold == [True, False]
    assert response.logprobs[0] > response.logprobs[1]


@torch.no_grad()
def next_scores(model: OspreyLightevalModel, text: str) -> torch.Tensor:
    """Log-probabilities of the next token (`[V]`)."""
    ids = model.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids  # [1, T]
    return model.target(ids).logits[0, -1].log_softmax(-1)


def test_refusals(folders):
    with pytest.raises(ValueError, match="'gpt2' is not of the form target="):
        parse_model("gpt2")
    with pytest.raises(ValueError, match="is not of the form target="):
        parse_model("drafter=there")
    with pytest.raises(OSError, match="there is no model folder /not/there"):
        OspreyLightevalModel(CustomModelConfig(model_name="target=/not/there", model_definition_file_path="unused"))
    with pytest.raises(ValueError, match="hidden"):
        load(folders, "other")
    with pytest.raises(ValueError, match="one sample a prompt"):
        load(folders).greedy_until([request("x", num_samples=2)])


def test_last_number():
    assert last_number("3 boxes of 6 make 18.") == "18"
    assert last_number("It costs $1,500.00 in all") == "1500"
    assert last_number("minus -2.50") == "-2.5"
    assert last_number("100") == "100"
    assert last_number("none") == ""
