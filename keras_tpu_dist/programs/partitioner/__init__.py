"""Makes programs right on every mesh, in spite of faults of XLA's partitioner."""

from keras_tpu_dist.programs.partitioner.exchanges import ONE_DEVICE as ONE_DEVICE
from keras_tpu_dist.programs.partitioner.exchanges import rows_are_whole as rows_are_whole
from keras_tpu_dist.programs.partitioner.jit import Jitted as Jitted
from keras_tpu_dist.programs.partitioner.jit import OtherTypes as OtherTypes
from keras_tpu_dist.programs.partitioner.jit import types_of as types_of
from keras_tpu_dist.programs.partitioner.places import constrained as constrained
from keras_tpu_dist.programs.partitioner.places import in_compiled_code as in_compiled_code
from keras_tpu_dist.programs.partitioner.places import mesh_here as mesh_here
