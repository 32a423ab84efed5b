"""What every script promises around its algorithm: command line, files, checkpoints, resuming, stopping, bad input.

The plumbing is one text in all five files (test_repo.py compares), so what is in it is tested with one of them.
"""

import contextlib
import importlib
import json
import math
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
import types
import typing
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import NEXT_STEP, ROOT, SAME_STEP, FakeVecEnv, equal, giving, random_episodes, rows, spy_on, timeless

COMMON = "--num-envs 4 --num-steps 16 --minibatch-size 32 --eval-episodes 2 --device cpu --threads 1"
PROCGEN = f"{COMMON} --env-id leaper --channels 4 4 4"
ATARI = f"{COMMON} --env-id Breakout --max-episode-steps 30"
KINDS = {  # the flags of a real run of a second or two
    "ppo_procgen": f"{PROCGEN} --norm-reward 0.99",
    "impala_procgen": f"{PROCGEN} --num-groups 2 --sync --minibatch-size 64",
    "ppo_atari_rnd": f"{ATARI} --warmup-steps 8 --rnd-features 8",
    "ppo_atari_snd": f"{ATARI} --warmup-steps 8 --snd-features 8 --update-epochs 1 --frame-size 84",
    "appo_atari": f"{ATARI} --num-groups 2 --num-minibatches 2 --sync",
}
each_script = pytest.mark.parametrize("script", KINDS, indirect=True)
ITERATION = 64  # steps


class Script:
    """A script in an empty folder: `main` with its flags, `train` on the fake environment."""

    def __init__(self, name, path):
        self.name, self.folder = name, path / "runs" / "a"
        self.module = importlib.import_module(name)
        procgen = "procgen" in name
        self.shape = (3, 16, 16) if procgen else (4, 44, 44)
        self.split, self.evaluated = ("test", "eval/return_test") if procgen else ("game", "eval/return")
        self.autoreset, self.other = (SAME_STEP, NEXT_STEP) if procgen else (NEXT_STEP, SAME_STEP)

    def main(self, *flags, before=None):
        words = (KINDS[self.name] if before is None else before).split()
        try:
            return self.module.main([*words, *map(str, flags)])
        except SystemExit as error:  # tyro's own
            return error.code

    def resume(self, *flags):
        return self.main(*flags, before="--resume runs/a")

    def fake(self, cls=FakeVecEnv, num_envs=4, **options):
        ends = ("terminated",) if self.autoreset == SAME_STEP else ("terminated", "truncated")
        return cls(random_episodes(num_envs, ends=ends), self.autoreset, shape=self.shape, **options)

    def train(self, envs, **changes):
        options = dict(eval_episodes=0, quiet=True, run_name="a", total_timesteps=ITERATION) | changes
        args = tyro.cli(self.module.Args, args=KINDS[self.name].split())
        if hasattr(args, "num_groups"):
            options.setdefault("num_groups", 1)
        return self.module.train(replace(args, **options), giving(envs))


@pytest.fixture(params=["ppo_procgen"])  # one for what is the same text in all five
def script(request, tmp_path, monkeypatch):
    def quick(weight, gain=1):  # the true one's QR would be most of these runs
        return torch.nn.init.normal_(weight, 0, gain * weight[0].numel() ** -0.5)

    monkeypatch.setattr(torch.nn.init, "orthogonal_", quick)
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Script(request.param, tmp_path)
    for number, handler in handlers.items():  # `main` sets its own
        signal.signal(number, handler)


def load(folder, name="checkpoint.pt"):
    return torch.load(folder / name, weights_only=True)


COLUMNS = """step iteration episode/return episode/length episode/count loss/policy loss/value loss/entropy
train/approx_kl train/explained_variance train/grad_norm train/lr time/sps time/env_s time/policy_s time/learn_s"""


@each_script
def test_files_of_a_run(script, capfd):
    """Files and progress; a second run of the seed, without evaluations, has the same numbers; another seed others."""
    flags, folder, split = ("--total-timesteps", 3 * ITERATION + 7), script.folder, script.split
    assert script.main(*flags, "--run-name", "a", "--eval-every", 100) == 0  # first reached in iteration 2
    out, error = capfd.readouterr()
    assert not error and "Gym" not in out  # gym's banner
    assert out.count("\nstep ") == 3 and out.count(f"\n{split}: return ") == 2
    assert out.rpartition("\n")[0].splitlines()[-2] == "trained to step 192, evaluating"
    (config,) = json.loads((folder / "config.json").read_text())
    assert config["script"] == script.name and config["args"]["num_envs"] == 4 and config["step"] == 0
    assert {"git", "cpu", "gpu", "python", "packages", "ranks"} <= config.keys()
    assert {"torch", "numpy", "gymnasium", "envpool"} == config["packages"].keys()
    table = rows(folder)
    assert set(COLUMNS.split()) <= table[0].keys()
    assert [row["step"] for row in table] == ["64", "128", "192"]  # the total is floored to whole iterations
    assert [bool(row[script.evaluated]) for row in table] == [False, True, False]
    assert not {"nan", "inf"} & {cell for row in table for cell in row.values()}
    result = json.loads((folder / "eval.json").read_text())
    assert result["step"] == load(folder)["step"] == 3 * ITERATION and list(result["splits"]) == [split]
    played = result["splits"][split]
    assert len(played["returns"]) == len(played["lengths"]) == 2
    assert played["mean"] == pytest.approx(np.mean(played["returns"]))
    assert script.main(*flags, "--run-name", "b", "--eval-episodes", 0, "--quiet") == 0
    assert capfd.readouterr() == ("", "")
    assert timeless(folder) == timeless(folder.parent / "b")
    assert equal(load(folder)["agent"], load(folder.parent / "b")["agent"])
    assert script.main("--total-timesteps", ITERATION, "--seed", 4, "--quiet") == 0
    (other,) = folder.parent.glob(f"{config['args']['env_id']}__{script.name}__4__20*")
    assert timeless(other) != timeless(folder)[:1]


