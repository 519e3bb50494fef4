"""Without a network a command is spared the client's half minute of attempts, and the caches serve at once."""

import socket
import time

import pytest
from cards import TARGET, save_drafter
from huggingface_hub import constants
from loopback_hub import answer

from osprey.cli.main import main as osprey
from osprey.cli.targets import find_model
from osprey.hub_cards import reach
from osprey.hub_cards.pull import pull
from osprey.hub_cards.zoo import zoo
from osprey.modeling import OspreyDrafter

SWITCHED = "No answer from the Hub"


def answer_late(handler):
    time.sleep(0.6)
    return False


@pytest.fixture
def nowhere(hub, monkeypatch) -> str:
    """The client is sent to a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        monkeypatch.setattr(constants, name, getattr(constants, name).replace(hub.url, url))
    return url


@pytest.fixture
def drafter(hub, tmp_path) -> str:
    """A published drafter's folder; its repo is loop/osprey-tiny."""
    save_drafter(tmp_path / "drafter", {"chat": 2.0})
    hub.add("loop/osprey-tiny", tmp_path / "drafter")
    return str(tmp_path / "drafter")


def test_the_hub_is_asked_once(hub, drafter, capsys):
    assert osprey(["pull", "loop/osprey-tiny"]) == osprey(["zoo"]) == 0
    assert find_model("drafter", "loop/osprey-tiny") == "loop/osprey-tiny"
    assert hub.count(r"^HEAD /$") == 1 and not constants.HF_HUB_OFFLINE
    assert SWITCHED not in capsys.readouterr().err


def test_an_error_is_an_answer_too(hub):
    hub.fail("HEAD /$", answer(503))
    reach.go_offline_without_network()
    assert hub.count(r"^HEAD /$") == 1 and not constants.HF_HUB_OFFLINE


def test_without_an_answer_nothing_is_tried_again(hub, nowhere, capsys):
    assert osprey(["zoo"]) == 0
    assert osprey(["pull", "loop/none"]) == 1
    shown = capsys.readouterr().err
    assert "loop/none is not (wholly) in the local cache, and the Hub cannot be reached" in shown
    with pytest.raises(OSError, match="drafter 'loop/none' is neither .* and the Hub cannot be reached"):
        find_model("drafter", "loop/none")
    shown += capsys.readouterr().err
    assert shown.count(f"{SWITCHED} ({nowhere}): going on with its local cache alone.\n") == 1
    assert hub.waits == [] and constants.HF_HUB_OFFLINE


def test_public_suites_come_from_the_cache_at_once(nowhere, tmp_path, monkeypatch):
    """In both kinds of benchmark; other suites have nothing to do with the Hub."""
    seen = []

    def load_suite(name, limit):
        seen.append((name, constants.HF_HUB_OFFLINE))
        raise ValueError("enough")

    monkeypatch.setattr("osprey.eval.suites.load_suite", load_suite)
    for suite in ("builtin", "GSM8K"):
        for words in (["--out", str(tmp_path / "result.json")], ["--speed"]):
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
            assert osprey(["bench", "--suite", suite, *words]) == 1
    assert seen == [("builtin", False), ("builtin", False), ("GSM8K", True), ("GSM8K", True)]


def test_a_late_answer_and_a_second_try(hub, drafter, capsys, monkeypatch):
    """The cache serves what the Hub was too slow for; the next time it is asked again."""
    assert osprey(["pull", "loop/osprey-tiny"]) == 0
    reach.ask.cache_clear()  # as in a new process

    monkeypatch.setattr(reach, "SECONDS", 0.2)
    hub.fail("HEAD /$", answer_late)
    hub.requests.clear()
    assert osprey(["pull", "loop/osprey-tiny"]) == 0
    assert hub.requests == ["HEAD /"] and constants.HF_HUB_OFFLINE
    assert capsys.readouterr().err.count(SWITCHED) == 1
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(reach, "SECONDS", 5)
    assert osprey(["pull", "loop/osprey-tiny"]) == 0
    assert hub.count(r"^HEAD /$") == 2 and hub.count("^GET ") > 0 and not constants.HF_HUB_OFFLINE


def test_the_library_leaves_the_setting_alone(hub, drafter, capsys, request):
    """What a program calls must not change how the rest of it finds its models."""
    OspreyDrafter.for_target(TARGET)
    assert hub.count(r"^HEAD /$") == 0
    request.getfixturevalue("nowhere")
    assert zoo()[1] is False
    assert pull("loop/osprey-tiny").kind == "drafter"
    assert isinstance(OspreyDrafter.for_target(TARGET), OspreyDrafter)
    with pytest.raises(OSError, match="loop/none is not .* in the local cache, and the Hub cannot be reached"):
        pull("loop/none")
    assert not constants.HF_HUB_OFFLINE and SWITCHED not in capsys.readouterr().err


def test_a_push_has_no_cache_to_fall_back_on(nowhere, drafter, capsys, monkeypatch):
    assert osprey(["push", drafter, "--repo", "loop/new"]) == 1
    sentence = "osprey push: the Hub cannot be reached for loop/new (ConnectError): check the network, and run again."
    assert sentence in capsys.readouterr().err.splitlines()
    assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert osprey(["push", drafter, "--repo", "loop/new"]) == 1
    assert "HF_HUB_OFFLINE is set; unset it, and run again" in capsys.readouterr().err


def test_a_push_waits_for_a_slow_hub(hub, drafter, monkeypatch):
    monkeypatch.setattr(reach, "SECONDS", 0.2)
    hub.fail("HEAD /$", answer_late)
    hub.fail("^GET .*/whoami", answer_late)
    assert osprey(["push", drafter, "--repo", "loop/new"]) == 0
    assert hub.count(r"^HEAD /$") == 0 and not constants.HF_HUB_OFFLINE


def test_offline_nothing_is_asked(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    reach.go_offline_without_network()
    assert hub.requests == []
