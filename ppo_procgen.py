# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0", "numpy==2.4.6", "gymnasium==1.4.0", "envpool==1.0.1", "tyro==1.0.17",
#     "tensorboard==2.21.0", "tqdm==4.70.1",
# ]
# ///
"""PPO on Procgen, as in Thomas Tumiel's entry to the NeurIPS 2020 Procgen competition.

    python ppo_procgen.py --env-id bigfish                   # 8M steps, easy, unlimited levels
    python ppo_procgen.py --env-id coinrun --num-levels 200  # generalization to unseen levels
    python ppo_procgen.py --resume runs/NAME                 # continue a stopped run

PPO: Schulman et al. 2017, arXiv:1707.06347. GAE: Schulman et al. 2016, arXiv:1506.02438. Network:
IMPALA CNN, Espeholt et al. 2018, arXiv:1802.01561. Procgen: Cobbe et al. 2020, arXiv:1912.01588.

Unlike most PPO code, as in the entry (RLlib 0.8.7):
- a penalty on KL(old || new) with an adaptive weight is added to the clipped loss;
- advantages are standardized once per rollout, not once per minibatch;
- a rollout is split into minibatches once; each epoch only shuffles their order;
- no gradient clipping; a piecewise linear learning rate; frames t-3 and t as input;
- a wider IMPALA CNN with global average pooling.
Departures, results and the commands behind them: docs/ppo_procgen.md.
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
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

WORLD = int(os.environ.get("WORLD_SIZE", 1))  # the number of processes, set by torchrun
RANK = int(os.environ["RANK"]) if WORLD > 1 else 0  # this process's number
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GAMES = """bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper leaper
maze miner ninja plunder starpilot""".split()
# step, rate, step, rate, ...: the schedule of the competition entry
LR = (0, 1e-4, 5e5, 8e-4, 1e6, 1e-4, 2e6, 5e-4, 3e6, 5e-5, 4e6, 2e-4, 8e6, 3e-5)


@dataclass
class Args:
    # run
    env_id: str = "bigfish"  # Procgen game
    total_timesteps: int = 8_000_000  # total environment steps, rounded down to whole rollouts
    seed: int = 1  # on a CPU, the same flags reproduce the same metrics (except time/*)
    run_dir: str = "runs"  # folder of all runs
    run_name: str = ""  # name of this run's folder; "" = env-id__script__seed__time
    resume: str = ""  # folder of a run to continue; its saved flags are the defaults
    device: str = "auto"  # auto (cuda if available), cpu, cuda, cuda:1; torchrun: a GPU per rank
    threads: int = 0  # CPU threads; 0 = all cores (fewer can be faster on a busy machine)
    compile: bool = False  # torch.compile the policy that learns; speed not measured
    precision: Literal["fp32", "bf16"] = "fp32"  # fp32 is TF32 on a GPU; bf16 is slow on most CPUs
    micro_batch: int = 0  # rows per forward pass of learning; 0 = 64 on a CPU, all on a GPU
    checkpoint_every: float = 300  # seconds between checkpoints; 0 = after every iteration
    eval_episodes: int = 100  # episodes per evaluation; 0 = no evaluation, not even at the end
    eval_every: int = 0  # environment steps between evaluations; 0 = only at the end
    quiet: bool = False  # print only evaluations
    # environment
    distribution_mode: Literal["easy", "hard"] = "easy"  # difficulty
    num_levels: int = 0  # training levels; 0 = unlimited
    start_level: int = 0  # first training level, with --num-levels
    stack: Literal["none", "gap", "full"] = "gap"  # none: frame t; gap: t-3 and t; full: t-3 to t
    num_envs: int = 48  # parallel environments (per process, with torchrun)
    norm_reward: float = 0
    """discount of the returns whose running std divides rewards (OpenAI: 0.99); 0 = off"""
    # optimization
    num_steps: int = 200  # rollout length per environment
    minibatch_size: int = 1024  # rows per SGD step and process; a rollout's remainder is unused
    update_epochs: int = 3  # passes over a rollout
    lr: tuple[float, ...] = LR
    """learning rate: a number, or pairs of step and value from step 0 on (0 1e-4 5000000 0), linear
    in between, then constant; steps do not scale with --total-timesteps"""
    adam_eps: float = 1e-8  # Adam's epsilon
    max_grad_norm: float = 0  # clip the gradient's norm; 0 = off
    reshuffle: bool = False
    """reshuffle rows every epoch (OpenAI); default: split once, shuffle only the minibatches"""
    # algorithm
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.9  # GAE's lambda
    clip: float = 0.2  # clip range of the probability ratio; 0 = off
    vf_clip: float = 30  # clip range of the value, in units of return; 0 = off
    vf_coef: float = 0.5  # weight of the squared value error (no 1/2: OpenAI's 0.5 is 0.25)
    norm_adv: Literal["rollout", "minibatch"] = "rollout"  # standardize advantages within each
    ent_coef: tuple[float, ...] = (0.01,)  # weight of the entropy bonus: a number, or as --lr
    kl_coef: float = 0.2  # initial weight of KL(old || new), adapted to --kl-target; 0 = off
    kl_target: float = 0.01  # target of the KL per iteration, in nats
    # network
    channels: tuple[int, int, int] = (32, 64, 64)  # widths of the three stages of the IMPALA CNN
    pool: Literal["avg", "flatten"] = "avg"  # after the CNN: global average pooling or all outputs
    input_shift: float = 128  # the network's input is (pixel - this) / 255; OpenAI: 0
    ortho_heads: bool = False  # orthogonal heads of gains 0.01 and 1 (OpenAI), not Glorot


# Flags that --resume cannot change, and the bounds of flags that are numbers (checked by `plain`)
FIXED = "env_id distribution_mode stack channels pool input_shift".split()
AT_LEAST_1 = "num_envs num_steps update_epochs channels".split()
AT_MOST_1 = "gamma gae_lambda norm_reward".split()


def check(args: Args):
    """Raise UsageError for settings that cannot work together."""
    rows = args.num_envs * args.num_steps
    if not 2 <= args.minibatch_size <= rows:
        raise UsageError(f"--minibatch-size {args.minibatch_size}: must be from 2 to {rows}")
    if args.total_timesteps < rows * WORLD:
        raise UsageError(f"--total-timesteps {args.total_timesteps}: at least {rows * WORLD}")
    if args.start_level + args.num_levels >= 2**31:
        raise UsageError("--start-level, --num-levels: their sum must be below 2 ** 31")
    if args.start_level and not args.num_levels:
        raise UsageError(f"--start-level {args.start_level}: needs --num-levels")
    if args.kl_coef and not args.kl_target:
        raise UsageError("--kl-target 0: must be positive; --kl-coef 0 turns the penalty off")


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


def ppo_terms(logits, value, rows: dict, clip: float, vf_clip: float) -> dict:
    """Loss terms and statistics, each (B,), from the new logits (B, A) and value (B,).

    loss/policy: negated clipped surrogate (PPO, eq. 7). loss/value: the larger of the squared
    errors of the new value and of the clipped one. train/kl: exact KL(old || new).
    train/approx_kl: its sampled estimate r - 1 - log r.
    """
    clip = clip or math.inf
    vf_clip = vf_clip or math.inf
    logp = logits.log_softmax(-1)
    old_logp = rows["logits"].log_softmax(-1)
    log_ratio = (logp - old_logp).gather(-1, rows["action"][:, None]).squeeze(-1)
    ratio = log_ratio.exp()
    surrogate = ratio * rows["advantage"]
    clipped_surrogate = ratio.clamp(1 - clip, 1 + clip) * rows["advantage"]
    clipped_value = rows["value"] + (value - rows["value"]).clamp(-vf_clip, vf_clip)
    value_error = (value - rows["target"]) ** 2
    clipped_value_error = (clipped_value - rows["target"]) ** 2
    return {
        "loss/policy": -torch.min(surrogate, clipped_surrogate),
        "loss/value": torch.max(value_error, clipped_value_error),
        "loss/entropy": -(logp.exp() * logp).sum(-1),
        "train/kl": (old_logp.exp() * (old_logp - logp)).sum(-1),
        "train/approx_kl": ratio - 1 - log_ratio,
        "train/clip_frac": ((ratio - 1).abs() > clip).float(),
    }


def next_kl_coef(coef: float, kl: float, target: float) -> float:
    """RLlib's rule: a larger weight above twice the target, a smaller one below half of it."""
    if kl > 2 * target:
        return coef * 1.5
    if kl < target / 2:
        return coef * 0.5
    return coef


