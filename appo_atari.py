# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0", "numpy==2.4.6", "gymnasium==1.4.0", "envpool==1.0.1", "tyro==1.0.17",
#     "tensorboard==2.21.0", "tqdm==4.70.1",
# ]
# ///
"""Asynchronous PPO (APPO) on Atari: the learner of Sample Factory in one file.

    python appo_atari.py --env-id Breakout           # 25M environment steps = 100M frames
    python appo_atari.py --env-id Breakout --vtrace  # V-trace instead of GAE
    python appo_atari.py --env-id Breakout --sync    # no acting while learning: reproducible
    python appo_atari.py --resume runs/NAME          # continue a stopped run

APPO: Petrenko et al. 2020, arXiv:2006.11751. PPO: Schulman et al. 2017, arXiv:1707.06347. V-trace:
Espeholt et al. 2018, arXiv:1802.01561. Most settings: M. Stammers' model card for Asteroids.
Threads act with the newest weights while the learner trains on whole rollouts.

Unlike most PPO code, as in Sample Factory or that card:
- the ratio is clamped to [0.05, 20], then clipped to [1 / (1 + clip), 1 + clip];
- the critic predicts normalized returns; frames are normalized too, element by element;
- minibatches are whole trajectories in a fixed order; rows that are too old are masked;
- no gradient clipping (the card; Sample Factory's Atari settings have 0.5).
Departures, results and the commands behind them: docs/appo_atari.md.
"""

import contextlib
import copy
import ctypes
import difflib
import fcntl
import io
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from concurrent.futures import Future
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
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

WORLD = int(os.environ.get("WORLD_SIZE", 1))  # the number of processes, set by torchrun
RANK = int(os.environ["RANK"]) if WORLD > 1 else 0  # this process's number
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Args:
    # run
    env_id: str = "Breakout"  # Atari game as EnvPool spells it, with or without -v5
    total_timesteps: int = 25_000_000  # total environment steps, rounded down to whole iterations
    seed: int = 1  # on a CPU, --sync runs with the same flags write identical metrics (not time/*)
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
    repeat_action_probability: float = 0  # probability of repeating the last action, per frame
    noop_max: int = 30  # an episode starts with 1 to this many no-ops; one less with --fire-reset
    fire_reset: bool = True  # press FIRE at the start of an episode
    episodic_life: bool = True  # a lost life ends the training episode (not the game)
    max_episode_steps: int = 27_000  # time limit of a game, in environment steps
    frame_size: Literal[84, 96] = 84  # width and height of the gray frames, in pixels
    stack: int = 4  # frames per observation
    num_envs: int = 32  # parallel environments (per process, with torchrun)
    num_groups: int = 2  # groups of environments, each stepped by its own thread
    # optimization
    num_steps: int = 128  # rollout length per environment
    minibatch_size: int = 1024  # rows per SGD step and process; a multiple of --num-steps
    num_minibatches: int = 8  # minibatches per dataset; an iteration trains on one dataset
    update_epochs: int = 4  # passes over a dataset
    lr: tuple[float, ...] = (3.033891184e-4,)
    """learning rate: a number, or pairs of step and value from step 0 on (0 1e-4 5000000 0), linear
    in between, then constant; steps do not scale with --total-timesteps"""
    anneal_lr: bool = True  # multiply the learning rate by the share of the run that is left
    adam_eps: float = 1e-5  # Adam's epsilon
    max_grad_norm: float = 0  # clip the gradient's norm; 0 = off
    sync: bool = False  # no acting while learning
    num_batches_to_accumulate: int = 2  # datasets that actors may be ahead; 0 = as --sync
    max_policy_lag: int = 1000  # mask rows at least this many SGD steps old (default: masks none)
    # algorithm
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # GAE's lambda (--vtrace: in a metric only)
    vtrace: bool = False  # V-trace instead of GAE, recomputed in each minibatch
    clip: float = 0.1  # clip the probability ratio to [1 / (1 + this), 1 + this]; 0 = off
    vf_clip: float = 1  # clip range of the value, in units of normalized return; 0 = off
    vf_coef: float = 0.5  # weight of the squared value error (no factor 1/2)
    ent_coef: tuple[float, ...] = (4.677351413e-4,)
    """weight of the entropy bonus: a number, or as --lr"""


