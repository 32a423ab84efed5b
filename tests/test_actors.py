"""The actors of IMPALA and APPO beside the learner, and what becomes of them when a run ends."""

import threading
import time
import types

import pytest
import torch

from conftest import ITERATION, FakeVecEnv, rows, spy_on

HALF = {  # batches of 32 rows, each of which is learned as often as it is said
    "appo_atari": dict(num_minibatches=1),
    "impala_procgen": dict(minibatch_size=32, replay_proportion=0),
}
both = pytest.mark.parametrize("script", HALF, indirect=True)


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
def test_nobody_plays_while_the_first_datasets_are_learned(script, monkeypatch):
    """Then --compile records the learner's CUDA graphs; later datasets overlap."""
    groups = [script.fake(2, Slow), script.fake(2, Slow, seed=1)]  # so that it takes longer than the pause
    groups[0].seconds = 0.04  # it would still play while the second dataset is learned
    played, learn = [], script.module.learn

    def steps():
        return sum(len(group.actions) for group in groups)

    def note(*inputs):
        start = steps()
        time.sleep(0.1)
        played.append(steps() - start)
        return learn(*inputs)

    monkeypatch.setattr(script.module, "learn", note)
    options = dict(num_groups=2, num_batches_to_accumulate=1, sync=False)
    script.train(groups, 4, **options, **HALF[script.name])
    assert played[:2] == [0, 0] and 0 < max(played)


@both
def test_each_thread_acts_twice_before_anyone_plays(script, monkeypatch):
    """One at a time, from tensors as in a rollout: the policy's CUDA graph is recorded by then."""
    calls, layouts = [], set()

    def policy(agent, obs, noise):
        busy.acquire(blocking=False) or calls.append("together")
        time.sleep(0.01)
        busy.release()
        calls.append(threading.current_thread())
        layouts.add((obs.shape, obs.stride(), noise.shape))
        return script.module.act(agent, obs, noise)

    busy = threading.Lock()
    groups = [script.fake(2), script.fake(2, seed=1)]
    actors = actors_of(script, policy, *groups)[0]
    monkeypatch.setattr(script.module, "play_rollout", lambda *_: calls.append("rollout"))
    next(actors.datasets(2, 1, 0, 1))
    assert len(calls) == 5 and len(set(calls[:4])) == 2 and calls[4] == "rollout"
    monkeypatch.undo()
    script.module.play_rollout(actors.groups[0], actors, 2)
    assert len(layouts) == 1


@both
def test_a_resumed_run_may_have_other_batches(script):
    """Its steps are then no multiple of a batch; it ends at or below the total, with rollouts for all of them."""
    script.train(script.fake(), total_timesteps=32, num_steps=8, **HALF[script.name])
    saved = script.module.load(script.folder)
    metrics = script.train(script.fake(), 2, saved)
    assert metrics["step"] == 32 + 64 and metrics["iteration"] == 2


def actors_of(script, policy, *more):
    """Actors of one group of fake environments, or of several, and the learner's agent."""
    agent = script.module.Agent(script.shape, 4, script.module.Args())
    agent.version = 0
    groups = []
    for envs in more or [script.fake()]:
        groups.append(script.module.Group(envs, envs.reset()[0], 0, torch.device("cpu")))
    return script.module.Actors(groups, agent, policy), agent


@both
def test_a_step_has_weights_of_one_version(script):
    """What is published while an actor acts waits for the end of its forward pass."""
    publishing = []

    def policy(acting, obs, noise):
        before = acting.version, acting.policy.weight.clone()
        agent.version += 1
        torch.nn.init.constant_(agent.policy.weight, agent.version)
        publishing.append(threading.Thread(target=actors.publish, args=(agent,)))
        publishing[-1].start()
        publishing[-1].join(0.05)
        assert acting.version == before[0] and torch.equal(acting.policy.weight, before[1])
        return script.module.act(acting, obs, noise)

    actors, agent = actors_of(script, script.module.act)
    actors.policy = policy
    script.module.play_rollout(actors.groups[0], actors, 2)
    for thread in publishing:
        thread.join()
    assert actors.agent.version == 2 and (actors.agent.policy.weight == 2).all()
    assert not actors.agent.policy.weight.requires_grad and agent.policy.weight.requires_grad


@both
def test_a_step_takes_the_newest_agent(script):
    """Also in the middle of a rollout: here new weights are published in every environment step."""
    actors, agent = actors_of(script, script.module.act)
    envs = actors.groups[0].envs
    step = envs.step

    def publishing_step(actions):
        agent.version += 1
        actors.publish(agent)
        return step(actions)

    envs.step = publishing_step
    columns, *_ = script.module.play_rollout(actors.groups[0], actors, 8)
    assert sorted(columns["version"].flatten().tolist()) == [step for step in range(8) for _ in range(4)]


@both
def test_few_sgd_steps_are_queued_on_a_gpu(script):
    """Actors wait behind them: before it queues another, the learner waits for the last but one."""
    actors, agent = actors_of(script, script.module.act)
    calls = []
    event = dict(synchronize=lambda: calls.append("wait for the last"), record=lambda: calls.append("new"))
    actors.published = types.SimpleNamespace(**event)
    actors.publish(agent)
    assert calls == ["wait for the last", "new"]


@both
def test_every_sgd_step_is_published(script, monkeypatch):
    """Actors of an overlapping run need not wait for the end of an iteration."""
    published = []
    spy_on(monkeypatch, script.module.Actors, "publish", lambda _, actors, agent: published.append(agent.version))
    no_replay = dict(replay_proportion=0) if script.name == "impala_procgen" else {}
    script.train(script.fake(), update_epochs=3, **no_replay)
    steps = 3 * (2 if script.name == "appo_atari" else 1)  # epochs x minibatches
    assert published == list(range(1, steps + 1))


@both
def test_an_interrupt_ends_actors_within_a_step(script, monkeypatch):
    """Not at the end of their rollouts. An environment that hangs is given up; the learner's state is saved before."""

    def interrupt(_, run, metrics):
        if metrics["step"] == 3 * ITERATION:
            raise KeyboardInterrupt

    spy_on(monkeypatch, script.module.Run, "log", interrupt)
    slow, hanging = script.fake(2, Slow), script.fake(2, Slow)
    slow.seconds, hanging.seconds = 1, 20
    slow.fast = hanging.fast = 3 * 16  # until the rollout after the last that is learned
    before, start = set(threading.enumerate()), time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        script.train([slow, hanging], 10, num_groups=2, sync=False)
    assert time.perf_counter() - start < 12  # a rollout of the slow one takes 16 seconds
    assert slow.closed and not hanging.closed
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)  # others would keep Python
    assert torch.load(script.folder / "checkpoint.pt", weights_only=True)["step"] == 3 * ITERATION
