"""The threads of the asynchronous scripts against their one-threaded run, and what becomes of them when a run ends."""

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
from conftest import NEXT_STEP, ROOT, FakeVecEnv, random_episodes

KINDS = {
    "appo_atari": dict(
        shape=(4, 44, 44),
        many=dict(num_minibatches=2, minibatch_size=32),
        switch="vtrace",
        double=dict(num_minibatches=4),
        half=dict(num_minibatches=1),
    ),
    "impala_procgen": dict(
        shape=(3, 16, 16),
        many=dict(minibatch_size=64, channels=(4, 4, 4)),
        switch="shape_reward",
        double=dict(minibatch_size=128),
        half=dict(minibatch_size=32),
    ),
}
COMMON = dict(num_envs=4, num_groups=1, num_steps=16, eval_episodes=0, quiet=True, torch_threads=1, device="cpu")


@pytest.fixture(params=list(KINDS))
def script(request, tmp_path):
    module, kind = importlib.import_module(request.param), KINDS[request.param]

    def fake(num_envs=4, cls=FakeVecEnv, seed=0):
        return cls(random_episodes(num_envs, seed=seed), NEXT_STEP, shape=kind["shape"])

    def run(envs, iterations=1, name="run", **changes):
        args = module.Args(**(COMMON | kind["many"] | dict(run_dir=str(tmp_path), run_name=name) | changes))
        args.total_timesteps = iterations * args.batch_size
        return module.train(args, envs), torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)

    return types.SimpleNamespace(module=module, fake=fake, run=run, path=tmp_path, name=request.param, **kind)


