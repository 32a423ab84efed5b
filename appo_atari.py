# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0", "numpy==2.4.6", "gymnasium==1.4.0", "envpool==1.0.1", "tyro==1.0.17",
#     "pydantic==2.14.3", "tensorboard==2.21.0", "tqdm==4.70.1",
# ]
# ///
"""Asynchronous PPO (APPO) on Atari: the learner of Sample Factory in one file.

    python appo_atari.py --env-id Breakout         # 25M environment steps = 100M frames
    python appo_atari.py --env-id Breakout --sync  # no acting while learning: reproducible
    python appo_atari.py --resume runs/NAME        # continue a run; flags given now win

APPO: Petrenko et al. 2020, arXiv:2006.11751. PPO: Schulman et al. 2017, arXiv:1707.06347. Settings:
M. Stammers' model card for Asteroids. Unlike most PPO code, as in Sample Factory or that card:
- the ratio is clamped to [0.05, 20], then clipped to [1 / (1 + clip), 1 + clip];
- the critic predicts normalized returns; frames are normalized too, element by element;
- minibatches are whole trajectories in a fixed order; rows that are too old are masked;
Departures and results: docs/appo_atari.md. V-trace: benchmark/variants/appo_vtrace.py.
"""

import argparse
import contextlib
import copy
import csv
import ctypes
import io
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from datetime import datetime, timedelta
from importlib.metadata import version
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, Literal

import gymnasium as gym
import numpy as np
import pydantic
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

WORLD = int(os.environ.get("WORLD_SIZE", 1))  # number of processes (torchrun)
RANK = int(os.environ["RANK"]) if WORLD > 1 else 0  # number of this process
SCRIPT = Path(__file__).stem
ROWS_ON_CPU = 256  # default of --micro-batch on a CPU


def as_schedule(numbers):
    """One number, or pairs of step and value (numbers or text) -> pairs; the first step is 0."""
    numbers = np.atleast_1d(numbers).astype(float).tolist()
    if len(numbers) == 1:
        return [0, *numbers]
    steps = numbers[0::2]
    if len(numbers) % 2 or steps[:1] != [0] or steps != sorted(set(steps)):
        raise ValueError("must be a number, or pairs of rising steps, from 0 on, and values")
    return numbers


Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
Share = Annotated[float, Field(ge=0, le=1)]
Schedule = Annotated[tuple[NonNegativeFloat, ...], pydantic.BeforeValidator(as_schedule)]
CONFIG = dict(allow_inf_nan=False, extra="forbid", hide_input_in_errors=True, validate_default=True)


@dataclass(config=CONFIG)
class Args:
    # run
    env_id: str = "Breakout"  # Atari game as EnvPool spells it, with or without -v5
    total_timesteps: PositiveInt = 25_000_000  # environment steps (4 frames), in whole datasets
    seed: NonNegativeInt = 1  # with --sync on a CPU, equal flags give equal metrics, not time/*
    run_dir: str = "runs"  # folder of all runs
    run_name: str = ""  # name of a new run's folder; "" = env-id__script__seed__time
    device: Device = "auto"  # auto, cpu, cuda, cuda:1; cuda with torchrun: a GPU per process
    threads: NonNegativeInt = 0  # CPU threads; 0 = all cores
    compile: bool = False  # torch.compile; on a GPU with CUDA graphs
    precision: Literal["fp32", "bf16"] = "fp32"  # fp32: TF32 on a GPU; bf16 is slow on most CPUs
    micro_batch: NonNegativeInt = 0  # rows per backward pass (they add up); 0 = all, on a CPU 256
    checkpoint_every: NonNegativeFloat = 300  # seconds between checkpoints
    eval_episodes: NonNegativeInt = 100  # episodes of an evaluation; 0 = never evaluate
    eval_every: NonNegativeInt = 0  # steps between evaluations; 0 = only at the end
    # environment
    repeat_action_probability: Share = 0  # of repeating the last action, per frame
    noop_max: PositiveInt = 30  # most no-ops an episode starts with
    fire_reset: bool = True  # press FIRE at the start of an episode
    episodic_life: bool = True  # a lost life ends the episode, not the game
    max_episode_steps: Annotated[int, Field(ge=1, lt=2**31)] = 27_000  # time limit of a game
    frame_size: Literal[84, 96] = 84  # width and height of the gray frames, in pixels
    stack: PositiveInt = 4  # frames per observation
    num_envs: PositiveInt = 32  # parallel environments (per process)
    num_groups: PositiveInt = 2  # groups of environments, each stepped by its own thread
    # optimization; --lr and --ent-coef are the card's
    num_steps: PositiveInt = 128  # rollout length per environment
    minibatch_size: PositiveInt = 1024  # rows per SGD step and process; a multiple of --num-steps
    num_minibatches: PositiveInt = 8  # minibatches per dataset; one dataset per iteration
    update_epochs: PositiveInt = 4  # passes over a dataset
    lr: Schedule = 3.033891184e-4
    """learning rate, or pairs of step and rate from step 0 on, linear in between"""
    anneal_lr: bool = True  # multiply the learning rate by the share of the run that is left
    adam_eps: NonNegativeFloat = 1e-5  # Adam's epsilon
    max_grad_norm: NonNegativeFloat = 0  # clip the gradient's norm; 0 = off
    sync: bool = False  # no acting while learning
    num_batches_to_accumulate: NonNegativeInt = 2  # datasets that actors may be ahead
    max_policy_lag: PositiveInt = 1000  # mask rows that are this many SGD steps old
    # algorithm
    gamma: Share = 0.99  # discount
    gae_lambda: Share = 0.95  # GAE's lambda
    clip: NonNegativeFloat = 0.1  # clip the ratio to 1 / (1 + this), 1 + this; 0 = off
    vf_clip: NonNegativeFloat = 1  # clip range of the value, in std of returns; 0 = off
    vf_coef: NonNegativeFloat = 0.5  # weight of the squared value error; 0.25 here is CleanRL's 0.5
    ent_coef: Schedule = 4.677351413e-4  # weight of the entropy; a number, or as --lr

    def __post_init__(self):
        N, T = self.num_envs // self.num_groups, self.num_steps
        rows = self.minibatch_size * self.num_minibatches
        if self.num_envs % self.num_groups:
            raise ValueError(f"--num-groups {self.num_groups}: a divisor of {self.num_envs}")
        if self.minibatch_size % T or rows % (N * T):
            raise ValueError(f"--minibatch-size: a multiple of {T}, x --num-minibatches: {N * T}")
        if self.total_timesteps < rows * WORLD:
            raise ValueError(f"--total-timesteps {self.total_timesteps}: at least {rows * WORLD}")


