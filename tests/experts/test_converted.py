"""Mixtures of experts that were converted: equal to Keras's on one device, on every mesh."""

import experts_of_keras_hub as hub
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import assert_close, built
from jax import lax

import keras_tpu_dist as ktd
from keras_tpu_dist.programs.experts import routed

MESHES = {
    "data8": ({"data": 8}, None, {}),
    "data4_model2": ({"data": 4, "model": 2}, "tensor_parallel", {}),
    "data2_fsdp2_model2": ({"data": 2, "fsdp": 2, "model": 2}, "tensor_parallel", {}),
    "fsdp8": ({"fsdp": 8}, "fsdp", {}),
    "expert": (
        {"data": 2, "expert": 4},
        ktd.LayoutRules([("experts/(gate|up|gate_up|down).*", ("expert",))]),
        {"data_axes": ("data", "expert")},
    ),
    "expert beside": (
        {"data": 2, "expert": 4},
        ktd.LayoutRules([("experts/(gate|up|gate_up|down).*", ("expert",))]),
        {},
    ),
}


def data(rows):
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 6, 8)).astype("float32")
    return x, rng.normal(size=(rows, 6, 3)).astype("float32")


def random_weights(model, seed=0):
    rng = np.random.default_rng(seed)
    model.set_weights([rng.normal(size=w.shape) * 0.4 for w in model.weights])
    return model


def stock(kind, **options):
    return built(lambda: random_weights(hub.model_of(kind, **options)), None)


def converted(kind, strategy, route=None, **options):
    def build():
        model = random_weights(hub.model_of(kind, **options))
        if route is not None:
            route(model)
        return ktd.convert(model)

    return built(build, strategy)


