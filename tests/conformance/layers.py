"""Every built-in layer of Keras: the table. What it is made of is in `layer_cases`."""

# ruff: noqa: C408 (arguments of layers, as keywords)

from functools import partial

import jax.numpy as jnp
import numpy as np
from keras import layers as kl
from keras import ops
from layer_cases import (
    FOUND,
    IMAGE,
    SEED,
    SEQ,
    VOLUME,
    WIDE,
    SeededAugMix,
    adapted,
    add,
    both,
    causal,
    each,
    embedded,
    floats,
    ids,
    images,
    jax_centred,
    jax_dense,
    jax_weights,
    keyed,
    listed,
    mask_of,
    masked,
    padded,
    padded_ids,
    self_attention,
    set_jit,
    swish_of_sum,
    unpadded,
)
from layer_cases import (
    LayerCase as LayerCase,
)
from layer_cases import (
    all_names as all_names,
)
from layer_cases import (
    data_of as data_of,
)
from layer_cases import (
    model_of as model_of,
)

SHAPES = {1: (8, 4), 2: IMAGE, 3: VOLUME}
seeded = dict(seed=SEED)
unit = dict(value_range=(0.0, 1.0))

# Dense and the like.
lora = dict(lora_rank=2)
add(
    "Dense",
    floats((8,)),
    8,
    plain={},
    gelu=dict(activation="gelu"),
    no_bias=dict(use_bias=False),
    sequence=dict(inputs=floats(SEQ)),
    masked=dict(inputs=padded, call=masked),
    lora=lora,
    l2=dict(kernel_regularizer="l2"),
    max_norm=dict(kernel_constraint="max_norm"),
)
add(
    "EinsumDense",
    floats(WIDE),
    last=lambda: kl.EinsumDense("abc,cd->abd", (6, 8), bias_axes="d"),
    heads=lambda: kl.EinsumDense("abc,cde->abde", (6, 4, 8), bias_axes="de"),
    steps=lambda: kl.EinsumDense("abc,bd->adc", (8, 8), bias_axes="d"),
    both=lambda: kl.EinsumDense("abc,bcd->ad", 8, activation="relu"),
    ellipsis=lambda: kl.EinsumDense("...x,xy->...y", 8, bias_axes="y"),
    lora=lambda: kl.EinsumDense("abc,cde->abde", (6, 4, 8), lora_rank=2),
)
add("EinsumDense", floats((6, 4, 8)), merge=lambda: kl.EinsumDense("abcd,cde->abe", (6, 8)))
add(
    "Embedding",
    ids(32, 6),
    32,
    8,
    plain={},
    lora=lora,
    one=dict(inputs=ids(32)),
    mask_zero=dict(mask_zero=True, inputs=padded_ids),
    mask_zero_lstm=dict(mask_zero=True, inputs=padded_ids, call=lambda e, x: kl.LSTM(8)(e(x))),
)
back = lambda layer, x: layer(layer(x), reverse=True)  # noqa: E731
add(
    "ReversibleEmbedding",
    ids(32, 6),
    32,
    8,
    tied={},
    untied=dict(tie_weights=False),
    tied_back=dict(call=back),
    untied_back=dict(tie_weights=False, call=back),
    capped=dict(logit_soft_cap=5.0, call=back),
    mask_zero=dict(mask_zero=True, inputs=padded_ids, call=back),
)
each("Identity", floats(SEQ))
add("Lambda", floats(SEQ), swish_of_sum)
add(
    "JaxLayer",
    floats(SEQ),
    params=lambda: kl.JaxLayer(jax_dense, params=jax_weights()),
    state=lambda: kl.JaxLayer(jax_centred, params=jax_weights(), state={"mean": jnp.zeros(4)}),
)
add("Masking", padded, plain={}, lstm=dict(call=lambda m, x: kl.LSTM(8)(m(x))))

# Activations.
for function in "relu", "gelu", "silu", "softplus", "softmax", "hard_sigmoid", "selu", "sparsemax":
    add("Activation", floats(SEQ), function, **{function: {}})
each("ELU", floats(SEQ))
add("LeakyReLU", floats(SEQ), 0.2)
add("PReLU", floats(IMAGE), plain={}, shared=dict(shared_axes=[1, 2]))
add("ReLU", floats(SEQ), plain={}, capped=dict(max_value=1.0, negative_slope=0.1, threshold=0.1))
add(
    "Softmax",
    floats(SEQ),
    last={},
    axes=dict(axis=(1, 2)),
    steps=dict(axis=1),
    masked=dict(
        inputs=both(floats((6, 6)), mask_of(6, 6)),
        call=lambda layer, x, m: layer(x, mask=ops.cast(m, "bool")),
    ),
)

