"""Plain Keras 3 models train on TPUs as they should."""

from keras_tpu_dist import _keras as _keras  # first: selects and checks Keras's JAX backend
from keras_tpu_dist.layout import LayoutRules as LayoutRules
from keras_tpu_dist.simulation import simulate as simulate
from keras_tpu_dist.strategy import TPUStrategy as TPUStrategy

__version__ = "0.1.0"
