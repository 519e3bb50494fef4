"""Publishing, with the Hub's real client against a Hub on loopback."""

import json

import pytest
from cards import save_backbone, save_drafter
from loopback_hub import answer
from loopback_repos import READ_TOKEN, WRITE_TOKEN

from osprey.cli.main import main as osprey
from osprey.hub_cards import push as push_module

REPO = "loop/osprey-tiny"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    save_drafter(folder / "drafter")
    save_drafter(folder / "sharded", shard="20KB")
    save_backbone(folder / "backbone")
    return folder


def push(folder, *flags, repo=REPO):
    return osprey(["push", str(folder), "--repo", repo, *flags])


def refused(capsys, folder, *flags, **kwargs):
    """The one sentence that a push ends with."""
    capsys.readouterr()
    assert push(folder, *flags, **kwargs) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("osprey push: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("kind", ["drafter", "backbone"])
def test_a_folder_becomes_a_repo(hub, folders, kind, capsys):
    assert push(folders / kind, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    repo = hub.repos[REPO]
    assert not repo.private
    local = {path.relative_to(folders / kind).as_posix(): path.read_bytes() for path in (folders / kind).rglob("*")}
    assert {name: file.content for name, file in repo.head.items() if name != ".gitattributes"} == local
    assert list(repo.commits)[1:] == [record["revision"]]  # one commit over the Hub's own first
    assert repo.tags == {"v1": record["revision"]} and record["version"] == "v1"
    assert record["kind"] == kind and record["bytes"] == sum(map(len, local.values()))


def test_a_new_version_replaces_the_old(hub, folders, tmp_path, capsys):
    assert push(folders / "sharded") == 0
    shards = {name for name in hub.repos[REPO].head if name.endswith(".safetensors")}
    assert len(shards) > 2
    assert push(folders / "sharded") == 0  # nothing new: no commit, no tag
    assert len(hub.repos[REPO].commits) == 2 and set(hub.repos[REPO].tags) == {"v1"}
    assert push(folders / "drafter") == 0
    repo = hub.repos[REPO]
    assert repo.tags["v2"] == repo.branches["main"] != repo.tags["v1"]
    assert {name for name in repo.head if name.endswith(".safetensors")} == {"model.safetensors"}
    assert "model.safetensors.index.json" not in repo.head and ".gitattributes" in repo.head
    assert shards <= set(repo.commits[repo.tags["v1"]])


def test_private_branch_and_collection(hub, folders):
    hub.collections["loop/osprey-1"] = []
    for _ in range(2):
        assert push(folders / "drafter", "--private", "--revision", "next", "--collection", "loop/osprey-1") == 0
    repo = hub.repos[REPO]
    assert repo.private and hub.collections["loop/osprey-1"] == [REPO]
    assert "config.json" in repo.commits[repo.branches["next"]] and "config.json" not in repo.head
    assert repo.tags == {"v1": repo.branches["next"]}


def test_a_dry_run_sends_nothing(hub, folders, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert push(folders / "drafter", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "model.safetensors" in shown and "nothing was sent" in shown
    assert hub.requests == [] and hub.repos == {}


def test_a_name_that_cannot_be(folders, capsys):
    assert osprey(["push", str(folders / "drafter"), "--repo", "bad name", "--dry_run"]) == 1
    assert "'bad name' is not the name of a repo" in capsys.readouterr().err


def test_an_interrupted_upload_resumes(hub, folders, capsys):
    """Every connection breaks after two of the shards have arrived; the next push sends the others only."""
    uploads = "^PUT /store/"

    def break_later(handler):
        if len(hub.objects) < 2:
            return False
        handler.break_connection()
        return True

    hub.fail(uploads, break_later, times=1000)
    assert "the connection to the Hub broke" in refused(capsys, folders / "sharded")
    there = set(hub.objects)
    assert len(there) >= 2 and "config.json" not in hub.repos[REPO].head and hub.repos[REPO].tags == {}
    assert max(hub.waits) == 8  # the client itself tried again, ever later
    hub.faults.clear()
    hub.requests.clear()
    assert push(folders / "sharded") == 0
    sent = {request.rpartition("/")[2] for request in hub.requests if request.startswith("PUT")}
    assert sent and not sent & there
    assert sent | there == {file.etag for file in hub.repos[REPO].head.values() if file.large}


def test_the_token_stays_where_it_was(hub, folders, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    hub.fail("^POST .*/commit/", answer(500, "broken"))
    assert push(folders / "drafter") == 1  # what is printed about a fault, too
    assert push(folders / "drafter", "--json") == 0
    shown = "".join(capfd.readouterr())
    assert "osprey-tiny" in shown and WRITE_TOKEN not in shown
    roots = (tmp_path, folders)
    files = [path for root in roots for path in root.rglob("*") if path.is_file()]
    assert files and not any(WRITE_TOKEN.encode() in path.read_bytes() for path in files)
    assert hub.store_headers and not any("Authorization" in headers for headers in hub.store_headers)


REFUSALS = {
    "wrong token": ({"HF_TOKEN": "hf_wrong"}, "does not accept the token"),
    "no token": ({"HF_TOKEN": ""}, "needs a token, and there is none: run `hf auth login`"),
    "read token": ({"HF_TOKEN": READ_TOKEN}, "can only read"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_tokens_that_do_not_do(hub, folders, capsys, monkeypatch, case):
    environment, sentence = REFUSALS[case]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(push_module, "check_folder", lambda _: pytest.fail("the weights were read first"))
    assert sentence in refused(capsys, folders / "drafter")
    assert hub.repos == {} and hub.objects == {}


def test_repos_that_are_not_ours(hub, folders, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    hub.add("loop/other", tmp_path / "other")
    before = dict(hub.repos["loop/other"].head)
    assert "holds another model already" in refused(capsys, folders / "drafter", repo="loop/other")
    assert hub.repos["loop/other"].head == before
    assert "may not do this with else/tiny" in refused(capsys, folders / "drafter", repo="else/tiny")
    assert "'a b' is not the name of a repo" in refused(capsys, folders / "drafter", repo="a b")
    assert push(folders / "drafter") == 0
    assert "exists and is public" in refused(capsys, folders / "drafter", "--private")


def test_the_branch_moves_meanwhile(hub, folders, capsys):
    def someone_commits(handler):
        repo = hub.repos[REPO]
        repo.commit({**repo.head, "more.txt": hub.file(b"more", False)})
        return False

    hub.fail("^POST .*/commit/", someone_commits)
    assert "was changed by someone else in the meantime" in refused(capsys, folders / "drafter")
    assert hub.repos[REPO].tags == {} and "more.txt" in hub.repos[REPO].head


def test_rate_limits(hub, folders, capsys):
    hub.fail("^POST .*/preupload/", answer(429, Retry_After="7"))
    assert push(folders / "drafter") == 0
    assert hub.waits == [8]  # the client adds a second
    hub.fail("^GET .*/refs", answer(429, Retry_After="30"))
    assert "(429) at loop/osprey-tiny: run again in 30 s" in refused(capsys, folders / "drafter")


def test_what_arrived_is_compared(hub, folders, capsys):
    def damage(handler):
        repo = hub.repos[REPO]
        repo.head["model.safetensors"].content = b"other"
        return False

    hub.fail("^GET .*/tree/", damage)
    assert "checksum mismatch: model.safetensors on the Hub is not what lies in" in refused(
        capsys, folders / "drafter"
    )
    assert hub.repos[REPO].tags == {}


def test_a_missing_collection_is_said(hub, folders, capsys):
    assert "the Hub answered 404" in refused(capsys, folders / "drafter", "--collection", "loop/none-1")
    assert hub.repos[REPO].tags  # the repo stands
