r"""Asynchronous PPO (APPO) on Atari: the learner of Sample Factory in one file.

    python appo_atari.py --env-id Breakout           # 25M agent steps = 100M frames
    python appo_atari.py --env-id Pong --minibatch-size 256 --update-epochs 2 --lr 5e-4 \
        --ent-coef 0.01 --num-batches-to-accumulate 1 --total-timesteps 500000  # two cores
    python appo_atari.py --env-id Breakout --vtrace  # V-trace instead of GAE
    python appo_atari.py --env-id Breakout --sync    # acts, then learns: reproducible
    python appo_atari.py --resume runs/NAME          # go on with a stopped run

Sample Factory: Petrenko et al. 2020, arXiv:2006.11751, in the setting of M. Stammers' model card
for Asteroids. V-trace: Espeholt et al. 2018, arXiv:1802.01561. Groups of environments are stepped
by a thread each, with the newest weights, while the learner trains on what is complete (--compile
and --precision change the learner only).

Measured with the second command's flags. Breakout after 10M steps, one seed: in training 489
(CleanRL's PPO, another batch, three runs: 211 +- 107 with EnvPool, 415 +- 20 without), in 100 games
516 +- 17. Of an earlier version, whose value clip had another centre: Pong, 500,000 steps, 3 seeds,
14.6 +- 4.2, in 100 games each 16.6 +- 2.6; 2.1 times Sample Factory's speed (two pairs, other
flags). Not run: the default.

Unlike a textbook PPO, as in Sample Factory:
- the ratio is clipped to [1 / (1 + clip), 1 + clip], and clamped to [0.05, 20] before;
- the critic predicts normalised returns; frames are normalised too, element by element;
- minibatches are whole trajectories in a fixed order; rows that are too old are masked;
- no gradient clipping (the card's; Sample Factory's Atari setting: 0.5).

Departures, effects not measured:
- EnvPool: another grey and resizing, random no-ops after a lost life too (theirs one),
  FIRE for one frame (theirs 4, then action 2), and a step after each end that ignores its
  action (masked here);
- one policy with 32 environments (theirs: two with 16 each; for a second one run a second seed);
- a game cut at the time limit bootstraps from its last observation (the card: the cut is an end);
- the learning rate falls towards 0 (theirs to 0.75 of the first, for its end is counted in frames);
- GAE's values are denormalised by the statistics of acting, only the bootstrap value by the present
  ones (theirs: all by the present ones); the present weights make the bootstrap value in both;
- frame statistics leave out the extra observation, those of returns masked rows;
- masked rows stay in GAE (theirs skips them, and scales the learning rate by the valid share);
- deviations are over n rows (theirs n - 1), the advantages' at least 1e-4 (theirs 1e-7);
- GAE, not the card's V-trace, which Sample Factory refuses beside normalised returns; `--vtrace`
  bootstraps from the observation after the last row (theirs drops the last reward);
- groups get a random head start (the card: none); no stop when the policy's loss stands still.

Left out on purpose: films (benchmark/evaluate.py), several policies (benchmark/variants/pbt.py),
emulator states in checkpoints, recurrent networks, learning rates that adapt to the KL.
"""

import contextlib
import copy
import csv
import ctypes
import difflib
import io
import json
import math
import os
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


