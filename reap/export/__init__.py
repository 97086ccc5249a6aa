"""Export: a source checkpoint and a plan in, a checkpoint that mlx-lm runs out.

`export` writes MLX's layout, `export_hf` the source's own Hugging Face layout.
"""

from reap.export.card import add_measurement
from reap.export.export import ExportResult, export
from reap.export.hf import export_hf

__all__ = ["ExportResult", "add_measurement", "export", "export_hf"]
