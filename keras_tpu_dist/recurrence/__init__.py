"""Recurrences in pure JAX, with weight gradients computed outside of the time loop."""

from keras_tpu_dist.recurrence.cells import BUILT_IN as BUILT_IN
from keras_tpu_dist.recurrence.cells import GRU as GRU
from keras_tpu_dist.recurrence.cells import LSTM as LSTM
from keras_tpu_dist.recurrence.cells import Activation as Activation
from keras_tpu_dist.recurrence.cells import Product as Product
from keras_tpu_dist.recurrence.cells import SimpleRNN as SimpleRNN
from keras_tpu_dist.recurrence.differentiate import Split as Split
from keras_tpu_dist.recurrence.differentiate import recur as recur
from keras_tpu_dist.recurrence.kernel import Kernel as Kernel
from keras_tpu_dist.recurrence.loop import Loop as Loop
from keras_tpu_dist.recurrence.loop import Weights as Weights
from keras_tpu_dist.recurrence.plan import Core as Core
from keras_tpu_dist.recurrence.plan import Variant as Variant
from keras_tpu_dist.recurrence.plan import check_segment as check_segment
from keras_tpu_dist.recurrence.plan import check_unroll as check_unroll
from keras_tpu_dist.recurrence.plan import choose as choose
from keras_tpu_dist.recurrence.split_weights import Gathering as Gathering
from keras_tpu_dist.recurrence.split_weights import gathering as gathering
