"""Asynchronous PPO on Atari: the learner of Sample Factory's APPO (Petrenko et al. 2020, arXiv:2006.11751) in one file.

    python appo_atari.py --env-id Breakout      # 25M agent steps = 100M frames

Actors and learner run at the same time: environments are split into groups, each stepped by its own thread with the
newest published weights, while the learner trains on the datasets that are complete. `--sync` turns the overlap off.
Unlike most PPO, as Sample Factory: the clip interval is [1 / (1 + eps), 1 + eps], the ratio is clamped to [0.05, 20];
the critic predicts normalised returns; observations are normalised element by element; minibatches are whole
trajectories in a fixed order; rows that are too old are masked.
Departures: EnvPool emulates (the ignored action after an end is masked); the learning rate falls to zero (Sample
Factory's counts frames against samples and ends at 0.75); a game cut at the time limit bootstraps from its last
observation (theirs adds gamma V of the one before); V-trace works with normalised returns and a true bootstrap (theirs
refuses the first and drops the last reward); rows that are too old are masked in losses and statistics, not in GAE
(theirs there too, and it scales the learning rate by the valid share); advantages' deviation has a floor of 1e-4; the
KL schedule reads a sampled KL (theirs the exact one); no early stop when an epoch's loss stays as it was; groups get
the random head start, not single environments; EnvPool turns frames grey and resizes them its own way, and plays its
random no-ops after a lost life too (theirs one); one policy. Effects not measured.
"""

import contextlib
import copy
import ctypes
import difflib
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Literal

try:
    import gymnasium as gym
    import numpy as np
    import torch
    import torch.nn.functional as F
    import tyro
    from gymnasium.vector import AutoresetMode
    from torch import nn
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm
except (ModuleNotFoundError, KeyboardInterrupt) as error:
    if __name__ != "__main__":
        raise
    print(f"{error}: pip install -r requirements.txt" if str(error) else "", file=sys.stderr)
    sys.exit(2 if str(error) else 130)

SCRIPT = "appo_atari"
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # under torchrun
CORES = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # for each process
ENV_THREADS = CORES  # by default
CHANNELS = 1  # of one frame
ROOM_BYTE = {"MontezumaRevenge": 3, "Pitfall": 1}  # where the console's RAM holds the number of the room
POWERCAP = Path("/sys/class/powercap")  # where Linux shows RAPL's counters
TERMS = ("loss/policy", "loss/value", "loss/entropy", "train/approx_kl", "train/clip_frac")
# fmt: off
COLUMNS = (
    "step", "iteration", "episode/count", "episode/return", "episode/length", "episode/rooms", *TERMS,
    "train/grad_norm", "train/explained_variance", "train/lr", "train/valid_frac", "train/return_mean",
    "train/return_std", "async/policy_lag_mean", "async/policy_lag_max", "eval/return",
    "time/sps", "time/env_s", "time/policy_s", "time/learn_s", "time/queue_wait_s", "time/energy_j",
    "time/j_per_mframes",
)
# fmt: on


class UsageError(ValueError):
    """What the user can mend: `main` prints one line and returns 2."""


