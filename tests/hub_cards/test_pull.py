"""Fetching, with the Hub's real client against a Hub on loopback."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from cards import TARGET, card, save_backbone, save_drafter
from huggingface_hub import constants, file_download
from loopback_hub import answer, cut_after
from loopback_repos import is_large

from osprey.cli.main import main as osprey
from osprey.hub_cards.layout import PULL_RECORD

REPO = "loop/osprey-tiny"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    save_drafter(folder / "one", {"chat": 2.0})
    save_drafter(folder / "two", {"chat": 3.0}, seed=2)
    save_backbone(folder / "backbone")
    return folder


@pytest.fixture
def repo(hub, folders, monkeypatch):
    """A published drafter, tagged v1."""
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=hub.waits.append))
    repo = hub.add(REPO, folders / "one")
    repo.tags["v1"] = repo.branches["main"]
    return repo


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != PULL_RECORD}


def pulled(capsys, *words):
    capsys.readouterr()
    assert osprey(["pull", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words):
    """The one sentence that a pull ends with."""
    capsys.readouterr()
    assert osprey(["pull", *words]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("osprey pull: ")]
    assert len(lines) == 1
    return lines[0]


def test_into_the_cache_and_into_a_folder(repo, folders, tmp_path, capsys):
    record = pulled(capsys, REPO)
    assert contents(record["path"]) == contents(folders / "one")
    assert record["revision"] == repo.branches["main"] and record["revision"] in record["path"]
    assert (record["kind"], record["base_model"], record["mean_acceptance_length"]) == ("drafter", TARGET, 2.0)
    out = tmp_path / "out"
    record = pulled(capsys, REPO, "--out", str(out))
    assert record["path"] == str(out) and contents(out) == contents(folders / "one")
    assert not any(path.is_symlink() for path in out.iterdir())
    assert json.loads((out / PULL_RECORD).read_text())["revision"] == repo.branches["main"]
    assert osprey(["push", str(out), "--repo", REPO, "--dry-run"]) == 0  # still a folder to publish
    assert "exists already" in refused(capsys, REPO, "--out", str(out))


def test_a_revision_is_pinned(repo, hub, folders, capsys):
    first = repo.branches["main"]
    assert pulled(capsys, REPO)["revision"] == first
    second = hub.add(REPO, folders / "two").branches["main"]
    assert pulled(capsys, REPO)["revision"] == second
    for revision in ("v1", first):
        record = pulled(capsys, REPO, "--revision", revision)
        assert record["revision"] == first and contents(record["path"]) == contents(folders / "one")
    assert "has no revision 'v9'" in refused(capsys, REPO, "--revision", "v9")


@pytest.mark.parametrize("moment", ["the name is resolved", "the first file comes"])
def test_a_revision_that_moves_meanwhile(repo, hub, folders, capsys, moment):
    first = repo.branches["main"]
    moved = []

    def answer_and_move(handler):
        handler.info(REPO)
        moved.append(hub.add(REPO, folders / "two"))
        return True

    def move(handler):
        moved.append(hub.add(REPO, folders / "two"))
        return False

    if moment == "the name is resolved":
        hub.fail(f"^GET /api/models/{REPO}$", answer_and_move)
    else:
        hub.fail("^HEAD .*/resolve/", move)
    record = pulled(capsys, REPO)
    assert moved and record["revision"] == first != repo.branches["main"]
    assert contents(record["path"]) == contents(folders / "one")


def test_a_cut_download_goes_on_where_it_broke(repo, hub, folders, capsys, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)  # what has been read in whole chunks is kept
    hub.fail("^GET /store/", cut_after(1000), times=2)
    record = pulled(capsys, REPO)
    assert contents(record["path"]) == contents(folders / "one")
    assert [headers.get("Range") for headers in hub.store_headers] == [None, "bytes=1000-", "bytes=2000-"]


def test_a_connection_that_always_breaks(repo, hub, tmp_path, folders, capsys):
    hub.fail("^GET /store/", cut_after(0), times=100)
    assert "the connection to the Hub broke" in refused(capsys, REPO, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists() and not list((tmp_path / "cache").rglob("*.incomplete"))
    hub.faults.clear()
    assert contents(pulled(capsys, REPO)["path"]) == contents(folders / "one")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_download_is_not_kept(repo, hub, folders, capsys, name):
    file = repo.head[name]
    damaged = bytes([file.content[0] ^ 1]) + file.content[1:]  # of the right size, which is all the client checks
    where = f"^GET /store/{file.etag}" if is_large(name) else f"^GET .*/{name}$"

    def swap(handler):
        handler.reply(200, damaged, {"ETag": f'"{file.etag}"'})
        return True

    hub.fail(where, swap)
    assert f"checksum mismatch: {name} of {REPO} did not arrive as published" in refused(capsys, REPO)
    assert contents(pulled(capsys, REPO)["path"]) == contents(folders / "one")


def test_rate_limits(repo, hub, capsys):
    hub.fail("^GET /store/", answer(429, Retry_After="5"))
    pulled(capsys, REPO)
    assert hub.waits == [6]  # the client adds a second
    hub.fail("^GET /api/models/", answer(429, Retry_After="40"))
    assert "limits the rate of requests (429)" in (sentence := refused(capsys, REPO)) and "in 40 s" in sentence


def test_refusals(repo, hub, folders, tmp_path, capsys, monkeypatch):
    assert "there is no repo loop/none on the Hub, or it is private" in refused(capsys, "loop/none")
    hub.add("loop/gated", folders / "one", gated=True)
    assert "loop/gated is gated: accept its terms" in refused(capsys, "loop/gated")
    assert "'a b' is not the name of a repo" in refused(capsys, "a b")
    assert "give either the name of a repo" in refused(capsys)
    assert "give either the name of a repo" in refused(capsys, REPO, "--target", TARGET)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept the token" in refused(capsys, REPO)
    monkeypatch.setenv("HF_TOKEN", "")
    pulled(capsys, REPO)
    hub.repos[REPO].private = True
    assert "or it is private" in refused(capsys, REPO)


def test_only_what_belongs_there_is_fetched(hub, folders, tmp_path, capsys):
    folder = Path(shutil.copytree(folders / "one", tmp_path / "folder"))
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "lookup_osprey.py").write_text("raise SystemExit('remote code ran')\n")
    hub.add(REPO, folder)
    record = pulled(capsys, REPO)
    assert contents(record["path"]).keys() == contents(folders / "one").keys()
    assert hub.count("pytorch_model.bin") == 0
    assert record["own_code"] is False
    osprey(["pull", REPO])
    assert "brings other code than the installed osprey.modeling" in capsys.readouterr().err


def test_another_s_model_is_none_of_ours(hub, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "other" / "README.md").write_text(card("model", TARGET).replace("osprey, ", ""))
    hub.add("loop/other", tmp_path / "other")
    assert "holds no drafter and no backbone of Osprey" in refused(capsys, "loop/other")


def test_offline_the_cache_does(repo, hub, folders, capsys, monkeypatch):
    hub.add("loop/better", folders / "two")
    hub.add("loop/backbone", folders / "backbone")
    assert pulled(capsys, "--target", TARGET)["repo"] == "loop/better"
    pulled(capsys, REPO)
    pulled(capsys, "loop/backbone")
    hub.__exit__()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert pulled(capsys, REPO)["revision"] == repo.branches["main"]
    assert pulled(capsys, "loop/backbone")["kind"] == "backbone"
    record = pulled(capsys, "--target", TARGET)
    assert record["repo"] == "loop/better" and contents(record["path"]) == contents(folders / "two")
    assert "loop/none is not (wholly) in the local cache, and the Hub cannot be reached" in refused(
        capsys, "loop/none"
    )
    assert "there is no drafter for loop/none in the Hub's local cache" in refused(capsys, "--target", "loop/none")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # nothing set, and no answer from where the Hub was
    assert pulled(capsys, REPO)["revision"] == repo.branches["main"]
    assert pulled(capsys, "--target", TARGET)["repo"] == "loop/better"
    assert hub.requests == []
