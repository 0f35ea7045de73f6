"""Programs of train steps, and what they send."""

import re
from collections import Counter

from keras_tpu_dist.tools import hlo
from keras_tpu_dist.tools.hlo.wire import Wire
from keras_tpu_dist.training import loop


def compiled(build, optimizer="adam"):
    def make():
        model = build()
        model.compile(optimizer, "mse")
        return model

    return make


def program(model, strategy, x, y):
    """The text of the compiled train step."""
    with strategy.scope():
        model.train_on_batch(x, y)  # builds the optimizer and places everything
        groups = dict.fromkeys(
            ["trainable_variables", "non_trainable_variables", "optimizer_variables",
             "metrics_variables"], True)  # fmt: skip
        with strategy.runner.running(strategy, model, "train_on_batch", {"x": x, "y": y}):
            state = model._get_jax_state(**groups)
            step = loop.jitted_step(model, "train", strategy.placer, donate=False)
            return step.lower(state, strategy.placer.place((x, y))).compile().as_text()


def collectives(text, kind="all-reduce"):
    """The replica groups of each collective of a kind."""
    lines = re.findall(rf"= .* {kind}(?:-start)?\(.*", text)
    # Newer versions of XLA write them as an iota, "[2,4]<=[8]", or as axes of a mesh.
    iota = r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    groups = rf"replica_groups=(mesh\[.*?\] \{{.*?\}}|\{{\{{.*?\}}\}}|{iota}|\S+)"
    return [re.search(groups, line)[1] for line in lines]


KINDS = ("all-gather", "reduce-scatter", "collective-permute", "all-to-all")


def sent(text, mesh, axis):
    """How many collectives of each kind and phase cross an axis of the mesh, loops counted."""
    found: Counter = Counter()
    for each in hlo.analyze(text, wire=Wire(tuple(mesh.items()))).collectives:
        if any(name.startswith(axis) for name in each.axes):
            found[each.kind, each.phase] += each.times
    return found
