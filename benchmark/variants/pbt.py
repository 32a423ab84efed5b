"""Population-based training of any of the five scripts, by Ray Tune's own scheduler.

    python benchmark/variants/pbt.py appo_atari runs/pbt --population 4 --slices 20 \\
        --slice-steps 500000 -- --env-id Pong --minibatch-size 256 --update-epochs 2

Jaderberg et al. 2017, arXiv:1711.09846. A trial trains a slice of steps with a constant learning
rate and entropy weight of its own (no --anneal-lr). Then all wait, and the worst quarter (of two,
the worse) goes on with copies of the best quarter's runs, their two numbers times 0.8 or 1.2 or,
one time in four, drawn anew. The score is the mean return of the games that ended in the slice.
The trials are runs like any other; tune/ has Ray's log of who copied whom. On a cluster all nodes
have this repository and the folder at the same paths. Sample Factory's own population differs: 30 %
are replaced, a number changes with probability 0.15, by a factor of 1.1 to 1.5, others do too.
"""

import csv
import importlib
import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import ray
import tyro
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
SCRIPTS = ("appo_atari", "impala_procgen", "ppo_atari_rnd", "ppo_atari_snd", "ppo_procgen")


@dataclass
class Options:
    script: tyro.conf.Positional[Literal[*SCRIPTS]]  # its own flags come last, after --
    folder: tyro.conf.Positional[str]  # a new one for the trials
    population: int = 4  # trials; 2 for Sample Factory's two policies
    slices: int = 20  # of each trial
    slice_steps: int = 500_000  # agent steps of a slice
    lr: tuple[float, float] = (5e-5, 1e-3)  # learning rates are drawn from here
    ent_coef: tuple[float, float] = (1e-4, 3e-2)  # entropy weights are drawn from here
    cpus: int = 1  # cores of a trial
    gpus: float = 0  # GPU share of a trial; with 0 Ray hides the GPUs
    address: str = ""  # of a Ray cluster; "" = this machine alone


class Trial(tune.Trainable):
    """A run folder that grows by a slice a step(); to load a better trial's is the exploitation."""

    def setup(self, config, options, args):
        number = int(self.trial_id.split("_")[-1])
        self.script = importlib.import_module(options.script)
        self.slice_steps = options.slice_steps
        self.run = Path(args.run_dir, f"trial_{number}")
        # A seed of its own: or the copy of a run would play the same games as that run.
        self.args = replace(args, run_name=self.run.name, seed=args.seed + number)

    def step(self):
        start = self.iteration * self.slice_steps
        args = replace(self.args, total_timesteps=start + self.slice_steps)
        args.resume = str(self.run) if start else ""
        args.lr = (self.config["lr"],)
        args.ent_coef = (self.config["ent_coef"],)
        step = self.script.train(args)["step"]
        return {"step": step, "score": mean_return(self.run, start)}

    def save_checkpoint(self, folder):
        shutil.copytree(self.run, folder, dirs_exist_ok=True)

    def load_checkpoint(self, folder):
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(folder, self.run, ignore=shutil.ignore_patterns(".*"))  # Ray's own


def mean_return(run: Path, start: int) -> float:
    """Of the games that ended after step `start`; -inf, the worst, where none did."""
    rows = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    rows = [row for row in rows if int(row["step"]) > start and int(row["episode/count"])]
    counts = [int(row["episode/count"]) for row in rows]
    returns = [float(row["episode/return"]) for row in rows]
    return float(np.average(returns, weights=counts)) if rows else -np.inf


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    options = tyro.cli(Options, args=argv[:split], description=__doc__)
    folder = Path(options.folder).absolute()
    script = importlib.import_module(options.script)
    args = tyro.cli(script.Args, args=argv[split + 1 :])
    args = replace(args, run_dir=str(folder), eval_episodes=0, eval_every=0, quiet=True)
    args.torch_threads = args.torch_threads or options.cpus
    args.env_threads = args.env_threads or options.cpus
    if hasattr(args, "anneal_lr"):
        args.anneal_lr = False  # it would begin anew in each slice
    try:
        numbers = {"lr": tune.loguniform(*options.lr)}
        numbers["ent_coef"] = tune.loguniform(*options.ent_coef)
        script.check(replace(args, total_timesteps=options.slice_steps))
        folder.mkdir(parents=True)
    except (ValueError, OSError) as error:  # UsageError and Ray's own are ValueErrors
        print("pbt.py:", error, file=sys.stderr)
        return 2
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray tells its makers of each start
    ray.init(options.address or "local", log_to_driver=False)
    np.random.seed(args.seed)  # of the first numbers; what Ray draws later is not reproducible
    # synch: compared at equal steps, after each slice
    when = {"time_attr": "training_iteration", "perturbation_interval": 1, "synch": True}
    pbt = PopulationBasedTraining(metric="score", mode="max", hyperparam_mutations=numbers, **when)
    trial = tune.with_parameters(Trial, options=options, args=args)
    trial = tune.with_resources(trial, {"cpu": options.cpus, "gpu": options.gpus})
    plan = tune.TuneConfig(scheduler=pbt, num_samples=options.population)
    stop = {"training_iteration": options.slices}
    keep = tune.CheckpointConfig(num_to_keep=3)
    fail = tune.FailureConfig(fail_fast=True)  # else the others wait for a failed trial for ever
    run = tune.RunConfig(
        "tune", str(folder), stop=stop, checkpoint_config=keep, failure_config=fail
    )
    results = tune.Tuner(trial, param_space=numbers, tune_config=plan, run_config=run).fit()
    slices = [(result.metrics or {}).get("training_iteration") for result in results]
    return int(slices != [options.slices] * options.population)  # 1 after a failure or Ctrl-C


if __name__ == "__main__":
    sys.exit(main())
