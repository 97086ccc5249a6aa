"""A calibration that was cut off gives, taken up again, the very file of one that was not."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import pytest
from stops import Stopped, stop_at

from reap.artifacts import Format
from reap.calibrate import CalibrationSettings, calibrate
from reap.calibrate.estimate import estimate
from reap.errors import ReapError
from reap.models.source import open_source
from reap.models.text import TextSet, load_texts

KILLS = 10
REAP = "import sys; from reap.cli import main; sys.exit(main())"
PARTIAL = "run/calibration.partial"
SALIENCY = "run/saliency.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_qwen3_moe(tmp_path_factory.mktemp("models") / "q", layers=4)


def arguments(model: Path, *more: str) -> list[str]:
    return [
        *("calibrate", str(model), "--run", "run", "--calibration", "math", "--tokens", "600"),
        *("--batch-tokens", "128", "--sequence-length", "64", "--probe-tokens", "100", *more),
    ]


def start(where: Path, model: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", REAP, *arguments(model, *more)],
        cwd=where,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def complete(where: Path, model: Path, *more: str) -> str:
    process = start(where, model, *more)
    _, err = process.communicate()
    assert process.returncode == 0, err
    return err


def layers_done(where: Path) -> int:
    try:
        return int(json.loads((where / PARTIAL / "progress.json").read_text())["layers_done"])
    except OSError:
        return -1


@pytest.fixture(scope="module")
def uninterrupted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    where = tmp_path_factory.mktemp("whole")
    complete(where, checkpoint)
    assert not (where / PARTIAL).exists()
    return (where / SALIENCY).read_bytes()


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path, checkpoint: Path, uninterrupted: bytes) -> None:
    """Each kill waits for a layer drawn by lot and then a little; in between, all is taken up."""
    draw = random.Random(7)
    kills = reached = 0
    while kills < KILLS:
        process = start(tmp_path, checkpoint, "--resume")
        layer = draw.randint(max(0, layers_done(tmp_path)), 4)
        while process.poll() is None and layers_done(tmp_path) < layer:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        reached = max(reached, layers_done(tmp_path))
        if (tmp_path / SALIENCY).exists():
            assert (tmp_path / SALIENCY).read_bytes() == uninterrupted
            shutil.rmtree(tmp_path / "run")
    assert reached > 0
    if not (tmp_path / SALIENCY).exists():
        complete(tmp_path, checkpoint, "--resume")
    assert (tmp_path / SALIENCY).read_bytes() == uninterrupted
    assert not (tmp_path / PARTIAL).exists()


# Within one process


SETTINGS = CalibrationSettings(
    tokens=150,
    sequence_length=32,
    batch_tokens=64,
    probe_tokens=40,
    low_formats=(Format(2, 64, "affine"),),
)


def run(model: Path, partial: Path, settings: CalibrationSettings = SETTINGS, **more: Any) -> Any:
    texts: Sequence[TextSet] = more.pop("texts", None) or load_texts(["math"], split="calibration")
    return calibrate(open_source(str(model)), texts, settings, partial=partial, **more)


def tensors(saliency: Any, at: Path) -> bytes:
    saliency.save(at, force=True)
    return at.read_bytes()


@pytest.mark.parametrize("memory", [0, 20_000, None])
@pytest.mark.parametrize(
    ("family", "rounding", "compared"),
    [("kimi_k3", "weighted", 17), ("qwen3_moe", "feedback", None)],
)
def test_stopped_in_every_layer(
    tmp_path: Path,
    checkpoint: Path,
    tiny_k3: Path,
    family: str,
    rounding: str,
    compared: int | None,
    memory: int | None,
) -> None:
    model = tiny_k3 if family == "kimi_k3" else checkpoint
    settings = replace(SETTINGS, low_rounding=rounding, sensitivity_tokens=compared)
    found = run(model, tmp_path / "w", settings)
    assert found.measurement.kl_tokens < found.measurement.tokens[0] or not compared
    whole = tensors(found, tmp_path / "f")
    partial = tmp_path / "p"
    count = len(open_source(str(model)).layers)
    stops = [f"layer {n - 1} ({n} of {count})" for n in range(2, count + 1)]
    for number, doing in enumerate([*stops, "comparing"], 1):
        with pytest.raises(Stopped):
            run(model, partial, settings, progress=stop_at(doing), resume=True, memory=memory)
        assert json.loads((partial / "progress.json").read_text())["layers_done"] == number
    taken_up = run(model, partial, settings, resume=True, memory=memory)
    assert tensors(taken_up, tmp_path / "f") == whole


@pytest.fixture
def stopped(tmp_path: Path, checkpoint: Path) -> tuple[Path, Path]:
    """A model and what a run of it left after its first layer."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    with pytest.raises(Stopped):
        run(model, tmp_path / "p", progress=stop_at("layer 1 (2 of 4)"))
    return model, tmp_path / "p"