# Convolutions.
for n, shape in SHAPES.items():
    add(
        f"Conv{n}D",
        floats(shape),
        8,
        3,
        valid={},
        same=dict(padding="same", activation="relu"),
        strided=dict(strides=2, padding="same"),
        groups=dict(groups=2, padding="same"),
        no_bias=dict(use_bias=False),
    )
    add(
        f"Conv{n}D",
        floats(tuple(2 * s for s in shape[:-1]) + shape[-1:]),
        8,
        3,
        dilated=dict(dilation_rate=2),
    )
    add(
        f"Conv{n}DTranspose",
        floats(shape),
        8,
        3,
        valid={},
        strided=dict(strides=2, padding="same"),
        padded=dict(strides=2, output_padding=1, padding="same"),
    )
    if n < 3:
        add(f"Conv{n}DTranspose", floats(shape), 8, 3, dilated=dict(dilation_rate=2))
        for kind, features in (("Depthwise", ()), ("Separable", (8,))):
            add(
                f"{kind}Conv{n}D",
                floats(shape),
                *features,
                3,
                valid={},
                multiplier=dict(depth_multiplier=2, padding="same"),
                strided=dict(strides=2, padding="same"),
                dilated=dict(dilation_rate=2),
            )
add(
    "Conv1D",
    floats((8, 4)),
    8,
    3,
    causal=dict(padding="causal", dilation_rate=2),
    strided_3=dict(strides=3),
)
add("Conv2D", floats(IMAGE), 8, (1, 1), pointwise={}, depthwise=dict(groups=4))
add("Conv2D", floats(IMAGE), 8, (4, 4), patches=dict(strides=4), oblong=dict(strides=(1, 2)))

# Pooling.
for n, shape in SHAPES.items():
    for kind in "Max", "Average":
        add(
            f"{kind}Pooling{n}D",
            floats(shape),
            2,
            valid={},
            same=dict(strides=1, padding="same"),
            overlapping=dict(strides=1),
        )
        add(f"Global{kind}Pooling{n}D", floats(shape), plain={}, keepdims=dict(keepdims=True))
        add(
            f"Adaptive{kind}Pooling{n}D",
            floats(shape),
            even=dict(output_size=2),
            uneven=dict(output_size=3),
        )
add("GlobalAveragePooling1D", padded, call=masked, masked={})

# Normalization.
flat_steps = floats(WIDE)
add(
    "BatchNormalization",
    floats(IMAGE),
    image={},
    flat=dict(inputs=floats((8,))),
    rows=dict(axis=1),
    plain=dict(center=False, scale=False),
    slow=dict(momentum=0.5, epsilon=1e-2),
    masked=dict(inputs=padded, call=masked),
)
add(
    "LayerNormalization",
    flat_steps,
    last={},
    axes=dict(axis=(1, 2)),
    steps=dict(axis=1),
    plain=dict(center=False, scale=False),
)
add("RMSNormalization", flat_steps, last={}, axes=dict(axis=(1, 2)))
add(
    "GroupNormalization",
    floats(IMAGE),
    two=dict(groups=2),
    one=dict(groups=1),
    instance=dict(groups=-1),
    rows=dict(groups=4, axis=1),
    plain=dict(groups=2, scale=False),
)
add("UnitNormalization", flat_steps, last={}, axes=dict(axis=(1, 2)))
add(
    "SpectralNormalization",
    floats(IMAGE),
    dense=lambda: kl.SpectralNormalization(kl.Dense(8)),
    conv=lambda: kl.SpectralNormalization(kl.Conv2D(8, 3), power_iterations=2),
)
add(
    "Normalization",
    floats(SEQ),
    given=dict(mean=0.5, variance=2.0),
    invert=dict(mean=[0.0, 1.0, 2.0, 3.0], variance=[1.0, 2.0, 3.0, 4.0], invert=True),
    adapted=lambda: adapted(kl.Normalization()),
    all=lambda: adapted(kl.Normalization(axis=None)),
)