def standardize(x):
    """Zero mean and unit variance over all rows of all ranks; std at least 1e-4, as in RLlib."""
    x = x - mean_over_ranks(x.mean())
    variance = mean_over_ranks(x.square().mean())
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


class RewardNormalizer:
    """Divides rewards by the running std of discounted returns, then clips to +-10.

    Like VecNormalize in OpenAI's baselines. Not centered: that would change the best policy.
    """

    def __init__(self, gamma: float, num_envs: int):
        self.gamma = gamma
        self.returns = torch.zeros(num_envs, dtype=torch.float64)
        self.sums = torch.tensor([1e-4, 0, 1e-4], dtype=torch.float64)  # of 1, x and x^2

    def __call__(self, reward, done):
        """reward, done: (N,) -> (N,)."""
        self.returns = self.gamma * self.returns + reward
        ones = torch.ones_like(self.returns)
        new = torch.stack([ones, self.returns, self.returns**2]).sum(1)
        self.sums += WORLD * mean_over_ranks(new)  # the sum over ranks
        self.returns *= 1 - done
        count, total, squares = self.sums.tolist()
        variance = squares / count - (total / count) ** 2
        return (reward.double() / (variance + 1e-8) ** 0.5).clamp(-10, 10)

    def restore(self, sums, returns):
        """Continue a run; repeats or cuts the saved returns for another number of environments."""
        self.sums = sums
        self.returns = returns[torch.arange(len(self.returns)) % len(returns)]


