"""PPO on Procgen: T. Tumiel's entry to the NeurIPS 2020 Procgen competition.

    python ppo_procgen.py --env-id bigfish                   # 8M steps, easy, unlimited levels
    python ppo_procgen.py --env-id coinrun --num-levels 200  # generalisation to other levels
    python ppo_procgen.py --resume runs/NAME                 # go on with a stopped run

PPO: Schulman et al. 2017, arXiv:1707.06347. GAE: Schulman et al. 2016, arXiv:1506.02438. Network:
IMPALA, Espeholt et al. 2018, arXiv:1802.01561. Procgen: Cobbe et al. 2020, arXiv:1912.01588.

Measured: mean training return from 0.9M to 1M steps, all levels, one or two CPU cores; in brackets
OpenAI's PPO (three runs). One seed each, `--channels 16 32 32`: starpilot 12.1 (8.1 +- 0.2),
coinrun 6.9 (6.8 +- 0.1), jumper in bf16 5.8 (6.2 +- 0.1), fruitbot 2.7 (10.4 +- 1.0), bossfight 0.4
(0.9 +- 0.2); bigfish from 7.2M to 8M steps 22.3 (10.3 +- 0.5), evaluated 24.2 +- 1.7 (the entry,
one run, wide network: 26.3). Two seeds with OpenAI's flags (in the README): starpilot 7.9 +- 0.3,
fruitbot 9.0 +- 1.5.

Unlike a textbook PPO, as in the entry (RLlib 0.8.7 on TensorFlow 2.3, graph mode):
- a penalty on the exact KL(old || new), with an adaptive weight, beside the clipped ratio;
- advantages are standardised once per rollout, not once per minibatch;
- a rollout is cut into minibatches once, and only their order is drawn anew in each epoch;
- no gradient clipping, a piecewise linear learning rate, frames t-3 and t as input.

Departures, effects not measured: PyTorch's Adam adds epsilon after the bias correction, that of
TensorFlow before it; the entry's first update still has RLlib's default rate, 5e-5.
Left out on purpose: films (benchmark/evaluate.py), augmentation (benchmark/variants), emulator
states in checkpoints.
"""

import contextlib
import csv
import ctypes
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
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
# step, rate, step, rate, ...: the entry's
LR = (0, 1e-4, 5e5, 8e-4, 1e6, 1e-4, 2e6, 5e-4, 3e6, 5e-5, 4e6, 2e-4, 8e6, 3e-5)


@dataclass
class Args:
    # run
    env_id: Literal[*GAMES] = "bigfish"  # game
    total_timesteps: int = 8_000_000  # agent steps of all environments, floored to whole iterations
    seed: int = 1  # equal runs on a CPU write equal metrics, but for time/*
    run_dir: str = "runs"  # folder of all runs
    run_name: str = ""  # folder of this run in it; "" = env-id__script__seed__time
    resume: str = ""  # run folder to go on in; its flags apply unless given here
    device: str = "auto"  # auto (cuda if there is one), cpu, cuda, cuda:1
    torch_threads: int = 0  # CPU threads of PyTorch; 0 = the core count on a CPU, 1 on a GPU
    env_threads: int = 0  # threads that step the environments; 0 = the core count
    compile: bool = False  # torch.compile the network; off until measured on a GPU
    precision: Literal["fp32", "bf16"] = "fp32"  # fp32: TF32 on a GPU; bf16: slow on older CPUs
    micro_batch: int = 0  # rows computed at once, bounds memory; 0 = 64 on a CPU, all on a GPU
    checkpoint_every: float = 300  # seconds between checkpoints
    eval_episodes: int = 100  # games per evaluation; one evaluation is at the end; 0 = none
    eval_every: int = 0  # agent steps between evaluations in training; 0 = none
    quiet: bool = False  # only results, no progress
    # environment
    distribution_mode: Literal["easy", "hard"] = "easy"  # difficulty
    num_levels: int = 0  # training levels; 0 = unlimited
    start_level: int = 0  # first training level, with --num-levels
    stack: Literal["none", "gap", "full"] = "gap"  # frames shown: t, or t-3 and t, or t-3 to t
    num_envs: int = 48  # parallel environments, of each process under torchrun
    norm_reward: float = 0  # divide rewards by the deviation of returns of this discount; 0 = no
    # optimisation
    num_steps: int = 200  # rollout length per environment
    minibatch_size: int = 1024  # rows per SGD step; the remainder of a rollout is unused
    update_epochs: int = 3  # passes over a rollout
    lr: tuple[float, ...] = LR
    """learning rate: one number, or step, rate, step, rate, ...: linear between, constant beyond"""
    adam_eps: float = 1e-8  # Adam's epsilon
    max_grad_norm: float = 0  # clip the gradient's norm; 0 = no clipping
    reshuffle: bool = False  # cut new minibatches in every epoch (OpenAI), not once a rollout
    # algorithm
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.9  # GAE's lambda
    clip: float = 0.2  # clip range of the probability ratio
    vf_clip: float = 30  # how far the value may move from the old one, in units of return
    vf_coef: float = 0.5  # weight of the value term, which has no 1/2 (OpenAI's 0.5 is 0.25 here)
    norm_adv: Literal["rollout", "minibatch"] = "rollout"  # standardise advantages over this
    ent_coef: tuple[float, ...] = (0.01,)  # weight of the entropy bonus: one number, or as --lr
    kl_coef: float = 0.2  # first weight of KL(old || new), adapted to --kl-target; 0 = no penalty
    kl_target: float = 0.01  # KL per iteration, in nats
    # network
    channels: tuple[int, int, int] = (32, 64, 64)  # widths of the IMPALA CNN's stages
    pool: Literal["avg", "flatten"] = "avg"  # after the CNN: global average pool, or every output
    input_shift: float = 128  # the network's input is (pixel - this) / 255; OpenAI 0
    ortho_heads: bool = False  # orthogonal heads of gains 0.01 and 1 (OpenAI), not Glorot


