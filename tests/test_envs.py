"""The fake env and the real ones obey the same contract, so that what is tested on the fake holds on the real."""

import ast
import json
import re
import subprocess
import sys

import appo_atari
import numpy as np
import ppo_procgen
import pytest

import procgen_reference
from conftest import NEXT_STEP, ROOT, SAME_STEP, FakeVecEnv, random_episodes, spy_on


def breakout(num_envs, **changes):
    return appo_atari.make_envs(appo_atari.Args(env_id="Breakout", **changes), num_envs, seed=1)


TRAINING = ppo_procgen.stream_seed(1, "training")


def procgen(env_id="leaper", num_envs=4, seed=TRAINING, test=False, **changes):
    return ppo_procgen.make_envs(ppo_procgen.Args(env_id=env_id, **changes), num_envs, seed, test)


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
    ends, lives_lost, over = 0, 0, np.zeros(n, bool)
    for _ in range(300):
        obs, reward, ended, cut, info = envs.step(rng.integers(num_actions, size=n))
        assert obs.shape == (n, *shape) and obs.dtype == np.uint8
        assert reward.dtype == np.float32 and reward.shape == (n,)
        assert ended.dtype == cut.dtype == np.bool_ and isinstance(info, dict)
        if next_step:  # the step after an end pays nothing and ends nothing: it is the reset
            assert not reward[over].any() and not (ended | cut)[over].any()
            assert info["elapsed_step"].dtype == info["lives"].dtype == info["terminated"].dtype == np.int32
            lives_lost += (over & (info["elapsed_step"] > 0)).sum()
        over = ended | cut
        ends += over.sum()
    assert ends >= 8
    assert lives_lost > 0 or maker != "envpool"  # the row after a lost life is a reset, too


def test_procgen_stack_and_reset():
    """The gap stack shows frames t-3 and t; an end fills it with the next episode's first frame."""
    single, gap, full = (procgen("bigfish", stack=stack) for stack in ("none", "gap", "full"))
    assert gap.single_observation_space.shape == (6, 64, 64) and full.single_observation_space.shape == (12, 64, 64)
    history = [single.reset()[0]] * 4
    full.reset()
    assert (gap.reset()[0] == np.concatenate([history[0]] * 2, 1)).all()
    rng, ends = np.random.default_rng(1), 0
    for _ in range(150):
        action = rng.integers(15, size=4)
        frame, _, ended, cut, _ = single.step(action)
        history = [*history[1:], frame]
        history = [np.where((ended | cut)[:, None, None, None], frame, old) for old in history]
        ends += ended.sum()
        assert (gap.step(action)[0] == np.concatenate([history[0], history[3]], 1)).all()
        assert (full.step(action)[0] == np.concatenate(history, 1)).all()
    assert ends > 3


def exploration_levels():
    """LEVELS of snd_procgen.py, which would change the scripts if it was imported."""
    text = (ROOT / "benchmark" / "variants" / "snd_procgen.py").read_text()
    return ast.literal_eval(re.search(r"(?s)^LEVELS = ({.*?^})", text, re.M)[1])


def played(game, mode, num_levels):
    """Rewards (T, N), ends (T, N), frames (T + 1, N, 64, 64, 3) of the script's environments."""
    options = dict(env_id=game, distribution_mode=mode, num_levels=num_levels, stack="none", threads=1)
    if mode == "exploration":  # as benchmark/variants/snd_procgen.py makes it
        options |= dict(distribution_mode="hard", num_levels=1, start_level=exploration_levels()[game])
    envs = ppo_procgen.make_envs(ppo_procgen.Args(**options), procgen_reference.NUM_ENVS, TRAINING)
    rewards, ends, frames = [], [], [envs.reset()[0]]
    for action in procgen_reference.ACTIONS:
        obs, reward, ended, cut, _ = envs.step(action)
        rewards.append(reward)
        ends.append(ended | cut)
        frames.append(obs)
    envs.close()
    return np.array(rewards), np.array(ends), np.array(frames).transpose(0, 1, 3, 4, 2)


FEW_PIXELS = "bossfight caveflyer climber coinrun jumper ninja".split()  # differ: another Qt draws edges
REFERENCE = json.loads((ROOT / "tests" / "procgen_reference.json").read_text())


def same_play(setting):
    """Whether rewards, ends and frames are those of OpenAI's package, which procgen_reference.py has recorded."""
    compared = 2 if setting[0] in FEW_PIXELS else 3
    digests = [procgen_reference.digest(x) for x in played(*setting)[:compared]]
    return digests == REFERENCE["-".join(map(str, setting))][:compared]


@pytest.mark.parametrize("game", procgen_reference.GAMES)
def test_procgen_equals_the_procgen_package(game):
    """In each difficulty, with unlimited levels and with 200; all settings of a game with --slow."""
    assert TRAINING == procgen_reference.RAND_SEED
    assert same_play((game, "easy", 0)) and same_play((game, "hard", 200))


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the procgen package has no wheel for Python 3.13")
def test_procgen_equals_the_procgen_package_now(tmp_path):
    """Its record is what it plays; where frames differ, it is in at most 0.13 % of the pixels (exploration: 0.3 %)."""
    python = tmp_path / "venv" / "bin" / "python"
    tests = ROOT / "tests"
    (tmp_path / "frames").mkdir()
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "-r", tests / "requirements-procgen.txt"], check=True)
    command = [python, tests / "procgen_reference.py", tmp_path / "record.json", tmp_path / "frames"]
    subprocess.run(command, check=True)
    assert (tmp_path / "record.json").read_text() == (tests / "procgen_reference.json").read_text()
    for setting in procgen_reference.SETTINGS:
        assert same_play(setting), setting
        frames = np.load(tmp_path / "frames" / f"{'-'.join(map(str, setting))}.npy")
        differ = (played(*setting)[2] != frames).any(-1)
        few = 0.003 if setting[1] == "exploration" else 0.0013  # climber's exploration level has many edges
        assert differ.mean() <= (few if setting[0] in FEW_PIXELS else 0), setting


def level_seeds(steps=200, **changes):
    envs, rng, infos = procgen(**changes), np.random.default_rng(0), []
    spy_on(pytest.MonkeyPatch(), envs.unwrapped.envs, "step", lambda result, *_: infos.append(result[4]))
    envs.reset()
    for _ in range(steps):
        envs.step(rng.integers(15, size=envs.num_envs))
    return {seed for info in infos for seed in info["level_seed"].tolist()}


def test_seed_streams_disjoint():
    """The test plays other levels than training, other seeds and streams play others, and equal ones the same."""
    chosen = dict(num_levels=3, start_level=100)
    assert level_seeds(**chosen) == {100, 101, 102}
    test = level_seeds(**chosen, test=True)
    assert len(test) > 8 and not test & {100, 101, 102}
    names = (1, "training"), (2, "training"), (1, "test")
    streams = [level_seeds(seed=ppo_procgen.stream_seed(*name)) for name in names]
    assert len(set.union(*streams)) == sum(map(len, streams)) > 20
    assert level_seeds() == streams[0]
