"""Fixtures of the tests on the recording driver."""

import gc

import pytest

from nanscan import _C


@pytest.fixture
def cuda(recording_driver):
    """The recording driver, which starts to record."""
    recording_driver.set(record=1)
    recording_driver.calls()
    yield recording_driver
    gc.collect()


@pytest.fixture
def lagging(cuda):
    """The same, and work on it is done only when the test says so."""
    cuda.set(lagging=1)
    return cuda


@pytest.fixture
def table():
    return _C.Table()
