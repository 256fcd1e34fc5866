"""Fixtures of the tests of what is collected of a running model."""

import pytest


@pytest.fixture(autouse=True)
def _seeded_and_without_trace(seeded_and_without_trace):
    pass
