"""An export that was cut off gives, taken up again, the very files of one that was not."""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import exports
import mlx.core as mx
import mlx_lm
import models
import numpy as np
import pytest
from stops import Stopped, stop_at
from test_export import saliency

from reap.artifacts import Format, Measurement, Plan
from reap.artifacts.manifest import MANIFEST, check_manifest, read_manifest
from reap.artifacts.partial import locked
from reap.cli import main
from reap.errors import CheckpointError, ReapError
from reap.export import outline
from reap.export.content import Content
from reap.export.export import fingerprint
from reap.export.low_bank import LowBank
from reap.export.samples import Samples
from reap.export.writer import shards
from reap.models.source import SourceModel, open_source

contents = importlib.import_module("reap.export.content")
writing = importlib.import_module("reap.export.writer")
partials = importlib.import_module("reap.export.partial")

KILLS = 4
REAP = "import sys; from reap.cli import main; sys.exit(main())"
CASE = ("qwen3_moe", "two-bank")


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def write(out: Path, *, source: Path | None = None, plan: Plan | None = None, **more: Any) -> Any:
    made = exports.exported(*CASE)
    return exports.write(source or made.source, plan or made.plan, out, **more)


def shards_done(out: Path) -> int:
    try:
        progress = out.with_name(f"{out.name}.partial") / "progress.json"
        return len(json.loads(progress.read_text())["shards"])
    except FileNotFoundError:
        return -1


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """Where an export was cut off in its third layer."""
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        write(out, progress=stop_at("writing layer 2 (3 of 4)"))
    assert shards_done(out) == 1 and not out.exists()
    return out


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Each kill waits for a shard drawn by lot and then a little; in between, all is taken up."""
    made = exports.exported(*CASE)
    whole, draw, reached = files(made.path), random.Random(3), set()
    out, plan = tmp_path / "out", tmp_path / "plan.json"
    # The same file as that of the export to compare with: its digest is in config.json.
    shutil.copy(made.path.with_name(f"{made.path.name}.plan.json"), plan)
    command = ("export", "--model", str(made.source), "--plan", str(plan), "--out", str(out))

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", REAP, *command, "--resume"],
            cwd=tmp_path,
            stderr=subprocess.DEVNULL,
        )

    for _ in range(KILLS):
        process = start()
        shard = draw.randint(max(0, shards_done(out)), 3)
        while process.poll() is None and shards_done(out) < shard:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        reached.add(shards_done(out))
        if out.exists():
            assert files(out) == whole
            shutil.rmtree(out)
    assert max(reached) > 0
    assert out.exists() or start().wait() == 0
    assert files(out) == whole
    assert not out.with_name("out.partial").exists()


def test_stopped_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out = files(exports.exported(*CASE).path), tmp_path / "out"
    steps: list[str] = []
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # mlx-lm imports what was written
    write(out, progress=lambda doing, done, total: steps.append(doing))
    assert files(out) == whole
    shutil.rmtree(out)
    steps = list(dict.fromkeys(steps))
    assert len(steps) > 10
    for step in steps:
        with pytest.raises(Stopped):
            write(out, resume=True, progress=stop_at(step))
        assert not out.exists()
    write(out, resume=True)
    assert files(out) == whole


def test_a_layer_larger_than_a_shard_is_taken_up_in_its_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporting = importlib.import_module("reap.export.export")
    monkeypatch.setattr(exporting, "shards", functools.partial(shards, limit=150_000))
    write(tmp_path / "whole")
    count = len(list((tmp_path / "whole").glob("*.safetensors")))
    assert count > 8
    out = tmp_path / "out"
    real = partials.PartialExport.shard_done
    seen: list[str] = []

    def cut_off(self: Any, name: str, digest: str) -> None:
        real(self, name, digest)
        seen.append(name)
        if len(seen) % 3 == 0:
            raise Stopped

    monkeypatch.setattr(partials.PartialExport, "shard_done", cut_off)
    while not out.exists():
        try:
            write(out, resume=True)
        except Stopped:
            continue
    assert files(out) == files(tmp_path / "whole")
    assert sorted(seen) == sorted({*seen}) and len(seen) == count  # none was written twice


def test_an_unfinished_export_is_not_touched_without_being_told(stopped: Path) -> None:
    partial = stopped.with_name("out.partial")
    before = files(partial)
    with pytest.raises(ReapError, match="was not finished") as raised:
        write(stopped)
    assert raised.value.hint == "go on with --resume, or begin anew with --force"
    assert files(partial).keys() == before.keys()
    write(stopped, force=True)
    assert files(stopped) == files(exports.exported(*CASE).path)
    assert not partial.exists()


def test_what_a_finished_export_left_is_no_obstacle(stopped: Path) -> None:
    """Killed between the rename and the removal of what is beside it."""
    partial = stopped.with_name("out.partial")
    shutil.rmtree(partial / "checkpoint")
    write(stopped)
    assert not partial.exists()


def test_another_model_plan_saliency_or_version_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = exports.exported(*CASE)
    source, out = shutil.copytree(made.source, tmp_path / "source"), tmp_path / "out"
    with pytest.raises(Stopped):
        write(out, source=source, progress=stop_at("writing layer 2 (3 of 4)"))
    before = files(tmp_path / "out.partial")

    def refused(what: str, **more: Any) -> None:
        with pytest.raises(ReapError, match=f"of another export: {what}\\.$") as raised:
            write(out, source=source, resume=True, **more)
        assert "--force" in str(raised.value.hint)

    plan = replace(made.plan, damage=1.0)
    refused("the plan has changed", plan=plan)
    monkeypatch.setattr(partials, "__version__", "9.9")
    refused(r"reap's version was .* and is 9\.9")
    monkeypatch.undo()
    monkeypatch.setattr(partials, "code_sha256", lambda folders: "other")
    refused("reap's code has changed")
    monkeypatch.undo()
    shard = next(source.glob("model*.safetensors"))
    os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
    refused("the model's weights have changed")
    after = files(tmp_path / "out.partial")
    assert {n: c for n, c in after.items() if n != "lock"} == {
        n: c for n, c in before.items() if n != "lock"
    }

    opened, plan_file = open_source(str(source)), tmp_path / "out.plan.json"
    first, second = (fingerprint(opened, plan_file, sha256) for sha256 in ("one", "two"))
    assert {name for name in first if first[name] != second[name]} == {"the saliency file"}


def test_damaged_progress_is_refused(stopped: Path) -> None:
    partial = stopped.with_name("out.partial")
    progress = partial / "progress.json"
    whole = progress.read_text()
    for content in ("", "[]", "{}", whole[:-40]):
        progress.write_text(content)
        with pytest.raises(ReapError, match=r"is damaged|another version") as raised:
            write(stopped, resume=True)
        assert "--force" in str(raised.value.hint)


def test_a_finished_shard_that_was_damaged_is_written_again(stopped: Path) -> None:
    shard = next((stopped.with_name("out.partial") / "checkpoint").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    write(stopped, resume=True)
    whole = exports.exported(*CASE).path / shard.name
    assert (stopped / shard.name).read_bytes() == whole.read_bytes()
    assert {check.status for check in check_manifest(stopped)} == {"ok"}


def test_foreign_files_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.tex").write_text("mine")
    with pytest.raises(ReapError, match=r"not of an export, first thesis\.tex"):
        write(tmp_path / "out", force=True)
    assert (tmp_path / "out.partial" / "thesis.tex").exists()


def test_two_exports_to_one_place_at_once_are_refused(stopped: Path) -> None:
    partial = stopped.with_name("out.partial")
    code = f"from reap.artifacts.partial import locked\nwith locked({str(partial)!r}): input()"
    code = code.replace("locked('", "locked(__import__('pathlib').Path('").replace("'):", "')):")
    holder = subprocess.Popen(
        [sys.executable, "-c", code.replace("input()", "print('held', flush=True); input()")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    before = {n: c for n, c in files(partial).items() if n != "lock"}
    for flags in ({"resume": True}, {"force": True}):
        with pytest.raises(ReapError, match=rf"process {holder.pid} is writing .*out\.partial"):
            write(stopped, **flags)
    assert {n: c for n, c in files(partial).items() if n != "lock"} == before
    holder.kill()  # the lock goes with the process
    holder.wait()
    write(stopped, resume=True)
    with locked(partial), pytest.raises(ReapError, match="is writing"):
        write(stopped, force=True)


def test_a_full_disk_leaves_what_can_be_taken_up(tmp_path: Path) -> None:
    out, plan = tmp_path / "out", exports.exported(*CASE).plan
    sizes = [shard.nbytes for shard in outline(open_source(str(source())), plan).shards]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    assert largest > 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[largest] - 1000, limits[1]))
    try:
        with pytest.raises(ReapError, match=r"could not write .*out: File too large") as raised:
            write(out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "--resume" in str(raised.value.hint)
    assert shards_done(out) == largest
    write(out, resume=True)
    assert files(out) == files(exports.exported(*CASE).path)


def test_only_what_remains_needs_room(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = exports.exported(*CASE).plan
    made = outline(open_source(str(source())), plan)
    done = [shard.name for shard in made.shards[:1]]
    need = made.need(done)
    assert need == made.need() - sum(shard.nbytes for shard in made.shards[:1])
    for free in (need - 1, need):
        usage = type("Usage", (), {"free": free})
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        if free < need:
            with pytest.raises(ReapError, match=f"needs {need:,} bytes more, .* has {free:,} free"):
                write(stopped, resume=True)
    write(stopped, resume=True)


def source() -> Path:
    return exports.source_checkpoint(CASE[0])


def test_a_truncated_source_shard_is_refused_by_name(tmp_path: Path) -> None:
    model = shutil.copytree(source(), tmp_path / "model")
    shard = sorted(model.glob("model*.safetensors"))[2]
    opened = open_source(str(model))
    os.truncate(shard, shard.stat().st_size - 4000)
    with pytest.raises(CheckpointError, match=rf"{shard.name} has .* it is truncated"):
        write(tmp_path / "out", source=model)
    plan = exports.exported(*CASE).plan
    with pytest.raises(
        ReapError, match=rf"{shard.name} cannot be read any more"
    ):  # while it is being read
        exports.write(opened, plan, tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [os.utime, os.unlink])
def test_a_source_that_changes_meanwhile_is_noticed(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    """Whether or not a sample is of what has changed."""
    model = shutil.copytree(source(), tmp_path / "model")
    shard = sorted(model.glob("model*.safetensors"))[2]

    def meanwhile(stage: str, *_: int) -> None:
        if stage == "writing the rest":
            change(shard)

    with pytest.raises(CheckpointError, match="model have changed while they were exported"):
        write(tmp_path / "out", source=model, progress=meanwhile)
    assert not list(tmp_path.glob("out*.partial")) and not (tmp_path / "out").exists()


def test_what_mlx_cannot_read_is_no_bug(tmp_path: Path) -> None:
    """Truncated after its header was read, as if the disk failed."""
    shard = tmp_path / "a.safetensors"
    mx.save_safetensors(str(shard), {"a": mx.zeros((1000,))})
    arrays: Any = mx.load(str(shard))
    os.truncate(shard, 2000)
    with (
        pytest.raises(CheckpointError, match="cannot be read any more: "),
        partials.partial_export(tmp_path / "out", {}, resume=False, force=False),
    ):
        mx.eval(arrays)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


# Reading and memory


@pytest.mark.parametrize("shape", ["identity", "stock", "two-bank"])
def test_the_source_is_read_once_and_dropped_experts_are_not(tmp_path: Path, shape: str) -> None:
    if not Path("/proc/self/io").exists():
        pytest.skip("no /proc")
    path = models.write_qwen3_moe(
        tmp_path / "m", dtype=mx.bfloat16, layers=4, experts=32, intermediate=512
    )
    model = open_source(str(path))
    spec = model.spec()
    plan = exports.hand_plan(spec, exports.kept_experts(spec, shape))
    content = Content(model, plan, spec, LowBank(plan, None))
    kept = sum(len(p.kept) * spec.expert_bytes(m) for p, m in zip(plan.layers, spec.moe_layers))
    rest = model.checkpoint.nbytes - spec.experts_bytes
    assert content.read_bytes() == kept + rest
    largest = max(
        sum(tensor.nbytes for tensor in tensors.values())
        for part, tensors in content.foreseen.items()
        if part is not None
    )
    mx.clear_cache()
    before, start = mx.get_active_memory(), models.read_bytes()
    mx.reset_peak_memory()
    for shard in shards(content.foreseen):
        for part, tensors in shard.parts.items():
            for arrays in content.modules(part, tensors):
                mx.eval(arrays)
    assert models.read_bytes() - start < 1.05 * (kept + rest)
    assert mx.get_peak_memory() - before < 2 * largest + 2**23  # and few experts, dense


def test_stacked_experts_are_rounded_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source's layer, dense and stacked, has eight times the bytes of what is written."""
    if not Path("/proc/self/io").exists():
        pytest.skip("no /proc")
    path = models.write_qwen3_moe(
        tmp_path / "apart", dtype=mx.bfloat16, layers=3, experts=32, intermediate=512
    )
    mlx_lm.convert(str(path), str(tmp_path / "stacked"))
    model = open_source(str(tmp_path / "stacked"))
    spec = model.spec()
    kept = {m.layer: (range(0, spec.num_experts, 2), 0) for m in spec.moe_layers}
    plan = exports.hand_plan(spec, kept, low="2bit-g64")
    content = Content(model, plan, spec, LowBank(plan, None))
    largest = max(
        sum(t.nbytes for t in tensors.values())
        for part, tensors in content.foreseen.items()
        if part is not None
    )
    monkeypatch.setattr(contents, "_DENSE_BYTES", 2**18)
    dense = 2 * spec.experts_bytes // len(spec.moe_layers) // 3
    assert dense > 4 * largest
    mx.clear_cache()
    before, start = mx.get_active_memory(), models.read_bytes()
    mx.reset_peak_memory()
    for part, tensors in content.foreseen.items():
        for arrays in content.modules(part, tensors):
            mx.eval(arrays)
    assert mx.get_peak_memory() - before < 2 * largest
    rest = model.checkpoint.nbytes - spec.experts_bytes
    assert content.read_bytes() == rest + spec.experts_bytes // 2
    assert models.read_bytes() - start < 1.05 * (rest + spec.experts_bytes / 2)


