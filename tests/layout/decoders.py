"""Blocks as published models have them, in plain Keras: nothing tells a plan what they are."""

import keras
from keras import ops

L = keras.layers
TIME, WIDTH, HEADS, HEAD = 6, 16, 8, 4


class Norm(L.Layer):
    """RMS normalization."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        return x * ops.rsqrt(ops.mean(ops.square(x), -1, keepdims=True) + 1e-6) * self.scale


def rotated(x):
    """Rotary positions, of `(batch, time, heads, features)`."""
    half = x.shape[-1] // 2
    frequencies = ops.power(10000.0, -ops.arange(half, dtype="float32") / half)
    angles = ops.arange(x.shape[1], dtype="float32")[:, None] * frequencies
    cos, sin = (f(angles)[None, :, None, :] for f in (ops.cos, ops.sin))
    a, b = ops.split(x, 2, axis=-1)
    return ops.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(L.Layer):
    """Attention by hand.

    Args:
        kv: Heads of keys and values.
        form: "dense" (and a reshape), "einsum", "fused" (one kernel, heads first), "in a row" (one
            kernel, all queries first, reshaped), "split" or "sliced" (the same).
        normed: Whether queries and keys are normalized.
        positions: "rotary", "table" (a learned bias by distance) or None.
    """

    def __init__(self, kv=HEADS, form="dense", normed=False, positions="rotary"):
        super().__init__()
        self.kv, self.form, self.positions = kv, form, positions
        if form in ("fused", "in a row", "split", "sliced"):
            self.query_key_value = L.Dense(3 * HEADS * HEAD, name="query_key_value")
        else:
            make = self.einsum if form == "einsum" else self.dense
            self.parts = [make(n, h) for n, h in (("q", HEADS), ("k", kv), ("v", kv))]
        self.norms = [Norm(), Norm()] if normed else None
        output = {"equation": "btnh,nhd->btd", "output_shape": (None, WIDTH), "bias_axes": "d"}
        self.out = L.EinsumDense(**output) if form == "einsum" else L.Dense(WIDTH)
        self.table = L.Embedding(2 * TIME, HEADS) if positions == "table" else None

    @staticmethod
    def dense(name, heads):
        return L.Dense(heads * HEAD, name=name)

    @staticmethod
    def einsum(name, heads):
        shape = (None, heads, HEAD)
        return L.EinsumDense("btd,dnh->btnh", output_shape=shape, bias_axes="nh", name=name)

    def heads(self, x):
        return ops.reshape(x, (-1, x.shape[1], x.shape[2] // HEAD, HEAD))

    def queries_keys_values(self, x, memory):
        if self.form == "in a row":
            shape = (-1, x.shape[1], 3, HEADS, HEAD)
            return ops.unstack(ops.reshape(self.query_key_value(x), shape), axis=2)
        if self.form == "sliced":
            y, size = self.query_key_value(x), HEADS * HEAD
            return [self.heads(y[..., i : i + size]) for i in range(0, 3 * size, size)]
        if self.form == "split":
            return map(self.heads, ops.split(self.query_key_value(x), 3, axis=-1))
        if self.form == "fused":
            fused = ops.reshape(self.query_key_value(x), (-1, x.shape[1], HEADS, 3 * HEAD))
            return ops.split(fused, 3, axis=-1)
        q, k, v = self.parts
        given = q(x), k(memory), v(memory)
        return given if self.form == "einsum" else map(self.heads, given)

    def call(self, x, memory=None):
        q, k, v = self.queries_keys_values(x, x if memory is None else memory)
        if self.norms:
            q, k = (norm(y) for norm, y in zip(self.norms, (q, k), strict=True))
        if self.positions == "rotary":
            q, k = rotated(q), rotated(k)
        if self.kv < HEADS:
            k, v = (ops.repeat(y, HEADS // self.kv, axis=2) for y in (k, v))
        scores = ops.einsum("bqnh,bknh->bnqk", q, k) / HEAD**0.5
        if self.table is not None:
            at = ops.arange(TIME)[:, None] - ops.arange(TIME)[None] + TIME
            scores = scores + ops.transpose(self.table(at), (2, 0, 1))[None]
        y = ops.einsum("bnqk,bknh->bqnh", ops.softmax(scores), v)
        if self.form != "einsum":
            y = ops.reshape(y, (-1, y.shape[1], HEADS * HEAD))
        return self.out(y)


class Experts(L.Layer):
    """A router and experts that are all computed, as KerasHub has them."""

    def __init__(self, count=8, hidden=16):
        super().__init__()
        self.count, self.hidden = count, hidden
        self.router = L.Dense(count, use_bias=False, name="router")

    def build(self, shape):
        self.up = self.add_weight(shape=(self.count, shape[-1], self.hidden), name="up")
        self.down = self.add_weight(shape=(self.count, self.hidden, shape[-1]), name="down")
        self.router.build(shape)

    def call(self, x):
        best, which = ops.top_k(ops.softmax(self.router(x)), 2)
        gates = ops.sum(ops.one_hot(which, self.count) * best[..., None], -2)
        y = ops.silu(ops.einsum("btd,edh->bteh", x, self.up))
        return ops.einsum("bteh,ehd,bte->btd", y, self.down, gates)


class Block(L.Layer):
    """A block of a transformer; it stands in the graph as one layer."""

    def __init__(self, attention, *, gated=None, parallel=False, experts=False, norm=Norm):
        super().__init__()
        self.attention = attention
        self.cross = None
        self.norms = [norm()] if parallel else [norm(), norm()]
        self.parallel, self.gated, self.experts = parallel, gated, experts
        if experts:
            self.mixture = Experts()
            return
        if gated:
            self.gate = L.Dense(4 * WIDTH, use_bias=False, activation=gated, name="gate")
        self.up = L.Dense(4 * WIDTH, activation=None if gated else "gelu", name="up")
        self.down = L.Dense(WIDTH, name="down")

    def feed(self, x):
        if self.experts:
            return self.mixture(x)
        return self.down(self.gate(x) * self.up(x) if self.gated else self.up(x))

    def call(self, x):
        y = self.norms[0](x)
        if self.parallel:
            return x + self.attention(y) + self.feed(y)
        x = x + self.attention(y)
        return x + self.feed(self.norms[1](x))


class Decoder(L.Layer):
    """A block that attends to an encoder's output, too."""

    def __init__(self, **options):
        super().__init__()
        self.norms = [Norm(), Norm(), Norm()]
        self.attention = Attention(**options)
        self.cross = Attention(positions=None)
        self.up, self.down = L.Dense(4 * WIDTH, activation="relu"), L.Dense(WIDTH)

    def call(self, x, memory):
        first, second, third = self.norms
        x = x + self.attention(first(x))
        x = x + self.cross(second(x), memory)
        return x + self.down(self.up(third(x)))