CHANGED = {
    "tokens": ({"tokens": 149}, "the setting tokens was 150 and is 149"),
    "sequence_length": ({"sequence_length": 30}, "the setting sequence_length was 32 and is 30"),
    "batch_tokens": ({"batch_tokens": 65}, "the setting batch_tokens was 64 and is 65"),
    "probe_tokens": ({"probe_tokens": 41}, "the setting probe_tokens was 40 and is 41"),
    "documents": (
        {"documents": "truncate"},
        "the setting documents was '?split'? and is '?truncate'?",
    ),
    "sensitivity": ({"sensitivity": False}, "the setting sensitivity was True and is False"),
    "sensitivity_tokens": (
        {"sensitivity_tokens": 17},
        "the setting sensitivity_tokens was None and is 17",
    ),
    "low_rounding": (
        {"low_rounding": "plain"},
        "the setting low_rounding was '?weighted'? and is '?plain'?",
    ),
    "low": ({"low_formats": ()}, r"the setting low_formats was \['2-bit g64'\] and is \[\]"),
}


@pytest.mark.parametrize("setting", CHANGED)
def test_another_setting_is_refused_by_name(stopped: tuple[Path, Path], setting: str) -> None:
    changes, message = CHANGED[setting]
    with pytest.raises(ReapError, match=f"is of another run: {message}\\."):
        run(*stopped, CalibrationSettings(**(vars(SETTINGS) | changes)), resume=True)


def test_every_setting_is_tried() -> None:
    assert {next(iter(changes)) for changes, _ in CHANGED.values()} == set(vars(SETTINGS))


