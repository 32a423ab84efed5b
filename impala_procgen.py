# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0", "numpy==2.4.6", "gymnasium==1.4.0", "envpool==1.0.1", "tyro==1.0.17",
#     "tensorboard==2.21.0", "tqdm==4.70.1",
# ]
# ///
"""IMPALA with replay on Procgen.

    python impala_procgen.py --env-id bigfish            # 8M steps, easy, unlimited levels
    python impala_procgen.py --env-id bigfish --no-sync  # actors play while the learner trains
    python impala_procgen.py --resume runs/NAME          # continue a stopped run

IMPALA, V-trace, network: Espeholt et al. 2018, arXiv:1802.01561. Procgen: Cobbe et al. 2020,
arXiv:1912.01588. By default the groups of environments take turns: one plays, then the learner
trains, then the next plays. With --no-sync all run at once.

The base is Thomas Tumiel's entry to the NeurIPS 2020 Procgen competition (RLlib 0.8.7); batch,
replay, learning rate and lambda were tuned on starpilot. Unlike the paper:
- Adam, no gradient clipping, lambda 0.9 in V-trace (the paper's experiments: 1);
- a wider CNN with global average pooling; frames t-3 and t as input;
- whole batches are replayed (in the paper half of each batch is replayed).
Departures, results and the commands behind them: docs/impala_procgen.md.
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
import random
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
GAMES = """bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper leaper
maze miner ninja plunder starpilot""".split()


@dataclass
class Args:
    # run
    env_id: str = "bigfish"  # Procgen game
    total_timesteps: int = 8_000_000  # total environment steps, rounded down to whole batches
    seed: int = 1  # on a CPU, --sync runs with the same flags write identical metrics (not time/*)
    run_dir: str = "runs"  # folder of all runs
    run_name: str = ""  # name of this run's folder; "" = env-id__script__seed__time
    resume: str = ""  # folder of a run to continue; its saved flags are the defaults
    device: str = "auto"  # auto (cuda if available), cpu, cuda, cuda:1; torchrun: a GPU per rank
    threads: int = 0  # CPU threads; 0 = all cores (fewer can be faster on a busy machine)
    compile: bool = False  # torch.compile the policy that learns; speed not measured
    precision: Literal["fp32", "bf16"] = "fp32"  # fp32 is TF32 on a GPU; bf16 is slow on most CPUs
    micro_batch: int = 0  # rows per forward pass, in whole fragments; 0 = 64 on a CPU, all on a GPU
    checkpoint_every: float = 300  # seconds between checkpoints; 0 = after every iteration
    eval_episodes: int = 100  # episodes per evaluation; 0 = no evaluation, not even at the end
    eval_every: int = 0  # environment steps between evaluations; 0 = only at the end
    quiet: bool = False  # print only evaluations
    # environment
    distribution_mode: Literal["easy", "hard"] = "easy"  # difficulty
    num_levels: int = 0  # training levels; 0 = unlimited
    start_level: int = 0  # first training level, with --num-levels
    stack: Literal["none", "gap", "full"] = "gap"  # none: frame t; gap: t-3 and t; full: t-3 to t
    num_envs: int = 128  # environments of all groups (per process, with torchrun)
    num_groups: int = 4  # groups of environments, each stepped by its own thread
    # optimization
    num_steps: int = 64  # rollout length; a fragment is one environment's part of a rollout
    minibatch_size: int = 2048  # rows per SGD step and process; a multiple of a group's rollout
    update_epochs: int = 1  # SGD steps on each batch, new or replayed
    lr: tuple[float, ...] = (0, 2e-4, 4e5, 5e-4, 1e6, 2e-4)
    """learning rate: a number, or pairs of step and value from step 0 on (0 1e-4 5000000 0), linear
    in between, then constant; steps do not scale with --total-timesteps"""
    adam_eps: float = 6.25e-12  # Adam's epsilon: RLlib's 1e-8 / 1600 rows, as it sums its loss
    max_grad_norm: float = 0  # clip the gradient's norm; 0 = off
    sync: bool = True  # act, then learn; --no-sync: actors play while the learner trains
    num_batches_to_accumulate: int = 2  # batches that actors may be ahead, with --no-sync
    replay_slots: int = 16  # batches each process keeps for replay, by default 51 MB each; 0 = none
    replay_proportion: float = 3  # replayed batches per new one, at most 100; 0 = no replay
    # algorithm
    gamma: float = 0.99  # discount
    vtrace_lambda: float = 0.9  # factor on V-trace's trace weights c; 1 = the paper
    vf_coef: float = 0.5  # weight of the value loss (half the squared error)
    ent_coef: tuple[float, ...] = (0.005,)  # weight of the entropy bonus: a number, or as --lr
    # network
    channels: tuple[int, int, int] = (32, 64, 64)  # widths of the three stages of the IMPALA CNN
    pool: Literal["avg", "flatten"] = "avg"  # after the CNN: global average pooling or all outputs
    input_shift: float = 128  # the network's input is (pixel - this) / 255; OpenAI: 0
    ortho_heads: bool = False  # orthogonal heads of gains 0.01 and 1 (OpenAI), not Glorot


# Flags that --resume cannot change, and the bounds of flags that are numbers (checked by `plain`)
FIXED = "env_id distribution_mode stack channels pool input_shift".split()
AT_LEAST_1 = "num_envs num_groups num_steps update_epochs channels".split()
AT_MOST_1 = "gamma vtrace_lambda".split()


def check(args: Args):
    """Raise UsageError for settings that cannot work together."""
    if args.num_envs % args.num_groups:
        raise UsageError(f"--num-groups {args.num_groups}: must divide --num-envs {args.num_envs}")
    rows = args.num_envs // args.num_groups * args.num_steps  # of a rollout
    size = args.minibatch_size
    if size < 2 or size % rows:
        raise UsageError(f"--minibatch-size {size}: must be a multiple of {rows}, a rollout's rows")
    if args.total_timesteps < size * WORLD:
        raise UsageError(f"--total-timesteps {args.total_timesteps}: at least {size * WORLD}")
    if args.start_level + args.num_levels >= 2**31:
        raise UsageError("--start-level, --num-levels: their sum must be below 2 ** 31")
    if args.start_level and not args.num_levels:
        raise UsageError(f"--start-level {args.start_level}: needs --num-levels")
    if args.replay_proportion > 100:
        raise UsageError(f"--replay-proportion {args.replay_proportion}: must be at most 100")
    if args.replay_proportion and not args.replay_slots:
        raise UsageError(f"--replay-proportion {args.replay_proportion}: needs --replay-slots")


# --- environment ---

STACKS = {"none": (0,), "gap": (0, 3), "full": (0, 1, 2, 3)}  # indices of frames, oldest first


class ProcgenEnvs(gym.vector.VectorEnv):
    """EnvPool's Procgen with a frame stack: uint8 (N, 3 * frames, 64, 64), same-step autoreset.

    The step that ends an episode returns the next one's first observation, repeated to fill the
    stack. `truncated` marks time limits. `reset` returns the current stack; episodes continue.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, pool, num_envs: int, shown: tuple[int, ...]):
        self.pool = pool
        self.num_envs = num_envs
        self.shown = shown
        self.single_observation_space = gym.spaces.Box(0, 255, (3 * len(shown), 64, 64), np.uint8)
        self.single_action_space = gym.spaces.Discrete(15)
        frame, _ = pool.reset()
        # Oldest first, each (N, 3, 64, 64)
        self.frames = [frame.copy() for _ in range(shown[-1] + 1)]

    def stacked(self):
        return np.concatenate([self.frames[i] for i in self.shown], axis=1)

    def reset(self, *, seed=None, options=None):
        return self.stacked(), {}

    def step(self, actions):
        frame, reward, terminated, truncated, _ = self.pool.step(actions)
        self.frames = [*self.frames[1:], frame]
        done = terminated | truncated
        if done.any():
            # EnvPool would reset in the next step and ignore that step's action.
            first, _ = self.pool.reset(np.flatnonzero(done))
            for kept in self.frames:
                kept[done] = first
        return self.stacked(), reward, terminated, truncated, {}

    def close_extras(self, **kwargs):
        self.pool.close()