# --- training ---


def learn(agent, optimizer, batch: dict, kl_coef: float, ent_coef: float, args: Args) -> dict:
    """Train on a rollout for several epochs -> means over all minibatches (train/kl: last epoch).

    batch: columns of T * N rows: obs, action, logits, value, advantage, target.
    """
    device = batch["obs"].device
    num_rows = len(batch["obs"])
    num_minibatches = num_rows // args.minibatch_size
    micro_batch = args.micro_batch or (64 if device.type == "cpu" else args.minibatch_size)
    sums = defaultdict(float)
    for epoch in range(args.update_epochs):
        if epoch == 0 or args.reshuffle:
            permutation = torch.randperm(num_rows, device=device)
            minibatches = permutation.split(args.minibatch_size)  # a shorter last one is unused
        sums["train/kl"] = 0.0  # RLlib adapts the penalty to the last epoch's KL
        for m in torch.randperm(num_minibatches).tolist():
            minibatch = {name: column[minibatches[m]] for name, column in batch.items()}
            if args.norm_adv == "minibatch":
                minibatch["advantage"] = standardize(minibatch["advantage"])
            optimizer.zero_grad()
            for start in range(0, args.minibatch_size, micro_batch):
                rows = {name: x[start : start + micro_batch] for name, x in minibatch.items()}
                logits, value = agent(rows["obs"])
                terms = ppo_terms(logits, value, rows, args.clip, args.vf_clip)
                # This piece's share of the minibatch's means; backward() adds up the gradients.
                parts = {name: x.sum() / args.minibatch_size for name, x in terms.items()}
                loss = parts["loss/policy"] + args.vf_coef * parts["loss/value"]
                loss += kl_coef * parts["train/kl"] - ent_coef * parts["loss/entropy"]
                loss.backward()
                for name, part in parts.items():
                    sums[name] += part.detach()
            for parameter in agent.parameters():
                parameter.grad = mean_over_ranks(parameter.grad)
            limit = args.max_grad_norm or math.inf  # inf: only measures the norm
            sums["train/grad_norm"] += nn.utils.clip_grad_norm_(agent.parameters(), limit)
            optimizer.step()
    num_updates = args.update_epochs * num_minibatches
    means = {name: mean_over_ranks(x / num_updates).item() for name, x in sums.items()}
    means["train/kl"] *= args.update_epochs  # its sum is of one epoch only
    return means


