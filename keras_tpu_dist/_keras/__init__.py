"""The only package that uses private names of Keras and JAX: the seam.

Keras chooses its JAX trainer at import, so `model.fit` can only be changed by replacing methods of
that class. They are declared in one table (`seam`) and replaced when the first object that needs
them is created, such as a strategy. Every replacement looks for a strategy of ours, and calls the
stock method if there is none.

For the seam, a strategy is a `keras.distribution.Distribution` with a `runner`, which has

- `running(strategy, model, name, arguments)`: a context around fit, predict, *_on_batch, ...;
- `make_function(strategy, model, kind)`: the step function for "train", "test" or "predict";
- `serves(function)`: whether an older step function still belongs to the model's variables;
- `training_begins(model)`: called when a fit has built its model;
- `batches(epoch_iterator)`: the iterator over batches of one epoch;
- `host_batch(data)`: checks a batch of *_on_batch; the step function places it;
- `read_state(model, groups)`: the values of lists of the model's variables, as a step takes them;
- `place_output(outputs, layout)`: applies a layout to a layer's outputs;
- `control(model)`: what callbacks ask of the running fit, or `None`;
- `begins_again(model)`: whether a launch ran before training was interrupted;
- `epoch_ended()`: called when all callbacks have seen the end of an epoch;
- `own_input`: the separate input of each process, or `None`.

All of this could be removed if Keras offered two hooks: a `Distribution` hook for input batches and
step functions, and a `Trainer` that restores its variables after an exception.
"""

import os
import sys

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "jax")

import keras

from keras_tpu_dist.common.errors import message

if keras.config.backend() != "jax":
    raise ImportError(
        message(
            "keras_tpu_dist needs Keras on the JAX backend.",
            received=f"keras.config.backend()={keras.config.backend()!r}.",
            fix="Set the environment variable KERAS_BACKEND=jax before keras is imported, or "
            "import keras_tpu_dist before keras and before tensorflow, which imports keras; in a "
            "notebook, restart the kernel first.",
        )
    )

# First: it checks that Keras has the names that the other modules import.
from keras_tpu_dist._keras.names import OPTIONAL as OPTIONAL  # isort: skip
from keras_tpu_dist._keras.names import Name as Name  # isort: skip
from keras_tpu_dist._keras.names import names as names  # isort: skip