# Flags that --resume cannot change, and the bounds of flags that are numbers (checked by `plain`)
FIXED = "env_id repeat_action_probability frame_size stack".split()
AT_LEAST_1 = """num_envs num_groups num_steps num_minibatches update_epochs max_policy_lag noop_max
stack max_episode_steps""".split()
AT_MOST_1 = "gamma gae_lambda repeat_action_probability".split()


def check(args: Args):
    """Raise UsageError for settings that cannot work together."""
    T = args.num_steps
    if args.num_envs % args.num_groups:
        raise UsageError(f"--num-groups {args.num_groups}: must divide --num-envs {args.num_envs}")
    if args.minibatch_size < 2 or args.minibatch_size % T:
        raise UsageError(f"--minibatch-size {args.minibatch_size}: a multiple of --num-steps {T}")
    rows = args.minibatch_size * args.num_minibatches
    rollout = args.num_envs // args.num_groups * T
    if rows % rollout:
        rule = f"a multiple of {rollout}, a group's rollout (num-envs / num-groups x num-steps)"
        raise UsageError(f"--minibatch-size x --num-minibatches = {rows}: must be {rule}")
    if args.total_timesteps < rows * WORLD:
        raise UsageError(f"--total-timesteps {args.total_timesteps}: at least {rows * WORLD}")
    # Beyond these EnvPool hangs, runs out of memory or overflows.
    limits = {"noop_max": 1000, "stack": 64, "max_episode_steps": 2**31 - 1}
    for name, limit in limits.items():
        if getattr(args, name) > limit:
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            raise UsageError(f"{flag}: must be at most {limit}")


# --- environment ---


