# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0", "numpy==2.4.6", "gymnasium==1.4.0", "envpool==1.0.1", "tyro==1.0.17",
#     "pydantic==2.14.3", "tensorboard==2.21.0", "tqdm==4.70.1",
# ]
# ///
"""IMPALA with replay on Procgen.

    python impala_procgen.py --env-id bigfish            # 8M steps, easy, unlimited levels
    python impala_procgen.py --env-id bigfish --no-sync  # actors play while the learner trains
    python impala_procgen.py --resume runs/NAME          # continue a run; flags given now win

IMPALA, V-trace, network: Espeholt et al. 2018, arXiv:1802.01561. Procgen: Cobbe et al. 2020,
arXiv:1912.01588. As in T. Tumiel's entry to the NeurIPS 2020 Procgen competition
(github.com/LARS12llt/procgen-competition, RLlib 0.8.7), unlike the paper:
- by default nobody plays while the learner trains: only replayed batches are off-policy;
- Adam, no clipping of gradients or rewards, lambda 0.9; a wider CNN, frames t-3 and t as input;
- whole batches are replayed, not half of each. More: docs/impala_procgen.md.
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
import random
import signal
import sys
import threading
import time
from collections import deque
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
ROWS_ON_CPU = 1  # fragments per forward pass, the default of --micro-batch on a CPU


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
    env_id: str = "bigfish"  # Procgen game
    total_timesteps: PositiveInt = 8_000_000  # environment steps, rounded down to whole batches
    seed: NonNegativeInt = 1  # with --sync on a CPU, equal flags and threads give equal metrics
    run_dir: str = "runs"  # folder of all runs
    run_name: str = ""  # name of a new run's folder; "" = env-id__script__seed__time
    device: Device = "auto"  # auto, cpu, cuda, cuda:1; cuda with torchrun: a GPU per process
    threads: NonNegativeInt = 0  # CPU threads; 0 = all cores
    compile: bool = False  # torch.compile; on a GPU with CUDA graphs
    precision: Literal["fp32", "bf16"] = "fp32"  # fp32: TF32 on a GPU; bf16 is slow on most CPUs
    micro_batch: NonNegativeInt = 0  # steps per backward pass, in whole fragments; 0 = default
    checkpoint_every: NonNegativeFloat = 300  # seconds between checkpoints
    eval_episodes: NonNegativeInt = 100  # episodes of an evaluation; 0 = never evaluate
    eval_every: NonNegativeInt = 0  # steps between evaluations; 0 = only at the end
    # environment
    distribution_mode: Literal["easy", "hard"] = "easy"  # difficulty
    num_levels: NonNegativeInt = 0  # training levels; 0 = unlimited
    start_level: NonNegativeInt = 0  # first training level, with --num-levels
    stack: Literal["none", "gap", "full"] = "gap"  # frames t; t-3 and t; t-3 to t
    num_envs: PositiveInt = 128  # parallel environments (per process)
    num_groups: PositiveInt = 4  # groups of environments, each stepped by its own thread
    # optimization
    num_steps: PositiveInt = 64  # rollout length; a fragment is one environment's part of a rollout
    minibatch_size: Annotated[int, Field(ge=2)] = 2048  # steps in a batch, of whole group rollouts
    update_epochs: PositiveInt = 1  # SGD steps on each batch, new or replayed
    lr: Schedule = (0, 2e-4, 4e5, 5e-4, 1e6, 2e-4)
    """learning rate, or pairs of step and rate from step 0 on, linear in between; the entry's"""
    adam_eps: NonNegativeFloat = 6.25e-12  # 1e-8 / 1600: the entry's loss is a sum of 1600 rows
    max_grad_norm: NonNegativeFloat = 0  # clip the gradient's norm; 0 = off
    sync: bool = True  # act, then learn; --no-sync: also act meanwhile (faster, older rows)
    num_batches_to_accumulate: NonNegativeInt = 2  # batches actors may be ahead
    replay_slots: NonNegativeInt = 16  # newest batches kept for replay, 51 MB each; 0 = none
    replay_proportion: Annotated[float, Field(ge=0, le=100)] = 3  # replayed batches per new one
    # algorithm
    gamma: Share = 0.99  # discount
    vtrace_lambda: Share = 0.9  # factor on V-trace's trace weights c; 1 = the paper
    vf_coef: NonNegativeFloat = 0.5  # weight of the value loss (half the squared error)
    ent_coef: Schedule = 0.005  # weight of the entropy; a number, or as --lr
    # network
    channels: tuple[PositiveInt, PositiveInt, PositiveInt] = (32, 64, 64)  # of the three stages
    pool: Literal["avg", "flatten"] = "avg"  # after the CNN: global average or all outputs
    input_shift: NonNegativeFloat = 128  # network input: (pixel - this) / 255; OpenAI: 0
    ortho_heads: bool = False  # orthogonal heads of gains 0.01 and 1 (OpenAI), not Glorot

    def __post_init__(self):
        rollout = self.num_envs // self.num_groups * self.num_steps
        if self.num_envs % self.num_groups or self.minibatch_size % rollout:
            raise ValueError("--num-groups divides --num-envs; --minibatch-size: whole rollouts")
        if self.total_timesteps < self.minibatch_size * WORLD:
            raise ValueError(f"--total-timesteps: at least {self.minibatch_size * WORLD}")
        if self.start_level and not self.num_levels or self.start_level + self.num_levels >= 2**31:
            raise ValueError("--start-level: needs --num-levels; sum below 2 ** 31")