def in_a_graph():
    """The same in the graph of a functional model, with operations of `keras.ops`."""
    start = keras.Input((TIME, WIDTH))
    y = L.LayerNormalization()(start)
    q, k, v = (
        ops.reshape(L.Dense(HEADS * HEAD, name=name)(y), (-1, TIME, HEADS, HEAD)) for name in "qkv"
    )
    p = ops.softmax(ops.einsum("bqnh,bknh->bnqk", q, k) / HEAD**0.5)
    y = ops.reshape(ops.einsum("bnqk,bknh->bqnh", p, v), (-1, TIME, HEADS * HEAD))
    x = start + L.Dense(WIDTH, name="out")(y)
    y = L.Dense(4 * WIDTH, activation="gelu", name="up")(L.LayerNormalization()(x))
    return keras.Model(start, x + L.Dense(WIDTH, name="down")(y))


def stacked(*blocks):
    """Blocks in a row, each a layer of a functional model."""
    x = start = keras.Input((TIME, WIDTH))
    for block in blocks:
        x = block(x)
    return keras.Model(start, x)


def encoder_decoder():
    x = keras.Input((TIME, WIDTH))
    memory = Block(Attention(positions="table"))(x)
    return keras.Model(x, Decoder(positions="table")(L.Dense(WIDTH, use_bias=False)(x), memory))


