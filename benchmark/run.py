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

Jobs are started by submitit, each in its own process. Killing run.py itself with SIGKILL does not end them. On Slurm a
task that reaches its time limit saves a checkpoint and is queued again.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import submitit

ROOT = Path(__file__).resolve().parent.parent
SLURM = dict(time=1440, gpus_per_node=1, cpus_per_task=8, signal_delay_s=120)  # defaults of --slurm
PROCGEN = """bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper leaper maze miner ninja
plunder starpilot""".split()
UNMEASURED = [game for game in PROCGEN if game not in ("starpilot", "fruitbot")]  # those two are in two_cores
ONE_LEVEL = "--num-levels 1 --stack none --channels 8 16 16 --num-envs 32 --num-steps 32 --minibatch-size 512"
SMALL = "--num-envs 4 --num-steps 16 --minibatch-size 32 --total-timesteps 256 --eval-episodes 4"
BONUS = "--num-envs 16 --num-steps 128 --minibatch-size 512 --warmup-steps 200"
TWO_CORES = "--minibatch-size 256 --update-epochs 2 --lr 5e-4 --ent-coef 0.01 --num-batches-to-accumulate 1"
NARROW = "--channels 16 32 32"
NARROW_1M = f"{NARROW} --total-timesteps 1000000"
OPENAI = """--num-envs 64 --num-steps 256 --minibatch-size 2048 --reshuffle --stack none --channels 16 32 32 --pool
flatten --input-shift 0 --ortho-heads --norm-reward 0.99 --norm-adv minibatch --gamma 0.999 --gae-lambda 0.95 --vf-clip
0.2 --vf-coef 0.25 --kl-coef 0 --lr 5e-4 --adam-eps 1e-5 --max-grad-norm 0.5"""
RND_512 = """--num-envs 512 --num-steps 32 --minibatch-size 512 --lr 3e-4 --ext-coef 60 --bonus-after 100000
--warmup-steps 256 --precision bf16 --total-timesteps 2000000"""
RND_128_8M = """--num-envs 128 --num-steps 32 --minibatch-size 512 --lr 3e-4 --ext-coef 60 --int-coef 30
--bonus-after 100000 --warmup-steps 256 --predictor-share 0.0625 --max-grad-norm 0.5 --total-timesteps 8000000"""
RND_NO_REWARD = """--ext-coef 0 --int-coef 30 --num-envs 32 --minibatch-size 512 --lr 2.5e-4 --fire-reset
--bonus-after 20000 --warmup-steps 400 --precision bf16 --total-timesteps 1000000"""
NO_REWARD = "--ext-coef 0 --eta 0.256 --num-envs 32 --minibatch-size 128 --fire-reset --total-timesteps 1000000"

