"""The actors of IMPALA and APPO beside the learner, and what becomes of them when a run ends."""

import copy
import importlib
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import torch

from conftest import NEXT_STEP, ROOT, SAME_STEP, FakeVecEnv, giving, random_episodes, rows, spy_on, timeless

KINDS = {  # `many`: an iteration of 64 rows; `half`: of 32
    "appo_atari": dict(many=dict(num_minibatches=2, minibatch_size=32), half=dict(num_minibatches=1)),
    "impala_procgen": dict(
        many=dict(minibatch_size=64, channels=(4, 4, 4), update_epochs=3, replay_slots=0, replay_proportion=0),
        half=dict(minibatch_size=32),
    ),
}
COMMON = dict(num_envs=4, num_groups=1, num_steps=16, eval_episodes=0, threads=1, device="cpu")
COMMON |= dict(sync=False)


@pytest.fixture(params=list(KINDS))
def script(request, tmp_path):
    module, kind = importlib.import_module(request.param), KINDS[request.param]
    autoreset, shape = (NEXT_STEP, (4, 44, 44)) if request.param == "appo_atari" else (SAME_STEP, (3, 16, 16))

    def fake(num_envs=4, cls=FakeVecEnv, seed=0, episodes=None):
        return cls(episodes or random_episodes(num_envs, seed=seed), autoreset, shape=shape)

    def run(envs, iterations=1, name="run", size=64, saved=None, **changes):
        flags = COMMON | kind["many"] | dict(run_dir=str(tmp_path), run_name=name) | changes
        args = module.Args(**flags | dict(total_timesteps=iterations * size))
        return module.train(args, giving(envs), saved)

    return types.SimpleNamespace(module=module, fake=fake, run=run, path=tmp_path, **kind)


class Slow(FakeVecEnv):
    seconds, fast = 0.02, 0  # a step, after so many fast ones

    def step(self, actions):
        time.sleep(self.seconds * (len(self.actions) >= self.fast))
        return super().step(actions)


def test_sync_runs_are_equal(script):
    """Also with two groups that act at the same time, of which now this one and now that one is slow; no row lags."""
    for name, classes in (("a", (Slow, FakeVecEnv)), ("b", (FakeVecEnv, Slow))):
        envs = [script.fake(2, cls, seed) for seed, cls in enumerate(classes)]
        metrics = script.run(envs, 2, name, num_groups=2, update_epochs=2, sync=True)
        assert metrics["async/policy_lag_max"] == 0
    assert timeless(script.path / "a") == timeless(script.path / "b")


def test_seconds_add_up(script, monkeypatch):
    """Waiting and learning are the iteration, and all of it; the actors' seconds are theirs, and wait for no one."""
    marks = []
    spy_on(monkeypatch, script.module.Run, "log", lambda *_: marks.append(time.perf_counter()))
    metrics = script.run([script.fake(cls=Slow)], 3, sync=True)
    env, policy, wait, learn = (metrics[f"time/{phase}_s"] for phase in ("env", "policy", "wait", "learn"))
    assert env >= 16 * 0.02 and min(policy, learn) > 0
    assert env + policy <= wait
    assert wait + learn == pytest.approx(64 / metrics["time/sps"])
    took, booked = marks[-1] - marks[0], sum(64 / float(row["time/sps"]) for row in rows(script.path / "run")[1:])
    assert 0.5 * took < booked < took


def test_lag_bound(script, monkeypatch):
    """With datasets of a rollout groups take turns; however slow learner or group, no row is older than a dataset."""
    lags = []

    def slow(_, run, metrics):
        lags.append(metrics["async/policy_lag_max"])
        assert 0 <= metrics["async/policy_lag_mean"] <= lags[-1]
        time.sleep(0.02)

    spy_on(monkeypatch, script.module.Run, "log", slow)
    groups = [script.fake(2), script.fake(2, Slow, seed=1)]
    options = dict(num_groups=2, num_batches_to_accumulate=1, update_epochs=2)
    script.run(groups, 8, size=32, **(options | script.half))
    assert 0 < max(lags) <= 2 and len(lags) == 8, lags
    assert [len(group.actions) for group in groups] == [4 * 16, 4 * 16]


def test_a_resumed_run_may_have_other_batches(script):
    """Its steps are then no multiple of a batch; it ends at or below the total (D11), with rollouts for all of them."""
    script.run([script.fake()], size=32, num_steps=8, **script.half)
    metrics = script.run([script.fake()], 2, saved=script.module.load(script.path / "run"))
    assert metrics["step"] == 32 + 64 and metrics["iteration"] == 2


def test_a_published_copy_is_never_written_to(script):
    """An actor in the middle of a step keeps weights of one version, whatever is learned or published meanwhile."""
    agent = torch.nn.Linear(3, 3)
    actors = script.module.Actors([], agent)
    acting, before = actors.agent, agent.weight.detach().clone()
    torch.nn.init.constant_(agent.weight, 7)
    actors.publish(agent)
    assert torch.equal(acting.weight, before) and not acting.weight.requires_grad
    assert (actors.agent.weight == 7).all()