from keras_tpu_dist._keras import lookups as lookups  # routes their calls
from keras_tpu_dist._keras.accumulation import accumulated_for as accumulated_for
from keras_tpu_dist._keras.accumulation import accumulating as accumulating
from keras_tpu_dist._keras.active import active_distribution as active_distribution
from keras_tpu_dist._keras.active import active_mesh as active_mesh
from keras_tpu_dist._keras.active import active_strategy as active_strategy
from keras_tpu_dist._keras.active import is_strategy as is_strategy
from keras_tpu_dist._keras.building import abstract_variables as abstract_variables
from keras_tpu_dist._keras.building import attributes_restored as attributes_restored
from keras_tpu_dist._keras.building import compiled_anew as compiled_anew
from keras_tpu_dist._keras.building import fresh_names as fresh_names
from keras_tpu_dist._keras.building import is_built as is_built
from keras_tpu_dist._keras.building import jax_backend_started as jax_backend_started
from keras_tpu_dist._keras.building import layer_names as layer_names
from keras_tpu_dist._keras.building import output_spec as output_spec
from keras_tpu_dist._keras.building import set_layout as set_layout
from keras_tpu_dist._keras.building import symbolic_build as symbolic_build
from keras_tpu_dist._keras.building import without_vjp as without_vjp
from keras_tpu_dist._keras.caching import begin_caching as begin_caching
from keras_tpu_dist._keras.caching import end_caching as end_caching
from keras_tpu_dist._keras.caching import jax_caches_in as jax_caches_in
from keras_tpu_dist._keras.caching import jax_may_cache as jax_may_cache
from keras_tpu_dist._keras.caching import most_bytes_cached as most_bytes_cached
from keras_tpu_dist._keras.caching import we_cache_in as we_cache_in
from keras_tpu_dist._keras.call_state import constants_changed as constants_changed
from keras_tpu_dist._keras.call_state import step_of_keras as step_of_keras
from keras_tpu_dist._keras.callback_list import listens as listens
from keras_tpu_dist._keras.callback_states import ARRAYS as ARRAYS
from keras_tpu_dist._keras.callback_states import AVERAGES_IN_MODEL as AVERAGES_IN_MODEL
from keras_tpu_dist._keras.callback_states import CHANGING as CHANGING
from keras_tpu_dist._keras.callback_states import changing as changing
from keras_tpu_dist._keras.calls import PureCall as PureCall
from keras_tpu_dist._keras.calls import computed_otherwise as computed_otherwise
from keras_tpu_dist._keras.calls import give_to_calls as give_to_calls
from keras_tpu_dist._keras.calls import in_compiled_call as in_compiled_call
from keras_tpu_dist._keras.calls import order_calls as order_calls
from keras_tpu_dist._keras.calls import outside_of_traces as outside_of_traces
from keras_tpu_dist._keras.calls import route_attention_layers as route_attention_layers
from keras_tpu_dist._keras.calls import route_calls as route_calls
from keras_tpu_dist._keras.calls import scope_around_calls as scope_around_calls
from keras_tpu_dist._keras.calls import traced_program as traced_program
from keras_tpu_dist._keras.compiling import compile_what_jax_can as compile_what_jax_can
from keras_tpu_dist._keras.compiling import why_eager as why_eager
from keras_tpu_dist._keras.compiling import why_uncompiled as why_uncompiled
from keras_tpu_dist._keras.configs import remade as remade
from keras_tpu_dist._keras.copies import COPIED as COPIED
from keras_tpu_dist._keras.copies import Copier as Copier
from keras_tpu_dist._keras.distributed import coordination_client as coordination_client
from keras_tpu_dist._keras.distributed import started_as as started_as
from keras_tpu_dist._keras.files import WeightsFile as WeightsFile
from keras_tpu_dist._keras.files import names_in_files as names_in_files
from keras_tpu_dist._keras.files import serve_loading as serve_loading
from keras_tpu_dist._keras.generation import generates as generates
from keras_tpu_dist._keras.generation import sampler_variables as sampler_variables
from keras_tpu_dist._keras.generation import serve_generation as serve_generation
from keras_tpu_dist._keras.inputs import drop_what_is_left as drop_what_is_left
from keras_tpu_dist._keras.inputs import ends_ragged as ends_ragged
from keras_tpu_dist._keras.inputs import epoch_iterator_of_fit as epoch_iterator_of_fit
from keras_tpu_dist._keras.inputs import is_users_code as is_users_code
from keras_tpu_dist._keras.inputs import known_of_epoch as known_of_epoch
from keras_tpu_dist._keras.inputs import orders_ahead as orders_ahead
from keras_tpu_dist._keras.inputs import set_shuffling_epoch as set_shuffling_epoch
from keras_tpu_dist._keras.inputs import shuffling_epoch as shuffling_epoch
from keras_tpu_dist._keras.inputs import uncount_steps as uncount_steps
from keras_tpu_dist._keras.marks import LayerMark as LayerMark
from keras_tpu_dist._keras.marks import Mark as Mark
from keras_tpu_dist._keras.marks import copy_marks as copy_marks
from keras_tpu_dist._keras.moving import move_variables as move_variables
from keras_tpu_dist._keras.newton_schulz import MuonMatrix as MuonMatrix
from keras_tpu_dist._keras.newton_schulz import muons_in as muons_in
from keras_tpu_dist._keras.newton_schulz import newton_schulz_by as newton_schulz_by
from keras_tpu_dist._keras.pairing import Pairs as Pairs
from keras_tpu_dist._keras.pairing import paired as paired
from keras_tpu_dist._keras.pairing import paired_layers as paired_layers
from keras_tpu_dist._keras.pairing import repeat_names as repeat_names
from keras_tpu_dist._keras.presets import CONFIG_OF_PRESET as CONFIG_OF_PRESET
from keras_tpu_dist._keras.presets import backbones_in as backbones_in
from keras_tpu_dist._keras.presets import weights_of_preset as weights_of_preset
from keras_tpu_dist._keras.progress import begin_at_epoch as begin_at_epoch
from keras_tpu_dist._keras.progress import counter_of as counter_of
from keras_tpu_dist._keras.progress import global_seed as global_seed
from keras_tpu_dist._keras.progress import set_global_seed as set_global_seed
from keras_tpu_dist._keras.progress import train_steps_counted as train_steps_counted
from keras_tpu_dist._keras.seam import TESTED_KERAS as TESTED_KERAS
from keras_tpu_dist._keras.seam import Replacement as Replacement
from keras_tpu_dist._keras.seam import check_keras as check_keras
from keras_tpu_dist._keras.seam import declare as declare
from keras_tpu_dist._keras.seam import install as install
from keras_tpu_dist._keras.seam import table as table
from keras_tpu_dist._keras.state import StateGroup as StateGroup
from keras_tpu_dist._keras.state import follow_changes as follow_changes
from keras_tpu_dist._keras.state import follow_state as follow_state
from keras_tpu_dist._keras.state import forget_state as forget_state
from keras_tpu_dist._keras.state import full_values as full_values
from keras_tpu_dist._keras.state import has_state as has_state
from keras_tpu_dist._keras.state import holds as holds
from keras_tpu_dist._keras.state import is_value_of as is_value_of
from keras_tpu_dist._keras.state import keep_metrics as keep_metrics
from keras_tpu_dist._keras.state import state_groups as state_groups
from keras_tpu_dist._keras.state import state_shardings as state_shardings
from keras_tpu_dist._keras.state import state_variables as state_variables
from keras_tpu_dist._keras.state import stateless_scope as stateless_scope
from keras_tpu_dist._keras.state import trainability as trainability
from keras_tpu_dist._keras.state import values_of as values_of
from keras_tpu_dist._keras.state import variable_layout as variable_layout
from keras_tpu_dist._keras.state import variable_layouts as variable_layouts
from keras_tpu_dist._keras.structure import ATTENTION_OPTIONS as ATTENTION_OPTIONS
from keras_tpu_dist._keras.structure import AutocastScope as AutocastScope
from keras_tpu_dist._keras.structure import Functional as Functional
from keras_tpu_dist._keras.structure import begun_anew as begun_anew
from keras_tpu_dist._keras.structure import call_arguments as call_arguments
from keras_tpu_dist._keras.structure import call_takes as call_takes
from keras_tpu_dist._keras.structure import compile_arguments as compile_arguments
from keras_tpu_dist._keras.structure import created_to_train as created_to_train
from keras_tpu_dist._keras.structure import declared_inputs as declared_inputs
from keras_tpu_dist._keras.structure import declared_outputs as declared_outputs
from keras_tpu_dist._keras.structure import flatten_layers as flatten_layers
from keras_tpu_dist._keras.structure import fresh_optimizer as fresh_optimizer
from keras_tpu_dist._keras.structure import full_precision as full_precision
from keras_tpu_dist._keras.structure import graph as graph
from keras_tpu_dist._keras.structure import in_symbolic_scope as in_symbolic_scope
from keras_tpu_dist._keras.structure import in_update as in_update
from keras_tpu_dist._keras.structure import keras_mask as keras_mask
from keras_tpu_dist._keras.structure import optimizer_slots as optimizer_slots
from keras_tpu_dist._keras.structure import optimizers_in as optimizers_in
from keras_tpu_dist._keras.structure import own_variables as own_variables
from keras_tpu_dist._keras.structure import owner_of_loss as owner_of_loss
from keras_tpu_dist._keras.structure import producer as producer
from keras_tpu_dist._keras.structure import route_attention as route_attention
from keras_tpu_dist._keras.structure import route_grouped_attention as route_grouped_attention
from keras_tpu_dist._keras.structure import slots_of_optimizer as slots_of_optimizer
from keras_tpu_dist._keras.structure import stored_weight as stored_weight
from keras_tpu_dist._keras.structure import sublayers as sublayers
from keras_tpu_dist._keras.structure import to_snake_case as to_snake_case
from keras_tpu_dist._keras.structure import variables_of as variables_of
from keras_tpu_dist._keras.structure import variables_of_optimizer as variables_of_optimizer
from keras_tpu_dist._keras.structure import weights_by_training as weights_by_training
from keras_tpu_dist._keras.structure import weights_of as weights_of
from keras_tpu_dist._keras.structure import with_keras_mask as with_keras_mask
from keras_tpu_dist._keras.structure import without_distribution as without_distribution
from keras_tpu_dist._keras.trainer import forget_functions as forget_functions
from keras_tpu_dist._keras.trainer import on_new_layer as on_new_layer
from keras_tpu_dist._keras.trainer import serve as serve
from keras_tpu_dist._keras.variables import claim as claim
from keras_tpu_dist._keras.variables import owner_of as owner_of
from keras_tpu_dist._keras.variables import replace_in_scope as replace_in_scope
from keras_tpu_dist._keras.variables import serve_additions as serve_additions
from keras_tpu_dist._keras.variables import serve_pickles as serve_pickles
from keras_tpu_dist._keras.variables import serve_uses as serve_uses
from keras_tpu_dist._keras.variables import serve_variables as serve_variables
from keras_tpu_dist._keras.variables import set_owner as set_owner
from keras_tpu_dist._keras.variables import set_use as set_use
from keras_tpu_dist._keras.variables import values_hidden as values_hidden
