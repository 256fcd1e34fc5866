"""Fixtures of the tests of what is done with findings."""

import pytest


@pytest.fixture(autouse=True)
def _seeded_and_without_trace(seeded_and_without_trace):
    pass