class AtariEnvs(gym.vector.VectorEnv):
    """EnvPool's Atari: uint8 (N, frames, S, S), the newest frame last, next-step autoreset.

    The step after an end ignores its action, has reward 0 and returns the first observation of the
    next episode: it is not a transition. Rewards are clipped to their signs. With episodic_life a
    lost life sets `terminated`, and `reset` continues games that are not over. info["episode"] has
    the return and length of the game so far, unclipped; info["_episode"] marks games that end.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, pool, num_envs: int):
        self.pool = pool
        self.num_envs = num_envs
        shape = pool.observation_space.shape
        self.single_observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.single_action_space = gym.spaces.Discrete(pool.action_space.n)

    def reset(self, *, seed=None, options=None):
        self.done = np.zeros(self.num_envs, bool)  # an episode: a life or a game
        self.over = np.zeros(self.num_envs, bool)  # a game
        self.lives = np.zeros(self.num_envs, int)
        self.returns = np.zeros(self.num_envs)
        self.lengths = np.zeros(self.num_envs, int)
        return self.pool.reset()

    def step(self, actions):
        obs, reward, terminated, truncated, info = self.pool.step(actions)
        # `done` and `over` are still the last step's.
        self.returns += np.where(self.done, 0, info["reward"])
        self.lengths += ~self.done
        # EnvPool's no-ops after a lost life can end the game. Then lives rise, and the ended game
        # is reported now. The next one inherits its remaining time limit.
        unseen = self.done & ~self.over & (info["lives"] > self.lives)
        self.lives = info["lives"]
        self.done = terminated | truncated
        # If a game ends exactly at the time limit, EnvPool reports only the truncation.
        game_over = self.done & (info["terminated"] > 0)
        self.over = game_over | truncated | unseen
        info["episode"] = {"r": self.returns, "l": self.lengths}
        info["_episode"] = self.over
        self.returns = np.where(self.over, 0, self.returns)
        self.lengths = np.where(self.over, 0, self.lengths)
        return obs, reward, terminated | game_over, truncated, info

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
        episodic_life=args.episodic_life,
        reward_clip=True,
        max_episode_steps=args.max_episode_steps,
        img_height=args.frame_size,
        img_width=args.frame_size,
        stack_num=args.stack,
    )
    return AtariEnvs(pool, num_envs)


def stream_seed(seed: int, stream: str) -> int:
    """Hash both to 31 bits: different seeds or streams give independent random numbers."""
    return int(np.random.SeedSequence([seed, *stream.encode()]).generate_state(1)[0] >> 1)


# --- network ---


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


def normalize(x, moments: RunningMoments):
    """Standardize by the running moments; clipped to +-5 as in Sample Factory."""
    return ((x - moments.mean) / moments.std).clamp(-5, 5)


def denormalize(x, moments: RunningMoments):
    """The inverse of `normalize` for values between the limits."""
    return x.clamp(-5, 5) * moments.std + moments.mean


class Agent(nn.Module):
    """Sample Factory's convnet_atari: uint8 (B, C, H, W) -> logits (B, A), value (B,).

    The value is a normalized return; denormalize(value, agent.returns) is in units of return.
    """

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
        num_features = self.trunk(torch.zeros(1, *obs_shape)).numel()
        self.hidden = nn.Linear(num_features, 512)
        self.policy = nn.Linear(512, num_actions)
        self.value = nn.Linear(512, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.orthogonal_(module.weight)
                nn.init.zeros_(module.bias)
        self.to(memory_format=torch.channels_last)
        # Sample Factory's start and epsilon, for frames from 0 to 255 (there: 0 to 1)
        shape = (1, *obs_shape)  # channels-last needs four axes
        self.frames = RunningMoments(shape, count=1, variance=255**2, epsilon=1e-5 * 255**2)
        self.returns = RunningMoments((), count=1, variance=1, epsilon=1e-5)
        # Channels-last like the observations: mixed formats make the subtraction slow.
        self.frames.mean = self.frames.mean.contiguous(memory_format=torch.channels_last)
        self.frames.std = self.frames.std.contiguous(memory_format=torch.channels_last)

    def forward(self, obs):
        # Channels-last while still uint8 (a quarter of the traffic), then normalize in place.
        x = obs.contiguous(memory_format=torch.channels_last).float()
        x = x.sub_(self.frames.mean).div_(self.frames.std).clamp_(-5, 5)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            x = self.trunk(x).permute(0, 2, 3, 1).flatten(1)  # no copy: it is channels-last
            x = F.relu(self.hidden(x))
        x = x.float()  # heads in fp32
        return self.policy(x), self.value(x).squeeze(-1)


# --- mathematics ---

RATIO_LIMITS = (0.05, 20)  # Sample Factory's safety limits


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


def vtrace(reward, value, terminated, done, rho, gamma: float, lam: float):
    """V-trace (Espeholt et al. 2018, 4.1, 4.2, rho-bar = c-bar = 1) -> vs, rho * advantage: (T, N).

    reward, terminated, done: (T, N), of the step taken in row t. value: (T + 1, N), of row t's
    observation, by the current critic. rho: (T, N), pi(a_t|x_t) / mu(a_t|x_t), of the current
    policy and the acting one. There is no value after a termination, and any end cuts the sum.
    """
    discount = gamma * (1 - terminated)
    rho = rho.clamp(max=1)
    c = lam * rho * (1 - done)
    delta = rho * (reward + discount * value[1:] - value[:-1])
    correction = torch.zeros_like(value)  # vs - V; stays 0 in the last row, whose target is V
    for t in reversed(range(len(reward))):
        correction[t] = delta[t] + discount[t] * c[t] * correction[t + 1]
    vs = value + correction
    next_vs = torch.where(done > 0, value[1:], vs[1:])  # at a time limit vs is the next episode's
    rho_advantage = rho * (reward + discount * next_vs - value[:-1])
    return vs[:-1], rho_advantage


def vtrace_columns(minibatch: dict, logits, value, gamma: float) -> dict:
    """Targets and advantages (T, n), in units of return.

    logits (T + 1, n, A), value (T + 1, n; units of return): the current ones.
    """
    logp = logits[:-1].log_softmax(-1).gather(-1, minibatch["action"][..., None]).squeeze(-1)
    rho = (logp - minibatch["logp"]).exp().clamp(*RATIO_LIMITS)
    reward, terminated, done = minibatch["reward"], minibatch["terminated"], minibatch["done"]
    target, rho_advantage = vtrace(reward, value, terminated, done, rho, gamma, lam=1)
    # ppo_terms multiplies by the ratio a second time, as Sample Factory does.
    return {"target": target, "advantage": rho_advantage}


def ppo_terms(logits, value, rows: dict, clip: float, vf_clip: float) -> dict:
    """Loss terms and statistics, each (B,), from the new logits (B, A) and value (B,).

    loss/policy: negated clipped surrogate (PPO, eq. 7, with other limits). loss/value: the larger
    of the squared errors of the new value and of the clipped one. All are normalized: the old
    value with the statistics at acting time, the target with the current ones. train/approx_kl: the
    sampled estimate r - 1 - log r of KL(old || new).
    """
    clip = clip or math.inf
    vf_clip = vf_clip or math.inf
    logp = logits.log_softmax(-1)
    log_ratio = logp.gather(-1, rows["action"][:, None]).squeeze(-1) - rows["logp"]
    ratio = log_ratio.exp().clamp(*RATIO_LIMITS)
    clipped_ratio = ratio.clamp(1 / (1 + clip), 1 + clip)
    surrogate = ratio * rows["advantage"]
    clipped_surrogate = clipped_ratio * rows["advantage"]
    # Both values are outputs of the head: the clip bounds how far it has moved since acting.
    clipped_value = rows["value"] + (value - rows["value"]).clamp(-vf_clip, vf_clip)
    value_error = (value - rows["target"]) ** 2
    clipped_value_error = (clipped_value - rows["target"]) ** 2
    return {
        "loss/policy": -torch.min(surrogate, clipped_surrogate),
        "loss/value": torch.max(value_error, clipped_value_error),
        "loss/entropy": -(logp.exp() * logp).sum(-1),
        "train/approx_kl": log_ratio.exp() - 1 - log_ratio,
        "train/clip_frac": (clipped_ratio != ratio).float(),
    }


def standardize_valid(x, valid, num_valid):
    """Zero mean and unit variance over the valid rows of all ranks, 0 in the others.

    num_valid: the mean number of valid rows per rank.
    """
    x = (x - mean_over_ranks((x * valid).sum()) / num_valid) * valid
    variance = mean_over_ranks(x.square().sum()) / num_valid
    return x / variance.sqrt().clamp(min=1e-4)


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


# --- actors ---


class Group:
    """Environments that step together, and their state between two rollouts."""

    def __init__(self, envs, obs, seed: int, device: torch.device, head_start: int):
        self.envs = envs
        self.obs = obs  # what the next actions are chosen from
        self.done = np.zeros(envs.num_envs, bool)  # of the last step
        self.generator = torch.Generator(device).manual_seed(seed)  # of its actions
        # Random actions first, so that the groups' episodes differ in age. These steps are not
        # counted; an environment's first reported episode may begin with some of them.
        logits = torch.zeros(envs.num_envs, envs.single_action_space.n, device=device)
        for _ in range(head_start):
            action = sample(logits, self.generator).cpu().numpy()
            self.obs, _, terminated, truncated, _ = envs.step(action)
            self.done = (terminated | truncated).astype(bool)


class Actors:
    """One thread per group of environments; every step uses the newest published agent.

    Group k % G plays rollout k of `num_rollouts`. A dataset is `size` consecutive rollouts.
    Rollouts are started for the dataset that the learner waits for and for the next `ahead` ones;
    a group with nothing to play is idle. So at most the SGD steps of `ahead` datasets lie between
    playing a row and starting to train on it. With ahead=0 nobody plays during learning; if size
    is 1 too, the groups take turns.
    """

    def __init__(self, groups, agent, T: int, size: int, ahead: int, num_rollouts: int):
        self.groups = groups
        self.T = T
        self.size = size
        self.ahead = ahead
        self.num_rollouts = num_rollouts
        self.started = 0
        self.results = deque()  # futures of the rollouts that were started and not taken
        self.stopped = threading.Event()
        self.publish(agent)
        self.tasks = [queue.SimpleQueue() for _ in groups]  # futures to fulfil; None: the end
        self.threads = []
        for pair in zip(groups, self.tasks, strict=True):
            # daemon: Python can exit even if an environment never returns from a step
            thread = threading.Thread(target=self.work, args=pair, daemon=True)
            thread.start()
            self.threads.append(thread)

    def publish(self, agent):
        """Actors use this copy from their next step on. It never changes, so it needs no lock."""
        self.agent = copy.deepcopy(agent).requires_grad_(False)

    def work(self, group: Group, tasks: queue.SimpleQueue):
        """A thread's life: play one rollout per future."""
        while (future := tasks.get()) is not None:
            try:
                future.set_result(play_rollout(group, self, self.T))
            except BaseException as error:  # `dataset` raises it
                future.set_exception(error)
            del future  # do not keep the rollout's memory alive while idle

    def dataset(self) -> list[dict]:
        """Start the rollouts that may start and wait for a dataset; raises an actor's exception."""
        limit = (self.ahead + 1) * self.size
        while self.started < self.num_rollouts and len(self.results) < limit:
            future = Future()
            self.results.append(future)
            self.tasks[self.started % len(self.groups)].put(future)
            self.started += 1
        return [self.results.popleft().result() for _ in range(self.size)]

    def stop(self):
        """Stop the threads at their next environment step, then close the environments.

        Gives up after 3 seconds: an environment that hangs in a step is left alone.
        """
        self.stopped.set()  # rollouts end at their next step
        deadline = time.monotonic() + 3
        for tasks in self.tasks:
            tasks.put(None)
        for group, thread in zip(self.groups, self.threads, strict=True):
            thread.join(max(0, deadline - time.monotonic()))
            if not thread.is_alive():
                group.envs.close()