@each_script
def test_own_environments_and_switches(script, monkeypatch):
    """The agent comes back; autocast and the compiler change neither its kind nor much else."""
    norms, saved, compiled = [], [], []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(self))  # pytest --compile does
    for name, options in (("a", {}), ("b", dict(precision="bf16", compile=True))):
        result = script.train(script.fake(num_actions=1), run_name=name, **options)
        norms.append(result["train/grad_norm"])
        saved.append(dict(load(script.folder.parent / name)["agent"]))
        assert equal(dict(result["agent"].state_dict()), saved[-1])
    assert norms[1] == pytest.approx(norms[0], rel=0.1) and norms[1] != norms[0] and len(compiled) == 1
    torch.testing.assert_close(saved[1], saved[0], rtol=0.1, atol=0.01)  # dtypes and names too


@each_script
def test_heads_stay_float32_under_bf16(script):
    """Their outputs are not rounded to bfloat16's numbers."""
    obs = torch.randint(0, 255, (64, *script.shape), dtype=torch.uint8)
    for memory in ("none", "gru") if script.name == "ppo_atari_rnd" else ("none",):
        more = dict(memory=memory) if script.name == "ppo_atari_rnd" else {}
        agent = script.module.Agent(script.shape, 4, script.module.Args(precision="bf16", **more))
        rest = [torch.zeros(64, agent.memory_size), torch.ones(64)] if more else []
        logits, value, *_ = agent(obs, *rest)
        for output in (logits, value):
            rounded = (output.bfloat16() == output).float().mean()
            assert output.dtype == torch.float32 and rounded < 0.1


ACTIONS = [gym.spaces.MultiBinary(4), gym.spaces.Discrete(4, start=1), gym.spaces.Box(-1, 1, (2,))]
ACTIONS += [gym.spaces.MultiDiscrete([2, 2])]


@each_script
def test_wrong_environments_are_refused(script, monkeypatch):
    """Before the run's folder exists."""

    def refuse(words, envs):
        with pytest.raises(script.module.UsageError, match=words):
            script.train(envs, run_name="x")
        assert not (script.folder.parent / "x").exists()

    refuse("make_envs", script.fake(num_envs=3))
    refuse("make_envs", FakeVecEnv(random_episodes(4), script.other, shape=script.shape))
    for space in ACTIONS:
        envs = script.fake()
        envs.single_action_space = space
        refuse("actions", envs)
    for frames in (lambda x: x.transpose(0, 2, 3, 1), lambda x: np.float32(x / 255), lambda x: x[..., 0]):
        envs = script.fake()
        reset = envs.reset
        monkeypatch.setattr(envs, "reset", lambda frames=frames, reset=reset, **k: (frames(reset()[0]), {}))
        refuse("observations", envs)


@each_script
def test_own_environments_are_evaluated_and_resumed(script):
    """With a make_envs for all of it, and statistics of unshaped, whole episodes."""
    args = tyro.cli(script.module.Args, args=KINDS[script.name].split())
    args = replace(args, env_id="toy", run_name="a", quiet=True, total_timesteps=ITERATION, eval_every=ITERATION)
    streams = []

    def make_envs(args, num_envs, stream):
        streams.append(stream)
        return FakeVecEnv([[([2.0] * 7, "terminated")]] * num_envs, script.autoreset, shape=script.shape)

    result = script.module.train(args, make_envs)
    played = result["eval"]["splits"][script.split]
    assert set(played["returns"]) == {14} and set(played["lengths"]) == {7}
    assert result[script.evaluated] == result["episode/return"] == 14 and result["episode/length"] == 7
    words = ["--resume", "runs/a", "--total-timesteps", str(2 * ITERATION)]
    assert script.module.main(words, make_envs) == 0
    assert load(script.folder)["step"] == 2 * ITERATION and len(rows(script.folder)) == 2
    # Each run trains on streams of its own, one per group, and is evaluated twice, on the same games.
    assert streams.count(script.split) == 4 and len(set(streams)) == 1 + 2 * getattr(args, "num_groups", 1)


class Toy(gym.Env):
    """Seven steps with a reward of 2 each."""

    action_space = gym.spaces.Discrete(4)

    def __init__(self, shape):
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)

    def frame(self):
        return np.full(self.observation_space.shape, 9 * self.t, np.uint8)

    def reset(self, seed=None, options=None):
        self.t = 0
        return self.frame(), {}

    def step(self, action):
        self.t += 1
        return self.frame(), 2.0, self.t >= 7, False, {}


@each_script
def test_environments_that_report_episodes_themselves(script):
    """RecordEpisodeStatistics inside: their unshaped returns are logged."""

    class Shaped(gym.vector.VectorWrapper):
        def step(self, actions):
            obs, reward, *rest = self.env.step(actions)
            return obs, reward * 100, *rest

    vector = gym.vector.SyncVectorEnv([lambda: Toy(script.shape)] * 4, autoreset_mode=script.autoreset)
    result = script.train(Shaped(RecordEpisodeStatistics(vector)))
    assert (result["episode/return"], result["episode/length"]) == (14, 7)

    def shaped():
        return gym.wrappers.TransformReward(gym.wrappers.RecordEpisodeStatistics(Toy(script.shape)), lambda x: 9 * x)

    each = [shaped] * 4
    result = script.train(gym.vector.SyncVectorEnv(each, autoreset_mode=script.autoreset), run_name="b")
    assert (result["episode/return"], result["episode/length"]) == (14, 7)


