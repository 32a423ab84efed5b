"""What every script promises around its algorithm: command line, files, checkpoints, resuming, stopping, bad input."""

import csv
import importlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch
from conftest import NEXT_STEP, ROOT, SAME_STEP, FakeVecEnv, random_episodes

COMMON = "--num-envs 4 --num-steps 16 --minibatch-size 32 --eval-episodes 2 --quiet --device cpu --torch-threads 1"
KINDS = {  # what differs between the scripts; `tiny` are the flags of a real run of a second or two
    "ppo_procgen": dict(
        tiny=f"--env-id leaper --channels 4 4 4 {COMMON}",
        args=dict(channels=(4, 4, 4)),
        shape=(3, 16, 16),
        splits={"train": "eval/return_train", "test": "eval/return_test"},
        two_splits=("--num-levels", 3),
        film=(128, 128, 3),
        package="procgen",
        saves_games=True,
        other=("--num-levels", 4),
        bad=[
            ("--env-id bigfsh", ["--env-id", "bigfsh", "bigfish"]),
            ("--env-id bigfish --distribution-mode memory", ["--distribution-mode", "memory", "bigfish", "maze"]),
            ("--env-id bigfish --distribution-mode extreme", ["--distribution-mode", "extreme", "starpilot"]),
            ("--env-id plunder --distribution-mode exploration", ["--distribution-mode", "exploration", "coinrun"]),
            ("--distribution-mode exploration --num-levels 3", ["--num-levels", "exploration"]),
            ("--minibatch-size 65", ["--minibatch-size", "65", "64"]),
            ("--ent-coef 0:0.1 nan:0", ["--ent-coef", "nan:0"]),
            ("--channels 4 0 4", ["--channels", "0"]),
            ("--num-levels 9999999999", ["--num-levels", "9999999999"]),
            ("--norm-reward 1.5", ["--norm-reward", "1.5"]),
            ("--augment-prob 2", ["--augment-prob", "2"]),
        ],
        tyros=["--stack 7", "--pool max", "--augment shear", "--norm-adv never"],
    ),
    "ppo_atari_rnd": dict(
        tiny=f"--env-id Breakout --warmup-steps 8 --rnd-features 8 --max-episode-steps 30 {COMMON}",
        args=dict(warmup_steps=2, rnd_features=4),
        shape=(4, 44, 44),
        splits={"game": "eval/return"},
        two_splits=(),
        film=(168, 168, 3),
        package="envpool",
        saves_games=False,
        micro=256,
        other=("--gamma-int", 0.5),
        bad=[
            ("--env-id Montezuma", ["--env-id", "Montezuma", "MontezumaRevenge"]),
            ("--env-id bigfish", ["--env-id", "bigfish"]),
            ("--noop-max 0", ["--noop-max", "0", "from 1"]),
            ("--minibatch-size 65", ["--minibatch-size", "65", "64"]),
            ("--minibatch-size 24", ["--minibatch-size", "24", "whole environments", "16, 32, 64"]),
            ("--minibatch-size 48", ["--minibatch-size", "48", "whole environments", "16, 32, 64"]),
            ("--repeat-action-probability 1.1", ["--repeat-action-probability", "1.1"]),
            ("--max-episode-steps 3000000000", ["--max-episode-steps", "3000000000"]),
            ("--predictor-share 1.1", ["--predictor-share", "1.1"]),
            ("--warmup-steps 0", ["--warmup-steps", "0"]),
            ("--ent-coef inf", ["--ent-coef", "inf"]),
        ],
        tyros=["--frame-size 85", "--bonus-on both", "--int-norm max"],
    ),
    "ppo_atari_snd": dict(
        tiny=f"--env-id Breakout --warmup-steps 8 --snd-features 8 --max-episode-steps 30 --update-epochs 1 {COMMON}",
        args=dict(warmup_steps=2, snd_features=4),
        shape=(4, 44, 44),
        splits={"game": "eval/return"},
        two_splits=(),
        film=(192, 192, 3),
        package="envpool",
        saves_games=False,
        micro=256,
        other=("--gamma-int", 0.5),
        bad=[
            ("--env-id Montezuma", ["--env-id", "Montezuma", "MontezumaRevenge"]),
            ("--noop-max 0", ["--noop-max", "0", "from 1"]),
            ("--minibatch-size 65", ["--minibatch-size", "65", "64"]),
            ("--minibatch-size 24", ["--minibatch-size", "24", "divisor of 64"]),
            ("--minibatches envs --minibatch-size 8", ["--minibatch-size", "8", "whole environments", "16, 32, 64"]),
            ("--predictor-share 1.1", ["--predictor-share", "1.1"]),
            ("--snd-features 1", ["--snd-features", "1"]),
            ("--eta -1", ["--eta", "-1"]),
            ("--target-gain 0", ["--target-gain", "0"]),
            ("--warmup-steps 0", ["--warmup-steps", "0"]),
        ],
        tyros=["--target w", "--snd-net deep", "--motivation-passes two", "--snd-preprocess clip"],
    ),
    "appo_atari": dict(
        tiny=f"--env-id Breakout --num-groups 2 --num-minibatches 2 --sync --max-episode-steps 30 {COMMON}",
        args=dict(num_groups=1, num_minibatches=1, sync=True),
        larger=dict(num_minibatches=4),
        shape=(4, 44, 44),
        splits={"game": "eval/return"},
        two_splits=(),
        film=(168, 168, 3),
        package="envpool",
        saves_games=False,
        grouped=True,
        no_total=("--lr-schedule", "constant"),
        acts=32,  # calls of `sample` an iteration
        head_start=16,  # and before the first
        micro=256,
        other=("--vtrace",),
        huge="--num-minibatches 1 --num-groups 1",
        bad=[
            ("--env-id Brekout", ["--env-id", "Brekout", "Breakout"]),
            ("--noop-max 0", ["--noop-max", "0", "from 1"]),
            ("--minibatch-size 24", ["--minibatch-size", "24", "whole trajectories", "16"]),
            ("--num-minibatches 3 --num-groups 1", ["--num-minibatches", "96 rows", "whole rollouts", "64 rows"]),
            ("--num-groups 3", ["--num-groups", "3", "--num-envs 4"]),
            ("--num-groups 5", ["--num-groups", "5", "from 1 to 4"]),
            ("--lr-schedule kl --lr 0:1e-4 1e6:1e-5", ["--lr", "one number"]),
            ("--channels 4 0 4", ["--channels", "0"]),
        ],
        tyros=["--net mlp", "--lr-schedule cosine"],
    ),
    "impala_procgen": dict(
        tiny=f"--env-id leaper --num-groups 2 --channels 4 4 4 --sync {COMMON} --minibatch-size 64",
        args=dict(num_groups=1, sync=True, channels=(4, 4, 4)),
        larger=dict(minibatch_size=256),
        shape=(3, 16, 16),
        splits={"train": "eval/return_train", "test": "eval/return_test"},
        two_splits=("--num-levels", 3),
        film=(128, 128, 3),
        package="procgen",
        saves_games=True,
        grouped=True,
        acts=32,
        head_start=16,
        huge="--num-groups 1",
        other=("--num-levels", 4),
        bad=[
            ("--env-id bigfsh", ["--env-id", "bigfsh", "bigfish"]),
            ("--env-id bigfish --distribution-mode memory", ["--distribution-mode", "memory", "bigfish", "maze"]),
            ("--minibatch-size 48", ["--minibatch-size", "48", "whole rollouts", "32 rows"]),
            ("--num-groups 3", ["--num-groups", "3", "--num-envs 4"]),
            ("--num-groups 5", ["--num-groups", "5", "from 1 to 4"]),
            ("--replay-proportion 1", ["--replay-proportion", "1", "--replay-slots"]),
            ("--replay-proportion 1e15", ["--replay-proportion", "100"]),
            ("--vtrace-lambda 1.5", ["--vtrace-lambda", "1.5"]),
            ("--ent-coef 0:0.1 nan:0", ["--ent-coef", "nan:0"]),
        ],
        tyros=["--stack 7", "--optimizer sgd"],
    ),
}
SCRIPTS = list(KINDS)