def train(args: Args, make_envs=make_envs, saved: dict | None = None) -> dict:
    """Train; returns the last metrics, "step", "agent", "run" (the folder) and "eval".

    make_envs(args, num_envs, stream): returns any VectorEnv with same-step autoreset, uint8
    (C, H, W) observations and Discrete actions; time limits count as terminations.
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
    check_envs(envs, obs, N, AutoresetMode.SAME_STEP, min_size=8)
    obs_shape = obs.shape[1:]
    num_actions = envs.single_action_space.n

    torch.manual_seed(args.seed)
    agent = Agent(obs_shape, num_actions, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), eps=args.adam_eps, fused=True)
    normalizer = RewardNormalizer(args.norm_reward, N)
    kl_coef = args.kl_coef
    best = saved["best"]
    if args.resume:
        agent.load_state_dict(saved["agent"])
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.param_groups[0]["eps"] = args.adam_eps  # not the restored one
        normalizer.restore(**saved["normalizer"])
        if args.kl_coef == saved["args"]["kl_coef"]:  # otherwise a new --kl-coef wins
            kl_coef = saved["kl_coef"]
    compare_ranks(args, step)
    if args.compile:
        agent.compile()
    torch.manual_seed(stream_seed(args.seed, stream))  # actions and minibatches

    # Row t = (obs_t, a_t, pi(.|obs_t), V(obs_t), r_{t+1}, done_{t+1})
    rollout = {
        "obs": torch.zeros(T, N, *obs_shape, dtype=torch.uint8, device=device),
        "action": torch.zeros(T, N, dtype=torch.int64, device=device),
        "logits": torch.zeros(T, N, num_actions, device=device),
        "value": torch.zeros(T, N, device=device),
    }
    rewards = torch.zeros(T, N)  # on the CPU, where GAE runs
    dones = torch.zeros(T, N)

    run = Run(args, device, step, batch_size)
    iteration = saved["iteration"]
    recent = deque(maxlen=100)  # returns of the last episodes
    metrics = {}

    def save(name: str):
        # The outputs are checked too: a diverged agent can have finite weights.
        with torch.no_grad():
            outputs = agent(torch.from_numpy(obs).to(device))
        state = {
            "step": step,
            "iteration": iteration,
            "best": best,
            "agent": agent.state_dict(),
            "optimizer": optimizer.state_dict(),
            "normalizer": {"sums": normalizer.sums, "returns": normalizer.returns},
            "kl_coef": kl_coef,
        }
        run.save(name, state, outputs)

    try:
        if not args.resume:
            save("checkpoint.pt")
        while step + batch_size <= args.total_timesteps:
            # Rollout
            start = time.perf_counter()
            env_s = 0.0
            returns, lengths = [], []  # of the episodes that end
            for t in range(T):
                rollout["obs"][t] = torch.from_numpy(obs)
                with torch.no_grad():
                    logits, value = agent(rollout["obs"][t])
                action = sample(logits)
                rollout["logits"][t] = logits
                rollout["value"][t] = value
                rollout["action"][t] = action
                action = action.cpu().numpy()
                before = time.perf_counter()
                obs, reward, terminated, truncated, info = envs.step(action)
                env_s += time.perf_counter() - before
                rewards[t] = torch.as_tensor(reward)
                dones[t] = torch.as_tensor((terminated | truncated).astype(bool))
                _, ended_returns, ended_lengths = ended_episodes(envs, info)
                returns += ended_returns
                lengths += ended_lengths
                if args.norm_reward:
                    rewards[t] = normalizer(rewards[t], dones[t])
                run.bar.update(N * WORLD)

            # Advantages. A time limit counts as a termination, as in Procgen's published results;
            # bootstrapping needs the final observation, which same-step autoreset replaces.
            with torch.no_grad():
                _, last_value = agent(torch.from_numpy(obs).to(device))
            values = torch.cat([rollout["value"], last_value[None]]).cpu()
            advantages = gae(rewards, values, dones, dones, args.gamma, args.gae_lambda)
            targets = advantages + values[:T]
            explained = explained_variance(values[:T], targets)
            if args.norm_adv == "rollout":
                advantages = standardize(advantages)
            columns = rollout | {"advantage": advantages.to(device), "target": targets.to(device)}
            batch = {name: column.flatten(0, 1) for name, column in columns.items()}
            acted = time.perf_counter()

            # Learning
            lr = schedule(step, args.lr)
            ent_coef = schedule(step, args.ent_coef)
            optimizer.param_groups[0]["lr"] = lr
            means = learn(agent, optimizer, batch, kl_coef, ent_coef, args)
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
                "eval/return_train": None,
                "eval/return_test": None,
                **means,
                "train/kl_coef": kl_coef,
                "train/explained_variance": explained,
                "train/lr": lr,
                "train/ent_coef": ent_coef,
                "time/sps": batch_size / (learned - start),
                "time/env_s": env_s,
                "time/policy_s": acted - start - env_s,
                "time/learn_s": learned - acted,
            }
            due = args.eval_every and next_step // args.eval_every > step // args.eval_every
            if due and RANK == 0:
                for split, result in evaluate(agent, args, make_envs).items():
                    metrics[f"eval/return_{split}"] = result["mean"]
            run.log(metrics)
            step = next_step
            iteration += 1
            kl_coef = next_kl_coef(kl_coef, means["train/kl"], args.kl_target)
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
        envs.close()


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
