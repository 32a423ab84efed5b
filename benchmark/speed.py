"""Steps per second of a script, where the time goes, and the ratio to a baseline in alternating runs.

    python benchmark/speed.py ppo_procgen -- --num-envs 64 --channels 16 32 32
    python benchmark/speed.py --against cleanrl --source CLONE --json FOLDER    # git clone of vwxyzjn/cleanrl
    python benchmark/speed.py appo_atari --against sb3 --peer-python PYTHON -- --env-id Pong
    python benchmark/speed.py --against HEAD~1 --script ppo_procgen appo_atari  # another revision
    python benchmark/speed.py --against 0ac8b70 --against-python PYTHON -- --threads 1  # the first edition

What follows `--` goes to the script. Every measurement is its own process. With --against, script and baseline
alternate A B A B, and the ratio of each pair is printed: where the speed of the machine drifts, only the ratio means
something. Run it with nothing else running. CPU seconds are summed over threads; Sample Factory's are unknown. Shares
of env and policy of an asynchronous script are its actors', which work at the same time as the learner.

Compared with a baseline, `--warmup` iterations are discarded and `--iterations` of equal size are measured (Sample
Factory runs for `--seconds`, its first report is discarded):
- "cleanrl": CleanRL's file for the same task from CLONE, run by cleanrl_shim.py with the sizes of the flags.
  ppo_procgen.py gets CleanRL's network and loss, the others its gradient clipping. Without a script's name the rows of
  ROWS are measured, each written to a file in FOLDER.
- "sync": APPO without overlap; "overlap": IMPALA with overlap; "fp32": the script without the --precision bf16 or
  --compile of the flags.
- "sample-factory" (2.1.1) and "sb3" (Stable-Baselines3 2.9.2, its own Atari wrappers, the same sizes), for appo_atari.
  They run with their own Python, --peer-python (peers.sh makes it).

Another revision is checked out into a temporary git worktree. Whole processes are timed, from the start of Python to
its end, each script with the flags in PROCESSES and those after `--`, which both revisions must know. For a revision
of the first edition, `--threads N` becomes `--torch-threads N --env-threads N`, and --against-python is a Python that
has its packages (requirements.txt of that revision: NumPy 1 and procgen-mirror).
"""

import argparse
import contextlib
import csv
import functools
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNKNOWN = float("nan")

BASELINES = {
    "ppo_procgen": ("cleanrl", "fp32"),
    "impala_procgen": ("overlap", "fp32"),
    "ppo_atari_rnd": ("cleanrl", "fp32"),
    "ppo_atari_snd": ("fp32",),
    "appo_atari": ("cleanrl", "sync", "sample-factory", "sb3", "fp32"),
}
CHANGED = {  # the script itself, with these flags
    "sync": ["--sync"],
    "overlap": ["--no-sync"],
    "fp32": ["--precision", "fp32", "--no-compile"],
}

COUNTERPARTS = {"ppo_procgen": "ppo_procgen", "appo_atari": "ppo_atari_envpool", "ppo_atari_rnd": "ppo_rnd_envpool"}
ALIKE = {  # flags for the counterpart's network and loss, as far as the script has them
    "ppo_procgen": "--stack none --channels 16 32 32 --pool flatten --input-shift 0 --ortho-heads --reshuffle "
    "--norm-reward 0.999 --norm-adv minibatch --gamma 0.999 --gae-lambda 0.95 --vf-clip 0.2 --vf-coef 0.25 --kl-coef 0 "
    "--lr 5e-4 --adam-eps 1e-5 --max-grad-norm 0.5",
    "appo_atari": "--max-grad-norm 0.5",
    "ppo_atari_rnd": "--warmup-steps 16 --max-grad-norm 0.5",
}
# These flags change the work and CleanRL's files have none like them.
FIXED = "channels pool stack distribution_mode num_levels frame_size rnd_features".split()
ASYNC = ("impala_procgen", "appo_atari")  # their first iterations also fill the queue of rollouts
STARPILOT = "--env-id starpilot --num-envs 64 --num-steps 32"
BREAKOUT = "--env-id Breakout --num-envs 8 --num-steps 128 --minibatch-size 256 --num-minibatches 4"
MONTEZUMA = "--env-id MontezumaRevenge --num-envs 128 --num-steps 16 --minibatch-size 2048 --predictor-share 0.25"
ROWS = {  # compared with CleanRL: (script, sizes, iterations discarded, measured)
    "cleanrl_ppo_procgen_1_minibatch": ("ppo_procgen", f"{STARPILOT} --minibatch-size 2048", 1, 2),
    "cleanrl_ppo_procgen_8_minibatches": ("ppo_procgen", f"{STARPILOT} --minibatch-size 256", 1, 2),
    "cleanrl_appo_atari": ("appo_atari", BREAKOUT, 3, 8),
    "cleanrl_ppo_atari_rnd": ("ppo_atari_rnd", MONTEZUMA, 1, 2),
}


