# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0", "numpy==2.4.6", "gymnasium==1.4.0", "envpool==1.0.1", "tyro==1.0.17",
#     "tensorboard==2.21.0", "tqdm==4.70.1",
# ]
# ///
"""PPO with Random Network Distillation (RND) on Atari: Burda et al. 2018, arXiv:1810.12894.

    python ppo_atari_rnd.py --env-id MontezumaRevenge               # 492M steps, 1.97e9 frames
    python ppo_atari_rnd.py --env-id MontezumaRevenge --memory gru  # the paper's recurrent policy
    python ppo_atari_rnd.py --resume runs/NAME                      # continue a stopped run

A frame's bonus is a trained predictor's error on a fixed random network's features of it.
PPO: Schulman et al. 2017, arXiv:1707.06347. GAE: Schulman et al. 2016, arXiv:1506.02438.
Hyperparameters: the paper's table 5.

Unlike most PPO code, as in the authors' (github.com/openai/random-network-distillation):
- two value heads with one discount each; the intrinsic return does not stop at episode ends;
- no standardization of advantages, no clipping of values or gradients;
- a minibatch holds all rows of some environments, the same ones in every epoch;
- the bonus of step t is for the newest frame of o_{t+1}. The bonus uses the frame statistics of the
  earlier rollouts and is divided by the running std of discounted sums of bonuses.
Departures, results and the commands behind them: docs/ppo_atari_rnd.md.
"""

import contextlib
import ctypes
import difflib
import fcntl
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics, TransformReward
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

WORLD = int(os.environ.get("WORLD_SIZE", 1))  # the number of processes, set by torchrun
RANK = int(os.environ["RANK"]) if WORLD > 1 else 0  # this process's number
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Args:
    # run
    env_id: str = "MontezumaRevenge"  # Atari game as EnvPool spells it, with or without -v5
    total_timesteps: int = 491_520_000  # total environment steps (4 frames each), in whole rollouts
    target_return: float = 0  # stop once the last 100 episodes average this much; 0 = off
    seed: int = 1  # on a CPU, the same flags reproduce the same metrics (except time/*)
    run_dir: str = "runs"  # folder of all runs
    run_name: str = ""  # name of this run's folder; "" = env-id__script__seed__time
    resume: str = ""  # folder of a run to continue; its saved flags are the defaults
    device: str = "auto"  # auto (cuda if available), cpu, cuda, cuda:1; torchrun: a GPU per rank
    threads: int = 0  # CPU threads; 0 = all cores (fewer can be faster on a busy machine)
    compile: bool = False  # torch.compile the policy that learns; speed not measured
    precision: Literal["fp32", "bf16"] = "fp32"  # fp32 is TF32 on a GPU; bf16 is slow on most CPUs
    micro_batch: int = 0  # rows per forward pass of learning; 0 = 256 on a CPU, all on a GPU
    checkpoint_every: float = 300  # seconds between checkpoints; 0 = after every iteration
    eval_episodes: int = 100  # episodes per evaluation; 0 = no evaluation, not even at the end
    eval_every: int = 0  # environment steps between evaluations; 0 = only at the end
    quiet: bool = False  # print only evaluations
    # environment
    repeat_action_probability: float = 0.25  # probability of repeating the last action, per frame
    noop_max: int = 1  # an episode starts with 1 to this many no-ops; one less with --fire-reset
    fire_reset: bool = False  # press FIRE at the start of an episode
    max_episode_steps: int = 4500  # time limit of an episode, in environment steps
    frame_size: Literal[84, 96] = 84  # width and height of the gray frames, in pixels
    stack: int = 4  # frames per observation
    num_envs: int = 128  # parallel environments (per process, with torchrun)
    # optimization
    num_steps: int = 128  # rollout length per environment
    minibatch_size: int = 4096  # rows per SGD step and process; num_steps x a divisor of num_envs
    update_epochs: int = 4  # passes over a rollout
    lr: tuple[float, ...] = (1e-4,)
    """learning rate: a number, or pairs of step and value from step 0 on (0 1e-4 5000000 0), linear
    in between, then constant; steps do not scale with --total-timesteps"""
    adam_eps: float = 1e-8  # Adam's epsilon
    max_grad_norm: float = 0  # clip the norm of the policy network's gradient; 0 = off
    # algorithm
    gamma: float = 0.999  # discount of the game's rewards
    gamma_int: float = 0.99  # discount of the bonus
    gae_lambda: float = 0.95  # GAE's lambda, for both
    clip: float = 0.1  # clip range of the probability ratio; 0 = off
    vf_coef: float = 1  # weight of the value loss, half the squared error of each head
    ent_coef: tuple[float, ...] = (0.001,)  # weight of the entropy bonus: a number, or as --lr
    ext_coef: float = 2  # weight of the game's advantages; 0 = off, explore only
    int_coef: float = 1  # weight of the bonus's advantages; 0 = off, PPO without a bonus
    bonus_after: int = 0  # environment steps before the first bonus; the predictor learns at once
    predictor_share: float = 0
    """share of rows that train the predictor; 0 = min(1, 32 / all environments) (paper)"""
    warmup_steps: int = 6400
    """random steps per environment that initialize the frame statistics of a new run; 0 = none"""
    # network
    memory: Literal["none", "gru"] = "none"  # the paper's CNN or recurrent policy
    rnd_features: int = 512  # outputs of target and predictor, width of the predictor's layers


# Flags that --resume cannot change, and the bounds of flags that are numbers (checked by `plain`)
FIXED = "env_id repeat_action_probability frame_size stack memory rnd_features".split()
AT_LEAST_1 = """num_envs num_steps update_epochs noop_max max_episode_steps stack
rnd_features""".split()
AT_MOST_1 = "repeat_action_probability gamma gamma_int gae_lambda predictor_share".split()


