"""ppo_procgen.py with the bonus of Random Network Distillation added to the rewards.

    python benchmark/variants/procgen_rnd.py --env-id coinrun
    python benchmark/variants/procgen_rnd.py --env-id coinrun --no-rnd-norm  # the entry's bonus

Sources: `ppo_rnd.py` of T. Tumiel's entry to the NeurIPS 2020 Procgen competition, which tried it;
RND: Burda et al. 2018, arXiv:1810.12894.

As in the entry: a step's bonus is that of the observation acted on (the next observation may be
the first of another level, so dying would pay), it is at most 2, and it has no value head. The
networks see the policy's input and are half as wide.
As in RND, not in the entry: the bonus is divided by the running std of its discounted sums, and
the predictor has its own Adam, with learning rate 1e-4. It trains on a rollout before the policy
does, for as many epochs.
`episode/return` and evaluations count the game's rewards only. `int/reward` is the mean bonus.
`time/env_s` includes the bonus and the predictor's learning.

Not measured here. The entry's score over six games was 0.62 with the bonus (three games were cut
short by its time limit) and 0.68 without it, one run each (its LOGS.md).
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_procgen as script


@dataclass(config=script.CONFIG)
class Args(script.Args):
    rnd_coef: NonNegativeFloat = 1  # weight of the bonus in the reward; 0 = off
    rnd_clip: NonNegativeFloat = 2
    """largest bonus of a step, before its weight; 0 = no limit (10 with --rnd-norm)"""
    rnd_norm: bool = True  # first divide it by the running std of its sums discounted by --gamma


class Curious(gym.vector.VectorWrapper):
    """Adds the bonus to the reward; every --num-steps steps the predictor trains on those steps."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__(envs)
        self.args = args
        _, _, self.device = script.set_up(args, None)
        torch.manual_seed(script.stream_seed(args.seed, "rnd"))  # the same on all ranks
        obs_shape = envs.single_observation_space.shape
        half = replace(args, channels=tuple(max(1, x // 2) for x in args.channels), pool="avg")
        self.target = script.Agent(obs_shape, 1, half).to(self.device).requires_grad_(False)
        self.predictor = script.Agent(obs_shape, 256, half).to(self.device)  # its logits predict
        self.predictor.value = torch.nn.Identity()  # a value has no loss, so no gradient
        self.optimizer = torch.optim.Adam(self.predictor.parameters(), lr=1e-4)
        self.normalizer = script.RewardNormalizer(args.gamma, envs.num_envs)
        # Unlike the returns of episodes, the sums run through ends, so they are saved
        self.normalizer.register_buffer("returns", self.normalizer.returns)
        self.parts = {
            "rnd_target": self.target,
            "rnd_predictor": self.predictor,
            "rnd_optimizer": self.optimizer,
            "rnd_normalizer": self.normalizer,
        }
        self.seen = []  # observations of the present rollout, each (N, C, H, W)
        self.bonuses = []

    def reset(self, **options):
        self.obs, info = self.env.reset(**options)  # to act on next
        return self.obs, info

    def errors(self, obs):
        """uint8 (B, C, H, W) -> squared errors, means over features, (B,): bonus and loss."""
        features = self.target.features((obs.float() - self.args.input_shift) / 255)
        return (self.predictor(obs)[0] - self.target.hidden(features)).square().mean(1)

    def step(self, actions):
        with torch.no_grad():
            bonus = self.errors(torch.from_numpy(self.obs).to(self.device)).cpu()
        if self.args.rnd_norm:
            bonus = self.normalizer(bonus, torch.zeros(len(bonus)))  # sums run through episode ends
        bonus = bonus.clamp(max=self.args.rnd_clip or math.inf).mul(self.args.rnd_coef).numpy()
        self.seen.append(self.obs)
        self.bonuses.append(bonus)
        self.obs, reward, *rest = self.env.step(actions)
        if len(self.seen) == self.args.num_steps:
            self.learn()
        return self.obs, reward + bonus, *rest

    def learn(self):
        obs = torch.from_numpy(np.concatenate(self.seen))

        def loss(rows):
            errors = self.errors(rows["obs"].to(self.device))
            return errors, {"loss/predictor": errors}

        for _ in range(self.args.update_epochs):
            for chosen in torch.randperm(len(obs)).split(self.args.minibatch_size):
                minibatch = {"obs": obs[chosen]}
                script.gradient(self.predictor, loss, minibatch, self.args.micro_batch)
                self.optimizer.step()
        self.mean_bonus = float(np.mean(self.bonuses))
        self.seen, self.bonuses = [], []


plain_envs = script.make_envs
curious = None  # the training environments; their networks are saved with the run


def make_envs(args: Args, num_envs: int, seed: int, test: bool = False) -> gym.vector.VectorEnv:
    """The script's environments; those of the training pay the bonus."""
    global curious
    envs = plain_envs(args, num_envs, seed, test)
    if seed in [script.stream_seed(args.seed, split) for split in ("train", "test")]:
        return envs  # of an evaluation
    curious = Curious(envs, args)
    return curious


class Run(script.Run):
    def __init__(self, args: Args, saved: dict | None, device: torch.device):
        if saved and "rnd_target" not in saved:
            raise script.UsageError(f"--resume {saved['folder']}: not a run of {script.SCRIPT}.py")
        if saved:
            for name, part in curious.parts.items():
                part.load_state_dict(saved[name])
        super().__init__(args, saved, device)

    def log(self, metrics: dict):
        super().log(metrics | {"int/reward": curious.mean_bonus})

    def save(self, name: str, parts: dict, **counters):
        super().save(name, parts | curious.parts, **counters)


script.SCRIPT = "procgen_rnd"
script.__doc__ = __doc__
script.Args = Args
script.Run = Run

if __name__ == "__main__":
    sys.exit(script.main(make_envs=make_envs))