def check(args: Args):
    """Raise UsageError for settings that cannot work."""
    rows = args.num_envs * args.num_steps
    for name in ("num_envs", "num_steps", "update_epochs"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1")
    at_least_0 = """seed micro_batch eval_episodes eval_every torch_threads env_threads
        max_grad_norm num_levels start_level""".split()
    for name in at_least_0:
        if getattr(args, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 0")
    if not 2 <= args.minibatch_size <= rows:
        raise UsageError(f"--minibatch-size {args.minibatch_size}: must be from 2 to {rows}")
    if args.total_timesteps < rows * WORLD:
        raise UsageError(f"--total-timesteps {args.total_timesteps}: at least {rows * WORLD}")
    if args.eval_every and not args.eval_episodes:
        raise UsageError("--eval-every: needs --eval-episodes")
    schedule(0, args.lr)  # raises UsageError
    schedule(0, args.ent_coef)


# --- environment ---

STACKS = {"none": (0,), "gap": (0, 3), "full": (0, 1, 2, 3)}  # 0: the oldest frame kept


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


def gae(reward, value, done, gamma: float, lam: float):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) -> advantages (T, N).

    reward, done: (T, N), of the step taken in row t; value: (T + 1, N), of row t's observation.
    """
    delta = reward + gamma * value[1:] * (1 - done) - value[:-1]
    advantage = torch.zeros_like(reward)
    trace = torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        trace = delta[t] + gamma * lam * (1 - done[t]) * trace
        advantage[t] = trace
    return advantage


def ppo_terms(logits, value, rows: dict, clip: float, vf_clip: float) -> dict:
    """What the loss is made of, each (B,): logits (B, A) and value (B,) are the new ones.

    policy: negated clipped surrogate (PPO, eq. 7); value: the larger of the plain and the clipped
    squared error; kl: exact KL(old || new); approx_kl: its sampled estimate r - 1 - log r.
    """
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
        "policy": -torch.min(surrogate, clipped_surrogate),
        "value": torch.max(value_error, clipped_value_error),
        "entropy": -(logp.exp() * logp).sum(-1),
        "kl": (old_logp.exp() * (old_logp - logp)).sum(-1),
        "approx_kl": ratio - 1 - log_ratio,
        "clip_frac": ((ratio - 1).abs() > clip).float(),
    }


def next_kl_coef(coef: float, kl: float, target: float) -> float:
    """RLlib's rule for a KL of more than twice the target, or less than half of it."""
    if kl > 2 * target:
        return coef * 1.5
    if kl < target / 2:
        return coef * 0.5
    return coef


def standardize(x):
    """Zero mean and unit variance over all rows, of all ranks; RLlib's floor of the deviation."""
    count = x.numel() * WORLD
    x = x - sum_over_ranks(x.sum()) / count
    variance = sum_over_ranks(x.square().sum()) / count
    return x / variance.sqrt().clamp(min=1e-4)


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


class RewardNormalizer:
    """Rewards over the running deviation of their discounted returns, clipped to +-10.

    VecNormalize of OpenAI's baselines. Only divided: centring would change what is optimal.
    """

    def __init__(self, gamma: float, num_envs: int):
        self.gamma = gamma
        self.returns = np.zeros(num_envs)
        self.sums = torch.tensor([1e-4, 0, 1e-4], dtype=torch.float64)  # of 1, x and x^2

    def __call__(self, reward, done):
        self.returns = self.gamma * self.returns + reward
        new = [len(reward), self.returns.sum(), np.square(self.returns).sum()]
        self.sums += sum_over_ranks(torch.tensor(new, dtype=torch.float64))
        self.returns[done] = 0
        count, total, squares = self.sums.tolist()
        variance = squares / count - (total / count) ** 2
        return np.clip(reward / np.sqrt(variance + 1e-8), -10, 10)


# --- training ---


def train(args: Args, envs: gym.vector.VectorEnv | None = None) -> dict:
    """Train; returns the last metrics, "agent", "run" (the folder), "eval" (eval.json's, if made).

    envs: a VectorEnv with same-step autoreset, uint8 (C, H, W) observations, discrete actions. It
    is not seeded, evaluated or closed; its truncations count as ends. None = Procgen as args say.
    Raises UsageError, OSError, FloatingPointError (a loss is not finite), KeyboardInterrupt.
    """
    check(args)
    device = set_up(args)
    T, N = args.num_steps, args.num_envs
    batch_size = T * N * WORLD
    total = args.total_timesteps // batch_size * batch_size
    saved = load_checkpoint(args.resume) if args.resume else {"step": 0}
    step = saved["step"]
    # A run resumed at a later step and another rank play other games and draw other actions.
    stream = f"training from {step} of rank {RANK}"
    own_envs = envs is None
    if own_envs:
        envs = make_envs(args, N, stream)
    else:
        args = replace(args, env_id=type(envs.unwrapped).__name__)
        envs = RecordEpisodeStatistics(envs)
    if envs.num_envs != N or envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        raise UsageError(f"--num-envs {N}: needs {N} environments, same-step autoreset; not {envs}")
    space = envs.single_observation_space
    obs_shape = space.shape
    if space.dtype != np.uint8 or len(obs_shape) != 3 or obs_shape[0] > obs_shape[2]:
        raise UsageError(f"observations {space}: must be uint8 (C, H, W)")
    num_actions = envs.single_action_space.n

    torch.manual_seed(args.seed)  # equal first weights on all ranks
    agent = Agent(obs_shape, num_actions, args).to(device)
    network = torch.compile(agent) if args.compile else agent
    optimizer = torch.optim.Adam(agent.parameters(), eps=args.adam_eps, fused=True)
    normalizer = RewardNormalizer(args.norm_reward, N)
    kl_coef = args.kl_coef
    best = -np.inf
    if args.resume:
        agent.load_state_dict(saved["agent"])
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.param_groups[0]["eps"] = args.adam_eps  # a flag given now wins
        normalizer.sums = saved["normalizer"]
        if args.kl_coef and saved["kl_coef"]:  # --kl-coef given now only turns it on or off
            kl_coef = saved["kl_coef"]
        if Path(args.resume, "best.pt").exists():  # may be newer than the checkpoint
            best = load_checkpoint(args.resume, "best.pt")["best"]
    torch.manual_seed(stream_seed(args.seed, stream))  # actions and minibatches
    micro_batch = args.micro_batch or (64 if device.type == "cpu" else args.minibatch_size)
    num_minibatches = T * N // args.minibatch_size
    recent = deque(maxlen=100)  # returns of the last games

    def forward(obs):
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            return network(obs)

    def save(name: str):
        state = {
            "step": step,
            "best": best,
            "agent": agent.state_dict(),
            "optimizer": optimizer.state_dict(),
            "kl_coef": kl_coef,
            "normalizer": normalizer.sums,
        }
        logger.save(name, state)

    # Row t = (obs_t, a_t, pi(.|obs_t), V(obs_t), r_{t+1}, done_{t+1})
    rollout = {
        "obs": torch.zeros(T, N, *obs_shape, dtype=torch.uint8, device=device),
        "action": torch.zeros(T, N, dtype=torch.int64, device=device),
        "logits": torch.zeros(T, N, num_actions, device=device),
        "value": torch.zeros(T, N, device=device),
    }
    rewards = torch.zeros(T, N)  # on the CPU, where GAE runs
    dones = torch.zeros(T, N)

    logger = Logger(args, device, step, total)
    last_save = time.monotonic()
    metrics = {}
    try:
        obs, _ = envs.reset()
        while step < total:
            logger.mark = time.perf_counter()  # the clock anew: saving and evaluating do not count
            # Rollout
            returns, lengths = [], []  # of the games that end
            for t in range(T):
                rollout["obs"][t] = torch.from_numpy(obs)
                with torch.no_grad():
                    logits, value = forward(rollout["obs"][t])
                action = sample(logits)
                rollout["logits"][t] = logits
                rollout["value"][t] = value
                rollout["action"][t] = action
                action = action.cpu().numpy()
                logger.lap("policy")
                obs, reward, terminated, truncated, info = envs.step(action)
                done = terminated | truncated
                if "episode" in info:
                    returns += info["episode"]["r"][info["_episode"]].tolist()
                    lengths += info["episode"]["l"][info["_episode"]].tolist()
                if args.norm_reward:
                    reward = normalizer(reward, done)
                rewards[t] = torch.from_numpy(reward)
                dones[t] = torch.from_numpy(done)
                logger.lap("env", N * WORLD)

            # Targets
            with torch.no_grad():
                _, next_value = forward(torch.from_numpy(obs).to(device))
            values = torch.cat([rollout["value"], next_value[None]]).cpu()
            advantages = gae(rewards, values, dones, args.gamma, args.gae_lambda)
            targets = advantages + values[:T]
            explained = explained_variance(values[:T], targets)
            if args.norm_adv == "rollout":
                advantages = standardize(advantages)
            columns = rollout | {"advantage": advantages.to(device), "target": targets.to(device)}
            batch = {name: column.flatten(0, 1) for name, column in columns.items()}
            logger.lap("policy")

            # Update
            lr = schedule(step, args.lr)
            ent_coef = schedule(step, args.ent_coef)
            optimizer.param_groups[0]["lr"] = lr
            sums = defaultdict(float)  # of the minibatches' means
            for epoch in range(args.update_epochs):
                if epoch == 0 or args.reshuffle:
                    permutation = torch.randperm(T * N, device=device)
                    minibatches = permutation.split(args.minibatch_size)  # a shorter last is unused
                last_epoch_kl = 0.0
                for m in torch.randperm(num_minibatches).tolist():
                    minibatch = {name: column[minibatches[m]] for name, column in batch.items()}
                    if args.norm_adv == "minibatch":
                        minibatch["advantage"] = standardize(minibatch["advantage"])
                    optimizer.zero_grad()
                    for start in range(0, args.minibatch_size, micro_batch):
                        piece = slice(start, start + micro_batch)
                        rows = {name: column[piece] for name, column in minibatch.items()}
                        terms = ppo_terms(*forward(rows["obs"]), rows, args.clip, args.vf_clip)
                        # This piece's shares of the minibatch's means; backward adds gradients up.
                        shares = {name: x.sum() / args.minibatch_size for name, x in terms.items()}
                        loss = shares["policy"] + args.vf_coef * shares["value"]
                        loss += kl_coef * shares["kl"] - ent_coef * shares["entropy"]
                        loss.backward()
                        for name, share in shares.items():
                            sums[name] += share.detach()
                        last_epoch_kl += shares["kl"].detach()
                    for parameter in agent.parameters():
                        parameter.grad = sum_over_ranks(parameter.grad) / WORLD
                    limit = args.max_grad_norm or np.inf  # inf: only measures the norm
                    sums["grad_norm"] += nn.utils.clip_grad_norm_(agent.parameters(), limit)
                    optimizer.step()

            # Metrics: with torchrun the losses are all ranks', the rest rank 0's
            divisor = args.update_epochs * num_minibatches * WORLD  # a mean over all minibatches
            means = {name: sum_over_ranks(x).item() / divisor for name, x in sums.items()}
            last_kl = sum_over_ranks(last_epoch_kl).item() / (num_minibatches * WORLD)
            logger.lap("learn")
            if not np.isfinite(sum(means.values())):
                raise FloatingPointError(f"a loss is not finite after step {step:,}: {means}")
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
                "train/kl": last_kl,  # of the last epoch, to which RLlib adapts
                "train/kl_coef": kl_coef,
                "train/approx_kl": means["approx_kl"],
                "train/clip_frac": means["clip_frac"],
                "train/explained_variance": explained,
                "train/grad_norm": means["grad_norm"],
                "train/lr": lr,
                "train/ent_coef": ent_coef,
            }
            due = args.eval_every and next_step // args.eval_every > step // args.eval_every
            if due and own_envs and RANK == 0:
                for split, result in evaluate(agent, args).items():
                    metrics[f"eval/return_{split}"] = result["mean"]
            metrics = logger.log(metrics)
            kl_coef = next_kl_coef(kl_coef, last_kl, args.kl_target)
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