@dataclass
class Args:
    # process: this first group may differ when a run is resumed or evaluated (ANEW)
    resume: str | None = None  # go on from this run folder, or checkpoint in it; latest = newest of --run-dir
    evaluate: str | None = None  # run folder or checkpoint to play without training; writes eval.json beside it
    device: str = "auto"  # auto (cuda if there is one), cpu, cuda, cuda:1
    torch_threads: int = 0  # CPU threads of PyTorch; 0 = all cores without a GPU, 1 with one
    env_threads: int = 0  # threads that step the environments of a group; 0 = the core count
    compile: bool = False  # torch.compile the learner's network; off until measured on a GPU
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16 = autocast, of the learner; faster with AVX512-BF16
    micro_batch: int = 0  # rows computed at once; 0 = 256 (impala net: 64) on a CPU, all on a GPU
    total_timesteps: int = 25_000_000  # agent steps, all envs together, floored to whole iterations
    checkpoint_every: float = 300  # seconds between checkpoints, at iteration starts; 0 = every iteration
    keep_checkpoints: int = 0  # also keep this many of the newest under their step, step_<step>.pt
    max_minutes: float = 0  # stop before the iteration that would pass this many minutes; 0 = never
    eval_episodes: int = 100  # games at the end, rounded up to the same number an env; 0 = none
    eval_every: int = 0  # agent steps between evaluations in training; 0 = none
    greedy: bool = False  # evaluate with argmax instead of sampled actions
    video: bool = False  # film the first game of the final evaluation: video/game.mp4
    track: bool = False  # log to Weights & Biases too (package wandb, set up by its WANDB_* variables)
    quiet: bool = False  # no progress bar and no line an iteration
    run_dir: str = "runs"  # folder of all runs
    # run
    run_name: str = ""  # folder of this run in it; "" = env-id__script__seed__time
    milestone_every: int = 0  # agent steps between checkpoints that are kept, milestone_<step>.pt; 0 = none
    seed: int = 1  # weights, games, actions; equal --sync runs on a CPU write equal metrics
    # environment
    env_id: str = "Breakout"  # Atari game as EnvPool spells it, with or without -v5
    repeat_action_probability: float = 0  # sticky actions: chance that a raw frame repeats the last action
    frame_skip: int = 4  # raw frames an action; the last two are merged by maximum
    noop_max: int = 30  # most no-op frames at an episode's start; EnvPool needs one
    fire_reset: bool = True  # press FIRE at an episode's start
    episodic_life: bool = True  # a lost life ends the training episode (not the game)
    max_episode_steps: int = 27_000  # agent steps after which a game is cut
    frame_size: Literal[84, 96] = 84  # pixels a side, grey
    stack: int = 4  # frames shown
    num_envs: int = 32  # parallel environments
    num_groups: int = 2  # groups of them, each with an actor thread
    # optimisation
    num_steps: int = 128  # rollout length an env
    minibatch_size: int = 1024  # rows in one SGD step: whole trajectories, the same ones in every epoch
    num_minibatches: int = 8  # minibatches of a dataset, which is an iteration
    update_epochs: int = 4  # passes over a dataset
    lr: tuple[str, ...] = ("3.03e-4",)  # learning rate: one number, or step:rate knots in agent steps, linear between
    lr_schedule: Literal["linear", "constant", "kl"] = "linear"  # on top: falling to 0, nothing, by each epoch's KL
    adam_eps: float = 1e-5  # Adam's epsilon
    max_grad_norm: float = 0  # clip the gradient's norm; 0 = no clipping
    sync: bool = False  # no overlap: act, then learn, in one thread; bit-reproducible on a CPU
    num_batches_to_accumulate: int = 2  # datasets that actors may be ahead of the learner; 0 = they wait for it
    max_policy_lag: int = 1000  # rows acted by weights older than this many SGD steps are masked
    # algorithm
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # GAE's lambda
    vtrace: bool = False  # V-trace targets and advantages, anew in every minibatch, instead of GAE
    rho_bar: float = 1  # V-trace: limit of the importance weight of a row's own temporal difference
    c_bar: float = 1  # V-trace: limit of the weights that pass later differences on
    clip: float = 0.1  # the ratio's interval is 1 / (1 + this) to 1 + this
    vf_clip: float = 1  # how far the value may move from the old one, in normalised returns
    vf_coef: float = 0.5  # weight of the value term, which has no 1/2
    ent_coef: float = 0.000468  # weight of the entropy bonus
    normalize_returns: bool = True  # the critic predicts (return - mean) / deviation, clipped to 5
    normalize_obs: bool = True  # pixels too, element by element
    net: Literal["nature", "impala"] = "nature"  # network
    channels: tuple[int, int, int] = (16, 32, 32)  # widths of the IMPALA CNN's stages

    batch_size = property(lambda self: self.minibatch_size * self.num_minibatches * WORLD)  # of all ranks
    iterations = property(lambda self: self.total_timesteps // self.batch_size)

    def validate(self):
        """Raise UsageError for what would train nothing or train on NaN."""
        batch = self.batch_size // WORLD
        low = dict(num_envs=1, num_steps=1, update_epochs=1, minibatch_size=2, noop_max=1)
        low |= dict(frame_skip=1, stack=1, max_episode_steps=1, num_groups=1, num_minibatches=1, channels=1)
        low |= dict(eval_episodes=int(bool(self.eval_every or self.evaluate)), total_timesteps=self.batch_size)
        high = dict(gamma=1, gae_lambda=1, repeat_action_probability=1, seed=2**32 - 1, torch_threads=1024)
        high |= dict(env_threads=1024, noop_max=1000, frame_skip=100, stack=100, num_groups=min(self.num_envs, 64))
        for name, value in [*vars(self).items(), *(("channels", width) for width in self.channels)]:
            least, most = low.get(name, 0), high.get(name, 10**15)
            if isinstance(value, int | float) and not least <= value <= most:
                size = f" (an iteration is {batch * WORLD})" * (name == "total_timesteps")
                raise UsageError(f"--{name.replace('_', '-')} {value}: must be from {least} to {most}{size}")
        if self.num_envs % self.num_groups:
            raise UsageError(f"--num-groups {self.num_groups}: must divide --num-envs {self.num_envs}")
        rollout = self.num_envs // self.num_groups * self.num_steps
        if self.minibatch_size % self.num_steps:
            what = f"must be whole trajectories of {self.num_steps} rows (--num-steps)"
            raise UsageError(f"--minibatch-size {self.minibatch_size}: {what}")
        if batch % rollout:
            what = f"a dataset of {batch} rows must be whole rollouts of a group, {rollout} rows each"
            raise UsageError(f"--num-minibatches {self.num_minibatches}: {what}")
        if self.resume is not None and self.evaluate is not None:
            raise UsageError("--resume, --evaluate: one of the two")
        schedule(0, self.lr, "--lr")
        if self.lr_schedule == "kl" and len(self.lr) > 1:
            raise UsageError(f"--lr {' '.join(self.lr)}: --lr-schedule kl starts from one number")


ANEW = list(Args.__dataclass_fields__)[: list(Args.__dataclass_fields__).index("run_name")]


def stream_seed(seed: int, stream: str) -> int:
    """A 31-bit hash: neither neighbouring seeds nor different streams (training, evaluation) share random numbers."""
    return int(np.random.SeedSequence([seed, *stream.encode()]).generate_state(1)[0] >> 1)


def make_envs(args: Args, split: str, num_envs: int) -> gym.vector.VectorEnv:
    """EnvPool's Atari as args say; `split`, training or game (evaluation), decides the random stream."""
    with contextlib.redirect_stderr(io.StringIO()):  # envpool imports gym, which prints a banner
        import envpool
    registered = envpool.registration.registry.specs
    games = [name.removesuffix("-v5") for name, (path, *_) in registered.items() if path == "envpool.atari"]
    game = args.env_id.removesuffix("-v5")
    if game not in games:
        close = difflib.get_close_matches(game, games, 3, 0.4) or sorted(games)
        raise UsageError(f"--env-id {args.env_id}: no Atari game of EnvPool; did you mean {', '.join(close)}?")
    # EnvPool's own `seed` gives env i seed + i: neighbouring seeds would share nearly all games.
    seeds = np.random.SeedSequence(stream_seed(args.seed, split)).generate_state(num_envs) >> 1
    options = dict(num_envs=num_envs, num_threads=args.env_threads or ENV_THREADS, env_seed=seeds.tolist())
    options |= dict(repeat_action_probability=args.repeat_action_probability, frame_skip=args.frame_skip)
    options |= dict(use_fire_reset=args.fire_reset, episodic_life=args.episodic_life, reward_clip=True)
    options |= dict(max_episode_steps=args.max_episode_steps, noop_max=args.noop_max, stack_num=args.stack)
    options |= dict(img_height=args.frame_size, img_width=args.frame_size)
    return AtariEnvs(envpool.make(f"{game}-v5", env_type="gymnasium", **options), num_envs, ROOM_BYTE.get(game))


def splits(args: Args) -> list[str]:
    """What evaluation plays."""
    return ["game"]


def normalized(args: Args, mean: float) -> dict:
    """No normalised scores here."""
    return {}


def score(reward, ended, cut, info) -> tuple:
    """Of a step: unclipped reward, whether the whole game ended (not just a life), rooms seen in it; each (N,)."""
    over = (info.get("terminated", ended) > 0) | cut
    return info.get("reward", reward), over, info["rooms"].sum(1) if "rooms" in info else np.full(len(reward), np.nan)


class AtariEnvs(gym.vector.VectorEnv):
    """EnvPool's Atari as a VectorEnv: uint8 (N, frames, S, S), newest frame last, next-step autoreset.

    The step after an end ignores its action and shows the next game's first observation, with reward 0. Rewards are
    signs. `info`: reward, not clipped; terminated, of the game (`terminated` is also a lost life with episodic_life);
    lives; elapsed_step; ram; rooms, (N, 256), those visited in this game, where the game's RAM has them.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, pool, num_envs: int, room_byte: int | None):
        self.pool, self.num_envs, self.room_byte = pool, num_envs, room_byte
        self.single_observation_space = gym.spaces.Box(0, 255, pool.observation_space.shape, np.uint8)
        self.single_action_space = gym.spaces.Discrete(pool.action_space.n)
        self.rooms, self.over = np.zeros((num_envs, 256), bool), np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        """New games; EnvPool is seeded when it is made."""
        self.rooms[:], self.over[:] = False, False
        return self.pool.reset()

    def step(self, actions):
        obs, reward, ended, cut, info = self.pool.step(actions)
        if self.room_byte is not None:
            self.rooms[self.over] = False
            self.rooms[np.arange(self.num_envs), info["ram"][:, self.room_byte]] = True
            self.over = (info["terminated"] > 0) | cut
            info["rooms"] = self.rooms.copy()
        return obs, reward, ended, cut, info


def layer(module, gain: float = 2**0.5):
    """Orthogonal weights, zero bias."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class RunningMoments(nn.Module):
    """Mean and deviation of all rows so far, element by element: sums of 1, x and x^2 in float64."""

    def __init__(self, shape=(), count: float = 1e-4):
        super().__init__()
        prior = torch.tensor([count, 0, count], dtype=torch.float64)  # `count` observations of mean 0 and variance 1
        self.register_buffer("sums", prior.view(3, *[1] * len(shape)).repeat(1, *shape))

    def update(self, x, unit: float = 1.0):
        """x: (B, *shape), measured in `unit`; pixels in float32, which is fast and exact for sums of 256 rows."""
        new = torch.zeros_like(self.sums)
        new[0] = len(x)
        for part in x.split(256):
            part = part.float() if x.dtype == torch.uint8 else part.double()
            new[1:] += torch.stack([part.sum(0).double() / unit, part.square().sum(0).double() / unit**2])
        self.sums += reduced(new)

    def mean(self):
        return self.sums[1] / self.sums[0]

    def std(self):
        return (self.sums[2] / self.sums[0] - self.mean() ** 2).clamp(min=1e-12).sqrt()


class ResidualBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class Agent(nn.Module):
    """Sample Factory's convnet_atari or the IMPALA CNN: uint8 (B, C, S, S) -> logits (B, A), normalised value (B,)."""

    def __init__(self, obs_shape, num_actions: int, args: Args):
        super().__init__()
        self.norm_obs, self.norm_returns = args.normalize_obs, args.normalize_returns
        self.obs_moments, self.return_moments = RunningMoments(obs_shape, 1.0), RunningMoments((), 1.0)
        if args.net == "nature":
            sizes = ((obs_shape[0], 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
            stages = [part for size in sizes for part in (nn.Conv2d(*size), nn.ReLU())]
        else:
            widths, stages = (obs_shape[0], *args.channels), []
            for a, b in zip(widths, args.channels, strict=False):
                stages += [nn.Conv2d(a, b, 3, padding=1), nn.MaxPool2d(3, 2, 1), ResidualBlock(b), ResidualBlock(b)]
            stages.append(nn.ReLU())
        self.trunk = nn.Sequential(*stages)
        size = self.trunk(torch.zeros(1, *obs_shape)).numel()
        self.hidden, self.policy, self.value = nn.Linear(size, 512), nn.Linear(512, num_actions), nn.Linear(512, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                layer(module, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, obs):
        # Bytes are re-ordered before they become floats, and in place: each pass over a batch of frames takes time.
        x = obs.contiguous(memory_format=torch.channels_last).float()
        if self.norm_obs:
            mean, std = self.obs_moments.mean().float(), self.obs_moments.std().float()
            x.sub_(255 * mean).div_(255 * std).clamp_(-5, 5)
        else:
            x.div_(255)
        x = F.relu(self.hidden(self.trunk(x).permute(0, 2, 3, 1).flatten(1)))  # no copy: its layout is channels-last
        with torch.autocast(x.device.type, enabled=False):
            return self.policy(x.float()), self.value(x.float()).squeeze(-1)

    def normalized(self, value):
        """Reward units -> what the critic predicts."""
        mean, std = self.return_moments.mean().float(), self.return_moments.std().float()
        return ((value - mean) / std).clamp(-5, 5) if self.norm_returns else value

    def in_rewards(self, value):
        """What the critic predicts -> reward units."""
        mean, std = self.return_moments.mean().float(), self.return_moments.std().float()
        return value.clamp(-5, 5) * std + mean if self.norm_returns else value


def sample(logits, generator=None):
    """Draw from Categorical(logits), (B, A) -> (B,), by a race of exponentials: unlike multinomial it never waits."""
    return (logits.softmax(-1) / torch.empty_like(logits).exponential_(generator=generator)).argmax(-1)


def gae(reward, value, terminated, done, gamma: float, lam: float):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) -> advantages (T, N).

    reward, terminated, done: (T, N), of the step taken in row t; value: (T + 1, N), the last row bootstraps.
    A termination has no future value; any end (`done`) cuts the trace.
    """
    delta, decay = reward + gamma * value[1:] * (1 - terminated) - value[:-1], gamma * lam * (1 - done)
    advantage, trace = torch.zeros_like(reward), torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        advantage[t] = trace = delta[t] + decay[t] * trace
    return advantage


def vtrace(reward, value, terminated, done, rho, gamma: float, rho_bar: float = 1, c_bar: float = 1, lam: float = 1):
    """V-trace (Espeholt et al. 2018, eq. 1) -> targets vs (T, N), policy-gradient advantages (T, N).

    reward, terminated, done: (T, N), of the step taken in row t; value: (T + 1, N), of the current critic, the last row
    bootstraps; rho: (T, N), pi(a_t|x_t) / mu(a_t|x_t). A termination has no future value; any end cuts the trace.
    """
    limited, discount = rho.clamp(max=rho_bar), gamma * (1 - terminated)
    delta = limited * (reward + discount * value[1:] - value[:-1])
    decay, correction = discount * lam * rho.clamp(max=c_bar) * (1 - done), torch.zeros_like(value)
    for t in reversed(range(len(reward))):
        correction[t] = delta[t] + decay[t] * correction[t + 1]  # vs - V
    vs = value + correction
    following = torch.where(done > 0, value[1:], vs[1:])  # vs of row t + 1, of this game
    return vs[:-1], limited * (reward + discount * following - value[:-1])


def ppo_terms(logits, value, action, advantage, target, old_logp, old_value, clip: float, vf_clip: float):
    """The five TERMS of each row, (5, B); logits are (B, A), the rest (B,), values and targets normalised.

    Sample Factory's surrogate, its ratio clamped to [0.05, 20] and clipped to [1 / (1 + clip), 1 + clip]; the larger of
    the plain and the clipped squared value error; entropy; r - 1 - log r; whether the ratio is outside the interval.
    """
    logp = logits.log_softmax(-1)
    log_ratio = logp.gather(-1, action[:, None]).squeeze(-1) - old_logp
    ratio = log_ratio.exp().clamp(0.05, 20)
    near = ratio.clamp(1 / (1 + clip), 1 + clip)
    policy = -torch.min(ratio * advantage, near * advantage)
    near_old = old_value + (value - old_value).clamp(-vf_clip, vf_clip)
    value_error = torch.max((value - target) ** 2, (near_old - target) ** 2)
    entropy, approx_kl = -(logp.exp() * logp).sum(-1), log_ratio.exp() - 1 - log_ratio
    return torch.stack([policy, value_error, entropy, approx_kl, (near != ratio).float()])


def vtrace_targets(agent, forward, frames, rows: dict, micro_batch: int, args):
    """V-trace of a minibatch's trajectories under the present weights: frames (T + 1, n, ...) -> two times (T, n)."""
    with torch.no_grad():
        outputs = [forward(piece) for piece in frames.flatten(0, 1).split(micro_batch)]
        logits, value = (torch.cat(x).unflatten(0, frames.shape[:2]) for x in zip(*outputs, strict=True))
        logp = logits[:-1].log_softmax(-1).gather(-1, rows["action"][..., None]).squeeze(-1)
        rho, ends = (logp - rows["logp"]).exp(), (rows["terminated"], rows["done"])
        return vtrace(rows["reward"], agent.in_rewards(value), *ends, rho, args.gamma, args.rho_bar, args.c_bar)


def among_ranks(collective, *args):
    """Call a collective of torch.distributed; ConnectionError where another rank is lost."""
    try:
        collective(*args)
    except RuntimeError as error:
        raise ConnectionError(f"another of the {WORLD} ranks is lost: {str(error).splitlines()[0]}") from None


def reduced(x):
    """The sum of a tensor over torchrun's ranks; without torchrun x itself."""
    if WORLD > 1:
        among_ranks(torch.distributed.all_reduce, x := x.clone(memory_format=torch.contiguous_format))
    return x


def reduce_gradients(parameters):
    """Replace gradients by their sums over torchrun's ranks, in one flat all-reduce; None stays where all have None."""
    if WORLD > 1:
        parameters = list(parameters)
        flat = [torch.zeros(p.numel(), device=p.device) if p.grad is None else p.grad.flatten() for p in parameters]
        given = reduced(torch.tensor([p.grad is not None for p in parameters]).int()).tolist()
        for p, grad, some in zip(parameters, reduced(torch.cat(flat)).split([*map(len, flat)]), given, strict=True):
            p.grad = torch.empty_like(p).copy_(grad.view_as(p)) if some else None  # fused Adam needs the strides of p


def schedule(step: int, knots, flag: str = "") -> float:
    """The value at `step`: linear between "step:value" knots, constant outside them; a bare value is constant."""
    try:
        pairs = ((knot if ":" in knot else f"0:{knot}").split(":") for knot in knots)
        steps, values = zip(*(map(float, pair) for pair in pairs), strict=True)
    except ValueError:
        steps, values = (0,), (-1,)
    if sorted(set(steps)) != list(steps) or not np.isfinite(steps).all() or not all(0 <= x < 1e9 for x in values):
        raise UsageError(f"{flag} {' '.join(knots)}: must be step:value pairs in order, such as 0:1e-4 1e6:5e-4")
    return float(np.interp(step, steps, values))


def standardize(x, valid):
    """Zero mean and unit variance over the valid rows; the others become 0. The floor of the deviation is RLlib's."""
    x, count = torch.where(valid > 0, x, 0), reduced(valid.sum()).clamp(min=1)
    x = torch.where(valid > 0, x - reduced(x.sum()) / count, 0)
    return x / (reduced(x.square().sum()) / count).sqrt().clamp(min=1e-4)


class Published:
    """The acting copy of the agent, shared by all actors; replaced whole, under a lock, after every SGD step."""

    def __init__(self, agent: Agent, version: int):
        self.agent, self.lock, self.version = copy.deepcopy(agent).requires_grad_(False), threading.Lock(), version

    def publish(self, agent: Agent, version: int):
        with self.lock:
            for mine, new in zip(self.agent.state_dict().values(), agent.state_dict().values(), strict=True):
                mine.copy_(new)
            self.version = version

    @torch.no_grad()
    def act(self, obs):
        """uint8 (N, C, S, S) -> logits, values in reward units, and the version of the weights."""
        with self.lock:
            logits, value = self.agent(obs)
            return logits, self.agent.in_rewards(value), self.version


class Group:
    """Environments that step together, and all that their next rollout depends on."""

    def __init__(self, envs: gym.vector.VectorEnv, seed: int, device: torch.device):
        self.envs, self.device, self.generator = envs, device, torch.Generator(device).manual_seed(seed)
        self.same_step = envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
        self.episodes, self.over, (self.obs, _) = Episodes(envs.num_envs), np.zeros(envs.num_envs, bool), envs.reset()

    def step(self, action) -> tuple:
        """A step of all environments, action (N,): reward, terminated, truncated, info, the games that ended."""
        is_valid = ~self.over | self.same_step
        self.obs, reward, ended, cut, info = self.envs.step(action)
        self.over = ended | cut
        return reward, ended, cut, info, self.episodes.step(*score(reward, ended, cut, info), is_valid)

    def play_randomly(self, steps: int):
        """A head start, so that groups differ in the age of their games (decorrelate_envs_on_one_worker of theirs)."""
        logits = torch.zeros(self.envs.num_envs, self.envs.single_action_space.n, device=self.device)
        for _ in range(steps):
            self.step(sample(logits, self.generator).cpu().numpy())

    def state(self) -> dict:
        saved = dict(obs=torch.from_numpy(self.obs), over=torch.from_numpy(self.over), rng=self.generator.get_state())
        saved["episodes"] = (self.envs.num_envs, self.episodes.returns.tolist(), self.episodes.lengths.tolist())
        return saved | dict(envs=self.envs.get_state() if hasattr(self.envs, "get_state") else None)

    def restore(self, saved: dict):
        if len(saved["rng"]) == len(self.generator.get_state()):  # else it is another kind of device's
            self.generator.set_state(saved["rng"])
        if saved["envs"] and hasattr(self.envs, "set_state"):  # without it the games start anew
            self.envs.set_state(saved["envs"])
            self.obs, self.over = saved["obs"].numpy(), saved["over"].numpy()
            self.episodes = Episodes(*saved["episodes"])

    def rollout(self, policy: Published, T: int, gamma: float, stopped=lambda: False) -> dict | None:
        """T steps of all N environments: rows (T, N), the games that ended, seconds in environments and policy.

        Row t = (obs_t, a_t, log mu(a_t|obs_t), V(obs_t), version_t, r_{t+1}, terminated_{t+1}, done_{t+1}, valid_t),
        V in reward units. With next-step autoreset the row after an end is no transition: valid_t = not done_t.
        """
        N = self.envs.num_envs
        rows = dict(obs=torch.zeros(T + 1, N, *self.obs.shape[1:], dtype=torch.uint8, device=self.device))
        rows |= dict(action=torch.zeros(T, N, dtype=torch.int64), version=torch.zeros(T, N, dtype=torch.int64))
        rows |= {name: torch.zeros(T, N) for name in ("reward", "terminated", "done", "valid")}
        rows |= {name: torch.zeros(T, N, device=self.device) for name in ("logp", "value")}  # one wait a step is enough
        games, spent, mark = [], dict(env=0.0, policy=0.0), time.perf_counter()
        for t in range(T):
            if stopped():
                return None
            rows["obs"][t] = torch.from_numpy(self.obs)
            rows["valid"][t] = torch.from_numpy(~self.over | self.same_step)
            logits, rows["value"][t], rows["version"][t] = policy.act(rows["obs"][t])
            action = sample(logits, self.generator)
            rows["logp"][t] = logits.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)
            rows["action"][t] = action
            spent["policy"], mark = spent["policy"] + time.perf_counter() - mark, time.perf_counter()
            reward, ended, cut, info, over = self.step(rows["action"][t].numpy())
            games += over
            for name, x in dict(reward=np.float32(reward), terminated=ended, done=self.over).items():
                rows[name][t] = torch.from_numpy(x)
            for i in np.flatnonzero(cut & ~ended & self.same_step):  # obs is the next game's: bootstrap here
                final = torch.from_numpy(info["final_obs"][i][None]).to(self.device)
                rows["reward"][t, i] += gamma * policy.act(final)[1].item()
                rows["terminated"][t, i] = 1
            spent["env"], mark = spent["env"] + time.perf_counter() - mark, time.perf_counter()
        rows["obs"][T] = torch.from_numpy(self.obs)
        rows |= {name: x.cpu() for name, x in rows.items() if name != "obs"}
        return dict(rows=rows, games=games, spent=spent)


class Rollouts:
    """What lies between actors and learner: finished rollouts, and how far the actors may be ahead.

    A dataset is `size` rollouts, in the order in which they were begun. Actors begin a rollout only while it belongs to
    one of the next `ahead` + 1 datasets after those that were learned, and to one of the run's `total`: no row is older
    than `ahead` datasets of SGD steps when its learning begins, however unequal the actors are.
    """

    def __init__(self, size: int, ahead: int, total: int):
        self.size, self.last, self.condition = size, size * total, threading.Condition()
        self.begun, self.taken, self.limit = 0, 0, min(size * (ahead + 1), self.last)
        self.ready, self.error, self.stopped = {}, None, False

    def actor(self, group: Group, *rest):
        """The body of an actor's thread."""
        try:
            while True:
                with self.condition:
                    self.condition.wait_for(lambda: self.stopped or self.begun < self.limit)
                    if self.stopped:
                        return
                    ticket, self.begun = self.begun, self.begun + 1
                rollout = group.rollout(*rest, stopped=lambda: self.stopped)
                with self.condition:
                    self.ready[ticket] = rollout
                    self.condition.notify_all()
        except BaseException as error:
            with self.condition:
                self.error = error if isinstance(error, Exception) else RuntimeError(f"an actor ended: {error!r}")
                self.condition.notify_all()

    def check(self):
        """Raise what an actor raised."""
        if self.error:
            raise self.error

    def take(self) -> list[dict]:
        """Wait for the next dataset."""
        with self.condition:
            tickets = range(self.taken, self.taken + self.size)
            self.condition.wait_for(lambda: self.error or self.ready.keys() >= set(tickets))
            self.check()
            self.taken += self.size
            return [self.ready.pop(ticket) for ticket in tickets]

    def learned(self):
        """One more dataset may be begun."""
        with self.condition:
            self.limit = min(self.limit + self.size, self.last)
            self.condition.notify_all()

    def stop(self, threads):
        """End the actors, within a step of their environments: an interpreter that exits under them would crash."""
        with self.condition:
            self.stopped, end = True, time.monotonic() + 5
            self.condition.notify_all()
        for thread in threads:
            thread.join(max(0, end - time.monotonic()))


def train(args: Args, envs: list | None = None) -> dict:
    """Train (with args.evaluate: only play); returns the last metrics, "run" (the folder) and "eval" (the splits).

    envs: a list of args.num_groups VectorEnvs of equal size with uint8 (C, S, S) observations, discrete actions and a
    declared autoreset mode, next-step or same-step; each is stepped by its own thread, neither seeded, evaluated nor
    closed here. None = EnvPool as args say. With args.resume, the other args must be those of the run:
    Args(**torch.load(path)["args"]). Raises UsageError, OSError (disk), FloatingPointError (a loss that is not finite),
    KeyboardInterrupt and SystemExit (checkpoint written), and whatever an actor raised.
    """
    args.validate()
    device, saved, own = choose_device(args), load_checkpoint(args, strict=True), envs is None
    if saved and saved.get("own_envs", own) != own:
        raise UsageError(f"{saved['path']}: its run {'had not' if own else 'had'} envs of its own; pass envs likewise")
    if args.resume and saved["step"] >= args.iterations * args.batch_size:
        step, evaluated = saved["step"], saved["path"].with_name("eval.json")  # which may be of an older checkpoint
        if not args.eval_episodes or evaluated.exists() and f'"step": {step},' in evaluated.read_text():
            print(f"{args.resume} is finished at step {step:,}; a larger --total-timesteps goes on with it")
            return dict(step=step, run=str(evaluated.parent))
    # A resumed run must not replay the emulators' random numbers, which no checkpoint can save.
    stream = f"training from {saved['step']}" if args.resume and saved["step"] else "training"
    stream += f" of rank {RANK}" * (RANK > 0)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(args.seed if stream == "training" else stream_seed(args.seed, stream))
    T, N, G = args.num_steps, args.num_envs // args.num_groups, args.num_groups
    if own:
        envs = [make_envs(args, f"{stream} {g}", 1 if args.evaluate else N) for g in range(1 if args.evaluate else G)]
    modes = {group.metadata.get("autoreset_mode") for group in envs}
    sizes = [group.num_envs for group in envs]
    if not args.evaluate and sizes != [N] * G or not modes <= {AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP}:
        raise UsageError(f"--num-envs {args.num_envs}, --num-groups {G}: given {sizes} envs with autoreset {modes}")
    obs_shape, A = envs[0].single_observation_space.shape, envs[0].single_action_space.n
    agent = Agent(obs_shape, A, args).to(device)
    network = torch.compile(agent) if args.compile else agent
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")
    forward = autocast(lambda obs: network(obs))  # -> logits (B, A), normalised value (B,)
    optimizer = torch.optim.Adam(agent.parameters(), lr=schedule(0, args.lr), eps=args.adam_eps, fused=True)
    fitting = (64, 256)[args.net == "nature"] if device.type == "cpu" else args.minibatch_size
    micro_batch = args.micro_batch or fitting

    groups = [Group(group, stream_seed(args.seed, f"{stream} actions {g}"), device) for g, group in enumerate(envs)]
    for g, group in enumerate(() if args.evaluate else groups):
        group.play_randomly(g * T)
    step, version, metrics = 0, 0, {}
    try:
        if saved:
            step, version = saved["step"], saved["version"]
            agent.load_state_dict(saved["agent"])
            optimizer.load_state_dict(saved["optimizer"])
        if args.resume and WORLD == 1:
            set_rng_state(saved["rng"], device)
            for group, state_of_group in zip(groups, saved["groups"] or (), strict=False):
                group.restore(state_of_group)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{saved['path']}: damaged or not of these args: {str(error).splitlines()[0]}") from None
    for x in agent.state_dict().values():  # all ranks begin as rank 0
        x.copy_(reduced(x if RANK == 0 else torch.zeros_like(x)))
    if reduced(torch.tensor(step)) != step * WORLD:
        raise UsageError("--resume: the ranks read different checkpoints")
    if args.evaluate and RANK:
        return {}
    if args.evaluate:
        return dict(eval=evaluate_splits(agent, args, saved["path"].parent, checkpoint=saved["path"].name, step=step))
    policy, per_dataset = Published(agent, version), args.batch_size // WORLD // (N * T)
    rollouts = Rollouts(
        per_dataset, args.num_batches_to_accumulate, -(-(args.iterations * args.batch_size - step) // args.batch_size)
    )

    def state():  # all that the next iteration depends on; asynchronous actors are in the middle of theirs: not saved
        now = dict(own_envs=own, step=step, version=version, agent=agent.state_dict(), rng=get_rng_state(device))
        now |= dict(
            optimizer=optimizer.state_dict(),
            groups=[group.state() for group in groups] if args.sync and WORLD == 1 else None,
        )
        return copy.deepcopy(now)

    with contextlib.ExitStack() as stack:
        run = stack.enter_context(Run(args, saved, agent, device, micro_batch))
        threads = [
            threading.Thread(target=rollouts.actor, args=(group, policy, T, args.gamma), daemon=True, name="actor")
            for group in (() if args.sync else groups)
        ]
        stack.callback(lambda: rollouts.stop(thread for thread in threads if thread.ident is not None))
        if args.resume and args.lr_schedule == "linear" and saved["args"]["total_timesteps"] != args.total_timesteps:
            run.say(f"the learning rate now falls to 0 at step {run.total:,}, a new --total-timesteps")
        while run.goes_on(step, state):
            before = energy_j(device)
            if args.milestone_every and step and step % args.milestone_every < args.batch_size:
                run.write(f"milestone_{step}.pt")
            # Dataset: whole rollouts, side by side; the next ones are under way meanwhile
            if args.sync:
                turn = step // (N * T * WORLD)
                dataset = [groups[(turn + k) % G].rollout(policy, T, args.gamma) for k in range(per_dataset)]
            else:
                for thread in threads:
                    if thread.ident is None:
                        thread.start()
                dataset = rollouts.take()
            waited = run.lap("queue_wait", args.batch_size / 2)
            rows = {name: torch.cat([one["rows"][name] for one in dataset], 1) for name in dataset[0]["rows"]}
            run.games += [game for one in dataset for game in one["games"]]
            spent = {f"time/{phase}_s": sum(one["spent"][phase] for one in dataset) for phase in ("env", "policy")}
            if args.sync:  # the actors' seconds are the learner's
                spent["time/queue_wait_s"] = waited - sum(spent.values())
            del dataset
            obs = rows.pop("obs")  # (T + 1, M, C, S, S): M trajectories
            lag = version - rows.pop("version")
            valid = rows["valid"] = rows["valid"] * (lag <= args.max_policy_lag)
            with torch.no_grad():
                if args.normalize_obs:
                    for frames in obs[:T]:
                        agent.obs_moments.update(frames, 255)
                last = torch.cat([agent.in_rewards(forward(piece)[1]) for piece in obs[T].split(micro_batch)]).cpu()

            # Targets, in reward units
            values, mask = torch.cat([rows["value"], last[None]]), valid.bool()
            ends = (rows["terminated"], rows["done"])
            rows["advantage"] = gae(rows["reward"], values, *ends, args.gamma, args.gae_lambda)
            rows["target"] = rows["advantage"] + rows["value"]
            errors = rows["advantage"][mask], rows["target"][mask]
            unexplained, variance = (x.var().item() if len(x) > 1 else 0 for x in errors)
            if args.normalize_returns and not args.vtrace:
                agent.return_moments.update(rows["target"][mask].to(device))
            rows = {name: x.to(device) for name, x in rows.items()}

            # Update: minibatches are whole trajectories in a fixed order
            falling = 1 - step / run.total if args.lr_schedule == "linear" else 1
            if args.lr_schedule != "kl":
                optimizer.param_groups[0]["lr"] = schedule(step, args.lr) * falling
            lr = optimizer.param_groups[0]["lr"]
            stats = torch.zeros(args.update_epochs, args.num_minibatches, len(TERMS) + 1, device=device)
            for epoch in range(args.update_epochs):
                seen = []  # V-trace targets
                for m in range(args.num_minibatches):
                    some = slice(m * args.minibatch_size // T, (m + 1) * args.minibatch_size // T)
                    frames, mini = obs[:, some], {name: x[:, some] for name, x in rows.items()}
                    if args.vtrace:
                        targets = vtrace_targets(agent, forward, frames, mini, micro_batch, args)
                        mini["target"], mini["advantage"] = targets
                        seen.append(mini["target"][mini["valid"] > 0])
                    mini["target"], mini["value"] = agent.normalized(mini["target"]), agent.normalized(mini["value"])
                    mini["advantage"] = standardize(mini["advantage"], mini["valid"])
                    count = reduced(mini["valid"].sum()).clamp(min=1)
                    optimizer.zero_grad()
                    order = ("action", "advantage", "target", "logp", "value", "valid")
                    parts = [frames[:T].flatten(0, 1), *(mini[name].flatten() for name in order)]
                    for observed, *old, is_valid in zip(*(part.split(micro_batch) for part in parts), strict=True):
                        terms = ppo_terms(*forward(observed), *old, args.clip, args.vf_clip)
                        terms = torch.where(is_valid > 0, terms, 0).sum(1) / count  # a share of the minibatch's means
                        (terms[0] + args.vf_coef * terms[1] - args.ent_coef * terms[2]).backward()
                        stats[epoch, m, :-1] += terms.detach()
                    reduce_gradients(agent.parameters())
                    stats[epoch, m, -1] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm or np.inf)
                    optimizer.step()
                    version += 1
                    policy.publish(agent, version)
                    rollouts.check()
                    run.lap("learn", args.batch_size / 2 / args.update_epochs / args.num_minibatches)
                stats[epoch, :, :-1] = reduced(stats[epoch, :, :-1])
                if args.normalize_returns and args.vtrace and epoch == 0:
                    agent.return_moments.update(torch.cat(seen))
                if args.lr_schedule == "kl":  # Sample Factory's kl_adaptive_epoch, its target 0.008, by a sampled KL
                    kl, rate = stats[epoch, :, TERMS.index("train/approx_kl")].mean().item(), optimizer.param_groups[0]
                    rate["lr"] *= 1 / 1.5 if kl > 0.016 else 1.5 if kl < 0.004 else 1
                    rate["lr"] = min(max(rate["lr"], 1e-6), 1e-2)
            metrics = dict(zip((*TERMS, "train/grad_norm"), stats.mean((0, 1)).tolist(), strict=True))
            for name, mean in metrics.items():
                if not np.isfinite(mean):
                    raise FloatingPointError(f"{name} is {mean} in the iteration after step {step:,}")
            step += args.batch_size
            rollouts.learned()
            metrics |= spent | {"train/lr": lr, "train/valid_frac": reduced(valid.mean()).item() / WORLD}
            for name in ("mean", "std") if args.normalize_returns else ():
                metrics[f"train/return_{name}"] = getattr(agent.return_moments, name)().item()
            metrics |= {"async/policy_lag_mean": lag.float().mean().item(), "async/policy_lag_max": int(lag.max())}
            metrics["train/explained_variance"] = 1 - unexplained / variance if variance > 0 else None
            run.lap("learn")
            joules = energy_j(device)
            if before and joules and joules >= before:  # RAPL's counter wraps around
                metrics["time/energy_j"] = joules - before
                frames = args.batch_size * args.frame_skip / (WORLD if device.type == "cuda" else 1)
                metrics["time/j_per_mframes"] = 1e6 * (joules - before) / frames
            if own and RANK == 0 and args.eval_every and step % args.eval_every < args.batch_size:
                metrics["eval/return"] = evaluate_splits(agent, args)["game"]["mean"]
            metrics = run.log(step, metrics)
        if own and RANK == 0 and args.eval_episodes and run.completed:
            metrics["eval"] = evaluate_splits(agent, args, run.folder, checkpoint="checkpoint.pt", step=step)
    return metrics | dict(step=step, run=str(run.folder))


def energy_j(device: torch.device) -> float | None:
    """Joules used so far by the GPU (NVML) or, on a CPU, by its packages (RAPL); None where the machine hides it."""
    try:
        if device.type == "cpu":
            return sum(int(path.read_text()) for path in POWERCAP.glob("intel-rapl:?/energy_uj")) / 1e6 or None
        nvml, handle, spent = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_ulonglong()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
        failed = failed or nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(spent))
        return None if failed else spent.value / 1000
    except OSError:  # no NVML, or not allowed to read
        return None


class Episodes:
    """Running returns and lengths of whole games; rows that are no transition do not count."""

    def __init__(self, num_envs: int, returns=0.0, lengths=0):
        self.returns, self.lengths = np.full(num_envs, returns, np.float64), np.full(num_envs, lengths, np.int64)

    def step(self, reward, over, extra, valid) -> list:
        """Add a step of all envs, each (N,), from `score`; returns the games it ended: (return, length, extra, env)."""
        self.returns += np.where(valid, reward, 0)
        self.lengths += valid
        ended = np.flatnonzero(over)
        games = [(float(self.returns[i]), int(self.lengths[i]), float(extra[i]), int(i)) for i in ended]
        self.returns[over] = self.lengths[over] = 0
        return games


@torch.no_grad()
def evaluate(agent, envs, games: int, seed: int, greedy: bool = False, film: list | None = None) -> tuple[list, list]:
    """Play `games` whole games in each env (the first to finish would favour short ones) -> returns, lengths.

    Its random numbers are its own. film: gets the newest frame, (H, W, 3), of each step of the first env's first game.
    """
    device, episodes, (obs, _) = next(agent.parameters()).device, Episodes(envs.num_envs), envs.reset()
    generator = torch.Generator(device).manual_seed(seed)
    same_step = envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    over, played, results = np.zeros(envs.num_envs, bool), np.zeros(envs.num_envs, int), []
    while played.min() < games:
        if film is not None and not played[0]:
            film.append(obs[0, -CHANNELS:].transpose(1, 2, 0))
        logits, _ = agent(torch.from_numpy(obs).to(device))
        action, is_valid = logits.argmax(-1) if greedy else sample(logits, generator), ~over | same_step
        obs, reward, ended, cut, info = envs.step(action.cpu().numpy())
        over = ended | cut
        for *result, _, env in episodes.step(*score(reward, ended, cut, info), is_valid):
            if played[env] < games:
                results.append(result)
                played[env] += 1
    return tuple(map(list, zip(*results, strict=True)))


def evaluate_splits(agent, args: Args, folder: Path | None = None, **header) -> dict:
    """Play at least args.eval_episodes games on each split; with `folder`, write eval.json, eval.csv (and films) too.

    Every evaluation of a run plays from the same seeds, so that two of them differ by the agent only.
    """
    results, table, games = {}, "split,return,length\n", -(-args.eval_episodes // 64)
    for name in splits(args):
        envs, film = make_envs(args, name, -(-args.eval_episodes // games)), [] if folder and args.video else None
        returns, lengths = evaluate(agent, envs, games, stream_seed(args.seed, f"{name} actions"), args.greedy, film)
        envs.close()
        mean, n = float(np.mean(returns)), len(returns)
        stderr = float(np.std(returns, ddof=1)) / n**0.5 if n > 1 else None
        share = normalized(args, mean)
        results[name] = dict(returns=returns, lengths=lengths, mean=mean, stderr=stderr, normalized=share)
        if folder:
            error = "" if stderr is None else f" +- {stderr:.2f} (s.e.)"
            print(f"{name}: return {mean:.2f}{error}, {n} games", *(["normalized", share] if share else []), flush=True)
            table += "".join(f"{name},{game:g},{length}\n" for game, length in zip(returns, lengths, strict=True))
        if film:
            import imageio.v3 as imageio

            (folder / "video").mkdir(exist_ok=True)
            film = np.stack(film).repeat(2, 1).repeat(2, 2).repeat(3 // CHANNELS, 3)
            imageio.imwrite(folder / "video" / f"{name}.mp4", film, plugin="pyav", fps=15, codec="libx264")
    if folder:  # when all is played: eval.json's "step" says that this checkpoint needs it no more
        write_atomically(folder / "eval.csv", table.encode())
        write_atomically(folder / "eval.json", json.dumps(header | dict(splits=results), indent=1).encode())
    return results


class Run(contextlib.AbstractContextManager):
    """Plumbing, the same in all scripts: run folder, metrics, progress and checkpoints; nothing of the algorithm.

    A checkpoint is the state at an iteration's start. `goes_on` keeps it in memory; it is written when due, at the end,
    and when Ctrl-C or SIGTERM leaves the `with` block: the unfinished iteration is dropped and nothing else.
    """

    def __init__(self, args: Args, saved: dict | None, agent: nn.Module, device: torch.device, micro_batch: int):
        name = args.run_name or f"{args.env_id}__{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        self.args, self.folder = args, saved["path"].parent if saved else Path(args.run_dir, name)
        kept = saved or dict(step=0, best=-np.inf, recent=[])
        self.first, self.best, self.recent = kept["step"], kept["best"], kept["recent"]
        self.total, self.written = args.iterations * args.batch_size, -np.inf
        self.games, self.laps, self.spent = [], {}, 0.0  # of the iteration; seconds of the last one
        self.start = self.mark = time.perf_counter()
        config, table = dict(script=SCRIPT, args=asdict(args)) | provenance(device), self.folder / "metrics.csv"
        quiet = args.quiet or RANK > 0
        self.say = (lambda text: None) if quiet else lambda text: print(text, flush=True)
        try:
            if RANK == 0:  # the others write nothing
                self.set_up(saved, config, table)
        except (UsageError, ImportError):
            raise
        except Exception as error:  # a full or read-only disk, or one of wandb's own kinds
            raise UsageError(f"--run-dir or --track: cannot set up {self.folder}: {error}") from None
        threads = f"{torch.get_num_threads()} torch threads, {args.env_threads or ENV_THREADS} env threads"
        weights = f"{sum(parameter.numel() for parameter in agent.parameters()):,} weights"
        self.say(f"{SCRIPT} {args.env_id}: {device}, micro-batch {micro_batch}, {threads}, {weights}; {self.folder}")
        self.say(f"{args.iterations} iterations x {args.batch_size:,} = {self.total:,} steps, from {self.first:,}")
        bar = dict(unit=" steps", unit_scale=True, smoothing=0, disable=quiet or not sys.stderr.isatty())
        self.bar = tqdm(total=self.total, initial=self.first, **bar)

    def set_up(self, saved: dict | None, config: dict, table: Path):
        if not saved and self.folder.exists() and any(self.folder.iterdir()):
            raise UsageError(f"--run-name: {self.folder} is not empty; to go on with it: --resume {self.folder}")
        if self.args.track:
            import wandb

            wandb.init(id=self.folder.name, resume="allow", config=asdict(self.args), sync_tensorboard=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = [line.split(",") for line in table.read_text().splitlines()] if saved and table.exists() else [[]]
        rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:] if len(line) == len(lines[0])]
        rows = [row for row in rows if row.get("step", "").isdigit() and int(row["step"]) <= self.first]
        rows.insert(0, dict(zip(COLUMNS, COLUMNS, strict=True)))  # by name: columns may have moved
        write_atomically(table, "".join(",".join(row.get(key, "") for key in COLUMNS) + "\n" for row in rows).encode())
        write_atomically(self.folder / "config.json", json.dumps(config, indent=1).encode())
        self.csv = open(table, "a", buffering=1)  # line by line
        self.tensorboard = SummaryWriter(self.folder, purge_step=self.first + 1, flush_secs=10**9)  # `log` flushes
        self.tensorboard.add_text("args", "\n".join(f"    {k} = {v}" for k, v in asdict(self.args).items()))

    def __exit__(self, kind, error, trace):
        self.bar.close()
        if RANK:
            return
        for number in (signal.SIGINT, signal.SIGTERM) if WORLD > 1 else ():  # torchrun's, when another rank is lost
            signal.signal(number, signal.SIG_IGN)
        if isinstance(error, KeyboardInterrupt | SystemExit | ConnectionError) and hasattr(self, "state"):
            self.write("checkpoint.pt")
            print(f"stopped; to go on: --resume {self.folder}", file=sys.stderr)
        with contextlib.suppress(OSError):  # of a full disk, which was reported before
            self.csv.close()
            if not isinstance(error, KeyboardInterrupt | SystemExit):  # amid its queue they make this wait for ever
                self.tensorboard.close()

    def goes_on(self, step: int, state) -> bool:
        """Keep state(), of an iteration's start, and write what is due; False when the run is over or out of time."""
        now, mean = time.perf_counter(), float(np.mean(self.recent)) if len(self.recent) >= 20 else -np.inf
        better, self.completed = mean > self.best and step >= self.total / 100, step >= self.total
        # Out of time: the next iteration would pass the limit if it took as long as the last; one is always done.
        late = step > self.first and 0 < 60 * self.args.max_minutes < now - self.start + self.spent
        late = bool(reduced(torch.tensor(float(late and RANK == 0))))  # all ranks stop together
        self.best = mean if better else self.best
        self.state = state() | dict(script=SCRIPT, args=asdict(self.args), best=self.best, recent=list(self.recent))
        if better:
            self.write("best.pt")
        if self.completed or late or now - self.written >= self.args.checkpoint_every:
            self.write("checkpoint.pt")
            self.written = now
            if (keep := self.args.keep_checkpoints) and RANK == 0:
                self.write(f"step_{step}.pt")
                for old in sorted(self.folder.glob("step_[0-9]*.pt"), key=os.path.getmtime)[:-keep]:
                    old.unlink()
        if late or self.completed:
            self.bar.close()
            self.say(f"{'finished' if self.completed else 'stopped'} at step {step:,} of {self.total:,}: {self.folder}")
        self.mark = time.perf_counter()
        return not (late or self.completed)

    def write(self, name: str):
        if RANK == 0:
            torch.save(self.state, file := io.BytesIO())
            write_atomically(self.folder / name, file.getbuffer())

    def lap(self, phase: str, steps: float = 0) -> float:
        """Book the time since the last lap under time/<phase>_s; move the progress bar by `steps`; all of it so far."""
        now, name = time.perf_counter(), f"time/{phase}_s"
        self.laps[name], self.mark = self.laps.get(name, 0.0) + now - self.mark, now
        self.bar.update(min(steps, self.bar.total - self.bar.n))
        return self.laps[name]

    def log(self, step: int, metrics: dict) -> dict:
        """Add what every script logs and write one row; what is missing or None is an empty cell."""
        if WORLD > 1:
            among_ranks(torch.distributed.all_gather_object, every := [None] * WORLD, self.games)
            self.games = [game for games in every for game in games]
        games = np.mean(self.games, axis=0).tolist() if self.games else ()
        metrics = self.laps | dict(zip(COLUMNS[3:6], games, strict=False)) | metrics
        self.spent = sum(self.laps.values())  # evaluations and checkpoints do not count
        counts = {"step": step, "iteration": step // self.args.batch_size, "episode/count": len(self.games)}
        metrics |= counts | {"time/sps": self.args.batch_size / self.spent}
        self.recent, self.games, self.laps = (self.recent + [game[0] for game in self.games])[-100:], [], {}
        row = {name: metrics[name] for name in COLUMNS if metrics.get(name) is not None and not np.isnan(metrics[name])}
        cells = (f"{x:.6g}" if isinstance(x, float) else str(x) for x in (row.get(name, "") for name in COLUMNS))
        if RANK == 0:
            self.csv.write(",".join(cells) + "\n")
            for name, value in row.items():
                self.tensorboard.add_scalar(name, value, step)
            self.tensorboard.flush()
        score, left = row.get("episode/return", "-"), (self.total - step) / row["time/sps"] / 60
        self.bar.n = step
        self.bar.set_postfix_str(f"return {score:.5}")
        if self.bar.disable:
            self.say(f"step {step:,}  return {score:.5}  {row['time/sps']:,.0f} steps/s  {left:.0f} min left")
        return row


def choose_device(args: Args) -> torch.device:
    """args.device, tried out; also sets PyTorch's threads, meets the other ranks and, on a CPU, keeps freed memory."""
    try:
        device = torch.device(("cpu", "cuda")[torch.cuda.is_available()] if args.device == "auto" else args.device)
        if WORLD > 1 and device.type == "cuda":  # one GPU a rank
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        assert device.type in ("cpu", "cuda"), "not a device to train on"
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {args.device} (auto, cpu, cuda, cuda:N): {str(error).splitlines()[0]}") from None
    torch.set_num_threads(args.torch_threads or (CORES if device.type == "cpu" else 1))
    if WORLD > 1 and not torch.distributed.is_initialized():  # a day: the others wait while rank 0 evaluates
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, timeout=timedelta(days=1))
    if device.type == "cpu":  # else glibc gives large blocks back to the system, and each update gets them anew
        for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, 2**30)
    return device


def provenance(device) -> dict:
    """What a result depends on beside its arguments: revision, versions, hardware."""
    command = "git describe --always --dirty --abbrev=40"  # in a shell, where a missing git is no exception
    git = subprocess.run(command, shell=True, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    versions = {dist.name: dist.version for dist in metadata.distributions()}
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    hardware = dict(cpu=cpu[0].split(": ")[1] if cpu else None, cores=CORES, gpu=gpu, ranks=WORLD)
    return dict(git=git or None, versions=versions) | hardware


def get_rng_state(device) -> tuple:
    name, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda, random.getstate(), (name, keys.tolist(), *rest)


def set_rng_state(state: tuple, device):
    torch.set_rng_state(state[0])
    if device.type == "cuda" and state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
    random.setstate(state[2])
    np.random.set_state(state[3])


def load_checkpoint(args: Args, strict: bool = False) -> dict | None:
    """What args resume or evaluate, with its "path"; strict: refuse args that contradict it. None = a new run."""
    source = args.evaluate if args.resume is None else args.resume
    if source is None:
        return None
    path = Path(source or "(empty)")
    if args.resume == "latest":
        configs, own = Path(args.run_dir).glob("*/config.json"), f'"script": "{SCRIPT}"'.encode()
        runs = [file.with_name("checkpoint.pt") for file in configs if own in file.read_bytes()]
        path = max((run for run in runs if run.exists()), key=os.path.getmtime, default=Path(args.run_dir))
    try:
        path = path / "checkpoint.pt" if path.is_dir() else path
        if zipfile.ZipFile(path).testzip():  # torch.load does not compare the checksums
            raise ValueError
        saved = torch.load(path, map_location="cpu", weights_only=True)  # weights_only: a hostile file runs no code
        script, before, known = saved["script"], saved["args"], saved["args"].keys() == vars(args).keys()
    except Exception as error:  # a damaged or foreign file raises nearly anything
        raise UsageError(f"{path}: no readable checkpoint ({type(error).__name__}); is there a best.pt?") from None
    if script != SCRIPT or not known:
        raise UsageError(f"{path}: a checkpoint of {script}.py, or of another version of {SCRIPT}.py")
    for name, old in before.items() if strict else ():
        if name not in ANEW and getattr(args, name) != old:
            given = f"--{name.replace('_', '-')} {getattr(args, name)}"
            raise UsageError(f"{given}: the run has {old}; only a new run can change it")
    if args.resume and path.name != "checkpoint.pt" and path.with_name("checkpoint.pt").exists():
        raise UsageError(f"--resume {path}: would overwrite the checkpoint.pt beside it, move that away first")
    return saved | dict(path=path)


def write_atomically(path: Path, data):
    """Write beside it and rename: at any moment `path` is whole, the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def main(argv=None) -> int:
    """The command line: 0 done, 2 bad usage, 1 failure, 130 after Ctrl-C, 143 after SIGTERM."""
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        threading.excepthook = lambda hook: None  # TensorBoard's writer thread: its error is raised again in this one
        args = tyro.cli(Args, args=argv, description=__doc__.split("\n\n")[0])
        if saved := load_checkpoint(args):  # parse again, on top of the run's arguments
            before = saved["args"] | dict(resume=args.resume, evaluate=args.evaluate)
            args = tyro.cli(Args, args=argv, default=Args(**before))
            args.resume = args.resume and str(saved["path"])  # `latest` must not become another run now
        train(args)
        if torch.distributed.is_initialized():
            reduced(torch.zeros(1))  # the others wait for rank 0's evaluation
            torch.distributed.destroy_process_group()
            sys.stdout.flush()
            os._exit(0)  # a rank's interpreter once crashed at its end, under threads of C++
        return 0
    except (KeyboardInterrupt, SystemExit) as stop:
        return getattr(stop, "code", 130)
    except (UsageError, ImportError, OSError, FloatingPointError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):  # torch has no one class for a lack of it
            raise
        mend = f": pip install -r requirements.txt (or {error.name})" if isinstance(error, ImportError) else ""
        who = f"{SCRIPT}.py" + f", rank {RANK}" * (WORLD > 1)
        print(f"{who}: {str(error).splitlines()[0]}{mend}", file=sys.stderr)
        return 2 if isinstance(error, UsageError | ImportError) else 1


if __name__ == "__main__":
    sys.exit(main())