def make_envs(args: Args, num_envs: int, stream: str) -> gym.vector.VectorEnv:
    """Create Procgen environments as specified by args.

    `stream` seeds them; the stream "test" plays all levels, any other one the training levels.
    """
    if args.env_id not in GAMES:
        close = difflib.get_close_matches(args.env_id, GAMES, 3, 0.4) or GAMES
        raise UsageError(f"--env-id {args.env_id}: no such game; did you mean {', '.join(close)}?")
    with contextlib.redirect_stderr(io.StringIO()):  # envpool imports gym, which prints a banner
        import envpool.procgen  # without libGL or GLib: apt install libgl1 libglib2.0-0
    # One seed per environment, drawn as in the procgen package: ProcgenGym3Env(rand_seed=...)
    rng = np.random.RandomState(stream_seed(args.seed, stream))
    seeds = rng.randint(2**32, size=num_envs, dtype=np.uint32).view(np.int32)
    pool = envpool.make(
        f"{args.env_id.title()}{args.distribution_mode.title()}-v0",
        env_type="gymnasium",
        num_envs=num_envs,
        num_threads=args.threads or available_cores(),
        env_seed=seeds.tolist(),
        num_levels=0 if stream == "test" else args.num_levels,
        start_level=0 if stream == "test" else args.start_level,
    )
    envs = ProcgenEnvs(pool, num_envs, STACKS[args.stack])
    return RecordEpisodeStatistics(envs)