# Recurrent layers and their cells.
on_mask = dict(inputs=padded, call=masked)
for kind in "LSTM", "GRU", "SimpleRNN":
    states = 2 if kind == "LSTM" else 1
    cell = getattr(kl, f"{kind}Cell")
    add(
        kind,
        floats(SEQ),
        8,
        last={},
        sequences=dict(return_sequences=True),
        state=dict(return_state=True, return_sequences=True),
        backwards=dict(go_backwards=True),
        unroll=dict(unroll=True),
        no_bias=dict(use_bias=False),
        masked=on_mask,
        masked_sequences=on_mask | dict(return_sequences=True),
        relu=dict(activation="relu"),
        dropout=dict(dropout=0.3, recurrent_dropout=0.3, seed=SEED),
        embedded=dict(inputs=padded_ids, call=embedded),
        initial=dict(
            inputs=floats(SEQ, *[(8,)] * states),
            call=lambda layer, x, *s: layer(x, initial_state=list(s)),
        ),
    )
    add(f"{kind}Cell", floats(SEQ[1:], *[(8,)] * states), 8, call=lambda c, x, *s: c(x, list(s)))
    add("RNN", floats(SEQ), **{kind: partial(lambda c: kl.RNN(c(8), return_sequences=True), cell)})
add("GRU", floats(SEQ), 8, before=dict(reset_after=False, return_sequences=True))
add(
    "RNN",
    padded,
    call=masked,
    zeroed=lambda: kl.RNN(kl.GRUCell(8), return_sequences=True, zero_output_for_mask=True),
)


cells = kl.StackedRNNCells
add(
    "StackedRNNCells",
    floats(SEQ),
    rnn=lambda: kl.RNN(cells([kl.LSTMCell(8), kl.GRUCell(8)])),
    state=lambda: kl.RNN(cells([kl.GRUCell(8), kl.LSTMCell(8)]), return_state=True),
)
add(
    "StackedRNNCells",
    floats((4,), (8,), (8,), (8,)),
    step=lambda: cells([kl.LSTMCell(8), kl.GRUCell(8)]),
    call=lambda c, x, h, k, g: c(x, [[h, k], [g]]),
)
lstm = partial(kl.LSTM, 8, return_sequences=True)
add(
    "Bidirectional",
    floats(SEQ),
    concat=lambda: kl.Bidirectional(kl.LSTM(8)),
    sequences=lambda: kl.Bidirectional(lstm()),
    sum=lambda: kl.Bidirectional(kl.GRU(8), merge_mode="sum"),
    apart=lambda: kl.Bidirectional(kl.SimpleRNN(8, return_state=True), merge_mode=None),
    other=lambda: kl.Bidirectional(lstm(), backward_layer=lstm(go_backwards=True)),
)
add("Bidirectional", padded, call=masked, masked=lambda: kl.Bidirectional(lstm()))
add("TimeDistributed", floats(SEQ), dense=lambda: kl.TimeDistributed(kl.Dense(8)))
add(
    "TimeDistributed",
    floats((3, *IMAGE)),
    conv=lambda: kl.TimeDistributed(kl.Conv2D(8, 3)),
    batch_norm=lambda: kl.TimeDistributed(kl.BatchNormalization()),
)
add("TimeDistributed", padded, call=masked, masked=lambda: kl.TimeDistributed(kl.Dense(8)))
for n, shape in {1: (3, 8, 4), 2: (3, 4, 4, 4), 3: (2, 4, 4, 4, 2)}.items():
    add(
        f"ConvLSTM{n}D",
        floats(shape),
        8,
        3,
        valid={},
        sequences=dict(return_sequences=True, padding="same", return_state=True),
    )

# Attention.
half = dict(dropout=0.3, seed=SEED)
window = both(floats(WIDE), mask_of(6, 6))
cross = floats((6, 8), (4, 8))
add(
    "MultiHeadAttention",
    floats(WIDE),
    4,
    8,
    call=self_attention,
    self={},
    causal=dict(call=causal),
    mask=dict(inputs=window),
    small=dict(output_shape=4),
    both=dict(inputs=window, call=causal),
    no_bias=dict(use_bias=False),
    dropout=half,
    scores=dict(value_dim=4, call=partial(self_attention, return_attention_scores=True)),
    cross=dict(inputs=cross, call=lambda a, q, v: a(q, v)),
    keys=dict(inputs=floats((6, 8), (4, 8), (4, 8)), call=lambda a, q, v, k: a(q, v, k)),
    window=dict(sliding_window=2, call=causal),
    padded=dict(inputs=padded_ids, call=embedded),
    axes=dict(inputs=floats((3, 4, 8)), attention_axes=(1, 2)),
)
add(
    "GroupQueryAttention",
    floats(WIDE),
    8,
    4,
    2,
    call=self_attention,
    self={},
    causal=dict(call=causal),
    mask=dict(inputs=window),
    no_bias=dict(use_bias=False),
    cross=dict(inputs=cross, call=lambda a, q, v: a(q, v)),
    dropout=half,
    gate=dict(use_gate=True),
    window=dict(sliding_window=2, call=causal),
    padded=dict(inputs=padded_ids, call=unpadded),
)
add("GroupQueryAttention", floats(WIDE), 8, 4, 1, call=causal, one={})
if hasattr(kl, "TernaryDense"):  # from Keras 3.16 on
    add("GroupedQueryAttention", floats(WIDE), 8, 4, 2, call=self_attention, self={})
    add("TernaryDense", floats(WIDE), 8, plain={}, threshold=dict(threshold=0.2))
