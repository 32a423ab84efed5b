# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0", "numpy==2.4.6", "gymnasium==1.4.0", "envpool==1.0.1", "tyro==1.0.17",
#     "pydantic==2.14.3", "tensorboard==2.21.0", "tqdm==4.70.1",
# ]
# ///
"""PPO with Self-supervised Network Distillation (SND-V) on Atari: Pechac et al. 2023.

    python ppo_atari_snd.py --env-id MontezumaRevenge  # 128M environment steps = 512M frames
    python ppo_atari_snd.py --resume runs/NAME         # continue a run; flags given now win

SND: arXiv:2302.11563. RND: Burda et al. 2018, arXiv:1810.12894. PPO: Schulman et al. 2017,
arXiv:1707.06347. Settings: run cnd_21 of github.com/michalnand/reinforcement_learning.
A frame's bonus is a predictor's error on a target network's features of it. RND's target is random;
SND-V's learns to tell frames apart, by a contrastive loss on pairs. Unlike most PPO:
- game and bonus have a value head and a discount each (both returns end with the episode);
- the bonus of row t is for o_t (RND: o_{t+1}), so it rewards the actions before a_t;
- advantages and bonus are not normalized; minibatches are drawn with replacement.
Departures and results: docs/ppo_atari_snd.md.
"""

import argparse
import contextlib
import csv
import ctypes
import io
import itertools
import json
import math
import os
import signal
import sys
import time
from datetime import datetime, timedelta
from importlib.metadata import version
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
    env_id: str = "MontezumaRevenge"  # Atari game as EnvPool spells it, with or without -v5
    total_timesteps: PositiveInt = 128_000_000  # environment steps (4 frames), in whole rollouts
    seed: NonNegativeInt = 1  # on a CPU, equal flags and threads give equal metrics, not time/*
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
    repeat_action_probability: Share = 0.25  # of repeating the last action, per frame
    noop_max: PositiveInt = 30  # episodes start with 1 to 30 no-ops
    fire_reset: bool = False  # press FIRE at the start of an episode
    max_episode_steps: Annotated[int, Field(ge=1, lt=2**31)] = 4500  # time limit, in steps
    frame_size: Literal[84, 96] = 96  # width and height of the gray frames, in pixels
    stack: PositiveInt = 4  # frames per observation
    frame_channels: PositiveInt = 1  # of the newest frame; 3 for an RGB make_envs of your own
    num_envs: PositiveInt = 128  # parallel environments (per process)
    # optimization
    num_steps: PositiveInt = 128  # rollout length per environment
    minibatch_size: PositiveInt = 512  # rows per SGD step and process; must divide the rollout
    update_epochs: PositiveInt = 4  # how often a row is drawn, on average
    lr: Schedule = 1e-4
    """learning rate, or pairs of step and rate from step 0 on, linear in between"""
    adam_eps: NonNegativeFloat = 1e-8  # Adam's epsilon
    max_grad_norm: NonNegativeFloat = 0.5  # clip the norm of the policy's gradient; 0 = off
    # algorithm
    gamma: Share = 0.998  # discount of the game's rewards
    gamma_int: Share = 0.99  # discount of the bonus
    gae_lambda: Share = 0.95  # GAE's lambda, for both
    clip: NonNegativeFloat = 0.1  # clip range of the probability ratio; 0 = off
    vf_coef: NonNegativeFloat = 1  # weight of the value loss (half the squared error)
    ent_coef: Schedule = 0.001  # weight of the entropy; a number, or as --lr
    ext_coef: NonNegativeFloat = 2  # weight of the game's advantages; 0 = off
    int_coef: NonNegativeFloat = 1  # weight of the bonus's advantages; 0 = off
    eta: NonNegativeFloat = 0.5  # bonus = this x the mean squared error of the prediction
    int_clip: NonNegativeFloat = 1  # largest bonus; 0 = off
    pairs: PositiveInt = 64  # pairs of frames per process and SGD step of the target
    predictor_share: Share = 0  # of the features that train it; 0 = min(1, 32 / all environments)
    warmup_steps: NonNegativeInt = 256  # random ones per environment, for the frame statistics
    # network
    snd_features: PositiveInt = 512  # outputs of target and predictor, width of the predictor

    def __post_init__(self):
        rows = self.num_envs * self.num_steps
        if rows % self.minibatch_size:
            raise ValueError(f"--minibatch-size {self.minibatch_size}: must be a divisor of {rows}")
        if self.total_timesteps < rows * WORLD:
            raise ValueError(f"--total-timesteps {self.total_timesteps}: at least {rows * WORLD}")


# --- environment ---


