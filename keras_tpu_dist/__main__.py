"""`python -m keras_tpu_dist`: the command `ktd` by its long name."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # Files in the working directory must not hide modules of the same names.
    sys.path.append(sys.path.pop(0))

from keras_tpu_dist.tools.shell.main import main as main

if __name__ == "__main__":
    sys.exit(main())
