"""A plan splits a model: explain it, lint it, edit it and draw it.

Run it with `python examples/layouts.py [FOLDER]`; with a folder, it saves the
pictures there.
"""

import sys

import keras_tpu_dist as ktd

ktd.simulate(8)

import keras
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist.show.pictures import picture_of_tensor

WIDTH, HEADS = 64, 8


def block():
    x = keras.Input((16, WIDTH))
    h = keras.layers.LayerNormalization()(x)
    h = x + keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(h, h)
    f = keras.layers.LayerNormalization()(h)
    f = keras.layers.Dense(4 * WIDTH, activation="gelu", name="up")(f)
    return keras.Model(x, h + keras.layers.Dense(WIDTH, name="down")(f), name="block")


strategy = ktd.TPUStrategy({"data": 2, "model": 4}, "tensor_parallel")
with strategy.scope():
    model = block()
    model.compile("adam", "mse")

print(strategy.explain(model))
print(strategy.explain(model, "…/query/kernel"))
print(strategy.lint(model, batch_size=30))

# The same plan as plain rules, with an additional rule before them.
rules = ktd.LayoutRules([("up/bias", ()), *strategy.plan(model).rules().rules])
edited = ktd.TPUStrategy({"data": 2, "model": 4}, rules)
print(edited.explain(model, "up/bias"))

cube = ktd.TPUStrategy({"data": 2, "model": 2, "expert": 2})
three = NamedSharding(cube.mesh, PartitionSpec("expert", "data", "model"))
four = NamedSharding(cube.mesh, PartitionSpec("data", None, "expert", "model"))
pictures = {
    "mesh": cube.show(),
    "tensor_3d": picture_of_tensor("experts/up", (4, 6, 8), three),
    "tensor_4d": picture_of_tensor("activations", (2, 4, 6, 8), four),
    "model": strategy.show(model),
}
for name, picture in pictures.items():
    print(picture)
    if len(sys.argv) > 1:
        picture.save(f"{sys.argv[1]}/{name}.svg")
