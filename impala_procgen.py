"""IMPALA on Procgen, as T. Tumiel tried it for his entry to the NeurIPS 2020 competition.

    python impala_procgen.py --env-id bigfish            # 8M steps, easy, unlimited levels
    python impala_procgen.py --env-id bigfish --no-sync  # actors play while the learner trains
    python impala_procgen.py --resume runs/NAME          # go on with a stopped run

IMPALA, V-trace, network: Espeholt et al. 2018, arXiv:1802.01561. Procgen: Cobbe et al. 2020,
arXiv:1912.01588. Groups of environments take turns: some play a batch, then the learner trains on
it, then the next ones play. With --no-sync those play while it trains, a thread each. --compile and
--precision are the learner's only.

Measured on starpilot, on which the defaults were chosen, all levels, `--channels 16 32 32`, one or
two CPU cores. Mean training return from 0.9M to 1M steps: 6.3 and 5.7 in bf16 (two seeds), 6.5 in
fp32 (one), 3.0 with --no-sync (one); ppo_procgen.py 12.1 (one), OpenAI's PPO 8.1 (three). From 1.8M
to 2M: 12.3 in fp32 (one), OpenAI's PPO 15.5 (three). With the entry's flags added 2.8 from 0.9M to
1M (fp32, one):
    python impala_procgen.py --no-sync --num-envs 16 --num-groups 2 --num-steps 200
        --minibatch-size 1600 --update-epochs 3 --replay-slots 0 --replay-proportion 0
        --lr 0 1e-4 1e6 5e-4 8e6 1e-4 --ent-coef 0.01 --vtrace-lambda 1 --max-grad-norm 3.125e-4

Unlike the paper, as in the entry's code (RLlib 0.8.7 on TensorFlow 2.3, graph mode): Adam, average
pooling before a ReLU, frames t-3 and t. Replay in batches of its own (paper: half of each batch).

Departures, effects not measured: losses are means over rows; the entry sums a batch of 1,600, so
its Adam's epsilon 1e-8 and limit of the gradient's norm 0.5 are divided by 1,600 here.
A fragment's last row is trained too (the entry only bootstraps from it). With --no-sync actors take
new weights at each step (the entry: each fragment), at most 2 batches ahead (the entry: 21). Group
g first plays g rollouts of random actions. PyTorch's Adam adds epsilon after the bias correction.

Left out on purpose: films (benchmark/evaluate.py), augmentation (benchmark/variants), RMSprop (the
paper's), V-trace's limits other than 1, emulator states and replay in checkpoints.
"""

import contextlib
import copy
import csv
import ctypes
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

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

RANK = int(os.environ.get("RANK", 0))  # of this process, set by torchrun
WORLD = int(os.environ.get("WORLD_SIZE", 1))  # the number of processes
CORES = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
GAMES = """bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper leaper
maze miner ninja plunder starpilot""".split()


@dataclass
class Args:
    # run
    env_id: Literal[*GAMES] = "bigfish"  # game
    total_timesteps: int = 8_000_000  # agent steps of all environments, floored to whole iterations
    seed: int = 1  # equal runs on a CPU (not with --no-sync) write equal metrics, but for time/*
    run_dir: str = "runs"  # folder of all runs
    run_name: str = ""  # folder of this run in it; "" = env-id__script__seed__time
    resume: str = ""  # run folder to go on in; its flags apply unless given here
    device: str = "auto"  # auto (cuda if there is one), cpu, cuda, cuda:1
    torch_threads: int = 0  # CPU threads of PyTorch; 0 = the core count on a CPU, 1 on a GPU
    env_threads: int = 0  # threads that step a group's environments; 0 = the core count
    compile: bool = False  # torch.compile the network; off until measured on a GPU
    precision: Literal["fp32", "bf16"] = "fp32"  # fp32: TF32 on a GPU; bf16: slow on older CPUs
    micro_batch: int = 0  # rows computed at once, in whole fragments; 0 = 64 on a CPU, else all
    checkpoint_every: float = 300  # seconds between checkpoints
    eval_episodes: int = 100  # games per evaluation; one evaluation is at the end; 0 = none
    eval_every: int = 0  # agent steps between evaluations in training; 0 = none
    quiet: bool = False  # only results, no progress
    # environment
    distribution_mode: Literal["easy", "hard"] = "easy"  # difficulty
    num_levels: int = 0  # training levels; 0 = unlimited
    start_level: int = 0  # first training level, with --num-levels
    stack: Literal["none", "gap", "full"] = "gap"  # frames shown: t, or t-3 and t, or t-3 to t
    num_envs: int = 128  # environments, of each process under torchrun
    num_groups: int = 4  # groups of them; group k % num_groups plays rollout k
    # optimisation
    num_steps: int = 64  # length of a group's rollout; a fragment is one environment's part
    minibatch_size: int = 2048  # rows of a batch, whole rollouts; a pass over it is one SGD step
    update_epochs: int = 1  # passes over a batch
    lr: tuple[float, ...] = (0, 2e-4, 4e5, 5e-4, 1e6, 2e-4)
    """learning rate: one number, or step, rate, step, rate, ...: linear between, constant beyond"""
    adam_eps: float = 6.25e-12  # Adam's epsilon: 1e-8 / 1600, for means instead of sums
    max_grad_norm: float = 0  # clip the gradient's norm; 0 = no clipping
    sync: bool = True  # act, then learn; --no-sync: actors play while the learner trains
    num_batches_to_accumulate: int = 2  # batches that actors may be ahead, with --no-sync
    replay_slots: int = 16  # newest batches kept for replay, 51 MB each; 0 = no replay
    replay_proportion: float = 3  # replayed batches per new one, drawn uniformly from the slots
    # algorithm
    gamma: float = 0.99  # discount
    vtrace_lambda: float = 0.9  # multiplies V-trace's trace weights c; 1 = the paper
    vf_coef: float = 0.5  # weight of the value term, half the squared error
    ent_coef: tuple[float, ...] = (0.005,)  # weight of the entropy bonus: one number, or as --lr
    # network
    channels: tuple[int, int, int] = (32, 64, 64)  # widths of the IMPALA CNN's stages
    pool: Literal["avg", "flatten"] = "avg"  # after the CNN: global average pool, or every output
    input_shift: float = 128  # the network's input is (pixel - this) / 255; OpenAI 0
    ortho_heads: bool = False  # orthogonal heads of gains 0.01 and 1 (OpenAI), not Glorot