def test_lost_lives_are_no_episodes(script):
    """Statistics inside, a lost life ends the training episode outside: only the whole episode is reported."""
    envs, flags = types.SimpleNamespace(), np.array([True])
    life = {"counted": {"r": np.array([3.0]), "l": np.array([3])}, "_counted": flags}
    whole = {"episode": {"r": np.array([7.0]), "l": np.array([7])}, "_episode": flags}
    ended = script.module.ended_episodes
    assert ended(envs, life) == ([0], [3.0], [3])  # nothing better is known yet
    assert ended(envs, life | whole) == ended(envs, life | {"final_info": whole}) == ([0], [7.0], [7])
    assert ended(envs, life) == ended(envs, {}) == ([], [], [])


@each_script
def test_integer_flags_of_ends_are_flags(script):
    """~1 is -2, and 1 - 255 is -254: as masks they would turn the loss around."""
    results = []
    for name, factor in (("a", np.bool_(1)), ("b", np.int64(255))):

        class Typed(gym.vector.VectorWrapper):
            def step(self, actions, factor=factor):
                obs, reward, terminated, truncated, info = self.env.step(actions)
                return obs, reward, terminated * factor, truncated * factor, info

        script.train(Typed(script.fake()), run_name=name)
        results.append(timeless(script.folder.parent / name))
    assert results[0] == results[1]


def test_a_log_file_has_each_line_at_once(script, monkeypatch):
    seen = []  # step lines, whenever an action is drawn
    spy_on(monkeypatch, script.module, "sample", lambda *_: seen.append(Path("log").read_text().count("\nstep ")))
    with open("log", "w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        script.main("--total-timesteps", 2 * ITERATION, "--eval-episodes", 0)
    assert seen == [0] * 16 + [1] * 16


def test_best_checkpoint(script):
    """best.pt is the best mean of the last 100 games, the last 100 games."""
    games = [([paid], "terminated") for paid in 16 * [9.0] + 16 * [5.0] + 16 * [0.0]]
    script.train(FakeVecEnv([games] * 4, SAME_STEP), total_timesteps=3 * ITERATION)
    best = load(script.folder, "best.pt")
    assert best["step"] == 2 * ITERATION and best["best"] == pytest.approx((36 * 9 + 64 * 5) / 100)


each_play = pytest.mark.parametrize("script", ["ppo_procgen", "ppo_atari_rnd"], indirect=True)  # the others' is PPO's


@each_play
def test_play_plays_the_same_number_of_games_everywhere(script):
    """Short games do not crowd out long ones: the true mean of these two envs is (2 + 40) / 2."""
    games = [[(2 * np.ones(steps, np.float32), "terminated")] for steps in (1, 20)]
    agent = script.module.Agent(script.shape, 4, script.module.Args())
    envs = RecordEpisodeStatistics(FakeVecEnv(games, script.autoreset, shape=script.shape))
    returns, lengths = script.module.play(agent, envs, 3, seed=0)
    assert sorted(returns) == [2, 2, 2, 40, 40, 40] and sorted(lengths) == [1, 1, 1, 20, 20, 20]


@each_play
def test_play_greedy_and_sampled(script):
    """Greedy takes the likeliest action; one seed draws the same actions again and leaves PyTorch's state alone."""
    agent = script.module.Agent(script.shape, 4, script.module.Args())
    agent.policy.weight.data.zero_()
    agent.policy.bias.data[:] = torch.tensor([0.0, 0.1, 0.0, 0.0])
    before, actions = torch.get_rng_state(), []
    for greedy in (True, False, False):
        envs = FakeVecEnv([[(np.zeros(50, np.float32), "terminated")]], script.autoreset, shape=script.shape)
        script.module.play(agent, RecordEpisodeStatistics(envs), 1, seed=0, greedy=greedy)
        actions.append(np.concatenate(envs.actions).tolist())
    assert set(actions[0]) == {1} and set(actions[1]) == {0, 1, 2, 3} and actions[1] == actions[2]
    assert torch.equal(before, torch.get_rng_state())


@each_script
def test_best_and_timed_checkpoints(script, monkeypatch):
    """best.pt has the best mean of 100 episodes, and does not postpone checkpoint.pt, due after 300 seconds."""
    Run, saved = script.module.Run, []

    def age(_, run, metrics):
        run.last_save = time.monotonic() - 301 * (metrics["step"] % 128 == 0)

    spy_on(monkeypatch, Run, "log", age)
    spy_on(monkeypatch, Run, "save", lambda _, run, name, state, *rest: saved.append((name, state["step"])))
    games = [([paid], "terminated") for paid in 40 * [9.0] + 200 * [0.0]]
    script.train(FakeVecEnv([games] * 4, script.autoreset, shape=script.shape), total_timesteps=8 * ITERATION)
    assert [step for name, step in saved if name == "checkpoint.pt"] == [0, 128, 256, 384, 512]
    assert [step for name, step in saved if name == "best.pt"] == [128 if script.autoreset == SAME_STEP else 256]
    assert load(script.folder, "best.pt")["best"] == load(script.folder)["best"] == 9


@each_script
def test_schedules_follow_the_steps(script):
    more = dict(anneal_lr=False) if script.name == "appo_atari" else {}
    tables = dict(lr=(0, 1e-3, 128, 3e-3), ent_coef=(0, 0.1, 128, 0.3))
    result = script.train(script.fake(), total_timesteps=2 * ITERATION, **tables, **more)
    assert (result["train/lr"], result["train/ent_coef"]) == pytest.approx((2e-3, 0.2))


def test_a_resumed_run_has_to_beat_the_best(script, monkeypatch):
    """A run that dies without saving (kill -9) and goes on does not overwrite best.pt with a worse agent."""

    def play(paid, *, dies=False, **args):
        envs = FakeVecEnv([[([paid], "terminated")] * 32] * 4, SAME_STEP)
        step = envs.step

        def count(action):
            if dies and (script.folder / "best.pt").exists():
                raise FloatingPointError  # after which nothing is saved
            return step(action)

        monkeypatch.setattr(envs, "step", count)
        return script.train(envs, **args)

    play(1.0, total_timesteps=ITERATION)
    resume = str(script.folder)
    with pytest.raises(FloatingPointError):
        play(9.0, dies=True, total_timesteps=9 * ITERATION, resume=resume)
    assert load(script.folder)["best"] == -np.inf and load(script.folder, "best.pt")["best"] == 9
    play(5.0, total_timesteps=9 * ITERATION, resume=resume)
    assert load(script.folder)["best"] == load(script.folder, "best.pt")["best"] == 9
    play(10.0, total_timesteps=18 * ITERATION, resume=resume)
    assert load(script.folder, "best.pt")["best"] == 10


def test_threads(script, monkeypatch):
    """All cores that the process may use: its affinity mask, its container's quota."""
    cores = len(os.sched_getaffinity(0))
    for threads, expected in ((2, 2), (0, script.module.available_cores())):
        script.module.set_up(script.module.Args(device="cpu", threads=threads))
        assert torch.get_num_threads() == expected
    for text, expected in (("max 100000", cores), ("150000 100000", min(cores, 2)), ("50000 100000", 1)):
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
        assert script.module.available_cores() == expected
    monkeypatch.setattr(Path, "read_text", lambda self: "max 100000")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6))
    assert script.module.available_cores() == 3


