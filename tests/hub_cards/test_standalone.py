"""A drafter's repository in processes that have torch and transformers and nothing of ours, and no network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from hub_cache import cache_repo
from no_package import NO_OSPREY
from tiny import assert_same_text, tiny_drafter, tiny_prompt, tiny_target
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.streamers import BaseStreamer

from osprey.modeling import OspreyDrafter, record_acceptance

ROOT = Path(__file__).resolve().parents[2]
CUSTOM_GENERATE = ROOT / "modeling" / "custom_generate"
REPO = "7b-org/osprey-2.5_tiny"  # every kind of name that transformers respells in module names


def write_repo(folder: Path, drafter: OspreyDrafter) -> None:
    """A drafter's folder as it is published, with `custom_generate`."""
    drafter.save_pretrained(folder)
    (folder / "custom_generate").mkdir()
    for path in CUSTOM_GENERATE.iterdir():
        if path.is_file():
            (folder / "custom_generate" / path.name).write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    "folder", sorted((ROOT / "hub_cards").glob("*/config.json")), ids=lambda path: path.parent.name
)
def test_custom_generate_is_the_package_s(folder):
    ours = {path.name: path.read_bytes() for path in CUSTOM_GENERATE.iterdir() if path.is_file()}
    theirs = {path.name: path.read_bytes() for path in (folder.parent / "custom_generate").iterdir() if path.is_file()}
    assert {"generate.py", "requirements.txt"} == ours.keys() and ours == theirs


STRANGER = """
import json
import torch
from transformers import AutoModelForCausalLM, GenerationMixin

repo, old, new = sys.argv[1:]
target = AutoModelForCausalLM.from_pretrained("target")
prompt = torch.load("prompt.pt")
plain = target.generate(prompt, max_new_tokens=20, do_sample=False)

def code_of(drafter):
    return sys.modules[type(drafter).osprey_decode.__globals__["AssistedCall"].__module__]

def assert_drafts(recorder, **kwargs):
    with recorder.record_acceptance() as calls:
        text = target.generate(prompt, max_new_tokens=20, do_sample=False, **kwargs)
    assert torch.equal(text, plain), (text, plain)
    assert len(calls) == 1 and any(drafted > 0 for drafted, _ in calls[0].rounds), calls
    return calls[0].rounds

def load(**kwargs):
    return AutoModelForCausalLM.from_pretrained(repo, trust_remote_code=True, **kwargs)

# Two revisions of one repository side by side, each with its own weights and code, and the code of one for the other.
first, second, mixed = load(revision="old"), load(), load(code_revision=old)
for drafter, weights, code in ((first, old, old), (second, new, new), (mixed, new, old)):
    assert code in type(drafter).__module__, (type(drafter).__module__, code)
    assert code_of(drafter).MARK == code_of(first if code == old else second).MARK
assert code_of(first).MARK == "old" and code_of(second).MARK == "new"
same = [torch.equal(one.fc.weight, two.fc.weight) for one, two in ((first, second), (mixed, second))]
assert same == [False, True], same
rounds = [assert_drafts(code_of(drafter), assistant_model=drafter) for drafter in (first, second, mixed)]
assert rounds[1] == rounds[2]

# custom_generate, with everything that the drafters' code hung into transformers taken away again.
for name in ("_get_candidate_generator", "_validate_generation_mode", "_assisted_decoding"):
    original = getattr(GenerationMixin, name).__wrapped__
    setattr(GenerationMixin, name, original)
    assert original.__module__ == "transformers.generation.utils"
custom = {"custom_generate": repo, "trust_remote_code": True}
assert assert_drafts(code_of(second), **custom) == rounds[1]
assert assert_drafts(code_of(first), revision="old", **custom) == rounds[0]
script = next(m for name, m in sys.modules.items() if name.endswith(f"{new}.custom_generate.generate"))
kept = script.load_drafter.cache_info()
assert assert_drafts(code_of(second), **custom) == rounds[1]
assert script.load_drafter.cache_info().misses == kept.misses == 1  # loaded once, for all calls
assert not any(name.split(".")[0] == "osprey" for name in sys.modules)
"""