class Saving(FakeVecEnv):
    """A fake env that can save its games, for scripts whose real one cannot."""

    def get_state(self):
        return {name: torch.from_numpy(getattr(self, name).copy()) for name in ("episode", "t", "over")}

    def set_state(self, state):
        for name, value in state.items():
            getattr(self, name)[:] = value.numpy()


@pytest.fixture(params=SCRIPTS)
def script(request, tmp_path, monkeypatch):
    """A script's module in an empty folder, with `run(...)`: main on the tiny settings plus these flags."""
    module, kind = importlib.import_module(request.param), KINDS[request.param]
    monkeypatch.chdir(tmp_path)

    def run(*flags, tiny=True):
        return module.main([*(kind["tiny"].split() if tiny else []), *map(str, flags)])

    def small(**changes):  # Args of a tiny run on the fake env
        args = dict(num_envs=4, num_steps=16, minibatch_size=64, eval_episodes=0, quiet=True, torch_threads=1)
        args |= dict(run_dir=str(tmp_path), device="cpu") | kind["args"] | changes
        return module.Args(**args)

    def fake(autoreset=NEXT_STEP, envs=FakeVecEnv, ends=("terminated", "truncated"), num_envs=4):
        return envs(random_episodes(num_envs, ends=ends), autoreset, shape=kind["shape"])

    def exact():  # from here on games go on where they were saved
        if not kind["saves_games"]:
            monkeypatch.setattr(module, "make_envs", lambda args, split, n: fake(NEXT_STEP, Saving, num_envs=n))

    def train(args, envs):
        return module.train(args, [envs] if kind.get("grouped") else envs)

    more = dict(larger={}, huge="", grouped=False, no_total=(), acts=16, head_start=0, micro=64) | kind
    return types.SimpleNamespace(
        train=train,
        name=request.param,
        module=module,
        run=run,
        small=small,
        fake=fake,
        exact=exact,
        steps=64,
        path=tmp_path,
        **more,
    )


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def timeless(folder):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(folder)]


def same(a, b):
    """Bit-equality of two checkpoints, nested."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def load(folder, name="checkpoint.pt"):
    return torch.load(folder / name, weights_only=True)


# ------------------------------------------------------------------------------------------------------ files of a run


def test_files_of_a_run(script, capfd):
    """Every file of the contract, and what is in it; nothing on stderr, gym's banner neither."""
    flags = ("--total-timesteps", 5 * script.steps + 7, "--eval-every", 2 * script.steps, *script.two_splits, "--video")
    assert script.run(*flags, "--run-name", "a", "--checkpoint-every", 0) == 0
    folder = script.path / "runs" / "a"
    assert not capfd.readouterr().err
    config = json.loads((folder / "config.json").read_text())
    assert config["script"] == script.name and config["args"]["num_envs"] == 4 and config["cores"] >= 1
    assert {"git", "cpu", "gpu", "versions"} <= config.keys() and config["versions"]["torch"]
    table = rows(folder)
    assert tuple(table[0]) == script.module.COLUMNS and [row["iteration"] for row in table] == list("12345")
    assert table[-1]["step"] == str(5 * script.steps)  # the total is floored to whole iterations
    for column in script.splits.values():
        assert [bool(row[column]) for row in table] == [False, True, False, True, False]
    assert "nan" not in (folder / "metrics.csv").read_text()
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    result = json.loads((folder / "eval.json").read_text())
    assert result["checkpoint"] == "checkpoint.pt" and result["step"] == 5 * script.steps
    assert list(result["splits"]) == list(script.splits)
    for split in result["splits"].values():
        assert len(split["returns"]) == len(split["lengths"]) == 2
        assert split["mean"] == pytest.approx(np.mean(split["returns"])) and split["stderr"] is not None
    assert load(folder)["step"] == 5 * script.steps
    for split in script.splits:
        import imageio.v3 as imageio

        film = imageio.imread(folder / "video" / f"{split}.mp4", plugin="pyav")
        shortest = min(result["splits"][split]["lengths"])
        assert len(film) >= shortest and film.shape[1:] == script.film
        assert film.std() > 0 and np.abs(np.diff(film.astype(int), axis=0)).max() > 20  # it moves


def test_tensorboard_has_the_same_numbers(script):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    script.run("--total-timesteps", 3 * script.steps, "--run-name", "a", "--eval-episodes", 0)
    events = EventAccumulator(str(script.path / "runs" / "a")).Reload()
    table = rows(script.path / "runs" / "a")
    for name in ("loss/value", "train/lr", "episode/count"):
        assert [event.step for event in events.Scalars(name)] == [int(row["step"]) for row in table]
        assert [event.value for event in events.Scalars(name)] == pytest.approx(
            [float(row[name]) for row in table], rel=1e-4
        )
    assert "args/text_summary" in events.Tags()["tensors"]