@each_script
def test_resume_goes_on_with_the_learner(script, monkeypatch):
    """It begins with what was saved, weights, moments, statistics, counters, flags; its games are others."""
    names, seed = [], script.module.stream_seed
    monkeypatch.setattr(script.module, "stream_seed", lambda number, name: names[-1].add(name) or seed(number, name))

    def run(main, *flags):
        names.append(set())
        return main(*flags), load(script.folder)

    def stop(*args):
        raise KeyboardInterrupt

    flags = ("--run-name", "a", "--lr", 1e-3, "--gamma", 0.5, "--quiet", "--eval-episodes", 0)
    code, first = run(script.main, "--total-timesteps", ITERATION, *flags)
    assert code == 0
    first["best"] = 12.5
    first.get("rooms_ever", torch.zeros(8))[7] = True
    torch.save(first, script.folder / "checkpoint.pt")
    torch.save(first, script.folder / "best.pt")
    flags = ("--total-timesteps", 2 * ITERATION, "--gamma", 0.7)
    with monkeypatch.context() as patch:
        where = (script.module.Actors, "dataset") if hasattr(script.module, "Actors") else (script.module, "sample")
        patch.setattr(*where, stop)  # before anything is learned
        code, again = run(script.resume, *flags)
    assert code == 130 and equal(again | dict(args=0), first | dict(args=0))
    assert again["args"] == first["args"] | dict(total_timesteps=2 * ITERATION, gamma=0.7)
    code, last = run(script.resume, *flags)
    assert code == 0 and last["step"] == 2 * ITERATION and not equal(last["agent"], first["agent"])
    assert names[1] == names[2] and not names[0] & names[1] and 0 < len(names[0]) == len(names[1])
    assert run(script.resume)[0] == 0  # it is finished


def test_resume_writes_no_step_twice(script):
    """Rows beyond the checkpoint go, half a row too; TensorBoard is told with a purge."""
    folder = script.folder
    script.main("--total-timesteps", ITERATION, "--run-name", "a", "--eval-episodes", 0)
    old = (folder / "checkpoint.pt").read_bytes()
    time.sleep(1.1)  # event files are read in the order of the second in their names
    script.resume("--total-timesteps", 3 * ITERATION)
    (folder / "checkpoint.pt").write_bytes(old)  # as if killed before the next one was written
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    assert [line[0] for line in lines] == ["step", "64", "128", "192"]
    with open(folder / "metrics.csv", "a") as file:
        file.write("6")  # cut short
    time.sleep(1.1)
    assert script.resume("--total-timesteps", 2 * ITERATION) == 0
    table = rows(folder)
    assert [row["iteration"] for row in table] == ["1", "2"]
    events = EventAccumulator(str(folder)).Reload().Scalars("loss/value")
    assert [event.step for event in events] == [64, 128]
    assert [event.value for event in events] == pytest.approx([float(row["loss/value"]) for row in table], rel=1e-4)


class Failing(FakeVecEnv):
    """At step call `at` it raises `error`, or pays NaN if that is None."""

    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        if len(self.actions) == self.at and self.error:
            raise self.error
        return obs, reward + np.float32(np.nan if len(self.actions) == self.at else 0), *rest