def check(args: Args):
    """Raise UsageError for settings that cannot work together."""
    rows = args.num_envs * args.num_steps
    size = args.minibatch_size
    if size < 1 or rows % size or size % args.num_steps:
        rule = f"a multiple of --num-steps {args.num_steps} and a divisor of {rows}"
        raise UsageError(f"--minibatch-size {size}: must be {rule}")
    if args.total_timesteps < rows * WORLD:
        raise UsageError(f"--total-timesteps {args.total_timesteps}: at least {rows * WORLD}")
    if args.compile and args.memory == "gru":
        raise UsageError("--compile: not with --memory gru, whose loop it would unroll")
    # Beyond these EnvPool hangs, runs out of memory or overflows.
    limits = {"noop_max": 1000, "stack": 64, "max_episode_steps": 2**31 - 1}
    for name, limit in limits.items():
        if getattr(args, name) > limit:
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            raise UsageError(f"{flag}: must be at most {limit}")


# --- environment ---

ROOM_BYTE = {"MontezumaRevenge": 3, "Pitfall": 1}  # where the console's RAM has the room's number


class AtariEnvs(gym.vector.VectorEnv):
    """EnvPool's Atari: uint8 (N, frames, S, S), the newest frame last, next-step autoreset.

    The step after an end ignores its action, has reward 0 and returns the first observation of the
    next episode: it is not a transition. Rewards are unclipped.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, pool, num_envs: int, room_byte: int | None):
        self.pool = pool
        self.num_envs = num_envs
        self.room_byte = room_byte
        shape = pool.observation_space.shape
        self.single_observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.single_action_space = gym.spaces.Discrete(pool.action_space.n)
        self.rooms_ever = np.zeros(256, bool)  # seen in any episode

    def reset(self, *, seed=None, options=None):
        return self.pool.reset()

    def step(self, actions):
        obs, reward, terminated, truncated, info = self.pool.step(actions)
        if self.room_byte is not None:
            self.rooms_ever[info["ram"][:, self.room_byte]] = True
        # If a game ends exactly at the time limit, EnvPool reports only the truncation.
        terminated = (terminated | truncated) & (info["terminated"] > 0)
        return obs, reward, terminated, truncated, info

    def close_extras(self, **kwargs):
        self.pool.close()


def make_envs(args: Args, num_envs: int, stream: str) -> gym.vector.VectorEnv:
    """Create Atari environments as specified by args; `stream` seeds them."""
    with contextlib.redirect_stderr(io.StringIO()):  # envpool imports gym, which prints a banner
        import envpool
    specs = envpool.registration.registry.specs
    games = [name.removesuffix("-v5") for name in specs if specs[name][0] == "envpool.atari"]
    game = args.env_id.removesuffix("-v5")
    if game not in games:
        close = difflib.get_close_matches(game, games, 3, 0.4) or sorted(games)
        raise UsageError(f"--env-id {game}: no such game; did you mean {', '.join(close)}?")
    # With one seed, EnvPool seeds environment i with seed + i: nearby seeds would share episodes.
    seeds = np.random.SeedSequence(stream_seed(args.seed, stream)).generate_state(num_envs) >> 1
    pool = envpool.make(
        f"{game}-v5",
        env_type="gymnasium",
        num_envs=num_envs,
        num_threads=args.threads or available_cores(),
        env_seed=seeds.tolist(),
        repeat_action_probability=args.repeat_action_probability,
        noop_max=args.noop_max,
        use_fire_reset=args.fire_reset,
        episodic_life=False,
        max_episode_steps=args.max_episode_steps,
        img_height=args.frame_size,
        img_width=args.frame_size,
        stack_num=args.stack,
    )
    envs = RecordEpisodeStatistics(AtariEnvs(pool, num_envs, ROOM_BYTE.get(game)))  # unclipped
    return TransformReward(envs, np.sign)


def stream_seed(seed: int, stream: str) -> int:
    """Hash both to 31 bits: different seeds or streams give independent random numbers."""
    return int(np.random.SeedSequence([seed, *stream.encode()]).generate_state(1)[0] >> 1)


# --- network ---


def layer(module, gain: float = 2**0.5):
    """Orthogonal weights, zero bias."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def convolutions(channels: int, last_kernel: int, activation) -> nn.Sequential:
    """The three convolutions of the policy, the target and the predictor."""
    return nn.Sequential(
        layer(nn.Conv2d(channels, 32, 8, stride=4)),
        activation,
        layer(nn.Conv2d(32, 64, 4, stride=2)),
        activation,
        layer(nn.Conv2d(64, 64, last_kernel)),
        activation,
        nn.Flatten(),
    )


class Agent(nn.Module):
    """The paper's policies: uint8 (B, C, H, W) -> logits (B, A), values (B, 2), memory.

    The values are of the game's rewards and of the bonus. Without --memory gru, `memory` and
    `valid` are not used. With it, the B rows are n environments, one after the other, each in order
    of time. The memory given, (n, 256), is the state before each environment's first row; the one
    returned is the state after its last row. `valid` (B,) is 0 in a row that shows the last
    observation of an episode; after it the state is 0.
    """

    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        super().__init__()
        self.bf16 = args.precision == "bf16"
        self.memory_size = 256 if args.memory == "gru" else 0
        self.trunk = convolutions(obs_shape[0], 4, nn.ReLU())
        num_features = self.trunk(torch.zeros(1, *obs_shape)).shape[1]
        self.hidden1 = layer(nn.Linear(num_features, 256))
        if self.memory_size:
            width = 256
            self.hidden2 = nn.GRUCell(256, 256)
            nn.init.orthogonal_(self.hidden2.weight_ih)
            nn.init.orthogonal_(self.hidden2.weight_hh)
            nn.init.zeros_(self.hidden2.bias_ih)
            nn.init.zeros_(self.hidden2.bias_hh)
        else:
            width = 448  # about as many weights as the GRU policy
            self.hidden2 = layer(nn.Linear(256, width))
        self.residual_policy = layer(nn.Linear(width, width), 0.1)
        self.residual_value = layer(nn.Linear(width, width), 0.1)
        self.policy = layer(nn.Linear(width, num_actions), 0.01)
        self.value = layer(nn.Linear(width, 2), 0.01)
        self.to(memory_format=torch.channels_last)

    def forward(self, obs, memory, valid):
        # Channels-last while still uint8 (a quarter of the memory traffic), then scale in place.
        x = obs.contiguous(memory_format=torch.channels_last).float().div_(255)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            x = F.relu(self.hidden1(self.trunk(x)))
            if self.memory_size:
                x, memory = self.recur(x, memory, valid)
            else:
                x = F.relu(self.hidden2(x))
            policy = x + F.relu(self.residual_policy(x))
            value = x + F.relu(self.residual_value(x))
        # Heads in fp32: bf16 would round the values.
        return self.policy(policy.float()), self.value(value.float()), memory

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