on_keys = dict(inputs=both(cross, mask_of(6), mask_of(4)), call=keyed)
add(
    "Attention",
    cross,
    call=listed,
    dot={},
    scale=dict(use_scale=True),
    masks=on_keys,
    concat=dict(score_mode="concat", use_scale=True),
    dropout=half,
    causal=dict(call=lambda a, *qv: a(list(qv), use_causal_mask=True)),
)
add(
    "AdditiveAttention", cross, call=listed, plain={}, no_scale=dict(use_scale=False), masks=on_keys
)

# Merging.
add("Subtract", floats(SEQ, SEQ), call=listed)
each("Add Average Maximum Minimum Multiply", floats(SEQ, SEQ, SEQ), call=listed)
add("Add", floats(SEQ, (1, 4)), call=listed, broadcast={})
add(
    "Concatenate",
    floats(SEQ, (6, 8)),
    call=listed,
    last={},
    steps=dict(axis=1, inputs=floats((6, 4), (3, 4))),
)
add(
    "Dot",
    floats((8,), (8,)),
    call=listed,
    vectors=dict(axes=1),
    cosine=dict(axes=1, normalize=True),
    steps=dict(axes=(1, 1), inputs=floats(SEQ, WIDE)),
    features=dict(axes=2, inputs=floats((6, 8), (4, 8))),
)

# Reshaping.
each("Flatten", floats(IMAGE))
add("Reshape", floats(SEQ), plain=dict(target_shape=(4, 6)), guess=dict(target_shape=(2, -1)))
add("Permute", floats((6, 4, 2)), (3, 1, 2))
add("RepeatVector", floats((8,)), 4)
for n, shape in SHAPES.items():
    add(f"UpSampling{n}D", floats(shape), 2)
    add(f"ZeroPadding{n}D", floats(shape), 1, one={})
    add(f"Cropping{n}D", floats(shape), 1, one={})
    uneven = (2, 1) if n == 1 else ((2, 1),) * n
    add(f"ZeroPadding{n}D", floats(shape), uneven, uneven={})
    add(f"Cropping{n}D", floats(shape), uneven, uneven={})
add("UpSampling2D", floats(IMAGE), (2, 3), bilinear=dict(interpolation="bilinear"), oblong={})

# Regularization.
each("Dropout AlphaDropout GaussianDropout GaussianNoise", floats(SEQ), 0.3, **{"fixed": seeded})
each("Dropout AlphaDropout", floats(SEQ), 0.3, shared=seeded | dict(noise_shape=(None, 1, 4)))
for n, shape in SHAPES.items():
    add(f"SpatialDropout{n}D", floats(shape), 0.3, fixed=seeded)
add("ActivityRegularization", floats(SEQ), l1=dict(l1=0.1), l2=dict(l2=0.1))

# Preprocessing.
add(
    "CategoryEncoding",
    ids(8, 6),
    8,
    one_hot=dict(output_mode="one_hot"),
    multi_hot=dict(output_mode="multi_hot"),
    count=dict(output_mode="count"),
    weights=dict(
        output_mode="count",
        inputs=both(ids(8, 6), floats((6,))),
        call=lambda c, x, w: c(x, count_weights=w),
    ),
)
bins = [-1.0, -0.3, 0.4, 1.1]
add(
    "Discretization",
    floats((6,)),
    bins,
    **{mode: dict(output_mode=mode) for mode in ("int", "one_hot", "multi_hot", "count")},
)
mel = dict(fft_length=64, sequence_stride=32, sampling_rate=8000, num_mel_bins=8, max_freq=4e3)
add(
    "MelSpectrogram",
    floats((128,)),
    call=lambda m, x: m(x) / 20,
    decibels=mel,
    power=mel | dict(power_to_db=False, mag_exp=1.0),
)
# A pulse in each frame keeps its spectrum away from zero, where a logarithm's gradient is endless:
# without it plain Keras ends elsewhere (3 % of a weight) if the first weights differ in a last bit.
pulses = 10.0 * (np.arange(64)[:, None] % 16 == 8)
add(
    "STFTSpectrogram",
    floats((64, 2)),
    log=dict(frame_length=16, frame_step=16, call=lambda s, x: s(x + ops.cast(pulses, x.dtype))),
    **{mode: dict(mode=mode, frame_length=16) for mode in ("magnitude", "real", "imag")},
    stft=dict(mode="stft", frame_length=16, frame_step=4, padding="same", expand_dims=True),
)
add("Rescaling", images, 2.0, plain=dict(offset=-1.0))
add(
    "Resizing",
    images,
    6,
    4,
    bilinear={},
    nearest=dict(interpolation="nearest"),
    bicubic=dict(interpolation="bicubic"),
    crop=dict(crop_to_aspect_ratio=True),
    pad=dict(pad_to_aspect_ratio=True),
    smooth=dict(antialias=True),
)
add("CenterCrop", images, 4, 6, smaller={}, larger=dict(inputs=floats((3, 12, 3))))
add("AutoContrast", images, plain=unit)
# Equalization gives back the symbolic tensor it is given, of which no graph can be made.
add("Equalization", images, plain=unit | dict(bins=16, call=lambda e, x: kl.Pipeline([e])(x)))
add(
    "ContrastLimitedAdaptiveHistogramEqualization", images, plain=unit | dict(tile_grid_size=(2, 2))
)
fixed = seeded | unit
each("CutMix MixUp RandomGrayscale RandomFlip", images, fixed=seeded)
if hasattr(kl, "Mosaic"):  # from Keras 3.16 on
    add("Mosaic", images, fixed=seeded)