def test_another_model_text_or_version_is_refused_by_name(
    stopped: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, partial = stopped
    (text,) = load_texts(["math"], split="calibration")
    other = TextSet(text.domain, text.source, "0" * 64, text.documents[1:])
    with pytest.raises(ReapError, match=r"another run: the text of math has changed\."):
        run(model, partial, texts=[other], resume=True)
    notes = TextSet(text.domain, "notes", "0" * 64, text.documents[1:])
    several = "the texts have changed, the text of notes has changed, the text of math has changed"
    with pytest.raises(ReapError, match=f"another run: {several}\\."):
        run(model, partial, texts=[notes], resume=True)
    monkeypatch.setattr("reap.calibrate.resume.__version__", "9.9")
    with pytest.raises(ReapError, match=r"another run: reap's version was .* and is 9\.9\."):
        run(model, partial, resume=True)
    monkeypatch.undo()
    shard = sorted(model.glob("model*.safetensors"))[1]
    before = shard.stat()
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(ReapError, match=r"another run: the model's weights have changed\."):
        run(model, partial, resume=True)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    config = model / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(ReapError, match=r"another run: the model's config\.json has changed\."):
        run(model, partial, resume=True)


def test_without_resume_an_unfinished_run_is_not_touched(stopped: tuple[Path, Path]) -> None:
    with pytest.raises(ReapError, match="was not finished") as raised:
        run(*stopped)
    assert raised.value.hint == "go on with --resume, or begin anew with --force"


def test_damaged_progress_is_refused(stopped: tuple[Path, Path]) -> None:
    model, partial = stopped
    progress = partial / "progress.json"
    whole = progress.read_text()
    for content in ("", "[]", "{}", whole[:-40]):
        progress.write_text(content)
        with pytest.raises(ReapError, match=r"is damaged|another version") as raised:
            run(model, partial, resume=True)
        assert "--force" in str(raised.value.hint)


def test_a_full_disk_leaves_what_can_be_taken_up(
    stopped: tuple[Path, Path], tmp_path: Path
) -> None:
    model, partial = stopped
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = (partial / "progress.json").read_bytes()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.raises(ReapError, match="could not write"):
            run(model, partial, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (partial / "progress.json").read_bytes() == before
    found = tensors(run(model, partial, resume=True), tmp_path / "f")
    assert found == tensors(run(model, tmp_path / "w"), tmp_path / "f")


# Memory and reading


def test_experts_never_get_more_rows_than_one_call_takes(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models.switch_layers import SwitchGLU

    seen: list[int] = []
    real = SwitchGLU.__call__

    def counted(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        seen.append(indices.size)
        return real(self, x, indices)

    monkeypatch.setattr(SwitchGLU, "__call__", counted)
    monkeypatch.setattr("reap.models.source.ROWS_PER_CALL", 200)
    run(
        checkpoint,
        tmp_path / "p",
        CalibrationSettings(tokens=600, sequence_length=64, batch_tokens=10**6, probe_tokens=100),
    )
    assert 100 < max(seen) <= 200


def test_weights_are_read_once(tmp_path: Path) -> None:
    """Of everything the process reads, in bytes that pass through read calls (Linux)."""
    if not Path("/proc/self/io").exists():
        pytest.skip("no /proc")
    path = models.write_qwen3_moe(tmp_path / "m", layers=6, experts=32, intermediate=512)
    source = open_source(str(path))
    texts = load_texts(["math"], split="calibration")
    size = source.checkpoint.nbytes
    settings = CalibrationSettings(tokens=100, sequence_length=32, batch_tokens=64, probe_tokens=40)
    calibrate(open_source(str(models.embedded_model())), texts, settings)  # imports are done
    start = models.read_bytes()
    source.spec()
    assert models.read_bytes() - start < 0.01 * size
    start = models.read_bytes()
    calibrate(source, texts, settings)
    assert models.read_bytes() - start < 1.02 * size + 2_000_000  # the tokenizer's files


def test_ranges_cover_a_layer_and_nothing_else(checkpoint: Path) -> None:
    source = open_source(str(checkpoint))
    for index in range(len(source.layers)):
        ranges = source.checkpoint.ranges(source._names[index])
        assert sum(size for _, _, size in ranges) == source.layer_bytes(index)
        (file, offset, size), *more = ranges
        assert not more  # neighbours are joined
        assert offset + size == file.stat().st_size
    source.prefetch(1)
    assert source._prefetched is not None
    source._prefetched.wait()


@pytest.mark.parametrize("family", ["kimi_k3", "qwen3_moe"])
def test_a_dry_run_says_what_the_run_takes_and_writes_nothing(
    tmp_path: Path, checkpoint: Path, tiny_k3: Path, family: str
) -> None:
    model = tiny_k3 if family == "kimi_k3" else checkpoint
    argv = [*arguments(model), "--dry-run", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", REAP, *argv], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    source = open_source(str(model))
    assert found["layers"] == len(source.layers)
    # All but what mlx-lm does not load.
    names = source.loaded_names()
    assert found["read_bytes"] == sum(source.checkpoint.tensors[n].nbytes for n in names)
    assert found["seconds"] > 0 and found["scratch_bytes"] > 600 * 128 * 4
    assert 64 < found["sensitivity_tokens"] < found["probe_tokens"]
    assert not list(tmp_path.iterdir())


def test_an_estimate_counts_the_variants_on_their_own_tokens(checkpoint: Path) -> None:
    """4 layers, all with experts: two kinds of variants go through 4 + 3 + 2 + 1 of them and the
    head each, and eight of them are kept beside the batch itself."""
    texts = load_texts(["math"], split="calibration")
    settings = CalibrationSettings(tokens=600, sequence_length=64, probe_tokens=100)
    passes, states = 2 * (5 + 4 + 3 + 2), 8
    per_token = []
    for changes, carried, compared in (
        ({"sensitivity_tokens": 100}, 600 + 128, 128),
        ({}, 600 + 128 + 104, 4 * (600 + 128) // passes),
        ({"sensitivity_tokens": 30}, 600 + 128 + 30, 30),
        ({"sensitivity": False}, 600 + 128, 0),
    ):
        found = estimate(open_source(str(checkpoint)), texts, replace(settings, **changes))
        assert (found.tokens, found.probe_tokens) == (600, 128)
        assert found.sensitivity_tokens == compared
        per_token.append(found.scratch_bytes / (carried + states * compared))
        computing = found.seconds - found.read_bytes / found.read_rate - found.measuring_seconds
        expected = found.seconds_per_token * (4 * carried + passes * compared)
        assert computing == pytest.approx(expected)
    assert per_token == pytest.approx([128 * 4] * 4)
