# SPDX-License-Identifier: Apache-2.0
"""T5 1.1: encoder and decoder with relative position biases, gated GELU, RMSNorm, an untied head.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", arXiv:1910.10683; for what 1.1 changed, Shazeer, "GLU Variants Improve Transformer",
arXiv:2002.05202. Parameters have the names and initial distributions of T5X.
"""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

#: The padding id, which also starts the decoder's input.
PAD = 0
#: Path of the input embedding in the parameters.
EMBEDDING = ("token_embedder", "embedding")

#: The softmax input of a masked position, as in T5X.
_FORBIDDEN = -1e10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model.

    Attributes:
      rows: rows of the input embedding, the vocabulary size.
      d_model: width of the embedding and of the residual stream.
      layers: layers of the encoder, and of the decoder.
      heads: heads of every attention.
      head_width: width of each head.
      d_ff: width of the hidden layers of the feed-forward blocks.
      buckets: number of relative position buckets.
      max_distance: distance from which all relative positions share a bucket.
      dropout: dropout rate during training.
    """

    rows: int
    d_model: int
    layers: int
    heads: int
    head_width: int = 64
    d_ff: int
    buckets: int = 32
    max_distance: int = 128
    dropout: float = 0.0


#: Sizes by name: those of T5 1.1, and one for tests, whose width is the smallest that Adafactor
#: factors.
NAMED = {
    "tiny": {"d_model": 128, "layers": 2, "heads": 2, "d_ff": 256},
    "small": {"d_model": 512, "layers": 8, "heads": 6, "d_ff": 1024},
    "base": {"d_model": 768, "layers": 12, "heads": 12, "d_ff": 2048},
}


class T5(nn.Module):
    """The complete model."""

    sizes: Sizes

    def setup(self) -> None:
        """Creates the submodules."""
        self.token_embedder = nn.Embed(
            self.sizes.rows, self.sizes.d_model, embedding_init=nn.initializers.normal(1.0)
        )
        self.encoder = Encoder(self.sizes)
        self.decoder = Decoder(self.sizes)

    def __call__(
        self, inputs: jax.Array, decoder_inputs: jax.Array, *, deterministic: bool = True
    ) -> jax.Array:
        """Returns the logits of each next target token.

        Args:
          inputs: (batch, inputs) int32, padded with ``PAD``, which is masked.
          decoder_inputs: (batch, targets) int32: the target shifted right by one.
          deterministic: False applies dropout, with the RNG ``dropout``.

        Returns:
          (batch, targets, rows) float32.
        """
        # Masks for a query, a key, or both: (batch, heads, queries, keys).
        visible = (inputs != PAD)[:, None, None, :]
        encoded = self.encoder(self.token_embedder(inputs), visible, deterministic)
        embedded = self.token_embedder(decoder_inputs)
        return self.decoder(embedded, encoded, visible, deterministic)


class Encoder(nn.Module):
    """Layers of self-attention and feed-forward blocks."""

    sizes: Sizes

    @nn.compact
    def __call__(self, embedded: jax.Array, visible: jax.Array, deterministic: bool) -> jax.Array:
        """Maps (batch, inputs, d_model) to the same shape; attends to ``visible`` positions."""
        dropout = nn.Dropout(self.sizes.dropout, deterministic=deterministic)
        length = embedded.shape[1]
        bias = RelativePositionBias(self.sizes, bidirectional=True, name="relpos_bias")(length)
        stream = dropout(embedded)
        for number in range(self.sizes.layers):
            stream = EncoderLayer(self.sizes, name=f"layers_{number}")(
                stream, visible, bias, deterministic
            )
        return dropout(nn.RMSNorm(name="encoder_norm")(stream))


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and feed-forward, each with a residual connection."""

    sizes: Sizes

    @nn.compact
    def __call__(
        self, stream: jax.Array, visible: jax.Array, bias: jax.Array, deterministic: bool
    ) -> jax.Array:
        """Maps (batch, inputs, d_model) to the same shape."""
        dropout = nn.Dropout(self.sizes.dropout, deterministic=deterministic)
        read = nn.RMSNorm(name="pre_attention_layer_norm")(stream)
        attention = Attention(self.sizes, name="attention")
        stream = stream + dropout(attention(read, read, visible, bias, deterministic))
        read = nn.RMSNorm(name="pre_mlp_layer_norm")(stream)
        return stream + dropout(GatedGelu(self.sizes, name="mlp")(read, deterministic))


