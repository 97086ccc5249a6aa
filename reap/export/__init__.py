"""Export: a source checkpoint and a plan in, a checkpoint that mlx-lm runs out."""

from reap.export.card import add_measurement
from reap.export.export import ExportResult, export

__all__ = ["ExportResult", "add_measurement", "export"]
