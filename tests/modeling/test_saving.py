"""Saving, loading, and a drafter folder as remote code in a process that has no `osprey`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from no_package import NO_OSPREY
from safetensors import safe_open
from tiny import assert_same_text, tiny_drafter, tiny_prompt, tiny_target
from transformers import AutoConfig, AutoModelForCausalLM

import osprey.modeling.modeling_osprey as modeling_osprey
from osprey.modeling import OspreyDrafter

SHORTLIST = [1, 2, 3, 7, 8, 20, 21, 30, 47]
FORMS = {
    "full, tied": {"tie_word_embeddings": True},
    "full, untied": {},
    "shortlist, tied": {"tie_word_embeddings": True, "shortlist": SHORTLIST},
    "shortlist, untied": {"shortlist": SHORTLIST},
    "padded": {"target_num_tokens": 40},
    "qk-norm, yarn": {"qk_norm": True, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
}


@torch.no_grad()
def scores(drafter):
    context = torch.linspace(-1, 1, 7 * 24).view(1, 7, 24).to(drafter.dtype)
    return drafter(tiny_prompt(7), context).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_save_and_load(form, dtype, tmp_path):
    drafter = tiny_drafter(tiny_target(), **FORMS[form]).to(dtype)
    drafter.generation_config.num_assistant_tokens = 3
    drafter.generation_config.lookup_num_tokens = 4
    drafter.save_pretrained(tmp_path)
    for load in (OspreyDrafter.from_pretrained, AutoModelForCausalLM.from_pretrained):
        loaded = load(tmp_path, dtype=dtype)
        assert loaded.dtype == dtype and not loaded.training
        state = loaded.state_dict()
        assert state.keys() == drafter.state_dict().keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in drafter.state_dict().items())
        loaded.rotary_emb.to(
            dtype
        )  # `.to(bfloat16)` rounded the frequencies of the first, which loading computes anew
        assert torch.equal(scores(loaded), scores(drafter))
        assert torch.equal(loaded.draft_ids, drafter.draft_ids)
        assert loaded.generation_config.num_assistant_tokens == 3
        assert loaded.generation_config.lookup_num_tokens == 4
        assert loaded.config.to_diff_dict() == AutoConfig.from_pretrained(tmp_path).to_diff_dict()
    assert sorted(path.suffix for path in tmp_path.glob("*.safetensors")) == [".safetensors"]
    assert not list(tmp_path.glob("*.bin"))


def test_weights_load_as_float32_unless_asked(tmp_path):
    tiny_drafter(tiny_target()).to(torch.bfloat16).save_pretrained(tmp_path)
    expected = torch.bfloat16 if torch.accelerator.is_available() else torch.float32
    assert OspreyDrafter.from_pretrained(tmp_path).dtype == expected
    assert OspreyDrafter.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16


def test_a_tied_head_is_not_stored_and_stays_tied(tmp_path):
    full = tiny_drafter(tiny_target(), tie_word_embeddings=True)
    full.save_pretrained(tmp_path / "full")
    short = tiny_drafter(tiny_target(), tie_word_embeddings=True, shortlist=SHORTLIST)
    short.save_pretrained(tmp_path / "short")
    for name in ("full", "short"):
        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            assert "embed_tokens.weight" in file.keys() and "lm_head.weight" not in file.keys()  # noqa: SIM118
    full = OspreyDrafter.from_pretrained(tmp_path / "full")
    assert full.lm_head.weight is full.embed_tokens.weight
    short = OspreyDrafter.from_pretrained(tmp_path / "short")
    assert torch.equal(short.lm_head.weight, short.embed_tokens.weight[SHORTLIST])
    assert not short.lm_head.weight.requires_grad and not short.embed_tokens.weight.requires_grad
    assert all(
        p.requires_grad for n, p in short.named_parameters() if n not in ("lm_head.weight", "embed_tokens.weight")
    )


def test_an_embedding_that_is_trained_stays_trainable():
    """The head of a tied shortlist follows at `tie_weights`, which loading a checkpoint calls too."""
    drafter = tiny_drafter(tiny_target(), tie_word_embeddings=True, shortlist=SHORTLIST)
    assert not drafter.embed_tokens.weight.requires_grad  # the default
    drafter.embed_tokens.requires_grad_(True)
    with torch.no_grad():
        drafter.embed_tokens.weight.add_(1.0)
    drafter.tie_weights()
    assert drafter.embed_tokens.weight.requires_grad and not drafter.lm_head.weight.requires_grad
    assert torch.equal(drafter.lm_head.weight, drafter.embed_tokens.weight[SHORTLIST])


def test_saving_again_changes_nothing(tmp_path):
    for form, own in FORMS.items():
        tiny_drafter(tiny_target(), **own).save_pretrained(tmp_path / form / "one")
        OspreyDrafter.from_pretrained(tmp_path / form / "one").save_pretrained(tmp_path / form / "two")
        for name in ("config.json", "model.safetensors", "generation_config.json"):
            one, two = ((tmp_path / form / copy / name).read_bytes() for copy in ("one", "two"))
            assert one == two, (form, name)


def test_shards(tmp_path):
    drafter = tiny_drafter(tiny_target(), shortlist=SHORTLIST)
    drafter.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(scores(OspreyDrafter.from_pretrained(tmp_path)), scores(drafter))


STRANGER = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.from_pretrained("drafter", trust_remote_code=True)
assert config.model_type == "osprey" and config.target_layer_ids == [1, 2, 3], config
drafter = AutoModelForCausalLM.from_pretrained("drafter", trust_remote_code=True)
assert type(drafter).__name__ == "OspreyDrafterForCausalLM", type(drafter)
assert type(drafter).__module__.startswith("transformers_modules"), type(drafter)
target = AutoModelForCausalLM.from_pretrained("target")
prompt = torch.load("prompt.pt")
own_code = sys.modules[type(drafter).osprey_decode.__globals__["AssistedCall"].__module__]
with own_code.record_acceptance() as calls:
    text = target.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=drafter)
assert len(calls[0].rounds) > 5 and any(drafted > 0 for drafted, _ in calls[0].rounds)
assert not any(name.split(".")[0] == "osprey" for name in sys.modules)
torch.save((text, drafter(prompt).logits), "result.pt")
drafter.save_pretrained("again")
"""