def load(script: str):
    spec = importlib.util.spec_from_file_location(script, ROOT / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[script] = module
    spec.loader.exec_module(module)
    return module


class Enough(BaseException):
    """Ends the training once enough of it is measured."""


class Stopwatch:
    """Wall and CPU seconds of every iteration, and the seconds of its phases."""

    def __init__(self, wanted: int):
        self.wanted = wanted
        self.rows = []
        self.mark = (time.perf_counter(), time.process_time())

    def row(self, step: int, **phases):
        """An iteration ended at this environment step; raises Enough after the last one wanted."""
        now = (time.perf_counter(), time.process_time())
        self.rows.append({"wall": now[0] - self.mark[0], "cpu": now[1] - self.mark[1], **phases})
        self.mark = now
        self.step = step
        if len(self.rows) == self.wanted:
            raise Enough

    def result(self, warmup: int) -> dict:
        """Steps per second and seconds per step after the warm-up iterations, and the process's memory."""
        rows = self.rows[warmup:]
        steps = self.step // len(self.rows) * len(rows)
        seconds = {key: sum(row[key] for row in rows) / steps for key in rows[0]}
        sps = 1 / seconds.pop("wall")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return dict(sps=sps, peak_gib=peak, seconds_a_step=seconds)


def measure_script(script, args, watch: Stopwatch):
    """Run the script's `train`, with the stopwatch in its Run.log."""
    log = script.Run.log

    def timed_log(run, metrics):
        log(run, metrics)
        times = {name.removeprefix("time/"): x for name, x in metrics.items() if name.startswith("time/")}
        watch.row(metrics["step"], **{name.removesuffix("_s"): x for name, x in times.items() if name != "sps"})

    script.Run.log = timed_log
    args.total_timesteps = 10**9  # asynchronous actors must not stop before the last measured iteration
    script.train(args)


def cleanrl_flags(script, args) -> list[str]:
    """Flags for the same numbers of environments, steps, minibatches and epochs in CleanRL's file, or UsageError."""
    import tyro

    alike = tyro.cli(script.Args, args=ALIKE[script.__name__].split())
    for name in FIXED:
        if getattr(args, name, None) != getattr(alike, name, None):
            raise script.UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: CleanRL has no such flag")
    rows = args.num_envs * args.num_steps
    if rows % args.minibatch_size:
        raise script.UsageError(f"--minibatch-size {args.minibatch_size}: CleanRL's must divide {rows} rows")
    minibatches = rows // args.minibatch_size
    if getattr(args, "num_minibatches", minibatches) != minibatches:
        raise script.UsageError(
            f"--num-minibatches {args.num_minibatches}: CleanRL has {minibatches}, of all {rows} rows"
        )
    game = args.env_id if script.__name__ == "ppo_procgen" else args.env_id.removesuffix("-v5") + "-v5"
    flags = dict(env_id=game, num_envs=args.num_envs, num_steps=args.num_steps, num_minibatches=minibatches)
    flags |= dict(update_epochs=args.update_epochs, total_timesteps=10**9)
    if script.__name__ == "ppo_atari_rnd":
        flags["update_proportion"] = args.predictor_share or min(1, 32 / args.num_envs)
        flags["num_iterations_obs_norm_init"] = 1  # before the first iteration, which is discarded
    words = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
    return words + (["--no-cuda"] if args.device == "cpu" else [])


def measure_cleanrl(script, args, source: Path, watch: Stopwatch):
    """Run CleanRL's file, with --threads PyTorch threads, or one per core (PyTorch's default)."""
    import torch

    import cleanrl_shim

    torch.set_num_threads(args.threads or script.available_cores())
    file = source / "cleanrl" / f"{COUNTERPARTS[script.__name__]}.py"
    cleanrl_shim.run(file, cleanrl_flags(script, args), args.run_dir, watch.row)


def sample_factory(args, seconds: float, python: str) -> dict:
    """Sample Factory's own command with the same sizes, measured from its log.

    Discarded: what comes before its first report and after its last dataset.
    """
    game = args.env_id.removesuffix("-v5").lower()
    import torch

    device = "gpu" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    flags = dict(algo="APPO", env=f"atari_{game}", device=device, serial_mode=False, async_rl=True, num_workers=2)
    flags |= dict(num_envs_per_worker=args.num_envs // 2, worker_num_splits=2, rollout=args.num_steps, recurrence=1)
    flags |= dict(batch_size=args.minibatch_size, num_batches_per_epoch=args.num_minibatches)
    flags |= dict(num_batches_to_accumulate=args.num_batches_to_accumulate, num_epochs=args.update_epochs)
    flags |= dict(max_grad_norm=args.max_grad_norm, train_for_env_steps=10**9)
    flags |= dict(train_dir=args.run_dir, experiment="x", restart_behavior="overwrite")
    start = Path(args.run_dir, "start.py")  # a file, because its spawned processes import it
    text = "import ale_py, sys\nfrom sf_examples.atari.train_atari import main\n"
    start.write_text(f"{text}if __name__ == '__main__':\n    sys.exit(main())\n")
    command = [python, str(start), *(f"--{key}={value}" for key, value in flags.items())]
    piped = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    until = time.perf_counter() + seconds
    running = subprocess.Popen(command, **piped)
    reports, lines = [], []  # (time, environment steps)
    try:
        for line in running.stdout:
            lines.append(line)
            if time.perf_counter() > until:
                break
            if found := re.search(r"Total num frames: (\d+)", line):
                reports.append((time.perf_counter(), int(found[1]) / 4))  # four frames a step
    finally:  # also ends its processes, which would disturb the next measurement
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    changes = [now for before, now in zip(reports, reports[1:], strict=False) if now[1] > before[1]]
    if len(changes) < 3:
        raise RuntimeError("".join(lines[-30:]))
    (begin, first), (end, last) = changes[0], changes[-1]
    # CPU time and memory of its worker processes are unknown here.
    return dict(sps=(last - first) / (end - begin), peak_gib=UNKNOWN, seconds_a_step=dict(cpu=UNKNOWN))


SB3 = """
import json, resource, sys, time
import ale_py, gymnasium
gymnasium.register_envs(ale_py)
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

o = json.loads(sys.argv[1])
marks = []

class Clock(BaseCallback):
    def _on_rollout_start(self):
        used = resource.getrusage(resource.RUSAGE_SELF)
        marks.append((time.perf_counter(), used.ru_utime + used.ru_stime))

    def _on_step(self):
        return True

envs = VecFrameStack(make_atari_env(f"{o['game']}NoFrameskip-v4", n_envs=o["num_envs"], seed=1), 4)
options = dict(n_steps=o["num_steps"], batch_size=o["minibatch_size"], n_epochs=o["update_epochs"], device=o["device"])
model = PPO("CnnPolicy", envs, **options, learning_rate=2.5e-4, clip_range=0.1, ent_coef=0.01, normalize_advantage=True)
batch = o["num_steps"] * o["num_envs"]
model.learn(batch * (o["warmup"] + o["iterations"] + 1), callback=Clock())
(begin, cpu), (end, last) = marks[o["warmup"]], marks[o["warmup"] + o["iterations"]]
steps, peak = batch * o["iterations"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps(dict(sps=steps / (end - begin), cpu=(last - cpu) / steps, peak=peak)))
"""


def sb3(args, options) -> dict:
    """Stable-Baselines3's PPO with the same sizes; its environments step one after the other."""
    names = ("num_envs", "num_steps", "minibatch_size", "update_epochs")
    sizes = {name: getattr(args, name) for name in names} | dict(warmup=options.warmup, iterations=options.iterations)
    sizes |= dict(game=args.env_id.removesuffix("-v5"), device="cpu" if args.device == "cpu" else "auto")
    done = subprocess.run([options.peer_python, "-c", SB3, json.dumps(sizes)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    return dict(sps=found["sps"], peak_gib=found["peak"], seconds_a_step=dict(cpu=found["cpu"]))


def child(options, flags: list[str]) -> dict:
    """One measurement, in this process."""
    import tyro

    name, variant = options.name, options.child
    script = load(name)
    if options.against == "cleanrl":
        flags = [*ALIKE[name].split(), *flags]
    watch = Stopwatch(options.warmup + options.iterations)
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--run-dir", folder, "--eval-episodes", "0"]
        args = tyro.cli(script.Args, args=[*fixed, *flags, *CHANGED.get(variant, [])])
        if options.against == "cleanrl":
            cleanrl_flags(script, args)  # refuse now, not after the script's measurement
        if variant == "sample-factory":
            found = sample_factory(args, options.seconds, options.peer_python)
        elif variant == "sb3":
            found = sb3(args, options)
        else:
            try:
                if variant == "cleanrl":
                    measure_cleanrl(script, args, options.source, watch)
                else:
                    measure_script(script, args, watch)
            except Enough:
                found = watch.result(options.warmup)
    return dict(variant=variant, **found)


PROCESSES = {  # flags of whole processes, compared with another revision: about a minute on one core
    "ppo_procgen": "--env-id starpilot --channels 16 32 32 --num-envs 64 --num-steps 32 --minibatch-size 1024 "
    "--total-timesteps 8192",
    "impala_procgen": "--env-id starpilot --channels 16 32 32 --num-envs 16 --num-groups 2 --num-steps 50 "
    "--minibatch-size 400 --update-epochs 3 --replay-proportion 0 --sync --total-timesteps 6400",
    "ppo_atari_rnd": "--env-id MontezumaRevenge --num-envs 16 --num-steps 128 --minibatch-size 512 "
    "--predictor-share 0.25 --warmup-steps 50 --total-timesteps 8192",
    "ppo_atari_snd": "--env-id MontezumaRevenge --num-envs 16 --num-steps 64 --minibatch-size 256 "
    "--predictor-share 0.25 --warmup-steps 20 --total-timesteps 3072",
    "appo_atari": "--env-id Pong --num-envs 16 --minibatch-size 256 --num-minibatches 8 --total-timesteps 10240",
}


def flags_for(script: Path, flags: list[str]) -> list[str]:
    """Flags that a script of the first edition knows, too: it has two flags for threads."""
    if "torch_threads" not in script.read_text() or "--threads" not in flags:
        return flags
    i = flags.index("--threads")
    threads = flags[i + 1 : i + 2]
    return [*flags[:i], "--torch-threads", *threads, "--env-threads", *threads, *flags[i + 2 :]]


def process(source: Path, name: str, flags: list[str], python: str = sys.executable) -> dict:
    """A whole run of a script in `source`: its steps, the seconds and the memory of the process."""
    script = source / f"{name}.py"
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "output"), "w+") as output:
        fixed = ["--run-dir", folder, "--run-name", "run", "--eval-episodes", "0"]
        command = [python, str(script), *flags_for(script, flags), *fixed]
        start = time.perf_counter()
        running = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            _, status, used = os.wait4(running.pid, 0)
            running.returncode = os.waitstatus_to_exitcode(status)
        finally:
            if running.returncode is None:
                running.kill()
        wall = time.perf_counter() - start
        if running.returncode:
            output.seek(0)
            lines = [line for line in output.read().splitlines() if line.strip(" │╭╮╰╯─")]
            raise RuntimeError(f"{script}: exit code {running.returncode}: {' '.join(lines[-1:])}")
        with open(Path(folder, "run", "metrics.csv"), newline="") as file:
            steps = [int(row["step"]) for row in csv.DictReader(file)][-1]
    return dict(wall=wall, cpu=used.ru_utime + used.ru_stime, peak_gib=used.ru_maxrss / 2**20, steps=steps)


def compare_revisions(against: str, python: str, scripts: list[str], pairs: int, flags: list[str]) -> dict:
    """Alternate whole processes of another revision's scripts and of this tree's: {name: figures and ratios}."""
    results = {}
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "worktree")
        subprocess.run([*git, "add", "--detach", str(other), against], check=True, capture_output=True)
        try:
            for name in scripts:
                results[name] = compare_script(name, [*PROCESSES[name].split(), *flags], other, python, pairs)
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], capture_output=True)
    return results