@dataclass
class Args:
    # run
    env_id: str = "Breakout"  # Atari game as EnvPool spells it, with or without -v5
    total_timesteps: int = 25_000_000  # agent steps of all environments, 4 frames each
    seed: int = 1  # equal --sync runs on a CPU write equal metrics, but for time/*
    run_dir: str = "runs"  # folder of all runs
    run_name: str = ""  # folder of this run in it; "" = env-id__script__seed__time
    resume: str = ""  # run folder to go on in; its flags apply unless given here
    device: str = "auto"  # auto (cuda if there is one), cpu, cuda, cuda:1
    torch_threads: int = 0  # CPU threads of PyTorch; 0 = the core count on a CPU, 1 on a GPU
    env_threads: int = 0  # threads that step a group's environments; 0 = the core count
    compile: bool = False  # torch.compile the network; off until measured on a GPU
    precision: Literal["fp32", "bf16"] = "fp32"  # fp32: TF32 on a GPU; bf16: slow on older CPUs
    micro_batch: int = 0  # rows computed at once, bounds memory; 0 = 256 on a CPU, all on a GPU
    checkpoint_every: float = 300  # seconds between checkpoints
    eval_episodes: int = 100  # games per evaluation; one evaluation is at the end; 0 = none
    eval_every: int = 0  # agent steps between evaluations in training; 0 = none
    quiet: bool = False  # only results, no progress
    # environment
    repeat_action_probability: float = 0  # a raw frame's chance to repeat the last action
    noop_max: int = 30  # 1 to this many no-ops at an episode's start, one less with FIRE
    fire_reset: bool = True  # press FIRE at an episode's start
    episodic_life: bool = True  # a lost life ends the training episode (not the game)
    max_episode_steps: int = 27_000  # agent steps after which a game is cut
    frame_size: Literal[84, 96] = 84  # pixels a side, grey
    stack: int = 4  # frames shown
    num_envs: int = 32  # parallel environments, of each process under torchrun
    num_groups: int = 2  # groups of them, each stepped by a thread of its own
    # optimisation
    num_steps: int = 128  # rollout length per environment
    minibatch_size: int = 1024  # rows per SGD step: whole trajectories
    num_minibatches: int = 8  # of a dataset; one dataset per iteration
    update_epochs: int = 4  # passes over a dataset
    lr: tuple[float, ...] = (3.033891184e-4,)
    """learning rate: one number, or step, rate, step, rate, ...: linear between, constant beyond"""
    anneal_lr: bool = True  # times the share of the run that is left: it falls towards 0
    adam_eps: float = 1e-5  # Adam's epsilon
    max_grad_norm: float = 0  # clip the gradient's norm; 0 = no clipping
    sync: bool = False  # act, then learn, without overlap; equal CPU runs write equal metrics
    num_batches_to_accumulate: int = 2  # datasets that actors may be ahead of the learner
    max_policy_lag: int = 1000  # mask rows as many SGD steps old or older; by default none is
    # algorithm
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # GAE's lambda
    vtrace: bool = False  # targets and advantages by V-trace, anew in each minibatch, not by GAE
    clip: float = 0.1  # the ratio's interval is 1 / (1 + this) to 1 + this
    vf_clip: float = 1  # clip range of the value in its loss, in normalised returns
    vf_coef: float = 0.5  # weight of the value term, which has no 1/2
    ent_coef: tuple[float, ...] = (4.677351413e-4,)  # weight of the entropy bonus, as --lr


