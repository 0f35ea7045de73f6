"""Attention that is correct, and compiles, on TPU meshes."""

from keras_tpu_dist.attention.dispatch import dot_product_attention as dot_product_attention