def test_a_stranger_uses_a_repository(tmp_path):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    torch.save(tiny_prompt(), tmp_path / "prompt.pt")
    commits = {}
    for seed, revision in enumerate(("old", "main")):
        write_repo(tmp_path / revision, tiny_drafter(target, seed))
        path = tmp_path / revision / "decoding_osprey.py"
        path.write_text(path.read_text() + f'\nMARK = "{"new" if revision == "main" else "old"}"\n')
        commits[revision] = cache_repo(tmp_path / "home" / "hub", REPO, tmp_path / revision, revision)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    for name in ("HF_MODULES_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, "-I", "-c", NO_OSPREY + STRANGER, REPO, commits["old"], commits["main"]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


class Kept(BaseStreamer):
    def __init__(self):
        self.tokens: list[int] = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repo") / "drafter"
    target = tiny_target(vocab_size=VOCABULARY)
    drafter = tiny_drafter(target)
    drafter.generation_config.lookup_num_tokens = 10
    write_repo(folder, drafter)
    return target, drafter, str(folder)


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", sys.path[:])


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 24},
        {"max_new_tokens": 24, "do_sample": True, "temperature": 0.7},
        {"max_new_tokens": 24, "stop_strings": ["a", "é"], "tokenizer": bytes_tokenizer()},
        {"generation_config": GenerationConfig(max_new_tokens=9, repetition_penalty=1.3)},
        {"max_new_tokens": 9, "return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True},
        {"max_new_tokens": 6, "num_beams": 2},
    ],
)
def test_custom_generate_does_what_assistant_model_does(pair, options):
    target, drafter, folder = pair
    custom = {"custom_generate": folder, "trust_remote_code": True}
    outputs, streamed, acceptance = [], [], []
    for more in ({}, custom):
        torch.manual_seed(5)
        streamer = None if "num_beams" in options else Kept()
        with record_acceptance() as calls:
            output = target.generate(tiny_prompt(), assistant_model=drafter, streamer=streamer, **options, **more)
        outputs.append(output if isinstance(output, torch.Tensor) else output.sequences)
        streamed.append(streamer and streamer.tokens)
        acceptance.append([call.rounds for call in calls])
    assert torch.equal(*outputs)
    assert streamed[0] == streamed[1] and acceptance[0] == acceptance[1]
    assert ("num_beams" in options) == (acceptance[0] == [])
    if not isinstance(output, torch.Tensor):
        assert len(output.scores) == len(output.hidden_states) == output.sequences.shape[1] - tiny_prompt().shape[1]


def test_custom_generate_leaves_no_trace(pair):
    target, drafter, folder = pair
    before = dict(vars(GenerationMixin)), dict(vars(target)), dict(vars(type(target)))
    text = target.generate(tiny_prompt(), custom_generate=folder, trust_remote_code=True, assistant_model=drafter)
    assert_same_text(target, target.generate(tiny_prompt()), text)
    assert before == (dict(vars(GenerationMixin)), dict(vars(target)), dict(vars(type(target))))


def test_custom_generate_refuses_what_does_not_fit(pair):
    _, drafter, folder = pair
    custom = {"custom_generate": folder, "trust_remote_code": True}
    with pytest.raises(ValueError, match="a hidden size of 32, but the model that generates has 64"):
        tiny_target(vocab_size=VOCABULARY, hidden_size=64).generate(tiny_prompt(), assistant_model=drafter, **custom)
    with pytest.raises(
        ValueError, match="read from a folder does not know where .* pass it as assistant_model"
    ) as error:
        pair[0].generate(tiny_prompt(), **custom)
    assert "\n" not in str(error.value)


def test_a_drafter_loaded_with_trust_still_generates_alone(pair):
    """Its repository's custom_generate becomes its own `generate`, which must not look for a drafter's drafter."""
    _, drafter, folder = pair
    loaded = OspreyDrafter.from_pretrained(folder, trust_remote_code=True)
    assert "generate" in vars(loaded)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(loaded.generate(tiny_prompt(), **options), drafter.generate(tiny_prompt(), **options))


def test_only_safetensors_are_read(tmp_path, pair, monkeypatch):
    """A pickle is left alone, in a folder and in a repository."""
    _, drafter, _ = pair
    drafter.save_pretrained(tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(drafter.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(ValueError, match="has no model.safetensors"):
        OspreyDrafter.from_pretrained(tmp_path / "pickled")
    cache_repo(tmp_path / "hub", REPO, tmp_path / "pickled")
    with pytest.raises(OSError, match="safetensors"):
        OspreyDrafter.from_pretrained(REPO, cache_dir=tmp_path / "hub", local_files_only=True)
    assert json.loads((tmp_path / "pickled" / "config.json").read_text())["model_type"] == "osprey"
