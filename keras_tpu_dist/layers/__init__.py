"""Faster versions of Keras's recurrent layers and of `TimeDistributed`."""

from keras_tpu_dist.layers.bidirectional import Bidirectional as Bidirectional
from keras_tpu_dist.layers.convert import convert as convert
from keras_tpu_dist.layers.recurrent import GRU as GRU
from keras_tpu_dist.layers.recurrent import LSTM as LSTM
from keras_tpu_dist.layers.recurrent import SimpleRNN as SimpleRNN
from keras_tpu_dist.layers.time_distributed import TimeDistributed as TimeDistributed
