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
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_procgen as script


@dataclass
class Args(script.Args):
    rnd_coef: float = 1  # weight of the bonus in the reward; 0 = off
    rnd_clip: float = 2
    """largest bonus of a step, before its weight; 0 = no limit (10 with --rnd-norm)"""
    rnd_norm: bool = True  # first divide it by the running std of its sums discounted by --gamma


class Curious(gym.vector.VectorWrapper):
    """Adds the bonus to the reward; every --num-steps steps the predictor trains on those steps."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__(envs)
        self.args = args
        self.device = script.set_up(args)
        torch.manual_seed(script.stream_seed(args.seed, "rnd"))  # the same on all ranks
        obs_shape = envs.single_observation_space.shape
        half = replace(args, channels=tuple(max(1, x // 2) for x in args.channels), pool="avg")
        self.target = script.Agent(obs_shape, 1, half).to(self.device).requires_grad_(False)
        self.predictor = script.Agent(obs_shape, 256, half).to(self.device)  # its logits predict
        self.optimizer = torch.optim.Adam(self.predictor.parameters(), lr=1e-4)
        self.normalizer = script.RewardNormalizer(args.gamma, envs.num_envs)
        self.obs, _ = envs.reset()  # to act on next; the script's reset continues these episodes
        self.seen = []  # observations of the present rollout, each (N, C, H, W)
        self.bonuses = []

    def state(self) -> dict:
        """What a checkpoint has to hold."""
        normalizer = {"sums": self.normalizer.sums, "returns": self.normalizer.returns}
        return {
            "rnd_target": self.target.state_dict(),
            "rnd_predictor": self.predictor.state_dict(),
            "rnd_optimizer": self.optimizer.state_dict(),
            "rnd_normalizer": normalizer,
        }

    def restore(self, saved: dict):
        if "rnd_target" not in saved:
            raise script.UsageError(f"--resume {self.args.resume}: not a run of {script.SCRIPT}.py")
        self.target.load_state_dict(saved["rnd_target"])
        self.predictor.load_state_dict(saved["rnd_predictor"])
        self.optimizer.load_state_dict(saved["rnd_optimizer"])
        self.normalizer.restore(**saved["rnd_normalizer"])

    def errors(self, obs):
        """uint8 (B, C, H, W) -> squared errors, means over features, (B,): bonus and loss."""
        obs = torch.from_numpy(obs).to(self.device)
        features = self.target.features((obs.float() - self.args.input_shift) / 255)
        return (self.predictor(obs)[0] - self.target.hidden(features)).square().mean(1)

    def step(self, actions):
        with torch.no_grad():
            bonus = self.errors(self.obs).cpu()
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
        rows = np.concatenate(self.seen)
        on_cpu = self.device.type == "cpu"
        micro_batch = self.args.micro_batch or (64 if on_cpu else self.args.minibatch_size)
        for _ in range(self.args.update_epochs):
            for minibatch in torch.randperm(len(rows)).split(self.args.minibatch_size):
                self.optimizer.zero_grad()
                for piece in minibatch.split(micro_batch):
                    loss = self.errors(rows[piece.numpy()]).sum() / len(minibatch)
                    loss.backward()
                for weights in self.predictor.parameters():
                    if weights.grad is not None:  # the value head has no loss
                        weights.grad = script.mean_over_ranks(weights.grad)
                self.optimizer.step()
        self.mean_bonus = float(np.mean(self.bonuses))
        self.seen, self.bonuses = [], []


plain_envs = script.make_envs
curious = None  # the training environments; their networks are saved with the run


def make_envs(args: Args, num_envs: int, stream: str) -> gym.vector.VectorEnv:
    global curious
    envs = plain_envs(args, num_envs, stream)
    if stream.startswith("training"):
        envs = curious = Curious(envs, args)
        if args.resume:
            curious.restore(script.load_checkpoint(args.resume))
    return envs


class Run(script.Run):
    def log(self, metrics: dict):
        super().log(metrics | {"int/reward": curious.mean_bonus})

    def save(self, name: str, state: dict, outputs):
        super().save(name, state | curious.state(), outputs)


script.SCRIPT = "procgen_rnd"
script.__doc__ = __doc__
script.Args = Args
script.Run = Run

if __name__ == "__main__":
    sys.exit(script.main(make_envs=make_envs))