def compare_script(name: str, flags: list[str], other: Path, python: str, pairs: int) -> dict:
    """Alternate old and new of one script; ratios are old / new of each pair: above 1 the new one is faster."""
    found = {"flags": " ".join(flags), "old": [], "new": []}
    print(f"{name}.py {found['flags']}: whole processes", flush=True)
    for _ in range(pairs):
        for side, source, own_python in (("old", other, python), ("new", ROOT, sys.executable)):
            one = process(source, name, flags, own_python)
            found[side].append(one)
            rate = one["steps"] / one["wall"]
            print(f"  {side}: {one['wall']:.1f} s wall, {one['cpu']:.1f} s CPU, {rate:,.1f} steps/s", flush=True)
    for old, new in zip(found["old"], found["new"], strict=True):
        if old["steps"] != new["steps"]:
            raise RuntimeError(f"{name}.py: {old['steps']} and {new['steps']} steps are not the same work")
        found.setdefault("wall_ratios", []).append(old["wall"] / new["wall"])
        found.setdefault("cpu_ratios", []).append(old["cpu"] / new["cpu"])
    for kind in ("wall", "cpu"):
        each = found[f"{kind}_ratios"]
        print(f"  old / new, {kind}: {statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})", flush=True)
    return found


def instruction_set(cpuinfo: str) -> str:
    """The widest vector instructions in /proc/cpuinfo, and the environment variables that limit their use."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.M)
    words = flags[1].split() if flags else []
    widest = "no AVX2"
    if "avx2" in words:
        widest = "AVX2"
    if "avx512f" in words:
        widest = "AVX-512"
    names = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
    return " ".join([widest, *(f"{name}={os.environ[name]}" for name in names if name in os.environ)])


def hardware() -> str:
    import torch

    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.M)
    cpu = f"{model[1] if model else 'unknown CPU'} ({instruction_set(info)})"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, {gpu}, torch {torch.__version__}"


@functools.cache  # asked once: the result files of a command's first rows would make the tree dirty
def revision_of(folder: Path) -> str:
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def show(result: dict):
    phases = dict(result["seconds_a_step"])
    cpu = phases.pop("cpu")
    split = ", ".join(f"{key} {100 * value * result['sps']:.1f} %" for key, value in phases.items())
    memory = f"CPU {1e3 * cpu:.2f} ms/step   peak {result['peak_gib']:.2f} GiB"
    print(f"{result['variant']:8} {result['sps']:8,.0f} steps/s   {split}   {memory}", flush=True)


def compare_baseline(options, flags: list[str]) -> dict:
    """Alternate script and baseline, each measurement a process that runs `child`."""
    results = {"script": []} | ({options.against: []} if options.against else {})
    shared = ["--iterations", options.iterations, "--warmup", options.warmup, "--seconds", options.seconds]
    shared += ["--peer-python", options.peer_python]
    if options.against:
        shared += ["--against", options.against]
    if options.source:
        shared += ["--source", options.source]
    for _ in range(options.pairs):
        for variant, list_of_results in results.items():
            command = [sys.executable, __file__, options.name, "--child", variant, *map(str, shared), "--", *flags]
            running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            try:
                output, errors = running.communicate()
            finally:  # SIGTERM, so that it can end its own processes
                running.terminate()
                running.wait()
            if running.returncode:
                raise RuntimeError((errors or output).strip())
            list_of_results.append(json.loads(output.splitlines()[-1]))
            show(list_of_results[-1])
    if not options.against:
        return dict(results=results)
    pairs = list(zip(results["script"], results[options.against], strict=True))
    wall = [ours["sps"] / theirs["sps"] for ours, theirs in pairs]
    cpu = [theirs["seconds_a_step"]["cpu"] / ours["seconds_a_step"]["cpu"] for ours, theirs in pairs]
    for name, ratios in (("wall time", wall), ("CPU time", cpu)):
        print(f"{options.against} / script, {name}: {statistics.median(ratios):.2f} ", end="")
        print(f"({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs)")
    return dict(results=results, wall_ratios=wall, cpu_ratios=cpu)


def cleanrl_rows(options, flags: list[str]) -> int:
    """Each row of ROWS as its own command."""
    for row, (script, sizes, warmup, iterations) in ROWS.items():
        if options.script and script not in options.script:
            continue
        words = [script, "--against", "cleanrl", "--source", str(options.source), "--pairs", str(options.pairs)]
        words += ["--warmup", str(options.warmup or warmup), "--iterations", str(options.iterations or iterations)]
        if options.json:
            words += ["--json", str(options.json / f"{row}.json")]
        if code := main([*words, "--", *sizes.split(), *flags]):
            return code
    return 0


def parsed(parser, own: list[str]):
    """Parse the options before `--`; a mistake ends with one line and exit code 2."""
    scripts = sorted(BASELINES)
    parser.add_argument("name", nargs="?", choices=scripts, help="a script, without .py")
    parser.add_argument("--against", help="alternate with this baseline; without a name, cleanrl or a git revision")
    parser.add_argument("--source", type=Path, help="a clone of CleanRL")
    parser.add_argument("--script", nargs="+", choices=scripts, help="without a script's name: only these scripts")
    parser.add_argument("--against-python", default=sys.executable, help="the Python of the other revision")
    parser.add_argument("--peer-python", default="python", help="the Python that has sample-factory or sb3")
    parser.add_argument("--seconds", type=float, default=180, help="length of a run of Sample Factory, in seconds")
    parser.add_argument("--pairs", type=int, help="pairs of measurements; default 2, without a script's name 4")
    parser.add_argument("--iterations", type=int, help="iterations measured per process, default 2")
    parser.add_argument("--warmup", type=int, help="iterations discarded first, default 1 (IMPALA, APPO: 3)")
    parser.add_argument("--json", type=Path, help="file (of all rows: folder) for all figures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(own)
    for flag in ("pairs", "iterations", "warmup"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag} {value}: must be at least 1")
    if options.name and own[0] != options.name:
        parser.error(f"{options.name}: the name of the script comes first")
    if (options.name and options.script) or not (options.name or options.against):
        parser.error("either the name of a script, or --against cleanrl or REVISION with --script NAME ...")
    if options.name and options.against and options.against not in BASELINES[options.name]:
        parser.error(f"--against {options.against}: {options.name} has {', '.join(BASELINES[options.name])}")
    if options.against == "cleanrl":
        if not (options.source and (options.source / "cleanrl" / "ppo_procgen.py").exists()):
            where = "git clone https://github.com/vwxyzjn/cleanrl"
            parser.error(f"--source {options.source}: no cleanrl/ppo_procgen.py in it; {where}")
        others = sorted({*(options.script or ())} - {*COUNTERPARTS})
        if others:
            parser.error(f"--script {' '.join(others)}: CleanRL has no such file")
    elif not options.name:
        known = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{options.against}^{{commit}}"]
        if subprocess.run(known, capture_output=True).returncode:
            parser.error(f"--against {options.against}: no revision of this repository")
    if options.json and options.json.is_dir() and (options.name or options.against != "cleanrl"):
        parser.error(f"--json {options.json}: is a folder")
    if not options.name and options.against != "cleanrl" and not shutil.which(options.against_python):
        parser.error(f"--against-python {options.against_python}: no such program")
    options.pairs = options.pairs or (2 if options.name else 4)
    if options.name:
        options.iterations = options.iterations or 2
        options.warmup = options.warmup or (3 if options.name in ASYNC else 1)
    return options


def main(argv=None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    end = argv.index("--") if "--" in argv else len(argv)
    flags = argv[end + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parsed(parser, argv[:end])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends running processes and the worktree
    if any(word.startswith("--resume") for word in flags):
        parser.error("--resume: its steps would count, and the run would change")
    if options.child:
        try:
            print(json.dumps(child(options, flags)))
        except ValueError as error:
            if type(error).__name__ != "UsageError":  # the script has its own class of that name
                raise
            parser.error(str(error))
        return 0
    if options.against == "cleanrl" and not options.name:
        return cleanrl_rows(options, flags)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # now, not after all measurements
    command = " ".join(["python", "benchmark/speed.py", *argv])
    command = command.replace(f"--source {options.source} ", "--source CLONE ")  # its path means nothing to others
    summary = dict(command=command, git=revision_of(ROOT), hardware=hardware())
    print(f"{command.removeprefix('python benchmark/')}\n{hardware()}", flush=True)
    try:
        if options.name:
            summary |= compare_baseline(options, flags)
        else:
            scripts = options.script or list(PROCESSES)
            python = options.against_python
            summary["revisions"] = compare_revisions(options.against, python, scripts, options.pairs, flags)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.source:
        summary["source"] = revision_of(options.source)
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
