"""Operations that models with frozen parts need, beside those that their compiled steps execute.

    python benchmarks/frozen.py

For each model: the operations of matrix products that model FLOPs utilisation counts; three passes
of each product, as for a model that is trained as a whole; the products in the train step; and all
operations of the compiled step, also those that are no products. The last column has the products
of the step with remat, which computes again what no formula counts. Runs on a CPU.
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import jax
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.plain import plain_operations
from keras_tpu_dist.programs.products import operations, products_of
from keras_tpu_dist.tools.dryrun.build import Subject, described
from keras_tpu_dist.training.flops import forward_pass, model_flops
from keras_tpu_dist.training.step import jitted_step

L = keras.layers
ROWS, TIME, WORDS, WIDTH = 8, 32, 64, 64


def gpt(depth=2):
    tokens = keras.Input((TIME,), dtype="int32")
    x = L.Embedding(WORDS, WIDTH, name="embedding")(tokens)
    for i in range(depth):
        h = L.LayerNormalization()(x)
        x = x + L.MultiHeadAttention(4, WIDTH // 4, name=f"attention_{i}")(
            h, h, use_causal_mask=True
        )
        h = L.Dense(4 * WIDTH, activation="gelu", name=f"up_{i}")(L.LayerNormalization()(x))
        x = x + L.Dense(WIDTH, name=f"down_{i}")(h)
    return keras.Model(tokens, L.Dense(WORDS, name="head")(x), name="gpt")


def with_lora():
    model = gpt()
    for layer in _keras.flatten_layers(model):
        if isinstance(layer, (L.Dense, L.EinsumDense)):
            layer.enable_lora(2)
        for variable in _keras.own_variables(layer):
            variable.trainable = "lora" in variable.name
    return model


def training(model, *names):
    """The model, of whose layers those with such names train."""
    for layer in model.layers:
        layer.trainable = layer.name.startswith(names)
    return model


def frozen(model, *names):
    """The model, of whose layers those with such names are frozen."""
    for layer in model.layers:
        layer.trainable = not layer.name.startswith(names)
    return model


MODELS = {
    "all of it trains": gpt,
    "LoRA of rank 2": with_lora,
    "a frozen base with a new head": lambda: training(gpt(), "head"),
    "a frozen embedding": lambda: frozen(gpt(), "embedding"),
    "a frozen middle": lambda: frozen(gpt(3), "attention_1", "up_1", "down_1"),
    "every second layer frozen": lambda: frozen(gpt(), "up", "attention_1"),
}


def compiled(make):
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model


def counted(make, remat=None):
    """The operations of a model's train step: see the table's columns.

    Returns:
        What the formula counts, three passes, the products that the step executes, and all
        operations of the compiled step.
    """
    strategy = ktd.TPUStrategy({"data": 1}, devices=jax.devices()[:1], remat=remat)
    with described(Subject(lambda: compiled(make), strategy, ROWS), []) as (model, batch):
        formula = model_flops(model, batch, "train").full
        with plain_operations():
            forward, arguments = forward_pass(model, batch, training=True)
            once = operations(products_of(jax.make_jaxpr(forward)(*arguments), 0))
            placed = strategy.placer.describe(keras.utils.pack_x_y_sample_weight(*batch))
            groups = _keras.state_groups(model)
            shardings = _keras.state_shardings(model, "train")
            state = tuple(
                [
                    jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding)
                    for v, sharding in zip(group, layouts, strict=True)
                ]
                for group, layouts in zip(groups, shardings, strict=True)
            )
            step = jitted_step(model, "train", strategy.placer, False)
            executed = operations(products_of(step.trace(state, placed).jaxpr, 0))
            cost = step.lower(state, placed).compile().cost_analysis()
    return formula, 3 * once, executed, cost["flops"]


def main():
    ktd.simulate(1)
    print("model | counted | three passes | executed | all, compiled | executed, with remat")
    for name, make in MODELS.items():
        formula, thrice, executed, everything = counted(make)
        _, _, again, _ = counted(make, remat={"up_*": "full", "attention_*": "full"})
        cells = [f"{n / 1e6:.1f} M" for n in (formula, thrice, executed, everything, again)]
        print(" | ".join([name, *cells]))


if __name__ == "__main__":
    main()