class Decoder(nn.Module):
    """Layers of causal self-attention, attention to the encoder, and feed-forward blocks."""

    sizes: Sizes

    @nn.compact
    def __call__(
        self, embedded: jax.Array, encoded: jax.Array, visible: jax.Array, deterministic: bool
    ) -> jax.Array:
        """Maps (batch, targets, d_model) to logits (batch, targets, rows)."""
        dropout = nn.Dropout(self.sizes.dropout, deterministic=deterministic)
        length = embedded.shape[1]
        bias = RelativePositionBias(self.sizes, bidirectional=False, name="relpos_bias")(length)
        causal = jnp.tril(jnp.ones((1, 1, length, length), bool))
        stream = dropout(embedded)
        for number in range(self.sizes.layers):
            stream = DecoderLayer(self.sizes, name=f"layers_{number}")(
                stream, encoded, causal, visible, bias, deterministic
            )
        read = dropout(nn.RMSNorm(name="decoder_norm")(stream))
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        return _projection(self.sizes.rows, init, "logits_dense")(read)


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder, then feed-forward."""

    sizes: Sizes

    @nn.compact
    def __call__(
        self,
        stream: jax.Array,
        encoded: jax.Array,
        causal: jax.Array,
        visible: jax.Array,
        bias: jax.Array,
        deterministic: bool,
    ) -> jax.Array:
        """Maps (batch, targets, d_model) to the same shape."""
        dropout = nn.Dropout(self.sizes.dropout, deterministic=deterministic)
        read = nn.RMSNorm(name="pre_self_attention_layer_norm")(stream)
        attention = Attention(self.sizes, name="self_attention")
        stream = stream + dropout(attention(read, read, causal, bias, deterministic))
        read = nn.RMSNorm(name="pre_cross_attention_layer_norm")(stream)
        attention = Attention(self.sizes, name="encoder_decoder_attention")
        stream = stream + dropout(attention(read, encoded, visible, None, deterministic))
        read = nn.RMSNorm(name="pre_mlp_layer_norm")(stream)
        return stream + dropout(GatedGelu(self.sizes, name="mlp")(read, deterministic))


class Attention(nn.Module):
    """Multi-head attention without biases and without scaling of the scores.

    The query kernel's initial values are smaller by the square root of the head width instead.
    """

    sizes: Sizes

    @nn.compact
    def __call__(
        self,
        queries: jax.Array,
        memory: jax.Array,
        mask: jax.Array,
        bias: jax.Array | None,
        deterministic: bool,
    ) -> jax.Array:
        """Attends to the memory for each query.

        Args:
          queries: (batch, queries, d_model).
          memory: (batch, keys, d_model).
          mask: which positions to attend to, broadcast to (batch, heads, queries, keys) bool.
          bias: added to the scores, broadcast to the same shape.
          deterministic: False applies dropout to the attention weights.

        Returns:
          (batch, queries, d_model).
        """
        heads, width = self.sizes.heads, self.sizes.head_width

        def split(name: str, variance: float, read: jax.Array) -> jax.Array:
            init = nn.initializers.variance_scaling(variance, "fan_in", "normal")
            projected = _projection(heads * width, init, name)(read)
            return projected.reshape(*read.shape[:-1], heads, width)

        query = split("query", 1.0 / width, queries)
        key, value = split("key", 1.0, memory), split("value", 1.0, memory)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        if bias is not None:
            scores = scores + bias
        weights = jax.nn.softmax(jnp.where(mask, scores, _FORBIDDEN))
        weights = nn.Dropout(self.sizes.dropout, deterministic=deterministic)(weights)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        joined = mixed.reshape(*queries.shape[:-1], heads * width)
        return _projection(self.sizes.d_model, _fan_in_normal(), "out")(joined)


class GatedGelu(nn.Module):
    """The feed-forward block: a GELU of one projection times another projection."""

    sizes: Sizes

    @nn.compact
    def __call__(self, read: jax.Array, deterministic: bool) -> jax.Array:
        """Maps (batch, length, d_model) to the same shape."""
        gate = _projection(self.sizes.d_ff, _fan_in_normal(), "wi_0")(read)
        linear = _projection(self.sizes.d_ff, _fan_in_normal(), "wi_1")(read)
        hidden = jax.nn.gelu(gate, approximate=True) * linear
        hidden = nn.Dropout(self.sizes.dropout, deterministic=deterministic)(hidden)
        return _projection(self.sizes.d_model, _fan_in_normal(), "wo")(hidden)


class RelativePositionBias(nn.Module):
    """Per-head bias of the attention scores by the distance between key and query.

    All layers of a stack share one table.
    """

    sizes: Sizes
    bidirectional: bool

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        """Returns the biases of self-attention, (1, heads, length, length)."""
        positions = np.arange(length)
        buckets = relative_position_buckets(
            positions[None, :] - positions[:, None],
            bidirectional=self.bidirectional,
            buckets=self.sizes.buckets,
            max_distance=self.sizes.max_distance,
        )
        init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
        shape = (self.sizes.heads, self.sizes.buckets)
        return self.param("rel_embedding", init, shape)[:, buckets][None]


def relative_position_buckets(
    offsets: np.ndarray, *, bidirectional: bool, buckets: int, max_distance: int
) -> np.ndarray:
    """Returns the bucket of each relative position.

    Half of the buckets hold one distance each, the others exponentially growing ranges.

    Args:
      offsets: position of the key minus that of the query, any shape, integers.
      bidirectional: whether half of the buckets are for keys after the query; otherwise they all
        share the first bucket, since they are masked.
      buckets: number of buckets; even.
      max_distance: larger distances share the last bucket.

    Returns:
      Buckets, int32 of the same shape, 0 to ``buckets - 1``.

    Example:
      >>> offsets = np.array([-200, -16, -3, 0, 3, 200])
      >>> relative_position_buckets(offsets, bidirectional=True, buckets=32, max_distance=128)
      array([15, 10,  3,  0, 19, 31], dtype=int32)
    """
    first = np.zeros(offsets.shape, np.int32)
    if bidirectional:
        buckets //= 2
        first += (offsets > 0).astype(np.int32) * buckets
        distances = np.abs(offsets)
    else:
        distances = np.maximum(-offsets, 0)
    exact = buckets // 2
    # The epsilon keeps a distance at the edge of a range in the upper range, as in T5's code.
    growth = np.log(np.maximum(distances, 1) / exact + np.finfo(np.float32).eps)
    ranges = growth / np.log(max_distance / exact) * (buckets - exact)
    far = np.minimum(exact + ranges.astype(np.int32), buckets - 1)
    return first + np.where(distances < exact, distances, far).astype(np.int32)


def shifted_right(targets: jax.Array) -> jax.Array:
    """Returns the decoder input for ``targets``, (batch, targets): shifted right by one."""
    return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=PAD)


def cross_entropy(logits: jax.Array, targets: jax.Array, z_loss: float) -> jax.Array:
    """Returns the mean cross entropy over the target tokens that are not padding.

    Args:
      logits: (batch, targets, rows) float32.
      targets: (batch, targets) int32.
      z_loss: factor on the squared logarithm of the softmax's denominator, which keeps the logits
        from drifting; 0 for none.
    """
    log_z = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = log_z - picked + z_loss * jnp.square(log_z)
    counted = targets != PAD
    return jnp.sum(losses * counted) / jnp.sum(counted)


def _projection(features: int, init: nn.initializers.Initializer, name: str) -> nn.Dense:
    return nn.Dense(features, use_bias=False, kernel_init=init, name=name)


def _fan_in_normal() -> nn.initializers.Initializer:
    return nn.initializers.variance_scaling(1.0, "fan_in", "normal")
