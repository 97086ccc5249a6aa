"""Two processes under mlx.launch give what one gives; what ends one of them ends both."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import models
import numpy as np
import pytest
from safetensors.numpy import load_file

from reap.artifacts import Saliency
from reap.calibrate import CalibrationSettings, calibrate
from reap.cli import main, stages
from reap.cli.calibrate import _print_estimate
from reap.errors import ReapError
from reap.models.ranks import Ranks, _failed, launched, share
from reap.models.source import open_source
from reap.models.text import load_texts
from reap.planning import PlanSettings, make_plan

pytestmark = pytest.mark.skipif(
    not mx.distributed.is_available("ring"), reason="this MLX has no ring back end"
)

BIN = Path(sys.executable).parent
REAP = "import sys; from reap.cli import main; sys.exit(main())"
LIMIT = 180  # seconds in which any launch ends, on a busy machine
ARGUMENTS = (
    *("calibrate", "q", "--run", "run", "--calibration", "math", "--tokens", "600"),
    *("--batch-tokens", "128", "--sequence-length", "64", "--probe-tokens", "100"),
)
PARTIAL = Path("run/calibration.partial")
SALIENCY = Path("run/saliency.safetensors")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_qwen3_moe(tmp_path_factory.mktemp("models") / "q", layers=4)


def free_port() -> int:
    """The first of two ports that nobody listens on."""
    while True:
        port = random.randint(20_000, 50_000)
        try:
            for each in (port, port + 1):
                with socket.socket() as tried:
                    tried.bind(("127.0.0.1", each))
        except OSError:
            continue
        return port


class Launch:
    """`mlx.launch -n 2` of a command, each rank in a directory of its own below `where`.

    Two directories are two machines: each has its own model and its own run.
    """

    def __init__(self, where: Path, *command: str, before: str = "") -> None:
        """before: shell commands that each rank runs first."""
        self.where = where
        for rank in (0, 1):
            (where / f"m{rank}").mkdir(exist_ok=True)
            (where / f"m{rank}/pid").unlink(missing_ok=True)
        shell = f'cd m$MLX_RANK; echo $$ > pid; {before} exec "$@"'
        stdin, self._open = os.pipe()  # mlx.launch reads it again and again once it is closed
        self.process = subprocess.Popen(
            [
                *(str(BIN / "mlx.launch"), "-n", "2", "--backend", "ring"),
                *("--starting-port", str(free_port()), "--", "bash", "-c", shell, "bash", *command),
            ],
            cwd=where,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(stdin)

    def kill(self, rank: int, what: signal.Signals = signal.SIGKILL) -> None:
        """As soon as it runs."""
        file = self.where / f"m{rank}/pid"
        while not (file.exists() and file.read_text().endswith("\n")):
            time.sleep(0.01)
        os.kill(int(file.read_text()), what)

    def ended(self) -> tuple[str, dict[int, int]]:
        """What was written on stderr, and the exit codes of the ranks that failed."""
        try:
            _, err = self.process.communicate(timeout=LIMIT)
        finally:
            os.close(self._open)
        # Two lines may come out as one.
        ends = re.findall(r"Node with rank (\d) (?:was killed|exited with code (-?\d+))", err)
        codes = {int(rank): int(code or -15) for rank, code in ends}
        return err, codes


def reap(where: Path, *more: str, before: str = "") -> Launch:
    return Launch(where, sys.executable, "-c", REAP, *ARGUMENTS, *more, before=before)


def machines(where: Path, checkpoint: Path) -> Path:
    for rank in (0, 1):
        (where / f"m{rank}").mkdir(parents=True)
        (where / f"m{rank}" / "q").symlink_to(checkpoint)
    return where


def layers_done(where: Path, rank: int) -> int:
    progress = where / f"m{rank}" / PARTIAL / f"rank-{rank}-of-2" / "progress.json"
    try:
        return int(json.loads(progress.read_text())["layers_done"])
    except OSError:
        return -1


# The same result


@pytest.fixture(scope="module")
def uninterrupted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The command as it is documented, both ranks in one directory; and its stderr."""
    where = tmp_path_factory.mktemp("whole")
    (where / "q").symlink_to(checkpoint)
    stdin, keep = os.pipe()
    done = subprocess.run(
        ["mlx.launch", "-n", "2", "--starting-port", str(free_port()), "reap", *ARGUMENTS],
        cwd=where,
        env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"},
        stdin=stdin,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    os.close(stdin)
    os.close(keep)
    assert "exited with code" not in done.stderr
    return where, done.stderr


def test_the_first_rank_alone_writes_and_speaks(uninterrupted: tuple[Path, str]) -> None:
    where, err = uninterrupted
    assert {file.name for file in (where / "run").iterdir()} == {"run.json", SALIENCY.name}
    assert err.count("measuring layer 2 (3 of 4)") == err.count("Wrote run/") == 1


CASES = {
    "weighted": {"tokens": 600, "sequence_length": 64, "batch_tokens": 128, "probe_tokens": 100},
    "one batch": {"tokens": 40, "sequence_length": 64, "batch_tokens": 128, "probe_tokens": 10},
    "no probes": {"tokens": 300, "sequence_length": 50, "batch_tokens": 100, "probe_tokens": 0},
    "no sensitivity": {"tokens": 300, "sequence_length": 50, "probe_tokens": 60}
    | {"sensitivity": False, "batch_tokens": 50},
    "few compared": {"tokens": 300, "sequence_length": 50, "batch_tokens": 50, "probe_tokens": 80}
    | {"sensitivity_tokens": 30},
    "feedback": {"tokens": 300, "sequence_length": 50, "batch_tokens": 100, "probe_tokens": 60}
    | {"low_rounding": "feedback"},
    "kimi_k3": {"tokens": 150, "sequence_length": 50, "batch_tokens": 50, "probe_tokens": 30}
    | {"low_rounding": "plain"},
}
EVERY_CASE = """
import sys
from pathlib import Path
from reap.models.ranks import join
from test_distributed import CASES, found
ranks = join()
with ranks.together(print):
    for name in CASES:
        model = sys.argv[2 if name == "kimi_k3" else 1]
        found(name, model, ranks).save(Path(f"{name}.safetensors"))
"""


def found(case: str, model: str, ranks: Ranks) -> Saliency:
    texts = load_texts(["math", "code"], split="calibration")
    texts = texts[:1] if case == "one batch" else texts
    return calibrate(open_source(model), texts, CalibrationSettings(**CASES[case]), ranks=ranks)


@pytest.fixture(scope="module")
def every_case(checkpoint: Path, tiny_k3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("cases")
    err, failed = Launch(
        *(where, sys.executable, "-c", EVERY_CASE, str(checkpoint), str(tiny_k3)),
        before=f"export PYTHONPATH={Path(__file__).parent}:$PYTHONPATH;",
    ).ended()
    assert not failed, err
    return where


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_what_one_gives(
    tmp_path: Path, checkpoint: Path, tiny_k3: Path, every_case: Path, case: str
) -> None:
    name = f"{case}.safetensors"
    assert (every_case / "m0" / name).read_bytes() == (every_case / "m1" / name).read_bytes()
    model = str(tiny_k3 if case == "kimi_k3" else checkpoint)
    one = found(case, model, Ranks())
    one.save(tmp_path / name)
    single, double = load_file(tmp_path / name), load_file(every_case / "m0" / name)
    assert single.keys() == double.keys()
    for key, expected in single.items():
        assert expected.dtype == double[key].dtype
        if expected.dtype == np.int64:
            np.testing.assert_array_equal(double[key], expected, key)
        elif expected.dtype == np.float32:  # products are added up in float32
            scale = 1e-6 * abs(expected).max()
            np.testing.assert_allclose(double[key], expected, rtol=0, atol=scale, err_msg=key)
        else:
            # Feedback rounds to another code where a product differs in its last bit.
            rtol = 0.02 if case == "feedback" and "low" in key else 1e-12
            np.testing.assert_allclose(double[key], expected, rtol=rtol, err_msg=key)
    if case != "feedback" and single.get("measurement.drop_kl", np.zeros(0)).size:
        other = Saliency.load(every_case / "m0" / name)
        settings = PlanSettings(size=int(0.7 * open_source(model).checkpoint.nbytes))
        plans = [make_plan(each, settings, provenance=one.provenance) for each in (one, other)]
        assert plans[0].layers == plans[1].layers


def test_shares_are_whole_and_even() -> None:
    assert share([5, 9, 1, 4, 2], 2) == [[1, 4], [0, 2, 3]]
    assert share([7], 3) == [[0], [], []]
    assert share([], 2) == [[], []]
    sizes = [random.Random(3).randint(1, 99) for _ in range(200)]
    shares = share(sizes, 7)
    assert sorted(item for items in shares for item in items) == list(range(200))
    loads = [sum(sizes[item] for item in items) for items in shares]
    assert max(loads) - min(loads) <= max(sizes)


def test_a_dry_run_says_what_each_of_several_ranks_takes(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = CalibrationSettings(**CASES["weighted"])
    one, two = (
        stages.estimate(str(checkpoint), ["math"], settings, ranks=ranks) for ranks in (1, 2)
    )
    assert one.ranks == 1 and one.tokens == one.all_tokens == two.all_tokens
    assert one.probe_tokens == one.all_probe_tokens == two.all_probe_tokens
    assert two.ranks == 2 and one.tokens / 2 <= two.tokens < one.tokens
    assert two.read_bytes == one.read_bytes and two.scratch_bytes < one.scratch_bytes
    _print_estimate(one, json=False)
    assert "rank" not in capsys.readouterr().err
    _print_estimate(two, json=False)
    said = capsys.readouterr().err
    assert (
        f"4 layers, {one.tokens} tokens and {one.probe_tokens} to measure on (whole sequences), "
        f"sensitivity on {one.sensitivity_tokens}\n" in said
    )
    assert "Shared by 2 ranks, each on a machine like this one" in said
    assert f"That with most, {two.tokens} tokens and {two.probe_tokens} to measure on" in said


# Ends


def test_ranks_that_are_not_alike_are_refused_by_name(tmp_path: Path, checkpoint: Path) -> None:
    where = machines(tmp_path, checkpoint)
    (where / "m1/q").unlink()
    shutil.copytree(checkpoint, where / "m1/q", copy_function=shutil.copyfile)
    source, copy = (open_source(str(where / f"m{rank}/q")) for rank in (0, 1))
    assert source.checkpoint.stamp() != copy.checkpoint.stamp()
    assert source.checkpoint.model_sha256 == copy.checkpoint.model_sha256
    shard = max((where / "m1/q").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    err, failed = reap(where, before='set -- "$@" --tokens $((600 + MLX_RANK));').ended()
    message = "error: rank 1 differs from rank 0 in the model's weights, the setting tokens.\n"
    assert message in err
    assert err.count("error:") == 1 and failed.keys() == {0, 1}
    assert not (where / "m0/run").exists() and not (where / "m1/run").exists()


def test_what_all_ranks_refuse_is_said_once(tmp_path: Path) -> None:
    err, failed = reap(tmp_path).ended()
    assert "error: q is not a directory.\n" in err
    assert err.count("error:") == err.count("hint:") == 1
    assert failed.keys() == {0, 1}


def test_every_reason_is_said_once_with_the_ranks_that_have_it() -> None:
    def said(size: int, **reasons: str) -> str:
        messages = {int(rank[1:]): json.dumps([why, None]) for rank, why in reasons.items()}
        return _failed({rank: each.encode() for rank, each in messages.items()}, size).message

    full = "could not write p/rank-{}-of-3/progress.json: disk full"
    assert said(3, r0="gone", r1="gone", r2="gone") == "gone"
    each = {f"r{rank}": full.format(rank) for rank in range(3)}
    assert said(3, **each) == full.format(0)
    del each["r0"]
    assert said(3, **each) == f"ranks 1, 2 failed: {full.format(1)}"
    assert said(3, r2="gone") == "rank 2 failed: gone"
    two = f"rank 0 failed: gone; ranks 1, 2 failed: {full.format(1)}"
    assert said(3, r0="gone", **each) == two
    assert said(2, r0="gone", r1="lost") == "rank 0 failed: gone; rank 1 failed: lost"


def test_full_disks_of_all_ranks_are_one_error(tmp_path: Path, checkpoint: Path) -> None:
    err, failed = reap(machines(tmp_path, checkpoint), before="ulimit -f 8;").ended()
    assert "error: could not write run/calibration.partial/rank-0-of-2/" in err
    assert err.count("could not write") == 1 and failed.keys() == {0, 1}, err


# A rank that kills itself when the other has finished a layer and it has all but said so.
ONE_AHEAD = """
import os, signal, sys, time
from pathlib import Path
from reap.calibrate.resume import PartialRun
from reap.cli import main
from test_distributed import layers_done
ends, layer = int(sys.argv.pop(1)), int(sys.argv.pop(1))
write = PartialRun._write
def ended(self):
    if self.ranks.rank == ends and self.layers_done == layer:
        while layers_done(Path(".."), 1 - ends) < layer:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    write(self)
PartialRun._write = ended
sys.exit(main())
"""


@pytest.mark.slow
def test_whatever_ends_a_rank_both_end_and_can_go_on(
    tmp_path: Path, checkpoint: Path, uninterrupted: tuple[Path, str]
) -> None:
    where = machines(tmp_path, checkpoint)
    # The second machine's disk is full.
    err, failed = reap(where, before="if [ $MLX_RANK = 1 ]; then ulimit -f 8; fi;").ended()
    assert "error: rank 1 failed: could not write" in err
    assert err.count("error:") == 1 and failed.keys() == {0, 1}, err
    # One rank has finished a layer more than the other, either way round.
    for ends, layer in ((1, 1), (0, 2)):
        command = (sys.executable, "-c", ONE_AHEAD, str(ends), str(layer), *ARGUMENTS, "--resume")
        path = f"export PYTHONPATH={Path(__file__).parent}:$PYTHONPATH;"
        err, failed = Launch(where, *command, before=path).ended()
        assert failed.keys() == {0, 1} and failed[ends] == -9, err
        assert (layers_done(where, ends), layers_done(where, 1 - ends)) == (layer - 1, layer)
    # Ctrl-C on the second machine alone, then any machine at any moment.
    launch = reap(where, "--resume")
    while layers_done(where, 0) < 2 and launch.process.poll() is None:
        time.sleep(0.005)
    launch.kill(1, signal.SIGINT)
    err, failed = launch.ended()
    assert "interrupted" in err and failed.keys() == {0, 1}, err
    draw = random.Random()
    launch = reap(where, "--resume")
    layer = draw.randint(2, 3)
    time.sleep(draw.uniform(0, 2))
    while layers_done(where, 0) < layer:
        time.sleep(0.005)
    launch.kill(draw.randint(0, 1))
    start = time.monotonic()
    err, failed = launch.ended()
    assert failed.keys() == {0, 1}, err
    assert time.monotonic() - start < 30
    err, failed = reap(where, "--resume", "--force").ended()
    assert not failed, err
    found = (where / "m0" / SALIENCY).read_bytes()
    assert found == (uninterrupted[0] / SALIENCY).read_bytes()
    assert not (where / "m0" / PARTIAL).exists() and not (where / "m1/run").exists()


def test_another_number_of_ranks_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    texts = load_texts(["math"], split="calibration")
    settings = CalibrationSettings(**CASES["one batch"])
    kept = tmp_path / "rank-1-of-2"
    kept.mkdir()
    (kept / "progress.json").write_text("{}")
    with pytest.raises(ReapError, match=r"the number of ranks was 2 and is 1\.$"):
        calibrate(open_source(str(checkpoint)), texts, settings, partial=tmp_path, resume=True)
    assert (kept / "progress.json").exists()


def test_other_commands_are_not_launched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text("\n")
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", str(hostfile))
    assert not launched()  # mlx.launch -n 1
    hostfile.write_text('[["127.0.0.1:1"], ["127.0.0.1:2"]]')
    assert launched()
    assert main(["plan", "--budget", "1GB"]) == 1
    assert "`reap plan` cannot run on several" in capsys.readouterr().err
    monkeypatch.delenv("MLX_RANK")
    assert not launched()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert launched()
    if not mx.distributed.is_available("mpi"):
        # Two processes that know nothing of each other must not go on.
        assert main(["calibrate", "q"]) == 1
        assert "could not be connected" in capsys.readouterr().err