def test_a_stranger_uses_a_drafter_folder(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target, shortlist=SHORTLIST, tie_word_embeddings=True)
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_osprey.OspreyConfig",
        "AutoModelForCausalLM": "modeling_osprey.OspreyDrafterForCausalLM",
    }
    prompt = tiny_prompt()
    torch.save(prompt, tmp_path / "prompt.pt")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    environment.pop("HF_MODULES_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-I", "-c", NO_OSPREY + STRANGER],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    text, logits = torch.load(tmp_path / "result.pt")
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    assert_same_text(target, plain, text)
    with torch.no_grad():
        torch.testing.assert_close(logits, drafter(prompt).logits)
    # What the stranger saved is a complete folder again.
    for path in Path(modeling_osprey.__file__).parent.glob("*_osprey.py"):
        assert (tmp_path / "drafter" / path.name).read_text() == path.read_text()
        assert (tmp_path / "again" / path.name).read_text() == path.read_text()


COPIES = """
import sys
import torch
from transformers import AutoModelForCausalLM

target, prompt, drafters, modules = AutoModelForCausalLM.from_pretrained("target"), torch.load("prompt.pt"), [], []
for folder in ("one", "two"):
    drafters.append(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True))
    assert type(drafters[-1]).__module__.startswith("transformers_modules")  # installed, the package stands back
    modules.append(sys.modules[type(drafters[-1]).osprey_decode.__globals__["AssistedCall"].__module__])
import osprey.modeling
from osprey.modeling import decoding_osprey
drafters.append(osprey.modeling.OspreyDrafter.from_pretrained("one"))
modules.append(decoding_osprey)
loaded = AutoModelForCausalLM.from_pretrained("two", trust_remote_code=True)
assert type(loaded) is osprey.modeling.OspreyDrafter  # imported, it goes before the folder's own code
assert len({id(module) for module in modules}) == 3
plain = target.generate(prompt, max_new_tokens=20, do_sample=False)

def stop(ids, scores, **kwargs):
    return torch.tensor([ids.shape[1] == prompt.shape[1] + 9])

for recorder in modules:  # each copy's recorder sees the drafters of all copies
    with recorder.record_acceptance() as calls:
        for drafter in drafters:
            text = target.generate(
                prompt, max_new_tokens=20, do_sample=False, assistant_model=drafter, stopping_criteria=[stop]
            )
            assert torch.equal(text, plain[:, : text.shape[1]]) and text.shape[1] == prompt.shape[1] + 9, text
    assert [sum(accepted + 1 for _, accepted in call.rounds) for call in calls] == [8, 8, 8], calls
for i, broken in enumerate(drafters):  # each drafter decodes by its own copy's code
    type(broken).osprey_decode.__globals__["AssistedCall"] = None
    for j, drafter in enumerate(drafters):
        try:
            target.generate(prompt, max_new_tokens=4, do_sample=False, assistant_model=drafter)
        except TypeError:
            assert j <= i
        else:
            assert j > i
"""


def test_copies_of_the_code_in_one_process(tmp_path):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    for seed, name in enumerate(("one", "two")):
        tiny_drafter(target, seed).save_pretrained(tmp_path / name)
    torch.save(tiny_prompt(), tmp_path / "prompt.pt")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    environment.pop("HF_MODULES_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", COPIES], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
