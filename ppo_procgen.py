"""PPO on Procgen: the system of T. Tumiel's Procgen-competition entry (NeurIPS 2020, 8th place) in one file.

    python ppo_procgen.py --env-id bigfish          # 8M steps, easy mode, unlimited levels

PPO: Schulman et al. 2017, arXiv:1707.06347. GAE: Schulman et al. 2016, arXiv:1506.02438. Network: IMPALA, Espeholt et
al. 2018, arXiv:1802.01561. Procgen: Cobbe et al. 2020, arXiv:1912.01588. Results: README.md (none at 8M steps yet).
Unlike a textbook PPO, as in the reference (RLlib 0.8, TensorFlow 1): an adaptive penalty on the exact KL beside the
clipped ratio; advantages standardised once a rollout; fixed minibatches, re-ordered each epoch, the remainder unused;
no gradient clipping; a piecewise-linear learning rate; frames t-3 and t as input; average pooling before a ReLU.
Departures: the reference's batch of "at least 8,192 steps" came out as 9,600, so 9,600 it is; actions are drawn by a
race of exponentials (the same law, other random numbers); PyTorch's Adam adds epsilon after the bias correction,
TensorFlow's before it (at 1e-8, effect not measured).
"""

import contextlib
import copy
import ctypes
import difflib
import hashlib
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

