"""Run a suite of jobs (script x game x seed). It can be stopped at any time; the same command continues.

    python benchmark/run.py --suite smoke --results smoke              # every script, two minutes in all
    timeout 60m python benchmark/run.py --suite cpu --results again    # stop after an hour
    python benchmark/run.py --suite two_cores --results again --only ppo_procgen-openai
    python benchmark/run.py --suite gpu --only bigfish --jobs 2
    python benchmark/run.py --suite procgen16 --slurm time=1440 partition=gpu  # an array with one task per job

A job with a result in --results is not run again (benchmark/results has the published ones). A stopped job continues
from its checkpoint; a killed one loses at most the script's --checkpoint-every (300 seconds). A failed job is recorded
with its error, does not stop the others, and runs again with --retry.
Result: <results>/<suite>/<script>/<game>/seed<k>.csv, at most 500 rows, and .json (command, revisions, hardware,
versions, training time, final evaluation). The runs and their output are in --runs, one folder per command: other
flags start a new run, other code does not. After a change of the code use a new --results (and so new --runs).

Jobs are started by submitit, each in its own process. SIGKILL of run.py alone does not end them: until they are done,
the same command calls them busy. On Slurm a task at its time limit saves a checkpoint and is queued again.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import submitit

ROOT = Path(__file__).resolve().parent.parent
SLURM = dict(time=1440, gpus_per_node=1, cpus_per_task=8, signal_delay_s=120)  # defaults of --slurm


@dataclass(frozen=True)
class Job:
    """One run. `variant` is the script's name, or script:name for a setting of it."""

    suite: str
    variant: str
    game: str
    seed: int
    flags: str

    script = property(lambda self: self.variant.split(":")[0])
    name = property(lambda self: f"{self.variant.replace(':', '-')}/{self.game}/seed{self.seed}")

    @property
    def file(self) -> str:
        """Path from the repository's root: a script, or a variant of one."""
        variant = f"benchmark/variants/{self.script}.py"
        return variant if (ROOT / variant).exists() else f"{self.script}.py"

    @property
    def command(self) -> list[str]:
        """What a user would type."""
        return f"python {self.file} --env-id {self.game} --seed {self.seed} {self.flags}".split()

    @property
    def folder(self) -> str:
        """One folder per command: --resume would keep a saved flag that the command no longer has."""
        digest = hashlib.sha256(" ".join(self.command).encode()).hexdigest()[:8]
        return f"{self.suite}/{self.name.replace('/', '_')}-{digest}"


def read_suites(path: Path = ROOT / "benchmark" / "suites.toml") -> dict[str, list[Job]]:
    """suite -> its jobs; within a row all games of seed 1 come first. A wrong row ends the program with one line."""
    suites, shared, row = {}, {}, ""
    try:
        content = tomllib.loads(path.read_text())
        for name, flags in content["flags"].items():
            shared[name] = flags.format(**shared)
        for suite, rows in content["suites"].items():
            suites[suite] = []
            for row in rows:
                variant, games, seeds, flags = row
                if not isinstance(games, list):
                    raise TypeError("the games are no list")
                seeds = seeds if isinstance(seeds, list) else range(1, seeds + 1)
                jobs = [Job(suite, variant, game, seed, flags.format(**shared)) for seed in seeds for game in games]
                if not (ROOT / jobs[0].file).exists():
                    raise ValueError(f"there is no {jobs[0].file}")
                suites[suite] += jobs
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        print(f"{path}: {row}: {error!r}", file=sys.stderr)
        raise SystemExit(2) from None
    return suites


SUITES = read_suites()


def read_json(path: Path) -> dict:
    """The content of a file; empty if there is none or it is unreadable (which is printed)."""
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("no object")
        return content
    except FileNotFoundError:
        return {}
    except ValueError as error:  # empty or cut, as a full disk leaves it
        print(f"{path}: unreadable, ignored ({error})", file=sys.stderr)
        return {}


