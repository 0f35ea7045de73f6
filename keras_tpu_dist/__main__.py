"""`python -m keras_tpu_dist`: the command `ktd` by its long name."""

import sys

from keras_tpu_dist.shell.main import main as main

if __name__ == "__main__":
    sys.exit(main())