SCRIPT = "ppo_procgen"
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # under torchrun
CORES = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # for each process
ENV_THREADS = min(CORES, 8)  # by default
CHANNELS = 3  # of one frame
# fmt: off
RANGES = {  # return of a blind agent and the best one, easy then hard (constants.py of OpenAI's train-procgen)
    "bigfish": (1, 40, 0, 40), "bossfight": (0.5, 13, 0.5, 13), "caveflyer": (3.5, 12, 2, 13.4), "maze": (5, 10, 4, 10),
    "chaser": (0.5, 13, 0.5, 14.2), "climber": (2, 12.6, 1, 12.6), "coinrun": (5, 10, 5, 10), "heist": (3.5, 10, 2, 10),
    "dodgeball": (1.5, 19, 1.5, 19), "fruitbot": (-1.5, 32.4, -0.5, 27.2), "jumper": (1, 10, 1, 10),
    "leaper": (1.5, 10, 1.5, 10), "miner": (1.5, 13, 1.5, 20), "ninja": (3.5, 10, 2, 10), "plunder": (4.5, 30, 3, 30),
    "starpilot": (2.5, 64, 1.5, 35),
}
MODES = {  # the games that have this mode; for another one Procgen's C++ would end the process
    "exploration": ("caveflyer", "climber", "coinrun", "heist", "jumper", "leaper", "maze", "ninja"),
    "extreme": ("chaser", "dodgeball", "leaper", "starpilot"),
    "memory": ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"),
}
STACKS = {"none": (0,), "gap": (0, 3), "full": (0, 1, 2, 3)}  # which of the kept frames, oldest first, are shown
TERMS = ("loss/policy", "loss/value", "loss/entropy", "train/kl", "train/approx_kl", "train/clip_frac")
COLUMNS = (
    "step", "iteration", "episode/count", "episode/return", "episode/length", "episode/level_complete", *TERMS,
    "train/grad_norm", "train/kl_coef", "train/explained_variance", "train/lr", "train/ent_coef", "train/valid_frac",
    "eval/return_train", "eval/return_test", "time/sps", "time/env_s", "time/policy_s", "time/learn_s",
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
    env_threads: int = 0  # threads that step the environments; 0 = the core count, at most 8
    compile: bool = False  # torch.compile the network; off until measured on a GPU
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16 = autocast: faster on a CPU with AVX512-BF16; no GPU measured
    micro_batch: int = 0  # rows computed at once: same gradient, less memory; 0 = 64 on a CPU, all on a GPU
    total_timesteps: int = 8_000_000  # agent steps, all envs together, floored to whole iterations
    checkpoint_every: float = 300  # seconds between checkpoints, at iteration starts; 0 = every iteration
    keep_checkpoints: int = 0  # also keep this many of the newest under their step, step_<step>.pt
    max_minutes: float = 0  # stop before the iteration that would pass this many minutes; 0 = never
    eval_episodes: int = 100  # games a split at the end, rounded up to the same number an env; 0 = none
    eval_every: int = 0  # agent steps between evaluations in training; 0 = none
    greedy: bool = False  # evaluate with argmax instead of sampled actions
    video: bool = False  # film the first game of each split of the final evaluation: video/*.mp4
    track: bool = False  # log to Weights & Biases too (package wandb, set up by its WANDB_* variables)
    quiet: bool = False  # no progress bar and no line an iteration
    run_dir: str = "runs"  # folder of all runs
    # run
    run_name: str = ""  # folder of this run in it; "" = env-id__script__seed__time
    seed: int = 1  # weights, actions, minibatches, levels: equal CPU runs write equal metrics
    # environment
    env_id: str = "bigfish"  # one of the 16 Procgen games
    distribution_mode: Literal["easy", "hard", "exploration", "memory", "extreme"] = "easy"  # difficulty
    num_levels: int = 0  # training levels; 0 = unlimited
    start_level: int = 0  # first training level
    stack: Literal["none", "gap", "full"] = "gap"  # frames shown: t, or t-3 and t, or t-3 to t
    num_envs: int = 48  # parallel environments
    shape_reward: bool = False  # r becomes sign(r) (sqrt(|r| + 1) - 1) + 0.001 r, before GAE
    norm_reward: float = 0  # discount of the returns whose running deviation divides rewards (OpenAI: 0.99); 0 = off
    # optimisation
    num_steps: int = 200  # rollout length an env
    minibatch_size: int = 1024  # rows in one SGD step; what remains of a rollout is unused
    update_epochs: int = 3  # passes over a rollout
    lr: tuple[str, ...] = ("0:1e-4", "5e5:8e-4", "1e6:1e-4", "2e6:5e-4", "3e6:5e-5", "4e6:2e-4", "8e6:3e-5")
    """learning rate: step:rate knots in agent steps, linear between them; or one number"""
    adam_eps: float = 1e-8  # Adam's epsilon
    weight_decay: float = 0  # adds this times a weight to its gradient (L2)
    max_grad_norm: float = 0  # clip the gradient's norm; 0 = no clipping
    reshuffle: bool = False  # cut new minibatches in every epoch (OpenAI), not once a rollout (RLlib)
    augment: tuple[Literal["flip", "rotate", "crop", "translate", "pad_crop"], ...] = ()  # of frames, in updates only
    augment_prob: float = 0.3  # of each of these, for a row
    # algorithm
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.9  # GAE's lambda
    clip: float = 0.2  # clip range of the probability ratio
    vf_clip: float = 30  # how far the value may move from the old one, in units of return
    vf_coef: float = 0.5  # weight of the value term, which has no 1/2: the 0.5 of OpenAI and CleanRL is 0.25 here
    norm_adv: Literal["rollout", "minibatch"] = "rollout"  # over which rows advantages are standardised
    ent_coef: tuple[str, ...] = ("0.01",)  # weight of the entropy bonus; one number or step:weight knots
    kl_coef: float = 0.2  # first weight of KL(old || new), then adapted to --kl-target; 0 = no penalty
    kl_target: float = 0.01  # KL an iteration, in nats
    channels: tuple[int, int, int] = (32, 64, 64)  # widths of the IMPALA CNN's stages
    pool: Literal["avg", "flatten"] = "avg"  # after the CNN: global average pool, or every output
    input_shift: float = 128  # the network's input is (pixel - this) / 255 (OpenAI: 0)
    ortho_heads: bool = False  # orthogonal heads, gains 0.01 for the policy and 1 for the value (OpenAI), not Glorot

    batch_size = property(lambda self: self.num_envs * self.num_steps * WORLD)  # of all ranks
    iterations = property(lambda self: self.total_timesteps // self.batch_size)

    def validate(self):
        """Raise UsageError for what would train nothing or train on NaN."""
        batch = self.batch_size // WORLD
        low = dict(num_envs=1, num_steps=1, update_epochs=1, channels=1, minibatch_size=2)
        low |= dict(eval_episodes=int(bool(self.eval_every or self.evaluate)), total_timesteps=self.batch_size)
        high = dict(gamma=1, gae_lambda=1, minibatch_size=batch, seed=2**32 - 1, torch_threads=1024, env_threads=1024)
        high |= dict(num_levels=2**31 - 1, start_level=2**31 - 1, norm_reward=1, augment_prob=1)
        for name, value in [*vars(self).items(), *(("channels", width) for width in self.channels)]:
            least, most = low.get(name, 0), high.get(name, 10**15)
            if isinstance(value, int | float) and not least <= value <= most:
                size = f" (an iteration is {batch * WORLD})" * (name in ("minibatch_size", "total_timesteps"))
                raise UsageError(f"--{name.replace('_', '-')} {value}: must be from {least} to {most}{size}")
        if self.resume is not None and self.evaluate is not None:
            raise UsageError("--resume, --evaluate: one of the two")
        schedule(0, self.lr, "--lr"), schedule(0, self.ent_coef, "--ent-coef")


ANEW = list(Args.__dataclass_fields__)[: list(Args.__dataclass_fields__).index("run_name")]


def stream_seed(seed: int, stream: str) -> int:
    """A 31-bit hash: neither neighbouring seeds nor different streams (training, evaluation) share random numbers."""
    return int(np.random.SeedSequence([seed, *stream.encode()]).generate_state(1)[0] >> 1)


def make_envs(args: Args, split: str, num_envs: int) -> gym.vector.VectorEnv:
    """Procgen as args say; `split`, one of training, train and test (evaluation), decides levels and random stream."""
    mode, levels = args.distribution_mode, dict(num_levels=args.num_levels, start_level=args.start_level)
    if args.env_id not in RANGES:
        close = difflib.get_close_matches(args.env_id, RANGES, 3, 0.4) or RANGES
        raise UsageError(f"--env-id {args.env_id}: no Procgen game; did you mean {', '.join(close)}?")
    if args.env_id not in MODES.get(mode, RANGES):
        raise UsageError(f"--distribution-mode {mode}: {args.env_id} lacks it, only {', '.join(MODES[mode])} have it")
    if mode == "exploration" and any(levels.values()):
        raise UsageError("--num-levels, --start-level: exploration mode has one fixed level")
    options = {} if mode == "exploration" or split == "test" else levels
    options |= dict(env_name=args.env_id, distribution_mode=mode, rand_seed=stream_seed(args.seed, split))
    return ProcgenEnvs(STACKS[args.stack], num=num_envs, num_threads=args.env_threads or ENV_THREADS, **options)


def splits(args: Args) -> list[str]:
    """What evaluation plays: with unlimited levels train and test are one; exploration mode has its training level."""
    if args.distribution_mode == "exploration":
        return ["train"]
    return ["train", "test"] if args.num_levels else ["test"]


def normalized(args: Args, mean: float) -> dict:
    """A mean return between blind (0) and best (1); the competition's ranges are the paper's authors' of easy mode."""
    blind, best = RANGES[args.env_id][2 * (args.distribution_mode == "hard") :][:2]
    score = (mean - blind) / (best - blind)
    return dict(easy=dict(procgen=score, competition=score), hard=dict(procgen=score)).get(args.distribution_mode, {})


def score(reward, ended, cut, info) -> tuple:
    """Of a step: unclipped reward, whether the whole game ended, and its level complete; each (N,)."""
    return reward, ended | cut, info.get("prev_level_complete", np.full(len(reward), np.nan))


class ProcgenEnvs(gym.vector.VectorEnv):
    """OpenAI's Procgen as a VectorEnv with a frame stack: uint8 (N, 3 * frames, 64, 64), same-step autoreset.

    The observation of a step that ended a game is the next game's first, and fills its stack. There is no truncation: a
    time-out sets `terminated`. `info`: prev_level_complete, prev_level_seed, level_seed, each (N,).
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, shown: tuple, **options):
        with contextlib.redirect_stderr(io.StringIO()):  # procgen imports gym, which prints a banner
            from procgen import ProcgenGym3Env
        self.env, self.shown, self.num_envs = ProcgenGym3Env(**options), shown, options["num"]
        self.frames = [self.newest()[1]] * (shown[-1] + 1)  # oldest first, each (N, 3, 64, 64)
        self.single_observation_space = gym.spaces.Box(0, 255, (3 * len(shown), 64, 64), np.uint8)
        self.single_action_space = gym.spaces.Discrete(15)

    def newest(self):
        reward, obs, first = self.env.observe()
        return reward, np.ascontiguousarray(obs["rgb"].transpose(0, 3, 1, 2)), first

    def stacked(self):
        return np.concatenate([self.frames[i] for i in self.shown], axis=1)

    def reset(self, *, seed=None, options=None):
        """The present observation: Procgen is seeded when it is made and cannot cut a game short."""
        return self.stacked(), {}

    def step(self, actions):
        self.env.act(actions)
        reward, frame, first = self.newest()
        self.frames = [*self.frames[1:], frame]
        if first.any():
            self.frames = [np.where(first[:, None, None, None], frame, old) for old in self.frames]
        infos = self.env.get_info()
        info = {key: np.array([one[key] for one in infos]) for key in infos[0]}
        return self.stacked(), reward, first, np.zeros_like(first), info

    def close_extras(self, **kwargs):
        self.env.close()

    def get_state(self) -> dict:
        """Emulators and frames, for a checkpoint; `set_state` goes on from there bit for bit."""
        games, frames = self.env.callmethod("get_state"), [torch.from_numpy(frame) for frame in self.frames]
        return dict(games=games, frames=frames, sha256=hashlib.sha256(b"".join(games)).hexdigest())

    def set_state(self, state: dict):
        games, frames = state["games"], [frame.numpy() for frame in state["frames"]]
        intact = hashlib.sha256(b"".join(games)).hexdigest() == state["sha256"] and len(games) == self.num_envs
        if not intact or [frame.shape for frame in frames] != [frame.shape for frame in self.frames]:
            raise UsageError("damaged environment states")  # which would end the process in Procgen's C++
        self.env.callmethod("set_state", games)
        self.frames = frames


class ResidualBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class Agent(nn.Module):
    """IMPALA CNN (fig. 3, right, without the LSTM): uint8 (B, C, H, W) -> logits (B, A) and value (B,), float32."""

    def __init__(self, obs_shape, num_actions: int, channels=(32, 64, 64), pool="avg", shift=128, ortho_heads=False):
        super().__init__()
        self.pool, self.shift, widths = pool, shift, (obs_shape[0], *channels)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip(widths, channels, strict=False))
        self.blocks = nn.ModuleList(nn.Sequential(ResidualBlock(c), ResidualBlock(c)) for c in channels)
        self.hidden = nn.Linear(self.features(torch.zeros(1, *obs_shape)).shape[1], 256)
        self.policy, self.value = nn.Linear(256, num_actions), nn.Linear(256, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):  # Keras' defaults, as in the reference
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        if ortho_heads:
            nn.init.orthogonal_(self.policy.weight, 0.01)
            nn.init.orthogonal_(self.value.weight)
        self.to(memory_format=torch.channels_last)

    def features(self, x):
        for conv, blocks in zip(self.convs, self.blocks, strict=True):
            # ceil_mode without padding is TensorFlow's SAME pooling on even sizes, which pads at the end only.
            x = blocks(F.max_pool2d(conv(x), 3, stride=2, ceil_mode=True))
        return F.relu(x.mean((2, 3)) if self.pool == "avg" else x.flatten(1))  # ReLU after the average

    def forward(self, obs):
        # Bytes are re-ordered before they become floats, and in place: each pass over a batch of frames takes time.
        x = obs.contiguous(memory_format=torch.channels_last).float().sub_(self.shift).div_(255)
        x = F.relu(self.hidden(self.features(x)))
        with torch.autocast(x.device.type, enabled=False):  # bf16 would round a value near 30 to a multiple of 1/8
            return self.policy(x.float()), self.value(x.float()).squeeze(-1)


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


def ppo_terms(logits, value, action, advantage, target, old_logits, old_value, clip: float, vf_clip: float):
    """The six TERMS of each row, (6, B); logits are (B, A), the rest (B,), values and targets in units of return.

    Negated clipped surrogate (PPO, eq. 7), larger of the plain and the clipped squared value error, entropy, exact
    KL(old || new), its sampled estimate r - 1 - log r, and whether the ratio r is outside the clip range.
    """
    logp, old_logp = logits.log_softmax(-1), old_logits.log_softmax(-1)
    log_ratio = (logp - old_logp).gather(-1, action[:, None]).squeeze(-1)
    ratio = log_ratio.exp()
    policy = -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    near_old = old_value + (value - old_value).clamp(-vf_clip, vf_clip)
    value_error = torch.max((value - target) ** 2, (near_old - target) ** 2)
    entropy, kl = -(logp.exp() * logp).sum(-1), (old_logp.exp() * (old_logp - logp)).sum(-1)
    return torch.stack([policy, value_error, entropy, kl, ratio - 1 - log_ratio, ((ratio - 1).abs() > clip).float()])


def next_kl_coef(coef: float, kl: float, target: float) -> float:
    """RLlib's rule: x 1.5 when the policy moved more than twice the target, x 0.5 when less than half."""
    return coef * (1.5 if kl > 2 * target else 0.5 if kl < target / 2 else 1.0)


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


def shaped(reward):
    """Compress large rewards (Pohlen et al. 2018, arXiv:1805.11593, there for values). In the reference this ran after
    GAE and so did nothing; here it comes before."""
    return np.sign(reward) * (np.sqrt(np.abs(reward) + 1) - 1) + 0.001 * reward


class RewardNormalizer:
    """Rewards over the running deviation of their discounted return, clipped to +-10 (VecNormalize of baselines).

    Only divided: to centre rewards would change what is optimal. `state`: running returns (N,), sums of 1, x and x^2.
    """

    def __init__(self, gamma: float, returns, sums=(1e-4, 0.0, 1e-4)):
        self.gamma, self.state = gamma, [np.array(returns, np.float64), np.array(sums)]

    def __call__(self, reward, over, valid):
        """A step of all envs, each (N,); rows that are no transition do not count."""
        returns, sums = self.state
        returns[valid] = self.gamma * returns[valid] + reward[valid]
        new = torch.tensor([valid.sum(), returns[valid].sum(), (returns[valid] ** 2).sum()], dtype=torch.float64)
        sums += reduced(new).numpy()
        returns[over] = 0
        return np.clip(reward / np.sqrt(sums[2] / sums[0] - (sums[1] / sums[0]) ** 2 + 1e-8), -10, 10)


def augment(frames, names, prob: float):
    """Random geometry of square frames: uint8 (B, C, S, S) -> the same. One draw a row: its whole stack moves alike.

    Ranges of the reference, for 64 x 64: flip each axis (actions stay), rotate by up to 20 degrees, crop a side to
    48 to 64 pixels and resize, translate by up to 8 pixels (wrapping around), pad by 10 (reflected) and crop. Each maps
    the coordinates `at`, (2, B, S, S), x and y from the centre, that new pixels are taken from; outside is black.
    """
    half, B = (frames.shape[-1] - 1) / 2, len(frames)
    line = torch.arange(frames.shape[-1], device=frames.device) - half
    at = torch.stack(torch.meshgrid(line, line, indexing="xy"))[:, None]

    def draw(low, high, axes=2):
        return torch.empty(axes, B, 1, 1, device=frames.device).uniform_(low, high)

    moves = dict(
        flip=lambda: at * (2 * draw(0, 2).floor() - 1),
        rotate=lambda: at * (turn := draw(-math.pi / 9, math.pi / 9, 1)).cos() + turned * turn.sin(),
        crop=lambda: at * (share := draw(3 / 4, 1, 1)) + half * (1 - share) * draw(-1, 1),
        translate=lambda: (at + half + draw(-8, 9).floor()) % (2 * half + 1) - half,
        pad_crop=lambda: half - (2 * half - (at + half + draw(-10, 11).floor()).abs()).abs(),
    )
    moved, turned = frames.float(), torch.stack([-at[1], at[0]])
    for name in names:
        grid = torch.where(draw(0, 1, 1) < prob, moves[name](), at).permute(1, 2, 3, 0) / (half + 0.5)
        moved = F.grid_sample(moved, grid, align_corners=False)
    return moved.round().to(torch.uint8)


def standardize(x, valid):
    """Zero mean and unit variance over the valid rows; the others become 0. The floor of the deviation is RLlib's."""
    x, count = torch.where(valid > 0, x, 0), reduced(valid.sum()).clamp(min=1)
    x = torch.where(valid > 0, x - reduced(x.sum()) / count, 0)
    return x / (reduced(x.square().sum()) / count).sqrt().clamp(min=1e-4)


def train(args: Args, envs: gym.vector.VectorEnv | None = None) -> dict:
    """Train (with args.evaluate: only play); returns the last metrics, "run" (the folder) and "eval" (the splits).

    envs: any VectorEnv with uint8 (C, H, W) observations, discrete actions and a declared autoreset mode, next-step or
    same-step; it is neither seeded, evaluated nor closed here. None = Procgen as args say. With args.resume, the other
    args must be those of the run: Args(**torch.load(path)["args"]). Raises UsageError, OSError (disk),
    FloatingPointError (a loss that is not finite), KeyboardInterrupt and SystemExit (checkpoint written).
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
    # Where a resumed run starts new games, they must not be the first ones again.
    stream = f"training from {saved['step']}" if args.resume and saved["step"] else "training"
    stream += f" of rank {RANK}" * (RANK > 0)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(args.seed if stream == "training" else stream_seed(args.seed, stream))
    envs = make_envs(args, stream, 1 if args.evaluate else args.num_envs) if own else envs
    T, N, obs_shape, A = args.num_steps, args.num_envs, envs.single_observation_space.shape, envs.single_action_space.n
    autoreset = envs.metadata.get("autoreset_mode")
    if not args.evaluate and envs.num_envs != N or autoreset not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        raise UsageError(f"--num-envs {N}: given {envs.num_envs} envs with autoreset {autoreset}")
    same_step = autoreset == AutoresetMode.SAME_STEP
    agent = Agent(obs_shape, A, args.channels, args.pool, args.input_shift, args.ortho_heads).to(device)
    network = torch.compile(agent) if args.compile else agent
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")
    forward = autocast(lambda frames: network(torch.as_tensor(frames, device=device)))  # -> logits (B, A), value (B,)
    act = torch.no_grad()(forward)
    decay = args.weight_decay
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.0, eps=args.adam_eps, weight_decay=decay, fused=True)
    micro_batch = args.micro_batch or (64 if device.type == "cpu" else args.minibatch_size)
    num_minibatches = T * N // args.minibatch_size

    step, kl_coef, metrics, episodes, over, (obs, _) = 0, args.kl_coef, {}, Episodes(N), np.zeros(N, bool), envs.reset()
    normalizer = RewardNormalizer(args.norm_reward, [0.0] * N)
    try:
        if saved:
            step, kl_coef = saved["step"], saved["kl_coef"]
            agent.load_state_dict(saved["agent"])
            optimizer.load_state_dict(saved["optimizer"])
            normalizer = RewardNormalizer(args.norm_reward, [0.0] * N, saved["normalizer"][1])
        # Without set_state, and with several ranks, the games start anew.
        if args.resume and WORLD == 1 and saved["envs"] and hasattr(envs, "set_state"):
            envs.set_state(saved["envs"])
            obs, over, episodes = saved["obs"].numpy(), saved["over"].numpy(), Episodes(*saved["episodes"])
            normalizer = RewardNormalizer(args.norm_reward, *saved["normalizer"])
        if args.resume and WORLD == 1:
            set_rng_state(saved["rng"], device)
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

    def state():  # all that the next iteration depends on
        now = dict(own_envs=own, step=step, kl_coef=kl_coef, agent=agent.state_dict(), optimizer=optimizer.state_dict())
        now |= dict(obs=torch.from_numpy(obs), over=torch.from_numpy(over), rng=get_rng_state(device))
        now |= dict(episodes=(N, episodes.returns.tolist(), episodes.lengths.tolist()))
        now["normalizer"] = [x.tolist() for x in normalizer.state]
        return copy.deepcopy(now | dict(envs=envs.get_state() if WORLD == 1 and hasattr(envs, "get_state") else None))

    # Row t = (obs_t, a_t, pi(.|obs_t), V(obs_t), r_{t+1}, terminated_{t+1}, done_{t+1}, valid_t). With next-step
    # autoreset the row after an end is no transition, its action is ignored: valid_t = not done_t masks the losses.
    observations = torch.zeros(T, N, *obs_shape, dtype=torch.uint8, device=device)
    actions = torch.zeros(T, N, dtype=torch.int64, device=device)
    all_logits, values = torch.zeros(T, N, A, device=device), torch.zeros(T + 1, N, device=device)
    rewards, terminated, done, valid = (torch.zeros(T, N) for _ in range(4))

    with Run(args, saved, agent, device, micro_batch) as run:
        while run.goes_on(step, state):
            # Rollout
            for t in range(T):
                observations[t] = torch.from_numpy(obs)  # the one copy to the device
                valid[t] = torch.from_numpy(is_valid := ~over | same_step)
                all_logits[t], values[t] = act(observations[t])
                actions[t] = sample(all_logits[t])
                action = actions[t].cpu().numpy()
                run.lap("policy")
                obs, reward, ended, cut, info = envs.step(action)
                run.games += episodes.step(*score(reward, ended, cut, info), is_valid)
                over = ended | cut
                reward = shaped(reward) if args.shape_reward else reward
                reward = normalizer(reward, over, is_valid) if args.norm_reward else reward
                rewards[t], terminated[t], done[t] = map(torch.from_numpy, (np.float32(reward), ended, over))
                for i in np.flatnonzero(cut & ~ended & same_step):  # obs is the next game's: bootstrap here
                    rewards[t, i] += args.gamma * act(info["final_obs"][i][None])[1].item()
                    terminated[t, i] = 1
                run.lap("env", N * WORLD / 2)
            values[T] = act(obs)[1]

            # Targets
            baseline, mask = values.cpu(), valid.bool()
            advantages = gae(rewards, baseline, terminated, done, args.gamma, args.gae_lambda)
            targets = advantages + baseline[:T]
            unexplained, variance = advantages[mask].var().item(), targets[mask].var().item()
            if args.norm_adv == "rollout":
                advantages = standardize(advantages, valid)
            # Rows, in the order in which ppo_terms takes them
            batch = (observations, actions, advantages, targets, all_logits, values[:T], valid)
            batch = [x.to(device).flatten(0, 1) for x in batch]
            run.lap("policy")

            # Update: one permutation, cut into minibatches once, their order drawn anew each epoch
            lr, ent_coef = schedule(step, args.lr), schedule(step, args.ent_coef)
            optimizer.param_groups[0]["lr"] = lr
            stats = torch.zeros(args.update_epochs, num_minibatches, len(TERMS) + 1, device=device)
            for epoch in range(args.update_epochs):
                if epoch == 0 or args.reshuffle:
                    minibatches = torch.randperm(T * N, device=device).split(args.minibatch_size)
                for m in torch.randperm(num_minibatches).tolist():
                    minibatch = [x[minibatches[m]] for x in batch]
                    count = reduced(minibatch[-1].sum()).clamp(min=1)
                    if args.norm_adv == "minibatch":
                        minibatch[2] = standardize(minibatch[2], minibatch[-1])
                    if args.augment:
                        minibatch[0] = augment(minibatch[0], args.augment, args.augment_prob)
                    optimizer.zero_grad()
                    for frames, *old, is_valid in zip(*(x.split(micro_batch) for x in minibatch), strict=True):
                        terms = ppo_terms(*forward(frames), *old, args.clip, args.vf_clip)
                        terms = torch.where(is_valid > 0, terms, 0).sum(1) / count  # a share of the minibatch's means
                        loss = terms[0] + args.vf_coef * terms[1] - ent_coef * terms[2] + kl_coef * terms[3]
                        loss.backward()
                        stats[epoch, m, :-1] += terms.detach()
                    reduce_gradients(agent.parameters())
                    stats[epoch, m, -1] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm or np.inf)
                    optimizer.step()
                    run.lap("learn", args.batch_size / 2 / args.update_epochs / num_minibatches)
            stats[..., :-1] = reduced(stats[..., :-1])
            metrics = dict(zip((*TERMS, "train/grad_norm"), stats.mean((0, 1)).tolist(), strict=True))
            for name, mean in metrics.items():
                if not np.isfinite(mean):
                    raise FloatingPointError(f"{name} is {mean} in the iteration after step {step:,}")
            metrics |= {"train/kl_coef": kl_coef, "train/lr": lr, "train/ent_coef": ent_coef}
            metrics["train/valid_frac"] = reduced(valid.mean()).item() / WORLD
            metrics["train/kl"] = stats[-1, :, TERMS.index("train/kl")].mean().item()  # of the last epoch, as in RLlib
            kl_coef = next_kl_coef(kl_coef, metrics["train/kl"], args.kl_target)
            step += args.batch_size
            metrics["train/explained_variance"] = 1 - unexplained / variance if variance > 0 else None
            run.lap("learn")
            if own and RANK == 0 and args.eval_every and step % args.eval_every < args.batch_size:
                for split, result in evaluate_splits(agent, args).items():
                    metrics[f"eval/return_{split}"] = result["mean"]
            metrics = run.log(step, metrics)
        if own and RANK == 0 and args.eval_episodes and run.completed:
            metrics["eval"] = evaluate_splits(agent, args, run.folder, checkpoint="checkpoint.pt", step=step)
    return metrics | dict(step=step, run=str(run.folder))


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
