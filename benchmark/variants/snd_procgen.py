"""ppo_atari_snd.py on Procgen's exploration games: one hard level of a game, few rewards.

    python benchmark/variants/snd_procgen.py --env-id coinrun --snd-preprocess none

Source: Pechac et al. 2023, arXiv:2302.11563: 64 x 64 RGB, two frames, one random action in 100,
the game's own rewards, a narrower last convolution; target and predictor see the newest frame. Its
games are caveflyer, climber, coinrun, jumper. Departure: the narrower one is the policy's only (the
paper's target and predictor have it too with std and vic). Not measured here; michalnand's
curves (mean of 3 seeds, at 4M and 8M steps): SND (cnd_1) 7.4 and 9.8 on coinrun, 6.8 and 9.9 on
jumper; PPO and RND 0.

The script takes an observation's last channel for the newest frame. So a frame is packed into one
channel of twice the side, a pixel's colours into a square, and Agent and SND unpack it. Procgen's
next game begins in the step that ends one; here that step's row shows the last frame again, and the
row after it, which is not learned, plays a no-op.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_atari_snd as script
from ppo_procgen import ProcgenEnvs

GAMES = "caveflyer climber coinrun heist jumper leaper maze ninja".split()
ATARI = "noop_max fire_reset episodic_life max_episode_steps frame_size repeat_action_probability"


@dataclass
class Args(script.Args):
    env_id: Literal[*GAMES] = "coinrun"  # game
    total_timesteps: int = 64_000_000  # agent steps of all environments
    stack: int = 2  # frames shown
    random_action: float = 0.01  # a step's chance of a random action


class ExplorationEnvs(gym.vector.VectorWrapper):
    """ProcgenEnvs with next-step autoreset and packed frames: uint8 (N, frames, 128, 128)."""

    def __init__(self, envs: gym.vector.VectorEnv, random_action: float, seed: int):
        super().__init__(envs)
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        frames = envs.single_observation_space.shape[0] // 3
        self.single_observation_space = gym.spaces.Box(0, 255, (frames, 128, 128), np.uint8)
        self.random_action, self.rng = random_action, np.random.default_rng(seed)

    def pack(self, obs):
        packed = np.zeros((len(obs), *self.single_observation_space.shape), np.uint8)
        packed[..., 0::2, 0::2] = obs[:, 0::3]
        packed[..., 0::2, 1::2] = obs[:, 1::3]
        packed[..., 1::2, 0::2] = obs[:, 2::3]
        return packed

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        self.done = np.zeros(self.num_envs, bool)
        self.shown = self.pack(obs)
        return self.shown, info

    def step(self, actions):
        drawn = self.rng.integers(self.single_action_space.n, size=self.num_envs)
        actions = np.where(self.rng.random(self.num_envs) < self.random_action, drawn, actions)
        actions = np.where(self.done, 4, actions)  # the no-op
        obs, reward, ended, _, info = self.env.step(actions)
        reward = np.where(self.done, 0, reward)
        self.done = ended & ~self.done
        self.shown = np.where(self.done[:, None, None, None], self.shown, self.pack(obs))
        return self.shown, reward, self.done, np.zeros_like(self.done), info


def make_envs(args: Args, num_envs: int, stream: str) -> gym.vector.VectorEnv:
    if any(getattr(args, name) != getattr(Args, name) for name in ATARI.split()):
        raise script.UsageError(f"only Atari has {ATARI}")
    if args.stack < 1:
        raise script.UsageError(f"--stack {args.stack}: at least 1")
    options = {"env_name": args.env_id, "distribution_mode": "exploration"}
    options |= {"rand_seed": script.stream_seed(args.seed, stream)}
    options |= {"num_threads": args.env_threads or script.CORES}
    envs = ProcgenEnvs(tuple(range(args.stack)), num_envs, **options)
    seed = script.stream_seed(args.seed, f"{stream} random actions")
    return ExplorationEnvs(script.RecordEpisodeStatistics(envs), args.random_action, seed)


def unpack(x):
    """(B, frames, 128, 128) -> (B, 3 * frames, 64, 64)."""
    return F.pixel_unshuffle(x, 2).unflatten(1, (-1, 4))[:, :, :3].flatten(1, 2)


class Agent(script.Agent):
    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        super().__init__((3 * obs_shape[0], 64, 64), num_actions, args)
        self.trunk[6] = script.layer(nn.Conv2d(64, 64, 3, padding=1))
        self.trunk[9] = script.layer(nn.Linear(self.trunk[9].in_features // 2, 512))

    def forward(self, obs):
        return super().forward(unpack(obs))


class SND(script.SND):
    def __init__(self, side: int, args: Args):
        super().__init__(64, args)
        self.frames = script.RunningMoments((1, side, side))  # packed
        first = script.CONVOLUTIONS[args.snd_net][0]  # width, kernel, stride, padding
        self.target[0] = script.layer(nn.Conv2d(3, *first), args.target_gain)
        self.predictor[0] = script.layer(nn.Conv2d(3, *first), args.predictor_gain)

    def preprocess(self, frames):
        return unpack(super().preprocess(frames))


script.SCRIPT = "snd_procgen"
script.__doc__ = __doc__
script.Args, script.make_envs, script.Agent, script.SND = Args, make_envs, Agent, SND

if __name__ == "__main__":
    sys.exit(script.main())
