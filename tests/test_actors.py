"""The actors of the asynchronous scripts beside the learner, and what becomes of them when a run ends."""

import csv
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from conftest import NEXT_STEP, ROOT, SAME_STEP, FakeVecEnv, random_episodes

KINDS = {  # `many`: an iteration of 64 rows; `double`, `half`: of 128 and 32
    "appo_atari": dict(
        shape=(4, 44, 44),
        autoreset=NEXT_STEP,
        many=dict(num_minibatches=2, minibatch_size=32),
        double=dict(num_minibatches=4),
        half=dict(num_minibatches=1),
    ),
    "impala_procgen": dict(
        shape=(3, 16, 16),
        autoreset=SAME_STEP,
        many=dict(minibatch_size=64, channels=(4, 4, 4)),
        double=dict(minibatch_size=128),
        half=dict(minibatch_size=32),
    ),
}
COMMON = dict(num_envs=4, num_groups=1, num_steps=16, eval_episodes=0, quiet=True, torch_threads=1, device="cpu")


@pytest.fixture(params=list(KINDS))
def script(request, tmp_path):
    module, kind = importlib.import_module(request.param), KINDS[request.param]

    def fake(num_envs=4, cls=FakeVecEnv, seed=0):
        return cls(random_episodes(num_envs, seed=seed), kind["autoreset"], shape=kind["shape"])

    def run(envs, iterations=1, name="run", size=64, **changes):
        args = module.Args(**(COMMON | kind["many"] | dict(run_dir=str(tmp_path), run_name=name) | changes))
        args.total_timesteps = iterations * size
        return module.train(args, envs)

    return types.SimpleNamespace(module=module, fake=fake, run=run, path=tmp_path, name=request.param, **kind)


def read(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def timeless(folder):
    return [{name: cell for name, cell in row.items() if not name.startswith("time/")} for row in read(folder)]


def actors():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]


def saved_step(script):
    return torch.load(script.path / "run" / "checkpoint.pt", weights_only=True)["step"]


def in_log(monkeypatch, script, action):
    """Call action(metrics) in the learner, at the end of each iteration."""
    log = script.module.Logger.log

    def then(self, metrics):
        action(metrics)
        return log(self, metrics)

    monkeypatch.setattr(script.module.Logger, "log", then)


class Slow(FakeVecEnv):
    def step(self, actions):
        time.sleep(0.02)
        return super().step(actions)


def test_sync_runs_are_equal(script):
    """Also with two groups that act at the same time, of which now this one and now that one is slow; no row lags."""
    for name, classes in (("a", (Slow, FakeVecEnv)), ("b", (FakeVecEnv, Slow))):
        envs = [script.fake(2, cls, seed) for seed, cls in enumerate(classes)]
        metrics = script.run(envs, 3, name, num_groups=2, update_epochs=2, sync=True)
        assert metrics["async/policy_lag_max"] == 0
    assert timeless(script.path / "a") == timeless(script.path / "b")


def test_seconds_add_up(script):
    """Waiting and learning are the iteration; the actors' seconds are theirs, and wait for no one."""
    metrics = script.run([script.fake(cls=Slow)], 2, sync=True)
    env, policy, wait, learn = (metrics[f"time/{phase}_s"] for phase in ("env", "policy", "queue_wait", "learn"))
    assert env >= 16 * 0.02 and min(policy, learn) > 0
    assert env + policy <= wait
    assert wait + learn == pytest.approx(64 / metrics["time/sps"])


@pytest.mark.parametrize("cls", [FakeVecEnv, Slow])
def test_lag_bound(script, monkeypatch, cls):
    """However slow the learner or one of the groups, no row is older than one dataset, by which actors may be ahead."""
    lags = []

    def slow(metrics):
        lags.append(metrics["async/policy_lag_max"])
        assert 0 <= metrics["async/policy_lag_mean"] <= lags[-1]
        time.sleep(0.02)

    in_log(monkeypatch, script, slow)
    groups = [script.fake(2), script.fake(2, cls, seed=1)]
    options = dict(num_groups=2, num_batches_to_accumulate=1, update_epochs=2)
    options |= script.half | dict(size=32) if cls is Slow else {}
    script.run(groups, 20, **options)
    minibatches = 2 if script.name == "appo_atari" and cls is FakeVecEnv else 1
    assert 0 < max(lags) <= 2 * minibatches and len(lags) == 20, lags