# --- environment ---


class AtariEnvs(gym.vector.VectorEnv):
    """EnvPool's Atari: uint8 (N, frames, S, S), the newest frame last, next-step autoreset.

    The step after an end ignores its action and returns the next episode's first observation: it is
    no transition. Rewards are signs; info["episode"] has whole games, unclipped.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, envs, num_envs: int):
        self.envs = envs
        self.num_envs = num_envs
        self.single_observation_space = envs.observation_space
        self.single_action_space = envs.action_space

    def reset(self, *, seed=None, options=None):
        self.ended = np.zeros(self.num_envs, bool)  # a life or a game, in the last step
        self.lives = np.zeros(self.num_envs)  # inf after a game, so that its reset is no restart
        self.returns = np.zeros(self.num_envs)  # of the games so far
        self.lengths = np.zeros(self.num_envs, int)
        return self.envs.reset()

    def step(self, actions):
        obs, reward, terminated, truncated, info = self.envs.step(actions)
        self.returns += np.where(self.ended, 0, info["reward"])
        self.lengths += ~self.ended
        # A reset after a lost life plays no-ops. If they end the game, EnvPool starts the next one
        # without a report, and we only see more lives: it counts as a game's end now
        restarted = self.ended & (info["lives"] > self.lives)
        game_over = info["terminated"] > 0  # the game, not a life; ignored in a reset
        terminated = terminated | (truncated & game_over)  # over exactly at the time limit
        self.ended = terminated | truncated
        game_ended = (self.ended & game_over) | truncated | restarted
        self.lives = np.where(game_ended, np.inf, info["lives"])
        info |= {"episode": {"r": self.returns, "l": self.lengths}, "_episode": game_ended}
        self.returns = np.where(game_ended, 0, self.returns)
        self.lengths = np.where(game_ended, 0, self.lengths)
        return obs, reward, terminated, truncated, info

    def close_extras(self, **kwargs):
        self.envs.close()


def make_envs(args: Args, num_envs: int, seed: int, test: bool = False):
    """Create Atari environments; those of an evaluation (test) are the same."""
    with contextlib.redirect_stderr(io.StringIO()):  # gym prints a banner
        import envpool
    game = args.env_id.removesuffix("-v5")
    specs = envpool.registration.registry.specs
    if specs.get(f"{game}-v5", [""])[0] != "envpool.atari":
        raise UsageError(f"--env-id {args.env_id}: no Atari game of EnvPool")
    # From one seed EnvPool makes seed + i: nearby seeds would share episodes
    seeds = np.random.SeedSequence(seed).generate_state(num_envs) // 2  # below 2 ** 31
    envs = envpool.make(
        f"{game}-v5",
        env_type="gymnasium",
        num_envs=num_envs,
        num_threads=args.threads or available_cores(),
        env_seed=seeds.tolist(),
        repeat_action_probability=args.repeat_action_probability,
        noop_max=args.noop_max,
        use_fire_reset=args.fire_reset,
        episodic_life=args.episodic_life,
        reward_clip=True,
        max_episode_steps=args.max_episode_steps,
        img_height=args.frame_size,
        img_width=args.frame_size,
        stack_num=args.stack,
    )
    return AtariEnvs(envs, num_envs)


# --- network ---


class RunningMoments(nn.Module):
    """Running mean and std of all rows seen, element by element.

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
        """x: (B, *shape). fp32 sums are exact: 256 x 255^2 < 2^24."""
        new = torch.zeros_like(self.sums)
        new[0] = len(x)
        for rows in x.split(256):
            rows = rows.float() if x.dtype == torch.uint8 else rows.double()
            new[1] += rows.sum(0)
            new[2] += rows.square().sum(0)
        self.sums += sum_over_ranks(new)
        mean = self.sums[1] / self.sums[0]
        variance = (self.sums[2] / self.sums[0] - mean**2).clamp(min=1e-12)
        self.mean.copy_(mean)
        self.std.copy_((variance + self.epsilon).sqrt())