def test_best_checkpoint(script):
    """best.pt is the best mean of the last 100 games seen at an iteration start, from 20 games on."""
    module, returns = script.module, iter([[5.0] * 19, [5.0], [7.0] * 80, [-50.0] * 50])
    episodes, means = [], []

    run = module.Run.log

    def log(self, step, metrics):
        self.games = [(value, 1, np.nan, 0) for value in next(returns)]
        result = run(self, step, metrics)
        means.append(np.mean(self.recent))
        episodes.append(len(self.recent))
        return result

    module.Run.log = log
    try:
        script.train(script.small(run_name="b", total_timesteps=4 * 64), script.fake(SAME_STEP))
    finally:
        module.Run.log = run
    assert episodes == [19, 20, 100, 100]
    best = load(script.path / "b", "best.pt")
    assert best["step"] == 3 * 64 and best["best"] == means[2] and len(best["recent"]) == 100


def test_no_best_checkpoint_in_the_first_hundredth(script, monkeypatch):
    real = script.module.Run.log

    def log(run, step, metrics):
        run.games = [(5.0 * step, 1, np.nan, 0)] * 30
        if step > 5 * 64:
            raise KeyboardInterrupt
        return real(run, step, metrics)

    monkeypatch.setattr(script.module.Run, "log", log)
    for name, total, expected in (("long", 1000 * 64, False), ("short", 20 * 64, True)):
        with pytest.raises(KeyboardInterrupt):
            script.train(script.small(run_name=name, total_timesteps=total), script.fake(SAME_STEP))
        assert (script.path / name / "best.pt").exists() == expected


def test_metric_names_are_documented(script):
    """The README's vocabulary is the header of metrics.csv."""
    section = (ROOT / "README.md").read_text().split("## Metrics")[1].split("\n## ")[0]
    documented = set(re.findall(r"`((?:\w+/)?\w+)`", section.split("```")[0]))
    assert set(script.module.COLUMNS) <= documented


def test_progress_lines(script, capsys):
    """Off a terminal: one plain line an iteration, and what was chosen."""
    args = script.tiny.replace("--quiet", "").split()
    assert script.run(*args, "--total-timesteps", 3 * script.steps, "--eval-episodes", 0, tiny=False) == 0
    out = capsys.readouterr().out.splitlines()
    lines = [line for line in out if re.fullmatch(r"step [\d,]+  return \S+  [\d,]+ steps/s  \d+ min left", line)]
    assert (
        len(lines) == 3
        and "1 torch threads" in out[0]
        and "env threads" in out[0]
        and f"micro-batch {script.micro}," in out[0]
    )
    assert f"3 iterations x {script.steps} = {3 * script.steps} steps" in out[1]


def test_quiet_says_nothing_but_the_result(script, capfd):
    assert script.run("--total-timesteps", script.steps) == 0
    captured = capfd.readouterr()
    assert (
        len(captured.out.splitlines()) == 1
        and captured.out.startswith(f"{[*script.splits][-1]}: return")
        and not captured.err
    )


def test_threads(script):
    script.run("--total-timesteps", script.steps, "--eval-episodes", 0, "--torch-threads", 2)
    assert torch.get_num_threads() == 2
    script.run("--total-timesteps", script.steps, "--eval-episodes", 0, "--torch-threads", 0)
    assert torch.get_num_threads() == len(os.sched_getaffinity(0))


def test_track(script, capfd, monkeypatch):
    """Weights & Biases is imported only with --track, before TensorBoard's writer, and its errors are one line."""
    calls = []
    fake = types.SimpleNamespace(init=lambda **options: calls.append(options))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    script.run("--total-timesteps", 2 * script.steps, "--eval-episodes", 0)
    assert not calls
    assert script.run("--total-timesteps", 2 * script.steps, "--eval-episodes", 0, "--track", "--run-name", "w") == 0
    # wandb then copies what TensorBoard gets; test_tensorboard_has_the_same_numbers says what that is
    assert calls[0]["id"] == "w" and calls[0]["sync_tensorboard"] and calls[0]["resume"] == "allow" and len(calls) == 1

    def no_key(**options):
        raise RuntimeError("no API key")

    fake.init = no_key
    assert script.run("--total-timesteps", script.steps, "--track", "--run-name", "x") == 2
    error = capfd.readouterr().err
    assert (
        "--track" in error
        and "no API key" in error
        and error.count("\n") == 1
        and not (script.path / "runs" / "x").exists()
    )


def test_time_split_sums(script, monkeypatch):
    """The phases are the iteration, within 5 %; a warm-up and evaluations belong to none.

    A busy machine may take this process off its core between two clocks: one of the later iterations must agree.
    """
    wall, mark, run = [], [], script.module.Run
    log, goes_on = run.log, run.goes_on

    def timed_goes_on(*rest):
        result = goes_on(*rest)
        mark.append(time.perf_counter())
        return result

    monkeypatch.setattr(run, "goes_on", timed_goes_on)
    monkeypatch.setattr(run, "log", lambda *rest: wall.append(time.perf_counter() - mark[-1]) or log(*rest))
    envs = script.fake()
    script.train(script.small(run_name="t", num_steps=64, total_timesteps=5 * 256, **script.larger), envs)
    names = [name for name in script.module.COLUMNS if name.startswith("time/") and name.endswith("_s")]
    off = []
    for row, took in list(zip(rows(script.path / "t"), wall, strict=True))[1:]:
        parts = [float(row[name]) for name in names]
        assert min(parts) > 0
        off.append(max(abs(sum(parts) / took - 1), abs(float(row["time/sps"]) * took / 256 - 1)))
    assert min(off) < 0.05, off


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_reward_raises(script, bad):
    """The message names step and term, and the checkpoint before it stays."""
    args = script.small(run_name="n", total_timesteps=4 * 64, checkpoint_every=0)
    poisoned = getattr(args, "warmup_steps", 0) + 40

    class Poisoned(FakeVecEnv):
        def step(self, actions):
            obs, reward, *rest = super().step(actions)
            return obs, np.where(len(self.actions) == poisoned, bad, reward).astype(np.float32), *rest

    with pytest.raises(FloatingPointError, match="loss/.* after step 128"):
        script.train(args, script.fake(SAME_STEP, Poisoned))
    saved = load(script.path / "n")
    assert saved["step"] == 128 and all(torch.isfinite(weight).all() for weight in saved["agent"].values())


