"""Test preemption, and sweeps with Hydra's launchers: locally, and on a Slurm of one node that a fixture starts."""

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from configs.cli import compose
from tests.conftest import ROOT, command
from tests.helpers.runs import assert_the_same, folder_of, rows_of
from train import train

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

DAEMONS = ("munged", "slurmctld", "slurmd")
# Slurm's cred_expire, in seconds: a requeued job waits at least this long. Slurm's default is 120.
QUEUED = 20
# Overrides of each launcher's preset, so that a job needs one core and no GPU.
SMALL = {
    "joblib": [],
    "ray": ["hydra.launcher.ray.remote.num_cpus=1", "hydra.launcher.ray.remote.num_gpus=0"],
    "submitit_local": [],
    "submitit_slurm": [f"hydra.launcher.{key}" for key in ("gpus_per_node=0", "cpus_per_task=1", "mem_gb=1")],
}


def sweep(launcher: str, arguments: list[str], **options) -> subprocess.CompletedProcess:
    return command("train.py", "-m", f"hydra/launcher={launcher}", *SMALL[launcher], *arguments, **options)


def finished(runs: Path) -> list[Path]:
    return [path.parent for path in runs.glob("*/*/model.safetensors")]


class Slurm:
    """Slurm's daemons on the loopback interface. They write all their files into one folder."""

    def __init__(self, folder: Path):
        self.folder, self.processes = folder, []
        self.configuration, self.socket = folder / "slurm.conf", folder / "munge.socket"
        self.environment = {"SLURM_CONF": str(self.configuration)}

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        host = socket.gethostname().split(".")[0]
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            two.bind(("127.0.0.1", 0))
            ports = one.getsockname()[1], two.getsockname()[1]
        self.configuration.write_text(
            f"""
            ClusterName=test
            SlurmctldHost={host}(127.0.0.1)
            SlurmctldPort={ports[0]}
            SlurmdPort={ports[1]}
            SlurmUser=root
            AuthType=auth/munge
            AuthInfo=socket={self.socket},cred_expire={QUEUED}
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            MpiDefault=none
            SelectType=select/cons_tres
            SelectTypeParameters=CR_Core
            SchedulerParameters=sched_interval=5,bf_interval=5
            ReturnToService=2
            StateSaveLocation={self.folder}/state
            SlurmdSpoolDir={self.folder}/spool
            SlurmctldPidFile={self.folder}/slurmctld.pid
            SlurmdPidFile={self.folder}/slurmd.pid
            NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=4096
            PartitionName=test Nodes=ALL Default=YES
            """
        )
        self.daemon("munged", "--foreground", "--force", f"--socket={self.socket}", *files)
        self.wait(self.socket.exists)
        self.daemon("slurmctld", "-D", "-c")
        self.daemon("slurmd", "-D", "-N", host)
        self.wait(lambda: "idle" in self("sinfo", "-h", "-o", "%T"))

    def daemon(self, *line: str) -> None:
        # The kernel kills the daemon when the test's process ends, even if that process is killed.
        line = ["setpriv", "--pdeathsig", "KILL", *line]
        log = open(self.folder / f"{line[3]}.out", "wb")  # noqa: SIM115
        environment = os.environ | self.environment
        self.processes.append(subprocess.Popen(line, env=environment, stdout=log, stderr=log))

    def __call__(self, *line: str) -> str:
        return subprocess.run(line, env=os.environ | self.environment, capture_output=True, text=True).stdout

    def wait(self, condition, seconds: float = 120, logs: Path | None = None) -> object:
        """Wait until condition() is true, and return its value.

        Raises AssertionError with the ends of the logs if it is still false after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                paths = [*self.folder.glob("*.out"), *(logs.rglob("*.out") if logs else ())]
                ends = [path.read_text(errors="replace")[-2000:] for path in paths]
                raise AssertionError("\n".join(["Slurm took too long:", self("scontrol", "show", "job"), *ends]))
            time.sleep(0.1)
        return found

    def stop(self) -> None:
        """Kill the daemons and all jobs."""
        for process in self.processes:
            process.kill()
            process.wait()
        deadline = time.monotonic() + 10
        while (left := self.left()) and time.monotonic() < deadline:
            for number in left:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.1)
        assert not left

    def left(self) -> list[int]:
        """Return the ids of the processes whose environment names this Slurm: daemons, job steps and jobs."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended
                if str(self.configuration).encode() in (place / "environ").read_bytes():
                    found.append(int(place.name))
        return found


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    missing = [name for name in (*DAEMONS, "sbatch", "setpriv") if shutil.which(name) is None]
    if os.getuid() != 0:
        pytest.skip("needs root")
    if missing:
        pytest.skip(f"needs Slurm (missing: {', '.join(missing)}); on Debian: apt-get install slurm-wlm munge")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def one_bad(tiny: list[str]) -> list[str]:
    """Return the overrides of a sweep of two runs, of which the second fails."""
    return [*(a for a in tiny if a != "model.heads=3"), "model.heads=3,5"]


