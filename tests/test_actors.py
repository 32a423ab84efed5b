"""The actors of IMPALA and APPO beside the learner, and what becomes of them when a run ends."""

import importlib
import threading
import time
import types

import appo_atari
import numpy as np
import pytest
import torch

from conftest import NEXT_STEP, SAME_STEP, FakeVecEnv, random_episodes, rows, spy_on, timeless

KINDS = {  # `many`: an iteration of 64 rows; `half`: of 32
    "appo_atari": dict(many=dict(num_minibatches=2, minibatch_size=32), half=dict(num_minibatches=1)),
    "impala_procgen": dict(
        many=dict(minibatch_size=64, channels=(4, 4, 4), update_epochs=3, replay_slots=0, replay_proportion=0),
        half=dict(minibatch_size=32),
    ),
}
COMMON = dict(num_envs=4, num_groups=1, num_steps=16, eval_episodes=0, quiet=True, torch_threads=1, device="cpu")
COMMON |= dict(sync=False)


@pytest.fixture(params=list(KINDS))
def script(request, tmp_path):
    module, kind = importlib.import_module(request.param), KINDS[request.param]
    autoreset, shape = (NEXT_STEP, (4, 44, 44)) if request.param == "appo_atari" else (SAME_STEP, (3, 16, 16))

    def fake(num_envs=4, cls=FakeVecEnv, seed=0, episodes=None):
        return cls(episodes or random_episodes(num_envs, seed=seed), autoreset, shape=shape)

    def run(envs, iterations=1, name="run", size=64, **changes):
        args = module.Args(**(COMMON | kind["many"] | dict(run_dir=str(tmp_path), run_name=name) | changes))
        args.total_timesteps = iterations * size
        return module.train(args, envs)

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
    spy_on(monkeypatch, script.module.Logger, "log", lambda *_: marks.append(time.perf_counter()))
    metrics = script.run([script.fake(cls=Slow)], 3, sync=True)
    env, policy, wait, learn = (metrics[f"time/{phase}_s"] for phase in ("env", "policy", "queue_wait", "learn"))
    assert env >= 16 * 0.02 and min(policy, learn) > 0
    assert env + policy <= wait
    assert wait + learn == pytest.approx(64 / metrics["time/sps"])
    took, booked = marks[-1] - marks[0], sum(64 / float(row["time/sps"]) for row in rows(script.path / "run")[1:])
    assert 0.5 * took < booked < took


def test_lag_bound(script, monkeypatch):
    """With datasets of a rollout groups take turns; however slow learner or group, no row is older than a dataset."""
    lags = []

    def slow(metrics, *_):
        lags.append(metrics["async/policy_lag_max"])
        assert 0 <= metrics["async/policy_lag_mean"] <= lags[-1]
        time.sleep(0.02)

    spy_on(monkeypatch, script.module.Logger, "log", slow)
    groups = [script.fake(2), script.fake(2, Slow, seed=1)]
    options = dict(num_groups=2, num_batches_to_accumulate=1, update_epochs=2)
    script.run(groups, 8, size=32, **(options | script.half))
    assert 0 < max(lags) <= 2 and len(lags) == 8, lags
    assert [len(group.actions) for group in groups] == [4 * 16, 16 + 4 * 16]


def test_the_head_start_counts_nowhere(script):
    """Group g plays num_steps * g random steps first: no step, reward or game of them is in any metric."""
    game = ([1.0] * 20, "terminated")  # in group 1 four steps after the head start it is over
    groups = [script.fake(episodes=[[game]] * 2) for _ in range(2)]
    metrics = script.run(groups, num_groups=2, sync=True)
    assert [len(group.actions) for group in groups] == [16, 32] and metrics["step"] == 64
    assert min(np.bincount(np.concatenate(groups[1].actions[:16]), minlength=4)) > 3
    assert metrics["episode/count"] == 2 and metrics["episode/return"] == metrics["episode/length"] == 4


def test_a_resumed_run_may_have_other_batches(script):
    """Its steps are then no multiple of a batch, and its last iteration needs rollouts like any other."""
    script.run([script.fake()], size=32, num_steps=8, **script.half)
    metrics = script.run([script.fake()], 2, resume=str(script.path / "run"))
    assert metrics["step"] == 32 + 2 * 64


def test_a_published_copy_is_never_written_to():
    """An actor in the middle of a step keeps weights of one version, whatever is learned or published meanwhile."""
    agent = torch.nn.Linear(3, 3)
    actors = appo_atari.Actors([None], agent, None, 16, size=1, ahead=1, num_rollouts=2)
    acting, before = actors.agent, agent.weight.detach().clone()
    torch.nn.init.constant_(agent.weight, 7)
    actors.publish(agent)
    assert torch.equal(acting.weight, before) and not acting.weight.requires_grad
    assert (actors.agent.weight == 7).all()


def test_an_interrupt_ends_actors_within_a_step(script, monkeypatch):
    """Not at the end of their rollouts, which may take minutes; the learner's state is saved before."""
    interrupted = []

    def interrupt(metrics, *_):
        if metrics["step"] == 2 * 64:
            interrupted.append(time.perf_counter())
            raise KeyboardInterrupt

    spy_on(monkeypatch, script.module.Logger, "log", interrupt)
    groups = [script.fake(2, Slow), script.fake(2, Slow)]
    for g, group in enumerate(groups):
        group.seconds = 0.5
        group.fast = (2 + g) * 16  # until the rollout after the last that is learned; group 1 has a head start
    with pytest.raises(KeyboardInterrupt):
        script.run(groups, 10, num_groups=2)
    assert time.perf_counter() - interrupted[0] < 4  # a rollout takes 8
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
    assert torch.load(script.path / "run" / "checkpoint.pt", weights_only=True)["step"] == 64