def stream_seed(seed: int, stream: str) -> int:
    """Hash both to 31 bits: different seeds or streams give independent random numbers."""
    return int(np.random.SeedSequence([seed, *stream.encode()]).generate_state(1)[0] >> 1)


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
        self.bf16 = args.precision == "bf16"
        self.pool = args.pool
        self.input_shift = args.input_shift
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
            if isinstance(module, nn.Conv2d | nn.Linear):  # Keras' defaults, as in the entry
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
        if self.pool == "avg":
            x = x.mean((2, 3))
        return F.relu(x.flatten(1))  # the ReLU after the average, as in the entry

    def forward(self, obs):
        # Channels-last while still uint8 (a quarter of the memory traffic), then scale in place.
        x = obs.contiguous(memory_format=torch.channels_last).float()
        x = x.sub_(self.input_shift).div_(255)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            x = F.relu(self.hidden(self.features(x)))
        x = x.float()  # heads in fp32: bf16 rounds a value of about 30 to multiples of 1/8
        return self.policy(x), self.value(x).squeeze(-1)


# --- mathematics ---


def sample(logits, generator=None):
    """Draw from Categorical(logits): (B, A) -> (B,)."""
    probabilities = logits.softmax(-1)
    if not torch.isfinite(probabilities).all():
        raise FloatingPointError("the policy's logits are not finite")
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


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