class AtariEnvs(gym.vector.VectorEnv):
    """EnvPool's Atari: uint8 (N, frames, S, S), the newest frame last, next-step autoreset.

    The step after an end ignores its action and returns the next episode's first observation: it is
    no transition.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, envs, num_envs: int):
        self.envs = envs
        self.num_envs = num_envs
        self.single_observation_space = envs.observation_space
        self.single_action_space = envs.action_space

    def reset(self, *, seed=None, options=None):
        return self.envs.reset()

    def step(self, actions):
        obs, reward, terminated, truncated, info = self.envs.step(actions)
        # EnvPool calls a game that ends exactly at the time limit truncated; info knows better
        terminated = (terminated | truncated) & (info["terminated"] > 0)
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
        episodic_life=False,
        max_episode_steps=args.max_episode_steps,
        img_height=args.frame_size,
        img_width=args.frame_size,
        stack_num=args.stack,
    )
    envs = AtariEnvs(envs, num_envs)
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)  # of unclipped rewards
    return gym.wrappers.vector.TransformReward(envs, np.sign)


# --- network ---

# width, kernel, stride and padding of each convolution
POLICY_CONVS = [(32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 2, 1), (128, 3, 1, 1)]
SND_CONVS = [(16, 3, 2, 1), (32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 1, 1)]
TILES = [1, 2, 4, 8, 12, 16]  # sides of the squares that `augment` hides, in pixels


def layer(module, gain: float = 2**0.5):
    """Orthogonal weights, zero bias."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def conv_layers(channels: int, convs: list, activation) -> nn.Sequential:
    """A stack of convolutions and a flatten: (B, channels, H, W) -> (B, D)."""
    layers = nn.Sequential()
    for width, kernel, stride, padding in convs:
        layers.append(layer(nn.Conv2d(channels, width, kernel, stride, padding)))
        layers.append(activation())
        channels = width
    return layers.append(nn.Flatten())


class Agent(nn.Module):
    """The policy: uint8 (B, C, H, W) -> logits (B, A), values (B, 2) of the game and the bonus."""

    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        super().__init__()
        self.bf16 = args.precision == "bf16"
        self.trunk = conv_layers(obs_shape[0], POLICY_CONVS, nn.ReLU)
        num_features = self.trunk(torch.zeros(1, *obs_shape)).shape[1]
        self.trunk.extend([layer(nn.Linear(num_features, 512)), nn.ReLU()])
        self.hidden_policy = layer(nn.Linear(512, 512), 0.01)
        self.hidden_value = layer(nn.Linear(512, 512), 0.1)
        self.policy = layer(nn.Linear(512, num_actions), 0.01)
        self.value = layer(nn.Linear(512, 2), 0.01)
        self.to(memory_format=torch.channels_last)

    def forward(self, obs):
        # Channels-last while still uint8: a quarter of the traffic
        x = obs.contiguous(memory_format=torch.channels_last).float().div_(255)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            x = self.trunk(x)
            policy = F.relu(self.hidden_policy(x))
            value = F.relu(self.hidden_value(x))
        return self.policy(policy.float()), self.value(value.float())  # heads in fp32


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


