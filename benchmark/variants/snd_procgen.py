r"""snd_paper.py on Procgen's exploration levels, one hard level of a game with sparse rewards.

    python benchmark/variants/snd_procgen.py --env-id coinrun                              # SND-V
    python benchmark/variants/snd_procgen.py --env-id jumper --target std --predictor-share 1 \
        --eta 1
    python benchmark/variants/snd_procgen.py --env-id coinrun --target vic --predictor-share 1

Source: Pechac et al. 2023, arXiv:2302.11563, the settings of its code: 64 x 64 RGB, two frames, of
which an episode's first observation has one and zeros; one random action in 100, unclipped rewards,
a narrower last convolution (not in SND-VIC's predictor); target and predictor see the newest frame.
Its --eta is 0.5, but for SND-STD 0.25 on coinrun and 1 on climber and jumper. It has no settings
for heist, leaper, maze and ninja. Not measured.

The script takes an observation's last channel for the newest frame. So a frame is packed into one
channel of twice the width and height, a pixel's colors into a square, and Agent and SND unpack it.
Procgen's next episode begins in the step that ends one. Here that step's row shows the last frame
again, and the row after it, which is not valid, plays a no-op.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import ppo_procgen

import snd_paper
from snd_paper import script

LEVELS = {  # of the procgen package's exploration mode
    "caveflyer": 1259048185,
    "climber": 1561126160,
    "coinrun": 1949448038,
    "heist": 876640971,
    "jumper": 1434825276,
    "leaper": 1318677581,
    "maze": 158988835,
    "ninja": 1123500215,
}
ATARI = "noop_max fire_reset max_episode_steps frame_size repeat_action_probability warmup_steps"


@dataclass
class Args(snd_paper.Args):
    env_id: Literal[*LEVELS] = "coinrun"  # Procgen game
    total_timesteps: int = 64_000_000  # total environment steps, rounded down to whole rollouts
    stack: int = 2  # frames per observation
    random_action: float = 0.01  # probability of a random action, per step


class ExplorationEnvs(gym.vector.VectorWrapper):
    """Procgen with next-step autoreset and packed frames: uint8 (N, frames, 128, 128)."""

    def __init__(self, envs: gym.vector.VectorEnv, random_action: float, seed: int):
        super().__init__(envs)
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        frames = envs.single_observation_space.shape[0] // 3
        self.single_observation_space = gym.spaces.Box(0, 255, (frames, 128, 128), np.uint8)
        self.random_action = random_action
        self.rng = np.random.default_rng(seed)

    def pack(self, obs):
        """Also set the frames before an episode's first one, which are copies of it, to zero."""
        num_frames = self.single_observation_space.shape[0]
        age = np.arange(num_frames)[::-1]  # of each frame
        obs = obs * (age <= self.steps[:, None]).repeat(3, 1)[..., None, None].astype(np.uint8)
        packed = np.zeros((len(obs), *self.single_observation_space.shape), np.uint8)
        packed[..., 0::2, 0::2] = obs[:, 0::3]
        packed[..., 0::2, 1::2] = obs[:, 1::3]
        packed[..., 1::2, 0::2] = obs[:, 2::3]
        return packed

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        self.done = np.zeros(self.num_envs, bool)
        self.steps = np.zeros(self.num_envs, int)  # since the episode's first observation
        self.shown = self.pack(obs)
        return self.shown, info

    def step(self, actions):
        drawn = self.rng.integers(self.single_action_space.n, size=self.num_envs)
        actions = np.where(self.rng.random(self.num_envs) < self.random_action, drawn, actions)
        actions = np.where(self.done, 4, actions)  # the no-op
        obs, reward, terminated, truncated, info = self.env.step(actions)
        self.steps = np.where(self.done, 0, self.steps + 1)
        reward = np.where(self.done, 0, reward)
        self.done = (terminated | truncated) & ~self.done  # a time limit counts as a termination
        self.shown = np.where(self.done[:, None, None, None], self.shown, self.pack(obs))
        return self.shown, reward, self.done, np.zeros_like(self.done), info


def make_envs(args: Args, num_envs: int, stream: str) -> gym.vector.VectorEnv:
    """Create the environments as specified by args; `stream` seeds them."""
    for name in ATARI.split():
        if getattr(args, name) != getattr(Args, name):
            raise script.UsageError(f"--{name.replace('_', '-')}: only for Atari")
    ppo_procgen.STACKS[args.stack] = tuple(range(args.stack))
    procgen_args = ppo_procgen.Args(
        env_id=args.env_id,
        seed=args.seed,
        threads=args.threads,
        distribution_mode="hard",
        num_levels=1,
        start_level=LEVELS[args.env_id],
        stack=args.stack,
    )
    envs = ppo_procgen.make_envs(procgen_args, num_envs, stream)
    seed = script.stream_seed(args.seed, f"{stream} random actions")
    return ExplorationEnvs(envs, args.random_action, seed)


def unpack(x):
    """(B, frames, 128, 128) -> (B, 3 * frames, 64, 64)."""
    return F.pixel_unshuffle(x, 2).unflatten(1, (-1, 4))[:, :, :3].flatten(1, 2)


class Agent(script.Agent):
    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        super().__init__((3 * obs_shape[0], 64, 64), num_actions, args)

    def forward(self, obs):
        return super().forward(unpack(obs))


class SND(snd_paper.SND):
    target_convs = [*script.POLICY_CONVS[:3], (64, 3, 1, 1)]

    def __init__(self, frame_shape: tuple[int, int, int], args: Args):
        if args.target == "std":
            self.predictor_convs = self.target_convs
        super().__init__((3, 64, 64), args)
        self.frames = script.RunningMoments(frame_shape, count=1e-4, variance=1, epsilon=1e-12)

    def preprocess(self, frames):
        return unpack(frames).float() / 255


script.SCRIPT = "snd_procgen"
script.__doc__ = __doc__
script.AT_MOST_1 += ["random_action"]
script.POLICY_CONVS = SND.target_convs
script.TILES = [1, 2, 4, 8, 16]
script.Args = Args
script.Agent = Agent
script.SND = SND

if __name__ == "__main__":
    sys.exit(script.main(make_envs=make_envs))
