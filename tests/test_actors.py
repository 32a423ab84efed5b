"""The actors of IMPALA and APPO beside the learner, and what becomes of them when a run ends."""

import copy
import signal
import subprocess
import sys
import time
import types

import pytest
import torch

from conftest import ITERATION, KINDS, ROOT, FakeVecEnv, rows, spy_on

HALF = {  # batches of 32 rows, each of which is learned as often as it is said
    "appo_atari": dict(num_minibatches=1),
    "impala_procgen": dict(minibatch_size=32, replay_proportion=0),
}
both = pytest.mark.parametrize("script", HALF, indirect=True)
one = pytest.mark.parametrize("script", ["impala_procgen"], indirect=True)  # of what is one text in both


class Slow(FakeVecEnv):
    seconds, fast = 0.02, 0  # a step, after so many fast ones

    def step(self, actions):
        time.sleep(self.seconds * (len(self.actions) >= self.fast))
        return super().step(actions)


@both
def test_seconds_add_up(script, monkeypatch):
    """Waiting and learning are the iteration; the actors' seconds are part of the waiting, and no row lags (--sync)."""
    marks = []
    spy_on(monkeypatch, script.module.Run, "log", lambda *_: marks.append(time.perf_counter()))
    metrics = script.train(script.fake(cls=Slow), 3)
    env, policy, wait, learn = (metrics[f"time/{phase}_s"] for phase in ("env", "policy", "wait", "learn"))
    assert env >= 16 * 0.02 and min(policy, learn) > 0
    assert env + policy <= wait and metrics["async/policy_lag_max"] == 0
    assert wait + learn == pytest.approx(ITERATION / metrics["time/sps"])
    took, booked = marks[-1] - marks[0], sum(ITERATION / float(row["time/sps"]) for row in rows(script.folder)[1:])
    assert 0.5 * took < booked < took


@both
def test_lag_bound(script, monkeypatch):
    """With datasets of a rollout groups take turns; however slow learner or group, no row is older than a dataset."""
    lags = []

    def slow(_, run, metrics):
        lags.append(metrics["async/policy_lag_max"])
        assert 0 <= metrics["async/policy_lag_mean"] <= lags[-1]
        time.sleep(0.02)

    spy_on(monkeypatch, script.module.Run, "log", slow)
    groups = [script.fake(2), script.fake(2, Slow, seed=1)]
    options = dict(num_groups=2, num_batches_to_accumulate=1, update_epochs=2, sync=False)
    script.train(groups, 4, **options, **HALF[script.name])
    assert 0 < max(lags) <= 2 and len(lags) == 8, lags
    assert [len(group.actions) for group in groups] == [4 * 16, 4 * 16]


@both
def test_a_resumed_run_may_have_other_batches(script):
    """Its steps are then no multiple of a batch; it ends at or below the total, with rollouts for all of them."""
    script.train(script.fake(), total_timesteps=32, num_steps=8, **HALF[script.name])
    saved = script.module.load(script.folder)
    metrics = script.train(script.fake(), 2, saved)
    assert metrics["step"] == 32 + 64 and metrics["iteration"] == 2


@one
def test_a_published_copy_is_never_written_to(script):
    """An actor in the middle of a step keeps weights of one version, whatever is learned or published meanwhile."""
    agent = torch.nn.Linear(3, 3)
    actors = script.module.Actors([], agent)
    acting, before = actors.agent, agent.weight.detach().clone()
    torch.nn.init.constant_(agent.weight, 7)
    actors.publish(agent)
    assert torch.equal(acting.weight, before) and not acting.weight.requires_grad
    assert (actors.agent.weight == 7).all()


@both
def test_a_step_takes_the_newest_agent(script):
    """Also in the middle of a rollout: here a new one is published in every environment step."""
    envs = script.fake()
    agent = script.module.Agent(script.shape, 4, script.module.Args())
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


@both
def test_every_sgd_step_is_published(script, monkeypatch):
    """Actors of an overlapping run need not wait for the end of an iteration."""
    published = []
    spy_on(monkeypatch, script.module.Actors, "publish", lambda _, actors, agent: published.append(agent.version))
    no_replay = dict(replay_proportion=0) if script.name == "impala_procgen" else {}
    script.train(script.fake(), update_epochs=3, **no_replay)
    steps = 3 * (2 if script.name == "appo_atari" else 1)  # epochs x minibatches
    assert published == list(range(steps + 1))


@both
def test_an_interrupt_ends_actors_within_a_step(script, monkeypatch):
    """Not at the end of their rollouts, which may take minutes; the learner's state is saved before."""

    def interrupt(_, run, metrics):
        if metrics["step"] == 2 * ITERATION:
            raise KeyboardInterrupt

    spy_on(monkeypatch, script.module.Run, "log", interrupt)
    groups = [script.fake(2, Slow), script.fake(2, Slow)]
    for group in groups:
        group.seconds = 0.5
        group.fast = 2 * 16  # until the rollout after the last that is learned
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        script.train(groups, 10, num_groups=2, sync=False)
    assert time.perf_counter() - start < 6 and all(group.closed for group in groups)  # a rollout takes 8 seconds
    assert torch.load(script.folder / "checkpoint.pt", weights_only=True)["step"] == 2 * ITERATION


HANGING = f"""
import signal, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import impala_procgen
from conftest import SAME_STEP, FakeVecEnv, random_episodes
signal.signal(signal.SIGINT, impala_procgen.interrupt)

class Hanging(FakeVecEnv):
    def step(self, actions):
        if len(self.actions) == 20:
            print("hanging", flush=True)
            while True:
                time.sleep(60)
        return super().step(actions)

def make_envs(args, num_envs, seed, test=False):
    return Hanging(random_episodes(num_envs), SAME_STEP)

sys.exit(impala_procgen.main(make_envs=make_envs))
"""


@one
def test_an_environment_that_never_returns_does_not_keep_python(script):
    """After two Ctrl-C the learner is saved and Python exits."""
    flags = [*KINDS[script.name].split(), *"--num-groups 1 --no-sync --run-name a --total-timesteps 640".split()]
    command = [sys.executable, "-c", HANGING, *flags]
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
    assert torch.load(script.folder / "checkpoint.pt", weights_only=True)["step"] == ITERATION
