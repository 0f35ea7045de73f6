"""Keras's own tests carry a marker of Keras's."""


def pytest_configure(config):
    """Registers it, as Keras's conftest does."""
    config.addinivalue_line("markers", "requires_trainable_backend: of Keras; true of JAX")