class RunningMoments(nn.Module):
    """Running mean and std of all rows seen, element by element; saved with the weights.

    Starts as if `count` rows with mean 0 and this variance had been seen.
    """

    def __init__(self, shape: tuple[int, ...], count: float, variance: float, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.register_buffer("sums", torch.zeros(3, *shape, dtype=torch.float64))  # of 1, x, x^2
        self.sums[0] = count
        self.sums[2] = count * variance
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.full(shape, (variance + epsilon) ** 0.5))

    def update(self, x):
        """x: (B, ...), broadcast to shape; pixel sums of 256 rows are exact in fp32 (< 2^24)."""
        new = torch.zeros_like(self.sums)
        new[0] = len(x)
        for rows in x.split(256):
            rows = rows.float() if x.dtype == torch.uint8 else rows.double()
            new[1] += rows.sum(0)
            new[2] += rows.square().sum(0)
        self.sums += WORLD * mean_over_ranks(new)
        mean = self.sums[1] / self.sums[0]
        variance = (self.sums[2] / self.sums[0] - mean**2).clamp(min=1e-12)
        self.mean.copy_(mean)
        self.std.copy_((variance + self.epsilon).sqrt())


class RND(nn.Module):
    """A fixed random target network, its predictor, and the statistics of frames and bonuses.

    Frames are uint8 (B, 1, H, W); features are (B, args.rnd_features).
    """

    def __init__(self, frame_shape: tuple[int, int, int], args: Args):
        super().__init__()
        self.bf16 = args.precision == "bf16"
        self.gamma = args.gamma_int
        self.frames = RunningMoments(frame_shape, count=1e-4, variance=1, epsilon=0)
        self.returns = RunningMoments((), count=1e-4, variance=1, epsilon=0)
        self.register_buffer("discounted", torch.zeros(args.num_envs, dtype=torch.float64))
        self.target = convolutions(1, 3, nn.LeakyReLU(0.2))
        self.predictor = convolutions(1, 3, nn.LeakyReLU(0.2))
        width = self.target(torch.zeros(1, *frame_shape)).shape[1]
        features = args.rnd_features
        self.target.append(layer(nn.Linear(width, features)))
        self.predictor.append(layer(nn.Linear(width, features)))
        for _ in range(2):
            self.predictor.append(nn.ReLU())
            self.predictor.append(layer(nn.Linear(features, features)))
        self.target.requires_grad_(False)
        self.to(memory_format=torch.channels_last)

    def outputs(self, network, frames):
        """Outputs of target or predictor for frames standardized by the current statistics."""
        x = ((frames.float() - self.frames.mean) / self.frames.std).clamp(-5, 5)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            x = network(x)
        return x.float()

    @torch.no_grad()
    def features(self, frames):
        """The target network's outputs, which the predictor learns."""
        return self.outputs(self.target, frames)

    def error(self, frames, features):
        """The predictor's squared error, averaged over features: (B,). Both bonus and loss."""
        return (self.outputs(self.predictor, frames) - features).square().mean(1)

    def normalize(self, bonus):
        """Divide bonuses (T, N) by the running std of r_t + gamma r_{t-1} + gamma^2 r_{t-2} + ...

        These sums continue through the ends of episodes and rollouts. The sums of this rollout
        enter the std before it divides.
        """
        sums = []
        for row in bonus:
            self.discounted = self.gamma * self.discounted + row.double()
            sums.append(self.discounted)
        self.returns.update(torch.cat(sums))
        return bonus / self.returns.std


# --- mathematics ---