def assert_one_failed(returncode: int, errors: str) -> None:
    assert returncode == 1, errors
    # Ray may print a job's last lines after the list of failed jobs.
    line = errors.split("error: 1 of the sweep's jobs failed:\n")[1].splitlines()[0]
    assert "model.heads=5" in line
    assert line.endswith(": heads must divide the width: 5 heads, width 24")
    assert "Traceback" not in errors


@pytest.mark.parametrize("launcher", ["joblib", "ray", "submitit_local"])
def test_a_failed_job_is_reported_and_the_other_one_finishes(launcher, tiny, tmp_path):
    if launcher == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements-ray.txt")
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # for Ray's sockets, whose paths must be short
        environment = {"RAY_TMPDIR": short, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        done = sweep(launcher, one_bad(tiny), env=environment)
    assert_one_failed(done.returncode, done.stderr)
    assert folder_of(compose(tiny)) in finished(tmp_path / "runs")
    written = {path.name for path in (tmp_path / "runs").iterdir()}
    assert {"small", "multirun.yaml"} <= written <= {"small", "multirun.yaml", ".submitit"}


def test_a_launcher_that_cannot_start_says_so(tiny):
    done = sweep("submitit_slurm", tiny, env={"PATH": str(Path(sys.executable).parent)})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith('error: RuntimeError: Could not detect "srun"')
    assert "Traceback" not in done.stderr


def test_signals_under_submitit(tiny, tmp_path, monkeypatch, capsys):
    """Signals reach submitit's handlers between two steps, after the state is saved.

    The restarted run continues from the state, even with resume=false.
    """
    long = [*tiny, "train.steps=20", "train.log_every=3", "evaluation.every=10", "resume=false"]
    cfg, received = compose(long), []

    def requeue(number, _frame):
        received.append(number)
        raise SystemExit(-1)

    with handlers({signal.SIGTERM: lambda number, _: received.append(number), signal.SIGUSR2: requeue}):
        with pytest.raises(SystemExit):
            train(cfg, after(7, (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR2)))
        assert received == [signal.SIGTERM, signal.SIGUSR2]
        assert torch.load(folder_of(cfg) / "state.pt")["step"] == 7
        assert json.loads((folder_of(cfg) / "summary.json").read_text())["status"] == "interrupted"

        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert train(compose(long), after(4, (signal.SIGTERM,)))["status"] == "finished"
        assert received == [signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM]
        assert f"continuing {folder_of(cfg)} after step 7\n" in capsys.readouterr().out
    monkeypatch.undo()
    assert_the_same(folder_of(cfg), train_whole(long, tmp_path))


def after(steps: int, numbers: tuple) -> Callable:
    """Return an `on_step` that raises signals when it is called for the `steps`-th time, just before a step.

    The run reacts to them after that step. Steps from before the run was continued are not counted.
    """
    count = itertools.count(1)

    def interrupted(_trainer):
        for number in numbers if next(count) == steps else ():
            signal.raise_signal(number)

    return interrupted


@contextmanager
def handlers(wanted: dict):
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train_whole(arguments: list[str], tmp_path: Path) -> Path:
    """Train the same run in one go, and return its folder."""
    whole = compose([*arguments, f"runs={tmp_path}/whole"])
    train(whole)
    return folder_of(whole)


def first_job(slurm: Slurm) -> str | None:
    """Return the id of the array's first job if it is running, else None."""
    running = slurm("squeue", "-h", "-t", "RUNNING", "-o", "%F_%K").split()
    return next((job for job in running if job.endswith("_0")), None)


def pending(slurm: Slurm, job: str) -> bool:
    return "PENDING" in slurm("squeue", "-h", "-j", job, "-o", "%T")


def test_a_sweep_on_slurm(slurm, tiny, tmp_path):
    """In a sweep from the command line, one job fails. The other is preempted, waits in the queue, and continues."""
    long = [*tiny, "train.steps=1000", "train.log_every=5", "evaluation.every=500"]
    folder = folder_of(compose(long))
    line = [sys.executable, "train.py", "-m", "hydra/launcher=submitit_slurm", *SMALL["submitit_slurm"], *one_bad(long)]
    environment = os.environ | slurm.environment
    with open(tmp_path / "sweep.out", "w") as errors:
        process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        job = slurm.wait(lambda: first_job(slurm), 300, tmp_path)
        slurm.wait(lambda: (folder / "metrics.jsonl").exists() and len(rows_of(folder)) > 1, 300, tmp_path)
        slurm("scancel", "--signal=USR2", job)
        slurm.wait(lambda: pending(slurm, job), 180, tmp_path)
        stopped = json.loads((folder / "summary.json").read_text())
        assert stopped["status"] == "interrupted"
        assert not (folder / "model.safetensors").exists()
        slurm.wait(lambda: process.poll() is not None, 300, tmp_path)
    finally:
        process.kill()
    assert_one_failed(process.returncode, (tmp_path / "sweep.out").read_text())
    (log,) = (tmp_path / "runs/.submitit" / job).glob("*.out")
    output = log.read_text()
    assert f"SIGUSR2 after step {stopped['steps']} of 1000: the state is saved" in output
    assert f"continuing {folder} after step {stopped['steps']}" in output
    assert_the_same(folder, train_whole(long, tmp_path))