@each_script
@pytest.mark.parametrize("error", [ValueError("a broken game"), None])
def test_a_failure_keeps_the_last_checkpoint(script, error, capfd):
    """An error in an environment or a loss that is NaN does not touch it; nothing is left running."""
    envs = script.fake(Failing)
    envs.at, envs.error = 16 + 5 + 8 * ("--warmup-steps" in KINDS[script.name]), error
    with pytest.raises(type(error) if error else FloatingPointError, match=None if error else "after step 64"):
        script.train(envs, total_timesteps=3 * ITERATION, checkpoint_every=0)
    saved = load(script.folder)
    assert saved["step"] == ITERATION and len(rows(script.folder)) == 1
    assert all(torch.isfinite(weight).all() for weight in saved["agent"].values())
    assert not any(thread.name.startswith("actor") for thread in threading.enumerate())


@each_script
@pytest.mark.parametrize("how", ["last iteration", "next rollout", "Ctrl-C"])
def test_divergence_keeps_the_last_checkpoint(script, how, monkeypatch):
    """One huge SGD step leaves finite weights whose outputs are not: the bytes of checkpoint.pt do not change."""
    script.train(script.fake())
    before = (script.folder / "checkpoint.pt").read_bytes()
    if how == "Ctrl-C":

        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(script.module.Run, "log", interrupt)
    iterations = {"last iteration": 2, "next rollout": 4, "Ctrl-C": 4}[how]
    options = dict(
        lr=(1e30,), update_epochs=1, resume="runs/a", checkpoint_every=300, total_timesteps=iterations * ITERATION
    )
    with pytest.raises(FloatingPointError):
        script.train(script.fake(), **options)
    assert (script.folder / "checkpoint.pt").read_bytes() == before


def test_non_finite_weights_are_not_saved(script, monkeypatch):
    """Also those that no output shows, and in best.pt."""
    script.train(script.fake())
    for name in ("checkpoint.pt", "best.pt"):
        run = types_of_run(script)
        bad = {"agent": {"weight": torch.tensor([1.0, float("nan")])}}
        with pytest.raises(FloatingPointError):
            run.save(name, bad, [torch.zeros(1)])
        run.close()
    assert not (script.folder / "best.pt").exists()


def types_of_run(script):
    args = replace(script.module.Args(), resume="runs/a", quiet=True)
    return script.module.Run(args, torch.device("cpu"), ITERATION, ITERATION)


def test_sampling_refuses_logits_that_are_not_finite(script, monkeypatch):
    """Before multinomial, whose own check on a GPU makes CUDA unusable."""
    monkeypatch.setattr(torch, "multinomial", None)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(FloatingPointError):
            script.module.sample(torch.tensor([[0.0, bad]]))


def test_each_process_has_its_gpu(script, monkeypatch):
    """torchrun's processes do not share the GPU of a saved or typed --device cuda:1."""
    monkeypatch.setattr(script.module, "WORLD", 2)
    monkeypatch.setenv("LOCAL_RANK", "99")  # which no machine has
    for device in ("cuda", "cuda:1"):
        with pytest.raises(script.module.UsageError, match="--device cuda:99 "):
            script.module.set_up(script.module.Args(device=device))