class Agent(nn.Module):
    """Sample Factory's convnet_atari: uint8 (B, C, H, W) -> logits (B, A), normalized value."""

    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        super().__init__()
        self.bf16 = args.precision == "bf16"
        self.trunk = nn.Sequential(
            nn.Conv2d(obs_shape[0], 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
        )
        self.hidden = nn.Linear(self.trunk(torch.zeros(1, *obs_shape)).numel(), 512)
        self.policy = nn.Linear(512, num_actions)
        self.value = nn.Linear(512, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.orthogonal_(module.weight)
                nn.init.zeros_(module.bias)
        self.to(memory_format=torch.channels_last)  # fails for the 5-D sums of self.frames
        # With a leading 1, for channels-last. Start and epsilon: Sample Factory's, for 0 to 255
        self.frames = RunningMoments((1, *obs_shape), 1, variance=255**2, epsilon=1e-5 * 255**2)
        self.frames.mean = self.frames.mean.contiguous(memory_format=torch.channels_last)
        self.frames.std = self.frames.std.contiguous(memory_format=torch.channels_last)
        self.returns = RunningMoments((), 1, variance=1, epsilon=1e-5)

    def forward(self, obs):
        # Channels-last while still uint8: a quarter of the traffic
        x = obs.contiguous(memory_format=torch.channels_last).float()
        x = x.sub_(self.frames.mean).div_(self.frames.std).clamp_(-5, 5)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            x = self.trunk(x).permute(0, 2, 3, 1).flatten(1)  # no copy: it is channels-last
            x = F.relu(self.hidden(x))
        x = x.float()  # heads in fp32
        return self.policy(x), self.value(x).squeeze(-1)


# --- mathematics ---


def sample(logits, generator=None):
    """Draw from Categorical(logits): (B, A) -> (B,), by the Gumbel-max trick."""
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - noise.log()).argmax(-1)  # -log(exponential noise) is Gumbel noise


@torch.no_grad()
def act(agent, obs, noise):
    """uint8 (N, C, H, W), exponential noise (N, A) -> actions, log pi(a), values, each (N,)."""
    logits, value = agent(obs)
    action = (logits - noise.log()).argmax(-1)  # as `sample` does
    return action, logits.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1), value


