"""What changes nothing: the acts of the laws.

An act is done to a run before its training or in the middle of it. It leaves a model that must go
on as the one before would have. Whatever makes another model makes it on the run's other mesh, of
weights drawn from another seed, after models whose layers take the names that Keras gives.
"""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

import keras_tpu_dist as ktd


@dataclass(frozen=True)
class Act:
    """Something that changes nothing.

    Attributes:
        name: Its name.
        apply: Does it to a run.
        when: "start", "middle", or "anywhere".
        in_keras: The act that plain Keras does in its place, so that its own faults can be told
            apart: itself, or "nothing" if Keras has no such act.
        checkpoint: Whether a `Checkpoint` must have been among the callbacks before.
        only: The kinds of subjects that it is for; all, if none.
    """

    name: str
    apply: Callable[[Any], None]
    when: str
    in_keras: str
    checkpoint: bool
    only: tuple[str, ...]

    def fits(self, subject, place: str) -> bool:
        """Whether it can be done to a subject, at the start or in the middle."""
        fits = not self.only or subject.kind in self.only
        return fits and self.when in (place, "anywhere") and self.name not in subject.without


ACTS: dict[str, Act] = {}


def act(
    when: str = "anywhere",
    of_keras: bool = False,
    checkpoint: bool = False,
    only: tuple[str, ...] = (),
    like: str = "nothing",
) -> Callable:
    """Adds a function to the acts. Plain Keras does the same, or what it is `like`."""

    def added(function: Callable) -> Callable:
        name = function.__name__
        ACTS[name] = Act(name, function, when, name if of_keras else like, checkpoint, only)
        return function

    return added


@act(of_keras=True)
def nothing(run):
    """The plain law: a mesh changes nothing."""


@act(of_keras=True)
def saved_as_keras(run):
    path = run.path("model.keras")
    run.model.save(path)
    run.replace(lambda: keras.saving.load_model(path, safe_mode=False))


@act("start", of_keras=True)
def saved_as_weights(run):
    path = run.path("model.weights.h5")
    run.model.save_weights(path)
    run.replace(run.new_model)
    run.model.load_weights(path)


@act("start", of_keras=True)
def saved_as_shards(run):
    path = run.path("model.weights.json")
    largest = max(v.value.nbytes for v in run.model.variables)
    run.model.save_weights(path, max_shard_size=2 * largest / 2**30)
    run.replace(run.new_model)
    run.model.load_weights(path)


@act(of_keras=True)
def restored_from_keras_file(run):
    path = run.path("model.keras")
    run.model.save(path)
    run.replace(run.new_model)
    run.restore(path)


@act("start", of_keras=True)
def restored_from_weights_file(run):
    path = run.path("model.weights.h5")
    run.model.save_weights(path)
    run.replace(run.new_model)
    run.restore(path)


OF_OPTIMIZERS = ("optimizers", "schedules")


@act("start")
def restored_from_a_loop(run):
    """A checkpoint of the model alone."""
    with ktd.LoopCheckpoint(run.path("loop"), run.model) as saved:
        saved.save(1)
    run.replace(run.new_model)
    ktd.restore(run.model, run.path("loop"))


@act("start", of_keras=True)
def restored_from_another_optimizer(run):
    """A file with the slots of another optimizer: ours begins as on weights that were loaded."""
    _compile_otherwise(run)
    run.model.optimizer.build(run.model.trainable_variables)
    path = run.path("other.keras")
    run.model.save(path)
    run.replace(run.new_model)
    run.restore(path)


@act("start", only=OF_OPTIMIZERS)
def fine_tuned(run):
    """The same from a checkpoint of a fit, whose rate of 0 left the weights as they were."""
    _trained_otherwise(run)
    run.replace(run.new_model)
    ktd.restore(run.model, run.path("other"))


@act("start", only=OF_OPTIMIZERS)
def fine_tuned_with_a_built_optimizer(run):
    """The slots were made of weights that are then replaced."""
    _trained_otherwise(run)
    run.replace(run.new_model)
    run.model.optimizer.build(run.model.trainable_variables)
    ktd.restore(run.model, run.path("other"))


def _compile_otherwise(run):
    other = keras.optimizers.Adam if "Adagrad" in run.case.subject else keras.optimizers.Adagrad
    run.model.compile(other(0.0), run.model.loss)


def _trained_otherwise(run):
    _compile_otherwise(run)
    saved = ktd.callbacks.Checkpoint(run.path("other"))
    with run.scope():
        run.model.fit(run.x, run.y, batch_size=run.batch, verbose=0, callbacks=[saved])


@act("middle", checkpoint=True)
def resumed(run):
    """`Checkpoint` loads what it saved; `fit` begins at epoch 0 and goes on where it was."""
    run.replace(run.new_model)
    run.resumes = True


@act("middle", checkpoint=True)
def restored(run):
    run.replace(run.new_model)
    ktd.restore(run.model, run.path("checkpoints"))


@act(of_keras=True)
def pickled(run):
    data = pickle.dumps(run.model)
    run.replace(lambda: pickle.loads(data))


@act(of_keras=True)
def copied(run):
    run.replace(lambda: copy.deepcopy(run.model))


@act("start", of_keras=True)
def cloned(run):
    weights = run.model.get_weights()
    run.replace(lambda: run.compiled(keras.models.clone_model(run.model)))
    run.model.set_weights(weights)
    run.freeze()


@act()
def converted(run):
    run.replace(lambda: ktd.convert(run.model))


@act()
def converted_twice(run):
    run.replace(lambda: ktd.convert(ktd.convert(run.model)))


@act()
def moved(run):
    """The same model goes on under another strategy."""
    run.move()


@act(like="evaluated")
def moved_and_back(run):
    run.move()
    run.look()
    run.move()


@act(of_keras=True)
def evaluated(run):
    run.look()


@act()
def failed(run):
    """Calls that end in an error lose nothing."""
    run.fail()


@act("middle", of_keras=True)
def cleared(run):
    keras.utils.clear_session(free_memory=False)


@act("middle", of_keras=True)
def compiled_again(run):
    model = run.model
    run.compiled(model, optimizer=model.optimizer)


@act(of_keras=True)
def frozen_and_thawed(run):
    model = run.model
    flags = [(layer, layer.trainable) for layer in model._flatten_layers()]
    weights = [(weight, weight.trainable) for weight in model.weights]
    model.trainable = False
    with run.scope():
        model.predict_on_batch(run.first_batch()[0])
    for thing, flag in (*flags, *weights):
        thing.trainable = flag
    run.freeze()


@act(of_keras=True)
def weights_set(run):
    run.model.set_weights(run.model.get_weights())


@act(of_keras=True)
def built_early(run):
    """The optimizer's slots exist before `fit` would make them."""
    if not run.model.optimizer.built:
        run.model.optimizer.build(run.model.trainable_variables)
