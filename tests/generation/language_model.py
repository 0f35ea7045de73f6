"""A language model with the methods of KerasHub's, small, and its loop over tokens as theirs."""

import jax
import keras
from keras import ops


class Attention(keras.layers.Layer):
    """Attention of some heads on keys that they may share, with a cache, as in KerasHub."""

    def __init__(self, heads, shared, size, **kwargs):
        super().__init__(**kwargs)
        self.heads, self.shared, self.size = heads, shared, size
        self.query = keras.layers.EinsumDense("btd,dhk->bthk", (None, heads, size))
        self.key = keras.layers.EinsumDense("btd,dhk->bthk", (None, shared, size))
        self.value = keras.layers.EinsumDense("btd,dhk->bthk", (None, shared, size))
        self.out = keras.layers.EinsumDense("bthk,hkd->btd", (None, heads * size))

    def call(self, x, cache=None, at=0):
        query, key, value = self.query(x), self.key(x), self.value(x)
        if cache is not None:
            key = ops.slice_update(cache[:, 0], [0, at, 0, 0], key)
            value = ops.slice_update(cache[:, 1], [0, at, 0, 0], value)
            cache = ops.stack((key, value), axis=1)
        groups = self.heads // self.shared
        key, value = (ops.repeat(each, groups, axis=2) for each in (key, value))
        scores = ops.einsum("bthk,bshk->bhts", query, key) / self.size**0.5
        places = ops.arange(ops.shape(x)[1]) + at
        seen = ops.arange(ops.shape(key)[1])[None] <= places[:, None]
        weights = ops.softmax(ops.where(seen, scores, -1e9))
        x = self.out(ops.einsum("bhts,bshk->bthk", weights, value))
        return x if cache is None else (x, cache)


class Draw:
    """A sampler as those of KerasHub: random with a `seed`, else the likeliest token."""

    def __init__(self, seed=None):
        self.numbers = None if seed is None else keras.random.SeedGenerator(seed)

    @property
    def variables(self):
        return [] if self.numbers is None else [self.numbers.state]

    def draw(self, logits):
        if self.numbers is None:
            return ops.argmax(logits, axis=-1)
        return keras.random.categorical(logits, 1, seed=self.numbers)[:, 0]


class LanguageModel(keras.Model):
    """Blocks of attention and Dense layers; `generate` as KerasHub's `CausalLM` has it."""

    def __init__(self, vocabulary=64, width=32, blocks=2, heads=4, shared=2, tied=True, **kwargs):
        super().__init__(**kwargs)
        self.embed = keras.layers.Embedding(vocabulary, width)
        size = width // heads
        self.attention = [Attention(heads, shared, size) for _ in range(blocks)]
        self.norms = [keras.layers.LayerNormalization() for _ in range(2 * blocks)]
        self.inner = [keras.layers.Dense(2 * width, "gelu") for _ in range(blocks)]
        self.outer = [keras.layers.Dense(width) for _ in range(blocks)]
        self.logits = None if tied else keras.layers.Dense(vocabulary)
        self.shape_of_cache = (blocks, 2), (shared, size)
        self.generate_function = None

    def compile(self, *args, sampler=None, **kwargs):
        super().compile(*args, **kwargs)
        self.sampler = sampler or Draw()
        self.generate_function = None

    def call(self, tokens):
        return self.with_cache(tokens)[0]

    def with_cache(self, tokens, cache=None, at=0):
        x, caches = self.embed(tokens), []
        for i, attention in enumerate(self.attention):
            h = self.norms[2 * i](x)
            if cache is None:
                h = attention(h)
            else:
                h, kept = attention(h, cache=cache[:, i], at=at)
                caches.append(kept)
            x = x + h
            x = x + self.outer[i](self.inner[i](self.norms[2 * i + 1](x)))
        cache = None if cache is None else ops.stack(caches, axis=1)
        if self.logits is not None:
            return self.logits(x), cache
        return ops.matmul(x, ops.transpose(self.embed.embeddings)), cache

    def generate_step(self, inputs, stop_token_ids=None):
        tokens, mask = inputs["token_ids"], inputs["padding_mask"]
        rows, length = ops.shape(tokens)
        parts, heads = self.shape_of_cache
        cache = ops.zeros((rows, *parts, length, *heads), self.compute_dtype)
        _, cache = self.with_cache(tokens, cache, 0)
        given = ops.sum(ops.cast(mask, "int32"), axis=-1)

        def goes_on(numbers, values, tokens, cache, at):
            if stop_token_ids is None:
                return at < length
            new = ops.logical_not(ops.cast(mask, "bool"))
            ended = sum((ops.cast(tokens == i, "int32") for i in stop_token_ids), start=0)
            return ops.logical_and(at < length, ops.any(ops.sum(ended * new, -1) == 0))

        variables = [*self.trainable_variables, *self.non_trainable_variables]

        def step(numbers, values, tokens, cache, at):
            mapping = [*zip(self.sampler.variables, numbers), *zip(variables, values)]
            with keras.StatelessScope(state_mapping=mapping) as scope:
                last = ops.slice(tokens, [0, at - 1], [rows, 1])
                logits, cache = self.with_cache(last, cache, at - 1)
                token = ops.cast(self.sampler.draw(logits[:, 0]), tokens.dtype)
            token = ops.where(ops.cast(mask[:, at], "bool"), tokens[:, at], token)
            tokens = ops.slice_update(tokens, [0, at], token[:, None])
            numbers = [scope.get_current_value(v) for v in self.sampler.variables]
            return numbers, values, tokens, cache, at + 1

        numbers = [ops.convert_to_tensor(v) for v in self.sampler.variables]
        values = [ops.convert_to_tensor(v) for v in variables]
        start = (numbers, values, tokens, cache, ops.min(given))
        numbers, _, tokens, _, _ = jax.lax.while_loop(
            lambda loop: goes_on(*loop), lambda loop: step(*loop), start
        )
        for variable, value in zip(self.sampler.variables, numbers):
            variable.assign(value)
        return {"token_ids": tokens, "padding_mask": ops.ones_like(tokens)}

    def make_generate_function(self):
        if self.generate_function is None:
            groups = self.sampler.variables, self.trainable_variables, self.non_trainable_variables

            @jax.jit
            def compiled(inputs, state):
                mapping = [pair for group in zip(groups, state) for pair in zip(*group)]
                with keras.StatelessScope(state_mapping=mapping) as scope:
                    outputs = self.generate_step(inputs, self.stops)
                return outputs, [scope.get_current_value(v) for v in groups[0]]

            def function(inputs, stop_token_ids=None):
                self.stops = stop_token_ids
                state = [[v.value for v in group] for group in groups]
                outputs, numbers = compiled(inputs, state)
                for variable, value in zip(groups[0], numbers):
                    variable.assign(value)
                return outputs

            self.generate_function = function
        return self.generate_function

    def generate(self, inputs, stop_token_ids=None):
        outputs = self.make_generate_function()(inputs, stop_token_ids=stop_token_ids)
        return {name: ops.convert_to_numpy(value) for name, value in outputs.items()}


def prompts(rows, length=12, given=5, seed=0):
    """Random prompts, the first of them one token shorter."""
    import numpy as np

    tokens = np.random.default_rng(seed).integers(1, 64, (rows, length)).astype("int32")
    mask = np.zeros((rows, length), "int32")
    mask[:, :given] = 1
    mask[0, given - 1] = 0
    return {"token_ids": tokens * mask, "padding_mask": mask}