def gae(reward, value, terminated, done, gamma: float, lam: float):
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16) -> advantages (T, N).

    reward, terminated, done: (T, N), of row t's step. value: (T + 1, N), of its observation. There
    is no value after a termination, and any end (`done`) cuts the sum.
    """
    delta = reward + gamma * value[1:] * (1 - terminated) - value[:-1]
    advantage = torch.zeros_like(value)  # its last row stays 0
    for t in reversed(range(len(reward))):
        advantage[t] = delta[t] + gamma * lam * (1 - done[t]) * advantage[t + 1]
    return advantage[:-1]


def ppo_loss(agent, rows: dict, ent_coef, args: Args) -> tuple:
    """Losses (B,) of a minibatch's rows, and their terms and statistics, each (B,).

    loss/policy: negated clipped surrogate (PPO, eq. 7). loss/value: the larger squared error of
    new and clipped value. train/approx_kl: r - 1 - log r.
    """
    clip = args.clip or math.inf
    vf_clip = args.vf_clip or math.inf
    logits, value = agent(rows["obs"])
    logp = logits.log_softmax(-1)
    log_ratio = logp.gather(-1, rows["action"][:, None]).squeeze(-1) - rows["logp"]
    ratio = log_ratio.exp().clamp(0.05, 20)  # Sample Factory's safety limits
    clipped_ratio = ratio.clamp(1 / (1 + clip), 1 + clip)
    surrogate = ratio * rows["advantage"]
    clipped_surrogate = clipped_ratio * rows["advantage"]
    policy_loss = -torch.min(surrogate, clipped_surrogate)
    clipped_value = rows["value"] + (value - rows["value"]).clamp(-vf_clip, vf_clip)
    value_error = (value - rows["target"]) ** 2
    clipped_value_error = (clipped_value - rows["target"]) ** 2
    value_loss = torch.max(value_error, clipped_value_error)
    entropy = -(logp.exp() * logp).sum(-1)
    loss = policy_loss + args.vf_coef * value_loss - ent_coef * entropy
    terms = {
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "loss/entropy": entropy,
        "train/approx_kl": log_ratio.exp() - 1 - log_ratio,
        "train/clip_frac": (clipped_ratio != ratio).float(),
    }
    return loss, terms


def standardize(x, valid):
    """Zero mean and unit variance over the valid rows of all ranks, 0 in the others."""
    num_valid = sum_over_ranks(valid.sum()).clamp(min=1)  # avoids 0 / 0
    x = (x - sum_over_ranks((x * valid).sum()) / num_valid) * valid
    variance = sum_over_ranks(x.square().sum()) / num_valid
    return x / variance.sqrt().clamp(min=1e-4)


def explained_variance(value, target) -> float | None:
    """1 - Var(target - value) / Var(target); None if targets do not vary."""
    variance = target.var()
    return 1 - ((target - value).var() / variance).item() if variance > 0 else None


def schedule(step: int, numbers: tuple[float, ...]) -> float:
    """Pairs of step and value: linear in between, constant outside."""
    return float(np.interp(step, numbers[0::2], numbers[1::2]))


# --- actors ---


class Group:
    """Environments that step together in a thread, and their state between two rollouts."""

    def __init__(self, envs, obs, seed: int, device: torch.device):
        self.envs = envs
        on_gpu = device.type == "cuda"
        # What the next actions are chosen from; page-locked, so that copies to a GPU do not wait
        self.obs = torch.tensor(obs, pin_memory=on_gpu)
        self.done = np.zeros(envs.num_envs, bool)  # of the last step
        self.generator = torch.Generator(device).manual_seed(seed)  # of its actions
        self.noise = torch.ones(envs.num_envs, envs.single_action_space.n, device=device)
        # A daemon: a step that hangs lets Python exit
        self.thread = ThreadPool(1, torch.cuda.set_device if on_gpu else None, (device,))


class Actors:
    """Groups of environments that play rollouts, each step by the newest published weights."""

    def __init__(self, groups: list[Group], agent, policy):
        self.groups = groups
        self.agent = copy.deepcopy(agent).requires_grad_(False)
        self.policy = policy  # `act`, perhaps compiled
        self.lock = threading.Lock()  # held while the agent acts or gets new weights
        self.stopped = False
        self.published = torch.cuda.Event() if groups[0].noise.is_cuda else None

    def publish(self, agent):
        """Actors use these weights from their next step on."""
        old, new = self.agent.state_dict(), agent.state_dict()
        with self.lock:
            torch._foreach_copy_(list(old.values()), list(new.values()))
            self.agent.version = agent.version
        if self.published:  # on a GPU
            self.published.synchronize()  # with the last call: at most two SGD steps are queued
            self.published.record()

    def datasets(self, T: int, size: int, ahead: int, num_rollouts: int):
        """Yield datasets of `size` rollouts; the next `ahead` ones may be played meanwhile.

        Not while the learner learns from the first two: it may compile, and record CUDA graphs.
        """
        # Before anyone plays: with --compile the first call compiles, the next records a CUDA graph
        for group in 2 * self.groups:
            obs = group.obs.to(group.noise.device)
            group.thread.apply(self.policy, (self.agent, obs, group.noise))
        groups = itertools.cycle(self.groups)
        rollouts = []  # queued, playing or finished
        for number, not_yielded in enumerate(range(num_rollouts, 0, -size)):
            most = size if number < 2 else (ahead + 1) * size
            while len(rollouts) < min(most, not_yielded):
                group = next(groups)
                rollouts.append(group.thread.apply_async(play_rollout, (group, self, T)))
            yield [rollouts.pop(0).get() for _ in range(size)]  # raises their exceptions

    def stop(self):
        """End rollouts at their next step and close the environments, except those that hang."""
        self.stopped = True
        for group in self.groups:
            group.thread.apply_async(group.envs.close).wait(3)  # at most 3 seconds
            group.thread.terminate()


def play_rollout(group: Group, actors: Actors, T: int) -> tuple:
    """T steps of a group -> columns (T, N), ended episodes, seconds of environments and policy.

    Row t = (obs_t, a_t, log mu(a_t|obs_t), V(obs_t), version_t of mu, valid_t, r_{t+1},
    terminated_{t+1}, done_{t+1}); then obs_T. The row after an end is not valid: its action is
    ignored. Its observation, the episode's last, bootstraps after a truncation.
    """
    start, env_s = time.perf_counter(), 0.0
    N, device = group.envs.num_envs, group.noise.device
    columns = {
        "obs": torch.empty(T + 1, *group.obs.shape, dtype=torch.uint8, device=device),
        "action": torch.empty(T, N, dtype=torch.int64, device=device),
        "logp": torch.empty(T, N, device=device),
        "value": torch.empty(T, N, device=device),  # normalized
    }
    host = {name: np.empty((T, N)) for name in ("version", "valid", "reward", "terminated", "done")}
    episodes = []
    for t in range(T):
        if actors.stopped:
            return None  # nobody reads it
        columns["obs"][t].copy_(group.obs, non_blocking=True)
        group.noise.exponential_(generator=group.generator)
        with actors.lock:
            action, logp, value = actors.policy(actors.agent, columns["obs"][t], group.noise)
            columns["action"][t] = action
            columns["logp"][t] = logp
            columns["value"][t] = value
            host["version"][t] = actors.agent.version
        host["valid"][t] = ~group.done
        action = columns["action"][t].cpu().numpy()
        before = time.perf_counter()
        obs, reward, terminated, truncated, info = group.envs.step(action)
        env_s += time.perf_counter() - before
        group.obs.copy_(torch.from_numpy(obs))
        group.done = np.logical_or(terminated, truncated)
        host["reward"][t] = reward
        host["terminated"][t] = terminated
        host["done"][t] = group.done
        episodes += ended_episodes(info)
    columns["obs"][T].copy_(group.obs, non_blocking=True)
    columns |= {name: torch.from_numpy(column).float() for name, column in host.items()}
    return columns, episodes, env_s, time.perf_counter() - start - env_s


# --- training ---


def gradient(net, loss, minibatch: dict, micro_batch: int, weight) -> dict:
    """Set net's gradient of the mean of the losses over all ranks -> means of the terms.

    loss(rows) -> losses (B,) and a dict of terms (B,), for at most `micro_batch` rows at a time (0:
    ROWS_ON_CPU, on a GPU all). weight: (rows,), 0 for a row that does not count.
    """
    size = micro_batch or (ROWS_ON_CPU if weight.device.type == "cpu" else len(weight))
    total = sum_over_ranks(weight.sum()).clamp(min=1)  # avoids 0 / 0
    means = 0
    net.zero_grad()
    for start in range(0, len(weight), size):
        piece = slice(start, start + size)
        losses, terms = loss({name: column[piece] for name, column in minibatch.items()})
        share = weight[piece] / total
        (losses * share).sum().backward()
        means = means + (torch.stack(list(terms.values())).detach() * share).sum(1)
    if WORLD > 1:
        for parameter in net.parameters():
            parameter.grad = sum_over_ranks(parameter.grad)
    return dict(zip(terms, sum_over_ranks(means), strict=True))


def mean_of(updates: list[dict]) -> dict:
    """Means over SGD steps; raise FloatingPointError if one is not finite."""
    table = torch.stack([torch.stack(list(update.values())) for update in updates])
    means = dict(zip(updates[0], table.mean(0).tolist(), strict=True))
    if not np.isfinite(list(means.values())).all():
        raise FloatingPointError(f"training has diverged: {means}")
    return means


def learn(agent, optimizer, actors: Actors, batch: dict, ent_coef, args: Args) -> dict:
    """Train on a dataset for several epochs -> means over all minibatches.

    batch: columns (T, M) of `play_rollout`, where obs has one row more; advantage and target.
    """
    width = args.minibatch_size // args.num_steps  # trajectories per minibatch
    updates = []  # the means of each SGD step
    # Compiled once: PyTorch caches by a function's code
    loss = compiled(args)(lambda rows: ppo_loss(agent, rows, ent_coef, args))
    # Targets in new units; batch["value"] keeps the actors' units, as in Sample Factory
    agent.returns.update(batch["target"][batch["valid"].bool()])
    batch["target"] = ((batch["target"] - agent.returns.mean) / agent.returns.std).clamp(-5, 5)
    batch["obs"] = batch["obs"][:-1]  # without the one that bootstraps
    minibatches = []
    for start in range(0, width * args.num_minibatches, width):
        minibatch = {name: x[:, start : start + width].flatten(0, 1) for name, x in batch.items()}
        minibatch["advantage"] = standardize(minibatch["advantage"], minibatch["valid"])
        minibatches.append(minibatch)
    for minibatch in args.update_epochs * minibatches:  # in a fixed order
        means = gradient(agent, loss, minibatch, args.micro_batch, minibatch["valid"])
        limit = args.max_grad_norm or math.inf  # inf: only measures the norm
        means["train/grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), limit)
        optimizer.step()
        agent.version += 1
        actors.publish(agent)
        updates.append(means)
    return mean_of(updates)


def train(args: Args, make_envs=make_envs, saved: dict | None = None) -> dict:
    """Train; returns the last metrics, "step", "agent", "run" (the folder) and "eval".

    make_envs(args, num_envs, seed, test=False): returns any VectorEnv with next-step autoreset,
    uint8 (C, H, W) observations, Discrete actions and RecordEpisodeStatistics' info["episode"].
    saved: `load("runs/NAME")` continues that run with these args.
    Raises UsageError, FloatingPointError (diverged), KeyboardInterrupt.
    """
    args, saved, device = set_up(args, saved)
    T, N = args.num_steps, args.num_envs // args.num_groups
    M = args.minibatch_size // T * args.num_minibatches  # trajectories per dataset
    batch_size = T * M * WORLD
    total = args.total_timesteps // batch_size * batch_size
    counters = saved or {"step": 0, "iteration": 0, "best": -math.inf}
    step, iteration, best = counters["step"], counters["iteration"], counters["best"]
    # Each rank and each part of a run, by its first step, has its own episodes and actions
    stream = f"training from {step} of rank {RANK}"
    groups = []
    for g in range(args.num_groups):
        envs = make_envs(args, N, stream_seed(args.seed, f"{stream} {g}"))
        obs, _ = envs.reset()
        check_envs(envs, obs, N, gym.vector.AutoresetMode.NEXT_STEP, min_size=36)
        groups.append(Group(envs, obs, stream_seed(args.seed, f"{stream} actions {g}"), device))

    torch.manual_seed(args.seed)  # on all ranks: equal weights
    agent = Agent(obs.shape[1:], envs.single_action_space.n, args).to(device)
    agent.version = 0  # SGD steps of this process; the actors' copy carries it
    optimizer = torch.optim.Adam(agent.parameters(), eps=args.adam_eps, fused=True)
    parts = {"agent": agent, "optimizer": optimizer}
    if saved:
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        optimizer.param_groups[0]["eps"] = args.adam_eps  # flags given now win

    run = Run(args, saved, device)
    ahead = 0 if args.sync else args.num_batches_to_accumulate
    num_rollouts = (args.total_timesteps - step) // batch_size * (M // N)
    actors = Actors(groups, agent, compiled(args)(act))
    datasets = actors.datasets(T, M // N, ahead, num_rollouts)
    recent = []  # returns of the last 100 episodes
    metrics = {}

    def save(name: str):
        run.save(name, parts, step=step, iteration=iteration, best=best)

    try:
        if not saved:
            save("checkpoint.pt")
        while step + batch_size <= args.total_timesteps:
            # Dataset: rollouts side by side
            start = time.perf_counter()
            columns, episodes, env_s, policy_s = zip(*next(datasets), strict=True)
            batch = {name: torch.cat([x[name] for x in columns], 1) for name in columns[0]}
            lag = agent.version - batch.pop("version")
            batch["valid"] *= lag < args.max_policy_lag
            valid = batch["valid"].bool()
            received = time.perf_counter()

            # Advantages; statistics first, as in Sample Factory: even the first ratios are not 1
            agent.frames.update(batch["obs"][:T].flatten(0, 1))
            with torch.no_grad():
                _, last_value = agent(batch["obs"][T])
            # All values by the learner's statistics, also those that actors had by older ones
            values = torch.cat([batch["value"], last_value[None]]).clamp(-5, 5)
            values = (values * agent.returns.std + agent.returns.mean).cpu()  # in units of return
            ends = batch["terminated"], batch["done"]
            advantages = gae(batch["reward"], values, *ends, args.gamma, args.gae_lambda)
            targets = advantages + values[:T]
            batch |= {"advantage": advantages, "target": targets}
            batch = {name: column.to(device) for name, column in batch.items()}

            # Learning
            lr = schedule(step, args.lr) * (1 - step / total if args.anneal_lr else 1)
            ent_coef = torch.tensor(schedule(step, args.ent_coef), device=device)
            optimizer.param_groups[0]["lr"] = lr
            means = learn(agent, optimizer, actors, batch, ent_coef, args)
            run.bar.update(batch_size)
            learned = time.perf_counter()

            # Means of SGD steps are also means over ranks; the rest is rank 0's
            returns = [episode[1] for rollout in episodes for episode in rollout]
            lengths = [episode[2] for rollout in episodes for episode in rollout]
            metrics = {
                "step": step + batch_size,
                "iteration": iteration + 1,
                "episode/return": np.mean(returns) if returns else None,
                "episode/length": np.mean(lengths) if returns else None,
                "episode/count": len(returns),
                **means,
                "train/explained_variance": explained_variance(values[:T][valid], targets[valid]),
                "train/lr": lr,
                "train/valid_frac": valid.float().mean().item(),
                "async/policy_lag_mean": lag.mean().item(),
                "async/policy_lag_max": int(lag.max()),
                "time/sps": batch_size / (learned - start),
                "time/env_s": sum(env_s),  # of all groups
                "time/policy_s": sum(policy_s),
                "time/wait_s": received - start,
                "time/learn_s": learned - received,
            }
            # Does the iteration reach a multiple of eval_every?
            due = args.eval_every and metrics["step"] // args.eval_every > step // args.eval_every
            if RANK == 0 and args.eval_episodes and due:
                metrics["eval/return"] = evaluate(agent, args, make_envs)["game"]["mean"]
            step += batch_size
            iteration += 1
            run.log(metrics)
            recent = [*recent, *returns][-100:]
            if len(recent) == 100 and np.mean(recent) > best:
                best = float(np.mean(recent))
                save("best.pt")
            is_last = step + batch_size > args.total_timesteps
            if is_last or time.monotonic() - run.last_save >= args.checkpoint_every:
                run.last_save = time.monotonic()
                save("checkpoint.pt")
        if RANK == 0 and args.eval_episodes:
            metrics["eval"] = {"step": step, "splits": evaluate(agent, args, make_envs)}
            Path(run.folder, "eval.json").write_text(json.dumps(metrics["eval"], indent=1))
        return metrics | {"step": step, "agent": agent, "run": str(run.folder)}
    except (KeyboardInterrupt, OSError):  # Ctrl-C, or a log that cannot be written
        # `step` does not count an unfinished iteration; the weights keep its SGD steps
        save("checkpoint.pt")
        run.say(f"stopped at step {step:,}: python {sys.argv[0]} --resume {run.folder} continues")
        raise
    finally:
        actors.stop()
        run.close()


# --- evaluation ---


def evaluate(agent: Agent, args: Args, make_envs=make_envs) -> dict:
    """Play args.eval_episodes episodes or a few more, always with the same seeds -> summaries."""
    per_env = math.ceil(args.eval_episodes / 64)  # episodes in each of at most 64 environments
    num_envs = math.ceil(args.eval_episodes / per_env)
    envs = make_envs(args, num_envs, stream_seed(args.seed, "game"), test=True)
    episodes = play(agent, envs, per_env, stream_seed(args.seed, "game actions"))
    envs.close()
    return {"game": summary("game", episodes)}


@torch.no_grad()
def play(agent, envs, per_env: int, seed: int) -> list[tuple]:
    """Play per_env episodes in each environment -> (environment, return, length) of each."""
    agent.eval()
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    played = np.zeros(envs.num_envs, int)
    episodes = []
    obs, _ = envs.reset()
    for step in itertools.count(1):
        logits, *_ = agent(torch.from_numpy(obs).to(device))
        obs, _, _, _, info = envs.step(sample(logits, generator).cpu().numpy())
        for episode in ended_episodes(info):
            played[episode[0]] += 1
            if played[episode[0]] <= per_env:  # as many of each, or short ones would prevail
                episodes.append(episode)
        if played.min() >= per_env:
            agent.train()
            return episodes
        if step == 1000 and not episodes:
            tqdm.write("evaluation: 1,000 steps without an end; no time limit, or not recorded?")


def ended_episodes(info: dict) -> list[tuple]:
    """(environment, return, length) of each episode that a step's info reports as ended."""
    if "episode" not in info:
        return []
    if "_episode" not in info:
        raise UsageError("info['episode'] without info['_episode']: use RecordEpisodeStatistics")
    returns, lengths, ended = info["episode"]["r"], info["episode"]["l"], info["_episode"]
    return [(env, returns[env].item(), lengths[env].item()) for env in np.flatnonzero(ended)]


