"""Comparing two next-token distributions."""

import mlx.core as mx


def log_probabilities(logits: mx.array) -> mx.array:
    """ln softmax over the last axis, in float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def kl_divergence(reference: mx.array, other: mx.array) -> mx.array:
    """KL(reference ‖ other) in nats over the last axis, of log probabilities [..., vocabulary]."""
    return (mx.exp(reference) * (reference - other)).sum(axis=-1)
