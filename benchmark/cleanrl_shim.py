"""Runs CleanRL's and LeanRL's own files with the packages of requirements.txt.

Those files are written for gym 0.23: `reset` returns observations only, `step` returns four values, and gym.wrappers
take vector environments. Their text runs unchanged. The installed gym reports that version, by which EnvPool chooses
what its environments return, and gets the four old wrappers. `procgen.ProcgenEnv` is EnvPool's Procgen, the same C++
sources, as in ppo_procgen.py. Their TensorBoard writer (LeanRL's: progress bar) tells the end of every iteration to a
stopwatch. LeanRL's wandb is replaced by nothing, and so is its change to Categorical, with which PyTorch 2.13 fails.
"""

import contextlib
import os
import runpy
import sys
import types
from pathlib import Path

import gym
import numpy as np
import tqdm
from gym.wrappers.normalize import RunningMeanStd
from torch.distributions import categorical
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


class ProcgenEnv(gym.Env):
    """The procgen package's vector environment, of EnvPool's Procgen."""

    def __init__(self, num_envs, env_name, num_levels=0, start_level=0, distribution_mode="easy"):
        import ppo_procgen

        flags = dict(env_id=env_name, num_levels=num_levels, start_level=start_level, stack="none")
        args = ppo_procgen.Args(**flags, distribution_mode=distribution_mode)
        self.num_envs = num_envs
        seed = ppo_procgen.stream_seed(args.seed, "training")
        self.envs = ppo_procgen.make_envs(args, num_envs, seed).env  # without episode statistics
        self.action_space = gym.spaces.Discrete(15)
        self.observation_space = gym.spaces.Dict({"rgb": gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)})

    def reset(self):
        return {"rgb": self.envs.reset()[0].transpose(0, 2, 3, 1)}

    def step(self, actions):
        obs, reward, terminated, truncated, _ = self.envs.step(actions)
        return {"rgb": obs.transpose(0, 2, 3, 1)}, reward, terminated | truncated, [{}] * self.num_envs


class Unchanged(type):
    def __setattr__(cls, name, value):
        pass


class Categorical(categorical.Categorical, metaclass=Unchanged):
    logits = categorical.Categorical.__dict__["logits"]
    probs = categorical.Categorical.__dict__["probs"]


WRAPPERS = (TransformObservation, RecordEpisodeStatistics, NormalizeReward, TransformReward)


def run(file: Path, flags: list[str], folder: str, end_of_iteration, rows: int):
    """Run a file in a folder, without output, until end_of_iteration(step) raises. rows: of an iteration."""

    writers = []

    class Writer(tensorboard.SummaryWriter):
        def __init__(self, *rest, **options):
            super().__init__(*rest, **options)
            writers.append(self)

        def add_scalar(self, tag, value, step):
            super().add_scalar(tag, value, step)
            if tag == "charts/SPS":  # the last line of an iteration
                end_of_iteration(step)

    class Progress:
        def __init__(self, iterations):
            self.iterations = iterations

        def __iter__(self):
            for iteration in self.iterations:  # from 1
                yield iteration
                end_of_iteration(iteration * rows)

        def set_description(self, text):
            pass

    if file.parent.name == "leanrl":
        tqdm.tqdm = Progress
        categorical.Categorical = Categorical
        sys.modules["wandb"] = types.SimpleNamespace(init=lambda **_: None, log=lambda *_, **__: None)
    file = file.resolve()  # the folder changes below
    gym.__version__ = "0.23.1"
    for wrapper in WRAPPERS:
        setattr(gym.wrappers, wrapper.__name__, wrapper)
    tensorboard.SummaryWriter = Writer
    sys.modules["procgen"] = types.SimpleNamespace(ProcgenEnv=ProcgenEnv)
    sys.argv = [file.name, *flags]
    with open(os.devnull, "w") as nowhere, contextlib.chdir(folder):
        try:
            with contextlib.redirect_stdout(nowhere):
                runpy.run_path(str(file), run_name="__main__")
        finally:  # their threads write to this folder
            for writer in writers:
                writer.close()