def summary(split: str, episodes: list[tuple]) -> dict:
    """Print and return the mean return of an evaluation and its standard error."""
    _, returns, lengths = (list(column) for column in zip(*episodes, strict=True))
    stderr = float(np.std(returns, ddof=1) / len(returns) ** 0.5) if len(returns) > 1 else 0.0
    mean = float(np.mean(returns))
    tqdm.write(f"{split}: return {mean:.2f} +- {stderr:.2f} (std error, {len(returns)} episodes)")
    return {"mean": mean, "stderr": stderr, "returns": returns, "lengths": lengths}


# --- plumbing, the same text in all five scripts ---


class UsageError(ValueError):
    """A mistake the user can fix: `main` prints it in one line and returns 2."""


def stream_seed(seed: int, stream: str) -> int:
    """A seed below 2 ** 31 for a named stream of random numbers."""
    return int(np.random.SeedSequence([seed, *stream.encode()]).generate_state(1)[0]) // 2


def sum_over_ranks(x):
    """The sum of a tensor over torchrun's processes."""
    if WORLD > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


def compiled(args: Args):
    """A decorator: nothing, or with --compile torch.compile; on a GPU with CUDA graphs.

    PyTorch caches by a function's code, so a closure is compiled once. The next graph overwrites
    the results of a graph, gradients too: no graphs with --micro-batch, which adds up gradients.
    """
    if not args.compile:
        return lambda function: function
    graphs = args.device != "cpu" and torch.cuda.is_available() and not args.micro_batch
    return torch.compile(mode="reduce-overhead" if graphs else None)