def sample(logits, generator=None):
    """Draw from Categorical(logits): (B, A) -> (B,)."""
    probabilities = logits.softmax(-1)
    if not torch.isfinite(probabilities).all():
        raise FloatingPointError("the policy's logits are not finite")
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def gae(reward, value, terminated, done, gamma: float, lam: float):
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16) -> advantages (T, N).

    reward, terminated, done: (T, N), of the step taken in row t. value: (T + 1, N), of row t's
    observation. There is no value after a termination, and any end (`done`) cuts the sum.
    """
    delta = reward + gamma * value[1:] * (1 - terminated) - value[:-1]
    advantage = torch.zeros_like(value)  # its last row stays 0
    for t in reversed(range(len(reward))):
        advantage[t] = delta[t] + gamma * lam * (1 - done[t]) * advantage[t + 1]
    return advantage[:-1]


def ppo_terms(logits, values, rows: dict, clip: float, in_use) -> dict:
    """Loss terms and statistics, each (B,), from the new logits (B, A) and values (B, 2).

    loss/policy: negated clipped surrogate (PPO, eq. 7). loss/value: half the squared error, summed
    over the heads that in_use (2,) marks. train/approx_kl: the estimate r - 1 - log r of
    KL(old || new).
    """
    clip = clip or math.inf
    logp = logits.log_softmax(-1)
    log_ratio = logp.gather(-1, rows["action"][:, None]).squeeze(-1) - rows["logp"]
    ratio = log_ratio.exp()
    surrogate = ratio * rows["advantage"]
    clipped_surrogate = ratio.clamp(1 - clip, 1 + clip) * rows["advantage"]
    return {
        "loss/policy": -torch.min(surrogate, clipped_surrogate),
        "loss/value": 0.5 * ((values - rows["target"]) ** 2 * in_use).sum(-1),
        "loss/entropy": -(logp.exp() * logp).sum(-1),
        "train/approx_kl": ratio - 1 - log_ratio,
        "train/clip_frac": ((ratio - 1).abs() > clip).float(),
    }


def explained_variance(value, target) -> float | None:
    """1 - Var(target - value) / Var(target); None if targets do not vary."""
    variance = target.var()
    return 1 - ((target - value).var() / variance).item() if variance > 0 else None


def schedule(step: int, knots: tuple[float, ...]) -> float:
    """A number, or step value step value ...: linear in between, constant outside."""
    if len(knots) == 1:
        return knots[0]
    steps, values = list(knots[0::2]), list(knots[1::2])
    if len(steps) < 2 or len(steps) != len(values) or steps[0] != 0 or steps != sorted(set(steps)):
        raise UsageError(f"--lr, --ent-coef {knots}: must be a number, or 0 value step value ...")
    return float(np.interp(step, steps, values))


# --- training ---


def learn(
    agent, rnd, optimizer, batch: dict, micro_batch: int, ent_coef: float, args: Args
) -> dict:
    """Train policy and predictor on a rollout for several epochs -> means over all minibatches.

    batch: columns of N * T rows, one environment after the other: obs, memory, valid, action, logp,
    value, advantage, target, and for the predictor frame and feature.
    """
    device = batch["obs"].device
    parameters = [*agent.parameters(), *rnd.predictor.parameters()]
    in_use = torch.tensor([args.ext_coef > 0, args.int_coef > 0], device=device)  # value heads
    predictor_share = args.predictor_share or min(1, 32 / (args.num_envs * WORLD))
    sums = defaultdict(float)
    num_updates = 0
    for _ in range(args.update_epochs):
        for first in range(0, len(batch["obs"]), args.minibatch_size):  # same order every epoch
            last = first + args.minibatch_size
            minibatch = {name: column[first:last] for name, column in batch.items()}
            # Valid rows per rank, on average; the clamp avoids 0 / 0.
            num_valid = mean_over_ranks(minibatch["valid"].sum()).clamp(min=1 / WORLD)
            # Drawn on the CPU: selecting rows by a mask on the GPU would wait for all its work.
            drawn = torch.rand(args.minibatch_size) < predictor_share
            num_drawn = mean_over_ranks(drawn.float().sum()).clamp(min=1 / WORLD).item()
            optimizer.zero_grad()
            for start in range(0, args.minibatch_size, micro_batch):
                piece = slice(start, start + micro_batch)
                rows = {name: x[piece] for name, x in minibatch.items()}
                memory = rows["memory"][:: args.num_steps]  # of each environment's first row
                logits, values, _ = agent(rows["obs"], memory, rows["valid"])
                terms = ppo_terms(logits, values, rows, args.clip, in_use)
                # This piece's share of the minibatch's means; backward() adds up the gradients.
                parts = {name: (x * rows["valid"]).sum() / num_valid for name, x in terms.items()}
                index = drawn[piece].nonzero().squeeze(1).to(device, non_blocking=True)
                errors = rnd.error(rows["frame"][index], rows["feature"][index])
                parts["loss/predictor"] = errors.sum() / num_drawn
                loss = parts["loss/policy"] + args.vf_coef * parts["loss/value"]
                loss += parts["loss/predictor"] - ent_coef * parts["loss/entropy"]
                loss.backward()
                for name, part in parts.items():
                    sums[name] += part.detach()
            for parameter in parameters:
                parameter.grad = mean_over_ranks(parameter.grad)
            limit = args.max_grad_norm or math.inf  # inf: only measures the norm
            sums["train/grad_norm"] += nn.utils.clip_grad_norm_(agent.parameters(), limit)
            optimizer.step()
            num_updates += 1
    return {name: mean_over_ranks(x / num_updates).item() for name, x in sums.items()}


def train(args: Args, make_envs=make_envs, saved: dict | None = None) -> dict:
    """Train; returns the last metrics, "step", "agent", "run" (the folder) and "eval".

    make_envs(args, num_envs, stream): returns any VectorEnv with next-step autoreset, uint8
    (C, H, W) observations (newest frame last) and Discrete actions.
    saved: the loaded checkpoint, if args already include its flags (as in `main`).
    Raises UsageError, FloatingPointError (training diverged) and KeyboardInterrupt.
    """
    args, saved = prepare(args, saved)
    device = set_up(args)
    T, N = args.num_steps, args.num_envs
    batch_size = T * N * WORLD
    step = saved["step"]
    # Each rank and each resumed part of a run has its own episodes and actions.
    stream = f"training from {step} of rank {RANK}"
    envs = make_envs(args, N, stream)
    envs = RecordEpisodeStatistics(envs, stats_key="counted")  # for envs without reports
    obs, _ = envs.reset()
    check_envs(envs, obs, N, AutoresetMode.NEXT_STEP, min_size=44)
    obs_shape = obs.shape[1:]
    num_actions = envs.single_action_space.n

    torch.manual_seed(args.seed)
    agent = Agent(obs_shape, num_actions, args).to(device)
    rnd = RND((1, *obs_shape[1:]), args).to(device)
    parameters = [*agent.parameters(), *rnd.predictor.parameters()]
    optimizer = torch.optim.Adam(parameters, eps=args.adam_eps, fused=True)
    rooms_ever = getattr(envs.unwrapped, "rooms_ever", np.zeros(256, bool))  # filled by AtariEnvs
    best = saved["best"]
    if args.resume:
        agent.load_state_dict(saved["agent"])
        sums = saved["rnd"]["discounted"]  # repeated or cut to N environments
        saved["rnd"]["discounted"] = sums[torch.arange(N) % len(sums)]
        rnd.load_state_dict(saved["rnd"])
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.param_groups[0]["eps"] = args.adam_eps  # not the restored one
        rooms_ever |= saved["rooms_ever"].numpy()
    compare_ranks(args, step)
    if args.compile:
        agent.compile()
    torch.manual_seed(stream_seed(args.seed, stream))  # all draws of training
    micro_batch = args.micro_batch or (256 if device.type == "cpu" else args.minibatch_size)
    if args.memory == "gru":
        micro_batch = math.ceil(micro_batch / T) * T  # whole environments

    # Row t = (obs_t, memory_t, valid_t, a_t, log pi(a_t|obs_t), V(obs_t), r_{t+1},
    # terminated_{t+1}, done_{t+1}), and for the predictor the newest frame of obs_{t+1}.
    # The row after an end is not valid: its action is ignored, so it stays out of the policy and
    # value losses. The predictor also trains on its frame, the first of the next episode; otherwise
    # that frame would stay novel and dying would be rewarded.
    rollout = {
        "obs": torch.zeros(T + 1, N, *obs_shape, dtype=torch.uint8, device=device),
        "memory": torch.zeros(T, N, agent.memory_size, device=device),  # only row 0 is used
        "valid": torch.zeros(T, N, device=device),
        "action": torch.zeros(T, N, dtype=torch.int64, device=device),
        "logp": torch.zeros(T, N, device=device),
        "value": torch.zeros(T, N, 2, device=device),  # of the game, of the bonus
    }
    # On the CPU, where GAE runs. Last axis: game, bonus. The bonus has no ends: its flags stay 0.
    rewards = torch.zeros(T, N, 2)
    terminations = torch.zeros(T, N, 2)
    dones = torch.zeros(T, N, 2)
    coefs = torch.tensor([args.ext_coef, args.int_coef])

    run = Run(args, device, step, batch_size)
    iteration = saved["iteration"]
    recent = deque(maxlen=100)  # returns of the last episodes
    memory = torch.zeros(N, agent.memory_size, device=device)
    done = np.zeros(N, bool)  # of the last step
    metrics = {}

    def save(name: str):
        # The outputs are checked too: a diverged agent can have finite weights.
        recent_obs = torch.from_numpy(obs).to(device)
        frames = recent_obs[:, -1:]
        with torch.no_grad():
            errors = rnd.error(frames, rnd.features(frames))
            outputs = [*agent(recent_obs, memory, torch.ones(N, device=device)), errors]
        state = {
            "step": step,
            "iteration": iteration,
            "best": best,
            "agent": agent.state_dict(),
            "rnd": rnd.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rooms_ever": torch.from_numpy(rooms_ever),
        }
        run.save(name, state, outputs)

    try:
        if not args.resume:
            save("checkpoint.pt")
        if step == 0:
            run.say(f"{args.warmup_steps * N:,} random steps start the frame statistics")
            for _ in range(args.warmup_steps):
                obs, *_ = envs.step(torch.randint(num_actions, (N,)).numpy())
                rnd.frames.update(torch.from_numpy(obs[:, -1:]).to(device))
            obs, _ = envs.reset()
        while step + batch_size <= args.total_timesteps:
            # Rollout
            start = time.perf_counter()
            env_s = 0.0
            returns, lengths = [], []  # of the episodes that end
            for t in range(T):
                rollout["obs"][t] = torch.from_numpy(obs)
                rollout["memory"][t] = memory
                rollout["valid"][t] = torch.from_numpy(~done)
                with torch.no_grad():
                    logits, value, memory = agent(rollout["obs"][t], memory, rollout["valid"][t])
                action = sample(logits)
                logp = logits.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)
                rollout["action"][t] = action
                rollout["logp"][t] = logp
                rollout["value"][t] = value
                action = action.cpu().numpy()
                before = time.perf_counter()
                obs, reward, terminated, truncated, info = envs.step(action)
                env_s += time.perf_counter() - before
                done = (terminated | truncated).astype(bool)
                rewards[t, :, 0] = torch.as_tensor(reward)
                terminations[t, :, 0] = torch.as_tensor(terminated.astype(bool))
                dones[t, :, 0] = torch.as_tensor(done)
                _, ended_returns, ended_lengths = ended_episodes(envs, info)
                returns += ended_returns
                lengths += ended_lengths
                run.bar.update(N * WORLD)
            rollout["obs"][T] = torch.from_numpy(obs)

            # Bonus under the frame statistics so far, which then take in this rollout
            frames = rollout["obs"][1:, :, -1:]
            pieces = frames.flatten(0, 1).split(micro_batch)
            with torch.no_grad():
                errors = [rnd.error(piece, rnd.features(piece)) for piece in pieces]
            raw_bonus = torch.cat(errors).view(T, N)
            rewards[..., 1] = rnd.normalize(raw_bonus) if step >= args.bonus_after else 0
            rnd.frames.update(frames.flatten(0, 1))
            # Features again, under the new statistics: what the predictor learns
            features = torch.cat([rnd.features(piece) for piece in pieces]).view(T, N, -1)

            # Advantages. The row after an end shows the episode's last observation, from whose
            # value a truncated episode bootstraps. The intrinsic return runs through this row.
            with torch.no_grad():
                valid = torch.ones(N, device=device)  # affects only the memory, unused here
                _, last_value, _ = agent(rollout["obs"][T], memory, valid)
            values = torch.cat([rollout["value"], last_value[None]]).cpu()
            advantages = torch.zeros(T, N, 2)
            for i, gamma in enumerate([args.gamma, args.gamma_int]):
                head = rewards[..., i], values[..., i], terminations[..., i], dones[..., i]
                advantages[..., i] = gae(*head, gamma, args.gae_lambda)
            targets = advantages + values[:T]
            is_valid = rollout["valid"].cpu().bool()
            value_ext, value_int = values[:T][is_valid].unbind(-1)
            target_ext, target_int = targets[is_valid].unbind(-1)
            columns = rollout | {"obs": rollout["obs"][:T], "frame": frames, "feature": features}
            columns["advantage"] = (advantages * coefs).sum(-1).to(device)
            columns["target"] = targets.to(device)
            # All rows of one environment, then those of the next: slices are whole environments.
            batch = {name: column.transpose(0, 1).flatten(0, 1) for name, column in columns.items()}
            acted = time.perf_counter()

            # Learning
            lr = schedule(step, args.lr)
            ent_coef = schedule(step, args.ent_coef)
            optimizer.param_groups[0]["lr"] = lr
            means = learn(agent, rnd, optimizer, batch, micro_batch, ent_coef, args)
            if not np.isfinite(list(means.values())).all():
                raise FloatingPointError(f"a loss is not finite after step {step:,}: {means}")
            learned = time.perf_counter()

            # Metrics: losses are means over ranks; episodes and seconds are rank 0's
            next_step = step + batch_size
            metrics = {
                "step": next_step,
                "iteration": iteration + 1,
                "episode/return": np.mean(returns) if returns else None,
                "episode/length": np.mean(lengths) if lengths else None,
                "episode/count": len(returns),
                "episode/rooms_ever": rooms_ever.sum() or None,
                "eval/return": None,
                **means,
                "train/explained_variance": explained_variance(value_ext, target_ext),
                "train/lr": lr,
                "train/ent_coef": ent_coef,
                "train/valid_frac": is_valid.float().mean().item(),
                "int/reward_raw": raw_bonus.mean().item(),
                "int/reward": rewards[..., 1].mean().item(),
                "int/divisor": rnd.returns.std.item(),
                "int/return_std": target_int.std().item(),
                "int/explained_variance": explained_variance(value_int, target_int),
                "time/sps": batch_size / (learned - start),
                "time/env_s": env_s,
                "time/policy_s": acted - start - env_s,
                "time/learn_s": learned - acted,
            }
            due = args.eval_every and next_step // args.eval_every > step // args.eval_every
            if due and RANK == 0:
                metrics["eval/return"] = evaluate(agent, args, make_envs)["game"]["mean"]
            run.log(metrics)
            step = next_step
            iteration += 1
            recent.extend(returns)
            mean_return = float(np.mean(recent)) if len(recent) == 100 else -math.inf
            if mean_return > best:
                best = mean_return
                save("best.pt")
            is_last = step + batch_size > args.total_timesteps
            if args.target_return:  # the mean over ranks, so that they stop together
                mean_return = torch.tensor(mean_return, dtype=torch.float64, device=device)
                is_last |= mean_over_ranks(mean_return).item() >= args.target_return
            if is_last or time.monotonic() - run.last_save >= args.checkpoint_every:
                save("checkpoint.pt")
            if is_last:
                break
        result = metrics | {"step": step, "agent": agent, "run": str(run.folder)}
        if args.eval_episodes and RANK == 0:
            run.say(f"trained to step {step:,}, evaluating")
            result["eval"] = {"step": step, "splits": evaluate(agent, args, make_envs)}
            run.write("eval.json", json.dumps(result["eval"], indent=1).encode())
        return result
    except KeyboardInterrupt:
        # The weights may include part of an unfinished iteration; its steps do not count.
        save("checkpoint.pt")
        run.say(f"stopped, saved at step {step:,}: --resume {run.folder} continues", sys.stderr)
        raise
    finally:
        run.close()
        envs.close()


# --- evaluation ---


def evaluate(agent: Agent, args: Args, make_envs=make_envs) -> dict:
    """Play at least args.eval_episodes episodes -> {"game": {mean, stderr, returns, lengths}}.

    Every evaluation uses the same seeds, so two evaluations differ only in the agent.
    """
    per_env = math.ceil(args.eval_episodes / 64)  # episodes in each of at most 64 environments
    envs = make_envs(args, math.ceil(args.eval_episodes / per_env), "game")
    returns, lengths = play(agent, envs, per_env, stream_seed(args.seed, "game actions"))
    envs.close()
    mean = float(np.mean(returns))
    stderr = float(np.std(returns) / max(len(returns) - 1, 1) ** 0.5)  # std(ddof=1) / sqrt(n)
    tqdm.write(f"game: return {mean:.2f} +- {stderr:.2f} (std error, {len(returns)} episodes)")
    return {"game": {"mean": mean, "stderr": stderr, "returns": returns, "lengths": lengths}}


@torch.no_grad()
def play(agent, envs, episodes: int, seed: int, greedy: bool = False) -> tuple[list, list]:
    """Play this many whole episodes in each environment -> returns, lengths.

    A fixed number per environment: counting the first ones to finish would favor short episodes.
    greedy: take the likeliest action, for benchmark/evaluate.py.
    """
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    envs = RecordEpisodeStatistics(envs, stats_key="counted")
    played = np.zeros(envs.num_envs, int)
    returns, lengths = [], []
    memory = torch.zeros(envs.num_envs, agent.memory_size, device=device)
    done = np.zeros(envs.num_envs, bool)
    obs, _ = envs.reset()
    while played.min() < episodes:
        valid = torch.from_numpy(~done).to(device)
        logits, _, memory = agent(torch.from_numpy(obs).to(device), memory, valid)
        action = logits.argmax(-1) if greedy else sample(logits, generator)
        obs, _, terminated, truncated, info = envs.step(action.cpu().numpy())
        done = (terminated | truncated).astype(bool)
        for env, episode_return, length in zip(*ended_episodes(envs, info), strict=True):
            if played[env] < episodes:
                returns.append(episode_return)
                lengths.append(length)
            played[env] += 1
    return returns, lengths


# --- plumbing, the same text in all five scripts ---

SCRIPT = Path(__file__).stem


class UsageError(ValueError):
    """A mistake the user can fix: `main` prints it in one line and returns 2."""


def plain(name: str, value, kind):
    """Check one flag -> a plain Python value; numbers must be finite and at least 0."""
    if isinstance(value, np.generic):  # as a sweep passes; a checkpoint must not contain one
        value = value.item()
    choices = get_args(kind)
    low = 1 if name in AT_LEAST_1 else 0
    high = 2**63 if kind is int else sys.float_info.max
    if name in AT_MOST_1:
        high = 1
    if get_origin(kind) is Literal and value in choices:
        return choices[choices.index(value)]
    if get_origin(kind) is tuple:
        return tuple(plain(name, x, choices[0]) for x in np.atleast_1d(value).tolist())
    if kind is str and isinstance(value, str | os.PathLike):
        return str(value)
    if kind is bool and value in (False, True):
        return kind(value)
    if kind in (int, float) and isinstance(value, int | float):
        if low <= value <= high and kind(value) == value:
            return kind(value)
    limits = f", from {low} to 1" if high == 1 else f", at least {low} and finite"
    wanted = choices or kind.__name__ + limits * (kind in (int, float))
    raise UsageError(f"--{name.replace('_', '-')} {value}: must be {wanted}")


def prepare(args: Args, saved: dict | None) -> tuple[Args, dict]:
    """Check all flags -> plain args, and the checkpoint to start from."""
    if args.resume and saved is None:  # called from Python: flags other than the defaults win
        saved = load_checkpoint(args.resume)
        defaults = asdict(Args())
        given = {name: x for name, x in asdict(args).items() if x != defaults[name]}
        args = Args(**(saved["args"] | given))
    kinds = get_type_hints(Args)
    args = Args(**{name: plain(name, x, kinds[name]) for name, x in vars(args).items()})
    if args.eval_every and not args.eval_episodes:
        raise UsageError("--eval-every: needs --eval-episodes")
    schedule(0, args.lr)  # raises UsageError
    schedule(0, args.ent_coef)
    check(args)
    if not args.resume:
        return args, {"step": 0, "iteration": 0, "best": -math.inf}
    for name in FIXED:
        old, new = saved["args"].get(name), getattr(args, name)
        if new != old:
            raise UsageError(f"--{name.replace('_', '-')} {new}: the resumed run has {old}")
    if Path(args.resume, "best.pt").exists():  # may be newer than the checkpoint
        saved["best"] = load_checkpoint(args.resume, "best.pt")["best"]
    return args, saved


def load_checkpoint(run: str, name: str = "checkpoint.pt") -> dict:
    """Load with weights_only=True, so that an untrusted file cannot execute code."""
    try:
        saved = torch.load(Path(run, name), map_location="cpu", weights_only=True)
        unknown = saved["args"].keys() - vars(Args()).keys()
    except Exception as error:  # a damaged or foreign file can raise nearly anything
        raise UsageError(f"--resume {run}: cannot read {name}, {error!r}") from None
    if "iteration" not in saved:
        raise UsageError(f"--resume {run}: from an older version; resume it with commit 0ac8b70")
    if unknown:
        raise UsageError(f"--resume {run}: unknown flags {', '.join(sorted(unknown))}")
    return saved


def check_envs(envs, obs, num_envs: int, autoreset: AutoresetMode, min_size: int):
    """Raise UsageError for environments that the script cannot train on."""
    mode = envs.metadata.get("autoreset_mode")
    if envs.num_envs != num_envs or mode != autoreset:
        given = f"{envs.num_envs} with {mode}"
        raise UsageError(f"make_envs: needs {num_envs} environments with {autoreset}, not {given}")
    actions = envs.single_action_space
    if not isinstance(actions, gym.spaces.Discrete) or actions.start != 0:
        raise UsageError(f"actions {actions}: must be Discrete, starting at 0")
    # Fewer pixels than channels: probably (N, H, W, C)
    if obs.dtype != np.uint8 or obs.ndim != 4 or min(obs.shape[2:]) < max(min_size, obs.shape[1]):
        needed = f"uint8 (N, C, H, W), at least {min_size} pixels wide and high, H and W >= C"
        raise UsageError(f"observations {obs.dtype} {obs.shape}: must be {needed}")


def ended_episodes(envs, info: dict) -> tuple[list, list, list]:
    """A step's info -> indices of environments whose episodes ended, returns, lengths.

    Once the environments report in info["episode"] (whole, unclipped), only that counts. Until
    then every end does: if lost lives are ends, report in every step, as APPO's AtariEnvs does.
    """
    info = info.get("final_info", {}) | info  # SyncVectorEnv's same-step reports
    if "episode" in info:
        envs.reports_episodes = True
    key = "episode" if hasattr(envs, "reports_episodes") else "counted"
    if key not in info:
        return [], [], []
    ended = np.flatnonzero(info[f"_{key}"])
    return ended.tolist(), info[key]["r"][ended].tolist(), info[key]["l"][ended].tolist()


def available_cores() -> int:
    """Cores by affinity mask and container quota, divided among the local ranks."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def set_up(args: Args) -> torch.device:
    """Choose and try the device, set PyTorch's threads, join the other ranks."""
    name = args.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if WORLD > 1 and name.startswith("cuda"):
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name} (auto, cpu, cuda, cuda:N): {error}") from None
    torch.set_num_threads(args.threads or (available_cores() if device.type == "cpu" else 1))
    torch.set_float32_matmul_precision("high")  # TF32, the default of convolutions
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX and M_TRIM_THRESHOLD: keep freed memory;
    libc.mallopt(-1, -1)  # otherwise CPU time rises by 9 %
    if WORLD > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(days=1))  # rank 0 may evaluate for long
    return device


