"""Runs CleanRL's own ppo_procgen.py, ppo_atari_envpool.py or ppo_rnd_envpool.py with the packages of requirements.txt.

Those files are written for gym 0.23: `reset` returns observations only, `step` four values, and gym.wrappers take
vector environments. Their text runs as it is. The installed gym is made to say that it is that version, by which
EnvPool chooses what its environments return, and gets the four old wrappers, which do here what they did there. Their
TensorBoard writer writes all that it is given, and tells the end of each iteration to a stopwatch.
"""

import contextlib
import os
import runpy
import sys
from pathlib import Path

import gym
import numpy as np
from gym.wrappers.normalize import RunningMeanStd
from torch.utils import tensorboard


class TransformObservation(gym.Wrapper):
    def __init__(self, env, function):
        super().__init__(env)
        self.function = function

    def reset(self):
        return self.function(self.env.reset())

    def step(self, action):
        obs, reward, done, info = self.env.step(action)
        return self.function(obs), reward, done, info


class RecordEpisodeStatistics(gym.Wrapper):
    def reset(self):
        self.returns = np.zeros(self.num_envs, np.float32)
        self.lengths = np.zeros(self.num_envs, np.int32)
        return self.env.reset()

    def step(self, action):
        obs, reward, done, infos = self.env.step(action)
        self.returns += reward
        self.lengths += 1
        infos = list(infos)
        for i in np.flatnonzero(done):
            episode = {"r": self.returns[i], "l": self.lengths[i]}
            infos[i] = {**infos[i], "episode": episode}
        self.returns[done] = 0
        self.lengths[done] = 0
        return obs, reward, done, infos


class NormalizeReward(gym.Wrapper):
    def __init__(self, env, gamma=0.99):
        super().__init__(env)
        self.gamma = gamma
        self.statistics = RunningMeanStd(shape=())
        self.returns = np.zeros(env.num_envs)

    def step(self, action):
        obs, reward, done, info = self.env.step(action)
        self.returns = self.returns * self.gamma + reward
        self.statistics.update(self.returns)
        self.returns[done] = 0
        return obs, reward / np.sqrt(self.statistics.var + 1e-8), done, info


class TransformReward(gym.Wrapper):
    def __init__(self, env, function):
        super().__init__(env)
        self.function = function

    def step(self, action):
        obs, reward, done, info = self.env.step(action)
        return obs, self.function(reward), done, info


WRAPPERS = (TransformObservation, RecordEpisodeStatistics, NormalizeReward, TransformReward)


def run(file: Path, flags: list[str], folder: str, end_of_iteration):
    """Run a file in a folder, its output discarded; end_of_iteration(step) ends it by raising."""

    class Writer(tensorboard.SummaryWriter):
        def add_scalar(self, tag, value, step):
            super().add_scalar(tag, value, step)
            if tag == "charts/SPS":  # the last line of an iteration
                end_of_iteration(step)

    file = file.resolve()  # the folder changes below
    gym.__version__ = "0.23.1"
    for wrapper in WRAPPERS:
        setattr(gym.wrappers, wrapper.__name__, wrapper)
    tensorboard.SummaryWriter = Writer
    sys.argv = [file.name, *flags]
    with open(os.devnull, "w") as nowhere, contextlib.chdir(folder):
        with contextlib.redirect_stdout(nowhere):
            runpy.run_path(str(file), run_name="__main__")
