"""The Hub's real client, in this process, against a Hub on loopback."""

from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _cache_manager, _http, close_session
from loopback_hub import LoopbackHub
from loopback_repos import WRITE_TOKEN


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A loopback Hub and an empty cache; `hub.waits` are the seconds that the client waited, without waiting."""
    with LoopbackHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)  # what HF_ENDPOINT sets at import
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "".join(template[1:]))
        for module in (constants, _cache_manager):
            monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        hub.waits = []
        monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=hub.waits.append))
        yield hub
        close_session()
