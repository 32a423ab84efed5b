"""ppo_procgen.py with the bonus of Random Network Distillation added to the game's rewards.

    python benchmark/variants/procgen_rnd.py --env-id coinrun
    python benchmark/variants/procgen_rnd.py --env-id coinrun --no-rnd-norm  # as in the entry

Sources: `ppo_rnd.py` of T. Tumiel's entry to the NeurIPS 2020 Procgen competition, which tried it;
RND: Burda et al. 2018, arXiv:1810.12894. As in the entry: a step's bonus is for the observation
acted on (the one after it may be another level's first: dying would pay), is at most 2, and has no
value of its own; the networks see what the policy sees and are half as wide. As in RND and not in
the entry: the bonus is divided by the deviation of its running discounted sum; the predictor has an
Adam of its own, of rate 1e-4. It learns from a rollout before the policy does, in as many passes.
`episode/return` and evaluations are of the game alone. Not measured here; the entry's score over
six games was 0.62 with the bonus, three of them cut short by its time limit, and 0.68 without, one
run each (its LOGS.md).
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_procgen as script


@dataclass
class Args(script.Args):
    rnd_coef: float = 1  # weight of the bonus in the reward
    rnd_clip: float = 2  # the most that a step's bonus may be, before its weight
    rnd_norm: bool = True  # first divide it by the deviation of its sums discounted by --gamma


class Curious(gym.vector.VectorWrapper):
    """Adds the bonus to the reward; after each --num-steps steps the predictor learns from them."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__(envs)
        self.args = args
        self.device = script.set_up(args)
        torch.manual_seed(script.stream_seed(args.seed, "rnd"))  # equal on all ranks
        obs_shape = envs.single_observation_space.shape
        half = replace(args, channels=tuple(width // 2 for width in args.channels), pool="avg")
        self.target = script.Agent(obs_shape, 1, half).to(self.device).requires_grad_(False)
        self.predictor = script.Agent(obs_shape, 256, half).to(self.device)  # its logits predict
        self.optimizer = torch.optim.Adam(self.predictor.parameters(), lr=1e-4)
        self.saved = {"target": self.target, "predictor": self.predictor, "adam": self.optimizer}
        self.normalizer = script.RewardNormalizer(args.gamma, envs.num_envs)
        self.obs, _ = envs.reset()  # to act on next; another reset starts no new games
        self.seen = []  # observations of the present rollout, each (N, C, H, W)
        self.bonuses = []

    def errors(self, obs):
        """uint8 (B, C, H, W) -> mean squared errors over features, (B,): bonus and loss."""
        obs = torch.from_numpy(obs).to(self.device)
        features = self.target.features((obs.float() - self.args.input_shift) / 255)
        return (self.predictor(obs)[0] - self.target.hidden(features)).square().mean(1)

    def step(self, actions):
        with torch.no_grad():
            bonus = self.errors(self.obs).cpu().numpy()
        if self.args.rnd_norm:
            bonus = self.normalizer(bonus, np.zeros(len(bonus), bool))  # through the ends of games
        bonus = self.args.rnd_coef * np.minimum(bonus, self.args.rnd_clip)
        self.seen.append(self.obs)
        self.bonuses.append(bonus)
        self.obs, reward, *rest = self.env.step(actions)
        if len(self.seen) == self.args.num_steps:
            self.learn()
        return self.obs, reward + bonus, *rest

    def learn(self):
        rows = np.concatenate(self.seen)
        for _ in range(self.args.update_epochs):
            for minibatch in torch.randperm(len(rows)).split(self.args.minibatch_size):
                self.optimizer.zero_grad()
                for piece in minibatch.split(self.args.micro_batch or 64):
                    loss = self.errors(rows[piece.numpy()]).sum() / len(minibatch)
                    loss.backward()
                for weights in self.predictor.parameters():
                    if weights.grad is not None:  # None: the value head's, no part of the loss
                        weights.grad = script.sum_over_ranks(weights.grad) / script.WORLD
                self.optimizer.step()
        self.mean_bonus = float(np.mean(self.bonuses))
        self.seen, self.bonuses = [], []


plain_envs = script.make_envs
curious = None  # the environments of training, whose networks are saved with the run


def make_envs(args: Args, num_envs: int, stream: str) -> gym.vector.VectorEnv:
    global curious
    envs = plain_envs(args, num_envs, stream)
    if stream.startswith("training"):
        envs = curious = Curious(envs, args)
        if args.resume:
            rnd = script.load_checkpoint(args.resume)["rnd"]
            curious.normalizer.sums = rnd["sums"]
            for name, part in curious.saved.items():
                part.load_state_dict(rnd[name])
    return envs


class Logger(script.Logger):
    def log(self, metrics: dict) -> dict:
        return super().log(metrics | {"int/reward_norm": curious.mean_bonus})

    def save(self, name: str, state: dict):
        rnd = {part: owner.state_dict() for part, owner in curious.saved.items()}
        super().save(name, state | {"rnd": rnd | {"sums": curious.normalizer.sums}})


script.SCRIPT = "procgen_rnd"
script.__doc__ = __doc__
script.Args, script.make_envs, script.Logger = Args, make_envs, Logger

if __name__ == "__main__":
    sys.exit(script.main())