@pytest.mark.slow
def test_compile_matches_eager(script):
    """Same weights within float tolerance, and a compiled run's checkpoint loads without it."""
    weights = []
    for compiled in (False, True):
        args = script.small(run_name=str(compiled), compile=compiled, total_timesteps=3 * 64)
        envs = FakeVecEnv(random_episodes(4), SAME_STEP, num_actions=1, shape=script.shape)
        script.train(args, envs)
        weights.append(load(script.path / str(compiled))["agent"])
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-3, atol=1e-4)


def test_bf16_keeps_weights_and_losses(script):
    """Under autocast weights, optimiser and checkpoint stay float32, and losses close to float32's."""
    metrics = []
    for precision in ("fp32", "bf16"):
        args = script.small(run_name=precision, precision=precision, total_timesteps=64)
        envs = FakeVecEnv(random_episodes(4), SAME_STEP, num_actions=1, shape=script.shape)
        metrics.append(script.train(args, envs))
        kinds = {weight.dtype for weight in load(script.path / precision)["agent"].values()}
        assert kinds <= {torch.float32, torch.float64}  # 64: running statistics
    for name in ("loss/value", "train/grad_norm"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=0.1) and metrics[1][name] != metrics[0][name]


def test_evaluation_makes_one_training_env(script, monkeypatch):
    """--evaluate needs the shapes of the training environments, not the environments."""
    assert script.run("--total-timesteps", script.steps, "--run-name", "a", "--eval-episodes", 0) == 0
    made, make = [], script.module.make_envs
    monkeypatch.setattr(script.module, "make_envs", lambda *rest: made.append(rest[1:]) or make(*rest))
    assert script.run("--evaluate", "runs/a", "--eval-episodes", 2, tiny=False) == 0
    assert made[0][0].startswith("training") and made[0][1] == 1
    assert {split for split, _ in made[1:]} <= set(script.splits)


# --------------------------------------------------------------------------------------------- reproducing and resuming


def test_same_seed_same_csv(script):
    """Two runs of one seed are equal byte for byte outside the time columns; another seed differs."""
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        flags = ("--total-timesteps", 4 * script.steps, "--run-name", name, "--seed", seed, "--torch-threads", 2)
        assert script.run(*flags, "--eval-episodes", 0) == 0
    runs = script.path / "runs"
    assert timeless(runs / "a") == timeless(runs / "b") != timeless(runs / "c")
    assert same(load(runs / "a")["agent"], load(runs / "b")["agent"])


@pytest.mark.parametrize("evaluations", [0, 1])
def test_resume_equals_uninterrupted(script, evaluations):
    """2 + 3 iterations are 5, bit for bit: weights, optimiser, games, random states, metrics; evaluations or not."""
    runs, total = script.path / "runs", ("--total-timesteps", 5 * script.steps)
    rates = ("--lr", "0:1e-4", f"{5 * script.steps}:5e-3")
    flags = (*script.two_splits, *script.no_total, "--checkpoint-every", 0, *rates)
    script.exact()
    assert script.run(*flags, *total, "--run-name", "whole", "--eval-episodes", 0) == 0
    every = ("--eval-every", script.steps, "--eval-episodes", 1) if evaluations else ("--eval-episodes", 0)
    assert script.run(*flags, *every, "--total-timesteps", 2 * script.steps, "--run-name", "parts") == 0
    assert script.run("--resume", "runs/parts", *total, tiny=False) == 0
    whole, parts = load(runs / "whole"), load(runs / "parts")
    for checkpoint in (whole, parts):
        del checkpoint["args"]
    assert same(whole, parts)
    without = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in timeless(runs / "parts")]
    assert without == [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in timeless(runs / "whole")]
    config = json.loads((runs / "parts" / "config.json").read_text())
    assert config["args"]["total_timesteps"] == 5 * script.steps


class Stop(FakeVecEnv):
    """Raises `error` at the given step call."""

    at, error = None, KeyboardInterrupt

    def step(self, actions):
        if len(self.actions) == self.at:
            raise self.error
        return super().step(actions)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit(143)])
def test_interrupt_drops_only_the_unfinished_iteration(script, error):
    """Stopped in mid-rollout, the state at that iteration's start is on disk, whatever --checkpoint-every says."""
    args, envs = script.small(run_name="i", total_timesteps=6 * 64), script.fake(envs=Stop)
    envs.at, envs.error = getattr(args, "warmup_steps", 0) + 3 * 16 + 5, error
    with pytest.raises(type(error) if isinstance(error, BaseException) else error):
        script.train(args, envs)
    assert load(script.path / "i")["step"] == 3 * 64 and len(rows(script.path / "i")) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_signal_inside_tensorboards_queue(script, monkeypatch, error):
    """It raises between two lines of Condition.notify: the next notify wakes nobody, TensorBoard's thread sleeps on."""
    tensorboard, raised = script.module.SummaryWriter, []

    class Interrupted(tensorboard):
        def add_scalar(self, name, value, step):
            super().add_scalar(name, value, step)
            if step == 2 * script.steps:
                queue = self._get_file_writer().event_writer._async_writer._byte_queue
                queue.join()
                while True:
                    with queue.not_empty:
                        if queue.not_empty._waiters:
                            queue.not_empty._waiters[0].release()  # and not removed from the list
                            raise error

    def train():
        try:
            script.train(script.small(total_timesteps=3 * script.steps), script.fake())
        except BaseException as stop:
            raised.append(type(stop))

    monkeypatch.setattr(script.module, "SummaryWriter", Interrupted)
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(120)
    assert raised == [error]


def test_ctrl_c_real_env_then_resume(script, monkeypatch):
    """Ctrl-C in mid-run returns 130; resumed, the run ends exactly like one that was never stopped."""
    total = ("--total-timesteps", 4 * script.steps, "--eval-episodes", 0, "--checkpoint-every", 10**6)
    script.exact()
    assert script.run(*total, "--run-name", "whole") == 0
    calls, real = [], script.module.sample

    def sample(*args):
        calls.append(0)
        if len(calls) == script.head_start + 5 * script.acts // 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(script.module, "sample", sample)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background is started without it
    assert script.run(*total, "--run-name", "parts") == 130
    monkeypatch.setattr(script.module, "sample", real)
    assert load(script.path / "runs/parts")["step"] == 2 * script.steps
    assert script.run("--resume", "runs/parts", tiny=False) == 0
    whole, parts = (load(script.path / "runs" / name) for name in ("whole", "parts"))
    assert same(whole | {"args": 0}, parts | {"args": 0})
    assert timeless(script.path / "runs/whole") == timeless(script.path / "runs/parts")


