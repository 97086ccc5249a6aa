"""Entry point: corpus, tokenizer, training, packing and a report, in this order."""

import argparse
import os
import platform
import sys
import sysconfig
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .config import ModelConfig
from .corpus import CorpusConfig, build_corpus, write_texts
from .model import KimiK3
from .pack import load_packed, pack
from .tokens import encode, load_or_train_tokenizer
from .train import Tokens, TrainConfig, perplexities, routing, sequences, train

DEBIAN_DOCS = Path("/usr/share/doc/python3.11/html/_sources")
SMOKE_STEPS = 12


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m tools.train_tiny_k3",
        description="Train a small model with Kimi-K3's architecture and pack it like the release.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = result.add_argument
    add("--out", type=Path, required=True, help="directory for model/, text/ and work/")
    length = result.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=90.0, help="training time")
    length.add_argument("--steps", type=int, help="train so many steps instead: repeatable")
    length.add_argument(
        "--smoke",
        action="store_true",
        help=f"try the pipeline: {SMOKE_STEPS} steps, little text, standard library only",
    )
    add("--seed", type=int, default=0, help="decides corpus split, first weights and batches")
    add("--threads", type=int, default=os.cpu_count(), help="threads for torch")
    add("--kjv", type=Path, default=Path("kjv.txt"), help="output of `bible gen1:1-rev22:21`")
    add("--docs", type=Path, default=DEBIAN_DOCS, help="sources of Debian's python3.11-doc")
    add("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")), help="Python's library")
    return result


def main() -> None:
    """Run the tool."""
    command = parser()
    options = command.parse_args()
    model_directory = options.out / "model"
    if model_directory.exists():
        command.error(f"{model_directory} exists already: remove it or choose another --out")
    if not options.smoke:
        if not options.kjv.is_file():
            command.error(f"no {options.kjv}: bible gen1:1-rev22:21 > {options.kjv}")
        if not options.docs.is_dir():
            command.error(f"no {options.docs}: install python3.11-doc or name --docs")
    if platform.libc_ver()[0] == "glibc" and "MALLOC_MMAP_MAX_" not in os.environ:
        print("slow allocator settings: see 'Speed' in README.md", file=sys.stderr)
    torch.set_num_threads(options.threads)

    try:
        run(options, model_directory)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: the same command continues from the latest checkpoint")


def run(options: argparse.Namespace, model_directory: Path) -> None:
    """Do everything that the checked options ask for."""
    work = options.out / "work"
    corpus_config, train_config = configs(options)
    model_config = ModelConfig()

    domains = build_corpus(corpus_config)
    write_texts(domains, options.out / "text")
    tokenizer = load_or_train_tokenizer(
        work / "tokenizer.json", domains, model_config.vocabulary_size
    )
    tokens = Tokens(
        training={domain.name: encode(tokenizer, domain.training) for domain in domains},
        evaluation={domain.name: encode(tokenizer, domain.evaluation) for domain in domains},
    )
    counts = {name: len(ids) for name, ids in tokens.training.items()}
    print(f"training tokens: {counts}", file=sys.stderr)

    model = train(model_config, train_config, tokens, work / "checkpoint.pt")
    size = pack(model, tokenizer, model_directory)
    packed = load_packed(model_directory, model_config)
    probe = torch.cat([sequences(ids, 1, 256) for ids in tokens.evaluation.values()])
    save_file({"tokens": probe, "logits": logits(packed, probe)}, work / "probe.safetensors")

    trained_perplexities = perplexities(model, tokens, train_config)
    packed_perplexities = perplexities(packed, tokens, train_config)
    print(f"{'perplexity':<12}{'trained':>10}{'packed':>10}")
    for name in tokens.evaluation:
        print(f"{name:<12}{trained_perplexities[name]:>10}{packed_perplexities[name]:>10}")
    for layer, pairs in enumerate(
        routing(packed, tokens, train_config), start=model_config.dense_layers
    ):
        busiest, idle = pairs.max() / pairs.sum(), int((pairs == 0).sum())
        print(f"layer {layer}: busiest expert {busiest:.1%} of the pairs, {idle} experts idle")
    print(f"Wrote {model_directory} ({size / 1e6:.1f} MB)")


def configs(options: argparse.Namespace) -> tuple[CorpusConfig, TrainConfig]:
    """The settings that the options ask for."""
    if options.smoke:
        corpus = CorpusConfig(
            stdlib=options.stdlib,
            docs=None,
            kjv=None,
            seed=options.seed,
            text_characters=300_000,
            tools_characters=100_000,
            math_characters=100_000,
        )
        training = TrainConfig(
            seed=options.seed,
            steps=SMOKE_STEPS,
            batch_size=4,
            warmup_steps=4,
            report_steps=4,
            checkpoint_steps=6,
            evaluation_sequences=2,
        )
        return corpus, training
    corpus = CorpusConfig(
        stdlib=options.stdlib, docs=options.docs, kjv=options.kjv, seed=options.seed
    )
    return corpus, TrainConfig(seed=options.seed, minutes=options.minutes, steps=options.steps)


@torch.no_grad()
def logits(model: KimiK3, tokens: Tensor) -> Tensor:
    """Logits [B, T, vocabulary] for tokens [B, T]."""
    return model(tokens)


if __name__ == "__main__":
    main()