def test_what_is_copied_is_never_in_memory(tmp_path: Path) -> None:
    """Nor read more than once, by the chunk."""
    if not Path("/proc/self/io").exists():
        pytest.skip("no /proc")
    path = models.write_qwen3_moe(
        tmp_path / "m", dtype=mx.bfloat16, layers=4, experts=32, intermediate=512
    )
    model = open_source(str(path))
    spec = model.spec()
    plan = exports.hand_plan(spec, exports.kept_experts(spec, "stock"))
    content = Content(model, plan, spec, LowBank(plan, None))
    made, limit = outline(model, plan), spec.experts_bytes // len(spec.moe_layers) // 3
    mx.clear_cache()
    before, start = mx.get_active_memory(), models.read_bytes()
    mx.reset_peak_memory()
    for shard in made.shards:
        for _ in writing._data(content, shard, lambda *_: None):
            pass
    assert mx.get_peak_memory() - before < limit / 2
    assert models.read_bytes() - start < 1.05 * made.read_bytes


# Samples


def test_an_expert_in_another_ones_place_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mapping is wrong in the writer alone: every tensor is well formed and finite."""
    made = exports.exported("qwen3_moe", "identity")

    def rotated(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args: real(self, *args[:-1], (*args[-1][1:], args[-1][0]))

    for owner, name in (
        (SourceModel, "expert_bytes"),
        (Content, "_experts"),
        (Content, "_rounded"),
    ):
        monkeypatch.setattr(owner, name, rotated(getattr(owner, name)))
    with pytest.raises(ReapError, match=r"expert 0 in model\.layers\.0\..* differs"):
        exports.write(made.source, made.plan, tmp_path / "high")
    spec = exports.spec_of("qwen3_moe")
    kept = {m.layer: (range(spec.num_experts), 0) for m in spec.moe_layers}
    for low in ("2bit", "4bit"):
        plan = exports.hand_plan(spec, kept, low=low)
        with pytest.raises(ReapError, match=r"layer 0, expert 0: the output .* is off by [12]"):
            exports.write(made.source, plan, tmp_path / low)


def test_the_measured_error_is_what_is_expected_if_it_is_more_than_usual() -> None:
    """By hand: 7 of 10 in energy per token, on other numbers of tokens; else by the bits."""
    made = exports.exported(*CASE)
    model, two, three = (
        open_source(str(made.source)),
        Format(2, 128, "affine"),
        Format(3, 128, "affine"),
    )
    found = saliency(made.spec)
    shape = found.gate2_norm2.shape
    energy = np.zeros(shape)
    energy[:, :, :, 0] = 50.0  # two halves: 100
    tokens = np.full(shape[:3], 5)  # 10 tokens: 10 a token
    layers, experts = shape[2:]
    error = np.zeros((2, layers, experts))
    error[0, :, 1] = 28.0  # on 4 tokens: 7 a token
    error[1] = 1e-3
    measurement = Measurement(
        formats=(two, three),
        tokens=np.full(layers, 4),
        kept=np.zeros(1, int),
        order=np.zeros((layers, experts), int),
        output_energy=np.ones(layers),
        drop_error=np.ones((layers, 1)),
        low_error=np.ones((2, layers)),
        low_expert_error=error,
        kl_kept=np.zeros(0, int),
        drop_kl=np.zeros(0),
        low_kl=np.zeros(0),
    )
    found = replace(found, gate2_norm2=energy, tokens=tokens, measurement=measurement)
    stored = {p.name: p.format for p in made.spec.moe_layers[0].projections}

    def expected(format: Format) -> float:
        formats = dict.fromkeys(stored, format)
        return Samples(model, model, made.plan, made.spec, found).expected(0, formats, stored)

    assert expected(two) == pytest.approx(0.7)
    assert expected(three) == 0.2
    assert expected(Format(4, 64, "affine")) == 0.1  # not measured


# Checksums


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(exports.exported(*CASE).path, tmp_path / "checkpoint")


def test_the_manifest_is_what_sha256sum_reads(checkpoint: Path) -> None:
    names = files(checkpoint).keys() - {MANIFEST}
    assert read_manifest(checkpoint).keys() == names
    if shutil.which("sha256sum"):
        done = subprocess.run(
            ["sha256sum", "-c", "--strict", MANIFEST], cwd=checkpoint, capture_output=True
        )
        assert done.returncode == 0 and done.stdout.count(b": OK\n") == len(names)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "bit flipped": (
        "model-00002-of-00003.safetensors is changed",
        lambda p: flip(p / "model-00002-of-00003.safetensors"),
    ),
    "shard missing": (
        "model-00003-of-00003.safetensors is missing",
        lambda p: (p / "model-00003-of-00003.safetensors").unlink(),
    ),
    "config edited": ("config.json is changed", lambda p: flip(p / "config.json")),
    "tokenizer missing": ("tokenizer.json is missing", lambda p: (p / "tokenizer.json").unlink()),
    "stale shard": (
        "model-00001-of-00001.safetensors is extra",
        lambda p: (p / "model-00001-of-00001.safetensors").write_bytes(b""),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_inspect_names_what_is_damaged(
    damage: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message, harm = DAMAGES[damage]
    harm(checkpoint)
    assert main(["inspect", str(checkpoint)]) == 1
    out, err = capsys.readouterr()
    assert f"error: {checkpoint} is damaged: {message}.\n" in err and not out


def test_inspect_lists_the_files(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "note.txt").write_text("mine")
    for flags, status in (((), "ok"), (("--no-verify",), "present")):
        assert main(["inspect", str(checkpoint), "--json", *flags]) == 0
        found = {file["path"]: file for file in json.loads(capsys.readouterr().out)["files"]}
        assert found.pop("note.txt")["status"] == "extra"
        assert {file["status"] for file in found.values()} == {status}
        assert {n: file["sha256"] for n, file in found.items()} == read_manifest(checkpoint)
    flip(checkpoint / "model-00001-of-00003.safetensors")
    assert main(["inspect", str(checkpoint), "--no-verify"]) == 0


def test_a_manifest_that_is_none_is_refused(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text("hello\n")
    with pytest.raises(ReapError, match="not a line of sha256sum"):
        check_manifest(checkpoint)


# What would be written


def test_a_dry_run_says_what_is_written_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, work = exports.exported("kimi_k3", "two-bank"), tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    made.plan.save(tmp_path / "plan.json")
    argv = ["export", "--model", str(made.source), "--plan", str(tmp_path / "plan.json")]
    argv += ["--out", "new/out", "--dry-run"]
    assert main(argv) == 0
    assert "model-00001-of-" in capsys.readouterr().err
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not list(work.iterdir())
    tensors = {file.name: mx.load(str(file)) for file in made.path.glob("*.safetensors")}
    assert {s["file"]: (s["tensors"], s["bytes"]) for s in found["shards"]} == {
        name: (len(shard), sum(a.nbytes for a in shard.values())) for name, shard in tensors.items()
    }
    assert found["tensors"] == made.result.tensors
    assert found["bytes"]["total"] == made.result.nbytes
    assert found["bytes"]["low"] == made.plan.waterfall.low
    assert {f["file"]: f["bytes"] for f in found["copied"]} == {
        path.name: path.stat().st_size
        for path in made.source.iterdir()
        if not path.name.startswith(("model", "config.json", "README"))
    }


def test_a_dry_run_of_what_is_taken_up_says_what_is_left(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["export", "--model", str(source()), "--plan", f"{stopped}.plan.json"]
    argv += ["--out", str(stopped), "--dry-run"]
    assert main([*argv, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main([*argv, "--resume", "--json"]) == 0
    left = json.loads(capsys.readouterr().out)
    assert [shard["done"] for shard in left["shards"]] == [True, False, False]
    assert not any(shard["done"] for shard in whole["shards"])
    assert whole["write_bytes"] - left["write_bytes"] == left["shards"][0]["bytes"]
    assert main([*argv, "--resume"]) == 0
    assert " done" in capsys.readouterr().err
    (stopped.with_name("out.partial") / "progress.json").write_text("{")
    assert main([*argv, "--resume"]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_small_directories_are_copied_and_other_checkpoints_are_not(tmp_path: Path) -> None:
    model = shutil.copytree(source(), tmp_path / "model")
    for name in ("additional_chat_templates/tool.jinja", "original/params.json", "a/b/c.txt"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(name)
    for name in ("original/consolidated.00.pth", "onnx/model.onnx", ".cache/download.json"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(name)
    out = tmp_path / "out"
    write(out, source=model)
    found = files(out)
    assert {name for name in found if "/" in name} == {
        "additional_chat_templates/tool.jinja",
        "a/b/c.txt",
    }
    assert {"a/b/c.txt", "additional_chat_templates/tool.jinja"} <= read_manifest(out).keys()


def test_the_plan_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, real = exports.exported(*CASE), Plan.load
    made.plan.save(tmp_path / "plan.json")
    read: list[Path] = []
    monkeypatch.setattr(Plan, "load", lambda path: (read.append(path), real(path))[1])
    argv = ["export", "--model", str(made.source), "--plan", str(tmp_path / "plan.json")]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 0
    assert len(read) == 1