# --- environment ---

STACKS = {"none": (0,), "gap": (3, 0), "full": (3, 2, 1, 0)}  # ages of the frames, in steps


class ProcgenEnvs(gym.vector.VectorEnv):
    """EnvPool's Procgen with a frame stack: uint8 (N, 3 * frames, 64, 64), same-step autoreset.

    The step that ends an episode returns the next one's first frame, repeated to fill the stack.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}

    def __init__(self, envs, num_envs: int, ages: tuple[int, ...]):
        self.envs = envs
        self.num_envs = num_envs
        self.ages = ages
        self.single_observation_space = gym.spaces.Box(0, 255, (3 * len(ages), 64, 64), np.uint8)
        self.single_action_space = gym.spaces.Discrete(15)

    def stacked(self):
        return np.concatenate([self.frames[age] for age in self.ages], axis=1)

    def reset(self, *, seed=None, options=None):
        frame, _ = self.envs.reset()
        self.frames = [frame.copy() for _ in range(self.ages[0] + 1)]  # newest first
        return self.stacked(), {}

    def step(self, actions):
        frame, reward, terminated, truncated, _ = self.envs.step(actions)
        self.frames = [frame, *self.frames[:-1]]
        done = terminated | truncated
        if done.any():
            # EnvPool would reset them in their next step. Its `reset` takes indices, too
            first, _ = self.envs.reset(np.flatnonzero(done))  # frames of these only
            for old in self.frames:  # arrays that nobody else has
                old[done] = first
        return self.stacked(), reward, terminated, truncated, {}

    def close_extras(self, **kwargs):
        self.envs.close()


def make_envs(args: Args, num_envs: int, seed: int, test: bool = False):
    """Create Procgen environments with the training levels, or (test) with all levels."""
    with contextlib.redirect_stderr(io.StringIO()):  # gym prints a banner
        import envpool.procgen  # without libGL or GLib: apt install libgl1 libglib2.0-0
    name = f"{args.env_id.title()}{args.distribution_mode.title()}-v0"
    if name not in envpool.list_all_envs():
        raise UsageError(f"--env-id {args.env_id}: no Procgen game of EnvPool")
    # A seed per environment, drawn as by the procgen package; EnvPool takes signed numbers
    seeds = np.random.RandomState(seed).randint(2**32, size=num_envs, dtype=np.uint32)
    envs = envpool.make(
        name,
        env_type="gymnasium",
        num_envs=num_envs,
        num_threads=args.threads or available_cores(),
        env_seed=seeds.astype(np.int32).tolist(),
        num_levels=0 if test else args.num_levels,
        start_level=0 if test else args.start_level,
    )
    envs = ProcgenEnvs(envs, num_envs, STACKS[args.stack])
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)  # same-step: from gymnasium 1.4 on


# --- network ---


class ResidualBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class Agent(nn.Module):
    """IMPALA CNN (fig. 3, right, no LSTM): uint8 (B, C, H, W) -> logits (B, A), value (B,)."""

    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        super().__init__()
        self.args = args
        self.convs = nn.ModuleList()
        self.blocks = nn.ModuleList()
        width = obs_shape[0]
        for channels in args.channels:
            self.convs.append(nn.Conv2d(width, channels, 3, padding=1))
            self.blocks.append(nn.Sequential(ResidualBlock(channels), ResidualBlock(channels)))
            width = channels
        num_features = self.features(torch.zeros(1, *obs_shape)).shape[1]
        self.hidden = nn.Linear(num_features, 256)
        self.policy = nn.Linear(256, num_actions)
        self.value = nn.Linear(256, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):  # Keras' defaults
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        if args.ortho_heads:
            nn.init.orthogonal_(self.policy.weight, 0.01)
            nn.init.orthogonal_(self.value.weight)
        self.to(memory_format=torch.channels_last)

    def features(self, x):
        for conv, blocks in zip(self.convs, self.blocks, strict=True):
            # ceil_mode pads at the end only: TensorFlow's SAME pooling for even sizes
            x = F.max_pool2d(conv(x), 3, stride=2, ceil_mode=True)
            x = blocks(x)
        if self.args.pool == "avg":
            x = x.mean((2, 3))
        return F.relu(x.flatten(1))  # after the average, as in the entry

    def forward(self, obs):
        # Channels-last while still uint8: a quarter of the traffic
        x = obs.contiguous(memory_format=torch.channels_last).float()
        x = x.sub_(self.args.input_shift).div_(255)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.precision == "bf16"):
            x = F.relu(self.hidden(self.features(x)))
        x = x.float()  # heads in fp32: bf16 would round the values
        return self.policy(x), self.value(x).squeeze(-1)


# --- mathematics ---


def sample(logits, generator=None):
    """Draw from Categorical(logits): (B, A) -> (B,), by the Gumbel-max trick."""
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - noise.log()).argmax(-1)  # -log(exponential noise) is Gumbel noise


@torch.no_grad()
def act(agent, obs, noise):
    """uint8 (N, C, H, W), exponential noise (N, A) -> actions, log pi(a), each (N,)."""
    logits, _ = agent(obs)
    action = (logits - noise.log()).argmax(-1)  # as `sample` does
    return action, logits.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)


def vtrace(reward, value, done, rho, gamma: float, lam: float):
    """V-trace (Espeholt et al. 2018, 4.1, 4.2, rho-bar = c-bar = 1) -> vs, rho * advantage: (T, N).

    reward, done: (T, N), of row t's step. value: (T + 1, N), of row t's observation.
    rho: (T, N), pi(a_t|x_t) / mu(a_t|x_t). pi and value are the learner's, mu the actors'.
    """
    discount = gamma * (1 - done)
    rho = rho.clamp(max=1)
    c = lam * rho
    delta = rho * (reward + discount * value[1:] - value[:-1])
    correction = torch.zeros_like(value)  # vs - V; stays 0 in the last row, whose target is V
    for t in reversed(range(len(reward))):
        correction[t] = delta[t] + discount[t] * c[t] * correction[t + 1]
    vs = value + correction
    rho_advantage = rho * (reward + discount * vs[1:] - value[:-1])
    return vs[:-1], rho_advantage


def impala_loss(agent, rows: dict, ent_coef, args: Args) -> tuple:
    """Losses (B,) of a minibatch's fragments, and their terms and statistics, each (B,).

    rows: columns (B, T), obs one step more. loss/policy: -log pi(a) * rho * advantage (4.2).
    train/approx_kl: the estimate rho - 1 - log rho of KL(mu || pi). Value and target: (B, T).
    """
    rows = {name: column.transpose(0, 1) for name, column in rows.items()}  # (T, B), for V-trace
    shape = rows["obs"].shape[:2]
    logits, value = agent(rows["obs"].flatten(0, 1))
    logp = logits.unflatten(0, shape)[:-1].log_softmax(-1)
    value = value.unflatten(0, shape)
    action_logp = logp.gather(-1, rows["action"][..., None]).squeeze(-1)
    log_rho = action_logp.detach() - rows["logp"]
    rho = log_rho.exp()
    # As in Procgen's published results, a time limit counts as a termination
    reward, done, lam = rows["reward"], rows["done"], args.vtrace_lambda
    vs, rho_advantage = vtrace(reward, value.detach(), done, rho, args.gamma, lam)
    policy_loss = -action_logp * rho_advantage
    value_loss = (value[:-1] - vs) ** 2 / 2
    entropy = -(logp.exp() * logp).sum(-1)
    loss = policy_loss + args.vf_coef * value_loss - ent_coef * entropy
    terms = {
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "loss/entropy": entropy,
        "train/approx_kl": rho - 1 - log_rho,
    }
    means = {name: term.mean(0) for name, term in terms.items()}
    return loss.mean(0), means, (value[:-1].detach().T, vs.T)


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
    """T steps of a group -> columns (N, T), ended episodes, seconds of environments and policy.

    Row t = (obs_t, a_t, log mu(a_t|obs_t), version_t of mu, r_{t+1}, done_{t+1}); then obs_T.
    """
    start, env_s = time.perf_counter(), 0.0
    N, device = group.envs.num_envs, group.noise.device
    columns = {
        "obs": torch.empty(N, T + 1, *group.obs.shape[1:], dtype=torch.uint8, device=device),
        "action": torch.empty(N, T, dtype=torch.int64, device=device),
        "logp": torch.empty(N, T, device=device),
    }
    host = {name: np.empty((N, T)) for name in ("version", "reward", "done")}
    episodes = []
    for t in range(T):
        if actors.stopped:
            return None  # nobody reads it
        obs = group.obs.to(device, non_blocking=True)
        columns["obs"][:, t] = obs
        group.noise.exponential_(generator=group.generator)
        with actors.lock:
            action, logp = actors.policy(actors.agent, obs, group.noise)
            columns["action"][:, t] = action
            columns["logp"][:, t] = logp
            host["version"][:, t] = actors.agent.version
        action = columns["action"][:, t].cpu().numpy()
        before = time.perf_counter()
        obs, reward, terminated, truncated, info = group.envs.step(action)
        env_s += time.perf_counter() - before
        group.obs.copy_(torch.from_numpy(obs))
        host["reward"][:, t] = reward
        host["done"][:, t] = np.logical_or(terminated, truncated)
        episodes += ended_episodes(info)
    columns["obs"][:, T].copy_(group.obs, non_blocking=True)
    columns |= {name: torch.from_numpy(column).float() for name, column in host.items()}
    return columns, episodes, env_s, time.perf_counter() - start - env_s


# --- training ---


def gradient(net, loss, minibatch: dict, micro_batch: int) -> dict:
    """Set net's gradient of the mean of the losses over all ranks -> means of the terms.

    loss(rows) -> losses (B,) and a dict of terms (B,), for at most `micro_batch` rows at a time (0:
    ROWS_ON_CPU, on a GPU all), whose gradients add up.
    """
    num_rows = len(minibatch["obs"])
    size = micro_batch or (ROWS_ON_CPU if minibatch["obs"].device.type == "cpu" else num_rows)
    means = 0
    net.zero_grad()
    for start in range(0, num_rows, size):
        rows = {name: column[start : start + size] for name, column in minibatch.items()}
        losses, terms = loss(rows)
        (losses.sum() / (num_rows * WORLD)).backward()
        sums = torch.stack(list(terms.values())).detach().sum(1)
        means = means + sums / (num_rows * WORLD)
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


def learn(agent, optimizer, actors: Actors, batches: list, ent_coef, args: Args) -> dict:
    """Train on each batch update_epochs times -> means over the passes on the new batch.

    batches: the new one, then the replayed ones; columns (B, T) of B fragments, obs one step more.
    """
    fragments = math.ceil(args.micro_batch / args.num_steps)  # `gradient` calls them rows
    updates, critic = [], []  # means of each SGD step; values and targets of each forward pass
    compiled_loss = compiled(args)(impala_loss)

    def loss(rows):
        losses, terms, values_and_targets = compiled_loss(agent, rows, ent_coef, args)
        critic.append([x.clone() for x in values_and_targets])
        return losses, terms

    for batch in batches:
        for _ in range(args.update_epochs):
            means = gradient(agent, loss, batch, fragments)
            limit = args.max_grad_norm or math.inf  # inf: only measures the norm
            means["train/grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), limit)
            optimizer.step()
            agent.version += 1
            actors.publish(agent)
            updates.append(means)
    means = mean_of(updates[: args.update_epochs])
    # The first fragments are those of the new batch's first pass
    value, target = (torch.cat(x)[: len(batches[0]["obs"])] for x in zip(*critic, strict=True))
    return means | {"train/explained_variance": explained_variance(value, target)}


def train(args: Args, make_envs=make_envs, saved: dict | None = None) -> dict:
    """Train; returns the last metrics, "step", "agent", "run" (the folder) and "eval".

    make_envs(args, num_envs, seed, test=False), called per group, returns any VectorEnv with
    same-step autoreset, uint8 (C, H, W) observations, Discrete actions and
    RecordEpisodeStatistics' info["episode"]. saved: `load("runs/NAME")` continues that run.
    Raises UsageError, FloatingPointError (diverged), KeyboardInterrupt.
    """
    args, saved, device = set_up(args, saved)
    T, N = args.num_steps, args.num_envs // args.num_groups
    batch_size = args.minibatch_size * WORLD
    counters = saved or {"step": 0, "iteration": 0, "best": -math.inf}
    step, iteration, best = counters["step"], counters["iteration"], counters["best"]
    # Each rank and each part of a run, by its first step, has its own episodes and actions
    stream = f"training from {step} of rank {RANK}"
    groups = []
    for g in range(args.num_groups):
        envs = make_envs(args, N, stream_seed(args.seed, f"{stream} {g}"))
        obs, _ = envs.reset()
        check_envs(envs, obs, N, gym.vector.AutoresetMode.SAME_STEP, min_size=8)
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
    replay_rng = random.Random(args.seed)  # the same on all ranks: they need equally many passes
    ring = deque(maxlen=args.replay_slots if args.replay_proportion else 0)  # newest; not saved

    run = Run(args, saved, device)
    ahead = 0 if args.sync else args.num_batches_to_accumulate
    size = args.minibatch_size // (T * N)  # rollouts per batch
    actors = Actors(groups, agent, compiled(args)(act))
    num_rollouts = (args.total_timesteps - step) // batch_size * size
    datasets = actors.datasets(T, size, ahead, num_rollouts)
    recent = []  # returns of the last 100 episodes
    metrics = {}

    def save(name: str):
        run.save(name, parts, step=step, iteration=iteration, best=best)

    try:
        if not saved:
            save("checkpoint.pt")
        while step + batch_size <= args.total_timesteps:
            # Batch: rollouts side by side
            start = time.perf_counter()
            columns, episodes, env_s, policy_s = zip(*next(datasets), strict=True)
            batch = {name: torch.cat([x[name] for x in columns]).to(device) for name in columns[0]}
            lag = agent.version - batch["version"]
            received = time.perf_counter()

            # Replay: batches drawn uniformly from the ring, which contains the new one
            ring.append(batch)
            copies = int(args.replay_proportion + replay_rng.random())  # 2.5: two or three
            replayed = [replay_rng.choice(ring) for _ in range(copies)] if ring else []

            # Learning
            lr = schedule(step, args.lr)
            ent_coef = torch.tensor(schedule(step, args.ent_coef), device=device)
            optimizer.param_groups[0]["lr"] = lr
            means = learn(agent, optimizer, actors, [batch, *replayed], ent_coef, args)
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
                "train/lr": lr,
                "async/policy_lag_mean": lag.mean(),
                "async/policy_lag_max": lag.max(),
                "time/sps": batch_size / (learned - start),
                "time/env_s": sum(env_s),  # of all groups
                "time/policy_s": sum(policy_s),
                "time/wait_s": received - start,
                "time/learn_s": learned - received,
            }
            # Does the iteration reach a multiple of eval_every?
            due = args.eval_every and metrics["step"] // args.eval_every > step // args.eval_every
            if RANK == 0 and args.eval_episodes and due:
                for split, scores in evaluate(agent, args, make_envs).items():
                    metrics[f"eval/return_{split}"] = scores["mean"]
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
    splits = {}
    per_env = math.ceil(args.eval_episodes / 64)  # episodes in each of at most 64 environments
    num_envs = math.ceil(args.eval_episodes / per_env)
    for split in ["train", "test"] if args.num_levels else ["test"]:
        envs = make_envs(args, num_envs, stream_seed(args.seed, split), test=split == "test")
        episodes = play(agent, envs, per_env, stream_seed(args.seed, f"{split} actions"))
        envs.close()
        splits[split] = summary(split, episodes)
    return splits


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
        info = info.get("final_info", {})  # where same-step vectors put their environments' info
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
