"""How this process was started."""

import os
import sys


def as_shell() -> bool:
    """Whether this process runs the command `ktd`, or `python -m keras_tpu_dist`."""
    program = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    if program == "-m":  # Python is still looking for the module
        return "keras_tpu_dist" in sys.orig_argv
    return program in ("ktd", "ktd.exe")