def test_resume_cuts_what_the_checkpoint_does_not_know(script):
    """Rows after the checkpoint, half a row included, go; TensorBoard is told with a purge."""
    folder = script.path / "runs" / "a"
    script.run("--total-timesteps", 2 * script.steps, "--run-name", "a", "--eval-episodes", 0)
    with open(folder / "metrics.csv", "a") as file:
        file.write(
            rows(folder)[-1]["step"].replace(str(2 * script.steps), str(3 * script.steps))
            + ",3"
            + "," * (len(script.module.COLUMNS) - 2)
            + "\n999,4,0"
        )
    (folder / "checkpoint.pt.tmp").write_bytes(b"half a checkpoint")
    time.sleep(1.1)  # event files are read in the order of their names: by second, then by a number without padding
    assert script.run("--resume", "runs/a", "--total-timesteps", 4 * script.steps, tiny=False) == 0
    assert [row["iteration"] for row in rows(folder)] == ["1", "2", "3", "4"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("loss/value")] == [script.steps * i for i in (1, 2, 3, 4)]


def test_resume_purges_tensorboard(script):
    """Events beyond the checkpoint are purged: after a kill and a resume every step is there once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = script.path / "runs" / "a"
    script.run("--total-timesteps", 2 * script.steps, "--run-name", "a", "--eval-episodes", 0)
    old = (folder / "checkpoint.pt").read_bytes()
    script.run("--resume", "runs/a", "--total-timesteps", 4 * script.steps, tiny=False)
    (folder / "checkpoint.pt").write_bytes(old)  # as if the last checkpoint had not been written
    time.sleep(1.1)  # event files are ordered by the second in their names
    script.run("--resume", "runs/a", "--total-timesteps", 3 * script.steps, tiny=False)
    assert [event.step for event in EventAccumulator(str(folder)).Reload().Scalars("loss/value")] == [
        script.steps * i for i in (1, 2, 3)
    ]


def test_lost_metrics_do_not_stop_a_resume(script):
    folder = script.path / "runs" / "a"
    script.run("--total-timesteps", 2 * script.steps, "--run-name", "a", "--eval-episodes", 0)
    (folder / "metrics.csv").unlink()
    assert script.run("--resume", "runs/a", "--total-timesteps", 3 * script.steps, tiny=False) == 0
    assert [row["iteration"] for row in rows(folder)] == ["3"]


def test_resume_keeps_columns_by_name(script):
    """A metrics.csv whose columns stood in another order is not shifted."""
    folder = script.path / "runs" / "a"
    script.run("--total-timesteps", 2 * script.steps, "--run-name", "a", "--eval-episodes", 0)
    before = rows(folder)
    names = [*list(before[0])[::-1]]
    lines = [",".join(names), *(",".join(row[name] for name in names) for row in before)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    assert script.run("--resume", "runs/a", "--total-timesteps", 3 * script.steps, tiny=False) == 0
    assert rows(folder)[:2] == before and len(rows(folder)) == 3 and tuple(before[0]) == script.module.COLUMNS


def test_resume_with_given_envs(script):
    """A next-step env that can save its state goes on inside an episode's end; the command line refuses such a run."""

    def train(iterations, name, **more):
        constant = dict(lr_schedule="constant") if script.no_total else {}
        args = script.small(run_name=name, total_timesteps=iterations * 64, **constant, **more)
        script.train(args, script.fake(NEXT_STEP, Saving, ("terminated", "life")))

    train(5, "whole")
    train(2, "parts")
    saved = load(script.path / "parts")
    saved = saved["groups"][0] if script.grouped else saved
    assert saved["over"].any()  # the stop is where an end still has its dummy row to come
    train(5, "parts", resume=str(script.path / "parts"))
    whole, parts = (load(script.path / name) for name in ("whole", "parts"))
    assert same(whole | {"args": 0}, parts | {"args": 0})
    assert script.run("--resume", "parts", "--total-timesteps", 600, tiny=False) == 2


def test_resume_of_a_finished_run(script, capsys):
    script.run("--total-timesteps", 2 * script.steps, "--run-name", "a", "--eval-episodes", 0)
    before = {file.name: file.read_bytes() for file in (script.path / "runs/a").iterdir()}
    assert script.run("--resume", "runs/a", tiny=False) == 0
    assert "finished" in capsys.readouterr().out
    assert script.run("--resume", "runs/a", "--gamma", 0.5, tiny=False) == 2
    assert script.run("--resume", "runs/a", "--evaluate", "runs/a", "--eval-episodes", 1, tiny=False) == 2
    assert before == {file.name: file.read_bytes() for file in (script.path / "runs/a").iterdir()}


def test_resume_takes_and_refuses_arguments(script, capsys):
    script.run("--total-timesteps", 2 * script.steps, "--run-name", "a", "--eval-episodes", 0, "--gamma", 0.9)
    capsys.readouterr()
    assert script.run("--resume", "runs/a", "--gamma", 0.95, "--total-timesteps", 3 * script.steps, tiny=False) == 2
    error = capsys.readouterr().err
    assert "--gamma" in error and "0.95" in error and "0.9;" in error and error.count("\n") == 1
    fresh = ("--total-timesteps", 3 * script.steps, "--max-minutes", 5, "--micro-batch", 8, "--checkpoint-every", 1)
    assert script.run("--resume", "runs/a", "--gamma", 0.9, *fresh, tiny=False) == 0
    saved = load(script.path / "runs/a")
    assert saved["args"]["gamma"] == 0.9 and saved["args"]["micro_batch"] == 8 and saved["step"] == 3 * script.steps


def test_resume_from_best(script):
    """A file can be resumed too: the way out when checkpoint.pt is lost."""
    folder = script.path / "runs" / "a"
    script.run("--total-timesteps", 2 * script.steps, "--run-name", "a", "--eval-episodes", 0)
    os.rename(folder / "checkpoint.pt", folder / "best.pt")
    assert script.run("--resume", "runs/a/best.pt", "--total-timesteps", 3 * script.steps, tiny=False) == 0
    assert load(folder)["step"] == 3 * script.steps
    shutil.copy(folder / "checkpoint.pt", folder / "best.pt")  # an older state must not overwrite a newer one
    assert script.run("--resume", "runs/a/best.pt", "--total-timesteps", 4 * script.steps, tiny=False) == 2
    assert load(folder)["step"] == 3 * script.steps