def check(args: Args):
    """Raise UsageError for settings that cannot work."""
    T = args.num_steps
    num_rows = args.minibatch_size * args.num_minibatches
    for name in ("num_envs", "num_groups", "num_steps", "num_minibatches", "update_epochs"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1")
    at_least_0 = """seed micro_batch eval_episodes eval_every torch_threads env_threads
        max_grad_norm num_batches_to_accumulate""".split()
    for name in at_least_0:
        if getattr(args, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 0")
    if args.num_envs % args.num_groups:
        raise UsageError(f"--num-groups {args.num_groups}: must divide --num-envs {args.num_envs}")
    if args.minibatch_size < 2 or args.minibatch_size % T:
        raise UsageError(f"--minibatch-size {args.minibatch_size}: a multiple of --num-steps {T}")
    rollout = args.num_envs // args.num_groups * T
    if num_rows % rollout:
        rule = f"a multiple of {rollout}, a group's rollout (num-envs / num-groups x num-steps)"
        raise UsageError(f"--minibatch-size x --num-minibatches = {num_rows}: must be {rule}")
    if args.total_timesteps < num_rows * WORLD:
        raise UsageError(f"--total-timesteps {args.total_timesteps}: at least {num_rows * WORLD}")
    if args.eval_every and not args.eval_episodes:
        raise UsageError("--eval-every: needs --eval-episodes")
    schedule(0, args.lr)  # raises UsageError
    schedule(0, args.ent_coef)


# --- environment ---

ROOM_BYTE = {"MontezumaRevenge": 3, "Pitfall": 1}  # where the console's RAM has the room's number


class AtariEnvs(gym.vector.VectorEnv):
    """EnvPool's Atari: uint8 (N, frames, S, S), the newest frame last, next-step autoreset.

    The step after an end ignores its action, has reward 0 and shows the next first observation: it
    is no transition, in no loss of the policy and no game's score. Rewards are signs of the game's.
    With episodic_life a lost life sets `terminated`, but not at the time limit, and reset() goes on
    with a game that is not over. Only whole games are reported (after such a reset: their rest), in
    info["episode"] and info["_episode"], as by RecordEpisodeStatistics. One that ends in EnvPool's
    no-ops after a lost life is reported late; the next has the rest of its time.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, pool, num_envs: int, room_byte: int | None):
        self.pool = pool
        self.num_envs = num_envs
        self.room_byte = room_byte
        frames = pool.observation_space.shape
        self.single_observation_space = gym.spaces.Box(0, 255, frames, np.uint8)
        self.single_action_space = gym.spaces.Discrete(pool.action_space.n)
        self.rooms_ever = np.zeros(256, bool)  # seen in any game; for the scripts with a bonus

    def reset(self, *, seed=None, options=None):
        self.done = np.zeros(self.num_envs, bool)
        self.over = np.zeros(self.num_envs, bool)
        self.lives = np.zeros(self.num_envs, int)
        self.episode_returns = np.zeros(self.num_envs)
        self.episode_lengths = np.zeros(self.num_envs, int)
        return self.pool.reset()

    def step(self, actions):
        obs, reward, terminated, truncated, info = self.pool.step(actions)
        self.episode_returns += np.where(self.done, 0, info["reward"])
        self.episode_lengths += ~self.done
        # EnvPool's no-ops after a lost life may end the game unseen: then lives go up.
        unseen = self.done & ~self.over & (info["lives"] > self.lives)
        self.lives = info["lives"]
        self.done = terminated | truncated
        if self.room_byte is not None:
            self.rooms_ever[info["ram"][:, self.room_byte]] = True
        game_over = self.done & (info["terminated"] > 0)  # also at the time limit
        self.over = game_over | truncated | unseen  # of a game, not just of a life
        if self.over.any():
            info["episode"] = {"r": self.episode_returns, "l": self.episode_lengths}
            info["_episode"] = self.over
            self.episode_returns = np.where(self.over, 0, self.episode_returns)
            self.episode_lengths = np.where(self.over, 0, self.episode_lengths)
        return obs, reward, terminated | game_over, truncated, info


def make_envs(args: Args, num_envs: int, stream: str) -> gym.vector.VectorEnv:
    """EnvPool's Atari as args say. `stream` names its random numbers."""
    with contextlib.redirect_stderr(io.StringIO()):  # it imports gym, which prints a banner
        import envpool
    specs = envpool.registration.registry.specs
    games = [name.removesuffix("-v5") for name in specs if specs[name][0] == "envpool.atari"]
    game = args.env_id.removesuffix("-v5")
    if game not in games:
        close = ", ".join(difflib.get_close_matches(game, games, 3, 0.4) or sorted(games))
        raise UsageError(f"--env-id {game}: no Atari game of EnvPool; did you mean {close}?")
    if min(args.noop_max, args.stack) < 1:
        raise UsageError("--noop-max, --stack: at least 1, EnvPool crashes without")
    # From one seed EnvPool gives environment i seed + i: neighbouring seeds would share games.
    seeds = np.random.SeedSequence(stream_seed(args.seed, stream)).generate_state(num_envs) >> 1
    pool = envpool.make(
        f"{game}-v5",
        env_type="gymnasium",
        num_envs=num_envs,
        num_threads=args.env_threads or CORES,
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
    return AtariEnvs(pool, num_envs, ROOM_BYTE.get(game))


def stream_seed(seed: int, stream: str) -> int:
    """A 31-bit hash: neither neighbouring seeds nor different streams share random numbers."""
    return int(np.random.SeedSequence([seed, *stream.encode()]).generate_state(1)[0] >> 1)


# --- network ---


class Normalizer(nn.Module):
    """Running mean and deviation, per element, with Sample Factory's first values and bounds.

    As if one row of mean 0 and deviation `unit` (255 for bytes) had been seen, and the variance is
    1e-5 * unit^2 larger.
    """

    def __init__(self, shape: tuple[int, ...], unit: float):
        super().__init__()
        self.floor = 1e-5 * unit**2
        # (1, C, H, W), so that Agent makes these channels-last too; else normalising is slow.
        self.register_buffer("mean", torch.zeros(1, *shape))
        self.register_buffer("std", torch.full((1, *shape), (unit**2 + self.floor) ** 0.5))
        self.register_buffer("sums", torch.zeros(3, *shape, dtype=torch.float64))  # of 1, x, x^2
        self.sums[0] = 1
        self.sums[2] = unit**2

    def update(self, x):
        """x: (B, *shape). Pixels are summed in float32, exact for 64 rows: 64 * 255^2 < 2^24."""
        new = torch.zeros_like(self.sums)
        new[0] = len(x)
        for rows in x.split(64):
            rows = rows.float() if x.dtype == torch.uint8 else rows.double()
            new[1] += rows.sum(0)
            new[2] += rows.square().sum(0)
        self.sums += sum_over_ranks(new)
        mean = self.sums[1] / self.sums[0]
        variance = (self.sums[2] / self.sums[0] - mean**2).clamp(min=0)
        self.mean.copy_(mean)
        self.std.copy_((variance + self.floor).sqrt())

    def normalize(self, x):
        return ((x - self.mean) / self.std).clamp(-5, 5)

    def denormalize(self, x):
        return x.clamp(-5, 5) * self.std + self.mean


class Agent(nn.Module):
    """Sample Factory's convnet_atari: uint8 (B, C, H, W) -> logits (B, A), value (B,).

    The value is a normalised return; self.returns.denormalize gives it "in rewards", their unit.
    """

    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        super().__init__()
        self.version = 0  # SGD steps of this process
        self.frames = Normalizer(obs_shape, unit=255)
        self.returns = Normalizer((), unit=1)
        self.convs = nn.Sequential(
            nn.Conv2d(obs_shape[0], 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
        )
        num_features = self.convs(torch.zeros(1, *obs_shape)).numel()
        self.hidden = nn.Linear(num_features, 512)
        self.policy = nn.Linear(512, num_actions)
        self.value = nn.Linear(512, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.orthogonal_(module.weight)
                nn.init.zeros_(module.bias)
        self.to(memory_format=torch.channels_last)

    def forward(self, obs):
        # Reordered while still bytes: a quarter of the traffic. sub_ and div_ reuse the floats.
        x = obs.contiguous(memory_format=torch.channels_last).float()
        x = x.sub_(self.frames.mean).div_(self.frames.std).clamp_(-5, 5)
        x = self.convs(x).permute(0, 2, 3, 1).flatten(1)  # no copy: it is channels-last
        x = F.relu(self.hidden(x))
        with torch.autocast(x.device.type, enabled=False):
            return self.policy(x.float()), self.value(x.float()).squeeze(-1)


# --- mathematics ---

RATIO_RANGE = (0.05, 20)  # Sample Factory's safety limits of the ratio


def sample(logits, generator=None):
    """Draw from Categorical(logits): (B, A) -> (B,)."""
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def gae(reward, value, terminated, done, gamma: float, lam: float):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) -> advantages (T, N).

    reward, terminated, done: (T, N), of the step taken in row t; value: (T + 1, N), of row t's
    observation. A termination has no future value; any end (`done`) cuts the trace. The row after
    an end still shows that game's last observation, from which a game cut short bootstraps.
    """
    delta = reward + gamma * value[1:] * (1 - terminated) - value[:-1]
    advantage = torch.zeros_like(reward)
    trace = torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        trace = delta[t] + gamma * lam * (1 - done[t]) * trace
        advantage[t] = trace
    return advantage


def vtrace(reward, value, terminated, done, rho, gamma: float):
    """V-trace (Espeholt et al. 2018, 4.1, 4.2, limits 1) -> targets v_s, rho x advantage: (T, N).

    reward, terminated, done: (T, N); value: (T + 1, N), of the present critic; rho: (T, N),
    pi(a_t|x_t) / mu(a_t|x_t), of the present policy and the one that acted.
    """
    discount = gamma * (1 - terminated)
    rho = rho.clamp(max=1)
    c = rho * (1 - done)
    delta = rho * (reward + discount * value[1:] - value[:-1])
    correction = torch.zeros_like(value)  # vs - V; its last row stays 0: there V is the target
    for t in reversed(range(len(reward))):
        correction[t] = delta[t] + discount[t] * c[t] * correction[t + 1]
    vs = value + correction
    next_vs = torch.where(done > 0, value[1:], vs[1:])  # after an end vs leads into the next game
    rho_advantage = rho * (reward + discount * next_vs - value[:-1])
    return vs[:-1], rho_advantage


def vtrace_columns(minibatch: dict, logits, value, gamma: float) -> dict:
    """Targets and advantages (T, n), of the present logits (T + 1, n, A), value (T + 1, n).

    All in rewards, not normalised.
    """
    logp = logits[:-1].log_softmax(-1).gather(-1, minibatch["action"][..., None]).squeeze(-1)
    rho = (logp - minibatch["logp"]).exp().clamp(*RATIO_RANGE)
    reward, terminated, done = minibatch["reward"], minibatch["terminated"], minibatch["done"]
    vs, rho_advantage = vtrace(reward, value, terminated, done, rho, gamma)
    # ppo_terms multiplies by the ratio once more, as Sample Factory does.
    return {"target": vs, "advantage": rho_advantage}


def ppo_terms(logits, value, rows: dict, clip: float, vf_clip: float) -> dict:
    """What the loss is made of, each (B,): logits (B, A) and value (B,) are the new ones.

    policy: negated clipped surrogate; value: the larger of the plain and the clipped squared error,
    in normalised returns (the old value by statistics of acting, the target by present ones);
    approx_kl: the estimate r - 1 - log r of KL(old || new).
    """
    logp = logits.log_softmax(-1)
    log_ratio = logp.gather(-1, rows["action"][:, None]).squeeze(-1) - rows["logp"]
    ratio = log_ratio.exp().clamp(*RATIO_RANGE)
    clipped_ratio = ratio.clamp(1 / (1 + clip), 1 + clip)
    surrogate = ratio * rows["advantage"]
    clipped_surrogate = clipped_ratio * rows["advantage"]
    # Both values are the head's own output: the clip bounds how far that has moved since acting.
    clipped_value = rows["value"] + (value - rows["value"]).clamp(-vf_clip, vf_clip)
    value_error = (value - rows["target"]) ** 2
    clipped_value_error = (clipped_value - rows["target"]) ** 2
    return {
        "policy": -torch.min(surrogate, clipped_surrogate),
        "value": torch.max(value_error, clipped_value_error),
        "entropy": -(logp.exp() * logp).sum(-1),
        "approx_kl": log_ratio.exp() - 1 - log_ratio,
        "clip_frac": (clipped_ratio != ratio).float(),
    }


def standardize(x, valid, num_valid):
    """Zero mean and unit variance over the num_valid rows of all ranks; the others become 0."""
    x = (x - sum_over_ranks((x * valid).sum()) / num_valid) * valid
    variance = sum_over_ranks(x.square().sum()) / num_valid
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


# --- actors ---


class Group:
    """Environments that step together, and what goes on from one rollout of them to the next."""

    def __init__(self, envs, seed: int, device: torch.device, head_start: int):
        self.envs = envs
        self.generator = torch.Generator(device).manual_seed(seed)  # of its actions
        self.obs, _ = envs.reset()
        self.done = np.zeros(envs.num_envs, bool)  # of the last step
        # Random steps first, so that the groups' games differ in age. They do not count: a game
        # that is then under way is reported from there on.
        logits = torch.zeros(envs.num_envs, envs.single_action_space.n, device=device)
        for _ in range(head_start):
            action = sample(logits, self.generator).cpu().numpy()
            self.obs, _, terminated, truncated, _ = envs.step(action)
            self.done = terminated | truncated
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
def appo_rollout(group: Group, actors: Actors, T: int) -> dict:
    """T steps of a group's N environments: columns (T, N), finished games, seconds.

    Row t = (obs_t, a_t, log mu(a_t|obs_t), V(obs_t), version_t of the policy mu, r_{t+1},
    terminated_{t+1}, done_{t+1}, valid_t). There is one obs more, which bootstraps the last row.
    The row after an end is no transition, its action is ignored: it is not valid.
    """
    device = next(actors.agent.parameters()).device
    N = group.envs.num_envs
    columns = {
        "obs": torch.zeros(T + 1, N, *group.obs.shape[1:], dtype=torch.uint8, device=device),
        "action": torch.zeros(T, N, dtype=torch.int64, device=device),
        "logp": torch.zeros(T, N, device=device),
        "value": torch.zeros(T, N, device=device),  # normalised by the actor's statistics
        "value_in_rewards": torch.zeros(T, N, device=device),
        "version": torch.zeros(T, N),  # this and the columns below stay on the CPU, for GAE
        "reward": torch.zeros(T, N),
        "terminated": torch.zeros(T, N),
        "done": torch.zeros(T, N),
        "valid": torch.zeros(T, N),
    }
    returns, lengths = [], []  # of the games that end
    policy_s, env_s = 0.0, 0.0
    for t in range(T):
        if actors.stopped.is_set():
            return {}  # which nobody reads
        start = time.perf_counter()
        agent = actors.agent  # the newest, and the same one for all of this step
        columns["obs"][t] = torch.from_numpy(group.obs)
        columns["version"][t] = agent.version
        columns["valid"][t] = torch.from_numpy(~group.done)
        logits, value = agent(columns["obs"][t])
        action = sample(logits, group.generator)
        columns["action"][t] = action
        columns["logp"][t] = logits.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)
        columns["value"][t] = value
        columns["value_in_rewards"][t] = agent.returns.denormalize(value)
        action = action.cpu().numpy()
        acted = time.perf_counter()
        group.obs, reward, terminated, truncated, info = group.envs.step(action)
        group.done = terminated | truncated
        if "episode" in info:
            returns += info["episode"]["r"][info["_episode"]].tolist()
            lengths += info["episode"]["l"][info["_episode"]].tolist()
        columns["reward"][t] = torch.from_numpy(reward)
        columns["terminated"][t] = torch.from_numpy(terminated)
        columns["done"][t] = torch.from_numpy(group.done)
        policy_s += acted - start
        env_s += time.perf_counter() - acted
    columns["obs"][T] = torch.from_numpy(group.obs)
    games = {"returns": returns, "lengths": lengths}
    return {"columns": columns, "policy_s": policy_s, "env_s": env_s} | games


# --- training ---


def train(args: Args, envs: list[gym.vector.VectorEnv] | None = None) -> dict:
    """Train; returns the last metrics, "agent", "run" (the folder), "eval" (eval.json's, if made).

    envs: a list of args.num_groups VectorEnvs of equal size with next-step autoreset, uint8
    (C, H, W) observations, discrete actions. They are not seeded, evaluated or closed. None =
    EnvPool's Atari as args say. Raises UsageError, OSError, FloatingPointError (a loss is not
    finite), KeyboardInterrupt, and what an actor raised.
    """
    check(args)
    device = set_up(args)
    T = args.num_steps
    N = args.num_envs // args.num_groups
    num_rows = args.minibatch_size * args.num_minibatches  # of this rank
    batch_size = num_rows * WORLD
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
    if sizes != [N] * args.num_groups or modes != {AutoresetMode.NEXT_STEP}:
        needed = f"{args.num_groups} groups of {N} environments, next-step autoreset"
        raise UsageError(f"--num-envs, --num-groups: need {needed}; not {sizes}, {modes}")
    if envs[0].single_observation_space.dtype != np.uint8:
        raise UsageError("observations: must be uint8 (C, H, W)")
    obs_shape = envs[0].single_observation_space.shape
    num_actions = envs[0].single_action_space.n
    if len(obs_shape) != 3 or min(obs_shape[1:]) < 36:
        raise UsageError(f"observations of shape {obs_shape}: must be (C, H, W) from 36 pixels on")

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
    micro_batch = args.micro_batch or (256 if device.type == "cpu" else args.minibatch_size)
    trajectories = args.minibatch_size // T
    recent = deque(maxlen=100)  # returns of the last games

    def forward(obs):
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            return network(obs)

    @torch.no_grad()
    def predict(obs):
        """(R, M, C, H, W) -> logits (R, M, A), value (R, M) in rewards, in micro-batches."""
        outputs = [forward(piece) for piece in obs.flatten(0, 1).split(micro_batch)]
        logits = torch.cat([logits for logits, _ in outputs])
        value = agent.returns.denormalize(torch.cat([value for _, value in outputs]))
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
    rollouts_per_dataset = num_rows // (T * N)
    num_rollouts = math.ceil((total - step) / batch_size) * rollouts_per_dataset
    ahead = 0 if args.sync else args.num_batches_to_accumulate
    actors = Actors(groups, agent, appo_rollout, T, rollouts_per_dataset, ahead, num_rollouts)
    last_save = time.monotonic()
    metrics = {}
    try:
        while step < total:
            logger.mark = time.perf_counter()  # the clock anew: saving and evaluating do not count
            # Dataset: whole rollouts, side by side; the next ones are under way meanwhile
            dataset = actors.dataset()
            batch = {}
            for name in dataset[0]["columns"]:
                batch[name] = torch.cat([rollout["columns"][name] for rollout in dataset], 1)
            lag = agent.version - batch.pop("version")
            valid = batch["valid"] * (lag < args.max_policy_lag)
            returns = [x for rollout in dataset for x in rollout["returns"]]
            lengths = [x for rollout in dataset for x in rollout["lengths"]]
            env_s = sum(rollout["env_s"] for rollout in dataset)
            policy_s = sum(rollout["policy_s"] for rollout in dataset)
            del dataset  # the first copy of the frames
            logger.lap("queue_wait")

            # Targets, in rewards
            # Frames are now normalised anew: as in Sample Factory even the first ratio is not 1.
            agent.frames.update(batch["obs"][:T].flatten(0, 1))
            _, last_value = predict(batch["obs"][T:])
            values = torch.cat([batch.pop("value_in_rewards"), last_value]).cpu()
            reward, terminated, done = batch["reward"], batch["terminated"], batch["done"]
            # With --vtrace only for explained_variance: each minibatch makes its own targets below.
            advantages = gae(reward, values, terminated, done, args.gamma, args.gae_lambda)
            targets = advantages + values[:T]
            is_valid = valid.bool()
            explained = explained_variance(values[:T][is_valid], targets[is_valid])
            if not args.vtrace:
                agent.returns.update(targets[is_valid].to(device))
            batch["advantage"] = advantages
            batch["target"] = targets
            batch["valid"] = valid
            batch = {name: column.to(device) for name, column in batch.items()}

            # Update: the same minibatches in each epoch, in the same order
            lr = schedule(step, args.lr)
            if args.anneal_lr:
                lr *= 1 - step / total
            ent_coef = schedule(step, args.ent_coef)
            optimizer.param_groups[0]["lr"] = lr
            sums = defaultdict(float)  # of the minibatches' means
            for epoch in range(args.update_epochs):
                vtrace_targets = []
                for m in range(args.num_minibatches):
                    some = slice(m * trajectories, (m + 1) * trajectories)
                    minibatch = {name: column[:, some] for name, column in batch.items()}
                    if args.vtrace:
                        logits, value_in_rewards = predict(minibatch["obs"])
                        minibatch |= vtrace_columns(minibatch, logits, value_in_rewards, args.gamma)
                        vtrace_targets.append(minibatch["target"])
                    minibatch["obs"] = minibatch["obs"][:T]
                    minibatch = {name: column.flatten(0, 1) for name, column in minibatch.items()}
                    num_valid = sum_over_ranks(minibatch["valid"].sum()).clamp(min=1)
                    advantage = standardize(minibatch["advantage"], minibatch["valid"], num_valid)
                    minibatch["advantage"] = advantage
                    minibatch["target"] = agent.returns.normalize(minibatch["target"])
                    optimizer.zero_grad()
                    for start in range(0, args.minibatch_size, micro_batch):
                        piece = slice(start, start + micro_batch)
                        rows = {name: column[piece] for name, column in minibatch.items()}
                        terms = ppo_terms(*forward(rows["obs"]), rows, args.clip, args.vf_clip)
                        mask = rows["valid"]
                        # This piece's shares of the minibatch's means; backward adds gradients up.
                        shares = {name: (x * mask).sum() / num_valid for name, x in terms.items()}
                        loss = shares["policy"] + args.vf_coef * shares["value"]
                        loss -= ent_coef * shares["entropy"]
                        loss.backward()
                        for name, share in shares.items():
                            sums[name] += share.detach()
                    for parameter in agent.parameters():
                        parameter.grad = sum_over_ranks(parameter.grad)
                    limit = args.max_grad_norm or np.inf  # inf: only measures the norm
                    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), limit)
                    sums["grad_norm"] += grad_norm / WORLD  # summed over ranks below
                    optimizer.step()
                    agent.version += 1
                    actors.publish(agent)
                # Each row enters once, as with GAE; the first epoch still has the old statistics.
                if args.vtrace and epoch == 0:
                    agent.returns.update(torch.cat(vtrace_targets, 1)[batch["valid"].bool()])

            # Metrics: with torchrun the losses are all ranks', the rest rank 0's
            num_updates = args.update_epochs * args.num_minibatches
            means = {name: sum_over_ranks(x).item() / num_updates for name, x in sums.items()}
            logger.lap("learn", batch_size)
            if not np.isfinite(sum(means.values())):
                raise FloatingPointError(f"a loss is not finite after step {step:,}: {means}")
            next_step = step + batch_size
            metrics = {
                "step": next_step,
                "iteration": next_step // batch_size,
                "episode/return": np.mean(returns) if returns else None,
                "episode/length": np.mean(lengths) if lengths else None,
                "episode/count": len(returns),
                "eval/return": None,
                "loss/policy": means["policy"],
                "loss/value": means["value"],
                "loss/entropy": means["entropy"],
                "train/approx_kl": means["approx_kl"],
                "train/clip_frac": means["clip_frac"],
                "train/explained_variance": explained,
                "train/grad_norm": means["grad_norm"],
                "train/lr": lr,
                "train/ent_coef": ent_coef,
                "train/valid_frac": valid.mean().item(),
                "train/return_mean": agent.returns.mean.item(),
                "train/return_std": agent.returns.std.item(),
                "async/policy_lag_mean": lag.mean().item(),
                "async/policy_lag_max": int(lag.max()),
                "time/env_s": env_s,  # of all groups, which play while the learner trains
                "time/policy_s": policy_s,
            }
            due = args.eval_every and next_step // args.eval_every > step // args.eval_every
            if due and own_envs and RANK == 0:
                metrics["eval/return"] = evaluate(agent, args)["game"]["mean"]
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
    """Play args.eval_episodes games or some more -> {"game": {mean, stderr, returns, lengths}}.

    Every evaluation of a run plays from the same seeds: two of them differ by the agent only.
    """
    games = math.ceil(args.eval_episodes / 64)  # per environment, of which there are at most 64
    envs = make_envs(args, math.ceil(args.eval_episodes / games), "game")
    returns, lengths = play(agent, envs, games, stream_seed(args.seed, "game actions"))
    mean = float(np.mean(returns))
    stderr = float(np.std(returns) / max(len(returns) - 1, 1) ** 0.5)  # 0 for one game
    tqdm.write(f"game: return {mean:.2f} +- {stderr:.2f} (standard error, {len(returns)} games)")
    return {"game": {"mean": mean, "stderr": stderr, "returns": returns, "lengths": lengths}}


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
