"""The fake env and the real ones obey the same contract, so that what is tested on the fake holds on the real."""

import appo_atari
import numpy as np
import ppo_procgen
import pytest

from conftest import NEXT_STEP, SAME_STEP, FakeVecEnv, random_episodes


def breakout(num_envs, **changes):
    return appo_atari.make_envs(appo_atari.Args(env_id="Breakout", **changes), num_envs, "training")


def procgen(env_id="leaper", num_envs=4, stream="training", **changes):
    return ppo_procgen.make_envs(ppo_procgen.Args(env_id=env_id, **changes), num_envs, stream)


MAKERS = {
    "fake next-step": lambda: FakeVecEnv(random_episodes(4), NEXT_STEP),
    "fake same-step": lambda: FakeVecEnv(random_episodes(4), SAME_STEP),
    "envpool": lambda: breakout(4, max_episode_steps=60),
    "procgen": procgen,
}


@pytest.mark.parametrize("maker", MAKERS)
def test_env_contract(maker):
    envs, rng = MAKERS[maker](), np.random.default_rng(0)
    n, shape, num_actions = envs.num_envs, envs.single_observation_space.shape, envs.single_action_space.n
    obs, _ = envs.reset()
    assert obs.shape == (n, *shape) and obs.dtype == np.uint8 and len(shape) == 3
    next_step = maker in ("fake next-step", "envpool")
    assert envs.metadata["autoreset_mode"] == (NEXT_STEP if next_step else SAME_STEP)
    ends, over = 0, np.zeros(n, bool)
    for _ in range(300):
        obs, reward, ended, cut, info = envs.step(rng.integers(num_actions, size=n))
        assert obs.shape == (n, *shape) and obs.dtype == np.uint8
        assert reward.dtype == np.float32 and reward.shape == (n,)
        assert ended.dtype == cut.dtype == np.bool_ and isinstance(info, dict)
        if next_step:  # the step after an end pays nothing and ends nothing: it is the reset
            assert not reward[over].any() and not (ended | cut)[over].any()
            assert info["elapsed_step"].dtype == info["lives"].dtype == info["terminated"].dtype == np.int32
        over = ended | cut
        ends += over.sum()
    assert ends >= 8


def test_life_loss_wasted_row():
    """EnvPool's dummy row follows a lost life too, where elapsed_step does not go back to 0."""
    envs, losses = breakout(2), 0
    envs.reset()
    over = np.zeros(2, bool)
    for step in range(200):
        _, reward, ended, cut, info = envs.step(np.full(2, 1 + step % 3))
        for env in np.flatnonzero(over):
            losses += not info["terminated"][env] and info["elapsed_step"][env] > 0
            assert reward[env] == 0 and not ended[env]
        over = ended | cut
    assert losses > 0


def test_procgen_stack_and_reset():
    """The gap stack shows frames t-3 and t; an end fills it with the new game's first frame."""
    single, gap, full = (procgen("bigfish", stack=stack) for stack in ("none", "gap", "full"))
    assert gap.single_observation_space.shape == (6, 64, 64) and full.single_observation_space.shape == (12, 64, 64)
    history = [single.reset()[0]] * 4
    assert (gap.reset()[0] == np.concatenate([history[0]] * 2, 1)).all()
    rng, ends = np.random.default_rng(1), 0
    for _ in range(150):
        action = rng.integers(15, size=4)
        frame, _, first, _, _ = single.step(action)
        _, now, _ = single.unwrapped.env.observe()
        assert (frame == now["rgb"].transpose(0, 3, 1, 2)).all()
        history = [*history[1:], frame]
        history = [np.where(first[:, None, None, None], frame, old) for old in history]
        ends += first.sum()
        assert (gap.step(action)[0] == np.concatenate([history[0], history[3]], 1)).all()
        assert (full.step(action)[0] == np.concatenate(history, 1)).all()
    assert ends > 3


def level_seeds(steps=200, **changes):
    envs, rng, seeds = procgen(**changes), np.random.default_rng(0), set()
    for _ in range(steps):
        envs.step(rng.integers(15, size=envs.num_envs))
        seeds |= {info["level_seed"] for info in envs.unwrapped.env.get_info()}
    return seeds


def test_level_seeds_in_range():
    args = dict(num_levels=3, start_level=100)
    assert level_seeds(**args) == level_seeds(**args, stream="train") == {100, 101, 102}
    test = level_seeds(**args, stream="test")
    assert len(test) > 8 and not test & {100, 101, 102}


def test_seed_streams_disjoint():
    """Runs of neighbouring seeds, and training and evaluation of one run, play other levels; equal seeds the same."""
    names = ((1, "training"), (2, "training"), (1, "test"))
    streams = [level_seeds(seed=seed, stream=stream) for seed, stream in names]
    assert len(set.union(*streams)) == sum(map(len, streams)) > 20
    assert level_seeds(seed=1) == streams[0]