@torch.no_grad()
def play_rollout(group: Group, actors: Actors, T: int) -> dict:
    """T steps of a group's N environments -> columns (T, N), ended episodes, seconds.

    Row t = (obs_t, a_t, log mu(a_t|obs_t), V(obs_t), version_t of the policy mu, r_{t+1},
    terminated_{t+1}, done_{t+1}, valid_t). There is one more observation, which bootstraps the last
    row. The row after an end shows the last observation of the episode, from which a truncated
    episode bootstraps. It is not valid: its action is ignored.
    """
    device = next(actors.agent.parameters()).device
    N = group.envs.num_envs
    columns = {
        "obs": torch.zeros(T + 1, N, *group.obs.shape[1:], dtype=torch.uint8, device=device),
        "action": torch.zeros(T, N, dtype=torch.int64, device=device),
        "logp": torch.zeros(T, N, device=device),
        "value": torch.zeros(T, N, device=device),  # normalized; for the value clip
        "unnormalized_value": torch.zeros(T, N, device=device),  # for GAE; by the acting statistics
        "version": torch.zeros(T, N),  # this and the columns below: on the CPU, where GAE runs
        "reward": torch.zeros(T, N),
        "terminated": torch.zeros(T, N),
        "done": torch.zeros(T, N),
        "valid": torch.zeros(T, N),
    }
    returns, lengths = [], []  # of the episodes that end
    policy_s, env_s = 0.0, 0.0
    for t in range(T):
        if actors.stopped.is_set():
            return {}  # nobody reads it
        start = time.perf_counter()
        agent = actors.agent  # the newest one, kept for the whole step
        columns["obs"][t] = torch.from_numpy(group.obs)
        columns["version"][t] = agent.version
        columns["valid"][t] = torch.from_numpy(~group.done)
        logits, value = agent(columns["obs"][t])
        action = sample(logits, group.generator)
        columns["action"][t] = action
        columns["logp"][t] = logits.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)
        columns["value"][t] = value
        columns["unnormalized_value"][t] = denormalize(value, agent.returns)
        action = action.cpu().numpy()
        acted = time.perf_counter()
        group.obs, reward, terminated, truncated, info = group.envs.step(action)
        group.done = (terminated | truncated).astype(bool)
        _, ended_returns, ended_lengths = ended_episodes(group.envs, info)
        returns += ended_returns
        lengths += ended_lengths
        columns["reward"][t] = torch.as_tensor(reward)
        columns["terminated"][t] = torch.as_tensor(terminated.astype(bool))
        columns["done"][t] = torch.from_numpy(group.done)
        policy_s += acted - start
        env_s += time.perf_counter() - acted
    columns["obs"][T] = torch.from_numpy(group.obs)
    episodes = {"returns": returns, "lengths": lengths}
    return {"columns": columns, "policy_s": policy_s, "env_s": env_s} | episodes