class SND(nn.Module):
    """Target and predictor, uint8 frames (B, C, H, W) -> features (B, D), and frame statistics."""

    def __init__(self, frame_shape: tuple[int, int, int], args: Args):
        super().__init__()
        self.bf16 = args.precision == "bf16"
        self.eta = args.eta
        self.int_clip = args.int_clip or math.inf
        self.frames = RunningMoments(frame_shape, count=1e-4, variance=1, epsilon=0)
        features = args.snd_features
        self.target = conv_layers(frame_shape[0], SND_CONVS, nn.ELU)
        self.predictor = conv_layers(frame_shape[0], SND_CONVS, nn.ELU)
        width = self.target(torch.zeros(1, *frame_shape)).shape[1]
        self.target.append(layer(nn.Linear(width, features)))
        self.predictor.append(layer(nn.Linear(width, features)))
        for _ in range(2):
            self.predictor.extend([nn.ELU(), layer(nn.Linear(features, features))])
        self.register_buffer("tiles", torch.tensor(TILES), persistent=False)
        self.to(memory_format=torch.channels_last)

    def preprocess(self, frames):
        """Standardize each pixel by the statistics so far: uint8 -> float32, cut to [-1, 1]."""
        return ((frames.float() - self.frames.mean) / self.frames.std).clamp(-1, 1)

    def errors(self, frames):
        """The predictor's squared errors (B, D); eta x their mean is the bonus."""
        x = self.preprocess(frames)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            with torch.no_grad():
                features = self.target(x)
            predicted = self.predictor(x)
        return (predicted.float() - features.float()).square()

    @torch.no_grad()
    def bonus(self, frames, micro_batch: int):
        """Frames (T, N, C, H, W) -> their mean errors and bonuses, both (T, N)."""
        pieces = frames.flatten(0, 1).split(micro_batch)
        errors = torch.cat([self.errors(piece).mean(1) for piece in pieces]).view(frames.shape[:2])
        return errors, (self.eta * errors).clamp(max=self.int_clip)

    def predictor_loss(self, rows: dict):
        """Mean squared errors (B,) of each frame's features that the mask (B, D) keeps."""
        mask = rows["mask"]
        losses = (self.errors(rows["frame"]) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return losses, {"loss/predictor": losses}

    def target_loss(self, pairs: dict):
        """Contrastive losses (B,) of random pairs of frames; `far`: they are two rows."""
        a = augment(self.preprocess(pairs["first"]), self.tiles)
        b = augment(self.preprocess(pairs["second"]), self.tiles)
        with torch.autocast(a.device.type, torch.bfloat16, enabled=self.bf16):
            a = self.target(a)
            b = self.target(b)
        losses = contrastive(a.float(), b.float(), pairs["far"])
        return losses, {"loss/target": losses}


# --- mathematics ---


def sample(logits, generator=None):
    """Draw from Categorical(logits): (B, A) -> (B,), by the Gumbel-max trick."""
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - noise.log()).argmax(-1)  # -log(exponential noise) is Gumbel noise


@torch.no_grad()
def act(agent, obs):
    """uint8 (N, C, H, W) -> drawn actions (N,), their log-probability (N,), values (N, 2)."""
    logits, value = agent(obs)
    action = sample(logits)
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

    loss/policy: negated clipped surrogate (PPO, eq. 7). loss/value: half the squared error, summed
    over the heads in use. train/approx_kl: r - 1 - log r, an estimate of the KL.
    """
    clip = args.clip or math.inf
    logits, values = agent(rows["obs"])
    logp = logits.log_softmax(-1)
    log_ratio = logp.gather(-1, rows["action"][:, None]).squeeze(-1) - rows["logp"]
    ratio = log_ratio.exp()
    surrogate = ratio * rows["advantage"]
    clipped_surrogate = ratio.clamp(1 - clip, 1 + clip) * rows["advantage"]
    policy_loss = -torch.min(surrogate, clipped_surrogate)
    error_ext, error_int = (0.5 * (values - rows["target"]) ** 2).unbind(-1)
    value_loss = (args.ext_coef > 0) * error_ext + (args.int_coef > 0) * error_int
    entropy = -(logp.exp() * logp).sum(-1)
    loss = policy_loss + args.vf_coef * value_loss - ent_coef * entropy
    terms = {
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "loss/entropy": entropy,
        "train/approx_kl": ratio - 1 - log_ratio,
        "train/clip_frac": ((ratio - 1).abs() > clip).float(),
    }
    return loss, terms


def explained_variance(value, target) -> float | None:
    """1 - Var(target - value) / Var(target); None if targets do not vary."""
    variance = target.var()
    return 1 - ((target - value).var() / variance).item() if variance > 0 else None


def schedule(step: int, numbers: tuple[float, ...]) -> float:
    """Pairs of step and value: linear in between, constant outside."""
    return float(np.interp(step, numbers[0::2], numbers[1::2]))


def draw_pairs(frames, num_pairs: int) -> dict:
    """Random pairs of frames; about half of them are a frame and itself, the others are `far`."""
    first, other = torch.randint(len(frames), (2, num_pairs), device=frames.device)
    same = torch.rand(num_pairs, device=frames.device) < 0.5
    second = torch.where(same, first, other)
    return {"first": frames[first], "second": frames[second], "far": first != second}


def augment(x, tiles):
    """Mask a tenth of the tiles in half of the frames (B, C, H, W); add noise to a random half."""
    batch_size, _, height, width = x.shape
    tile = tiles[torch.randint(len(tiles), (1,), device=x.device)]  # side, of all frames
    row = torch.arange(height, device=x.device) // tile
    column = torch.arange(width, device=x.device) // tile
    hidden = torch.rand(batch_size, 1, height, width, device=x.device) < 0.1  # enough for side 1
    hidden = hidden[:, :, row[:, None], column]
    is_masked = torch.rand(batch_size, 1, 1, 1, device=x.device) < 0.5
    x = x.masked_fill(hidden & is_masked, 0)
    noise = torch.rand_like(x) * 0.4 - 0.2
    is_noisy = torch.rand(batch_size, 1, 1, 1, device=x.device) < 0.5
    return x + noise * is_noisy


def contrastive(a, b, far):
    """SND-V's losses (B,): the mean squared distance of features (B, D) should be `far`, 0 or 1."""
    distance = (a - b).square().mean(1)
    size = a.square().mean() + b.square().mean()  # penalized above 200
    return (far.float() - distance).square() + F.relu(size - 200)


