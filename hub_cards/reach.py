"""Whether the Hub can be reached at all: one short question, where the client would try again for half a minute.

For command-line verbs alone, which end with their process: a library must not set this for the program that calls it.
"""

import sys
from functools import lru_cache

from huggingface_hub import constants
from huggingface_hub.errors import HTTPError  # of the HTTP library that the client uses
from huggingface_hub.utils import get_session

SECONDS = 5


def go_offline_without_network() -> None:
    """Does to this process what `HF_HUB_OFFLINE=1` would where the Hub does not answer: caches serve, at once."""
    if constants.HF_HUB_OFFLINE or answers(constants.ENDPOINT):
        return
    constants.HF_HUB_OFFLINE = True
    print(f"No answer from the Hub ({constants.ENDPOINT}): going on with its local cache alone.", file=sys.stderr)


def answers(endpoint: str) -> bool:
    try:
        ask(endpoint)
    except HTTPError:
        return False
    return True


@lru_cache  # which keeps no exception: where nothing answered, the next call asks again
def ask(endpoint: str) -> None:
    """Through the client's own session, whose proxies and certificates hold."""
    get_session().head(endpoint, timeout=SECONDS)