def mean_over_ranks(x):
    """The mean of a tensor over torchrun's processes; without torchrun x itself."""
    if WORLD > 1:
        x = x.clone()
        dist.all_reduce(x)
        x /= WORLD
    return x


def compare_ranks(args: Args, step: int):
    """Refuse to train ranks that were started with different flags or checkpoints."""
    if WORLD > 1:
        # These flags may differ between ranks.
        local = dict.fromkeys(["device", "threads", "run_dir", "run_name", "resume"])
        own = asdict(args) | local | {"step": step}
        gathered = [None] * WORLD
        dist.all_gather_object(gathered, own)
        if gathered.count(own) != WORLD:
            raise UsageError("the ranks were started with different flags or checkpoints")


class Run:
    """A run's folder, written by rank 0 only, and its progress on the terminal."""

    def __init__(self, args: Args, device: torch.device, step: int, batch_size: int):
        self.args = args
        self.folder = None
        self.last_save = time.monotonic()
        total = step + max(0, args.total_timesteps - step) // batch_size * batch_size
        hide = RANK > 0 or args.quiet or not (sys.stderr and sys.stderr.isatty())
        self.bar = tqdm(total=total, initial=step, unit=" steps", unit_scale=True, disable=hide)
        if RANK > 0:
            return
        self.folder = Path(args.resume)
        if not args.resume:
            name = f"{args.env_id}__{SCRIPT}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
            self.folder = Path(args.run_dir, args.run_name or name)
            # Stopped before its first save: the same command starts it again.
            unsaved = any(self.folder.glob("metrics.csv")) and not any(self.folder.glob("*.pt"))
            try:
                self.folder.mkdir(parents=True, exist_ok=unsaved)  # atomic
            except OSError as error:
                hint = f"--resume {self.folder} continues an existing run"
                raise UsageError(f"--run-name, {self.folder}: {error.strerror}; {hint}") from None
        self.table = open(self.folder / "metrics.csv", "ab+")
        try:
            fcntl.flock(self.table, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.folder}: another process is training it") from None
        except OSError:
            pass  # a file system without locks
        # The checkpoint was loaded before the lock; it may be newer now.
        if args.resume and load_checkpoint(args.resume)["step"] != step:
            raise UsageError(f"--resume {args.resume}: another process was training it, try again")
        self.columns = self.cut_table(step)
        config = self.folder / "config.json"
        parts, revision, cpu = [], "", None
        with contextlib.suppress(OSError, ValueError):  # a new run, or a damaged file
            parts = json.loads(config.read_text())
        with contextlib.suppress(OSError):  # without git
            git = ["git", "-C", Path(__file__).resolve().parent, "describe", "--always", "--dirty"]
            revision = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        with contextlib.suppress(OSError):
            cpu = re.search("model name\t: (.*)", Path("/proc/cpuinfo").read_text())
        packages = [x for x in ("torch", "numpy", "gymnasium", "envpool") if x in sys.modules]
        part = {
            "script": SCRIPT,
            "step": step,
            "args": asdict(args),
            "git": revision or None,
            "python": sys.version.split()[0],
            "packages": {name: sys.modules[name].__version__ for name in packages},
            "cpu": cpu and cpu[1],
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "ranks": WORLD,
        }
        self.write("config.json", json.dumps([*parts, part], indent=1).encode())
        self.tensorboard = SummaryWriter(self.folder, purge_step=step + 1)
        threads = args.threads or available_cores()
        self.say(f"{self.folder}: steps {step:,} to {total:,}, {device}, threads: {threads}")

    def cut_table(self, step: int) -> list[str]:
        """Drop torn rows and rows after `step` from metrics.csv -> its columns."""
        self.table.seek(0)
        lines = self.table.read().splitlines(keepends=True)
        had_rows = len(lines) > 1
        while len(lines) > 1:
            row = re.fullmatch(rb"(\d+),.*\n", lines[-1])
            if row and int(row[1]) <= step:
                break
            lines.pop()
        if not lines or not lines[0].endswith(b"\n"):  # a new run, or a crash cut the header
            self.table.truncate(0)
            return []
        columns = lines[0].decode("utf-8-sig", "replace").strip().split(",")
        if columns[0] != "step" or (step and had_rows and len(lines) == 1):
            raise UsageError(f"{self.table.name}: not this run's table; move it away")
        self.table.truncate(sum(map(len, lines)))
        return columns

    def say(self, text: str, stream=None):
        """Print a line: to stdout unless --quiet, or to this stream in any case."""
        stream = stream or (None if self.args.quiet else sys.stdout)
        if RANK == 0 and stream:
            tqdm.write(text, stream)
            stream.flush()  # a log file has it at once

    def log(self, metrics: dict):
        """Write a row of metrics; None is an empty cell. A resumed run keeps its columns."""
        step, sps, score = metrics["step"], metrics["time/sps"], metrics["episode/return"]
        score = "return -" if score is None else f"return {score:.2f}"
        self.bar.set_postfix_str(score)
        if self.bar.disable or not (sys.stdout and sys.stdout.isatty()):
            left = (self.bar.total - step) / sps / 60
            self.say(f"step {step:,}  {score}  {sps:,.0f} steps/s  {left:.0f} min left")
        if RANK > 0:
            return
        if not self.columns:
            self.columns = list(metrics)
            self.table.write((",".join(self.columns) + "\n").encode())
        cells = [metrics.get(name) for name in self.columns]
        cells = [f"{x:.6g}" if isinstance(x, float) else "" if x is None else str(x) for x in cells]
        self.table.write((",".join(cells) + "\n").encode())
        self.table.flush()
        for name, value in metrics.items():
            if value is not None:
                self.tensorboard.add_scalar(name, value, step)
        self.tensorboard.flush()

    def write(self, name: str, data: bytes):
        """Write to a temporary file, then rename: the file is always complete, old or new."""
        if not self.folder.exists():
            self.say(f"{self.folder} was deleted, creating it again", sys.stderr)
            self.folder.mkdir(parents=True)
        temporary = self.folder / f"{name}.tmp"
        temporary.write_bytes(data)
        os.replace(temporary, self.folder / name)

    def save(self, name: str, state: dict, outputs):
        """Write a checkpoint; raise FloatingPointError if weights or outputs are not finite."""
        if name == "checkpoint.pt":
            self.last_save = time.monotonic()
        if RANK > 0:
            return
        # Networks and running statistics, not the optimizer's tensors, which are nested.
        parts = [part.values() for part in state.values() if isinstance(part, dict)]
        tensors = [x for part in parts for x in part if isinstance(x, torch.Tensor)]
        if not all(torch.isfinite(x).all() for x in [*outputs, *tensors]):
            raise FloatingPointError(f"training has diverged; {name} was not written")
        state["script"] = SCRIPT
        state["args"] = asdict(self.args) | {"resume": ""}
        buffer = io.BytesIO()  # torch.save itself turns a full disk into a RuntimeError
        torch.save(state, buffer)
        self.write(name, buffer.getbuffer())

    def close(self):
        self.bar.close()
        if RANK == 0:
            # A signal inside TensorBoard's writer can leave its lock taken: do not wait forever.
            closing = threading.Thread(target=self.tensorboard.close, daemon=True)
            closing.start()
            closing.join(5)
            self.table.close()


def interrupt(number, frame):
    """Stop on the first signal; ignore later ones while `train` is saving."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(argv=None, make_envs=make_envs) -> int:
    """Run the command line -> 0 done, 2 bad usage, 130 after Ctrl-C, SIGTERM or SIGHUP."""
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                handlers[number] = signal.signal(number, interrupt)
    try:
        saved = None
        args = tyro.cli(Args, args=argv, description=(__doc__ or "").split("\n\n")[0])
        if args.resume:  # parse again, on top of the run's flags
            saved = load_checkpoint(args.resume)
            args = tyro.cli(Args, args=argv, default=Args(**saved["args"]))
        train(args, make_envs, saved)
        if WORLD > 1:
            dist.destroy_process_group()
        return 0
    except KeyboardInterrupt:
        return 130
    except UsageError as error:
        sys.stderr.write(f"{SCRIPT}.py: {' '.join(str(error).split())}\n")  # one write per rank
        if WORLD > 1 and dist.is_initialized():
            dist.destroy_process_group()  # its threads may otherwise abort the exit
        return 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