def check_envs(envs, obs, num_envs: int, autoreset, min_size: int):
    """Raise UsageError for environments that the script cannot train on."""
    if tuple(map(int, gym.__version__.split(".")[:2])) < (1, 4):
        raise UsageError(f"gymnasium {gym.__version__} may lose rewards: install 1.4")
    mode = envs.metadata.get("autoreset_mode")
    actions = envs.single_action_space
    fits = isinstance(actions, gym.spaces.Discrete) and actions.start == 0 and mode == autoreset
    fits = fits and obs.dtype == np.uint8 and obs.ndim == 4 and len(obs) == num_envs
    # A frame narrower than its number of channels is probably (H, W, C)
    if not fits or min(obs.shape[2:]) < max(min_size, obs.shape[1]):
        needed = f"{autoreset}, Discrete from 0, uint8 ({num_envs}, C, H, W), H, W >= {min_size}, C"
        raise UsageError(f"make_envs: {mode}, {actions}, {obs.dtype} {obs.shape}; needs {needed}")


def available_cores() -> int:
    """Cores by affinity mask and container quota, divided among the local ranks."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def set_up(args: Args, saved: dict | None) -> tuple:
    """Join torchrun's processes, choose the device -> rank 0's args and saved, and the device."""
    if WORLD > 1:
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=timedelta(days=1))  # evaluations take long
        objects = [args, saved]
        dist.broadcast_object_list(objects, device=torch.device("cpu"))
        args, saved = objects
    num_gpus = torch.cuda.device_count()
    name = args.device.replace("auto", "cuda" if num_gpus else "cpu")
    if name != "cpu":
        index = int(name[5:] or 0)
        if index >= num_gpus or (WORLD > 1 and ":" in name):
            raise UsageError(f"--device {name}: {num_gpus} GPUs here")
        if WORLD > 1:  # a GPU per process
            index = int(os.environ.get("LOCAL_RANK", RANK % num_gpus))
        name = f"cuda:{index}"
        torch.cuda.set_device(name)
    torch.set_num_threads(args.threads or (available_cores() if name == "cpu" else 1))
    torch.set_float32_matmul_precision("high")  # TF32, the default of convolutions
    # Speed on a CPU: glibc keeps freed memory for the next minibatch, without page faults
    ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX
    ctypes.CDLL(None).mallopt(-1, -1)  # M_TRIM_THRESHOLD
    return args, saved, torch.device(name)


class Run:
    """A run's folder, which rank 0 writes, and its progress on the terminal."""

    def __init__(self, args: Args, saved: dict | None, device: torch.device):
        self.flags = pydantic.TypeAdapter(Args).dump_python(args, mode="json")  # plain numbers
        self.step = saved["step"] if saved else 0  # rows of metrics.csv up to it count
        self.last_save = time.monotonic()
        self.table = None
        name = f"{args.env_id}__{SCRIPT}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
        self.folder = Path(saved["folder"] if saved else f"{args.run_dir}/{args.run_name or name}")
        steps = {"initial": self.step, "total": args.total_timesteps}
        self.bar = tqdm(**steps, unit_scale=True, disable=RANK > 0 or None)  # None: no terminal
        if RANK == 0:
            self.folder.mkdir(parents=True, exist_ok=bool(saved))
            versions = {name: version(name) for name in ("torch", "numpy", "gymnasium", "envpool")}
            config = dict(args=self.flags, command=sys.argv, ranks=WORLD, versions=versions)
            Path(self.folder, f"config-{self.step}.json").write_text(json.dumps(config, indent=1))
            Path(self.folder, Path(__file__).name).write_bytes(Path(__file__).read_bytes())
            self.tensorboard = SummaryWriter(self.folder, purge_step=self.step + 1)
            self.say(f"{self.folder}: {device}, threads: {torch.get_num_threads()}")

    def say(self, text: str):
        if RANK == 0:
            tqdm.write(text, sys.stdout)
            sys.stdout.flush()  # a log file has it at once

    def log(self, metrics: dict):
        """Write a row of metrics; None is an empty cell, a new name a new column."""
        if RANK > 0:
            return
        row = {name: x.item() if hasattr(x, "item") else x for name, x in metrics.items()}
        if not self.table or row.keys() - self.table.fieldnames:
            self.open_table(list(row))
        self.table.writerow(row)
        self.file.flush()
        self.step = row["step"]
        for name, value in row.items():
            if value is not None:
                self.tensorboard.add_scalar(name, value, row["step"])
        self.tensorboard.flush()
        score = row["episode/return"]
        text = "return -" if score is None else f"return {score:.2f}"
        self.bar.set_postfix_str(text)
        if self.bar.disable or not sys.stdout.isatty():
            self.say(f"step {row['step']:,}  {text}  {row['time/sps']:,.0f} steps/s")

    def open_table(self, columns: list[str]):
        """Start metrics.csv, or add columns; a resumed run drops rows after its checkpoint."""
        path = self.folder / "metrics.csv"
        old = csv.DictReader(path.read_text().splitlines() if path.exists() else [])
        columns = list(dict.fromkeys([*(old.fieldnames or []), *columns]))  # each once, in order
        self.file = open(self.folder / "metrics.csv.tmp", "w", newline="")
        self.table = csv.DictWriter(self.file, columns, lineterminator="\n")
        self.table.writeheader()
        self.table.writerows(row for row in old if int(row["step"]) <= self.step)
        self.file.flush()
        os.replace(self.file.name, path)  # renamed while open: later rows go to metrics.csv

    def save(self, name: str, parts: dict, **counters):
        """Write a checkpoint; raise FloatingPointError if a weight or statistic is not finite."""
        states = {key: part.state_dict() for key, part in parts.items()}
        modules = [states[key] for key in parts if isinstance(parts[key], nn.Module)]
        if not all(torch.isfinite(x).all() for module in modules for x in module.values()):
            raise FloatingPointError(f"training has diverged; {name} was not written")
        if RANK == 0:
            temporary = self.folder / f"{name}.tmp"
            torch.save(states | counters | {"args": self.flags}, temporary)
            os.replace(temporary, self.folder / name)  # a complete file, old or new

    def close(self):
        self.bar.close()
        if RANK == 0:
            self.tensorboard.close()