def test_interrupted_final_evaluation_is_made_up_for(script, monkeypatch):
    monkeypatch.setattr(script.module, "evaluate", lambda *rest: (_ for _ in ()).throw(KeyboardInterrupt))
    assert script.run("--total-timesteps", 2 * script.steps, "--run-name", "a") == 130
    monkeypatch.undo()
    os.chdir(script.path)
    assert not (script.path / "runs/a/eval.json").exists()
    assert script.run("--resume", "runs/a", tiny=False) == 0
    assert json.loads((script.path / "runs/a/eval.json").read_text())["step"] == 2 * script.steps
    assert len(rows(script.path / "runs/a")) == 2


def test_an_evaluation_of_an_older_checkpoint_is_not_the_last_one(script, capsys):
    """A finished run beside an eval.json of another step is evaluated; once that is done, it is left alone."""
    script.run("--total-timesteps", 2 * script.steps, "--run-name", "a")
    file = script.path / "runs/a/eval.json"
    whole = file.read_text()
    file.write_text(whole.replace(f'"step": {2 * script.steps},', f'"step": {script.steps},'))
    assert file.read_text() != whole and script.run("--resume", "runs/a", tiny=False) == 0
    assert file.read_text() == whole and "is finished" not in capsys.readouterr().out
    assert script.run("--resume", "runs/a", tiny=False) == 0 and "is finished" in capsys.readouterr().out


