"""Dry runs of `generate`: what a token takes, and the least that it could."""

import jax
import keras
import pytest
from helpers import compiled
from language_model import Draw, LanguageModel

import keras_tpu_dist as ktd
from keras_tpu_dist.programs import passes

SHAPE = jax.ShapeDtypeStruct((1, 256), "int32")
INPUTS = {"token_ids": SHAPE, "padding_mask": SHAPE}


class Declared(LanguageModel):
    """A model whose call takes what its `generate_step` takes, as KerasHub's do."""

    def call(self, inputs):
        return super().call(inputs["token_ids"])


def build():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    model = Declared(vocabulary=512, width=256, blocks=2, heads=8, shared=4)
    keras.config.set_dtype_policy(before)
    return compiled(model, sampler=Draw(1))


def strategy(topology="v5e:2x4"):
    return ktd.TPUStrategy({"data": 2, "model": 4}, "tensor_parallel", topology=topology)


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4", "v5p:2x2x2"])
def test_a_report_of_one_token(topology):
    run = ktd.dry_run(build, strategy(topology), x=INPUTS, batch_size=8, mode="generate")
    assert run.fits
    assert run.tokens == 8
    assert run.tokens_per_second == pytest.approx(8 / run.estimate.step)
    assert run.samples_per_second is None
    # Kernels and the tied table of words, in bfloat16, a quarter on each device; and the cache.
    weights = 2 * (256 * (8 + 4 + 4 + 8) * 32 + 2 * 256 * 512) + 512 * 256
    cache = 8 // 2 * 2 * 2 * 256 * (4 // 4) * 32
    small = 2 * (5 * 256 + 512 + 16 * 32) * 2
    least = 2 * (weights / 4 + cache)
    limit = run.token_limit_s * ktd.Topology.parse(topology).hbm_bandwidth
    assert least <= limit <= least + 2 * small
    assert min(run.prompt_s, run.estimate.step) > run.token_limit_s
    sums = [c for c in run.cost.collectives if c.kind == "all-reduce" and c.bytes > 1000]
    assert len(sums) == 2 * 2 + 1
    text = str(run)
    for words in ("time per token", "prompts, before the first token", "read once"):
        assert words in text, text
    assert "generate step" in text.splitlines()[0]
    assert set(run.to_dict()) >= {"prompt_s", "token_limit_s"}


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_a_cache_is_not_copied(monkeypatch):
    moved = []
    for _ in range(2):
        run = ktd.dry_run(build, strategy(), x=INPUTS, batch_size=8, mode="generate")
        moved.append(run.cost.hbm_bytes)
        monkeypatch.setattr(passes, "PASSES", ())
    cache = 2 * 8 // 2 * 2 * 2 * 256 * 32
    assert moved[0] < moved[1] - 4 * cache


def test_a_model_that_does_not_generate():
    def dense():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ValueError, match=r"generate_step\(\).*Received.*Sequential.*CausalLM"):
        ktd.dry_run(dense, strategy(), batch_size=8, mode="generate")
