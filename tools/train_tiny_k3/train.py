"""Trains the model in two phases of one run, and evaluates it.

Phase 1 keeps the experts evenly busy by moving the router's correction bias, so that all of them
learn. In phase 2 the bias almost stands still: it only lifts starving experts of a layer where one
got no token at all. Routing then becomes uneven, as it is in large models, and pruning has
something to find.

A run can be interrupted at any time; the next one continues from the latest checkpoint.
"""

import hashlib
import math
import os
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import ModelConfig
from .corpus import SAMPLING_WEIGHTS
from .model import KimiK3


@dataclass(frozen=True)
class TrainConfig:
    """How to train. With `steps` the run is repeatable; with `minutes` it fits the time there is.

    Attributes:
        minutes: training time, if `steps` is None.
        balanced: share of the run that is phase 1.
        balancing_rate: how far the bias of an expert moves per step in phase 1.
        rescue_rate: the same in phase 2, in layers where an expert got no token.
        hold: share of the run after which the learning rate falls to `final_learning_rate`.
    """

    seed: int = 0
    minutes: float = 90.0
    steps: int | None = None
    batch_size: int = 16
    sequence_length: int = 256
    balanced: float = 0.5
    balancing_rate: float = 1e-3
    rescue_rate: float = 1e-4
    learning_rate: float = 3e-3
    final_learning_rate: float = 3e-5
    warmup_steps: int = 100
    hold: float = 0.6
    weight_decay: float = 0.1
    gradient_norm: float = 1.0
    report_steps: int = 50
    checkpoint_steps: int = 100
    evaluation_steps: int = 500
    evaluation_sequences: int = 8

    def progress(self, step: int, seconds: float) -> float:
        """Share of the run that is over, at `step` and after `seconds` of training."""
        return step / self.steps if self.steps is not None else seconds / (60 * self.minutes)

    def rate(self, step: int, progress: float) -> float:
        """Learning rate: warm up, hold, then fall linearly."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        left = min(1.0, (1 - progress) / (1 - self.hold))
        return max(self.final_learning_rate, self.learning_rate * warm * left)


@dataclass(frozen=True)
class Tokens:
    """Token ids [tokens] by domain."""

    training: Mapping[str, Tensor]
    evaluation: Mapping[str, Tensor]

    def digest(self) -> str:
        """Identifies the training tokens, in a checkpoint."""
        digest = hashlib.sha256()
        for name, ids in sorted(self.training.items()):
            digest.update(name.encode())
            digest.update(ids.numpy().tobytes())
        return digest.hexdigest()


def train(model_config: ModelConfig, config: TrainConfig, tokens: Tokens, path: Path) -> KimiK3:
    """Train a model from scratch or from the checkpoint at `path`, and return it."""
    torch.set_flush_denormal(True)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.seed)
    model = KimiK3(model_config)
    optimizer = _optimizer(model, config)
    settings = {"tokens": tokens.digest(), **_flat(model_config), **_flat(config)}
    step, seconds = 0, 0.0
    if path.is_file():
        step, seconds = _restore(path, model, optimizer, settings)
        _say(f"continuing after step {step}")

    started = time.monotonic() - seconds
    while (progress := config.progress(step, seconds)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = config.rate(step, progress)
        loss = _loss(model, _batch(tokens.training, config, step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_norm)
        optimizer.step()
        _move_biases(model, config, balanced=progress < config.balanced)
        step += 1
        seconds = time.monotonic() - started

        if step % config.report_steps == 0 or step == 1:
            phase = 1 if progress < config.balanced else 2
            _say(f"step {step}, {progress:.1%}, phase {phase}: loss {loss.item():.3f}")
        if step % config.evaluation_steps == 0:
            _say(f"step {step}: perplexity {perplexities(model, tokens, config)}")
        if step % config.checkpoint_steps == 0:
            _save(path, model, optimizer, settings, step, seconds)
    _save(path, model, optimizer, settings, step, seconds)
    return model.eval()


@torch.no_grad()
def perplexities(model: KimiK3, tokens: Tokens, config: TrainConfig) -> dict[str, float]:
    """Perplexity per token of each domain, on the first sequences of its evaluation documents."""
    values = {}
    for name, ids in tokens.evaluation.items():
        batch = sequences(ids, config.evaluation_sequences, config.sequence_length + 1)
        values[name] = round(math.exp(_loss(model, batch).item()), 2)
    return values


@torch.no_grad()
def routing(model: KimiK3, tokens: Tokens, config: TrainConfig) -> Tensor:
    """Tokens sent to each expert [layers, experts], over the sequences that `perplexities` uses."""
    pairs = torch.zeros((), dtype=torch.long)
    for ids in tokens.evaluation.values():
        model(sequences(ids, config.evaluation_sequences, config.sequence_length))
        pairs = pairs + torch.stack([mixture.pairs_per_expert for mixture in model.mixtures()])
    return pairs


def sequences(ids: Tensor, count: int, length: int) -> Tensor:
    """The first `count` (or fewer) runs of `length` ids, as [count, length]."""
    count = min(count, len(ids) // length)
    return ids[: count * length].view(count, length)


def _loss(model: KimiK3, batch: Tensor) -> Tensor:
    """Mean cross entropy of the next tokens in batch [B, T + 1]."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def _batch(training: Mapping[str, Tensor], config: TrainConfig, step: int) -> Tensor:
    """Random training sequences [batch, T + 1]; they depend on the seed and the step only."""
    generator = random.Random(f"{config.seed} {step}")
    names = list(SAMPLING_WEIGHTS)
    length = config.sequence_length + 1
    rows = []
    for name in generator.choices(names, list(SAMPLING_WEIGHTS.values()), k=config.batch_size):
        start = generator.randrange(len(training[name]) - length)
        rows.append(training[name][start : start + length])
    return torch.stack(rows)


@torch.no_grad()
def _move_biases(model: KimiK3, config: TrainConfig, *, balanced: bool) -> None:
    """Raise the correction bias of experts that got less than their share, lower the others'."""
    for mixture in model.mixtures():
        pairs = mixture.pairs_per_expert.float()
        rescued = config.rescue_rate if (pairs == 0).any() else 0.0
        rate = config.balancing_rate if balanced else rescued
        mixture.gate.e_score_correction_bias += rate * torch.sign(pairs.mean() - pairs)


def _optimizer(model: KimiK3, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; only matrices decay, not norms, convolutions, biases and residual scores."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        is_matrix = parameter.ndim >= 2 and min(parameter.shape) > 1
        (matrices if is_matrix else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def _flat(config: ModelConfig | TrainConfig) -> dict[str, Any]:
    """The fields of `config` in types that a checkpoint gives back unchanged."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(config).items()
    }


def _save(
    path: Path,
    model: KimiK3,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    step: int,
    seconds: float,
) -> None:
    """Replace the checkpoint at `path`, never leaving half of one."""
    checkpoint = {
        "settings": settings,
        "step": step,
        "seconds": seconds,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    partial = path.with_suffix(".partial")
    torch.save(checkpoint, partial)
    os.replace(partial, path)


def _restore(
    path: Path, model: KimiK3, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> tuple[int, float]:
    """Load the checkpoint at `path`; return its step and the seconds spent up to it."""
    checkpoint = torch.load(path, weights_only=True)
    changed = [name for name in settings if settings[name] != checkpoint["settings"].get(name)]
    if changed:
        raise ValueError(
            f"{path} was made with other settings ({', '.join(changed)}): delete it to start over"
        )
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["step"], checkpoint["seconds"]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
