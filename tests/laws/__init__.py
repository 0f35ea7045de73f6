"""Laws: what changes nothing in plain Keras changes nothing under a strategy."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "conformance"))