# --- training ---


@torch.no_grad()
def predict(agent, obs, micro_batch: int):
    """(R, n, C, H, W) -> logits (R, n, A) and value (R, n) in units of return."""
    outputs = [agent(rows) for rows in obs.flatten(0, 1).split(micro_batch)]
    logits = torch.cat([logits for logits, _ in outputs])
    value = torch.cat([value for _, value in outputs])
    value = denormalize(value, agent.returns)
    return logits.unflatten(0, obs.shape[:2]), value.view(obs.shape[:2])


def learn(agent, optimizer, actors, batch: dict, ent_coef: float, args: Args) -> dict:
    """Train on a dataset for several epochs -> means over all minibatches.

    batch: columns (T, M) of M trajectories: obs (T + 1, M), action, logp, value, advantage, target,
    reward, terminated, done, valid. The actors get the agent of every SGD step.
    """
    T = args.num_steps
    device = batch["obs"].device
    micro_batch = args.micro_batch or (256 if device.type == "cpu" else args.minibatch_size)
    width = args.minibatch_size // T  # trajectories per minibatch
    sums = defaultdict(float)
    for epoch in range(args.update_epochs):
        vtrace_targets = []
        for m in range(args.num_minibatches):  # in the same order in each epoch
            trajectories = slice(m * width, (m + 1) * width)
            minibatch = {name: column[:, trajectories] for name, column in batch.items()}
            if args.vtrace:
                logits, value = predict(agent, minibatch["obs"], micro_batch)
                minibatch |= vtrace_columns(minibatch, logits, value, args.gamma)
                vtrace_targets.append(minibatch["target"])
            minibatch["obs"] = minibatch["obs"][:T]
            minibatch = {name: column.flatten(0, 1) for name, column in minibatch.items()}
            valid = minibatch["valid"]
            # Valid rows per rank, on average; the clamp avoids 0 / 0.
            num_valid = mean_over_ranks(valid.sum()).clamp(min=1 / WORLD)
            minibatch["advantage"] = standardize_valid(minibatch["advantage"], valid, num_valid)
            minibatch["target"] = normalize(minibatch["target"], agent.returns)
            optimizer.zero_grad()
            for start in range(0, args.minibatch_size, micro_batch):
                rows = {name: x[start : start + micro_batch] for name, x in minibatch.items()}
                logits, value = agent(rows["obs"])
                terms = ppo_terms(logits, value, rows, args.clip, args.vf_clip)
                # This piece's share of the minibatch's means; backward() adds up the gradients.
                parts = {name: (x * rows["valid"]).sum() / num_valid for name, x in terms.items()}
                loss = parts["loss/policy"] + args.vf_coef * parts["loss/value"]
                loss -= ent_coef * parts["loss/entropy"]
                loss.backward()
                for name, part in parts.items():
                    sums[name] += part.detach()
            for parameter in agent.parameters():
                parameter.grad = mean_over_ranks(parameter.grad)
            limit = args.max_grad_norm or math.inf  # inf: only measures the norm
            sums["train/grad_norm"] += nn.utils.clip_grad_norm_(agent.parameters(), limit)
            optimizer.step()
            agent.version += 1
            actors.publish(agent)
        # Once per dataset, as with GAE. The first epoch still uses the old statistics.
        if args.vtrace and epoch == 0:
            agent.returns.update(torch.cat(vtrace_targets, 1)[batch["valid"].bool()])
    num_updates = args.update_epochs * args.num_minibatches
    return {name: mean_over_ranks(x / num_updates).item() for name, x in sums.items()}


