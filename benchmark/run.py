"""Run a suite of jobs (script x game x seed). It can be stopped at any time; the same command continues.

    python benchmark/run.py --suite smoke --results smoke     # every script, two minutes in all
    python benchmark/run.py --suite cpu --results again --max-minutes 60  # stop after an hour
    python benchmark/run.py --suite two_cores --results again --only ppo_procgen-openai
    python benchmark/run.py --suite gpu --only bigfish --jobs 2
    python benchmark/run.py --suite procgen16 --launcher slurm > array.sbatch

A job with a result in --results is not run again (benchmark/results has the published ones). A stopped job continues
from its checkpoint; a killed one loses at most the script's --checkpoint-every (300 seconds). A failed job is recorded
with its error, does not stop the others, and runs again with --retry.
Result: <results>/<suite>/<script>/<game>/seed<k>.csv, at most 500 rows, and .json (command, revisions, hardware,
versions, training time, final evaluation). The runs are in --runs, one folder per command: other flags start a new
run, other code does not. After a change of the code use a new --results (and so new --runs).
"""

import argparse
import contextlib
import csv
import ctypes
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "numpy", "gymnasium", "envpool")
LIBC = ctypes.CDLL(None)  # loaded before any thread forks
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


def write_atomically(path: Path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def read_json(path: Path) -> dict | list | None:
    """The content of a file; None if there is none, or with a message if it is unreadable."""
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict | list):
            raise ValueError("no object")
        return content
    except FileNotFoundError:
        return None
    except ValueError as error:  # empty or cut, as a full disk leaves it
        print(f"{path}: unreadable, ignored ({error})", file=sys.stderr)
        return None


def read_rows(path: Path) -> list[dict]:
    """The whole rows of a metrics.csv."""
    rows = []
    if path.exists():
        lines = path.read_text("utf-8-sig", errors="replace").replace("\0", "").splitlines()
        for row in csv.DictReader(lines):
            try:
                int(row["step"]), int(row["iteration"]), float(row["time/sps"])
            except (KeyError, TypeError, ValueError):
                continue
            if None not in row and None not in row.values():
                rows.append(row)
    return rows