def test_max_minutes_counts_the_next_iteration(script, monkeypatch):
    """With iterations of 1 s and a limit of 2.7 s the third iteration would pass it: two are done."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Slow(FakeVecEnv):
        def step(self, actions):
            clock[0] += 1 / 16
            return super().step(actions)

    script.train(script.small(run_name="m", max_minutes=2.7 / 60), script.fake(envs=Slow))
    assert load(script.path / "m")["step"] == 2 * 64


def test_max_minutes(script):
    """Stops by itself after at least one iteration, exit code 0, and goes on when resumed."""
    limit = ("--total-timesteps", 10**6, "--max-minutes", 0.02, "--checkpoint-every", 10**6)
    start = time.perf_counter()
    assert script.run(*limit, "--run-name", "a") == 0
    assert time.perf_counter() - start < 20
    done = load(script.path / "runs/a")["step"]
    assert done >= script.steps and done == int(rows(script.path / "runs/a")[-1]["step"])
    assert not (script.path / "runs/a/eval.json").exists()
    assert script.run("--resume", "runs/a", "--max-minutes", 0.001, tiny=False) == 0
    assert load(script.path / "runs/a")["step"] == done + script.steps


def test_checkpoints_come_when_due(script, monkeypatch):
    """The first before the first rollout; 0 = every iteration; else only start and end."""
    written = []
    real = script.module.Run.write
    monkeypatch.setattr(
        script.module.Run, "write", lambda run, name: written.append((name, run.state["step"])) or real(run, name)
    )
    script.run("--total-timesteps", 3 * script.steps, "--eval-episodes", 0, "--checkpoint-every", 0, "--run-name", "a")
    assert [step for name, step in written if name == "checkpoint.pt"] == [script.steps * i for i in range(4)]
    written.clear()
    script.run("--total-timesteps", 3 * script.steps, "--eval-episodes", 0, "--run-name", "b")
    assert [step for name, step in written if name == "checkpoint.pt"] == [0, 3 * script.steps]


# ---------------------------------------------------------------------------------------------------------- evaluation


def test_resume_latest(script, capsys):
    """The run of this script whose checkpoint is newest, whatever its name; without any, one line that says so."""
    assert script.run("--resume", "latest", tiny=False) == 2 and "runs" in capsys.readouterr().err
    for i, name in enumerate("cab"):
        total = script.steps * (1 if script.no_total == () else 2)
        assert script.run("--run-name", name, "--total-timesteps", total, "--eval-episodes", 0, *script.no_total) == 0
        os.utime(script.path / "runs" / name / "checkpoint.pt", (1000 * i, 1000 * i))
    other = script.path / "runs" / "z"  # newer, but of another script
    other.mkdir()
    (other / "checkpoint.pt").write_bytes(b"")
    (other / "config.json").write_text('{"script": "other"}')
    os.utime(script.path / "runs" / "a" / "checkpoint.pt", (9000, 9000))
    flags = ["--resume", "latest", "--total-timesteps", 3 * script.steps]
    assert script.run(*flags, tiny=False) == 0
    lengths = {name: len(rows(script.path / "runs" / name)) for name in "abc"}
    assert lengths["a"] == 3 and lengths["b"] == lengths["c"] < 3


def test_keep_checkpoints(script):
    """The newest K stay under their step, each one a checkpoint to resume from; K may change on the way."""
    flags = ["--run-name", "x", "--checkpoint-every", 0, "--keep-checkpoints", 2, "--eval-episodes", 0]
    assert script.run(*flags, "--total-timesteps", 4 * script.steps, *script.no_total) == 0
    folder = script.path / "runs" / "x"
    kept = sorted(path.name for path in folder.glob("step_*.pt"))
    assert kept == sorted(f"step_{n * script.steps}.pt" for n in (3, 4))
    for path in folder.glob("step_*.pt"):
        assert f"step_{torch.load(path, weights_only=True)['step']}.pt" == path.name
    (folder / "checkpoint.pt").unlink()
    (folder / "step_mine.pt").write_bytes(b"")
    flags = ["--resume", folder / f"step_{3 * script.steps}.pt", "--keep-checkpoints", 1]
    os.utime(folder / f"step_{4 * script.steps}.pt", (0, 0))
    torch.save(torch.load(folder / f"step_{4 * script.steps}.pt"), folder / f"step_{9 * script.steps}.pt")  # abandoned
    os.utime(folder / f"step_{9 * script.steps}.pt", (0, 0))
    assert script.run(*flags, tiny=False) == 0
    assert {path.name for path in folder.glob("step_*")} == {
        f"step_{4 * script.steps}.pt",
        "step_mine.pt",
    }  # the newest
    assert [row["step"] for row in rows(folder)] == [str(n * script.steps) for n in (1, 2, 3, 4)]


def test_evaluate_command(script):
    """--evaluate writes eval.json beside the checkpoint, the same every time, and touches nothing else."""
    flags = ("--total-timesteps", 2 * script.steps, "--run-name", "a", *script.two_splits)
    assert script.run(*flags) == 0
    folder = script.path / "runs/a"
    first = json.loads((folder / "eval.json").read_text())
    with open(folder / "eval.csv", newline="") as file:  # the same games, a row each
        table = [(row["split"], float(row["return"]), int(row["length"])) for row in csv.DictReader(file)]
    games = [
        (name, pytest.approx(game), length)
        for name, split in first["splits"].items()
        for game, length in zip(split["returns"], split["lengths"], strict=True)
    ]
    assert table == games
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "eval.json"}
    (folder / "eval.json").unlink()
    assert script.run("--evaluate", "runs/a", tiny=False) == 0
    assert json.loads((folder / "eval.json").read_text()) == first
    assert before == {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "eval.json"}
    shutil.copy(folder / "checkpoint.pt", script.path / "lone.pt")
    assert script.run("--evaluate", "lone.pt", "--eval-episodes", 3, "--greedy", tiny=False) == 0
    lone = json.loads((script.path / "eval.json").read_text())
    assert lone["checkpoint"] == "lone.pt" and len(lone["splits"][[*script.splits][-1]]["returns"]) == 3
    assert script.run("--evaluate", "runs/a", *script.other, tiny=False) == 2


# ----------------------------------------------------------------------------------------------------------- bad input


BAD = [  # flags, and what the one line must hold
    ("--minibatch-size 1", ["--minibatch-size", "1", "2"]),
    ("--total-timesteps 63", ["--total-timesteps", "63", "64"]),
    ("--num-envs 0", ["--num-envs", "0"]),
    ("--num-envs -3", ["--num-envs", "-3"]),
    ("--num-steps 0", ["--num-steps", "0"]),
    ("--update-epochs 0", ["--update-epochs", "0"]),
    ("--micro-batch -1", ["--micro-batch", "-1"]),
    ("--gamma 1.5", ["--gamma", "1.5", "1"]),
    ("--gamma nan", ["--gamma", "nan"]),
    ("--seed -1", ["--seed", "-1"]),
    ("--lr 0:1e-4:3 --quiet", ["--lr", "0:1e-4:3"]),
    ("--lr 5:1e-4 1:1e-4", ["--lr", "5:1e-4"]),
    ("--device cuda", ["--device", "cuda"]),
    ("--device cuda:9", ["--device", "cuda:9"]),
    ("--device toaster", ["--device", "toaster"]),
    ("--resume nowhere", ["nowhere"]),
    ("--evaluate nowhere", ["nowhere"]),
    ("--eval-every 100 --eval-episodes 0", ["--eval-episodes 0", "from 1"]),
    ("--max-minutes -1", ["--max-minutes", "-1"]),
    ("--device meta", ["--device", "meta"]),
    ("--env-threads 100000", ["--env-threads", "100000"]),
    ("--lr 0:1e-4 nan:1e-4", ["--lr", "nan:1e-4"]),
    ("--num-steps 1000000000 --minibatch-size 4000000000 --total-timesteps 4000000000", ["memory"]),
]


def test_bad_input(script, capfd):
    for flags, words in BAD + script.bad:
        flags += f" {script.huge}" if words == ["memory"] else ""
        if "cuda" in flags and torch.cuda.is_available():
            flags = flags.replace("cuda:9", "cuda:99").replace("--device cuda", "--device cuda:99")
        assert script.run(*flags.split()) == (1 if words == ["memory"] else 2), flags
        error = capfd.readouterr().err
        assert error.count("\n") == 1 and all(word in error for word in words), error
        if words == ["memory"]:
            shutil.rmtree(script.path / "runs", ignore_errors=True)
        assert not (script.path / "runs").exists()  # nothing is written


def test_bad_flags_are_tyros_own(script, capfd):
    for flags in ("--num-envs many", "--no-such-flag", "--precision fp8", *script.tyros):
        assert script.run(*flags.split()) == 2
        assert flags.split()[0] in capfd.readouterr().err and not (script.path / "runs").exists()


def test_help(script, capsys):
    """--help shows one line a flag with its comment."""
    assert script.run("--help") == 0
    text = capsys.readouterr().out
    for field in script.module.Args.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in text
    assert "weight of the entropy bonus" in text and "step:rate knots" in text.replace("\n", " ")


def test_missing_package(script, capfd, monkeypatch):
    for package in (script.package, "wandb"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            assert script.run("--total-timesteps", script.steps, "--track") == 2
        error = capfd.readouterr().err
        assert package in error and error.count("\n") == 1 and "pip install" in error
        assert not (script.path / "runs").exists()


def test_existing_folder(script, capfd):
    folder = script.path / "runs" / "a"
    folder.mkdir(parents=True)
    assert script.run("--total-timesteps", script.steps, "--run-name", "a", "--eval-episodes", 0) == 0  # empty: welcome
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert script.run("--total-timesteps", script.steps, "--run-name", "a") == 2
    error = capfd.readouterr().err
    assert "--run-name" in error and "runs/a" in error and "--resume" in error and error.count("\n") == 1
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}


def test_unwritable_folder(script, capfd):
    (script.path / "file").write_text("")
    assert script.run("--total-timesteps", script.steps, "--run-dir", "file") == 2
    assert script.run("--total-timesteps", script.steps, "--run-dir", "/proc/nowhere") == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 and all("--run-dir" in line for line in lines)


def corrupt(folder, kind, module):
    path = folder / "checkpoint.pt"
    data = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "flipped":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :])
    elif kind == "hostile":

        class Bomb:
            def __reduce__(self):
                return os.mkdir, (str(folder / "harm"),)

        torch.save({"script": module.SCRIPT, "args": Bomb()}, path)
    elif kind == "other script":
        torch.save(load(folder) | {"script": "no_script"}, path)
    elif kind == "other version":
        saved = load(folder)
        saved["args"]["new_flag"] = 1
        torch.save(saved, path)
    elif kind == "weights missing":
        torch.save({key: value for key, value in load(folder).items() if key != "agent"}, path)
    elif kind == "not a dict":
        torch.save([1, 2], path)
    return path.read_bytes()


@pytest.mark.parametrize(
    "kind",
    ["truncated", "empty", "flipped", "hostile", "other script", "other version", "weights missing", "not a dict"],
)
def test_bad_checkpoint(script, capfd, kind):
    """One line, exit code 2, nothing changed, and a hostile file runs no code."""
    folder = script.path / "runs" / "a"
    script.run("--total-timesteps", script.steps, "--run-name", "a", "--eval-episodes", 0)
    data = corrupt(folder, kind, script.module)
    metrics = (folder / "metrics.csv").read_bytes()
    for flag in ("--resume", "--evaluate"):
        assert script.run(flag, "runs/a", "--total-timesteps", 2 * script.steps, "--eval-episodes", 1, tiny=False) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1 and "runs/a" in error, error
    assert (folder / "checkpoint.pt").read_bytes() == data and (folder / "metrics.csv").read_bytes() == metrics
    assert not (folder / "harm").exists()


def test_damaged_env_states(script, capfd):
    if not script.saves_games:
        return script.exact()  # nothing of the games is in its checkpoint
    folder = script.path / "runs" / "a"
    script.run("--total-timesteps", script.steps, "--run-name", "a", "--eval-episodes", 0)
    saved = load(folder)
    (saved["groups"][0] if script.grouped else saved)["envs"]["games"][0] = b"damaged"
    torch.save(saved, folder / "checkpoint.pt")
    assert script.run("--resume", "runs/a", "--total-timesteps", 2 * script.steps, tiny=False) == 2
    error = capfd.readouterr().err
    assert "damaged" in error and error.count("\n") == 1


def limit_file_size(size):
    """Writing beyond `size` bytes fails like a full disk does: an OSError in mid-write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_disk_full_in_mid_run(script, capfd, monkeypatch):
    """Exit code 1, one line, the last good checkpoint untouched; later the run goes on."""
    real = script.module.Run.log

    def log(run, step, metrics):
        result = real(run, step, metrics)
        if step == 2 * script.steps:
            limit_file_size(5000)
        return result

    monkeypatch.setattr(script.module.Run, "log", log)
    try:
        total = ("--total-timesteps", 4 * script.steps, "--eval-episodes", 0, "--checkpoint-every", 0)
        assert script.run(*total, "--run-name", "a") == 1
    finally:
        limit_file_size(resource.RLIM_INFINITY)
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "File too large" in error, error
    folder = script.path / "runs" / "a"
    assert load(folder)["step"] == script.steps
    monkeypatch.undo()
    os.chdir(script.path)
    assert script.run("--resume", "runs/a", tiny=False) == 0
    assert len(rows(folder)) == 4