def test_a_second_signal_does_not_cut_the_saving_short(script, monkeypatch, capfd):
    def signals(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    sampled = []
    spy_on(monkeypatch, torch, "save", lambda *_: sampled and signals())  # which is not yet on disk
    spy_on(monkeypatch, script.module, "sample", lambda *_: sampled.append(signals()))
    assert script.main("--total-timesteps", ITERATION, "--run-name", "a") == 130
    assert load(script.folder)["step"] == 0 and "saved at step 0" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_handled_as_before_after_main(script, monkeypatch, number):
    """For every exit code, in this process and so in its children."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]

    def check(code, *flags):
        assert script.main(*flags) == code
        assert [signal.getsignal(number) for number in numbers] == before

    check(2, "--lr", -1)
    check(0, "--total-timesteps", ITERATION, "--eval-episodes", 0)
    with monkeypatch.context() as patch:
        spy_on(patch, script.module, "sample", lambda *_: os.kill(os.getpid(), number))
        check(130, "--total-timesteps", ITERATION, "--run-name", "a")
    assert load(script.folder)["step"] == 0

    def fail(*_):
        raise RuntimeError("a bug")

    spy_on(monkeypatch, script.module, "sample", fail)
    with pytest.raises(RuntimeError):
        script.main("--total-timesteps", ITERATION)
    assert [signal.getsignal(number) for number in numbers] == before


def test_nohup_survives_a_closed_terminal(script, monkeypatch):
    """A signal that is ignored already stays so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    spy_on(monkeypatch, script.module, "sample", lambda *_: os.kill(os.getpid(), signal.SIGHUP))
    try:
        assert script.main("--total-timesteps", ITERATION, "--eval-episodes", 0) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_main_in_a_thread(script):
    codes = []
    flags = ("--total-timesteps", ITERATION, "--eval-episodes", 0)
    thread = threading.Thread(target=lambda: codes.append(script.main(*flags)))
    thread.start()
    thread.join()
    assert codes == [0]


def test_train_leaves_no_threads_or_files(script):
    """A sweep in one process: TensorBoard's writer and the table are closed."""
    counts = []
    for i in range(5):
        script.train(script.fake(), run_name=f"run{i}")
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert counts[1] == counts[4]


def test_a_lock_of_tensorboard_that_a_signal_left_taken(script, monkeypatch):
    """The run ends all the same, and what it saved and logged is there."""

    def interrupt(_, run, metrics):
        run.tensorboard.file_writer.event_writer._async_writer._byte_queue.mutex.acquire()
        raise KeyboardInterrupt

    spy_on(monkeypatch, script.module.Run, "log", interrupt)
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        script.train(script.fake())
    assert time.perf_counter() - start < 15 and load(script.folder)["step"] == 0 and len(rows(script.folder)) == 1


def test_two_runs_never_share_a_folder(script):
    """Runs of one second get a folder each; of one name exactly one wins; a folder in use is not resumed."""
    args = replace(script.module.Args(env_id="toy"), run_dir="many", quiet=True)

    def new_folder(name=""):
        run = script.module.Run(replace(args, run_name=name), torch.device("cpu"), 0, 1)
        run.close()
        (run.folder / "checkpoint.pt").touch()
        return run.folder

    assert len({new_folder() for _ in range(20)}) == 20
    new_folder("b")
    with pytest.raises(script.module.UsageError, match="--resume many/b"):
        new_folder("b")
    script.train(script.fake())
    run = types_of_run(script)
    with pytest.raises(script.module.UsageError, match="another process"):
        script.train(script.fake(), resume="runs/a", total_timesteps=2 * ITERATION)
    run.close()
    script.train(script.fake(), resume="runs/a", total_timesteps=2 * ITERATION)
    assert len(rows(script.folder)) == 2


def test_config_keeps_every_part(script):
    script.train(script.fake())
    script.train(script.fake(), resume="runs/a", gamma=0.5, total_timesteps=2 * ITERATION)
    first, second = json.loads((script.folder / "config.json").read_text())
    assert (first["step"], first["args"]["gamma"]) == (0, 0.99)
    assert (second["step"], second["args"]["gamma"]) == (ITERATION, 0.5)


def test_a_run_that_is_killed_at_once_can_be_resumed(script, monkeypatch):
    """Its first checkpoint is written before its first step."""

    def kill(*_):
        raise SystemError  # nothing is saved after it, as after kill -9

    with monkeypatch.context() as patch:
        patch.setattr(script.module, "sample", kill)
        with pytest.raises(SystemError):
            script.train(script.fake())
    assert load(script.folder)["step"] == 0
    script.train(script.fake(), resume="runs/a")
    assert [row["step"] for row in rows(script.folder)] == [str(ITERATION)]


def test_resume_from_python_keeps_the_runs_flags(script):
    """Given are those that differ from the defaults."""
    script.train(script.fake(), gamma=0.5, seed=7, lr=(1e-3,))
    args = script.module.Args(resume="runs/a", total_timesteps=2 * ITERATION, gae_lambda=0.5)
    script.module.train(args, giving(script.fake()))
    saved = load(script.folder)["args"]
    assert (saved["gamma"], saved["seed"], saved["lr"], saved["gae_lambda"]) == (0.5, 7, (1e-3,), 0.5)


def test_flags_built_in_python_become_plain(script):
    """Numpy's numbers, paths, a single rate: the checkpoint has Python's own types and can be read."""
    options = dict(gamma=np.float64(0.98), num_steps=np.int64(16), clip=np.float32(0.25), run_dir=Path("runs"))
    script.train(script.fake(), **options, lr=3e-4, total_timesteps=np.float64(ITERATION))
    saved = load(script.folder)["args"]
    assert saved["lr"] == (3e-4,) and saved["run_dir"] == "runs" and saved["clip"] == 0.25
    for value in saved.values():
        assert type(value) in (bool, int, float, str, tuple)


@each_script
def test_every_flag_is_checked(script):
    """nan, inf and -1 for each number; choices too; nothing is written."""
    module = script.module
    tried = 0
    for name, kind in typing.get_type_hints(module.Args).items():
        wrong = {int: (-1, 1.5, 2**64), float: (-1.0, math.nan, math.inf), bool: ("no",)}.get(kind, ())
        if typing.get_origin(kind) is typing.Literal:
            wrong = ("x", 3)
        elif typing.get_origin(kind) is tuple:
            wrong = ((-1.0,), (math.nan,), "x")
        for value in wrong:
            tried += 1
            with pytest.raises(module.UsageError, match=f"--{name.replace('_', '-')}"):
                script.train(script.fake(), run_name="x", **{name: value})
    for name in module.AT_MOST_1:
        with pytest.raises(module.UsageError, match=f"--{name.replace('_', '-')}"):
            script.train(script.fake(), run_name="x", **{name: 1.5})
    for name in module.AT_LEAST_1:
        with pytest.raises(module.UsageError, match=f"--{name.replace('_', '-')}"):
            script.train(script.fake(), run_name="x", **{name: 0})
    assert tried > 60 and not (script.folder.parent / "x").exists()


@each_script
def test_fixed_flags_cannot_change(script, capfd):
    """One line with the flag and both values."""
    script.main("--total-timesteps", ITERATION, "--run-name", "a", "--eval-episodes", 0)
    others = {  # of a flag, another value
        "env-id": ["maze" if script.split == "test" else "Pong"],
        "distribution-mode": ["hard"],
        "stack": ["none" if script.split == "test" else "2"],
        "channels": ["8", "4", "4"],
        "pool": ["flatten"],
        "input-shift": ["0"],
        "repeat-action-probability": ["0.5"],
        "frame-size": ["96"],
        "memory": ["gru"],
        "rnd-features": ["9"],
        "snd-features": ["9"],
    }
    tried = [name for name in others if hasattr(script.module.Args, name.replace("-", "_"))]
    assert len(tried) >= 4
    for name in tried:
        assert script.resume(f"--{name}", *others[name]) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1 and f"--{name}" in error and others[name][0] in error


def test_a_renamed_copy_resumes(tmp_path):
    """Under another name, and with a flag more; a flag that it does not know is named."""
    text = (ROOT / "ppo_procgen.py").read_text()
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "more.py").write_text(text.replace("    seed: int = 1", "    new: int = 3  # new\n    seed: int = 1"))

    def run(*words):
        command = [sys.executable, "-OO", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    flags = [*PROCGEN.split(), "--eval-episodes", 0, "--run-name", "a"]
    assert run(ROOT / "ppo_procgen.py", *flags, "--total-timesteps", 64).returncode == 0
    assert run("mine.py", "--resume", "runs/a", "--total-timesteps", 128).returncode == 0
    assert run("more.py", "--resume", "runs/a", "--total-timesteps", 192).returncode == 0
    last = run("mine.py", "--resume", "runs/a", "--total-timesteps", 256)
    assert last.returncode == 2 and "new" in last.stderr and last.stderr.count("\n") == 1


def test_a_folder_with_quotes_and_no_git(script, monkeypatch, tmp_path):
    """The path reaches no shell; without git the revision is null."""
    folder = tmp_path / "O'Neil; touch harm"
    folder.mkdir()
    shutil.copy(ROOT / "ppo_procgen.py", folder)
    command = [sys.executable, "ppo_procgen.py", *PROCGEN.split(), "--eval-episodes", "0", "--run-name", "a"]
    done = subprocess.run([*command, "--total-timesteps", "64"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "runs/a/config.json").read_text())[0]["git"] is None and not list(
        tmp_path.rglob("harm")
    )
    monkeypatch.setenv("PATH", "")
    script.train(script.fake())
    assert json.loads((script.folder / "config.json").read_text())[0]["git"] is None


def test_a_damaged_table(script):
    """A NUL line, a byte-order mark, half a row: the run goes on behind its last good row."""
    script.train(script.fake())
    path = script.folder / "metrics.csv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\0\0\0\n" + b"12")
    script.train(script.fake(), resume="runs/a", total_timesteps=2 * ITERATION)
    table = path.read_text(encoding="utf-8-sig").splitlines()
    assert [line.split(",")[0] for line in table] == ["step", "64", "128"]
    whole = path.read_bytes()
    for damaged in (whole.replace(b",", b";"), whole.replace(b"\n64,", b"\n64.0,").replace(b"\n128,", b"\n128.0,")):
        path.write_bytes(damaged)
        with pytest.raises(script.module.UsageError, match="metrics.csv"):
            script.train(script.fake(), resume="runs/a", total_timesteps=3 * ITERATION)
        assert path.read_bytes() == damaged
    path.write_bytes(b"step,itera")  # a crash in the first write
    script.train(script.fake(), resume="runs/a", total_timesteps=3 * ITERATION)
    header, row = path.read_text().splitlines()
    assert header == table[0] and row.startswith("192,")


