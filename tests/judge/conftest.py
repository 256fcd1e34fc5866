"""Fixtures of the tests of findings and their verdicts."""

import pytest


@pytest.fixture(autouse=True)
def _seeded_and_without_trace(seeded_and_without_trace):
    pass
