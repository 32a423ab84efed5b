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

Procgen's next episode begins in the step that ends one. Here that step's row shows the last frame
again, and the row after it, which is not valid, plays a no-op.
"""

import sys
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

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


@dataclass(config=script.CONFIG)
class Args(snd_paper.Args):
    env_id: Literal[*LEVELS] = "coinrun"  # Procgen game
    total_timesteps: PositiveInt = 64_000_000  # environment steps, in whole rollouts
    stack: PositiveInt = 2  # frames per observation
    frame_channels: Literal[3] = 3  # the last channels, which are the newest frame
    random_action: script.Share = 0.01  # probability of a random action, per step

    def __post_init__(self):
        super().__post_init__()
        others = snd_paper.Args()
        for name in ATARI.split():
            if getattr(self, name) != getattr(others, name):
                raise ValueError(f"--{name.replace('_', '-')}: only for Atari")


class ExplorationEnvs(gym.vector.VectorWrapper):
    """Procgen with next-step autoreset: uint8 (N, 3 * frames, 64, 64), the newest frame last."""

    def __init__(self, envs: gym.vector.VectorEnv, random_action: float, seed: int):
        super().__init__(envs)
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        self.random_action = random_action
        self.rng = np.random.default_rng(seed)

    def blank(self, obs):
        """Set the frames before an episode's first one, which are copies of it, to zero."""
        age = np.arange(obs.shape[1] // 3)[::-1]  # of each frame
        is_seen = (age <= self.steps[:, None]).repeat(3, 1)
        return obs * is_seen[..., None, None].astype(np.uint8)

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        self.done = np.zeros(self.num_envs, bool)
        self.steps = np.zeros(self.num_envs, int)  # since the episode's first observation
        self.shown = self.blank(obs)
        return self.shown, info

    def step(self, actions):
        drawn = self.rng.integers(self.single_action_space.n, size=self.num_envs)
        actions = np.where(self.rng.random(self.num_envs) < self.random_action, drawn, actions)
        actions = np.where(self.done, 4, actions)  # the no-op
        obs, reward, terminated, truncated, info = self.env.step(actions)
        self.steps = np.where(self.done, 0, self.steps + 1)
        reward = np.where(self.done, 0, reward)
        self.done = (terminated | truncated) & ~self.done  # a time limit counts as a termination
        self.shown = np.where(self.done[:, None, None, None], self.shown, self.blank(obs))
        return self.shown, reward, self.done, np.zeros_like(self.done), info


def make_envs(args: Args, num_envs: int, seed: int, test: bool = False) -> gym.vector.VectorEnv:
    """Create the environments as specified by args."""
    ppo_procgen.STACKS["full"] = tuple(reversed(range(args.stack)))
    procgen_args = ppo_procgen.Args(
        env_id=args.env_id,
        threads=args.threads,
        distribution_mode="hard",
        num_levels=1,
        start_level=LEVELS[args.env_id],
        stack="full",
    )
    envs = ppo_procgen.make_envs(procgen_args, num_envs, seed)
    seed = script.stream_seed(seed, "random actions")
    return ExplorationEnvs(envs, args.random_action, seed)


class SND(snd_paper.SND):
    target_convs = [*script.POLICY_CONVS[:3], (64, 3, 1, 1)]

    def __init__(self, frame_shape: tuple[int, int, int], args: Args):
        if args.target == "std":
            self.predictor_convs = self.target_convs
        super().__init__(frame_shape, args)


script.SCRIPT = "snd_procgen"
script.__doc__ = __doc__
script.POLICY_CONVS = SND.target_convs
script.TILES = [1, 2, 4, 8, 16]
script.Args = Args
script.SND = SND

if __name__ == "__main__":
    sys.exit(script.main(make_envs=make_envs))
