"""Steps per second of a script, where the time goes, and the ratio to a baseline in alternating runs.

    python benchmark/speed.py ppo_procgen -- --num-envs 64 --channels 16 32 32
    python benchmark/speed.py --against cleanrl --source CLONE --json FOLDER    # git clone of vwxyzjn/cleanrl
    python benchmark/speed.py --against leanrl --source CLONE --json FOLDER     # git clone of meta-pytorch/LeanRL
    python benchmark/speed.py --gpu --json FILE  # all scripts on a GPU, fp32 and bf16, with and without --compile
    python benchmark/speed.py appo_atari --against sb3 --peer-python PYTHON -- --env-id Pong
    python benchmark/speed.py ppo_procgen --revision HEAD~1  # the same script of another revision

What follows `--` goes to the script. Every measurement is its own process, which discards `--warmup` iterations and
measures `--iterations` of equal size. Script and baseline alternate A B A B, and the ratio of each pair is printed:
where the speed of the machine drifts, only the ratio means something. Run it with nothing else running. CPU seconds are
summed over threads. Shares of env and policy of an asynchronous script are its actors', which work at the same time as
the learner. Another revision is checked out into a temporary git worktree, where its own speed.py measures it.

Baselines (--against):
- "cleanrl": CleanRL's file for the same task from CLONE, run by cleanrl_shim.py with the sizes of the flags.
  ppo_procgen.py gets CleanRL's network and loss, the others its gradient clipping. Without a script's name the rows of
  ROWS are measured, each written to a file in FOLDER. --equal: without its deterministic convolutions, with TF32 and as
  many threads as the script has, which on a GPU is one.
- "leanrl": LeanRL's ppo_atari_envpool_torchcompile.py, likewise; on a GPU with the flags of its README, --compile
  --cudagraphs. It needs tensordict 0.10.0 (pip install --no-deps tensordict==0.10.0 orjson pyvers cloudpickle).
- "sync": APPO without overlap; "overlap": IMPALA with overlap; "fp32": the script without the --precision bf16 or
  --compile of the flags.
- "sb3": Stable-Baselines3 2.9.2 with its own Atari wrappers and the same sizes, for appo_atari. It runs with its own
  Python, --peer-python (peers.sh makes it).
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BASELINES = {
    "ppo_procgen": ("cleanrl", "fp32"),
    "impala_procgen": ("overlap", "fp32"),
    "ppo_atari_rnd": ("cleanrl", "fp32"),
    "ppo_atari_snd": ("fp32",),
    "appo_atari": ("cleanrl", "leanrl", "sync", "sb3", "fp32"),
}
CHANGED = {  # the script itself, with these flags
    "sync": ["--sync"],
    "overlap": ["--no-sync"],
    "fp32": ["--precision", "fp32", "--no-compile"],
}

COUNTERPARTS = {
    ("cleanrl", "ppo_procgen"): "cleanrl/ppo_procgen.py",
    ("cleanrl", "appo_atari"): "cleanrl/ppo_atari_envpool.py",
    ("cleanrl", "ppo_atari_rnd"): "cleanrl/ppo_rnd_envpool.py",
    ("leanrl", "appo_atari"): "leanrl/ppo_atari_envpool_torchcompile.py",
}
CLONES = {"cleanrl": "https://github.com/vwxyzjn/cleanrl", "leanrl": "https://github.com/meta-pytorch/LeanRL"}
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
ROWS = {  # compared with CleanRL and LeanRL: file -> command
    "cleanrl_ppo_procgen_1_minibatch": f"ppo_procgen -- {STARPILOT} --minibatch-size 2048",
    "cleanrl_ppo_procgen_8_minibatches": f"ppo_procgen -- {STARPILOT} --minibatch-size 256",
    "cleanrl_appo_atari": f"appo_atari --iterations 8 -- {BREAKOUT}",
    "cleanrl_ppo_atari_rnd": f"ppo_atari_rnd -- {MONTEZUMA}",
    "leanrl_appo_atari": f"appo_atari --iterations 8 -- {BREAKOUT}",
}
GPU = {  # measured by --gpu: the rows' sizes, then the scripts' defaults
    "ppo_procgen, 1 minibatch": f"ppo_procgen {STARPILOT} --minibatch-size 2048 {ALIKE['ppo_procgen']}",
    "ppo_procgen, 8 minibatches": f"ppo_procgen {STARPILOT} --minibatch-size 256 {ALIKE['ppo_procgen']}",
    "appo_atari, CleanRL's sizes": f"appo_atari {BREAKOUT}",
    "ppo_procgen": "ppo_procgen",
    "impala_procgen": "impala_procgen",
    "appo_atari": "appo_atari",
    "ppo_atari_rnd": "ppo_atari_rnd --warmup-steps 16",
    "ppo_atari_snd": "ppo_atari_snd --warmup-steps 16",
}
VARIANTS = ("", "--compile", "--precision bf16", "--precision bf16 --compile")


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


def peer_flags(script, args, options) -> list[str]:
    """Flags for the same numbers of environments, steps, minibatches and epochs in the other file, or UsageError."""
    import torch
    import tyro

    alike = tyro.cli(script.Args, args=ALIKE[script.__name__].split())
    for name in FIXED:
        if getattr(args, name, None) != getattr(alike, name, None):
            raise script.UsageError(f"--{name.replace('_', '-')}: {options.against} has no such flag")
    rows = args.num_envs * args.num_steps
    minibatches = getattr(args, "num_minibatches", rows // args.minibatch_size)
    if minibatches * args.minibatch_size != rows:
        raise script.UsageError(f"--minibatch-size {args.minibatch_size}: other minibatches have all {rows} rows")
    game = args.env_id if script.__name__ == "ppo_procgen" else args.env_id.removesuffix("-v5") + "-v5"
    flags = dict(env_id=game, num_envs=args.num_envs, num_steps=args.num_steps, num_minibatches=minibatches)
    flags |= dict(update_epochs=args.update_epochs, total_timesteps=10**9)
    if script.__name__ == "ppo_atari_rnd":
        flags["update_proportion"] = args.predictor_share or min(1, 32 / args.num_envs)
        flags["num_iterations_obs_norm_init"] = 1  # before the first iteration, which is discarded
    words = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
    if options.equal:
        words.append("--no-torch-deterministic")
    if args.device == "cpu":
        words.append("--no-cuda")
    elif options.against == "leanrl" and torch.cuda.is_available():
        words += ["--compile", "--cudagraphs"]
    return words


def measure_peer(script, args, options, watch: Stopwatch):
    """Run the other file, with --threads PyTorch threads, or one per core (PyTorch's default)."""
    import torch

    import cleanrl_shim

    torch.set_num_threads(args.threads or script.available_cores())
    if options.equal:
        script.set_up(args, None)  # its threads and TF32
    file = options.source / COUNTERPARTS[options.against, script.__name__]
    rows = args.num_envs * args.num_steps
    cleanrl_shim.run(file, peer_flags(script, args, options), args.run_dir, watch.row, rows)


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
print(json.dumps(dict(sps=steps / (end - begin), peak_gib=peak, seconds_a_step=dict(cpu=(last - cpu) / steps))))
"""


def sb3(args, options) -> dict:
    """Stable-Baselines3's PPO with the same sizes; its environments step one after the other."""
    names = ("num_envs", "num_steps", "minibatch_size", "update_epochs")
    sizes = {name: getattr(args, name) for name in names} | dict(warmup=options.warmup, iterations=options.iterations)
    sizes |= dict(game=args.env_id.removesuffix("-v5"), device="cpu" if args.device == "cpu" else "auto")
    done = subprocess.run([options.peer_python, "-c", SB3, json.dumps(sizes)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def child(options, flags: list[str]) -> dict:
    """One measurement, in this process."""
    import torch
    import tyro

    name, variant = options.name, options.child
    script = importlib.import_module(name)
    if options.against in CLONES:
        flags = [*ALIKE[name].split(), *flags]
    watch = Stopwatch(options.warmup + options.iterations)
    if torch.cuda.is_available():
        query = "nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader,nounits --loop-ms=200"
        monitor = subprocess.Popen(query.split(), stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--run-dir", folder, "--eval-episodes", "0"]
        args = tyro.cli(script.Args, args=[*fixed, *flags, *CHANGED.get(variant, [])])
        if options.against in CLONES:
            peer_flags(script, args, options)  # refuse now, not after the script's measurement
        if variant == "sb3":
            return sb3(args, options)
        with contextlib.suppress(Enough):
            if variant in CLONES:
                measure_peer(script, args, options, watch)
            else:
                measure_script(script, args, watch)
    found = watch.result(options.warmup)
    if torch.cuda.is_available():
        monitor.terminate()
        samples = [line.split(", ") for line in monitor.communicate()[0].splitlines()]
        busy, memory = zip(*samples[len(samples) // 2 :], strict=True)  # the first half has the warm-up
        found |= dict(gpu_busy=statistics.mean(map(int, busy)), gpu_gib=max(map(int, memory)) / 1024)
    return found


@contextlib.contextmanager
def worktree(revision: str):
    """A folder with another revision."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*git, "add", "--detach", f"{folder}/tree", revision], check=True, capture_output=True)
        try:
            yield Path(folder, "tree")
        finally:
            subprocess.run([*git, "remove", "--force", f"{folder}/tree"], capture_output=True)


def hardware() -> str:
    import torch

    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.M)
    widest = "AVX-512" if " avx512f " in info else "AVX2" if " avx2 " in info else "no AVX2"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cpu = f"{model[1] if model else 'unknown CPU'} ({widest}), {len(os.sched_getaffinity(0))} cores"
    return f"{cpu}, {gpu}, torch {torch.__version__}"


@functools.cache  # asked once: the result files of a command's first rows would make the tree dirty
def revision_of(folder: Path) -> str:
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def measure(options, variant: str, flags: list[str], root: Path = ROOT) -> dict:
    """One measurement in its own process, by the speed.py in `root`."""
    command = [sys.executable, str(root / "benchmark" / "speed.py"), options.name, "--child", variant]
    for name in ("iterations", "warmup", "peer_python", "source", "against"):
        if value := getattr(options, name):
            command += [f"--{name.replace('_', '-')}", str(value)]
    command += ["--equal"] * options.equal
    running = subprocess.Popen([*command, "--", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = running.communicate()
    finally:
        running.terminate()
        running.wait()
    if running.returncode:
        raise RuntimeError((errors or output).strip())
    found = json.loads(output.splitlines()[-1]) | dict(variant=variant)
    phases, memory = dict(found["seconds_a_step"]), f"peak {found['peak_gib']:.2f} GiB"
    cpu = f"CPU {1e3 * phases.pop('cpu'):.2f} ms/step"
    split = ", ".join(f"{key} {100 * value * found['sps']:.1f} %" for key, value in phases.items())
    print(f"{variant:8} {found['sps']:8,.0f} steps/s   {split}   {cpu}   {memory}", flush=True)
    return found


def compare(options, flags: list[str]) -> dict:
    """Alternate script and baseline."""
    baseline, ours, theirs = options.against or options.revision, [], []
    with worktree(options.revision) if options.revision else contextlib.nullcontext(ROOT) as other:
        for _ in range(options.pairs):
            ours.append(measure(options, "script", flags))
            if baseline:
                theirs.append(measure(options, options.against or "script", flags, other))
    if not baseline:
        return dict(results=dict(script=ours))
    pairs = list(zip(ours, theirs, strict=True))
    wall = [a["sps"] / b["sps"] for a, b in pairs]
    cpu = [b["seconds_a_step"]["cpu"] / a["seconds_a_step"]["cpu"] for a, b in pairs]
    for name, ratios in (("wall time", wall), ("CPU time", cpu)):
        print(f"{baseline} / script, {name}: {statistics.median(ratios):.2f} ", end="")
        print(f"({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs)")
    found = dict(results={"script": ours, baseline: theirs}, wall_ratios=wall, cpu_ratios=cpu)
    return dict(revisions=found) if options.revision else found


def all_rows(options, flags: list[str]) -> int:
    """Each row of ROWS that is compared with the baseline as its own command."""
    for row, words in ROWS.items():
        if not row.startswith(options.against):
            continue
        own, _, sizes = words.partition(" -- ")
        own = [*own.split(), "--against", options.against, "--source", str(options.source)]
        own += ["--pairs", str(options.pairs), *["--equal"] * options.equal]
        if options.json:
            own += ["--json", str(options.json / f"{row}{'_equal' * options.equal}.json")]
        if code := main([*own, "--", *sizes.split(), *flags]):
            return code
    return 0


def gpu_table(options, flags: list[str]) -> dict:
    """Every configuration of GPU in every one of VARIANTS, once; prints a table in Markdown."""
    import tyro

    names = "configuration", "flags", "steps/s", "ms per acting step", "ms per SGD step", "GPU busy, %", "GPU GiB"
    results, table = {}, [names, ["---"] * len(names)]
    for label, words in GPU.items():
        options.name, *sizes = words.split()
        options.warmup, options.iterations = (3 if options.name in ASYNC else 2), 2
        args = tyro.cli(importlib.import_module(options.name).Args, args=sizes)
        passes = args.update_epochs * (1 + getattr(args, "replay_proportion", 0))
        for variant in VARIANTS:
            try:
                found = measure(options, "script", [*sizes, *variant.split(), *flags])
            except RuntimeError as error:  # the others are still worth having
                print(error, file=sys.stderr)
                continue
            results[f"{label} {variant}".strip()] = found
            seconds = found["seconds_a_step"]
            acting = 1e3 * seconds["policy"] * args.num_envs / getattr(args, "num_groups", 1)
            learning = 1e3 * seconds["learn"] * args.minibatch_size / passes
            gpu = found.get("gpu_busy", 0), found.get("gpu_gib", 0)
            numbers = [f"{x:,.0f}" if x > 99 else f"{x:.2f}" for x in (found["sps"], acting, learning, *gpu)]
            table.append([label, variant, *numbers])
    print("\n".join(f"| {' | '.join(cells)} |" for cells in table))
    return dict(results=results)


def parsed(parser, own: list[str]):
    """Parse the options before `--`; a mistake ends with one line and exit code 2."""
    parser.add_argument("name", nargs="?", choices=sorted(BASELINES), help="a script, without .py")
    parser.add_argument("--against", help="alternate with this baseline; without a script's name, cleanrl or leanrl")
    parser.add_argument("--equal", action="store_true", help="cleanrl, leanrl: not as shipped, but on equal terms")
    parser.add_argument("--gpu", action="store_true", help="measure all scripts in four variants, without a baseline")
    parser.add_argument("--revision", help="alternate with the script of this revision")
    parser.add_argument("--source", type=Path, help="a clone of CleanRL or LeanRL")
    parser.add_argument("--peer-python", default="python", help="the Python that has sb3")
    parser.add_argument("--pairs", type=int, help="pairs of measurements; default 2, without a script's name 4")
    parser.add_argument("--iterations", type=int, help="iterations measured per process, default 2")
    parser.add_argument("--warmup", type=int, help="iterations discarded first, default 1 (IMPALA, APPO: 3)")
    parser.add_argument("--json", type=Path, help="file (of all rows: folder) for all figures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(own)
    if any(value is not None and value < 1 for value in (options.pairs, options.iterations, options.warmup)):
        parser.error("--pairs, --iterations and --warmup must be at least 1")
    if options.gpu == bool(options.name) and not (options.against in CLONES and not options.gpu):
        parser.error("either the name of a script, or --gpu, or --against cleanrl or leanrl")
    if options.name and options.against and options.against not in BASELINES[options.name]:
        parser.error(f"--against {options.against}: {options.name} has {', '.join(BASELINES[options.name])}")
    if options.against in CLONES and not (options.source and (options.source / options.against).is_dir()):
        parser.error(f"--source {options.source}: not a clone of {CLONES[options.against]}")
    if options.revision:
        known = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{options.revision}^{{commit}}"]
        if subprocess.run(known, capture_output=True).returncode or options.against:
            parser.error(f"--revision {options.revision}: no revision of this repository, or --against is given, too")
    if options.name and options.json and options.json.is_dir():
        parser.error(f"--json {options.json}: is a folder")
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
    if not options.name and not options.gpu:
        return all_rows(options, flags)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # now, not after all measurements
    command = " ".join(["python", "benchmark/speed.py", *argv])
    command = command.replace(f"--source {options.source} ", "--source CLONE ")  # its path means nothing to others
    summary = dict(command=command, git=revision_of(ROOT), hardware=hardware())
    print(f"{command.removeprefix('python benchmark/')}\n{hardware()}", flush=True)
    try:
        summary |= gpu_table(options, flags) if options.gpu else compare(options, flags)
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