each("RandomErasing RandomInvert RandomGaussianBlur", images, fixed=fixed)
each(
    "RandomBrightness RandomContrast RandomColorDegeneration RandomHue RandomSaturation "
    "RandomSharpness",
    images,
    0.4,
    fixed=fixed,
)
add("RandomPosterization", images, 4, fixed=fixed)
add(
    "RandomColorJitter",
    images,
    fixed=fixed
    | dict(brightness_factor=0.2, contrast_factor=0.2, saturation_factor=0.2, hue_factor=0.2),
)
add("Solarization", images, 0.3, 0.3, fixed=fixed)
# The width of its blur is read while traced.
add(
    "RandomElasticTransform",
    images,
    eager=partial(set_jit, False, kl.RandomElasticTransform, **fixed),
)


def add_jit(kind, build=None, *args, call=None, **variants):
    """Each variant as Keras runs it, and compiled."""
    for variant, options in variants.items():
        for name, jit in {variant: False, f"{variant}_jit": True}.items():
            cls = partial(set_jit, jit, build or getattr(kl, kind), *args, **options)
            add(kind, images, call=call, **{name: cls})


add_jit("AugMix", SeededAugMix, fixed=fixed)
add_jit("RandAugment", fixed=fixed | dict(num_ops=1))
add_jit("RandomPerspective", None, 0.8, 0.5, fixed=seeded)
add_jit("RandomRotation", None, 0.2, fixed=seeded, nearest=seeded | dict(interpolation="nearest"))
add_jit("RandomShear", None, 0.3, 0.2, fixed=seeded)
add_jit(
    "RandomTranslation", None, 0.3, 0.2, fixed=seeded, constant=seeded | dict(fill_mode="constant")
)
add_jit("RandomZoom", None, 0.3, fixed=seeded)
# RandomCrop slices by numbers drawn, and when not training leaves images of another shape.
add("RandomCrop", images, 4, 6, eager=seeded, call=lambda c, x: kl.Resizing(4, 6)(c(x)))
add(
    "Pipeline",
    images,
    images=lambda: kl.Pipeline([kl.Rescaling(2.0), kl.RandomFlip(seed=SEED), kl.CenterCrop(4, 4)]),
    weights=lambda: kl.Pipeline([kl.Dense(8, "relu"), kl.Dense(4)]),
)

CASES = tuple(FOUND)
LEFT_OUT = {
    "FlaxLayer": "needs flax",
    "InputLayer": "begins every model here",
    "InputSpec": "not a layer",
    "MaxNumBoundingBoxes": "pads by a number it reads while traced",
    "TFSMLayer": "needs TensorFlow",
    "TorchModuleWrapper": "needs torch",
}
LEFT_OUT |= dict.fromkeys(["Layer", "Wrapper"], "abstract")
on_host = ["HashedCrossing", "Hashing", "IntegerLookup", "StringLookup", "TextVectorization"]
LEFT_OUT |= dict.fromkeys(on_host, "needs TensorFlow, on the host, never compiled")
true_names = {k: getattr(kl, k).__name__ for k in all_names()}
LEFT_OUT |= {k: f"alias of {v}" for k, v in true_names.items() if k != v and hasattr(kl, v)}