def test_a_step_takes_the_newest_agent(script):
    """Also in the middle of a rollout: here a new one is published in every environment step."""
    envs = script.fake()
    args = script.module.Args(**COMMON | script.many)
    agent = script.module.Agent(envs.single_observation_space.shape, envs.single_action_space.n, args)
    agent.version = 0
    actors = types.SimpleNamespace(agent=agent, stopped=False)
    step = envs.step

    def publishing_step(actions):
        actors.agent = copy.deepcopy(actors.agent)
        actors.agent.version += 1
        return step(actions)

    envs.step = publishing_step
    group = script.module.Group(envs, envs.reset()[0], 0, torch.device("cpu"))
    columns, *_ = script.module.play_rollout(group, actors, 8)
    assert sorted(columns["version"].flatten().tolist()) == [step for step in range(8) for _ in range(4)]


def test_every_sgd_step_is_published(script, monkeypatch):
    """Actors of an overlapping run need not wait for the end of an iteration."""
    published = []
    spy_on(monkeypatch, script.module.Actors, "publish", lambda _, actors, agent: published.append(agent.version))
    script.run([script.fake()], update_epochs=3, sync=True)
    steps = 3 * (2 if script.module.__name__ == "appo_atari" else 1)  # epochs x minibatches
    assert published == list(range(steps + 1))


def test_an_interrupt_ends_actors_within_a_step(script, monkeypatch):
    """Not at the end of their rollouts, which may take minutes; the learner's state is saved before."""
    interrupted = []

    def interrupt(_, run, metrics):
        if metrics["step"] == 2 * 64:
            interrupted.append(time.perf_counter())
            raise KeyboardInterrupt

    spy_on(monkeypatch, script.module.Run, "log", interrupt)
    groups = [script.fake(2, Slow), script.fake(2, Slow)]
    for group in groups:
        group.seconds = 0.5
        group.fast = 2 * 16  # until the rollout after the last that is learned
    threads = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        script.run(groups, 10, num_groups=2)
    assert time.perf_counter() - interrupted[0] < 6  # a rollout takes 8
    left = [thread for thread in threading.enumerate() if thread not in threads and thread.name != "tqdm_monitor"]
    for thread in left:
        thread.join(5)
    assert not any(thread.is_alive() for thread in left) and all(group.closed for group in groups)
    assert torch.load(script.path / "run" / "checkpoint.pt", weights_only=True)["step"] == 2 * 64


def test_stop_gives_up_after_three_seconds(script):
    """It closes the environments of the threads that are idle, and leaves the one that hangs alone."""
    release, groups = threading.Event(), []
    for _ in range(2):
        envs = script.fake()
        groups.append(script.module.Group(envs, envs.reset()[0], 0, torch.device("cpu")))
    groups[0].thread.apply_async(release.wait)
    actors = script.module.Actors(groups, torch.nn.Linear(3, 3))
    start = time.perf_counter()
    actors.stop()
    assert 2.9 < time.perf_counter() - start < 20
    assert [group.envs.closed for group in groups] == [False, True]
    release.set()


def test_an_environments_exception_ends_the_run(script):
    """The learner raises what an actor raised, instead of waiting for its rollout."""

    class Broken(FakeVecEnv):
        def step(self, actions):
            if len(self.actions) == 20:
                raise ZeroDivisionError("of the environment")
            return super().step(actions)

    with pytest.raises(ZeroDivisionError, match="of the environment"):
        script.run([script.fake(cls=Broken)], 3)


HANGING = """
import signal, sys, time
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import {name} as script
from conftest import *
signal.signal(signal.SIGINT, script.interrupt)

class Hanging(FakeVecEnv):
    def step(self, actions):
        if len(self.actions) == 20:
            print("hanging", flush=True)
            while True:
                time.sleep(60)
        return super().step(actions)

def make_envs(args, num_envs, seed, test=False):
    return Hanging(random_episodes(num_envs), AutoresetMode({autoreset!r}), shape={shape!r})

sys.exit(script.main(make_envs=make_envs))
"""


def test_an_environment_that_never_returns_does_not_keep_python(script):
    """After two Ctrl-C the learner is saved and Python exits; on a free CPU within 5 seconds (D10)."""
    envs = script.fake()
    autoreset = envs.metadata["autoreset_mode"].value
    code = HANGING.format(root=str(ROOT), name=script.module.__name__, autoreset=autoreset, shape=envs.shape)
    options = COMMON | script.many | dict(run_dir=str(script.path), run_name="run", total_timesteps=640)
    flags = []
    for name, value in options.items():
        words = value if isinstance(value, tuple) else () if isinstance(value, bool) else (value,)
        flag = f"--{'no-' if value is False else ''}{name}".replace("_", "-")
        flags += [flag, *map(str, words)]
    command = [sys.executable, "-c", code, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        waited = {"hanging", "step"}  # the learner is done with the first batch
        while waited:
            waited -= {process.stdout.readline().split()[0]}
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        try:
            process.wait(60)  # with the defect it never exits
        finally:
            process.kill()
        assert process.returncode == 130, process.stderr.read()
    assert torch.load(script.path / "run" / "checkpoint.pt", weights_only=True)["step"] == 64