def impala_terms(logits, value, rows: dict, gamma: float, lam: float):
    """Terms of the loss and statistics -> a dict of (T, N) and the value's targets (T, N).

    logits (T, N, A) and value (T + 1, N): the new ones. loss/policy: -log pi(a) * rho * advantage
    (IMPALA, section 4.2). loss/value: half the squared error. train/approx_kl: the sampled
    estimate rho - 1 - log rho of KL(mu || pi).
    """
    logp = logits.log_softmax(-1)
    action_logp = logp.gather(-1, rows["action"][..., None]).squeeze(-1)
    log_rho = action_logp.detach() - rows["logp"]
    rho = log_rho.exp()
    # As in Procgen's reference results, a time limit counts as a termination.
    done = rows["done"]
    vs, rho_advantage = vtrace(rows["reward"], value.detach(), done, done, rho, gamma, lam)
    terms = {
        "loss/policy": -action_logp * rho_advantage,
        "loss/value": (value[:-1] - vs) ** 2 / 2,
        "loss/entropy": -(logp.exp() * logp).sum(-1),
        "train/approx_kl": rho - 1 - log_rho,
        "train/rho_mean": rho.clamp(max=1),
    }
    return terms, vs


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
        self.generator = torch.Generator(device).manual_seed(seed)  # of its actions
        # Random actions first, so that the groups' episodes differ in age. These steps are not
        # counted; an environment's first reported episode may begin with some of them.
        logits = torch.zeros(envs.num_envs, envs.single_action_space.n, device=device)
        for _ in range(head_start):
            action = sample(logits, self.generator).cpu().numpy()
            self.obs, *_ = envs.step(action)


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

    Row t = (obs_t, a_t, log mu(a_t|obs_t), version_t of the policy mu, r_{t+1}, done_{t+1}). There
    is one more observation, which bootstraps the last row.
    """
    device = next(actors.agent.parameters()).device
    N = group.envs.num_envs
    columns = {
        "obs": torch.zeros(T + 1, N, *group.obs.shape[1:], dtype=torch.uint8, device=device),
        "action": torch.zeros(T, N, dtype=torch.int64, device=device),
        "logp": torch.zeros(T, N, device=device),
        "version": torch.zeros(T, N),  # on the CPU until the end, like the columns below
        "reward": torch.zeros(T, N),
        "done": torch.zeros(T, N),
    }
    returns, lengths = [], []  # of the episodes that end
    policy_s, env_s = 0.0, 0.0
    for t in range(T):
        if actors.stopped.is_set():
            return {}  # nobody reads it
        start = time.perf_counter()
        agent = actors.agent  # the newest one, kept for the whole step
        columns["obs"][t] = torch.from_numpy(group.obs)
        logits, _ = agent(columns["obs"][t])
        action = sample(logits, group.generator)
        columns["action"][t] = action
        columns["logp"][t] = logits.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)
        columns["version"][t] = agent.version
        action = action.cpu().numpy()
        acted = time.perf_counter()
        group.obs, reward, terminated, truncated, info = group.envs.step(action)
        policy_s += acted - start
        env_s += time.perf_counter() - acted
        done = (terminated | truncated).astype(bool)
        columns["reward"][t] = torch.as_tensor(reward)
        columns["done"][t] = torch.from_numpy(done)
        _, ended_returns, ended_lengths = ended_episodes(group.envs, info)
        returns += ended_returns
        lengths += ended_lengths
    columns["obs"][T] = torch.from_numpy(group.obs)
    columns = {name: column.to(device) for name, column in columns.items()}
    episodes = {"returns": returns, "lengths": lengths}
    return {"columns": columns, "policy_s": policy_s, "env_s": env_s} | episodes


# --- training ---


def learn(agent, optimizer, actors: Actors, batches: list[dict], ent_coef: float, args: Args):
    """Train on each batch for update_epochs passes -> means over passes, explained variance.

    batches: the new one, then the replayed ones, which contribute only replay/rho_mean to the
    means. Columns (T, B), of B fragments: obs (one row more), action, logp, version, reward, done.
    """
    num_fragments = args.minibatch_size // args.num_steps
    device = batches[0]["obs"].device
    micro_batch = args.micro_batch or (64 if device.type == "cpu" else args.minibatch_size)
    piece_size = max(1, micro_batch // args.num_steps)  # V-trace needs whole fragments
    new_sums, replay_sums = defaultdict(float), defaultdict(float)
    values, targets = [], []  # of the new batch in its first pass
    for b, batch in enumerate(batches):
        sums = new_sums if b == 0 else replay_sums
        for epoch in range(args.update_epochs):
            optimizer.zero_grad()
            for start in range(0, num_fragments, piece_size):
                piece = slice(start, start + piece_size)
                rows = {name: column[:, piece] for name, column in batch.items()}
                shape = rows["obs"].shape[:2]
                logits, value = agent(rows["obs"].flatten(0, 1))
                logits = logits.unflatten(0, shape)[:-1]
                value = value.unflatten(0, shape)
                terms, vs = impala_terms(logits, value, rows, args.gamma, args.vtrace_lambda)
                # This piece's share of the minibatch's means; backward() adds up the gradients.
                parts = {name: x.sum() / args.minibatch_size for name, x in terms.items()}
                loss = parts["loss/policy"] + args.vf_coef * parts["loss/value"]
                loss -= ent_coef * parts["loss/entropy"]
                loss.backward()
                for name, part in parts.items():
                    sums[name] += part.detach()
                if b == 0 and epoch == 0:
                    values.append(value[:-1].detach())
                    targets.append(vs)
            for parameter in agent.parameters():
                parameter.grad = mean_over_ranks(parameter.grad)
            limit = args.max_grad_norm or math.inf  # inf: only measures the norm
            sums["train/grad_norm"] += nn.utils.clip_grad_norm_(agent.parameters(), limit)
            optimizer.step()
            agent.version += 1
            actors.publish(agent)
    if len(batches) > 1:  # the mean over replayed batches; the next line divides by the passes
        new_sums["replay/rho_mean"] = replay_sums["train/rho_mean"] / (len(batches) - 1)
    means = {name: mean_over_ranks(x / args.update_epochs).item() for name, x in new_sums.items()}
    return means, explained_variance(torch.cat(values, 1), torch.cat(targets, 1))


def train(args: Args, make_envs=make_envs, saved: dict | None = None) -> dict:
    """Train; returns the last metrics, "step", "agent", "run" (the folder) and "eval".

    make_envs(args, num_envs, stream): returns any VectorEnv with same-step autoreset, uint8
    (C, H, W) observations, Discrete actions; truncations count as terminations. Called per group.
    saved: the loaded checkpoint, if args already include its flags (as in `main`).
    Raises UsageError, FloatingPointError (training diverged) and KeyboardInterrupt.
    """
    args, saved = prepare(args, saved)
    device = set_up(args)
    T = args.num_steps
    N = args.num_envs // args.num_groups
    batch_size = args.minibatch_size * WORLD
    step = saved["step"]
    # Each rank and each resumed part of a run has its own episodes and actions.
    stream = f"training from {step} of rank {RANK}"
    groups = []
    for g in range(args.num_groups):
        envs = make_envs(args, N, f"{stream} {g}")
        envs = RecordEpisodeStatistics(envs, stats_key="counted")  # for envs without reports
        obs, _ = envs.reset()
        check_envs(envs, obs, N, AutoresetMode.SAME_STEP, min_size=8)
        seed = stream_seed(args.seed, f"{stream} actions {g}")
        groups.append(Group(envs, obs, seed, device, head_start=g * T))
    obs_shape = obs.shape[1:]
    num_actions = envs.single_action_space.n

    torch.manual_seed(args.seed)
    agent = Agent(obs_shape, num_actions, args).to(device)
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
    replay_rng = random.Random(args.seed)  # the same on all ranks: they need equally many passes
    ring = deque(maxlen=args.replay_slots if args.replay_proportion else 0)  # the newest batches

    run = Run(args, device, step, batch_size)
    rollouts_per_batch = args.minibatch_size // (T * N)
    num_rollouts = (args.total_timesteps - step) // batch_size * rollouts_per_batch
    ahead = 0 if args.sync else args.num_batches_to_accumulate
    actors = Actors(groups, agent, T, rollouts_per_batch, ahead, num_rollouts)
    iteration = saved["iteration"]
    recent = deque(maxlen=100)  # returns of the last episodes
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
            # Batch: rollouts, concatenated along the environments
            start = time.perf_counter()
            dataset = actors.dataset()
            new_batch = {}
            for name in dataset[0]["columns"]:
                new_batch[name] = torch.cat([rollout["columns"][name] for rollout in dataset], 1)
            lag = agent.version - new_batch["version"]
            returns = [x for rollout in dataset for x in rollout["returns"]]
            lengths = [x for rollout in dataset for x in rollout["lengths"]]
            env_s = sum(rollout["env_s"] for rollout in dataset)
            policy_s = sum(rollout["policy_s"] for rollout in dataset)
            del dataset  # new_batch is a copy
            received = time.perf_counter()

            # Replay: batches drawn uniformly from the ring, which contains the new one
            ring.append(new_batch)
            num_replayed = int(args.replay_proportion)
            if replay_rng.random() < args.replay_proportion % 1:  # 2.5: two or three
                num_replayed += 1
            replayed = [replay_rng.choice(ring) for _ in range(num_replayed)]

            # Learning
            lr = schedule(step, args.lr)
            ent_coef = schedule(step, args.ent_coef)
            optimizer.param_groups[0]["lr"] = lr
            batches = [new_batch, *replayed]
            means, explained = learn(agent, optimizer, actors, batches, ent_coef, args)
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
                "eval/return_train": None,
                "eval/return_test": None,
                "replay/count": num_replayed,
                "replay/rho_mean": None,  # unless something was replayed
                **means,
                "train/explained_variance": explained,
                "train/lr": lr,
                "train/ent_coef": ent_coef,
                "async/policy_lag_mean": lag.mean().item(),
                "async/policy_lag_max": int(lag.max()),
                "time/sps": batch_size / (learned - start),
                "time/env_s": env_s,
                "time/policy_s": policy_s,
                "time/wait_s": received - start,
                "time/learn_s": learned - received,
            }
            due = args.eval_every and next_step // args.eval_every > step // args.eval_every
            if due and RANK == 0:
                for split, result in evaluate(agent, args, make_envs).items():
                    metrics[f"eval/return_{split}"] = result["mean"]
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
    """Play at least args.eval_episodes episodes -> {split: {mean, stderr, returns, lengths}}.

    Every evaluation uses the same seeds, so two evaluations differ only in the agent.
    """
    splits = {}
    per_env = math.ceil(args.eval_episodes / 64)  # episodes in each of at most 64 environments
    for split in ["train", "test"] if args.num_levels else ["test"]:
        envs = make_envs(args, math.ceil(args.eval_episodes / per_env), split)
        seed = stream_seed(args.seed, f"{split} actions")
        returns, lengths = play(agent, envs, per_env, seed)
        envs.close()
        mean = float(np.mean(returns))
        stderr = float(np.std(returns) / max(len(returns) - 1, 1) ** 0.5)  # std(ddof=1) / sqrt(n)
        splits[split] = {"mean": mean, "stderr": stderr, "returns": returns, "lengths": lengths}
        tqdm.write(
            f"{split}: return {mean:.2f} +- {stderr:.2f} (std error, {len(returns)} episodes)"
        )
    return splits


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