def thin(rows: list[dict], most: int = 500) -> list[dict]:
    """Merge neighbouring rows until at most `most` are left.

    A merged row has the last step, the number of episodes, and means over rows (episode/*: over episodes).
    """
    size, merged = -(-len(rows) // most), []
    for start in range(0, len(rows), max(size, 1)):
        part, row = rows[start : start + size], {}
        for name in part[0]:
            weights = [float(r["episode/count"] or 0) if name.startswith("episode/") else 1.0 for r in part]
            values = [(float(r[name]), w) for r, w in zip(part, weights, strict=True) if r[name] != ""]
            total = sum(weight for _, weight in values)
            if name in ("step", "iteration", "episode/rooms_ever"):
                row[name] = part[-1][name]
            elif name == "episode/count":
                row[name] = f"{sum(value for value, _ in values):g}"
            else:
                row[name] = f"{sum(v * w for v, w in values) / total:.6g}" if total else ""
        merged.append(row)
    return merged


def available_cores() -> int:
    """Cores by affinity mask and container quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def last_config(run: Path) -> tuple[int, dict]:
    """Step and content of the config-<step>.json of a run's last start."""
    steps = [int(path.stem.removeprefix("config-")) for path in run.glob("config-*.json")]
    if not steps:
        return 0, {}
    return max(steps), read_json(run / f"config-{max(steps)}.json") or {}


def starts_of(run: Path, step: int) -> list[dict]:
    """Revision and hardware of each start of a run, and the step it began at; `step`: of the last one."""
    starts = read_json(run.with_name(run.name + ".json")) or []
    if starts:
        starts[-1]["step"] = step
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
    start = dict(git=revision or None, cpu=cpu and cpu[1], gpu=gpu or None)
    starts = [*starts_of(run, last_config(run)[0]), start]
    write_atomically(run.with_name(run.name + ".json"), json.dumps(starts, indent=1))


def collect(job: Job, run: Path, error: str | None = None) -> tuple[str, dict]:
    """The csv and json of a finished or failed run."""
    rows = read_rows(run / "metrics.csv")
    step, config = last_config(run)
    args, parts = config.get("args", {}), starts_of(run, step) or [{}]
    last = parts[-1]
    evaluation = read_json(run / "eval.json")
    seconds, before = 0.0, 0
    for row in rows:
        seconds, before = seconds + (int(row["step"]) - before) / float(row["time/sps"]), int(row["step"])
    result = dict(command=" ".join(job.command), suite=job.suite, variant=job.variant, game=job.game, seed=job.seed)
    result |= dict(status="failed" if error else "done", error=error, steps=before, train_seconds=round(seconds, 1))
    result |= {name: last.get(name) for name in ("git", "cpu", "gpu")}
    result["cores"] = args.get("threads") or available_cores()
    revisions = dict.fromkeys(part.get("git") for part in parts)
    result["git_before"] = [git for git in revisions if git and git != result["git"]]
    machines = [part.get("gpu") or part.get("cpu") for part in parts]
    changes = zip(machines, machines[1:], parts[1:], strict=False)
    result["machines_before"] = {before: part["step"] for before, now, part in changes if before != now}
    result["versions"] = config.get("versions") or {name: installed(name) for name in PACKAGES}
    for split in (evaluation or {}).get("splits", {}).values():
        split.pop("lengths", None)
    result["eval"] = evaluation
    if not error:  # done: all its iterations, and (with --eval-episodes) an evaluation after the last one
        evaluated = rows and (args.get("eval_episodes") == 0 or (evaluation and evaluation["step"] == before))
        if not evaluated:
            result["status"] = "open"
        elif args.get("total_timesteps", 0) - before >= before / int(rows[-1]["iteration"]):
            result["status"] = "open"
    merged = thin(rows)
    lines = [row.keys() for row in merged[:1]] + [row.values() for row in merged]
    text = "".join(",".join(line) + "\n" for line in lines)
    return text, result


def execute(job: Job, runs: Path, threads: int, deadline: float | None = None, stopping=(), processes=None):
    """Start or continue a job -> (csv, json) when it is done or has failed, None when it was stopped.

    threads: 0 lets the script choose. deadline: time.time() at which it is stopped. stopping: not empty when the
    caller wants it to stop. processes: the training process is appended. The process holds the job's lock, so that no
    two processes train in one folder. It has its own process group, so that a terminal's Ctrl-C reaches it once,
    through its parent; and it ends when its parent dies.
    """
    parent = os.getpid()

    def tied():  # in the child
        LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: the signal at its parent's death
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(143)

    run = runs / job.folder
    run.parent.mkdir(parents=True, exist_ok=True)
    with open(run.with_name(run.name + ".lock"), "w") as lock:
        until = time.monotonic() + 60  # a stopped process may still be writing its checkpoint
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if stopping:
                    return None
                if time.monotonic() > until:
                    print(f"{run}: another process is training it", file=sys.stderr)
                    return None
                time.sleep(0.2)
        command = [sys.executable, str(ROOT / job.file), "--threads", str(threads), *job.command[2:]]
        if (run / "checkpoint.pt").exists():
            command += ["--resume", str(run)]
        else:
            if run.exists():  # killed before its first checkpoint
                shutil.rmtree(run)
            run.with_name(run.name + ".json").unlink(missing_ok=True)
            command += ["--run-dir", str(run.parent), "--run-name", run.name]
        note_start(job, run)
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        environment = os.environ | (dict(OMP_NUM_THREADS=str(threads)) if threads else {})
        options = dict(pass_fds=[lock.fileno()], preexec_fn=tied, process_group=0, env=environment, **pipes)
        process = subprocess.Popen(command, **options)
        if processes is not None:
            processes.append(process)
        if stopping:
            process.terminate()
        try:
            output, _ = process.communicate(timeout=max(deadline - time.time(), 0) if deadline else None)
        except subprocess.TimeoutExpired:
            process.terminate()  # it writes its checkpoint
            output, _ = process.communicate()
        if process.returncode in (130, -signal.SIGTERM):
            return None
        found = collect(job, run)
        if process.returncode == 0 and found[1]["status"] == "done":
            return found
        lines = [line.strip("│╭╮╰╯─ ") for line in output.splitlines()]  # tyro draws a box around bad usage
        lines = [line for line in lines if line]
        status = f"exit status {process.returncode}, {found[1]['steps']:,} steps"
        bad_usage = " ".join(lines)[:300] if process.returncode == 2 else ""
        return collect(job, run, bad_usage or "\n".join([status, *lines[-5:]]))


def record(job: Job, result, results: Path) -> str:
    """Write a job's files -> its state in a word."""
    if result is None:
        return "stopped"
    path = results / job.suite / job.name
    if result[0]:
        write_atomically(path.with_name(path.name + ".csv"), result[0])
    write_atomically(path.with_name(path.name + ".json"), json.dumps(result[1], indent=1) + "\n")
    return result[1]["status"]


def state(job: Job, results: Path) -> str:
    """open, done or failed; a result of other flags does not count."""
    found = read_json(results / job.suite / f"{job.name}.json")
    if not isinstance(found, dict) or found.get("command") != " ".join(job.command):
        return "open"
    return found.get("status", "open")


def local(cells: list[Job], options) -> int:
    """Run --jobs jobs at a time on this machine."""
    at_once = min(options.jobs, len(cells))
    threads = options.threads
    if not threads and at_once > 1:
        threads = max(available_cores() // at_once, 1)
    deadline = time.time() + 60 * options.max_minutes if options.max_minutes else None
    processes, stopping = [], []

    def one(job):
        if stopping or (deadline and time.time() >= deadline):
            return "not started"
        try:
            word = record(job, execute(job, options.runs, threads, deadline, stopping, processes), options.results)
        except Exception:  # must not stop the other jobs
            traceback.print_exc()
            word = "failed"
        print(f"{word:8} {job.suite} {job.name}", flush=True)
        return word

    def stop(number, frame):
        stopping.append(number)
        for process in list(processes):
            if process.poll() is None:
                process.terminate()  # it writes its checkpoint

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    states = []
    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            waiting = {pool.submit(one, job) for job in cells}
            while waiting:  # with a time limit: a signal is only handled between two waits
                done, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
                states += [future.result() for future in done]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    print(", ".join(f"{states.count(name)} {name}" for name in sorted(set(states))) or "nothing to do")
    return 128 + stopping[0] if stopping else int("failed" in states)


def slurm(cells: list[Job], options) -> str:
    """One array script: task k runs job k; submit it again to continue."""
    lines = ["#!/bin/bash", f"#SBATCH --array=0-{len(cells) - 1}", f"#SBATCH --job-name={options.suite}"]
    lines += ["#SBATCH --gpus=1", "#SBATCH --cpus-per-task=8", "#SBATCH --signal=B:TERM@120", "cells=("]
    lines += [f"    {shlex.quote(job.name)}" for job in cells]
    command = f"python benchmark/run.py --suite {options.suite} --max-minutes {options.max_minutes:g}"
    command += f" --threads {options.threads}" * bool(options.threads)
    folders = [str(path.resolve()) for path in (options.runs, options.results)]
    command += f" {'--retry ' * options.retry}{shlex.join(['--runs', folders[0], '--results', folders[1]])}"
    command += " --exactly --only"
    lines += [")", f"cd {shlex.quote(str(ROOT))} || exit 1", "trap 'kill -TERM $!; wait $!' TERM"]
    return "\n".join([*lines, f'{command} "${{cells[$SLURM_ARRAY_TASK_ID]}}" &', "wait $!"])


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=list(SUITES), required=True)
    parser.add_argument("--only", default="", help="jobs whose name (script/game/seedK) contains this")
    parser.add_argument("--exactly", action="store_true", help="--only is a whole name")
    parser.add_argument("--list", action="store_true", help="print state and command of each job")
    parser.add_argument("--retry", action="store_true", help="also run failed jobs")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="jobs at a time, all on one GPU; start another run.py for each further GPU, with CUDA_VISIBLE_DEVICES "
        "and another --only",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads per job; 0 = share out all cores")
    parser.add_argument("--max-minutes", type=float, default=0, help="stop and save after this; 0 = never")
    parser.add_argument("--runs", type=Path, help="folder of the runs; default: runs/benchmark, or RESULTS/runs")
    parser.add_argument(
        "--results", type=Path, help="default: benchmark/results; an empty folder runs everything again"
    )
    parser.add_argument("--launcher", choices=["local", "slurm"], default="local")
    options = parser.parse_args(argv)
    options.runs = options.runs or (options.results / "runs" if options.results else ROOT / "runs" / "benchmark")
    options.results = options.results or ROOT / "benchmark" / "results"
    cells = [job for job in jobs_of(options.suite, options.only) if not options.exactly or job.name == options.only]
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least 1")
    if options.threads < 0:
        parser.error(f"--threads {options.threads}: at least 0")
    if not cells:
        parser.error(f"--only {options.only!r}: no job of {options.suite}")
    if options.list:
        for job in cells:
            print(f"{state(job, options.results):8} {' '.join(job.command)}")
        return 0
    wanted = ["open", "failed"] if options.retry else ["open"]
    cells = [job for job in cells if state(job, options.results) in wanted]
    if not cells:
        print("nothing to do", file=sys.stderr if options.launcher == "slurm" else sys.stdout)
        return 0
    if options.launcher == "slurm":
        print(slurm(cells, options))
        return 0
    return local(cells, options)


if __name__ == "__main__":
    sys.exit(main())
