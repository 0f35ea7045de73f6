"""Runs a model's fit, evaluate and predict under a strategy, for Keras's trainer."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import message, runtime_error
from keras_tpu_dist.hardware.compiler_options import for_replicas
from keras_tpu_dist.input.batches import BatchPlacer
from keras_tpu_dist.input.clock import InputReports, TimedInput
from keras_tpu_dist.input.host_arrays import copied
from keras_tpu_dist.input.iterator import DeviceIterator
from keras_tpu_dist.input.own_input import OwnInput
from keras_tpu_dist.input.process_rows import ProcessRowsPlacer
from keras_tpu_dist.input.same_input import compared
from keras_tpu_dist.layout.annotations import place_output
from keras_tpu_dist.layout.layouts import Layouts
from keras_tpu_dist.processes.agreement import (
    agreed_call,
    compare_changes,
    compare_now_and_then,
    compare_weights,
    files_of_one,
)
from keras_tpu_dist.training import adoption, membership
from keras_tpu_dist.training.auto_steps import AutoSteps
from keras_tpu_dist.training.fit_control import FitControl
from keras_tpu_dist.training.guard import StateGuard, recover, states_to_keep
from keras_tpu_dist.training.loop import Evaluation, Prediction, StepLoop, Training
from keras_tpu_dist.training.options import Options
from keras_tpu_dist.training.protocol import Strategy
from keras_tpu_dist.training.running import RunningCall, as_running, running_call
from keras_tpu_dist.training.turns import (
    TRAINING,
    Recompiled,
    assigning,
    consistent_values,
    turns_of,
)


class Runner:
    """Runs models on one mesh.

    Args:
        layouts: The strategy's layouts: which axes split each variable of each model.
        placer: Transfers batches to the mesh. It is a `ProcessRowsPlacer` if each process provides
            its own rows; then `own_input` agrees with the other processes on every batch.
        options: The options of the strategy. They are read here once for the mesh's devices, so
            that a call looks nothing up.
        only_described: The name of the slice if it is not attached. Then programs can be compiled,
            as dry runs do, and every call that runs one is an error.
    """

    def __init__(
        self,
        layouts: Layouts,
        placer: BatchPlacer,
        options: Options,
        only_described: str | None = None,
    ):
        self.layouts = layouts
        self.placer = placer
        self.options = options
        first = layouts.mesh.devices.flat[0]
        self.prefetch = options.batches_ahead(first.platform)
        self.compiler_options = options.for_compiler(
            layouts.mesh, layouts.layout, only_described=only_described is not None
        )
        self.replica_options = for_replicas(self.compiler_options, first)
        self.reports = InputReports()
        self._only_described = only_described

    @contextlib.contextmanager
    def running(
        self, strategy: Strategy, model: Any, name: str, arguments: Mapping[str, Any]
    ) -> Iterator[None]:
        """The context of one of Keras's entry points.

        Args:
            strategy: The distribution to be active.
            model: The model.
            name: `"fit"`, `"evaluate"`, and so on.
            arguments: The arguments, by name; `"callbacks"` as a flat list.
        """
        if self._only_described is not None:
            raise runtime_error(
                "A strategy for a slice without its chips can compile a model, not run it.",
                received=f"{name} with topology={self._only_described!r}.",
                fix="Leave `topology` out to run on the attached devices; to see what the "
                "slice would do, use keras_tpu_dist.dry_run.",
            )
        _check_input(name, arguments.get("x"), may_be_empty=self.own_input is not None)
        turns = turns_of(model)
        with strategy.scope(), turns.taken(name, model) as beside:
            if beside:
                with self._beside(strategy, model, name):
                    yield
                return
            with self._with_others(name, model, arguments), self._alone(strategy, model, name):
                yield

    @contextlib.contextmanager
    def _beside(self, strategy: Strategy, model: Any, name: str) -> Iterator[None]:
        """The context of a call that a call in another thread must not notice."""
        if not self.placer.is_local:
            raise NotImplementedError(
                message(
                    "On a mesh of several processes, a model can run in only one thread at a time.",
                    received=f"{name} of model {model.name!r} while another thread runs it.",
                    fix="Call it in a callback, or after the other call.",
                )
            )
        member = adoption.adopt(model, strategy)
        values = consistent_values(_keras.state_variables(model))
        with values, self.call(member, model, name) as call:
            with call.auto_steps.chosen_for(model):
                yield

    @contextlib.contextmanager
    def _alone(self, strategy: Strategy, model: Any, name: str) -> Iterator[None]:
        member = adoption.adopt(model, strategy)
        turns = member.turns
        if not self.placer.is_local:
            compare_weights(member.agreed, model)
            compare_now_and_then(member.agreed, model, name)
        if member.guard is not None and not turns.elsewhere:
            member.guard.on_batch = name == "train_on_batch"
        if _keras.has_state(model):
            # Called by a callback within a fit: the variables hold that fit's newest state, and the
            # fit reads it from there when it continues.
            _keras.forget_state(model)
        try:
            with self.call(member, model, name) as call, call.auto_steps.chosen_for(model):
                yield
        except BaseException:
            if member.guard is not None and not turns.elsewhere and _keras.has_state(model):
                recover(model, member.guard)
            raise
        finally:
            _keras.forget_state(model)
            if member.guard is not None and not turns.elsewhere:
                member.guard.release(end_of_fit=name == "fit")
            if name == "fit":
                member.fit.end()
            if name in TRAINING:
                turns.rest()
                if isinstance(model.train_function, Recompiled):
                    model.train_function = None
                if running_call() is not None:
                    # Called by a callback of another model's fit, which may share layers with this
                    # one.
                    membership.variables_changed(strategy)

    @contextlib.contextmanager
    def _with_others(self, name: str, model: Any, arguments: Mapping) -> Iterator[None]:
        if self.placer.is_local:
            yield
            return
        with files_of_one(arguments.get("callbacks", ())), agreed_call(name, model):
            yield

    def call(
        self, member: membership.Membership, model: Any = None, name: str = ""
    ) -> contextlib.AbstractContextManager[RunningCall]:
        """A context in which layer outputs have the layouts of the model's plan and annotations.

        Args:
            member: The model's membership.
            model: The model that runs, if there is one.
            name: The method of the model that was called.
        """
        return as_running(RunningCall(self, member, AutoSteps(), model, name, running_call()))

    def make_function(self, strategy: Strategy, model: Any, kind: str) -> StepLoop:
        """The function that Keras calls for `"train"`, `"test"` or `"predict"` steps.

        Args:
            strategy: The strategy whose runner this is.
            model: The model; its variables that are not on the mesh yet are moved there.
            kind: `"train"`, `"test"` or `"predict"`.
        """
        member = adoption.adopt(model, strategy)
        _keras.compile_what_jax_can(model)
        from keras_tpu_dist.layout.lint import frozen_factors, lint_model, log_report

        if kind == "train":
            log_report(frozen_factors(model))
        if not member.linted and model.built:
            member.linted = True
            placement = member.placement or strategy.placement(model)
            log_report(lint_model(model, placement, self.layouts, cheap=True))
        if member.guard is None or kind == "train":
            states = states_to_keep(self.options.donate_state, _keras.state_variables(model))
            member.guard = member.guard or StateGuard(states)
            # Before the first fit there were no slots to count.
            member.guard.kept = states
        turns, options = member.turns, self.compiler_options
        if kind == "train":
            turns.ready(_keras.state_variables(model))
            return Training(model, turns, self.placer, member.guard, member.fit, options)
        forward = {"test": Evaluation, "predict": Prediction}[kind]
        return forward(model, turns, self.placer, options)

    def serves(self, function: Any) -> bool:
        """Whether a step function still belongs to the model's current variables.

        Args:
            function: The result of `make_function`, or a custom function.
        """
        return not isinstance(function, StepLoop) or function.serves()

    def training_begins(self, model: Any) -> None:
        """Called before callbacks see the start of a fit, when its model is built.

        What they call in other threads need not wait for the first launch, which a custom train
        function never announces.
        """
        member = membership.of_model(model)
        if member is not None and member.turns.here:
            member.turns.ready(_keras.state_variables(model))

    def control(self, model: Any) -> FitControl | None:
        """The controls of a model's fit, for callbacks.

        Args:
            model: The model that trains.
        """
        member = membership.of_model(model)
        return None if member is None else member.fit

    def begins_again(self, model: Any) -> bool:
        """Whether the train launch that starts now ran before training was interrupted.

        Args:
            model: The model that trains.
        """
        call = running_call()
        if call is None:
            return False
        left = call.member.fit.batches_to_skip
        return left > 0 and left >= (call.auto_steps.of(model) or model.steps_per_execution)

    def read_state(self, model: Any, groups: tuple[list, ...]) -> tuple[list, ...]:
        """The values of a model's variables, as a step takes them.

        Args:
            model: The model whose state it is.
            groups: Lists of its variables, in the order of the state.
        """
        member = membership.of_model(model)
        if member is None or _keras.stateless_scope() is not None:
            return tuple(_keras.values_of(group) for group in groups)
        # Other models, and replica code, may train some of the variables in other threads.
        owners = {id(owner): owner for v in chain(*groups) if (owner := _keras.owner_of(v))}
        owners[id(member.turns)] = member.turns
        with contextlib.ExitStack() as locks:
            locks.enter_context(assigning)
            for _, owner in sorted(owners.items()):
                locks.enter_context(owner.lock)
                owner.note_outside_reader(chain(*groups))
            state = tuple(_keras.values_of(group) for group in groups)
        if len(groups) == len(_keras.state_groups(model)) and member.guard is not None:
            member.guard.read(state)
        return state

    def epoch_ended(self) -> None:
        """Called when all callbacks have seen the end of an epoch."""
        call = running_call()
        if not self.placer.is_local and call is not None and call.model is not None:
            compare_changes(call.model)

    def batches(self, epoch_iterator: Any) -> DeviceIterator:
        """The iterator over the batches of one epoch.

        Args:
            epoch_iterator: Keras's `EpochIterator` over the epoch.
        """
        if epoch_iterator.data_adapter.num_batches == 0:
            raise ValueError(_no_data("an input without any batch"))
        call = running_call()
        if call is not None:
            call.auto_steps.choose(epoch_iterator)
        _keras.drop_what_is_left(epoch_iterator.data_adapter)
        batches = iter(epoch_iterator.data_adapter.get_jax_iterator())
        if _keras.is_users_code(epoch_iterator.data_adapter):
            # Batches are read ahead of the step, for a launch of several, or while devices still
            # read them.
            batches = map(copied, batches)
        if self.options.input_timeout_s is not None:
            batches = TimedInput(batches, self.options.input_timeout_s)
        if self.own_input is not None:
            batches = self.own_input.agreed(batches, epoch_iterator.steps_per_epoch)
        elif not self.placer.is_local:
            batches = compared(batches)
        return DeviceIterator(
            batches,
            prefetch=self.prefetch,
            steps_per_epoch=epoch_iterator.steps_per_epoch,
            clock=self.reports.new_clock(),
            num_batches=epoch_iterator.num_batches,
            not_made=partial(_keras.uncount_steps, epoch_iterator),
            source_batches=epoch_iterator.data_adapter.num_batches,
            data_adapter=epoch_iterator.data_adapter,
            chosen_steps=None if call is None else call.auto_steps.of(call.model),
            epoch=_keras.known_of_epoch(epoch_iterator),
        )

    def host_batch(self, data: Any) -> Any:
        """Checks a batch of *_on_batch; the step function places it.

        Args:
            data: The host batch, `(x, y, sample_weight)`.
        """
        return self.placer.checked(data)

    def place_output(self, outputs: Any, layout: Any) -> Any:
        """Applies a layout to a layer's outputs.

        See `keras_tpu_dist.layout.annotations.place_output`.
        """
        return place_output(outputs, layout, self.layouts.mesh)

    def output_layout(self, path: str) -> Any:
        """The layout of a layer's output, by the running model.

        Args:
            path: The layer's path followed by `/output`.

        Returns:
            A `NamedSharding`, a list or dict of axes if the output is a structure, or `None`.
        """
        call = running_call()
        if call is None or call.runner is not self:
            return self.layouts.of_output(path, None)
        return self.layouts.of_output(path, call.member.placement)

    @property
    def own_input(self) -> OwnInput | None:
        """The separate input of every process with `input="per_process"`, else `None`."""
        return self.placer.own_input if isinstance(self.placer, ProcessRowsPlacer) else None


def _check_input(name: str, x: Any, may_be_empty: bool) -> None:
    if x is None:
        raise ValueError(_no_data(f"{name}(x=None)"))
    if may_be_empty:
        return
    for leaf in keras.tree.flatten(x):
        shape = getattr(leaf, "shape", None)
        if isinstance(shape, tuple) and shape and math.prod(shape[:1]) == 0:
            raise ValueError(_no_data(f"{name} on an array of shape {shape}"))


def _no_data(received: str) -> str:
    return message(
        "fit, evaluate and predict need data with at least one row.",
        received=f"{received}.",
        fix="Pass arrays, a generator, a keras.utils.PyDataset, a tf.data.Dataset or a torch "
        "DataLoader that yields at least one batch.",
    )
