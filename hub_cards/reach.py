"""Whether the Hub can be reached at all: one short question, where the client would try again for half a minute."""

from functools import lru_cache

from huggingface_hub import constants
from huggingface_hub.errors import HTTPError  # of the HTTP library that the client uses
from huggingface_hub.utils import get_session

SECONDS = 5


def go_offline_without_network() -> None:
    """Does to this process what `HF_HUB_OFFLINE=1` would where the Hub does not answer: caches serve, at once."""
    if not constants.HF_HUB_OFFLINE and not answers(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True


@lru_cache
def answers(endpoint: str) -> bool:
    """Asked once a process, through the client's own session, whose proxies and certificates hold."""
    try:
        get_session().head(endpoint, timeout=SECONDS)
    except HTTPError:
        return False
    return True