# --- training ---


def gradient(net, loss, minibatch: dict, micro_batch: int, weight=None) -> dict:
    """Set net's gradient of the mean of the losses over all ranks -> means of the terms.

    loss(rows) -> losses (B,) and a dict of terms (B,), for at most `micro_batch` rows at a time (0:
    ROWS_ON_CPU, on a GPU all). weight: (rows,), 0 for a row that does not count; None: all count.
    """
    column = next(iter(minibatch.values()))
    weight = torch.ones(len(column), device=column.device) if weight is None else weight
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


def learn(agent, snd, optimizer, batch: dict, ent_coef, args: Args) -> dict:
    """Train policy, predictor and target, a step each per minibatch -> means over all minibatches.

    batch: columns of T * N rows: obs, valid, action, logp, value, advantage, target.
    """
    frames = batch["obs"][:, -args.frame_channels :]
    drawn = torch.randint(len(frames), (args.update_epochs * len(frames),), device=frames.device)
    share = args.predictor_share or min(1, 32 / (args.num_envs * WORLD))
    updates = []  # means of each minibatch
    # Compiled once: PyTorch caches by a function's code
    policy_loss = compiled(args)(lambda rows: ppo_loss(agent, rows, ent_coef, args))
    predictor_loss, target_loss = map(compiled(args), [snd.predictor_loss, snd.target_loss])
    for index in drawn.split(args.minibatch_size):
        minibatch = {name: column[index] for name, column in batch.items()}
        means = gradient(agent, policy_loss, minibatch, args.micro_batch, minibatch["valid"])
        limit = args.max_grad_norm or math.inf  # inf: only measures the norm
        means["train/grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), limit)
        optimizer.step()  # before the next CUDA graph overwrites the gradient
        agent.zero_grad()  # Adam skips what has no gradient
        mask = torch.rand(len(index), args.snd_features, device=frames.device) < share
        rows = {"frame": frames[index], "mask": mask}  # of single features, which weigh the same
        means |= gradient(snd.predictor, predictor_loss, rows, args.micro_batch, mask.sum(1))
        optimizer.step()
        snd.predictor.zero_grad()
        pairs = draw_pairs(frames, args.pairs)
        means |= gradient(snd.target, target_loss, pairs, args.pairs)  # one piece: `size`
        optimizer.step()
        snd.target.zero_grad()
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
    T, N = args.num_steps, args.num_envs
    batch_size = T * N * WORLD
    counters = saved or {"step": 0, "iteration": 0, "best": -math.inf}
    step, iteration, best = counters["step"], counters["iteration"], counters["best"]
    # Each rank and each part of a run, by its first step, has its own episodes and actions
    stream = f"training from {step} of rank {RANK}"
    envs = make_envs(args, N, stream_seed(args.seed, stream))
    obs, _ = envs.reset()
    check_envs(envs, obs, N, gym.vector.AutoresetMode.NEXT_STEP, min_size=4)
    num_actions = envs.single_action_space.n
    newest = slice(-args.frame_channels, None)  # channels of the newest frame

    torch.manual_seed(args.seed)  # on all ranks: equal weights
    agent = Agent(obs.shape[1:], num_actions, args).to(device)
    snd = SND(obs[0, newest].shape, args).to(device)
    parameters = [*agent.parameters(), *snd.parameters()]
    optimizer = torch.optim.Adam(parameters, eps=args.adam_eps, fused=True)
    parts = {"agent": agent, "snd": snd, "optimizer": optimizer}
    if saved:
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        optimizer.param_groups[0]["eps"] = args.adam_eps  # flags given now win
    torch.manual_seed(stream_seed(args.seed, stream))  # all draws of training

    # Row t = (obs_t, valid_t, a_t, log pi(a_t|obs_t), V(obs_t), r_{t+1}, terminated_{t+1},
    # done_{t+1}). The row after an end is not valid: its action is ignored. The predictor also
    # trains on its frame, the episode's last, whose bonus enters no valid row's return.
    rollout = {
        "obs": torch.zeros(T, *obs.shape, dtype=torch.uint8, device=device),
        "action": torch.zeros(T, N, dtype=torch.int64, device=device),
        "logp": torch.zeros(T, N, device=device),
        "value": torch.zeros(T, N, 2, device=device),  # of the game, of the bonus
    }
    rewards = torch.zeros(T, N)  # on the CPU, where GAE runs
    terminations = torch.zeros(T, N)
    dones = torch.zeros(T, N)
    valid = torch.zeros(T, N)

    # Page-locked for a GPU: copies from it run in the background. They have ended when
    # `action.cpu()` returns, so the next observation can be written to it
    staged = torch.zeros(obs.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    policy = compiled(args)(act)
    run = Run(args, saved, device)
    recent = []  # returns of the last 100 episodes
    metrics = {}

    def save(name: str):
        run.save(name, parts, step=step, iteration=iteration, best=best)

    try:
        if not saved:
            save("checkpoint.pt")
        # Warm-up of the frame statistics; what a stopped run has seen counts
        while step == 0 and snd.frames.sums[0].max() < args.warmup_steps * N * WORLD:
            obs, *_ = envs.step(torch.randint(num_actions, (N,)).numpy())
            snd.frames.update(torch.from_numpy(obs[:, newest]).to(device))
        obs, _ = envs.reset()  # no episode includes random steps
        while step + batch_size <= args.total_timesteps:
            # Rollout
            start = time.perf_counter()
            env_s = 0.0
            episodes = []  # those that end: (environment, return, length)
            for t in range(T):
                valid[t] = 1 - dones[t - 1]  # of t = 0: the last rollout's last row
                staged.copy_(torch.from_numpy(obs))
                rollout["obs"][t].copy_(staged, non_blocking=True)
                action, logp, value = policy(agent, rollout["obs"][t])
                rollout["action"][t] = action
                rollout["logp"][t] = logp
                rollout["value"][t] = value
                action = action.cpu().numpy()
                before = time.perf_counter()
                obs, reward, terminated, truncated, info = envs.step(action)
                env_s += time.perf_counter() - before
                rewards[t] = torch.as_tensor(reward)
                terminations[t] = torch.as_tensor(terminated)
                dones[t] = torch.as_tensor(terminated | truncated)
                episodes += ended_episodes(info)
                run.bar.update(N * WORLD)

            # Bonus of o_t under the frame statistics so far, which then take in this rollout
            frames = rollout["obs"][:, :, newest]
            errors, bonus = (x.cpu() for x in snd.bonus(frames, args.micro_batch or ROWS_ON_CPU))
            snd.frames.update(frames.flatten(0, 1))

            # Advantages. After a truncation row t + 1 still shows the episode: it bootstraps
            with torch.no_grad():
                _, last_value = agent(torch.from_numpy(obs).to(device))
            values = torch.cat([rollout["value"], last_value[None]]).cpu()
            ext = gae(rewards, values[..., 0], terminations, dones, args.gamma, args.gae_lambda)
            int_ = gae(bonus, values[..., 1], terminations, dones, args.gamma_int, args.gae_lambda)
            advantages = args.ext_coef * ext + args.int_coef * int_
            targets = torch.stack([ext, int_], -1) + values[:T]
            value_ext, value_int = values[:T][valid > 0].unbind(-1)
            target_ext, target_int = targets[valid > 0].unbind(-1)
            columns = rollout | {"valid": valid, "advantage": advantages, "target": targets}
            columns = {name: column.to(device) for name, column in columns.items()}
            batch = {name: column.flatten(0, 1) for name, column in columns.items()}
            acted = time.perf_counter()

            # Learning
            lr = schedule(step, args.lr)
            ent_coef = torch.tensor(schedule(step, args.ent_coef), device=device)
            optimizer.param_groups[0]["lr"] = lr
            means = learn(agent, snd, optimizer, batch, ent_coef, args)
            learned = time.perf_counter()

            # Means of SGD steps are also means over ranks; the rest is rank 0's
            returns = [episode[1] for episode in episodes]
            lengths = [episode[2] for episode in episodes]
            metrics = {
                "step": step + batch_size,
                "iteration": iteration + 1,
                "episode/return": np.mean(returns) if episodes else None,
                "episode/length": np.mean(lengths) if episodes else None,
                "episode/count": len(episodes),
                **means,
                "train/explained_variance": explained_variance(value_ext, target_ext),
                "train/lr": lr,
                "ext/reward": rewards[valid > 0].mean().item(),
                "int/reward_raw": errors.mean().item(),
                "int/reward": bonus.mean().item(),
                "int/explained_variance": explained_variance(value_int, target_int),
                "time/sps": batch_size / (learned - start),
                "time/env_s": env_s,
                "time/policy_s": acted - start - env_s,
                "time/learn_s": learned - acted,
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
        envs.close()
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
