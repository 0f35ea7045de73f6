"""Analyses a compiled program: operations, bytes, cycles and collectives by Keras layer."""

from keras_tpu_dist.tools.hlo.analysis import Buffer as Buffer
from keras_tpu_dist.tools.hlo.analysis import LayerCost as LayerCost
from keras_tpu_dist.tools.hlo.analysis import LoopCost as LoopCost
from keras_tpu_dist.tools.hlo.analysis import ProgramCost as ProgramCost
from keras_tpu_dist.tools.hlo.analysis import analyze as analyze
from keras_tpu_dist.tools.hlo.analysis import analyze_loop as analyze_loop
from keras_tpu_dist.tools.hlo.collectives import Collective as Collective
from keras_tpu_dist.tools.hlo.parse import parse as parse
from keras_tpu_dist.tools.hlo.wire import Wire as Wire
from keras_tpu_dist.tools.hlo.wire import latency_over as latency_over
from keras_tpu_dist.tools.hlo.wire import seconds_over as seconds_over
