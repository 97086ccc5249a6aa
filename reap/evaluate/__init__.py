"""Evaluation: a checkpoint and text in, perplexity and divergence from a reference out."""

from reap.evaluate.evaluate import EvaluationSettings, evaluate, evaluate_all

__all__ = ["EvaluationSettings", "evaluate", "evaluate_all"]