def test_actors_wait_for_a_slow_learner(script, monkeypatch):
    """Back-pressure: they begin no rollout beyond the datasets they may be ahead, and none that no learner will see."""
    begun = []
    envs = [script.fake(2, seed=seed) for seed in (0, 1)]

    def slow(metrics):
        time.sleep(0.1)
        begun.append(sum(len(group.actions) for group in envs) * 2)  # rows, the head start of group 1 included

    in_log(monkeypatch, script, slow)
    script.run(envs, 6, num_groups=2, num_batches_to_accumulate=1)
    assert all(rows <= (i + 2) * 64 + 32 for i, rows in enumerate(begun)), begun
    assert begun[0] == 2 * 64 + 32  # they do go ahead
    assert sum(len(group.actions) for group in envs) * 2 == 6 * 64 + 32


def test_groups_take_turns(script):
    """With datasets of a single rollout each group acts for every other one."""
    groups = [script.fake(2), script.fake(2)]
    script.run(groups, 3, num_groups=2, sync=True, size=32, **script.half)
    assert [len(group.actions) for group in groups] == [2 * 16, 16 + 16]


def test_the_head_start_counts_nowhere(script):
    """Group g plays num_steps * g random steps first: no step, reward or game of them is in any metric."""
    groups = [script.fake(), script.fake()]
    metrics = script.run(groups, num_envs=8, num_groups=2, sync=True, size=128, **script.double)
    assert [len(group.actions) for group in groups] == [16, 32] and metrics["step"] == 128
    assert min(np.bincount(np.concatenate(groups[1].actions[:16]), minlength=4)) > 4
    returns, lengths = [], []
    for group, first in zip(groups, (0, 16), strict=True):
        total, length = np.zeros(4), np.zeros(4)
        for reward, ended, cut, over in group.log[first:]:
            counts = ~over | (script.autoreset == SAME_STEP)  # the row after an end is no transition
            total += np.where(counts, reward, 0)
            length += counts
            done = ended | cut
            returns += total[done].tolist()
            lengths += length[done].tolist()
            total[done] = length[done] = 0
    assert metrics["episode/count"] == len(returns)
    assert metrics["episode/return"] == pytest.approx(np.mean(returns), rel=1e-5)
    assert metrics["episode/length"] == pytest.approx(np.mean(lengths))


def test_a_resumed_run_plays_new_games(script, monkeypatch):
    """Neither the emulators' random numbers nor those of actions and head start are those of the run's start."""
    streams, names, seed = [], [], script.module.stream_seed

    def make_envs(args, num_envs, stream):
        streams.append(stream)
        return RecordEpisodeStatistics(script.fake(num_envs))

    monkeypatch.setattr(script.module, "make_envs", make_envs)
    monkeypatch.setattr(script.module, "stream_seed", lambda *rest: names.append(rest[1]) or seed(*rest))
    script.run(None, 2)
    script.run(None, 4, resume=str(script.path / "run"))
    actions = [name for name in names if "actions" in name]
    assert len(streams) == len(set(streams)) == 2 and len(actions) == len(set(actions)) == 2, (streams, names)
    assert [int(row["step"]) for row in read(script.path / "run")] == [64, 128, 192, 256]


def test_a_resumed_run_may_have_other_batches(script):
    """Its steps are then no multiple of a batch, and its last iteration needs rollouts like any other."""
    script.run([script.fake()], 3, size=32, num_steps=8, **script.half)
    metrics = script.run([script.fake()], 3, resume=str(script.path / "run"))
    assert metrics["step"] == 96 + 2 * 64


def test_a_published_copy_is_never_written_to(script):
    """The weights an actor acts with are of one version, the newest, whatever the learner does meanwhile."""
    agent = torch.nn.Linear(300, 300)
    torn, seen = [], set()

    def publish(version):
        agent.version = version
        torch.nn.init.constant_(agent.weight, version)
        torch.nn.init.constant_(agent.bias, version)
        actors.publish(agent)

    def rollout(group, actors, T):
        for _ in range(T):
            acting = actors.agent
            weights = torch.cat([acting.weight.flatten(), acting.bias])
            torn.append(bool((weights != acting.version).any()))
            assert not weights.requires_grad
            seen.add(acting.version)
        return actors.agent.version

    agent.version = 0
    actors = script.module.Actors([None], agent, rollout, 1000, size=1, ahead=1, total=2)
    publish(0)
    threading.Thread(target=lambda: [publish(version) for version in range(1, 300)]).start()
    first = actors.dataset()
    while agent.version < 299:
        time.sleep(0.01)
    time.sleep(0.05)
    actors.dataset()
    assert not any(torn) and len(seen) > 3
    assert actors.agent.version == 299 and len(first) == 1
    actors.stop()