def thin(rows: pd.DataFrame, most: int = 500) -> pd.DataFrame:
    """Merge neighboring rows into at most `most`: last step, sum of episodes, means (episode/*: over episodes)."""
    size = -(-len(rows) // most)
    if size <= 1:
        return rows
    part = np.arange(len(rows)) // size
    merged = rows.groupby(part).mean()
    for name in rows:
        if name in ("step", "iteration"):
            merged[name] = rows[name].groupby(part).last()
        elif name == "episode/count":
            merged[name] = rows[name].groupby(part).sum()
        elif name.startswith("episode/"):
            weights = rows["episode/count"].where(rows[name].notna(), 0)
            merged[name] = (rows[name] * weights).groupby(part).sum() / weights.groupby(part).sum()
    return merged


def available_cores() -> int:
    """Cores by affinity mask and container quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def config_of(run: Path) -> tuple[int, dict]:
    """Step and content of the config-<step>.json of a run's last start."""
    steps = [int(path.stem.removeprefix("config-")) for path in run.glob("config-*.json")]
    return max(steps, default=0), read_json(run / f"config-{max(steps, default=0)}.json")


def starts_of(run: Path) -> list[dict]:
    """Revision and hardware of each start of a run, and the step it began at."""
    starts = read_json(run.with_name(run.name + ".json")).get("starts", [])
    for last in starts[-1:]:
        last["step"], _ = config_of(run)
    return starts


def note_start(job: Job, run: Path):
    """Add the revision and the hardware to <run>.json."""
    cpu = re.search("model name\t: (.*)", Path("/proc/cpuinfo").read_text())
    start = dict(git=output_of(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]), gpu=None)
    start["cpu"] = cpu[1] if cpu else None
    if shutil.which("nvidia-smi") and "--device cpu" not in job.flags:
        code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
        start["gpu"] = output_of([sys.executable, "-c", code])
    run.with_name(run.name + ".json").write_text(json.dumps(dict(starts=[*starts_of(run), start]), indent=1))


def output_of(command: list[str]) -> str | None:
    """What a program prints; None if there is no such program or it prints nothing."""
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def record(job: Job, run: Path, results: Path, error: str | None) -> str:
    """Write the csv and json of a finished or failed run -> done or failed."""
    path = results / job.suite / f"{job.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    step, seconds = 0, 0.0
    if (run / "metrics.csv").exists():
        rows = pd.read_csv(run / "metrics.csv").dropna(subset=["time/sps"])
        thin(rows).to_csv(path.with_suffix(".csv"), index=False, float_format="%.6g")
        step = int(rows["step"].max()) if len(rows) else 0
        seconds = float((rows["step"].diff().fillna(rows["step"]) / rows["time/sps"]).sum())
    _, config = config_of(run)
    starts = starts_of(run)
    evaluation = read_json(run / "eval.json") or None
    for split in evaluation["splits"].values() if evaluation else ():
        split.pop("lengths", None)
    revisions = dict.fromkeys(start["git"] for start in starts)
    machines = [start["gpu"] or start["cpu"] for start in starts]
    changes = zip(machines, machines[1:], starts[1:], strict=False)
    result = dict(command=" ".join(job.command), suite=job.suite, variant=job.variant, game=job.game, seed=job.seed)
    result |= dict(status="failed" if error else "done", error=error, steps=step, train_seconds=round(seconds, 1))
    result |= {name: starts[-1][name] for name in ("git", "cpu", "gpu")}
    result["cores"] = config.get("args", {}).get("threads") or available_cores()
    result["git_before"] = [git for git in revisions if git and git != result["git"]]
    result["machines_before"] = {before: start["step"] for before, now, start in changes if before != now}
    result |= dict(versions=config.get("versions"), eval=evaluation)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result["status"]