# suite: (script, games, seeds, flags), in the order of execution; seeds: their number (from 1 on) or themselves
SUITES = {
    "smoke": [
        ("ppo_procgen", ["leaper"], 1, f"{SMALL} --channels 8 8 8"),
        ("impala_procgen", ["leaper"], 1, f"{SMALL} --channels 8 8 8"),
        ("ppo_atari_rnd", ["Breakout"], 1, f"{SMALL} --warmup-steps 16 --max-episode-steps 100"),
        ("ppo_atari_snd", ["Breakout"], 1, f"{SMALL} --warmup-steps 16 --max-episode-steps 100"),
        ("appo_atari", ["Breakout"], 1, f"{SMALL} --num-minibatches 2 --max-episode-steps 100"),
    ],
    "cpu": [  # at most 18 minutes each on two cores
        ("ppo_procgen", ["starpilot"], 6, f"{ONE_LEVEL} --lr 1e-3 --total-timesteps 61440"),
        ("ppo_procgen:bf16", ["starpilot"], 6, f"{ONE_LEVEL} --lr 1e-3 --total-timesteps 61440 --precision bf16"),
        ("impala_procgen", ["starpilot"], 3, f"{ONE_LEVEL} --lr 1e-3 --total-timesteps 61440 --sync"),
        ("ppo_atari_rnd", ["Pitfall"], 3, f"{BONUS} --total-timesteps 122880"),
        ("ppo_atari_snd", ["Pitfall"], 3, f"{BONUS} --total-timesteps 51200"),
    ],
    "long": [  # hours on two cores
        ("ppo_procgen:narrow", ["starpilot"], 1, f"{NARROW} --total-timesteps 1000000"),
        ("ppo_procgen:one-frame", ["starpilot"], 1, "--stack none --channels 16 32 32 --total-timesteps 1000000"),
    ],
    "two_cores": [  # compared with published curves; 0.5 to 12 hours each on one core, narrow-8m 20
        ("ppo_atari_rnd:512", ["MontezumaRevenge"], 2, f"{RND_512} --int-coef 30"),
        ("ppo_atari_rnd:512-no-bonus", ["MontezumaRevenge"], 2, f"{RND_512} --int-coef 0"),
        ("ppo_atari_rnd:no-reward", ["Breakout"], 1, RND_NO_REWARD),
        ("ppo_procgen:openai", ["starpilot", "fruitbot"], 2, f"--num-levels 0 --total-timesteps 1000000 {OPENAI}"),
        ("ppo_procgen:narrow-1m", ["fruitbot"], 3, NARROW_1M),
        ("ppo_procgen:narrow-1m", ["bossfight"], 2, NARROW_1M),
        ("ppo_procgen:narrow-1m", ["coinrun"], 1, NARROW_1M),
        ("ppo_procgen:narrow-1m-bf16", ["jumper"], 1, f"{NARROW} --precision bf16 --total-timesteps 1000000"),
        ("ppo_procgen:narrow-2m-bf16", ["bigfish"], 1, f"{NARROW} --precision bf16 --total-timesteps 2000000"),
        ("ppo_procgen:narrow-bf16", ["bigfish"], 1, f"{NARROW} --precision bf16"),
        ("ppo_procgen:narrow-8m", ["bigfish"], 1, NARROW),  # the same where the CPU has no AVX512-BF16
        ("snd_breakout:bf16", ["Breakout"], 1, f"{NO_REWARD} --precision bf16"),
        ("appo_atari:two-cores", ["Breakout"], 1, f"{TWO_CORES} --total-timesteps 10000000"),
        ("impala_procgen:narrow-sync", ["starpilot"], 1, f"{NARROW} --sync --total-timesteps 2000000"),
        ("appo_atari:two-cores-0.5m", ["Pong"], 3, f"{TWO_CORES} --total-timesteps 500000"),
        ("ppo_atari_rnd:128-8m-bf16", ["MontezumaRevenge"], 1, f"{RND_128_8M} --precision bf16"),
        ("ppo_atari_rnd:128-8m", ["MontezumaRevenge"], 1, RND_128_8M),  # without AVX512-BF16
        ("ppo_atari_snd:no-reward-bf16", ["Breakout"], 1, f"{NO_REWARD} --precision bf16"),
        ("ppo_atari_snd:no-reward", ["Breakout"], 1, NO_REWARD),  # the same where the CPU has no AVX512-BF16
    ],
    "gpu": [
        ("ppo_procgen", ["bigfish", "coinrun", "starpilot", "miner", "chaser", "plunder"], 1, ""),
        ("appo_atari", ["Pong", "Breakout", "BeamRider"], 1, "--total-timesteps 10000000"),
        ("ppo_atari_rnd", ["MontezumaRevenge"], 1, ""),
        ("ppo_atari_snd", ["MontezumaRevenge"], 1, ""),
        ("impala_procgen", ["bigfish", "coinrun"], 1, ""),
        ("ppo_procgen:openai", ["coinrun"], 1, f"--num-levels 200 --total-timesteps 25000000 {OPENAI}"),
    ],
    "procgen16_1m": [  # compared with OpenAI's curves; 2 to 6 hours each on one core
        ("ppo_procgen:openai", UNMEASURED, 1, f"--num-levels 0 --total-timesteps 1000000 {OPENAI}")
    ],
    "fruitbot_parts": [  # narrow-1m with one thing of OpenAI's setting at a time; 2 hours each on one core
        ("ppo_procgen:norm-reward", ["fruitbot"], 3, f"{NARROW_1M} --norm-reward 0.99"),
        ("ppo_procgen:norm-reward", ["bossfight"], 2, f"{NARROW_1M} --norm-reward 0.99"),
        ("ppo_procgen:norm-reward", ["starpilot"], 1, f"{NARROW_1M} --norm-reward 0.99"),
        ("ppo_procgen:discounts", ["fruitbot"], 1, f"{NARROW_1M} --gamma 0.999 --gae-lambda 0.95"),
        ("ppo_procgen:constant-lr", ["fruitbot"], 1, f"{NARROW_1M} --lr 5e-4"),
        ("ppo_procgen:input", ["fruitbot"], 1, f"{NARROW_1M} --stack none --pool flatten --input-shift 0"),
    ],
    "adam_eps": [  # is our PPO below OpenAI's by chance, or by Adam's epsilon?
        (f"{script}:openai-660k", [game], seeds, f"--num-levels 0 --total-timesteps 660000 --eval-episodes 0 {OPENAI}")
        for game, seeds in [("jumper", (11, 12)), ("leaper", (21, 22)), ("climber", (31, 32))]
        for script in ("ppo_procgen", "procgen_tf_adam")
    ],
    "impala_1m": [("impala_procgen:narrow-1m", ["coinrun", "bigfish"], 1, NARROW_1M)],
    "procgen16": [("ppo_procgen", PROCGEN, 3, ""), ("impala_procgen", PROCGEN, 3, "")],
}  # fmt: skip


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