def test_an_actors_failure_ends_the_run(script):
    """What it raised is raised, what was learned before it is saved, and no thread is left for the interpreter."""

    class Broken(FakeVecEnv):
        def step(self, actions):
            if len(self.actions) == 40:
                raise ValueError("the emulator is gone")
            return super().step(actions)

    start = time.perf_counter()
    with pytest.raises(ValueError, match="the emulator is gone"):
        script.run([script.fake(cls=Broken)], 10)
    assert time.perf_counter() - start < 10
    assert not actors()
    assert saved_step(script) == 2 * 64


def test_an_interrupt_ends_actors_within_a_step(script, monkeypatch):
    """Not at the end of their rollouts, which may take minutes; the learner's state is saved before."""
    interrupted = []

    class SlowLater(FakeVecEnv):
        def step(self, actions):
            time.sleep(0.5 * (len(self.actions) >= self.fast))
            return super().step(actions)

    def interrupt(metrics):
        if metrics["step"] == 3 * 64:
            interrupted.append(time.perf_counter())
            raise KeyboardInterrupt

    in_log(monkeypatch, script, interrupt)
    groups = [script.fake(2, SlowLater), script.fake(2, SlowLater)]
    for g, group in enumerate(groups):
        group.fast = (3 + g) * 16  # until the rollout after the last that is learned; group 1 has a head start
    with pytest.raises(KeyboardInterrupt):
        script.run(groups, 10, num_groups=2)
    assert time.perf_counter() - interrupted[0] < 4  # a rollout takes 8
    assert not actors()
    assert saved_step(script) >= 2 * 64


COMMANDS = {
    "appo_atari": "--env-id Pong --num-envs 4 --num-steps 16 --minibatch-size 32 --num-minibatches 2",
    "impala_procgen": "--env-id leaper --num-envs 4 --num-steps 16 --minibatch-size 32 --channels 4 4 4",
}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_asynchronous_command_stops_and_goes_on(name, tmp_path):
    """As a user starts it: SIGINT ends it with 130, a checkpoint and no process left; --resume goes on to 0."""
    command = [sys.executable, ROOT / f"{name}.py", *COMMANDS[name].split(), "--run-name", "a", "--torch-threads", "1"]
    command += ["--total-timesteps", "100000000", "--eval-episodes", "2"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=tmp_path, **pipes)
    lines = (line for line in process.stdout if line.startswith("step "))
    for _ in range(3):
        next(lines)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped" in error and "Traceback" not in error, error
    assert "terminate called" not in error
    step = torch.load(tmp_path / "runs/a/checkpoint.pt", weights_only=True)["step"]
    command = [sys.executable, ROOT / f"{name}.py", "--resume", "runs/a", "--total-timesteps", str(step + 64)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    steps = [int(row["step"]) for row in read(tmp_path / "runs/a")]
    assert steps == sorted(set(steps)) and steps[-1] == step + 64


@pytest.mark.slow
def test_overlap_pays_when_environments_wait(script):
    """With steps that sleep as long as learning takes, two groups of actors give at least 1.6 x `--sync`."""

    class Waits(FakeVecEnv):
        pause = 0.0

        def step(self, actions):
            time.sleep(self.pause)
            return super().step(actions)

    def speed(name, **changes):
        """Datasets of one rollout, so that with --sync the groups act one after the other."""
        envs = [script.fake(cls=Waits, seed=seed) for seed in (0, 1)]
        script.run(envs, 24, name, size=64, num_envs=8, num_groups=2, update_epochs=8, **changes)
        rows = read(script.path / name)[4:-6]  # while the actors still have something to do
        return rows, 64 * len(rows) / sum(64 / float(row["time/sps"]) for row in rows)

    rows, _ = speed("calibrate", sync=True)
    Waits.pause = np.median([float(row["time/learn_s"]) for row in rows]) / 16
    ratios = [speed(f"async {i}")[1] / speed(f"sync {i}", sync=True)[1] for i in range(3)]
    print("asynchronous over sync:", ratios)
    assert np.median(ratios) > 1.6
