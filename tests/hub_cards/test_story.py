"""The whole story: publish a backbone and a drafter, and use the drafter in fresh processes, the last without Hub."""

import json
import os
import subprocess
import sys

import torch
from cards import TARGET, save_backbone, save_drafter, save_target
from loopback_repos import WRITE_TOKEN
from tiny import assert_same_text

from osprey.cli.main import main as osprey

FRESH = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from osprey.cli.main import main as osprey
from osprey.modeling import OspreyDrafter, record_acceptance

assert osprey(["pull", "--target", sys.argv[1], "--out", sys.argv[2], "--json"]) == 0
target = AutoModelForCausalLM.from_pretrained(sys.argv[1])
drafter = OspreyDrafter.for_target(sys.argv[1])
with record_acceptance() as calls:
    text = target.generate(torch.load("prompt.pt"), max_new_tokens=12, do_sample=False, assistant_model=drafter)
assert any(drafted > 0 for drafted, _ in calls[0].rounds), calls
torch.save(text, sys.argv[2] + ".pt")
"""


def fresh_process(folder, out, url, **settings):
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))
        },
        **{"HF_ENDPOINT": url, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"},
        **settings,
    }
    command = [sys.executable, "-c", FRESH, TARGET, out]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_publish_find_pull_generate(hub, tmp_path):
    target = save_target(tmp_path / "target")
    save_backbone(tmp_path / "backbone")
    save_drafter(tmp_path / "drafter", {"chat": 2.0})
    hub.add(TARGET, tmp_path / "target")
    assert osprey(["push", str(tmp_path / "backbone"), "--repo", "loop/osprey-backbone-tiny"]) == 0
    assert osprey(["push", str(tmp_path / "drafter"), "--repo", "loop/osprey-tiny"]) == 0
    prompt = torch.arange(3, 14)[None]
    torch.save(prompt, tmp_path / "prompt.pt")

    pulled = fresh_process(tmp_path, "online", hub.url)
    assert pulled["repo"] == "loop/osprey-tiny" and pulled["mean_acceptance_length"] == 2.0
    assert pulled["revision"] == hub.repos["loop/osprey-tiny"].tags["v1"]
    sent = (tmp_path / "drafter" / "model.safetensors").read_bytes()
    assert (tmp_path / "online" / "model.safetensors").read_bytes() == sent

    hub.__exit__()
    again = fresh_process(tmp_path, "offline", hub.url, HF_HUB_OFFLINE="1")
    assert again == {**pulled, "path": "offline"}
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    for name in ("online", "offline"):
        assert_same_text(target, plain, torch.load(tmp_path / f"{name}.pt"))
    assert not any(WRITE_TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