def read(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def actors():
    return [thread for thread in threading.enumerate() if thread.name == "actor"]


@pytest.mark.parametrize("switch", [False, True])
def test_zero_lag_equals_sync(script, switch):
    """One group whose actor waits for the learner: the asynchronous run is the one-threaded one, bit for bit."""
    saved = []
    for name, changes in (("sync", dict(sync=True)), ("async", dict(num_batches_to_accumulate=0))):
        changes[script.switch] = switch
        saved.append(script.run([script.fake()], 3, name, update_epochs=2, **changes)[1])
    assert all(torch.equal(saved[0]["agent"][name], saved[1]["agent"][name]) for name in saved[0]["agent"])
    assert saved[0]["version"] == saved[1]["version"] > 3
    assert saved[0]["groups"] and saved[1]["groups"] is None  # else of actors that may be amid a rollout
    first, second = (
        [{name: cell for name, cell in row.items() if "time/" not in name} for row in read(script.path / name)]
        for name in ("sync", "async")
    )
    assert first == second


class Slow(FakeVecEnv):
    def step(self, actions):
        time.sleep(0.02)
        return super().step(actions)


@pytest.mark.parametrize("sync", [True, False])
def test_seconds_add_up(script, sync):
    """Waiting and learning are the iteration; of a wait with --sync environments and policy are taken out."""
    metrics, _ = script.run([script.fake(cls=Slow)], 2, sync=sync)
    env, policy, wait, learn = (metrics[f"time/{phase}_s"] for phase in ("env", "policy", "queue_wait", "learn"))
    assert env >= 16 * 0.02 and min(policy, wait, learn) >= 0
    assert wait + learn + sync * (env + policy) == pytest.approx(64 / metrics["time/sps"])
    assert wait < env or not sync  # else they were left in


@pytest.mark.parametrize("cls", [FakeVecEnv, Slow])
def test_lag_bound(script, monkeypatch, cls):
    """However slow the learner or one of the groups, no row is older than one dataset, by which actors may be ahead."""
    lags, log = [], script.module.Run.log

    def slow(self, step, metrics):
        lags.append(metrics["async/policy_lag_max"])
        assert 0 <= metrics["async/policy_lag_mean"] <= lags[-1]
        time.sleep(0.02)
        return log(self, step, metrics)

    monkeypatch.setattr(script.module.Run, "log", slow)
    options = dict(num_groups=2, num_batches_to_accumulate=1, update_epochs=2)
    groups = [script.fake(2), script.fake(2, cls, seed=1)]
    _, saved = script.run(groups, 20, **options, **(script.half if cls is Slow else {}))
    assert 0 < max(lags) <= saved["version"] // 20 and len(lags) == 20, lags


def test_actors_wait_for_a_slow_learner(script, monkeypatch):
    """Back-pressure: they begin no rollout beyond the datasets they may be ahead."""
    begun, log = [], script.module.Run.log
    envs = [script.fake(2, seed=seed) for seed in (0, 1)]

    def slow(self, step, metrics):
        time.sleep(0.1)
        begun.append(sum(len(group.actions) for group in envs) * 2)  # rows, the head start of group 1 included
        return log(self, step, metrics)

    monkeypatch.setattr(script.module.Run, "log", slow)
    script.run(envs, 6, num_groups=2, num_batches_to_accumulate=1)
    assert all(rows <= (i + 3) * 64 + 32 for i, rows in enumerate(begun)), begun
    assert sum(len(group.actions) for group in envs) * 2 == 6 * 64 + 32  # and none that no learner will see


def test_groups_start_apart_and_random_play_does_not_count(script):
    """Group g plays num_steps * g random steps first: it books no game and no step of them."""
    groups = [script.fake(), script.fake()]
    metrics, _ = script.run(groups, num_envs=8, num_groups=2, sync=True, **script.double)
    assert [len(group.actions) for group in groups] == [16, 32] and metrics["step"] == 128
    ended = 0
    for group, first in zip(groups, (0, 16), strict=True):
        ended += sum(int((ended | cut).sum()) for _, ended, cut, _ in group.log[first:])
    assert metrics["episode/count"] == ended
    assert min(np.bincount(np.concatenate(groups[1].actions[:16]), minlength=4)) > 4


def test_a_resumed_asynchronous_run_plays_new_games(script, monkeypatch):
    """Emulators that no checkpoint holds must not replay the random numbers of the run's start."""
    streams, seeds, seed = [], [], script.module.stream_seed
    monkeypatch.setattr(script.module, "make_envs", lambda args, split, n: streams.append(split) or script.fake(n))
    monkeypatch.setattr(script.module, "stream_seed", lambda *rest: seeds.append(rest[1]) or seed(*rest))
    _, saved = script.run(None, 2)
    args = dict(saved["args"]) | dict(resume=str(script.path / "run"), total_timesteps=4 * 64)
    script.module.train(script.module.Args(**args))
    actions = [name for name in seeds if "actions" in name]
    assert len(streams) == len(set(streams)) == 2 and len(actions) == len(set(actions)) == 2, (streams, seeds)


def test_groups_take_turns(script):
    """One-threaded, with datasets of a single rollout: each group acts for every other one, over a resume too."""
    groups = [script.fake(2), script.fake(2)]
    _, saved = script.run(groups, 3, num_groups=2, sync=True, **script.half)
    assert [len(group.actions) for group in groups] == [2 * 16, 16 + 16]
    groups = [script.fake(2), script.fake(2)]
    args = dict(saved["args"]) | dict(resume=str(script.path / "run"), total_timesteps=4 * 32)
    script.module.train(script.module.Args(**args), groups)
    assert [len(group.actions) for group in groups] == [0, 16 + 16]


def test_vtrace_gets_its_limits(script, monkeypatch):
    calls, vtrace = [], script.module.vtrace
    monkeypatch.setattr(script.module, "vtrace", lambda *rest: calls.append(rest) or vtrace(*rest))
    more = dict(vtrace=True) if script.switch == "vtrace" else dict(vtrace_lambda=0.6)
    script.run([script.fake()], sync=True, gamma=0.95, rho_bar=0.9, c_bar=0.7, **more)
    expected = (0.95, 0.9, 0.7) + ((0.6,) if "vtrace_lambda" in more else ())
    assert calls and all(rest[5:] == expected for rest in calls)


def test_actor_exception_ends_the_run(script):
    class Broken(FakeVecEnv):
        def step(self, actions):
            if len(self.actions) == 20:
                raise ValueError("the emulator is gone")
            return super().step(actions)

    start = time.perf_counter()
    with pytest.raises(ValueError, match="the emulator is gone"):
        script.run([script.fake(cls=Broken)], 10)
    assert time.perf_counter() - start < 10
    assert not actors()  # an interpreter that exits under one crashes


def test_actor_exception_ends_an_update(script, monkeypatch):
    """A long update does not delay it: it is noticed after the present SGD step."""

    class Broken(FakeVecEnv):
        def step(self, actions):
            if len(self.actions) == 20:
                raise SystemExit(0)  # which must not pass for a clean end either
            return super().step(actions)

    publish, steps = script.module.Published.publish, []

    def slow(self, *rest):
        time.sleep(0.2)
        steps.append(0)
        return publish(self, *rest)

    monkeypatch.setattr(script.module.Published, "publish", slow)
    with pytest.raises(RuntimeError, match="an actor ended"):
        script.run([script.fake(cls=Broken)], 10, update_epochs=50)
    assert len(steps) < 20


def test_stopping_many_hung_actors_takes_one_deadline(script):
    hung = script.module.Rollouts(1, 1, 9)
    threads = [threading.Thread(target=time.sleep, args=(7,), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    start = time.perf_counter()
    hung.stop(threads)
    assert time.perf_counter() - start < 6.5


def test_a_generator_of_another_kind_of_device_is_started_anew(script):
    """--device may change on resume: a CUDA generator's state, 16 bytes, is no CPU one's."""
    _, saved = script.run([script.fake()], sync=True)
    for group in saved["groups"]:
        group["rng"] = torch.zeros(16, dtype=torch.uint8)
    torch.save(saved, script.path / "run" / "checkpoint.pt")
    args = dict(saved["args"]) | dict(resume=str(script.path / "run"), total_timesteps=2 * 64)
    assert script.module.train(script.module.Args(**args), [script.fake()])["step"] == 128


def test_interrupt_leaves_no_actor(script, monkeypatch):
    log = script.module.Run.log

    class SlowLater(FakeVecEnv):
        def step(self, actions):
            time.sleep(0.5 * (len(self.actions) >= 3 * 16))  # in the rollout after the last that is learned
            return super().step(actions)

    def interrupted(self, step, metrics):
        if step == 3 * 64:
            raise KeyboardInterrupt
        return log(self, step, metrics)

    monkeypatch.setattr(script.module.Run, "log", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.run([script.fake(2, SlowLater), script.fake(2, SlowLater)], 10, num_groups=2)
    assert not actors()  # which were amid a step
    assert torch.load(script.path / "run" / "checkpoint.pt", weights_only=True)["step"] == 2 * 64


COMMANDS = {
    "appo_atari": "--env-id Pong --num-envs 4 --num-steps 16 --minibatch-size 32 --num-minibatches 2",
    "impala_procgen": "--env-id leaper --num-envs 4 --num-steps 16 --minibatch-size 32 --channels 4 4 4",
}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_asynchronous_command_stops_and_goes_on(name, tmp_path):
    """As a user starts it: SIGINT ends it with 130, a checkpoint and no process left; --resume goes on to 0."""
    command = [sys.executable, ROOT / f"{name}.py", *COMMANDS[name].split(), "--run-name", "a", "--torch-threads", "1"]
    command += ["--total-timesteps", "100000000", "--eval-episodes", "2"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
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
        envs = [script.fake(cls=Waits, seed=seed) for seed in (0, 1)]
        options = dict(num_envs=8, num_groups=2, minibatch_size=128, update_epochs=8) | changes
        batch = script.run(envs, 16, name, **options)[0]["step"] / 16
        rows = read(script.path / name)[4:-4]  # while the actors still have something to do
        return rows, batch * len(rows) / sum(batch / float(row["time/sps"]) for row in rows), batch

    rows, _, batch = speed("calibrate", sync=True)
    learn = np.median([float(row["time/learn_s"]) for row in rows])
    Waits.pause = learn / (batch / 4)  # batch / 4 steps of 4 environments, one after the other in sync
    ratios = [speed(f"async {i}")[1] / speed(f"sync {i}", sync=True)[1] for i in range(3)]
    print("asynchronous over sync:", ratios)
    assert np.median(ratios) > 1.6
