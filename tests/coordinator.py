"""A coordinator within one process, for tests of the host channel."""

import threading
import time

import jax


class Store:
    """The part of JAX's client that the host channel uses."""

    def __init__(self, **values):
        self.values = {f"keras_tpu_dist/{key}": value for key, value in values.items()}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, prefix):
        return [(k, v) for k, v in dict(self.values).items() if k.startswith(prefix)]

    def key_value_delete(self, key):
        for name in [n for n in self.values if n == key or n.startswith(f"{key}/")]:
            del self.values[name]

    def blocking_key_value_get(self, key, timeout_ms):
        end = time.monotonic() + timeout_ms / 1e3
        while key not in self.values:
            if time.monotonic() > end:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: it is not there")
            time.sleep(0.001)
        return self.values[key]


class Counting(Store):
    """Counts requests and the bytes of what they send and get."""

    def __init__(self):
        super().__init__()
        self.requests = self.bytes = 0
        self.lock = threading.Lock()

    def _count(self, *texts):
        with self.lock:
            self.requests += 1
            self.bytes += sum(map(len, texts))

    def key_value_set(self, key, value, allow_overwrite=False):
        self._count(key, value)
        super().key_value_set(key, value, allow_overwrite)

    def key_value_dir_get(self, prefix):
        found = super().key_value_dir_get(prefix)
        self._count(prefix, *(text for pair in found for text in pair))
        return found

    def blocking_key_value_get(self, key, timeout_ms):
        found = super().blocking_key_value_get(key, timeout_ms)
        self._count(key, found)
        return found

    def key_value_delete(self, key):
        self._count(key)
        super().key_value_delete(key)
