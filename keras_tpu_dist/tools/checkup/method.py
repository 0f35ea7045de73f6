"""`strategy.check`."""

from typing import TYPE_CHECKING, Any

from keras_tpu_dist.common.checks import check_counts, check_model
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.training.protocol import StrategyPart

if TYPE_CHECKING:
    from keras_tpu_dist.tools.checkup.report import Check


class Checks(StrategyPart):
    """The method `check` of a strategy."""

    def check(
        self,
        model: Any = None,
        *,
        x: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
        sequence_length: int | None = None,
        minutes: float = 3.0,
    ) -> "Check":
        """Checks whether the devices compute correct results, and how fast they are.

        It compares products, collectives, random numbers, kernels and known errors of XLA with
        references. If you pass a model, it also compares a training step on all devices with the
        step on one device. With several processes, call it in all of them. Parts that do not fit
        into the time limit are left out, and listed. If you have set a `floatx` other than float32,
        build and train nothing in other threads meanwhile: Keras has one for all threads, and some
        parts set it to float32.

        Args:
            model: A built and compiled model. The check does not change it.
            x: Its input: arrays, or `jax.ShapeDtypeStruct` for random values. Defaults to the
                inputs that the model declares.
            y: The target: arrays or `jax.ShapeDtypeStruct`, too.
            sample_weight: Sample weights.
            batch_size: Rows of the step, for all devices together. The default is an uneven
                batch: two rows for each part and one more.
            sequence_length: The size of every open time axis of the inputs.
            minutes: The approximate time limit.

        Returns:
            A `Check`: `print` it, or look at `check.ok` and `check.problems`.

        Raises:
            ValueError: If an argument is wrong, the model has no step that can be compared, or the
                strategy is for a slice that is not attached.

        Example:

        >>> import keras_tpu_dist as ktd
        >>> check = ktd.TPUStrategy({"data": 4, "model": 2}).check()  # doctest: +SKIP
        >>> check.ok  # doctest: +SKIP
        True
        """
        if self.topology is not None:
            raise ValueError(
                message(
                    "Only attached devices can be checked.",
                    received={"topology": self.topology.name},
                    fix="Leave `topology` out; for a slice that you don't have, use dry_run.",
                )
            )
        if model is not None:
            check_model(model, "check")
        _check_minutes(minutes)
        if batch_size is not None:
            check_counts("check", self.num_replicas_in_sync, batch_size=batch_size)
        if sequence_length is not None:
            check_counts("check", sequence_length=sequence_length)
        # Imported here so that `import keras_tpu_dist` stays fast.
        from keras_tpu_dist.tools.checkup.batch import Given
        from keras_tpu_dist.tools.checkup.prepared import why_not
        from keras_tpu_dist.tools.checkup.run import run_check, steps

        if model is not None and (why := why_not(model)):
            raise ValueError(
                message(
                    "A check of a model compares one of its training steps.",
                    received=f"model {model.name!r}: {why}.",
                    fix="Build the model, compile it without run_eagerly, or leave it out.",
                )
            )
        given = Given(x, y, sample_weight, batch_size, sequence_length)
        return run_check(self, steps(model, given), minutes)


def _check_minutes(minutes: Any) -> None:
    number = isinstance(minutes, (int, float)) and not isinstance(minutes, bool)
    if not number or not 0 < minutes < float("inf"):
        raise ValueError(
            message(
                "minutes is the time limit of a check, a number above 0.",
                received={"minutes": minutes},
                fix="Write for example minutes=3.",
            )
        )