def jobs_of(suite: str, only: str = "") -> list[Job]:
    """The jobs of a suite whose name contains `only`; within a row all games of seed 1 come first."""
    cells = [
        Job(suite, variant, game, seed, flags)
        for variant, games, seeds, flags in SUITES[suite]
        for seed in (range(1, seeds + 1) if isinstance(seeds, int) else seeds)
        for game in games
    ]
    return [job for job in cells if only in job.name]


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
    """Merge neighboring rows until at most `most` are left.

    A merged row has the last step, the number of episodes, and means over rows (episode/*: over episodes).
    """
    size = -(-len(rows) // most)
    if size <= 1:
        return rows
    part = np.arange(len(rows)) // size
    merged = rows.groupby(part).mean()
    for name in rows:
        if name in ("step", "iteration", "episode/rooms_ever"):
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


def last_config(run: Path) -> tuple[int, dict]:
    """Step and content of the config-<step>.json of a run's last start."""
    steps = [int(path.stem.removeprefix("config-")) for path in run.glob("config-*.json")]
    if not steps:
        return 0, {}
    return max(steps), read_json(run / f"config-{max(steps)}.json") or {}


def starts_of(run: Path) -> list[dict]:
    """Revision and hardware of each start of a run, and the step it began at."""
    starts = read_json(run.with_name(run.name + ".json")) or []
    if starts:
        starts[-1]["step"], _ = last_config(run)
    return starts


def note_start(job: Job, run: Path):
    """Add the revision and the hardware to <run>.json."""
    revision, gpu = "", ""
    with contextlib.suppress(OSError):  # without git
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        revision = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    cpu = re.search("model name\t: (.*)", Path("/proc/cpuinfo").read_text())
    if shutil.which("nvidia-smi") and "--device cpu" not in job.flags:
        code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
        gpu = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    starts = [*starts_of(run), dict(git=revision or None, cpu=cpu and cpu[1], gpu=gpu or None)]
    run.with_name(run.name + ".json").write_text(json.dumps(starts, indent=1))


def record(job: Job, run: Path, results: Path, error: str | None) -> str:
    """Write the csv and json of a finished or failed run -> done or failed."""
    rows = pd.DataFrame()
    if (run / "metrics.csv").exists():
        rows = pd.read_csv(run / "metrics.csv").dropna(subset=["time/sps"])
    config = last_config(run)[1]
    starts = starts_of(run)
    status = "failed" if error else "done"
    result = dict(command=" ".join(job.command), suite=job.suite, variant=job.variant, game=job.game, seed=job.seed)
    result |= dict(status=status, error=error, steps=0, train_seconds=0.0)
    if len(rows):
        result["steps"] = int(rows["step"].iloc[-1])
        seconds = rows["step"].diff().fillna(rows["step"]) / rows["time/sps"]
        result["train_seconds"] = round(float(seconds.sum()), 1)
    result |= {name: starts[-1].get(name) for name in ("git", "cpu", "gpu")}
    result["cores"] = config.get("args", {}).get("threads") or available_cores()
    revisions = dict.fromkeys(start["git"] for start in starts)
    result["git_before"] = [git for git in revisions if git and git != result["git"]]
    machines = [start["gpu"] or start["cpu"] for start in starts]
    changes = zip(machines, machines[1:], starts[1:], strict=False)
    result["machines_before"] = {before: start["step"] for before, now, start in changes if before != now}
    result["versions"] = config.get("versions")
    result["eval"] = read_json(run / "eval.json")
    for split in (result["eval"] or {}).get("splits", {}).values():
        split.pop("lengths", None)
    path = results / job.suite / f"{job.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    thin(rows).to_csv(path.with_suffix(".csv"), index=False, float_format="%.6g")
    path.write_text(json.dumps(result, indent=1) + "\n")
    return status


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
            environment = os.environ | (dict(OMP_NUM_THREADS=str(threads)) if threads else {})
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
    if not isinstance(found, dict) or found.get("command") != " ".join(job.command):
        return "open"
    return found.get("status", "open")


def run_here(jobs: list[Job], options) -> int:
    """Run --jobs jobs at a time on this machine."""
    at_once = min(options.jobs, len(jobs))
    threads = options.threads
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
                    states.append(outcome(running.pop(job)))
                    print(f"{states[-1]:8} {job.suite} {job.name}", flush=True)
        except KeyboardInterrupt:
            print("stopping, checkpoints are written", file=sys.stderr)
            for task in running.values():
                os.kill(int(task.job_id), signal.SIGTERM)
            while not all(task.done() for task in running.values()):
                time.sleep(0.2)
            return 130
    print(", ".join(f"{states.count(name)} {name}" for name in sorted(set(states))))
    return int("failed" in states)


def outcome(task: submitit.Job) -> str:
    """The word that a job returned; failed, with the traceback, if run.py itself has a mistake."""
    error = task.exception()
    if error is None:
        return task.result()
    print(error, file=sys.stderr)
    return "failed"


def submit_array(jobs: list[Job], options):
    """Submit an array to Slurm with one task per job."""
    parameters = dict(word.split("=", 1) for word in options.slurm)
    parameters = {name: int(value) if value.isdigit() else value for name, value in parameters.items()}
    executor = submitit.SlurmExecutor(options.runs / "submitit", max_num_timeout=1000)
    executor.update_parameters(**SLURM | dict(job_name=options.suite) | parameters)
    count = len(jobs)
    shared = [[value] * count for value in (options.runs, options.results, options.threads)]
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
    jobs = jobs_of(options.suite, options.only)
    if options.jobs < 1 or options.threads < 0:
        parser.error("--jobs must be at least 1, --threads at least 0")
    if not jobs:
        parser.error(f"--only {options.only!r}: no job of {options.suite}")
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
