"""Export: a source checkpoint and a plan in, a checkpoint that mlx-lm runs out.

`export` writes MLX's layout, `export_hf` the source's own Hugging Face layout.
"""

from reap.export.card import add_measurement
from reap.export.export import ExportResult, Outline, export, free_space, outline
from reap.export.hf import export_hf, outline_hf
from reap.export.partial import finished_shards

__all__ = [
    "ExportResult",
    "Outline",
    "add_measurement",
    "export",
    "export_hf",
    "finished_shards",
    "free_space",
    "outline",
    "outline_hf",
]