def but_for(names, *quick):
    """Parameters that are slow, but for some."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.fixture
def rows_computed(monkeypatch):
    """How many rows each traced layer computes on one device."""
    found, on_device = [], routed._on_device

    def noted(compute, tokens, experts, whole, indices, count, first, dtype):
        found.append(indices.shape[0] * min(indices.shape[1], count))
        return on_device(compute, tokens, experts, whole, indices, count, first, dtype)

    monkeypatch.setattr(routed, "_on_device", noted)
    return found


def trained(model, rows=(16, 13)):
    """Losses, predictions and weights after two steps: what differs in gradients differs here."""
    found = []
    for n in rows:
        x, y = data(n)
        found += [model.train_on_batch(x, y), model.predict(x, verbose=0)]
    return [*found, *(w.numpy() for w in model.weights)]


@pytest.mark.parametrize("kind", but_for(hub.KINDS, "mixtral"))
def test_only_the_chosen_experts_are_computed(kind, rows_computed):
    model = converted(kind, None)
    assert_close(trained(model), trained(stock(kind)))
    assert rows_computed
    # of tokens, twice
    assert {rows // 6 // 2 for rows in rows_computed} <= {16, 13}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", but_for(MESHES, "data4_model2"))
@pytest.mark.parametrize("kind", but_for(hub.KINDS, "gpt_oss"))
def test_meshes_equal_one_device(kind, mesh, rows_computed):
    axes, layout, options = MESHES[mesh]
    strategy = ktd.TPUStrategy(axes, layout, **options)
    model = converted(kind, strategy)
    assert_close(trained(model), trained(stock(kind)))
    assert rows_computed


ragged_dot = lax.ragged_dot


@jax.custom_vjp
def _poisoned(rows, kernels, sizes):
    return _without_others(ragged_dot(rows, kernels, sizes), sizes)


def _without_others(rows, sizes):
    return jnp.where(jnp.arange(len(rows))[:, None] < jnp.sum(sizes), rows, jnp.nan)


def _poisoned_backward(residuals, gradient):
    rows, kernels, sizes = residuals
    own = jnp.arange(len(rows))[:, None] < jnp.sum(sizes)
    # The kernel for gradients of kernels reads no other rows.
    rows, gradient = jnp.where(own, rows, 0), jnp.where(own, gradient, 0)
    _, back = jax.vjp(lambda r, k: ragged_dot(r, k, sizes), rows, kernels)
    of_rows, of_kernels = back(gradient)
    return _without_others(of_rows, sizes), of_kernels, None


_poisoned.defvjp(lambda *given: (_poisoned(*given), given), _poisoned_backward)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_rows_of_other_devices_are_not_read(kind, monkeypatch):
    monkeypatch.setattr(
        routed.lax, "ragged_dot", lambda rows, kernels, sizes, **_: _poisoned(rows, kernels, sizes)
    )
    model = converted(kind, ktd.TPUStrategy(*MESHES["data4_model2"][:2]))
    assert_close(trained(model), trained(stock(kind)))


def chosen_by(*preferred):
    """Makes the routers of a model send every token to these experts."""

    def route(model):
        for layer in model.layers:
            if hasattr(layer, "router"):
                bias = np.zeros(8)
                bias[list(preferred)] = 9
                layer.router.bias.assign(bias)

    return route


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", but_for(["data4_model2", "data2_fsdp2_model2", "expert", None], "expert")
)
@pytest.mark.parametrize("preferred", [(0,), (5, 2)], ids=["all to one", "all to two"])
def test_uneven_routing(mesh, preferred):
    route = chosen_by(*preferred)
    reference = stock("gpt_oss")
    route(reference)
    axes, layout, options = MESHES[mesh] if mesh else (None, None, {})
    strategy = ktd.TPUStrategy(axes, layout, **options) if mesh else None
    model = converted("gpt_oss", strategy, route)
    assert_close(trained(model), trained(reference))


def test_experts_lie_in_parts_and_no_device_gathers_them():
    strategy = ktd.TPUStrategy(*MESHES["data4_model2"][:2])
    model = converted("mixtral", strategy)
    x, _ = data(16)
    model.predict(x, verbose=0)
    bank = model.get_layer("mixture_0").experts
    assert bank.up.value.sharding.spec[0] == "model"
    call = jax.jit(lambda weights, x: model.stateless_call(*weights, x)[0])
    with strategy.scope():
        text = call.lower(state(model), x).compile().as_text()
    assert "f32[8,8,6]" not in text  # all experts' kernels


def state(model):
    return (
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
    )


def test_in_bfloat16_chosen_experts_are_as_near_as_all_are():
    x, _ = data(16)
    exact = stock("qwen").predict(x, verbose=0)
    all_of_them = stock("qwen", dtype="mixed_bfloat16").predict(x, verbose=0)
    chosen = converted("qwen", None, dtype="mixed_bfloat16").predict(x, verbose=0)
    assert np.abs(chosen - exact).max() <= 1.5 * np.abs(all_of_them - exact).max()


@pytest.mark.parametrize("kind", ["mixtral", "gemma"])
def test_files_keep_it_and_load_without_it(kind, tmp_path, rows_computed):
    model = converted(kind, None)
    x, _ = data(13)
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    rows_computed.clear()
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(loaded.predict(x, verbose=0), expected)
    assert rows_computed
    plain = stock(kind)
    model.save_weights(tmp_path / "model.weights.h5")
    plain.load_weights(tmp_path / "model.weights.h5")
    assert_close(plain.predict(x, verbose=0), expected)


@pytest.mark.parametrize("inner", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_recomputed_is_converted_and_stays_recomputed(inner, rows_computed):
    def build():
        model = random_weights(hub.model_of("mixtral", layers=1))
        ktd.remat(model, {"mixture_0/experts" if inner else "mixture_0": "full"})
        return ktd.convert(model)

    model = built(build, ktd.TPUStrategy(*MESHES["data4_model2"][:2]))
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        checkpoint = jax.checkpoint
        patch.setattr(jax, "checkpoint", lambda *a, **k: calls.append(1) or checkpoint(*a, **k))
        found = trained(model, rows=(13,))
    assert_close(found, trained(stock("mixtral", layers=1), rows=(13,)))
    assert rows_computed
    assert calls


@pytest.mark.slow
@pytest.mark.parametrize("how", but_for(["remat", "scan"], "scan"))
def test_beside_other_marks(how, rows_computed):
    def marked(model):
        if how == "scan":
            ktd.scan_blocks(model)
        else:
            ktd.remat(model, {"mixture_*": "full"})

    def build():
        model = ktd.convert(random_weights(hub.model_of("gpt_oss")))
        marked(model)
        return model

    model = built(build, ktd.TPUStrategy(*MESHES["data4_model2"][:2]))
    assert_close(trained(model), trained(stock("gpt_oss")))
    assert rows_computed


@keras.saving.register_keras_serializable("test_converted")
class Soft(hub.Mixtral):
    """Every expert counts, so every expert is computed."""

    def weights_for(self, logits):
        return keras.ops.softmax(logits, axis=-1)


@keras.saving.register_keras_serializable("test_converted")
class Mixed(hub.Mixtral):
    """What an expert makes of a token depends on other tokens."""

    def call(self, x, training=None):
        logits = self.router(keras.ops.reshape(x, (-1, x.shape[-1])))
        flat = keras.ops.reshape(x, (-1, x.shape[-1]))
        of_all = self.experts(flat)
        of_all = of_all - keras.ops.mean(of_all, axis=1, keepdims=True)
        weights = keras.ops.transpose(self.weights_for(logits), (1, 0))
        z = keras.ops.sum(of_all * weights[:, :, None], axis=0)
        return keras.ops.reshape(z, (-1, x.shape[1], x.shape[2])), logits


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Soft, Mixed])
def test_what_needs_all_experts_computes_all(kind, monkeypatch, rows_computed):
    monkeypatch.setitem(hub.KINDS, "other", kind)
    model = converted("other", None)
    assert_close(trained(model), trained(stock("other")))
    assert not rows_computed


def test_a_single_token_computes_all_and_says_so(caplog):
    model, reference = converted("mixtral", None, time=1), stock("mixtral", time=1)
    x, _ = data(1)
    assert_close(model.predict(x[:, :1], verbose=0), reference.predict(x[:, :1], verbose=0))
    assert "computes all experts for every token" in caplog.text
