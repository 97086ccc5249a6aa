"""Export: a source checkpoint and a plan in, a checkpoint that mlx-lm runs out."""

from reap.export.card import add_measurement
from reap.export.export import ExportResult, Outline, export, free_space, outline

__all__ = ["ExportResult", "Outline", "add_measurement", "export", "free_space", "outline"]
