"""The actors of the asynchronous scripts beside the learner, and what becomes of them when a run ends."""

import importlib
import threading
import time
import types

import appo_atari
import numpy as np
import pytest
import torch

from conftest import NEXT_STEP, SAME_STEP, FakeVecEnv, random_episodes, timeless

KINDS = {  # `many`: an iteration of 64 rows; `half`: of 32
    "appo_atari": dict(
        shape=(4, 44, 44),
        autoreset=NEXT_STEP,
        many=dict(num_minibatches=2, minibatch_size=32),
        half=dict(num_minibatches=1),
    ),
    "impala_procgen": dict(
        shape=(3, 16, 16),
        autoreset=SAME_STEP,
        many=dict(minibatch_size=64, channels=(4, 4, 4), update_epochs=3, replay_slots=0, replay_proportion=0),
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

    return types.SimpleNamespace(module=module, fake=fake, run=run, path=tmp_path, **kind)


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
        metrics = script.run(envs, 2, name, num_groups=2, update_epochs=2, sync=True)
        assert metrics["async/policy_lag_max"] == 0
    assert timeless(script.path / "a") == timeless(script.path / "b")


def test_seconds_add_up(script):
    """Waiting and learning are the iteration; the actors' seconds are theirs, and wait for no one."""
    metrics = script.run([script.fake(cls=Slow)], sync=True)
    env, policy, wait, learn = (metrics[f"time/{phase}_s"] for phase in ("env", "policy", "queue_wait", "learn"))
    assert env >= 16 * 0.02 and min(policy, learn) > 0
    assert env + policy <= wait
    assert wait + learn == pytest.approx(64 / metrics["time/sps"])


def test_lag_bound(script, monkeypatch):
    """With datasets of a rollout groups take turns; however slow learner or group, no row is older than a dataset."""
    lags = []

    def slow(metrics):
        lags.append(metrics["async/policy_lag_max"])
        assert 0 <= metrics["async/policy_lag_mean"] <= lags[-1]
        time.sleep(0.02)

    in_log(monkeypatch, script, slow)
    groups = [script.fake(2), script.fake(2, Slow, seed=1)]
    options = dict(num_groups=2, num_batches_to_accumulate=1, update_epochs=2)
    script.run(groups, 8, size=32, **(options | script.half))
    assert 0 < max(lags) <= 2 and len(lags) == 8, lags
    assert [len(group.actions) for group in groups] == [4 * 16, 16 + 4 * 16]


def test_actors_wait_for_a_slow_learner(script, monkeypatch):
    """Back-pressure: they begin no rollout beyond the datasets they may be ahead, and none that no learner will see."""
    begun = []
    envs = [script.fake(2, seed=seed) for seed in (0, 1)]

    def slow(metrics):
        time.sleep(0.1)
        begun.append(sum(len(group.actions) for group in envs) * 2)  # rows, the head start of group 1 included

    in_log(monkeypatch, script, slow)
    script.run(envs, 4, num_groups=2, num_batches_to_accumulate=1)
    assert all(rows <= (i + 2) * 64 + 32 for i, rows in enumerate(begun)), begun
    assert begun[0] == 2 * 64 + 32  # they do go ahead
    assert sum(len(group.actions) for group in envs) * 2 == 4 * 64 + 32


def test_the_head_start_counts_nowhere(script):
    """Group g plays num_steps * g random steps first: no step, reward or game of them is in any metric."""
    groups = [script.fake(2, seed=seed) for seed in (0, 1)]
    metrics = script.run(groups, num_groups=2, sync=True)
    assert [len(group.actions) for group in groups] == [16, 32] and metrics["step"] == 64
    assert min(np.bincount(np.concatenate(groups[1].actions[:16]), minlength=4)) > 3
    returns, lengths = [], []
    for group, first in zip(groups, (0, 16), strict=True):
        total, length = np.zeros(2), np.zeros(2)
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


def test_a_resumed_run_may_have_other_batches(script):
    """Its steps are then no multiple of a batch, and its last iteration needs rollouts like any other."""
    script.run([script.fake()], size=32, num_steps=8, **script.half)
    metrics = script.run([script.fake()], 2, resume=str(script.path / "run"))
    assert metrics["step"] == 32 + 2 * 64


def test_a_published_copy_is_never_written_to():
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
    actors = appo_atari.Actors([None], agent, rollout, 1000, size=1, ahead=1, num_rollouts=2)
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


def test_an_interrupt_ends_actors_within_a_step(script, monkeypatch):
    """Not at the end of their rollouts, which may take minutes; the learner's state is saved before."""
    interrupted = []

    class SlowLater(FakeVecEnv):
        def step(self, actions):
            time.sleep(0.5 * (len(self.actions) >= self.fast))
            return super().step(actions)

    def interrupt(metrics):
        if metrics["step"] == 2 * 64:
            interrupted.append(time.perf_counter())
            raise KeyboardInterrupt

    in_log(monkeypatch, script, interrupt)
    groups = [script.fake(2, SlowLater), script.fake(2, SlowLater)]
    for g, group in enumerate(groups):
        group.fast = (2 + g) * 16  # until the rollout after the last that is learned; group 1 has a head start
    with pytest.raises(KeyboardInterrupt):
        script.run(groups, 10, num_groups=2)
    assert time.perf_counter() - interrupted[0] < 4  # a rollout takes 8
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
    assert torch.load(script.path / "run" / "checkpoint.pt", weights_only=True)["step"] == 64
