"""ppo_atari_rnd.py with the paper's recurrent policy, and a run that ends at a return.

    python benchmark/variants/rnd_recurrent.py --env-id MontezumaRevenge
    python benchmark/variants/rnd_recurrent.py --target-return 2500

Sources: Burda et al. 2018, arXiv:1810.12894 (cnn_gru_policy_dynamics.py of
github.com/openai/random-network-distillation); --target-return: github.com/AdeelMufti/RL-RND.

The policy is a GRU. Its state is 0 at the start of an episode and continues through rollouts; each
SGD step starts from the states that the rollout started from. Not measured.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_atari_rnd as script

train_cnn, learn_cnn, loss_cnn, play_cnn = script.train, script.learn, script.ppo_loss, script.play


@dataclass(config=script.CONFIG)
class Args(script.Args):
    target_return: NonNegativeFloat = 0
    """stop once the last 100 episodes average this much, on the mean of all ranks; 0 = off"""

    def __post_init__(self):
        super().__post_init__()
        if self.compile:
            raise ValueError("--compile: not with a recurrent policy, whose loop it would unroll")


class Memories(gym.vector.VectorWrapper):
    """Environments that hold the policy's memory (N, D) of each one's episode; None: all 0."""

    newest = None  # the training's, for the agent that `train` makes next

    def reset(self, **options):
        self.start = None  # the memory before the rollout's first observation
        self.before = None  # before the newest observation
        self.after = None  # after it; the agent sets it
        self.valid = np.ones(self.num_envs, bool)  # the newest observation is not an episode's last
        self.recent = []  # returns of the last 100 episodes
        return super().reset(**options)

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        self.before = self.after
        self.valid = ~(terminated | truncated)
        returns = [episode[1] for episode in script.ended_episodes(info)]
        self.recent = [*self.recent, *returns][-100:]
        return obs, reward, terminated, truncated, info


class Agent(script.Agent):
    """The paper's recurrent policy: uint8 (B, C, H, W) -> logits (B, A), values (B, 2).

    The rows are n environments, one after the other, each in order of time. memory: (n, D), the
    state before each environment's first row. valid: (B,), 0 in a row that shows the last
    observation of an episode; after it the state is 0. Without them, the rows are the newest
    observations of `self.envs`, which hold both.
    """

    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        nn.Module.__init__(self)
        self.bf16 = args.precision == "bf16"
        self.envs = Memories.newest
        self.memory_size = 256
        self.trunk = script.convolutions(obs_shape[0], 4, nn.ReLU())
        num_features = self.trunk(torch.zeros(1, *obs_shape)).shape[1]
        self.hidden1 = script.layer(nn.Linear(num_features, 256))
        self.hidden2 = nn.GRUCell(256, 256)
        nn.init.orthogonal_(self.hidden2.weight_ih)
        nn.init.orthogonal_(self.hidden2.weight_hh)
        nn.init.zeros_(self.hidden2.bias_ih)
        nn.init.zeros_(self.hidden2.bias_hh)
        self.residual_policy = script.layer(nn.Linear(256, 256), 0.1)
        self.residual_value = script.layer(nn.Linear(256, 256), 0.1)
        self.policy = script.layer(nn.Linear(256, num_actions), 0.01)
        self.value = script.layer(nn.Linear(256, 2), 0.01)
        self.to(memory_format=torch.channels_last)

    def forward(self, obs, memory=None, valid=None):
        is_acting = valid is None
        if is_acting:
            memory = self.envs.before
            valid = torch.from_numpy(self.envs.valid).to(obs.device)
        if memory is None:
            memory = torch.zeros(len(obs), self.memory_size, device=obs.device)
        x = obs.contiguous(memory_format=torch.channels_last).float().div_(255)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            x = F.relu(self.hidden1(self.trunk(x)))
            x, memory = self.recur(x, memory, valid)
            policy = x + F.relu(self.residual_policy(x))
            value = x + F.relu(self.residual_value(x))
        if is_acting:
            self.envs.after = memory
        return self.policy(policy.float()), self.value(value.float())

    def recur(self, x, memory, valid):
        """Run the GRU over the rows of each environment: x (B, 256) -> states (B, 256), memory."""
        x = x.unflatten(0, (len(memory), -1))
        valid = valid.view(len(memory), -1, 1)
        states = []
        for t in range(x.shape[1]):
            state = self.hidden2(x[:, t], memory).float()
            states.append(state)
            memory = state * valid[:, t]  # the next row belongs to a new episode if valid is 0
        return torch.stack(states, 1).flatten(0, 1), memory


def ppo_loss(agent, rows: dict, ent_coef: float, args: Args) -> tuple:
    """As in the script, of whole environments, from the memory before their first rows."""
    memory = rows["memory"][:: args.num_steps]

    def recurrent(obs):
        return agent(obs, memory, rows["valid"])

    return loss_cnn(recurrent, rows, ent_coef, args)


def learn(agent, rnd, optimizer, batch: dict, ent_coef: float, args: Args) -> dict:
    """As in the script, in pieces of whole environments; ends the run at --target-return."""
    envs, T, device = agent.envs, args.num_steps, batch["obs"].device
    start = envs.start
    if start is None:
        start = torch.zeros(args.num_envs, agent.memory_size, device=device)
    envs.start = envs.before  # the rollout's last observation is the next one's first
    rows = args.micro_batch or (script.ROWS_ON_CPU if device.type == "cpu" else args.minibatch_size)
    pieces = replace(args, micro_batch=math.ceil(rows / T) * T)
    batch = batch | {"memory": start.repeat_interleave(T, 0)}
    means = learn_cnn(agent, rnd, optimizer, batch, ent_coef, pieces)
    if args.target_return:  # the mean over ranks, so that they stop together
        mean = np.mean(envs.recent) if len(envs.recent) == 100 else -math.inf
        mean = script.sum_over_ranks(torch.tensor(mean, dtype=torch.float64, device=device))
        if mean.item() / script.WORLD >= args.target_return:
            args.total_timesteps = 0  # `train` logs, saves and evaluates this iteration
    return means


def train(args: Args, make_envs=script.make_envs, saved: dict | None = None) -> dict:
    """As in the script, in environments that hold the policy's memory."""

    def make(args: Args, num_envs: int, seed: int, test: bool = False) -> gym.vector.VectorEnv:
        envs = make_envs(args, num_envs, seed, test=test)
        if not test:
            envs = Memories.newest = Memories(envs)
        return envs

    return train_cnn(replace(args), make, saved)  # a copy: `learn` may end the run


def play(agent, envs, per_env: int, seed: int) -> list[tuple]:
    """As in the script, with memories for these environments."""
    before = agent.envs
    agent.envs = Memories(envs)
    episodes = play_cnn(agent, agent.envs, per_env, seed)
    agent.envs = before
    return episodes


script.SCRIPT = "rnd_recurrent"
script.__doc__ = __doc__
script.Args = Args
script.Agent = Agent
script.ppo_loss = ppo_loss
script.learn = learn
script.train = train
script.play = play

if __name__ == "__main__":
    sys.exit(script.main())