class Training(submitit.helpers.Checkpointable):
    """What a process of submitit does: start or continue a job and record its result -> its state in a word."""

    def __call__(self, job: Job, runs: Path, results: Path, threads: int, gpus: dict | None = None) -> str:
        """threads: 0 lets the script choose. gpus: CUDA_VISIBLE_DEVICES, which submitit's local executor empties."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # submitit would ignore it
        if gpus is not None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            os.environ.update(gpus)
        run = runs / job.folder
        run.parent.mkdir(parents=True, exist_ok=True)
        with open(run.with_name(run.name + ".lock"), "w") as lock, open(run.with_name(run.name + ".log"), "a+") as log:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until training ends, even if this process is killed
            except BlockingIOError:
                return "busy"
            command = [sys.executable, str(ROOT / job.file), "--threads", str(threads), *job.command[2:]]
            if (run / "checkpoint.pt").exists():
                command += ["--resume", str(run)]
            else:
                if run.exists():  # killed before its first checkpoint
                    shutil.rmtree(run)
                run.with_name(run.name + ".json").unlink(missing_ok=True)
                command += ["--run-dir", str(run.parent), "--run-name", run.name]
            note_start(job, run)
            environment = (
                os.environ | {"PYTHONUNBUFFERED": "1"} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
            )
            options = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[lock.fileno()], env=environment)
            begin = log.seek(0, os.SEEK_END)
            process = subprocess.Popen(command, **options)
            try:
                process.wait()
            except BaseException:  # a signal, or submitit queues the job again
                process.terminate()  # it writes its checkpoint
                process.wait()
                raise
            if process.returncode in (130, -signal.SIGTERM):
                return "stopped"
            log.seek(begin)
            return record(job, run, results, error_of(process.returncode, log.read()))


def error_of(code: int, output: str) -> str | None:
    """The last lines of a failed script; of wrong flags (exit code 2) the whole message in one line."""
    lines = [line.strip("│╭╮╰╯─ ") for line in output.splitlines()]  # tyro draws a box
    lines = [line for line in lines if line]
    if code == 2:
        return " ".join(lines)[:300]
    return "\n".join([f"exit status {code}", *lines[-5:]]) if code else None


def state(job: Job, results: Path) -> str:
    """open, done or failed; a result of other flags does not count."""
    found = read_json(results / job.suite / f"{job.name}.json")
    return found["status"] if found.get("command") == " ".join(job.command) else "open"


def run_here(jobs: list[Job], options) -> int:
    """Run --jobs jobs at a time on this machine."""
    at_once, threads = min(options.jobs, len(jobs)), options.threads
    if not threads and at_once > 1:
        threads = max(available_cores() // at_once, 1)
    gpus = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
    waiting, running, states = list(jobs), {}, []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        executor = submitit.LocalExecutor(folder)
        executor.update_parameters(timeout_min=1e6)
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a job inherits it: Ctrl-C is for this process
                    running[job] = executor.submit(Training(), job, options.runs, options.results, threads, gpus)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                time.sleep(0.2)
                for job in [job for job, task in running.items() if task.done()]:
                    task = running.pop(job)
                    error = task.exception()  # run.py itself has a mistake
                    states.append("failed" if error else task.result())
                    print(f"{states[-1]:8} {job.suite} {job.name} {error or ''}".rstrip(), flush=True)
        except KeyboardInterrupt:
            print("stopping, checkpoints are written", file=sys.stderr)
            for task in running.values():
                os.kill(int(task.job_id), signal.SIGTERM)
            while not all(task.done() for task in running.values()):
                time.sleep(0.2)
            return 130
    print(", ".join(f"{states.count(name)} {name}" for name in sorted(set(states))))
    return int("failed" in states)


def submit_array(jobs: list[Job], options):
    """Submit an array to Slurm with one task per job."""
    parameters = dict(word.split("=", 1) for word in options.slurm)
    parameters = {name: int(value) if value.isdigit() else value for name, value in parameters.items()}
    executor = submitit.SlurmExecutor(options.runs / "submitit", max_num_timeout=1000)
    executor.update_parameters(**SLURM | dict(job_name=options.suite) | parameters)
    shared = ([value] * len(jobs) for value in (options.runs, options.results, options.threads))
    for job, task in zip(jobs, executor.map_array(Training(), jobs, *shared), strict=True):
        print(f"{task.job_id:8} {job.suite} {job.name}")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=list(SUITES), required=True)
    parser.add_argument("--only", default="", help="jobs whose name (script/game/seedK) contains this")
    parser.add_argument("--list", action="store_true", help="print state and command of each job")
    parser.add_argument("--retry", action="store_true", help="also run failed jobs")
    parser.add_argument("--jobs", type=int, default=1, help="jobs at a time on this machine, all on one GPU")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads per job; 0 = share out all cores")
    parser.add_argument("--runs", type=Path, help="folder of the runs; default: runs/benchmark, or RESULTS/runs")
    parser.add_argument("--results", type=Path, help="default: benchmark/results; an empty one runs everything again")
    parser.add_argument(
        "--slurm", nargs="*", metavar="NAME=VALUE", help="submit an array; parameters of sbatch, such as partition=gpu"
    )
    options = parser.parse_args(argv)
    options.runs = options.runs or (options.results / "runs" if options.results else ROOT / "runs" / "benchmark")
    options.results = (options.results or ROOT / "benchmark" / "results").resolve()
    options.runs = options.runs.resolve()
    jobs = [job for job in SUITES[options.suite] if options.only in job.name]
    if not jobs or options.jobs < 1:
        parser.error(f"--only {options.only!r}: no job of {options.suite}" if not jobs else "--jobs: at least 1")
    if options.list:
        for job in jobs:
            print(f"{state(job, options.results):8} {' '.join(job.command)}")
        return 0
    wanted = ["open", "failed"] if options.retry else ["open"]
    jobs = [job for job in jobs if state(job, options.results) in wanted]
    if not jobs:
        print("nothing to do")
        return 0
    if options.slurm is None:
        return run_here(jobs, options)
    try:
        submit_array(jobs, options)
    except (RuntimeError, ValueError) as error:  # no Slurm here, or an unknown parameter
        parser.error(f"--slurm: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
