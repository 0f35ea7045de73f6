import pytest


@pytest.fixture(autouse=True)
def _needs_orbax():
    pytest.importorskip("orbax.checkpoint")