WORDS = 203  # divides by nothing


class GPT(keras.Model):
    """Logits by the table of tokens, which the model itself transposes."""

    def __init__(self):
        super().__init__()
        self.token = L.Embedding(WORDS, WIDTH, name="token")
        self.block = Block(Attention(kv=4))

    def call(self, x):
        y = self.block(self.token(x))
        return ops.matmul(y, ops.transpose(self.token.embeddings))


def gpt():
    model = GPT()
    model(keras.ops.zeros((2, TIME), "int32"))
    return model


def tied():
    table = L.ReversibleEmbedding(WORDS, WIDTH, name="token")
    x = keras.Input((TIME,), dtype="int32")
    return keras.Model(x, table(Block(Attention(kv=4))(table(x)), reverse=True))


def untied():
    table = L.ReversibleEmbedding(WORDS, WIDTH, tie_weights=False, name="token")
    x = keras.Input((TIME,), dtype="int32")
    return keras.Model(x, table(Block(Attention(kv=4))(table(x)), reverse=True))


def headed():
    x = keras.Input((TIME,), dtype="int32")
    y = Block(Attention(kv=4))(L.Embedding(WORDS, WIDTH, name="token")(x))
    return keras.Model(x, L.Dense(WORDS, name="head")(y))


# Models of words that do not divide.
VOCABULARIES = {"gpt": gpt, "tied": tied, "untied": untied, "headed": headed}


class Halved(L.Layer):
    """A feed-forward layer whose first kernel makes gates and values in a row."""

    def __init__(self):
        super().__init__()
        self.both, self.down = L.Dense(8 * WIDTH, name="both"), L.Dense(WIDTH, name="down")

    def call(self, x):
        gate, value = ops.split(self.both(x), 2, axis=-1)
        return x + self.down(ops.silu(gate) * value)


def row_in_a_graph():
    start = keras.Input((TIME, WIDTH))
    y = L.Dense(3 * HEADS * HEAD, name="query_key_value")(L.LayerNormalization()(start))
    q, k, v = ops.unstack(L.Reshape((TIME, 3, HEADS, HEAD))(y), axis=2)
    p = ops.softmax(ops.einsum("bqnh,bknh->bnqk", q, k) / HEAD**0.5)
    y = ops.reshape(ops.einsum("bnqk,bknh->bqnh", p, v), (-1, TIME, HEADS * HEAD))
    return keras.Model(start, start + L.Dense(WIDTH, name="out")(y))


# Models in which one kernel makes features of several kinds in a row, and that kernel's layer.
IN_A_ROW = {
    "vit": (lambda: stacked(Block(Attention(form="in a row", positions=None))), "query_key_value"),
    "gpt2": (lambda: stacked(Block(Attention(form="split", positions=None))), "query_key_value"),
    "sliced": (lambda: stacked(Block(Attention(form="sliced"))), "query_key_value"),
    "halved": (lambda: stacked(Halved(), Halved()), "both"),
    "graph": (row_in_a_graph, "query_key_value"),
}

# For each the all-reduces over "model" of a forward and a backward pass, in all blocks; None if
# the layers are not only Megatron's.
FAMILIES = {
    "llama": (lambda: stacked(Block(Attention(kv=4), gated="silu")), 4),
    "gemma": (lambda: stacked(Block(Attention(kv=1, form="einsum"), gated="gelu")), None),
    "qwen3": (
        lambda: stacked(Block(Attention(kv=4, form="einsum", normed=True), gated="silu")),
        4,
    ),
    "falcon": (
        lambda: stacked(
            Block(Attention(form="fused"), parallel=True, norm=L.LayerNormalization),
        ),
        2,
    ),
    "neox": (lambda: stacked(Block(Attention(form="fused"))), 4),
    "bert": (lambda: stacked(Block(Attention(positions=None), norm=L.LayerNormalization)), 4),
    "mixtral": (lambda: stacked(Block(Attention(kv=4), experts=True)), None),
    "t5": (encoder_decoder, None),
    "graph": (in_a_graph, 4),
}