def load(run: str) -> dict:
    """A run's checkpoint. weights_only=True: an untrusted file cannot execute code."""
    try:
        saved = torch.load(Path(run, "checkpoint.pt"), map_location="cpu", weights_only=True)
        Args(**saved["args"])
        if Path(run, "best.pt").exists():  # a later best score must not be forgotten
            best = torch.load(Path(run, "best.pt"), map_location="cpu", weights_only=True)
            saved["best"] = best["best"]
    except Exception as error:  # a damaged file can raise nearly anything
        hint = f"is it a run of this {SCRIPT}.py? (commit f996cf0 continues older ones)"
        raise UsageError(f"--resume {run}: {hint}: {error}") from None
    return saved | {"folder": str(run)}


def interrupt(number, frame):
    """Stop on the first signal; ignore later ones while `train` is saving."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(argv=None, make_envs=make_envs) -> int:
    """Run the command line -> 0 done, 2 wrong flags or environments, 130 stopped by a signal."""
    # Read before tyro, whose defaults it decides
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--resume")
    args, saved, code = None, None, 0
    try:
        if RANK == 0:  # `train` sends its flags to the others
            chosen, rest = first.parse_known_args(argv)
            saved = load(chosen.resume) if chosen.resume else None
            defaults = saved["args"] if saved else {}
            args = tyro.cli(Args, args=rest, default=Args(**defaults), description=__doc__)
        train(args, make_envs, saved)
    except KeyboardInterrupt:
        return 130
    except (UsageError, FileExistsError, pydantic.ValidationError) as error:
        sys.stderr.write(f"{SCRIPT}.py: {' '.join(str(error).split())}\n")  # one write per rank
        code = 2
    if dist.is_initialized():
        dist.destroy_process_group()  # its threads may otherwise abort the exit
    return code


if __name__ == "__main__":
    if RANK == 0:  # it saves; other ranks just end
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main())
