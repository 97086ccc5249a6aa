"""What flows between the stages: one frozen dataclass per file, numpy and stdlib only."""

from reap.artifacts.evaluation import DocumentScore, DomainScore, Evaluation
from reap.artifacts.moments import SecondMoments
from reap.artifacts.plan import Bank, LayerPlan, Plan, Waterfall
from reap.artifacts.provenance import Corpus, Provenance
from reap.artifacts.saliency import Measurement, Saliency
from reap.artifacts.spec import Format, ModelSpec, ModuleSpec, MoeLayer, Projection

__all__ = [
    "Bank",
    "Corpus",
    "DocumentScore",
    "DomainScore",
    "Evaluation",
    "Format",
    "LayerPlan",
    "Measurement",
    "ModelSpec",
    "ModuleSpec",
    "MoeLayer",
    "Plan",
    "Projection",
    "Provenance",
    "Saliency",
    "SecondMoments",
    "Waterfall",
]
