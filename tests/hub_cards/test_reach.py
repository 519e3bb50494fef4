"""Without a network the client's half minute of attempts is spared, and the caches serve at once."""

import socket

import pytest
from cards import TARGET, save_drafter
from huggingface_hub import constants
from loopback_hub import answer

from osprey.cli.targets import find_model
from osprey.hub_cards import reach
from osprey.hub_cards.pull import pull
from osprey.hub_cards.zoo import zoo


@pytest.fixture
def nowhere(hub, monkeypatch) -> str:
    """The client is sent to a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        monkeypatch.setattr(constants, name, getattr(constants, name).replace(hub.url, url))
    return url


def test_the_hub_is_asked_once(hub, tmp_path):
    save_drafter(tmp_path / "drafter", {"chat": 2.0})
    hub.add("loop/osprey-tiny", tmp_path / "drafter")
    assert pull("loop/osprey-tiny").kind == "drafter" and zoo(TARGET)[1]
    assert find_model("drafter", "loop/osprey-tiny") == "loop/osprey-tiny"
    assert hub.count(r"^HEAD /$") == 1 and not constants.HF_HUB_OFFLINE


def test_an_error_is_an_answer_too(hub):
    hub.fail("HEAD /$", answer(503))
    reach.go_offline_without_network()
    assert hub.count(r"^HEAD /$") == 1 and not constants.HF_HUB_OFFLINE


def test_without_an_answer_nothing_is_tried_again(hub, nowhere):
    assert zoo() == ([], False)
    with pytest.raises(OSError, match="loop/none is not .* in the local cache, and the Hub cannot be reached"):
        pull("loop/none")
    with pytest.raises(OSError, match="drafter 'loop/none' is neither .* and the Hub cannot be reached"):
        find_model("drafter", "loop/none")
    assert hub.waits == [] and constants.HF_HUB_OFFLINE


def test_offline_nothing_is_asked(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    reach.go_offline_without_network()
    assert hub.requests == []
