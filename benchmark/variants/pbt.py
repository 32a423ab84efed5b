"""Population-based training of any of the five scripts, with Ray Tune's scheduler.

    python benchmark/variants/pbt.py appo_atari runs/pbt --population 4 --slices 20 \\
        --slice-steps 500000 -- --env-id Pong --minibatch-size 256 --update-epochs 2

Jaderberg et al. 2017, arXiv:1711.09846. Each trial has its own constant learning rate and entropy
weight (--anneal-lr is off) and trains one slice of steps. Then all wait, and the worst quarter (the
worse of two) continues with copies of the runs of the best quarter. Both numbers are multiplied by
0.8 or 1.2 or, one time in four, drawn again. The score is the mean return of the episodes that
ended in the slice. Trials are ordinary runs; tune/ holds Ray's log of who copied whom. On a
cluster, all nodes need this repository and the folder at the same paths.

Sample Factory's population differs: it replaces 30 %, changes a number with probability 0.15 by a
factor of 1.1 to 1.5, and changes other numbers too.
"""

import csv
import importlib
import os
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
import ray
import tyro
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

ROOT = str(Path(__file__).resolve().parents[2])
sys.path.insert(0, ROOT)
SCRIPTS = ("appo_atari", "impala_procgen", "ppo_atari_rnd", "ppo_atari_snd", "ppo_procgen")


@dataclass(config={"allow_inf_nan": False, "hide_input_in_errors": True})
class Options:
    script: tyro.conf.Positional[Literal[*SCRIPTS]]  # its own flags come last, after --
    folder: tyro.conf.Positional[str]  # new folder for the trials
    population: Annotated[int, Field(ge=2)] = 4  # trials (Sample Factory's two policies: 2)
    slices: PositiveInt = 20  # slices per trial
    slice_steps: PositiveInt = 500_000  # environment steps per slice
    lr: tuple[PositiveFloat, PositiveFloat] = (5e-5, 1e-3)
    """range of the learning rates, drawn log-uniformly"""
    ent_coef: tuple[PositiveFloat, PositiveFloat] = (1e-4, 3e-2)
    """range of the entropy weights, likewise"""
    cpus: PositiveInt = 1  # cores per trial
    gpus: NonNegativeFloat = 0  # GPU share per trial; with 0 Ray hides the GPUs
    address: str = ""  # of a Ray cluster; "" = only this machine

    def __post_init__(self):
        for name, (low, high) in {"lr": self.lr, "ent-coef": self.ent_coef}.items():
            if low > high:
                raise ValueError(f"--{name} {low} {high}: must be two rising numbers")


class UsageError(ValueError):
    """A mistake the user can fix: `main` prints it in one line and returns 2."""


class Trial(tune.Trainable):
    """A run that grows by a slice per step(); loading the run of a better trial is the copying."""

    def setup(self, config, options, flags):
        # Ray's worker may have been started in any folder.
        if ROOT not in sys.path:
            sys.path.insert(0, ROOT)
        self.script = importlib.import_module(options["script"])
        self.slice_steps = options["slice_steps"]
        number = int(self.trial_id.split("_")[-1])
        self.run = Path(flags["run_dir"], f"trial_{number}")
        # Its own seed: otherwise the copy of a run would play the same episodes as that run.
        own = {"run_name": self.run.name, "seed": flags["seed"] + number}
        self.args = self.script.Args(**flags | own)

    def step(self):
        start = self.iteration * self.slice_steps
        numbers = {"lr": self.config["lr"], "ent_coef": self.config["ent_coef"]}
        args = replace(self.args, total_timesteps=start + self.slice_steps, **numbers)
        saved = self.script.load(str(self.run)) if start else None
        step = self.script.train(args, saved=saved)["step"]
        return {"step": step, "score": mean_return(self.run, start)}

    def save_checkpoint(self, folder):
        shutil.copytree(self.run, folder, dirs_exist_ok=True)

    def load_checkpoint(self, folder):
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(folder, self.run, ignore=shutil.ignore_patterns(".*"))  # Ray's files


def mean_return(run: Path, start: int) -> float:
    """Of the episodes that ended after step `start`; -inf, the worst, without any."""
    rows = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    rows = [row for row in rows if int(row["step"]) > start and int(row["episode/count"])]
    counts = [int(row["episode/count"]) for row in rows]
    returns = [float(row["episode/return"]) for row in rows]
    return float(np.average(returns, weights=counts)) if rows else -np.inf


def set_up(options: Options, folder: Path, words: list[str]) -> tuple[dict, dict]:
    """Check everything and start Ray -> the trials' flags, the numbers that Tune changes."""
    script = importlib.import_module(options.script)
    args = tyro.cli(script.Args, args=words)
    if folder.exists():
        raise UsageError(f"{folder}: exists already")
    own = {"run_dir": str(folder), "eval_episodes": 0, "eval_every": 0}
    own["threads"] = args.threads or options.cpus
    if hasattr(args, "anneal_lr"):
        own["anneal_lr"] = False  # it would restart in every slice
    args = replace(args, total_timesteps=options.slice_steps, **own)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray reports every start
    try:
        ray.init(options.address or "local", log_to_driver=False)
    except (OSError, ValueError, ConnectionError) as error:  # such as a long TMPDIR, no cluster
        raise UsageError(f"Ray does not start (RAY_TMPDIR names its folder): {error}") from None
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        ray.shutdown()
        raise UsageError(f"{folder}: {error}") from None
    numbers = {name: tune.loguniform(*getattr(options, name)) for name in ("lr", "ent_coef")}
    return asdict(args), numbers


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    options = tyro.cli(Options, args=argv[:split], description=__doc__)
    folder = Path(options.folder).absolute()
    try:
        flags, numbers = set_up(options, folder, argv[split + 1 :])
    except (UsageError, pydantic.ValidationError) as error:
        print("pbt.py:", *str(error).split(), file=sys.stderr)
        return 2
    np.random.seed(flags["seed"])  # for the first numbers; Ray's later draws are not reproducible
    # synch: compare at the same number of steps, after each slice
    when = {"time_attr": "training_iteration", "perturbation_interval": 1, "synch": True}
    pbt = PopulationBasedTraining(metric="score", mode="max", hyperparam_mutations=numbers, **when)
    # Plain dicts: Ray's worker unpickles them before `setup` has made the script importable.
    trial = tune.with_parameters(Trial, options=vars(options), flags=flags)
    trial = tune.with_resources(trial, {"cpu": options.cpus, "gpu": options.gpus})
    plan = tune.TuneConfig(scheduler=pbt, num_samples=options.population)
    stop = {"training_iteration": options.slices}
    keep = tune.CheckpointConfig(num_to_keep=3)
    fail = tune.FailureConfig(fail_fast=True)  # otherwise the others would wait for a failed trial
    run = tune.RunConfig(
        "tune", str(folder), stop=stop, checkpoint_config=keep, failure_config=fail
    )
    results = tune.Tuner(trial, param_space=numbers, tune_config=plan, run_config=run).fit()
    slices = [(result.metrics or {}).get("training_iteration") for result in results]
    return int(slices != [options.slices] * options.population)  # 1 after a failure or Ctrl-C


if __name__ == "__main__":
    sys.exit(main())
