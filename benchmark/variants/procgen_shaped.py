"""ppo_procgen.py with the competition entry's reward shaping: an example of wrapping make_envs.

    python benchmark/variants/procgen_shaped.py --env-id bigfish

The agent learns from sign(r) * (sqrt(|r| + 1) - 1) + 0.001 * r, which compresses large rewards.
`episode/return` and evaluations are the game's scores. The function is from Pohlen et al. 2018,
arXiv:1805.11593, who apply it to action values, with 0.01.

Source: callbacks.py of T. Tumiel's entry to the NeurIPS 2020 Procgen competition. There it is off,
and when it is on, it comes after RLlib has computed the advantages; here it comes before.
Not measured.
"""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.wrappers.vector import TransformReward

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_procgen as script

Args, plain_envs = script.Args, script.make_envs


def shape(reward):
    return np.sign(reward) * (np.sqrt(np.abs(reward) + 1) - 1) + 0.001 * reward


def make_envs(args: Args, num_envs: int, seed: int, test: bool = False) -> gym.vector.VectorEnv:
    """The script's environments, which report their episodes before the rewards are shaped."""
    return TransformReward(plain_envs(args, num_envs, seed, test), shape)


script.SCRIPT = "procgen_shaped"
script.__doc__ = __doc__

if __name__ == "__main__":
    sys.exit(script.main(make_envs=make_envs))