def test_a_run_that_was_killed_before_its_first_save(script, monkeypatch):
    """The same command starts it again; a damaged config.json does not stop a resume."""
    with monkeypatch.context() as patch:
        spy_on(patch, script.module.Run, "__init__", lambda _, run, *args: run.close() or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            script.train(script.fake())
    assert {path.name for path in script.folder.iterdir()} >= {"metrics.csv"}
    script.train(script.fake())
    (script.folder / "config.json").write_text('[{"script"')
    script.train(script.fake(), resume="runs/a", total_timesteps=2 * ITERATION)
    assert len(json.loads((script.folder / "config.json").read_text())) == 1 and len(rows(script.folder)) == 2


def test_a_checkpoint_that_changes_before_the_lock(script, monkeypatch):
    """A resume that loaded it while the run was still training is refused, and nothing is cut."""
    script.train(script.fake())
    loaded = load(script.folder)
    script.train(script.fake(), resume="runs/a", total_timesteps=2 * ITERATION)
    with pytest.raises(script.module.UsageError, match="try again"):
        args = script.module.Args(**loaded["args"] | dict(resume="runs/a", total_timesteps=3 * ITERATION))
        script.module.train(args, lambda args, n, stream: script.fake(), loaded)
    assert load(script.folder)["step"] == 2 * ITERATION and len(rows(script.folder)) == 2


def test_a_file_system_without_locks(script, monkeypatch):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(script.module.fcntl, "flock", flock)
    script.train(script.fake())
    assert len(rows(script.folder)) == 1


def test_a_rank_without_a_world(tmp_path):
    """RANK alone, which a sweep may export, does not make a run that writes nothing."""
    command = [sys.executable, ROOT / "ppo_procgen.py", *PROCGEN.split(), "--eval-episodes", "0", "--run-name", "a"]
    command = [*map(str, command), "--total-timesteps", "64"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"RANK": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "runs/a/checkpoint.pt").exists(), done.stderr


def test_an_ascii_terminal(script):
    """What is printed is ASCII: another character would end a run in the C locale."""
    source = (ROOT / f"{script.name}.py").read_text()
    assert source.isascii()


def test_a_folder_that_is_gone_is_made_again(script, monkeypatch, capfd):
    spy_on(monkeypatch, script.module.Run, "log", lambda *_: shutil.rmtree(script.folder))
    script.train(script.fake())
    assert load(script.folder)["step"] == ITERATION and "runs/a was deleted" in capfd.readouterr().err


def test_the_bar_and_the_lines(script):
    """`> log` from a terminal: the terminal has the bar, the log has the lines."""
    main, child = pty.openpty()
    command = [sys.executable, ROOT / "ppo_procgen.py", *PROCGEN.split(), "--eval-episodes", "0"]
    with open("log", "w") as log:
        termios.tcsetwinsize(child, (24, 80))
        process = subprocess.Popen([*command, "--total-timesteps", "64"], stdout=log, stderr=child)
        os.close(child)
        seen = b""
        with contextlib.suppress(OSError):  # the terminal ends with the process
            while piece := os.read(main, 4096):
                seen += piece
        assert process.wait() == 0
    os.close(main)
    assert "step 64" in Path("log").read_text() and b"steps" in seen


@pytest.mark.parametrize("name", ["ppo_procgen", "ppo_atari_rnd", "impala_procgen", "appo_atari"])
def test_command_line_alone_in_an_empty_folder(name, tmp_path):
    """The file copied to an empty folder runs, and stops on a signal with 130 and a checkpoint to resume from."""
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    command = [sys.executable, f"{name}.py", *KINDS[name].replace("--sync", "--no-sync").split(), "--run-name", "a"]
    pipes = dict(cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([*command, "--total-timesteps", "1000000"], **pipes)
    lines = (line for line in process.stdout if line.startswith("step "))
    next(lines), next(lines)
    process.send_signal(signal.SIGINT if "--num-groups" in command else signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    message = r"stopped, saved at step [\d,]+: --resume runs/a continues\n"
    assert process.returncode == 130 and re.fullmatch(message, error), error
    assert load(tmp_path / "runs/a")["step"] >= ITERATION


BAD = {}  # flags, and what the one line must hold
BAD["ppo_procgen"] = [
    ("--minibatch-size 1", "--minibatch-size 1 2 64"),
    ("--minibatch-size 65", "--minibatch-size 65 64"),
    ("--total-timesteps 63", "--total-timesteps 63 64"),
    ("--seed -1", "--seed"),
    ("--num-steps -3", "--num-steps"),
    ("--lr 1e-3 0", "--lr"),
    ("--kl-target 0", "--kl-target"),
    ("--start-level 5", "--start-level --num-levels"),
    ("--env-id bigfis", "--env-id bigfish"),
    ("--num-levels 3000000000", "--num-levels"),
    ("--eval-every 64 --eval-episodes 0", "--eval-every"),
    ("--lr 5 1e-4 1 1e-4", "--lr"),
    ("--ent-coef 5 1e-4 1", "--ent-coef"),
    ("--device cuda:99", "--device cuda:99 auto"),
    ("--max-grad-norm -1", "--max-grad-norm"),
    ("--run-dir file", "file"),
    ("--run-name b", "--run-name --resume runs/b"),
]
BAD["ppo_atari_rnd"] = [
    ("--env-id Montezuma", "--env-id MontezumaRevenge"),
    ("--noop-max 0", "--noop-max"),
    ("--stack 0", "--stack"),
]


@pytest.mark.parametrize("script", BAD, indirect=True)
def test_bad_input(script, capfd, tmp_path):
    """Exit code 2; one line that names the flag and what is allowed; nothing is written."""
    (tmp_path / "file").write_text("")
    (tmp_path / "runs/b").mkdir(parents=True)
    for flags, words in BAD[script.name]:
        assert script.main(*flags.split()) == 2, flags
        error = capfd.readouterr().err
        assert error.count("\n") == 1 and all(word in error for word in words.split()), error
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b", "file", "runs"]


def test_an_error_is_one_write(script, monkeypatch):
    """Ranks that write their line in pieces mix them."""
    written = []
    monkeypatch.setattr(sys.stderr, "write", written.append)
    assert script.main("--minibatch-size", 1) == 2
    assert len(written) == 1 and "--minibatch-size 1" in written[0] and written[0].endswith("\n")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_bad_checkpoints(script, capfd):
    """One line, exit code 2, nothing changed, and a hostile file runs no code."""
    script.main("--total-timesteps", ITERATION, "--run-name", "a", "--eval-episodes", 0)
    path, saved = script.folder / "checkpoint.pt", load(script.folder)
    whole = path.read_bytes()
    other_version = saved | dict(args=saved["args"] | dict(new_flag=1))
    first_edition = {name: x for name, x in saved.items() if name != "iteration"}
    for bad in (b"", whole[:3000], saved | dict(args=Bomb()), first_edition, other_version, [1, 2]):
        if isinstance(bad, bytes):
            path.write_bytes(bad)
        else:
            torch.save(bad, path)
        before = {file.name: file.read_bytes() for file in script.folder.iterdir()}
        capfd.readouterr()
        assert script.resume("--total-timesteps", 2 * ITERATION) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1 and "--resume runs/a" in error, error
        assert before == {file.name: file.read_bytes() for file in script.folder.iterdir()}
        assert not os.path.exists("harm")


def test_a_full_disk(script, monkeypatch):
    """The last good checkpoint stays untouched; later the run continues."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(result, run, metrics):
        if metrics["step"] == 2 * ITERATION:  # beyond this size an OSError in mid-write, as of a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))

    flags = ("--total-timesteps", 3 * ITERATION, "--eval-episodes", 0, "--checkpoint-every", 0, "--quiet")
    with monkeypatch.context() as patch:
        spy_on(patch, script.module.Run, "log", fill)
        try:
            with pytest.raises(OSError, match="File too large"):
                script.main(*flags, "--run-name", "a")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load(script.folder)["step"] == ITERATION
    assert script.resume() == 0 and len(rows(script.folder)) == 3


def test_a_closed_stderr(script, monkeypatch):
    """`2>&-` ends as any other run."""
    monkeypatch.setattr(sys, "stderr", None)
    assert script.main("--total-timesteps", ITERATION, "--eval-episodes", 0) == 0