def train(args: Args, make_envs=make_envs, saved: dict | None = None) -> dict:
    """Train; returns the last metrics, "step", "agent", "run" (the folder) and "eval".

    make_envs(args, num_envs, stream): called once per group; returns any VectorEnv with next-step
    autoreset, uint8 (C, H, W) observations and Discrete actions.
    saved: the loaded checkpoint, if args already include its flags (as in `main`).
    Raises UsageError, FloatingPointError (training diverged), KeyboardInterrupt and an
    environment's own exceptions.
    """
    args, saved = prepare(args, saved)
    device = set_up(args)
    T = args.num_steps
    N = args.num_envs // args.num_groups
    M = args.minibatch_size // T * args.num_minibatches  # trajectories per dataset
    batch_size = T * M * WORLD
    total = args.total_timesteps // batch_size * batch_size
    step = saved["step"]
    # Each rank and each resumed part of a run has its own episodes and actions.
    stream = f"training from {step} of rank {RANK}"
    groups = []
    for g in range(args.num_groups):
        envs = make_envs(args, N, f"{stream} {g}")
        envs = RecordEpisodeStatistics(envs, stats_key="counted")  # for envs without reports
        obs, _ = envs.reset()
        check_envs(envs, obs, N, AutoresetMode.NEXT_STEP, min_size=36)
        seed = stream_seed(args.seed, f"{stream} actions {g}")
        groups.append(Group(envs, obs, seed, device, head_start=g * T))

    torch.manual_seed(args.seed)
    agent = Agent(obs.shape[1:], envs.single_action_space.n, args).to(device)
    agent.version = 0  # SGD steps of this process; the actors' copies carry it
    optimizer = torch.optim.Adam(agent.parameters(), eps=args.adam_eps, fused=True)
    best = saved["best"]
    if args.resume:
        agent.load_state_dict(saved["agent"])
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.param_groups[0]["eps"] = args.adam_eps  # not the restored one
    compare_ranks(args, step)
    if args.compile:
        agent.compile()  # not the actors' copies

    rollouts_per_dataset = M // N
    num_rollouts = (args.total_timesteps - step) // batch_size * rollouts_per_dataset
    ahead = 0 if args.sync else args.num_batches_to_accumulate
    run = Run(args, device, step, batch_size)
    actors = Actors(groups, agent, T, rollouts_per_dataset, ahead, num_rollouts)
    iteration = saved["iteration"]
    recent = deque(maxlen=100)  # returns of the last games
    metrics = {}

    def save(name: str):
        # The outputs are checked too: a diverged agent can have finite weights.
        with torch.no_grad():
            outputs = agent(torch.from_numpy(groups[0].obs).to(device))
        state = {
            "step": step,
            "iteration": iteration,
            "best": best,
            "agent": agent.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        run.save(name, state, outputs)

    try:
        if not args.resume:
            save("checkpoint.pt")
        while step + batch_size <= args.total_timesteps:
            # Dataset: rollouts side by side. Without --sync the actors already play the next ones.
            start = time.perf_counter()
            rollouts = actors.dataset()
            batch = {}
            for name in rollouts[0]["columns"]:
                batch[name] = torch.cat([rollout["columns"][name] for rollout in rollouts], 1)
            returns = [x for rollout in rollouts for x in rollout["returns"]]
            lengths = [x for rollout in rollouts for x in rollout["lengths"]]
            env_s = sum(rollout["env_s"] for rollout in rollouts)
            policy_s = sum(rollout["policy_s"] for rollout in rollouts)
            del rollouts  # batch is a copy
            lag = agent.version - batch.pop("version")
            valid = batch["valid"] * (lag < args.max_policy_lag)
            is_valid = valid.bool()
            received = time.perf_counter()

            # The frame statistics change between acting and learning, so even the first ratio is
            # not 1 (as in Sample Factory).
            agent.frames.update(batch["obs"][:T].flatten(0, 1))

            # Advantages
            with torch.no_grad():
                _, last_value = agent(batch["obs"][T])
            last_value = denormalize(last_value, agent.returns)
            values = torch.cat([batch.pop("unnormalized_value"), last_value[None]]).cpu()
            ends = batch["terminated"], batch["done"]
            # With --vtrace, only for explained_variance: each minibatch computes its own targets.
            advantages = gae(batch["reward"], values, *ends, args.gamma, args.gae_lambda)
            targets = advantages + values[:T]
            explained = explained_variance(values[:T][is_valid], targets[is_valid])
            if not args.vtrace:
                agent.returns.update(targets[is_valid].to(device))
            batch["advantage"] = advantages
            batch["target"] = targets
            batch["valid"] = valid
            batch = {name: column.to(device) for name, column in batch.items()}

            # Learning
            lr = schedule(step, args.lr)
            if args.anneal_lr:
                lr *= 1 - step / total
            ent_coef = schedule(step, args.ent_coef)
            optimizer.param_groups[0]["lr"] = lr
            means = learn(agent, optimizer, actors, batch, ent_coef, args)
            if not np.isfinite(list(means.values())).all():
                raise FloatingPointError(f"a loss is not finite after step {step:,}: {means}")
            learned = time.perf_counter()
            run.bar.update(batch_size)

            # Metrics: losses are means over ranks; episodes and seconds are rank 0's
            next_step = step + batch_size
            metrics = {
                "step": next_step,
                "iteration": iteration + 1,
                "episode/return": np.mean(returns) if returns else None,
                "episode/length": np.mean(lengths) if lengths else None,
                "episode/count": len(returns),
                "eval/return": None,
                **means,
                "train/explained_variance": explained,
                "train/lr": lr,
                "train/ent_coef": ent_coef,
                "train/valid_frac": valid.mean().item(),
                "train/return_mean": agent.returns.mean.item(),
                "train/return_std": agent.returns.std.item(),
                "async/policy_lag_mean": lag.mean().item(),
                "async/policy_lag_max": int(lag.max()),
                "time/sps": batch_size / (learned - start),
                "time/env_s": env_s,  # of all groups, which play while the learner trains
                "time/policy_s": policy_s,
                "time/wait_s": received - start,
                "time/learn_s": learned - received,
            }
            due = args.eval_every and next_step // args.eval_every > step // args.eval_every
            if due and RANK == 0:
                metrics["eval/return"] = evaluate(agent, args, make_envs)["game"]["mean"]
            run.log(metrics)
            step = next_step
            iteration += 1
            recent.extend(returns)
            if len(recent) == 100 and np.mean(recent) > best:
                best = float(np.mean(recent))
                save("best.pt")
            is_last = step + batch_size > args.total_timesteps
            if is_last or time.monotonic() - run.last_save >= args.checkpoint_every:
                save("checkpoint.pt")
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
        actors.stop()


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
    obs, _ = envs.reset()
    while played.min() < episodes:
        logits, *_ = agent(torch.from_numpy(obs).to(device))
        action = logits.argmax(-1) if greedy else sample(logits, generator)
        obs, _, _, _, info = envs.step(action.cpu().numpy())
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