def check(args: Args):
    """Raise UsageError for settings that cannot work."""
    for name in ("num_envs", "num_groups", "num_steps", "update_epochs"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1")
    at_least_0 = """seed micro_batch eval_episodes eval_every torch_threads env_threads
        max_grad_norm num_levels start_level num_batches_to_accumulate replay_slots
        replay_proportion""".split()
    for name in at_least_0:
        if getattr(args, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 0")
    if args.num_envs % args.num_groups:
        raise UsageError(f"--num-groups {args.num_groups}: must divide --num-envs {args.num_envs}")
    rows = args.num_envs // args.num_groups * args.num_steps
    if args.minibatch_size < 2 or args.minibatch_size % rows:
        raise UsageError(f"--minibatch-size {args.minibatch_size}: a multiple of {rows}, a rollout")
    if args.replay_proportion and not args.replay_slots:
        raise UsageError(f"--replay-proportion {args.replay_proportion}: needs --replay-slots")
    batch_size = args.minibatch_size * WORLD
    if args.total_timesteps < batch_size:
        raise UsageError(f"--total-timesteps {args.total_timesteps}: at least {batch_size}")
    if args.eval_every and not args.eval_episodes:
        raise UsageError("--eval-every: needs --eval-episodes")
    schedule(0, args.lr)  # raises UsageError
    schedule(0, args.ent_coef)


# --- environment ---

STACKS = {"none": (0,), "gap": (0, 3), "full": (0, 1, 2, 3)}  # of the frames kept, oldest first


class ProcgenEnvs(gym.vector.VectorEnv):
    """OpenAI's Procgen with a frame stack: uint8 (N, 3 * frames, 64, 64), same-step autoreset.

    The observation of a step that ended a game is the next game's first, and fills its stack.
    A time-out sets `terminated`. `reset` cannot cut a game short.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, shown: tuple[int, ...], num: int, **options):
        with contextlib.redirect_stderr(io.StringIO()):  # it imports gym, which prints a banner
            from procgen import ProcgenGym3Env
        self.env = ProcgenGym3Env(num=num, **options)
        self.num_envs = num
        self.shown = shown
        self.single_observation_space = gym.spaces.Box(0, 255, (3 * len(shown), 64, 64), np.uint8)
        self.single_action_space = gym.spaces.Discrete(15)
        _, frame, _ = self.observe()
        self.frames = [frame] * (shown[-1] + 1)  # oldest first, each (N, 3, 64, 64)

    def observe(self):
        reward, obs, first = self.env.observe()
        return reward, np.ascontiguousarray(obs["rgb"].transpose(0, 3, 1, 2)), first

    def stacked(self):
        return np.concatenate([self.frames[i] for i in self.shown], axis=1)

    def reset(self, *, seed=None, options=None):
        return self.stacked(), {}

    def step(self, actions):
        self.env.act(actions)
        reward, frame, first = self.observe()
        self.frames = [*self.frames[1:], frame]
        if first.any():
            new = first[:, None, None, None]
            self.frames = [np.where(new, frame, old) for old in self.frames]
        return self.stacked(), reward, first, np.zeros_like(first), {}

    def close_extras(self, **kwargs):
        self.env.close()


def make_envs(args: Args, num_envs: int, stream: str) -> gym.vector.VectorEnv:
    """Procgen as args say. `stream` names its random numbers; that of "test" plays all levels."""
    if args.env_id not in GAMES:  # a run on an environment of one's own has another name
        raise UsageError(f"--env-id {args.env_id}: not one of {', '.join(GAMES)}")
    envs = ProcgenEnvs(
        STACKS[args.stack],
        num_envs,
        env_name=args.env_id,
        distribution_mode=args.distribution_mode,
        num_levels=0 if stream == "test" else args.num_levels,
        start_level=0 if stream == "test" else args.start_level,
        rand_seed=stream_seed(args.seed, stream),
        num_threads=args.env_threads or CORES,
    )
    return RecordEpisodeStatistics(envs)  # puts what a game that ends reached into info["episode"]


def stream_seed(seed: int, stream: str) -> int:
    """A 31-bit hash: neither neighbouring seeds nor different streams share random numbers."""
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
        self.version = 0  # SGD steps of this process
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
            # ceil_mode without padding is TensorFlow's SAME pooling of even sizes: it pads the end.
            x = F.max_pool2d(conv(x), 3, stride=2, ceil_mode=True)
            x = blocks(x)
        if self.pool == "avg":
            x = x.mean((2, 3))
        return F.relu(x.flatten(1))  # the ReLU after the average, as in the entry

    def forward(self, obs):
        # Reordered while still bytes: a quarter of the traffic. sub_ and div_ reuse the floats.
        x = obs.contiguous(memory_format=torch.channels_last).float()
        x = x.sub_(self.input_shift).div_(255)
        x = F.relu(self.hidden(self.features(x)))
        with torch.autocast(x.device.type, enabled=False):  # bf16 near 30 has steps of 1/8
            return self.policy(x.float()), self.value(x.float()).squeeze(-1)


# --- mathematics ---


def sample(logits, generator=None):
    """Draw from Categorical(logits): (B, A) -> (B,)."""
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def vtrace(reward, value, done, rho, gamma: float, lam: float):
    """V-trace (Espeholt et al. 2018, 4.1, 4.2, limits 1) -> targets v_s, rho x advantage: (T, N).

    reward, done: (T, N), of the step taken in row t; rho: (T, N), pi(a_t|x_t) / mu(a_t|x_t), of
    the present policy and the one that acted; value: (T + 1, N), of the present critic.
    """
    discount = gamma * (1 - done)
    rho = rho.clamp(max=1)
    c = lam * rho
    delta = rho * (reward + discount * value[1:] - value[:-1])
    correction = torch.zeros_like(value)  # vs - V; its last row stays 0: there V is the target
    for t in reversed(range(len(reward))):
        correction[t] = delta[t] + discount[t] * c[t] * correction[t + 1]
    vs = value + correction
    rho_advantage = rho * (reward + discount * vs[1:] - value[:-1])
    return vs[:-1], rho_advantage


def impala_terms(logits, value, rows: dict, args: Args) -> tuple[dict, torch.Tensor]:
    """What the loss is made of, and the value's targets, each (T, N).

    logits (T, N, A) and value (T + 1, N) are the new ones. policy: -log pi(a) x rho x advantage
    (IMPALA, section 4.2); value: half the squared error; approx_kl: KL(mu || pi), by rho - 1 -
    log rho.
    """
    logp = logits.log_softmax(-1)
    action_logp = logp.gather(-1, rows["action"][..., None]).squeeze(-1)
    log_rho = action_logp.detach() - rows["logp"]
    rho = log_rho.exp()
    reward, done = rows["reward"], rows["done"]
    vs, rho_advantage = vtrace(reward, value.detach(), done, rho, args.gamma, args.vtrace_lambda)
    terms = {
        "policy": -action_logp * rho_advantage,
        "value": (value[:-1] - vs) ** 2 / 2,
        "entropy": -(logp.exp() * logp).sum(-1),
        "approx_kl": rho - 1 - log_rho,
        "rho": rho.clamp(max=1),
    }
    return terms, vs


def explained_variance(value, target) -> float | None:
    """1 - Var(target - value) / Var(target); None where targets do not vary."""
    variance = target.var()
    return 1 - ((target - value).var() / variance).item() if variance > 0 else None


def schedule(step: int, knots: tuple[float, ...]) -> float:
    """One number, or step, value, step, value, ...: linear between them, constant outside."""
    if len(knots) == 1:
        return knots[0]
    steps, values = list(knots[0::2]), list(knots[1::2])
    if not steps or len(steps) != len(values) or steps != sorted(set(steps)):
        raise UsageError(f"--lr, --ent-coef: one number, or rising steps and values; not {knots}")
    return float(np.interp(step, steps, values))


# --- actors ---


class Group:
    """Environments that step together, and what goes on from one rollout of them to the next."""

    def __init__(self, envs, seed: int, device: torch.device, head_start: int):
        self.envs = envs
        self.generator = torch.Generator(device).manual_seed(seed)  # of its actions
        self.obs, _ = envs.reset()
        # Random steps first, so that the groups' games differ in age. They do not count: a game
        # that is then under way is reported from there on.
        logits = torch.zeros(envs.num_envs, envs.single_action_space.n, device=device)
        for _ in range(head_start):
            action = sample(logits, self.generator).cpu().numpy()
            self.obs, *_ = envs.step(action)
        envs.episode_returns[:] = 0
        envs.episode_lengths[:] = 0


class Actors:
    """Groups of environments, each stepped by a thread of its own with the newest published agent.

    Group k % G plays rollout k, one of `num_rollouts`, by rollout(group, actors, T) -> dict; `size`
    rollouts are a dataset. Begun are those of the dataset that the learner waits for and of the
    `ahead` next ones; a group with none to play rests. So rows that arrive were played at most
    `ahead` datasets' SGD steps ago, and age in training. With ahead=0, size=1 groups take turns.
    """

    def __init__(self, groups, agent, rollout, T: int, size: int, ahead: int, num_rollouts: int):
        self.groups = groups
        self.threads = [ThreadPoolExecutor(1) for _ in groups]
        self.rollout = rollout
        self.T = T
        self.size = size
        self.ahead = ahead
        self.num_rollouts = num_rollouts
        self.begun = 0
        self.queue = deque()  # futures of the rollouts that were begun and not taken
        self.stopped = threading.Event()
        self.publish(agent)

    def publish(self, agent):
        """An actor plays this copy from its next step on. Nobody writes to it, so: no lock."""
        self.agent = copy.deepcopy(agent).requires_grad_(False)

    def dataset(self) -> list[dict]:
        """Begin what may be begun and wait for the next dataset; raises what an actor raised."""
        while self.begun < self.num_rollouts and len(self.queue) < (self.ahead + 1) * self.size:
            g = self.begun % len(self.groups)
            future = self.threads[g].submit(self.rollout, self.groups[g], self, self.T)
            self.queue.append(future)
            self.begun += 1
        return [self.queue.popleft().result() for _ in range(self.size)]

    def stop(self):
        """End the actors, within a step of their environments."""
        self.stopped.set()
        for thread in self.threads:
            thread.shutdown(cancel_futures=True)


@torch.no_grad()
def impala_rollout(group: Group, actors: Actors, T: int) -> dict:
    """T steps of a group's N environments: columns (T, N), finished games, seconds.

    Row t = (obs_t, a_t, log mu(a_t|obs_t), version_t of the policy mu, r_{t+1}, done_{t+1}). There
    is one obs more, which bootstraps the last row.
    """
    device = next(actors.agent.parameters()).device
    N = group.envs.num_envs
    columns = {
        "obs": torch.zeros(T + 1, N, *group.obs.shape[1:], dtype=torch.uint8, device=device),
        "action": torch.zeros(T, N, dtype=torch.int64, device=device),
        "logp": torch.zeros(T, N, device=device),
        "version": torch.zeros(T, N, device=device),
    }
    rewards = torch.zeros(T, N)
    dones = torch.zeros(T, N)
    returns, lengths = [], []  # of the games that end
    policy_s, env_s = 0.0, 0.0
    for t in range(T):
        if actors.stopped.is_set():
            return {}  # which nobody reads
        start = time.perf_counter()
        agent = actors.agent  # the newest, and the same one for all of this step
        columns["obs"][t] = torch.from_numpy(group.obs)
        logits, _ = agent(columns["obs"][t])
        action = sample(logits, group.generator)
        columns["action"][t] = action
        columns["logp"][t] = logits.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)
        columns["version"][t] = agent.version
        action = action.cpu().numpy()
        acted = time.perf_counter()
        group.obs, reward, terminated, truncated, info = group.envs.step(action)
        if "episode" in info:
            returns += info["episode"]["r"][info["_episode"]].tolist()
            lengths += info["episode"]["l"][info["_episode"]].tolist()
        rewards[t] = torch.from_numpy(reward)
        dones[t] = torch.from_numpy(terminated | truncated)
        policy_s += acted - start
        env_s += time.perf_counter() - acted
    columns["obs"][T] = torch.from_numpy(group.obs)
    columns["reward"] = rewards.to(device)
    columns["done"] = dones.to(device)
    games = {"returns": returns, "lengths": lengths}
    return {"columns": columns, "policy_s": policy_s, "env_s": env_s} | games


# --- training ---


def train(args: Args, envs: list[gym.vector.VectorEnv] | None = None) -> dict:
    """Train; returns the last metrics, "agent", "run" (the folder), "eval" (eval.json's, if made).

    envs: a list of args.num_groups VectorEnvs of equal size with same-step autoreset, uint8
    (C, H, W) observations, discrete actions. They are not seeded, evaluated or closed; their
    truncations count as ends. None = Procgen as args say. Raises UsageError, OSError,
    FloatingPointError (a loss is not finite), KeyboardInterrupt, and what an actor raised.
    """
    check(args)
    device = set_up(args)
    T = args.num_steps
    N = args.num_envs // args.num_groups
    batch_size = args.minibatch_size * WORLD
    total = args.total_timesteps // batch_size * batch_size
    saved = load_checkpoint(args.resume) if args.resume else {"step": 0}
    step = saved["step"]
    # A run resumed at a later step and another rank play other games and draw other actions.
    stream = f"training from {step} of rank {RANK}"
    own_envs = envs is None
    if own_envs:
        envs = [make_envs(args, N, f"{stream} {g}") for g in range(args.num_groups)]
    else:
        args = replace(args, env_id=type(envs[0].unwrapped).__name__)
        envs = [RecordEpisodeStatistics(vector) for vector in envs]
    sizes = [vector.num_envs for vector in envs]
    modes = {vector.metadata.get("autoreset_mode") for vector in envs}
    if sizes != [N] * args.num_groups or modes != {AutoresetMode.SAME_STEP}:
        needed = f"{args.num_groups} groups of {N} environments, same-step autoreset"
        raise UsageError(f"--num-envs {args.num_envs}: needs {needed}; not {sizes}, {modes}")
    space = envs[0].single_observation_space
    obs_shape = space.shape
    if space.dtype != np.uint8 or len(obs_shape) != 3 or obs_shape[0] > obs_shape[2]:
        raise UsageError(f"observations {space}: must be uint8 (C, H, W)")
    num_actions = envs[0].single_action_space.n

    torch.manual_seed(args.seed)  # equal first weights on all ranks
    agent = Agent(obs_shape, num_actions, args).to(device)
    network = torch.compile(agent) if args.compile else agent
    optimizer = torch.optim.Adam(agent.parameters(), eps=args.adam_eps, fused=True)
    best = -np.inf
    if args.resume:
        agent.load_state_dict(saved["agent"])
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.param_groups[0]["eps"] = args.adam_eps  # a flag given now wins
        if Path(args.resume, "best.pt").exists():  # may be newer than the checkpoint
            best = load_checkpoint(args.resume, "best.pt")["best"]
    groups = []
    for g in range(args.num_groups):
        seed = stream_seed(args.seed, f"{stream} actions {g}")
        groups.append(Group(envs[g], seed, device, head_start=g * T))
    replay_rng = random.Random(args.seed)  # all ranks need equally many passes
    ring = deque(maxlen=args.replay_slots if args.replay_proportion else 0)  # the newest batches
    num_fragments = args.minibatch_size // T
    micro_batch = args.micro_batch or (64 if device.type == "cpu" else args.minibatch_size)
    piece_fragments = max(1, micro_batch // T)  # V-trace needs whole ones
    recent = deque(maxlen=100)  # returns of the last games

    def forward(obs):
        """(T + 1, F, C, H, W), F fragments -> logits (T + 1, F, A), value (T + 1, F)."""
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits, value = network(obs.flatten(0, 1))
        return logits.unflatten(0, obs.shape[:2]), value.view(obs.shape[:2])

    def save(name: str):
        state = {
            "step": step,
            "best": best,
            "agent": agent.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        logger.save(name, state)

    logger = Logger(args, device, step, total)
    rollouts_per_batch = args.minibatch_size // (T * N)
    num_rollouts = math.ceil((total - step) / batch_size) * rollouts_per_batch
    ahead = 0 if args.sync else args.num_batches_to_accumulate
    actors = Actors(groups, agent, impala_rollout, T, rollouts_per_batch, ahead, num_rollouts)
    last_save = time.monotonic()
    metrics = {}
    try:
        while step < total:
            logger.mark = time.perf_counter()  # the clock anew: saving and evaluating do not count
            # Batch: whole rollouts, side by side; with --no-sync the next are begun
            dataset = actors.dataset()
            new_batch = {}
            for name in dataset[0]["columns"]:
                new_batch[name] = torch.cat([rollout["columns"][name] for rollout in dataset], 1)
            lag = agent.version - new_batch["version"]
            returns = [x for rollout in dataset for x in rollout["returns"]]
            lengths = [x for rollout in dataset for x in rollout["lengths"]]
            logger.lap("queue_wait")

            # Replay: the newest batch may be drawn as well
            ring.append(new_batch)
            num_replayed = int(args.replay_proportion)
            if replay_rng.random() < args.replay_proportion % 1:  # 2.5: two or three
                num_replayed += 1
            replayed = [replay_rng.choice(ring) for _ in range(num_replayed)]

            # Update: the new batch, then the replayed ones, each update_epochs times
            lr = schedule(step, args.lr)
            ent_coef = schedule(step, args.ent_coef)
            optimizer.param_groups[0]["lr"] = lr
            sums = defaultdict(float)  # of the batches' means, over passes
            values, targets = [], []  # of the new batch's first pass
            passes = [("", new_batch)] * args.update_epochs  # prefix of its sums, batch
            for old_batch in replayed:
                passes += [("replay/", old_batch)] * args.update_epochs
            for p, (prefix, batch) in enumerate(passes):
                optimizer.zero_grad()
                for start in range(0, num_fragments, piece_fragments):
                    piece = slice(start, start + piece_fragments)
                    fragments = {name: column[:, piece] for name, column in batch.items()}
                    logits, value = forward(fragments["obs"])
                    terms, vs = impala_terms(logits[:-1], value, fragments, args)
                    # This piece's shares of the batch's means; backward adds gradients up.
                    shares = {name: x.sum() / args.minibatch_size for name, x in terms.items()}
                    loss = shares["policy"] + args.vf_coef * shares["value"]
                    loss -= ent_coef * shares["entropy"]
                    loss.backward()
                    for name, share in shares.items():
                        sums[prefix + name] += share.detach()
                    if p == 0:
                        values.append(value[:-1].detach())
                        targets.append(vs)
                for parameter in agent.parameters():
                    parameter.grad = sum_over_ranks(parameter.grad) / WORLD
                limit = args.max_grad_norm or np.inf  # inf: only measures the norm
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), limit)
                sums[prefix + "grad_norm"] += grad_norm
                optimizer.step()
                agent.version += 1
                actors.publish(agent)

            # Metrics: with torchrun the losses are all ranks', the rest rank 0's
            divisor = args.update_epochs * WORLD  # a mean over passes and ranks
            means = {name: sum_over_ranks(x).item() / divisor for name, x in sums.items()}
            logger.lap("learn", batch_size)
            if not np.isfinite(sum(means.values())):
                raise FloatingPointError(f"a loss is not finite after step {step:,}: {means}")
            explained = explained_variance(torch.cat(values, 1), torch.cat(targets, 1))
            next_step = step + batch_size
            metrics = {
                "step": next_step,
                "iteration": next_step // batch_size,
                "episode/return": np.mean(returns) if returns else None,
                "episode/length": np.mean(lengths) if lengths else None,
                "episode/count": len(returns),
                "eval/return_train": None,
                "eval/return_test": None,
                "loss/policy": means["policy"],
                "loss/value": means["value"],
                "loss/entropy": means["entropy"],
                "train/approx_kl": means["approx_kl"],
                "train/rho_mean": means["rho"],
                "train/explained_variance": explained,
                "train/grad_norm": means["grad_norm"],
                "train/lr": lr,
                "train/ent_coef": ent_coef,
                "async/policy_lag_mean": lag.mean().item(),
                "async/policy_lag_max": int(lag.max()),
                "replay/count": num_replayed,
                "replay/rho_mean": means["replay/rho"] / num_replayed if num_replayed else None,
                "time/env_s": sum(rollout["env_s"] for rollout in dataset),
                "time/policy_s": sum(rollout["policy_s"] for rollout in dataset),
            }
            due = args.eval_every and next_step // args.eval_every > step // args.eval_every
            if due and own_envs and RANK == 0:
                for split, result in evaluate(agent, args).items():
                    metrics[f"eval/return_{split}"] = result["mean"]
            metrics = logger.log(metrics)
            step = next_step
            recent.extend(returns)
            if len(recent) == 100 and np.mean(recent) > best:
                best = float(np.mean(recent))
                save("best.pt")
            if time.monotonic() - last_save >= args.checkpoint_every or step >= total:
                save("checkpoint.pt")
                last_save = time.monotonic()
    except FloatingPointError:
        raise  # these weights are not worth saving
    except BaseException:  # Ctrl-C, SIGTERM or a failure
        # What a half-done iteration has learned is kept, its steps do not count.
        save("checkpoint.pt")
        logger.say(f"stopped, saved at step {step:,}: --resume {logger.folder}", sys.stderr)
        raise
    finally:
        actors.stop()
        logger.bar.close()

    result = metrics | {"step": step, "agent": agent, "run": str(logger.folder)}
    if own_envs and args.eval_episodes and RANK == 0:
        logger.say(f"trained to step {step:,}, evaluating; again: --resume {logger.folder}")
        result["eval"] = {"step": step, "splits": evaluate(agent, args)}
        (logger.folder / "eval.json").write_text(json.dumps(result["eval"], indent=1))
    return result


# --- evaluation ---


def evaluate(agent: Agent, args: Args) -> dict:
    """Play args.eval_episodes games or some more -> {split: {mean, stderr, returns, lengths}}.

    Every evaluation of a run plays from the same seeds: two of them differ by the agent only.
    """
    splits = {}
    games = math.ceil(args.eval_episodes / 64)  # per environment, of which there are at most 64
    for split in ["train", "test"] if args.num_levels else ["test"]:
        envs = make_envs(args, math.ceil(args.eval_episodes / games), split)
        seed = stream_seed(args.seed, f"{split} actions")
        returns, lengths = play(agent, envs, games, seed)
        envs.close()
        mean = float(np.mean(returns))
        stderr = float(np.std(returns) / max(len(returns) - 1, 1) ** 0.5)  # 0 for one game
        splits[split] = {"mean": mean, "stderr": stderr, "returns": returns, "lengths": lengths}
        spread = f"+- {stderr:.2f} (standard error, {len(returns)} games)"
        tqdm.write(f"{split}: return {mean:.2f} {spread}")
    return splits


@torch.no_grad()
def play(agent, envs, games: int, seed: int, greedy: bool = False) -> tuple[list, list]:
    """Play `games` whole games in each of envs, which report episodes -> returns, lengths.

    A fixed number per environment: counting the first to finish would favour short games.
    """
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    played = np.zeros(envs.num_envs, int)
    returns, lengths = [], []
    obs, _ = envs.reset()
    while played.min() < games:
        logits, *_ = agent(torch.from_numpy(obs).to(device))
        action = logits.argmax(-1) if greedy else sample(logits, generator)
        obs, _, _, _, info = envs.step(action.cpu().numpy())
        if "episode" in info:
            counted = info["_episode"] & (played < games)
            returns += info["episode"]["r"][counted].tolist()
            lengths += info["episode"]["l"][counted].tolist()
            played += info["_episode"]
    return returns, lengths


# --- plumbing, the same text in all five scripts of this project ---

SCRIPT = Path(__file__).stem


class UsageError(ValueError):
    """What the user can mend: `main` prints one line and returns 2."""


def set_up(args: Args) -> torch.device:
    """Choose and try out the device, set PyTorch's threads, meet the other ranks."""
    name = args.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if WORLD > 1 and name == "cuda":
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name} (auto, cpu, cuda, cuda:N): {error}") from None
    torch.set_num_threads(args.torch_threads or (CORES if device.type == "cpu" else 1))
    torch.set_float32_matmul_precision("high")  # TF32, which convolutions have by default
    libc = ctypes.CDLL(None)
    if libc.mallopt(-3, 2**30):  # M_MMAP_THRESHOLD; an old glibc refuses so high a value
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: freed memory is kept, 6 % less CPU
    if WORLD > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(days=1))  # rank 0 may evaluate for long
    return device


def sum_over_ranks(x):
    """The sum of a tensor over torchrun's ranks; without torchrun x itself."""
    if WORLD > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


def load_checkpoint(run: str, name: str = "checkpoint.pt") -> dict:
    """What a run folder's checkpoint holds, loaded as data: a hostile file runs no code."""
    try:
        saved = torch.load(Path(run, name), map_location="cpu", weights_only=True)
        script, flags = saved["script"], saved["args"].keys()
    except Exception as error:  # a damaged or foreign file raises nearly anything
        raise UsageError(f"--resume {run}: no readable {name}, {error!r}") from None
    if script != SCRIPT or not flags <= vars(Args()).keys():
        raise UsageError(f"--resume {run}: not made by this version of {SCRIPT}.py")
    return saved


class Logger:
    """A run's folder and what is written to it (by rank 0), progress, clocks."""

    def __init__(self, args: Args, device: torch.device, step: int, total: int):
        name = f"{args.env_id}__{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        self.folder = Path(args.resume or Path(args.run_dir, args.run_name or name))
        self.args = args
        self.start = step
        self.step = step
        self.table = None
        self.laps = defaultdict(float)
        self.mark = time.perf_counter()
        if RANK == 0 and self.folder.exists() and not args.resume:
            raise UsageError(f"--run-name: {self.folder} exists; --resume {self.folder} goes on")
        hide = True if args.quiet or RANK > 0 else None  # None: hidden unless on a terminal
        self.bar = tqdm(total=total, initial=step, unit=" steps", unit_scale=True, disable=hide)
        if RANK > 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        git = f"git -C '{Path(__file__).parent}' describe --always --dirty 2>/dev/null"
        cpu = "grep -m 1 'model name' /proc/cpuinfo | cut -d ' ' -f 3-"
        config = {
            "script": SCRIPT,
            "args": asdict(args),
            "git": subprocess.getoutput(git),
            "torch": torch.__version__,
            "cpu": subprocess.getoutput(cpu),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "ranks": WORLD,
        }
        (self.folder / "config.json").write_text(json.dumps(config, indent=1))
        self.tensorboard = SummaryWriter(self.folder, purge_step=step + 1)
        threads = f"{torch.get_num_threads()} torch and {args.env_threads or CORES} env threads"
        self.say(f"{self.folder}: steps {step:,} to {total:,}, {device}, {threads}")

    def say(self, text: str, stream=None):
        if RANK == 0 and (stream or not self.args.quiet):
            tqdm.write(text, stream)
            print(end="", file=stream, flush=True)  # a log file has it at once

    def lap(self, phase: str, steps: int = 0):
        """Book the time since the last lap under time/<phase>_s; move the bar by `steps`."""
        now = time.perf_counter()
        self.laps[f"time/{phase}_s"] += now - self.mark
        self.mark = now
        self.bar.update(steps)

    def log(self, metrics: dict) -> dict:
        """Add steps a second and the clocks, and write a row; None is an empty cell."""
        sps = (metrics["step"] - self.step) / sum(self.laps.values())
        metrics = metrics | {"time/sps": sps} | dict(self.laps)
        self.step = metrics["step"]
        self.laps.clear()
        score = "-" if metrics["episode/return"] is None else f"{metrics['episode/return']:.2f}"
        self.bar.set_postfix_str(f"return {score}")
        if self.bar.disable:
            left = (self.bar.total - self.step) / sps / 60
            self.say(f"step {self.step:,}  return {score}  {sps:,.0f} steps/s  {left:.0f} min left")
        if RANK == 0:
            self.write(metrics)
        return metrics

    def write(self, metrics: dict):
        if self.table is None:  # the first row; drop an old half row and rows after the checkpoint
            path = self.folder / "metrics.csv"
            lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
            rows = [row for row in csv.DictReader(lines) if int(row["step"]) <= self.start]
            columns = dict.fromkeys([*(rows[0] if rows else []), *metrics])
            file = open(self.folder / "metrics.csv.tmp", "w", buffering=1)
            self.table = csv.DictWriter(file, columns, lineterminator="\n")
            self.table.writeheader()
            self.table.writerows(rows)
            os.replace(file.name, path)  # `file` stays open under its new name
        cells = {name: f"{x:.6g}" if isinstance(x, float) else x for name, x in metrics.items()}
        self.table.writerow(cells)
        for name, value in metrics.items():
            if value is not None:
                self.tensorboard.add_scalar(name, value, self.step)
        self.tensorboard.flush()

    def save(self, name: str, state: dict):
        """Write aside and rename: at any moment the file is whole, the old one or the new one."""
        if RANK == 0:
            state["script"] = SCRIPT
            state["args"] = asdict(self.args)
            buffer = io.BytesIO()  # for torch.save makes a RuntimeError of a full disk
            torch.save(state, buffer)
            (self.folder / "tmp.pt").write_bytes(buffer.getbuffer())
            os.replace(self.folder / "tmp.pt", self.folder / name)


def stop(number, frame):
    """Only the first signal counts, and none while an error is handled: then `train` is saving."""
    if sys.exception() is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt


def main(argv=None) -> int:
    """The command line: 0 done, 1 failure, 2 bad usage, 130 after Ctrl-C or SIGTERM."""
    sys.stderr = sys.stderr or open(os.devnull, "w")  # None where the caller has closed it
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        args = tyro.cli(Args, args=argv, description=__doc__.split("\n\n")[0])
        if args.resume:  # parse again, on top of the run's own flags
            defaults = Args(**load_checkpoint(args.resume)["args"])
            args = tyro.cli(Args, args=argv, default=defaults)
        train(args)
        if WORLD > 1:
            dist.destroy_process_group()
    except KeyboardInterrupt:
        return 130
    except (UsageError, OSError, FloatingPointError, ImportError) as error:
        print(f"{SCRIPT}.py:", *str(error).split(), file=sys.stderr)  # in one line
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
