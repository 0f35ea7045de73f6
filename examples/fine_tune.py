"""An encoder trained on some digits is fine-tuned to tell others, on another mesh.

    python examples/fine_tune.py                             # train, fine-tune, loss of each epoch
    python examples/fine_tune.py --lora 4                    # the encoder by LoRA of rank 4
    python examples/fine_tune.py --directory runs            # keep the checkpoints
    python examples/fine_tune.py --directory runs --validate # only the loss of what is there

The encoder learns 0 to 5 of scikit-learn's digits on eight devices that split its weights, and a
checkpoint holds it. The new model tells 6 to 9, so it has a head of its own: the checkpoint is
loaded without the old one, on a mesh of four replicas of two devices each. First the head trains
alone, so that its first, random gradients leave the encoder as it is, then all of it.
"""

import argparse
import pathlib
import tempfile

import keras_tpu_dist as ktd
import keras
import numpy as np

OLD, NEW = range(6), range(6, 10)
BATCH = 50


def load(digits):
    """Images and classes of some of the digits: for training, and for validation."""
    from sklearn.datasets import load_digits

    images, target = load_digits(return_X_y=True)
    chosen = np.isin(target, digits)
    x, y = images[chosen].astype("float32") / 16, target[chosen] - digits[0]
    validation = np.arange(len(x)) % 4 == 0
    return (x[~validation], y[~validation]), (x[validation], y[validation])


def build(classes, lora=0):
    """Dropout and BatchNormalization do one thing in training, another in validation."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.Sequential(
                [
                    keras.Input((64,)),
                    keras.layers.Dense(128, activation="relu", name="first"),
                    keras.layers.BatchNormalization(name="norm"),
                    keras.layers.Dropout(0.2),
                    keras.layers.Dense(128, activation="relu", name="second"),
                ],
                name="encoder",
            ),
            keras.layers.Dense(classes, activation="softmax", name="head"),
        ],
        name="classifier",
    )
    return with_lora(model, lora) if lora else model


def with_lora(model, rank):
    """The encoder's kernels get a product of two small matrices to train in their place."""
    for layer in model.get_layer("encoder").layers:
        if isinstance(layer, keras.layers.Dense):
            layer.enable_lora(rank)
    return model


def compiled(model, rate):
    """A model that is ready to train with what trains of it now."""
    model.compile(
        keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def fit(model, digits, epochs, name, callbacks=()):
    """Trains, says the loss of each epoch, and returns them."""
    training, validation = load(digits)
    logs = model.fit(
        *training,
        batch_size=BATCH,
        epochs=epochs,
        validation_data=validation,
        callbacks=list(callbacks),
        verbose=0,
    ).history
    for epoch in range(epochs):
        print(
            f"{name}, epoch {epoch + 1}: loss {logs['loss'][epoch]:.4f}, validation "
            f"{logs['val_loss'][epoch]:.4f} (accuracy {logs['val_accuracy'][epoch]:.3f})"
        )
    return logs["val_loss"]


def pretrain(directory, epochs):
    """The encoder and its first head."""
    keras.utils.set_random_seed(0)
    with ktd.TPUStrategy({"fsdp": 8}, "fsdp").scope():
        model = compiled(build(len(OLD)), 1e-3)
    return fit(model, OLD, epochs, "0 to 5", [ktd.callbacks.Checkpoint(directory)])


def fine_tune(source, directory, epochs, lora=0):
    """The checkpoint without its head, with another one: its losses, head alone first."""
    keras.utils.set_random_seed(1)
    with ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel").scope():
        model = build(len(NEW))
        print(ktd.restore(model, source, exclude=["*head*"]))
        ktd.freeze(model, "encoder/*")
        losses = fit(compiled(model, 1e-2), NEW, epochs, "6 to 9, head")
        if lora:
            print(ktd.freeze(with_lora(model, lora), "*", exclude=["*lora*", "head/*"]))
        else:
            print(ktd.freeze(model, []))
        saved = ktd.callbacks.Checkpoint(directory)
        return losses + fit(compiled(model, 1e-3), NEW, epochs, "6 to 9, all", [saved])


def validate(directory, lora=0):
    """The loss of what was fine-tuned, on one device."""
    model = compiled(build(len(NEW), lora), 1e-3)
    ktd.restore(model, directory)
    loss, accuracy = model.evaluate(*load(NEW)[1], batch_size=BATCH, verbose=0)
    print(f"6 to 9, validation: loss {loss:.4f} (accuracy {accuracy:.3f})")
    return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10, help="of each of the three trainings")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 for the weights themselves")
    parser.add_argument("--directory", help="where the checkpoints are kept")
    parser.add_argument("--validate", action="store_true", help="of a directory; trains nothing")
    arguments = parser.parse_args()
    if arguments.validate and not arguments.directory:
        parser.error("--validate needs the --directory of an earlier run")
    ktd.simulate(8)
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(arguments.directory or folder)
        if not arguments.validate:
            pretrain(directory / "old", arguments.epochs)
            fine_tune(directory / "old", directory / "new", arguments.epochs, arguments.lora)
        validate(directory / "new", arguments.lora)


if __name__ == "__main__":
    main()