def test_disk_full_at_start(script, capfd):
    limit_file_size(600)
    try:
        assert script.run("--total-timesteps", script.steps) == 2
    finally:
        limit_file_size(resource.RLIM_INFINITY)
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "--run-dir" in error, error


def test_kill_in_mid_write_keeps_the_old_file(script, monkeypatch):
    """Whatever stops the write, the checkpoint of that name is the old one, whole."""
    path = script.path / "checkpoint.pt"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        script.module.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    script.module.write_atomically(path, b"new")
    assert path.read_bytes() == b"new" and len(list(script.path.iterdir())) == 1


@pytest.mark.slow
def test_kill_9_at_random_moments(script):
    """Killed 20 times and resumed each time, a run ends as one left alone, and its checkpoint is always whole."""
    iterations, rng = 150, np.random.default_rng(0)
    flags = ("--checkpoint-every", 0, "--total-timesteps", iterations * script.steps, "--eval-episodes", 0)
    script.exact()
    assert script.run(*flags, "--run-name", "whole") == 0
    killed, reached, kills = script.path / "runs" / "killed", [], 0
    while kills < 20:
        begun = (killed / "checkpoint.pt").exists()
        argv = ("--resume", killed) if begun else (*flags, "--run-name", "killed")
        child = multiprocessing.get_context("fork").Process(target=script.run, args=argv, kwargs=dict(tiny=not begun))
        child.start()
        while begun and len(rows(killed)) <= reached[-1] and child.is_alive():  # it has come to the point of its death
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.3))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL  # it was alive until then
        kills += 1
        if not (killed / "checkpoint.pt").exists():  # before the first one: there is nothing to lose
            shutil.rmtree(killed, ignore_errors=True)
            assert not reached
            continue
        saved = load(killed)
        reached.append(saved["step"] // script.steps)
        table = (killed / "metrics.csv").read_text().splitlines()
        assert len(table) - 1 >= reached[-1] and (len(reached) < 2 or reached[-1] >= reached[-2])  # nothing lost
    assert 5 <= reached[-1] < iterations and len(set(reached)) >= 5  # it died at many places
    assert script.run("--resume", killed, tiny=False) == 0
    assert timeless(killed) == timeless(script.path / "runs" / "whole")
    ends = [load(script.path / "runs" / name) for name in ("whole", "killed")]
    assert same(*({key: end[key] for key in end if key != "args"} for end in ends))


def test_given_envs_are_checked(script):
    args = script.small(num_envs=3, minibatch_size=48, total_timesteps=48)
    with pytest.raises(ValueError, match="--num-envs 3"):
        script.train(args, script.fake())
    undeclared = script.fake(num_envs=3)
    undeclared.metadata = {}
    with pytest.raises(ValueError, match="autoreset"):
        script.train(args, undeclared)


# -------------------------------------------------------------------------------------------------- a real command line


@pytest.mark.parametrize("name", SCRIPTS)
def test_command_line_alone_in_an_empty_folder(name, tmp_path):
    """The file copied to an empty folder: runs, stops on SIGTERM with 143 and a checkpoint, resumes, ends with 0."""
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    command = [sys.executable, f"{name}.py", *KINDS[name]["tiny"].replace("--quiet", "").split(), "--run-name", "a"]
    process = subprocess.Popen(
        [*command, "--total-timesteps", "1000000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
    )
    lines = (line for line in process.stdout if line.startswith("step "))
    next(lines), next(lines)
    start = time.perf_counter()
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143 and time.perf_counter() - start < 10
    assert "stopped" in err and "Traceback" not in err and "Gym" not in err
    step = load(tmp_path / "runs/a")["step"]
    assert step >= 64
    total = str(step + 2 * 64)
    done = subprocess.run(
        [sys.executable, f"{name}.py", "--resume", "runs/a", "--total-timesteps", total],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert json.loads((tmp_path / "runs/a/eval.json").read_text())["step"] == int(total)
