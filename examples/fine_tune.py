"""Trains an encoder on some digits, and fine-tunes it on others, on another mesh.

    python examples/fine_tune.py                             # train, fine-tune, loss of each epoch
    python examples/fine_tune.py --lora 4                    # the encoder by LoRA of rank 4
    python examples/fine_tune.py --directory runs            # save the checkpoints there
    python examples/fine_tune.py --directory runs --validate # evaluate these checkpoints

The encoder learns the digits 0 to 5 of scikit-learn on eight devices, which split its weights, and
is saved in a checkpoint. The new model classifies 6 to 9 and has another head, so the checkpoint is
loaded without the old head, on a mesh of four replicas of two devices each. First only the head
trains, so that the gradients of its random weights do not change the encoder; then everything.
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
    """Images and classes of some digits, for training and for validation."""
    from sklearn.datasets import load_digits

    images, target = load_digits(return_X_y=True)
    chosen = np.isin(target, digits)
    x, y = images[chosen].astype("float32") / 16, target[chosen] - digits[0]
    validation = np.arange(len(x)) % 4 == 0
    return (x[~validation], y[~validation]), (x[validation], y[validation])


def build(classes, lora=0):
    """An encoder with layers that differ between training and validation."""
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
    """Adds LoRA to the encoder's kernels: two small matrices each, trained in their place."""
    for layer in model.get_layer("encoder").layers:
        if isinstance(layer, keras.layers.Dense):
            layer.enable_lora(rank)
    return model


def compiled(model, rate):
    """Compiles a model; do this again after freezing or unfreezing weights."""
    model.compile(
        keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def fit(model, digits, epochs, name, callbacks=()):
    """Trains, prints the loss of each epoch, and returns the losses."""
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
    """Trains the encoder with its first head."""
    keras.utils.set_random_seed(0)
    with ktd.TPUStrategy({"fsdp": 8}, "fsdp").scope():
        model = compiled(build(len(OLD)), 1e-3)
    return fit(model, OLD, epochs, "0 to 5", [ktd.callbacks.Checkpoint(directory)])


def fine_tune(source, directory, epochs, lora=0):
    """Fine-tunes the checkpoint with another head, first only the head. Returns the losses."""
    keras.utils.set_random_seed(1)
    with ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel").scope():
        model = build(len(NEW))
        print(ktd.restore(model, source, exclude=["*head*"]))
        ktd.freeze(model, "encoder/*")
        losses = fit(compiled(model, 1e-2), NEW, epochs, "6 to 9, head")
        if lora:
            ktd.freeze(with_lora(model, lora), "*", exclude=["*lora*", "head/*"])
        else:
            ktd.freeze(model, [])
        print("trained:", ", ".join(weight.path for weight in model.trainable_weights))
        saved = ktd.callbacks.Checkpoint(directory)
        return losses + fit(compiled(model, 1e-3), NEW, epochs, "6 to 9, all", [saved])


def validate(directory, lora=0):
    """Evaluates the fine-tuned model on one device."""
    model = compiled(build(len(NEW), lora), 1e-3)
    ktd.restore(model, directory)
    loss, accuracy = model.evaluate(*load(NEW)[1], batch_size=BATCH, verbose=0)
    print(f"6 to 9, validation: loss {loss:.4f} (accuracy {accuracy:.3f})")
    return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--epochs", type=int, default=10, help="epochs of each of the three trainings"
    )
    parser.add_argument(
        "--lora", type=int, default=0, help="rank of LoRA; 0 trains the weights themselves"
    )
    parser.add_argument("--directory", help="directory of the checkpoints")
    parser.add_argument(
        "--validate", action="store_true", help="only evaluate the checkpoints in --directory"
    )
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
