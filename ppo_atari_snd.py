"""PPO with Self-supervised Network Distillation on Atari: Pechac et al. 2023, arXiv:2302.11563, in one file.

    python ppo_atari_snd.py --env-id MontezumaRevenge      # SND-V, 128M agent steps = 512M frames, as published

The bonus of Random Network Distillation, whose target learns too: SND-V by a contrastive loss, SND-STD by InfoNCE in
space and time, SND-VIC by VICReg; none = RND. Defaults are run 21 of michalnand's "cnd" series, the paper's SND-V and
its best whose settings survive. Formulas are theirs, the code is not. Results: README.md (no long run yet).
Departures: EnvPool emulates (next-step autoreset: the row of the ignored action is masked, its frame is not; a new game
fills the frame stack); a rollout's last row is learned from its return, theirs from zero; a game cut at the time limit
bootstraps from its last observation, theirs ends there; frame statistics are updated once a rollout, theirs every step;
rewards are signs, in the paper's code only positive ones; consecutive frames are never of two games; a frame drawn
twice counts as near; the critic's features are rectified, as in the cnd runs but not in the paper's code. A game's last
frame is learned too, from the masked row. What the sources leave open: v's pairs are drawn from the rollout; one size
of masked tiles is drawn a batch; STD's norms are of each row's logits, its deviation is over the features of a row, its
two classifiers start as the target's layers do. Effects not measured.
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

SCRIPT = "ppo_atari_snd"
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # under torchrun
CORES = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # for each process
ENV_THREADS = CORES  # by default
CHANNELS = 1  # of one frame
ROOM_BYTE = {"MontezumaRevenge": 3, "Pitfall": 1}  # where the console's RAM holds the number of the room
SND_NETS = {  # activation, then width, kernel, stride and padding of each convolution
    "elu4": ("elu", (16, 3, 2, 1), (32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 1, 1)),  # SND-V's
    "relu4": ("relu", (32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 2, 1), (128, 3, 1, 1)),  # SND-STD's and SND-VIC's
    "elu": ("elu", (32, 8, 4, 2), (64, 3, 2, 1), (64, 3, 1, 1)),  # RND's
}
TERMS = ("loss/policy", "loss/value", "loss/entropy", "train/approx_kl", "train/clip_frac")
# fmt: off
COLUMNS = (
    "step", "iteration", "episode/count", "episode/return", "episode/length", "episode/rooms", "episode/rooms_ever",
    *TERMS, "loss/predictor", "loss/target", "train/grad_norm", "train/explained_variance", "train/lr",
    "train/valid_frac", "int/reward_raw", "int/reward_norm", "int/return_std", "int/explained_variance", "int/spread",
    "target/feature_norm", "target/near", "target/far", "target/rank", "eval/return",
    "time/sps", "time/env_s", "time/policy_s", "time/bonus_s", "time/learn_s",
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
    env_threads: int = 0  # threads that step the environments; 0 = the core count
    compile: bool = False  # torch.compile the network; off until measured on a GPU
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16 = autocast; off until measured on a GPU
    micro_batch: int = 0  # rows computed at once: same gradient, less memory; 0 = 256 on a CPU, all on a GPU
    total_timesteps: int = 128_000_000  # agent steps, all envs together, floored to whole iterations
    checkpoint_every: float = 300  # seconds between checkpoints, at iteration starts; 0 = every iteration
    keep_checkpoints: int = 0  # also keep this many of the newest under their step, step_<step>.pt
    max_minutes: float = 0  # stop before the iteration that would pass this many minutes, warm-up included; 0 = never
    eval_episodes: int = 100  # games at the end, rounded up to the same number an env; 0 = none
    eval_every: int = 0  # agent steps between evaluations in training; 0 = none
    greedy: bool = False  # evaluate with argmax instead of sampled actions
    video: bool = False  # film the first game of the final evaluation: video/game.mp4
    track: bool = False  # log to Weights & Biases too (package wandb, set up by its WANDB_* variables)
    quiet: bool = False  # no progress bar and no line an iteration
    run_dir: str = "runs"  # folder of all runs
    # run
    run_name: str = ""  # folder of this run in it; "" = env-id__script__seed__time
    seed: int = 1  # weights, games, actions, pairs: equal CPU runs write equal metrics
    # environment
    env_id: str = "MontezumaRevenge"  # Atari game as EnvPool spells it, with or without -v5
    repeat_action_probability: float = 0.25  # sticky actions: chance that a raw frame repeats the last action
    frame_skip: int = 4  # raw frames an action; the last two are merged by maximum
    noop_max: int = 30  # most no-op frames at an episode's start; EnvPool needs one
    fire_reset: bool = False  # press FIRE at an episode's start
    episodic_life: bool = False  # a lost life ends the training episode (not the game)
    max_episode_steps: int = 4500  # agent steps after which a game is cut
    frame_size: Literal[84, 96] = 96  # pixels a side, grey
    stack: int = 4  # frames shown
    num_envs: int = 128  # parallel environments
    # optimisation
    num_steps: int = 128  # rollout length an env
    minibatch_size: int = 512  # rows in one SGD step
    minibatches: Literal["envs", "permuted", "drawn"] = "drawn"  # whole envs in order; shuffled rows; with replacement
    update_epochs: int = 4  # passes over a rollout
    lr: tuple[str, ...] = ("1e-4",)  # learning rate: one number, or step:rate knots in agent steps, linear between
    adam_eps: float = 1e-8  # Adam's epsilon
    max_grad_norm: float = 0.5  # clip the norm of the policy network's gradient; 0 = no clipping
    # algorithm
    gamma: float = 0.998  # discount of the game's rewards
    gamma_int: float = 0.99  # discount of intrinsic rewards
    gae_lambda: float = 0.95  # GAE's lambda, of both
    clip: float = 0.1  # clip range of the probability ratio
    vf_coef: float = 1  # weight of the value term, half the squared error of each head
    ent_coef: float = 0.001  # weight of the entropy bonus
    ext_coef: float = 2  # weight of the game's advantages; 0 = explore only, its value head is not learned either
    int_coef: float = 1  # weight of intrinsic advantages; 0 = plain PPO, likewise
    int_episodic: bool = True  # intrinsic returns end with the game
    bonus_on: Literal["next", "current"] = "current"  # whose frame's novelty rewards step t: o_{t+1}'s or o_t's
    int_clip: float = 1  # upper limit of the intrinsic reward; 0 = none
    eta: float = 0.5  # weight of the bonus: the intrinsic reward is eta times the mean squared error of the features
    target: Literal["v", "std", "vic", "none"] = "v"
    """what the target learns; none = nothing, as RND; std and vic: see README for their other flags"""
    motivation_passes: Literal["per-minibatch", "one"] = "per-minibatch"  # of target and predictor; one = paper's code
    pairs: int = 0  # in one step of the target, at least 2; 0 = minibatch-size / 8 with v, minibatch-size otherwise
    snd_augment: Literal["tiles", "pixelate"] = "tiles"  # of v's pairs: tiles and noise; the older set
    snd_net: Literal["elu4", "relu4", "elu"] = "elu4"  # of target and predictor: SND-V's, STD's and VIC's, RND's
    target_gain: float = 2**0.5  # of the target's orthogonal initial weights
    predictor_gain: float = 2**0.5  # of the predictor's
    snd_preprocess: Literal["std", "mean", "none"] = "std"  # (x - mean) / std clipped to 1, (x - mean) / 255, x / 255
    predictor_share: float = 0  # share of rows x features that train the predictor; 0 = min(1, 32 / all ranks' envs)
    predictor_sum: bool = False  # sum the predictor's squared errors (SND-STD) instead of their mean
    snd_features: int = 512  # outputs of target and predictor, width of the predictor's hidden layers
    entropy_bonus: bool = False  # a second bonus with a value head of its own: the spread of the game's recent features
    gamma_entropy: float = 0.99  # its discount
    entropy_eta: float = 0.5  # its weight before the limit of 1
    entropy_coef: float = 1  # weight of its advantages
    entropy_window: int = 128  # steps of a game that it looks back
    warmup_steps: int = 256  # steps an env of random play that start the observation statistics

    batch_size = property(lambda self: self.num_envs * self.num_steps * WORLD)  # of all ranks
    iterations = property(lambda self: self.total_timesteps // self.batch_size)

    def validate(self):
        """Raise UsageError for what would train nothing or train on NaN."""
        batch = self.batch_size // WORLD
        low = dict(num_envs=1, num_steps=1, update_epochs=1, minibatch_size=2, noop_max=1)
        low |= dict(frame_skip=1, stack=1, max_episode_steps=1, snd_features=2, warmup_steps=1, entropy_window=2)
        low |= dict(target_gain=1e-6, predictor_gain=1e-6)
        low |= dict(eval_episodes=int(bool(self.eval_every or self.evaluate)), total_timesteps=self.batch_size)
        high = dict(
            gamma=1,
            gamma_int=1,
            gamma_entropy=1,
            gae_lambda=1,
            minibatch_size=batch,
            seed=2**32 - 1,
            torch_threads=1024,
        )
        high |= dict(repeat_action_probability=1, predictor_share=1, noop_max=1000, frame_skip=100, stack=100)
        high |= dict(max_episode_steps=2**31 - 1, env_threads=1024)
        for name, value in vars(self).items():
            least, most = low.get(name, 0), high.get(name, 10**15)
            if isinstance(value, int | float) and not least <= value <= most:
                size = f" (an iteration is {batch * WORLD})" * (name in ("minibatch_size", "total_timesteps"))
                raise UsageError(f"--{name.replace('_', '-')} {value}: must be from {least} to {most}{size}")
        if self.minibatch_size % (self.num_steps if self.minibatches == "envs" else 1) or batch % self.minibatch_size:
            allowed = ", ".join(str(n * self.num_steps) for n in range(1, self.num_envs + 1) if self.num_envs % n == 0)
            rule = f"rows of whole environments: {allowed}" if self.minibatches == "envs" else f"a divisor of {batch}"
            raise UsageError(f"--minibatch-size {self.minibatch_size}: must be {rule}")
        if self.resume is not None and self.evaluate is not None:
            raise UsageError("--resume, --evaluate: one of the two")
        schedule(0, self.lr, "--lr")


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


def convolutions(channels: int, net, gain: float = 2**0.5):
    """Of net = (activation, (width, kernel, stride, padding), ...): each convolution with the activation; flattened."""
    layers = []
    for width, *shape in net[1:]:
        activation = dict(relu=nn.ReLU(), elu=nn.ELU(), leaky=nn.LeakyReLU(0.2))[net[0]]
        layers += [layer(nn.Conv2d(channels, width, *shape), gain), activation]
        channels = width
    return nn.Sequential(*layers, nn.Flatten())


class Agent(nn.Module):
    """michalnand's policy C: uint8 (B, C, S, S) -> logits (B, A), values (B, heads): the game's, the intrinsic ones."""

    def __init__(self, obs_shape, num_actions: int, heads: int = 2):
        super().__init__()
        self.trunk = convolutions(obs_shape[0], ("relu", (32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 2, 1), (128, 3, 1, 1)))
        size = self.trunk(torch.zeros(1, *obs_shape)).shape[1]
        self.trunk.extend([layer(nn.Linear(size, 512)), nn.ReLU()])
        self.hidden_policy, self.hidden_value = layer(nn.Linear(512, 512), 0.01), layer(nn.Linear(512, 512), 0.1)
        self.policy, self.value = layer(nn.Linear(512, num_actions), 0.01), layer(nn.Linear(512, heads), 0.01)
        self.to(memory_format=torch.channels_last)

    def forward(self, obs):
        x = self.trunk(obs.contiguous(memory_format=torch.channels_last).float().div_(255))
        policy, value = F.relu(self.hidden_policy(x)), F.relu(self.hidden_value(x))
        with torch.autocast(x.device.type, enabled=False):
            return self.policy(policy.float()), self.value(value.float())


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


class SND(nn.Module):
    """A target network that learns, its predictor, and the running statistics of frames."""

    def __init__(self, size: int, args: Args):
        super().__init__()
        self.kind, self.augment, self.preprocessing = args.target, args.snd_augment, args.snd_preprocess
        self.frames, features, net = RunningMoments((1, size, size)), args.snd_features, SND_NETS[args.snd_net]
        self.target, self.predictor = (convolutions(1, net, gain) for gain in (args.target_gain, args.predictor_gain))
        width = self.target(torch.zeros(1, 1, size, size)).shape[1]
        self.target.append(layer(nn.Linear(width, features), args.target_gain))
        for inputs in (width, features):
            self.predictor.extend([layer(nn.Linear(inputs, features), args.predictor_gain), nn.ELU()])
        self.predictor.append(layer(nn.Linear(features, features), args.predictor_gain))
        if self.kind == "std":  # bilinear classifiers: of the whole next frame, of its patches, against the patches
            self.whole, self.local = (layer(nn.Linear(x, net[3][0]), args.target_gain) for x in (features, net[3][0]))
        if args.entropy_bonus:  # of each env's game: its last features, newest last, and how many they are
            self.register_buffer("recent", torch.zeros(args.entropy_window, args.num_envs, features))
            self.register_buffer("age", torch.zeros(args.num_envs))
        self.to(memory_format=torch.channels_last)

    def preprocess(self, frames):
        """uint8 (B, 1, S, S) -> float32, under the statistics so far."""
        x = frames.float() - (0 if self.preprocessing == "none" else self.frames.mean().float())
        return (x / self.frames.std().float()).clamp(-1, 1) if self.preprocessing == "std" else x / 255

    @torch.no_grad()
    def bonus(self, frames):
        """Prediction errors, uint8 (B, 1, S, S) -> (B,): the mean over features."""
        x = self.preprocess(frames)
        return (self.predictor(x) - self.target(x)).square().mean(1)

    @torch.no_grad()
    def spread(self, frames, over):
        """Deviation over time of the game's recent target features, mean over features: (T, N, 1, S, S) -> (T, N).

        over: (T, N), 1 in a game's last row. SND + entropy in michalnand's version of 26 February 2022.
        """
        rewards, places = [], torch.arange(len(self.recent), device=frames.device)[:, None]
        for row, last in zip(frames, over, strict=True):
            self.recent = torch.cat([self.recent[1:], self.target(self.preprocess(row)).float()[None]])
            self.age = (self.age + 1).clamp(max=len(self.recent))
            kept = (places >= len(places) - self.age)[..., None]
            mean = (self.recent * kept).sum(0) / self.age[:, None]
            rewards.append((((self.recent - mean) * kept).square().sum(0) / self.age[:, None]).sqrt().mean(1))
            self.age = self.age * (1 - last)
        return torch.stack(rewards)

    def target_loss(self, frames, others, far):
        """Of pairs of frames, uint8 (B, 1, S, S): the same or another one (far, (B,) bool) with v, else consecutive."""
        x, y = self.preprocess(frames), self.preprocess(others)
        if self.kind == "v":
            x, y = distort(x, self.augment), distort(y, self.augment)
        x, y = self.target[:6](x), self.target[:6](y)  # after the third convolution
        a, b = self.target[6:](x), self.target[6:](y)
        parts = (a, b, far) if self.kind == "v" else (a, b)
        if self.kind == "std":
            x, y = x.flatten(2).permute(2, 0, 1), y.flatten(2).permute(2, 0, 1)  # (patches, B, depth)
            parts = (x, self.whole(b), self.local(y), a)
        with torch.autocast(x.device.type, enabled=False):
            return dict(v=contrastive, std=infonce, vic=vicreg)[self.kind](*(part.float() for part in parts))


def distort(x, kind: str):
    """Standardised frames (B, 1, S, S), each with random draws of its own.

    tiles (the cnd runs): half of them lose a tenth of their tiles, half get noise of up to 0.2; pixelate (the older
    set): half are seen at half the resolution, a quarter at a quarter, an eighth lose a tenth of their pixels, all get
    noise.
    """
    size, noisy = x.shape[-1], 1.0

    def some(share, *shape):
        return torch.rand(len(x), 1, *(shape or (1, 1)), device=x.device) < share

    if kind == "tiles":
        tile, noisy = random.choice((1, 2, 4, 8, 12, 16)), 0.5
        hidden = some(0.1, -(-size // tile), -(-size // tile)).repeat_interleave(tile, 2).repeat_interleave(tile, 3)
        x = x.masked_fill(hidden[..., :size, :size] & some(0.5), 0)
    else:
        for factor, share in ((2, 0.5), (4, 0.25)):
            coarse = F.interpolate(F.avg_pool2d(x, factor, ceil_mode=True), scale_factor=factor)[..., :size, :size]
            x = torch.where(some(share), coarse, x)
        x = x.masked_fill(some(0.1, size, size) & some(0.125), 0)
    return x + (torch.rand_like(x) * 0.4 - 0.2) * some(noisy)


def contrastive(a, b, far):
    """SND-V's loss of features, (B, D) each: mean squared distances are to be `far`, (B,), 0 or 1.

    The second term keeps the features small: it counts from a sum of their mean squares of 200 on.
    """
    distance = (a - b).square().mean(1)
    return (far - distance).square().mean() + F.relu(a.square().mean() + b.square().mean() - 200)


def vicreg(a, b):
    """SND-VIC's loss of features, (B, D) each: invariance, variance and covariance (Bardes et al. 2022, eq. 1 to 6)."""
    loss = F.mse_loss(a, b)
    for z in (a, b):
        covariance = torch.cov(z.T)
        loss = loss + F.relu(1 - (covariance.diagonal() + 1e-4).sqrt()).mean()
        loss = loss + (covariance.square().sum() - covariance.diagonal().square().sum()) / len(covariance) / 25
    return loss


def infonce(patches, whole, local, features):
    """SND-STD's loss: which frame of the batch came before? (Anand et al. 2019, ST-DIM, with two regularisers.)

    patches: (P, B, K), maps of the frames; whole: (B, K), of the next frames; local: (P, B, K), of their patches;
    features: (B, D) of the frames. 1e-4 times the mean norm of the logits of a row keeps them small, minus 1e-4 times
    the deviation of a row's features keeps those apart.
    """
    loss, answers = 0, torch.arange(len(features), device=features.device).expand(len(patches), -1).flatten()
    for question in (whole, local):
        logits = (question @ patches.mT).flatten(0, 1)  # (P x B, B)
        loss = loss + F.cross_entropy(logits, answers) + 1e-4 * logits.norm(dim=1).mean()
    return loss - 1e-4 * features.std(1).mean()


def effective_rank(features) -> float:
    """exp of the entropy of the normalised singular values of features, (B, D), centred (Roy and Vetterli 2007)."""
    share = torch.linalg.svdvals(features - features.mean(0))
    share = share / share.sum().clamp(min=1e-12)
    return torch.special.entr(share).sum().exp().item()


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


def ppo_terms(logits, values, action, advantage, targets, old_logp, heads, clip: float):
    """The five TERMS of each row, (5, B); logits are (B, A), values and targets (B, 2), heads (2,), the rest (B,).

    Negated clipped surrogate (PPO, eq. 7), half the squared errors of the value heads (times `heads`), entropy, the
    sampled estimate r - 1 - log r of KL(old || new), and whether the ratio r is outside the clip range.
    """
    logp = logits.log_softmax(-1)
    log_ratio = logp.gather(-1, action[:, None]).squeeze(-1) - old_logp
    ratio = log_ratio.exp()
    policy = -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    value_error, entropy = 0.5 * ((values - targets).square() * heads).sum(-1), -(logp.exp() * logp).sum(-1)
    return torch.stack([policy, value_error, entropy, ratio - 1 - log_ratio, ((ratio - 1).abs() > clip).float()])


def order(kind: str, T: int, N: int, epochs: int):
    """Rows of a rollout, indices into (T, N) flattened, in the order of their updates: (epochs, T * N).

    envs: whole environments, the same order in every epoch; permuted: one permutation for all epochs; drawn: with
    replacement.
    """
    if kind == "drawn":
        return torch.randint(T * N, (epochs, T * N))
    return (torch.arange(T * N).view(T, N).T.flatten() if kind == "envs" else torch.randperm(T * N)).expand(epochs, -1)


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


def warm_up(envs, frames: RunningMoments, args: Args, episodes, seen, run):
    """Random play until the frame statistics have seen args.warmup_steps of every env -> last observation, ends."""
    over, same_step = np.zeros(args.num_envs, bool), envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    for t in range(args.warmup_steps):
        actions = torch.randint(envs.single_action_space.n, (args.num_envs,)).numpy()
        obs, reward, ended, cut, info = envs.step(actions)
        episodes.step(*score(reward, ended, cut, info), ~over | same_step)  # their games go on in the first rollout
        seen |= info["rooms"].any(0) if "rooms" in info else False
        over = ended | cut
        frames.update(torch.as_tensor(obs[:, -1:], device=frames.sums.device))
        if (t + 1) % -(-args.warmup_steps // 10) == 0:
            note = f"warm-up of the observation statistics: {t + 1:,} of {args.warmup_steps:,} steps an env"
            run.say(note) if run.bar.disable else run.bar.write(note, file=sys.stderr)
    run.mark = time.perf_counter()  # it belongs to no iteration
    run.bar.unpause()
    return obs, over


def train(args: Args, envs: gym.vector.VectorEnv | None = None) -> dict:
    """Train (with args.evaluate: only play); returns the last metrics, "run" (the folder) and "eval" (the splits).

    envs: any VectorEnv with uint8 (C, S, S) observations, newest frame last, discrete actions and a declared autoreset
    mode, next-step or same-step; it is neither seeded, evaluated nor closed here. None = EnvPool as args say. With
    args.resume, the other args must be those of the run: Args(**torch.load(path)["args"]). Raises UsageError, OSError
    (disk), FloatingPointError (a loss that is not finite), KeyboardInterrupt and SystemExit (checkpoint written).
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
    envs = make_envs(args, stream, 1 if args.evaluate else args.num_envs) if own else envs
    T, N, obs_shape, A = args.num_steps, args.num_envs, envs.single_observation_space.shape, envs.single_action_space.n
    autoreset = envs.metadata.get("autoreset_mode")
    if not args.evaluate and envs.num_envs != N or autoreset not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        raise UsageError(f"--num-envs {N}: given {envs.num_envs} envs with autoreset {autoreset}")
    if len(obs_shape) != 3 or obs_shape[1] != obs_shape[2] or obs_shape[1] < 36:
        raise UsageError(f"observations of shape {obs_shape}: must be (frames, S, S) with S at least 36")
    same_step = autoreset == AutoresetMode.SAME_STEP
    coefs = torch.tensor([args.ext_coef, args.int_coef] + [args.entropy_coef] * args.entropy_bonus, dtype=torch.float32)
    agent, snd = Agent(obs_shape, A, len(coefs)).to(device), SND(obs_shape[-1], args).to(device)
    network = torch.compile(agent) if args.compile else agent
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")
    forward = autocast(lambda obs: network(torch.as_tensor(obs, device=device)))  # -> logits (B, A), values (B, 2)
    act = torch.no_grad()(forward)
    weights = [*agent.parameters(), *snd.parameters()]
    optimizer = torch.optim.Adam(weights, lr=0.0, eps=args.adam_eps, fused=True)
    micro_batch = args.micro_batch or (256 if device.type == "cpu" else args.minibatch_size)
    num_minibatches, share = T * N // args.minibatch_size, args.predictor_share or min(1, 32 / N / WORLD)
    pairs = max(args.pairs or args.minibatch_size // (8 if args.target == "v" else 1), 2)

    step, metrics, episodes, over, (obs, _) = 0, {}, Episodes(N), np.zeros(N, bool), envs.reset()
    seen = np.zeros(256, bool)  # rooms, ever
    try:
        if saved:
            step, seen = saved["step"], saved["seen"].numpy()
            agent.load_state_dict(saved["agent"])
            snd.load_state_dict(saved["snd"])
            optimizer.load_state_dict(saved["optimizer"])
        # Without set_state, and with several ranks, the games start anew.
        if args.resume and WORLD == 1 and saved["envs"] and hasattr(envs, "set_state"):
            envs.set_state(saved["envs"])
            obs, over, episodes = saved["obs"].numpy(), saved["over"].numpy(), Episodes(*saved["episodes"])
        if args.resume and WORLD == 1:
            set_rng_state(saved["rng"], device)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{saved['path']}: damaged or not of these args: {str(error).splitlines()[0]}") from None
    for x in nn.ModuleList([agent, snd]).state_dict().values():  # all ranks begin as rank 0
        x.copy_(reduced(x if RANK == 0 else torch.zeros_like(x)))
    if reduced(torch.tensor(step)) != step * WORLD:
        raise UsageError("--resume: the ranks read different checkpoints")
    if args.evaluate and RANK:
        return {}
    if args.evaluate:
        return dict(eval=evaluate_splits(agent, args, saved["path"].parent, checkpoint=saved["path"].name, step=step))

    def state():  # all that the next iteration depends on
        now = dict(own_envs=own, step=step, agent=agent.state_dict(), snd=snd.state_dict(), seen=torch.from_numpy(seen))
        now |= dict(obs=torch.from_numpy(obs), over=torch.from_numpy(over), optimizer=optimizer.state_dict())
        now |= dict(episodes=(N, episodes.returns.tolist(), episodes.lengths.tolist()), rng=get_rng_state(device))
        return copy.deepcopy(now | dict(envs=envs.get_state() if WORLD == 1 and hasattr(envs, "get_state") else None))

    # Row t = (obs_t, a_t, log pi(a_t|obs_t), V(obs_t), r_{t+1}, terminated_{t+1}, done_{t+1}, valid_t). With next-step
    # autoreset the row after an end is no transition, its action is ignored: valid_t = not done_t masks policy and
    # value losses. Predictor and statistics use its frame too: the game's last one, or with --bonus-on next the new
    # game's first.
    observations = torch.zeros(T + 1, N, *obs_shape, dtype=torch.uint8, device=device)
    actions = torch.zeros(T, N, dtype=torch.int64, device=device)
    logps, values = torch.zeros(T, N, device=device), torch.zeros(T + 1, N, len(coefs), device=device)
    rewards, terminated, done, valid = (torch.zeros(T, N) for _ in range(4))
    heads = (coefs > 0).float().to(device)  # the learned ones

    with Run(args, saved, nn.ModuleList([agent, snd]), device, micro_batch) as run:
        while run.goes_on(step, state):
            if step == 0:
                obs, over = warm_up(envs, snd.frames, args, episodes, seen, run)
            # Rollout
            cut_int = torch.zeros(T, N)  # added to the bonus by a truncation: --int-episodic, same-step envs
            for t in range(T):
                observations[t] = torch.from_numpy(obs)  # the one copy to the device
                valid[t] = torch.from_numpy(is_valid := ~over | same_step)
                logits, values[t] = act(observations[t])
                actions[t] = sample(logits)
                logps[t] = logits.log_softmax(-1).gather(-1, actions[t][:, None]).squeeze(-1)
                action = actions[t].cpu().numpy()
                run.lap("policy")
                obs, reward, ended, cut, info = envs.step(action)
                run.games += episodes.step(*score(reward, ended, cut, info), is_valid)
                seen |= info["rooms"].any(0) if "rooms" in info else False
                over = ended | cut
                rewards[t], terminated[t], done[t] = map(torch.from_numpy, (np.float32(reward), ended, over))
                for i in np.flatnonzero(cut & ~ended & same_step):  # obs is the next game's: bootstrap here
                    value = act(info["final_obs"][i][None])[1][0].tolist()
                    rewards[t, i] += args.gamma * value[0]
                    terminated[t, i], cut_int[t, i] = 1, args.gamma_int * value[1] * args.int_episodic
                run.lap("env", N * WORLD / 2)
            observations[T] = torch.from_numpy(obs)
            values[T] = act(observations[T])[1]
            run.lap("policy")

            # Bonus under the statistics so far, then new statistics
            newest = observations[:, :, -1:].flatten(0, 1)  # no copy; row i is followed by row i + N
            frames = newest[N:] if args.bonus_on == "next" else newest[:-N]
            with autocast:
                raw = torch.cat([snd.bonus(piece).float() for piece in frames.split(max(micro_batch, N))]).view(T, N)
            for rows in frames.split(N):
                snd.frames.update(rows)
            bonus = (args.eta * raw).clamp(max=args.int_clip or np.inf).cpu()
            over_after = done if same_step else 1 - valid  # rows after which another game is shown
            if args.entropy_bonus:
                spread = snd.spread(newest[:-N].view(T, N, *newest.shape[1:]), over_after.to(device)).cpu()
            run.lap("bonus")

            # Targets
            baseline, mask, zeros = values.cpu().unbind(-1), valid.bool(), torch.zeros(T, N)
            ends = (terminated, done) if args.int_episodic else (zeros, zeros)
            streams = [(rewards, terminated, done, args.gamma), (bonus + cut_int, *ends, args.gamma_int)]
            if args.entropy_bonus:
                streams.append(((args.entropy_eta * spread).clamp(max=1), *ends, args.gamma_entropy))
            each = zip(streams, baseline, strict=True)
            both = torch.stack([gae(reward, value, *rest, args.gae_lambda) for (reward, *rest), value in each], -1)
            advantages, targets = both @ coefs, both + torch.stack(baseline, -1)[:T]
            joined = (over_after == 0).flatten()  # rows whose next frame is of the same game
            unexplained, variance = both[mask].var(0).tolist(), targets[mask].var(0).tolist()
            # Rows, in the order in which ppo_terms takes them
            batch = (observations[:T], actions, advantages, targets, logps, valid)
            batch = [x.to(device).flatten(0, 1) for x in batch]
            run.lap("policy")

            # Update; row numbers stay on the CPU, where nothing waits for them
            lr = optimizer.param_groups[0]["lr"] = schedule(step, args.lr)
            stats = torch.zeros(args.update_epochs, num_minibatches, len(TERMS) + 3, device=device)
            for epoch, epoch_rows in enumerate(order(args.minibatches, T, N, args.update_epochs)):
                for m, minibatch in enumerate(epoch_rows.split(args.minibatch_size)):
                    count = reduced(batch[-1][minibatch.to(device, non_blocking=True)].sum()).clamp(min=1)
                    optimizer.zero_grad()
                    for i in minibatch.split(micro_batch):
                        rows = i.to(device, non_blocking=True)
                        observed, *old, is_valid = (x[rows] for x in batch)
                        terms = ppo_terms(*forward(observed), *old, heads, args.clip)
                        terms = torch.where(is_valid > 0, terms, 0).sum(1) / count  # a share of the minibatch's means
                        (terms[0] + args.vf_coef * terms[1] - args.ent_coef * terms[2]).backward()
                        stats[epoch, m, :-3] += terms.detach()
                    # Target and predictor learn from the same rows, or in the first epoch from the rollout in its order
                    if args.motivation_passes == "one":
                        minibatch = torch.arange(m * args.minibatch_size, (m + 1) * args.minibatch_size)
                    if args.motivation_passes == "per-minibatch" or epoch == 0:
                        kept = torch.rand(len(minibatch), args.snd_features, device=device) < share
                        total = 1 if args.predictor_sum else reduced(kept.sum()).clamp(min=1)
                        for i, kept_i in zip(minibatch.split(micro_batch), kept.split(micro_batch), strict=True):
                            rows = i.to(device, non_blocking=True)
                            with autocast:
                                x = snd.preprocess(frames[rows])
                                with torch.no_grad():
                                    features = snd.target(x).float()
                                error = (snd.predictor(x).float() - features).square()
                            predictor = (error * kept_i).sum() / total
                            predictor.backward()
                            stats[epoch, m, -3] += predictor.detach()
                        # The target's pairs are drawn from the whole rollout (v), else these rows and the next ones
                        first = minibatch[joined[minibatch]][:pairs]
                        second = first + N
                        if args.target == "v":
                            first, other = torch.randint(T * N, (2, pairs))
                            second = torch.where(torch.rand(pairs) < 0.5, first, other)
                        if args.target != "none" and len(first) > 1:
                            i, j = first.to(device, non_blocking=True), second.to(device, non_blocking=True)
                            target = autocast(snd.target_loss)(newest[i], newest[j], i != j) / WORLD
                            target.backward()
                            stats[epoch, m, -2] = target.detach()
                    reduce_gradients(weights)
                    stats[epoch, m, -1] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm or np.inf)
                    optimizer.step()
                    run.lap("learn", args.batch_size / 2 / args.update_epochs / num_minibatches)
            stats[:, :, -3:-1] *= args.update_epochs if args.motivation_passes == "one" else 1  # the others hold zeros
            stats[..., :-1] = reduced(stats[..., :-1])
            names = (*TERMS, "loss/predictor", "loss/target", "train/grad_norm")
            metrics = dict(zip(names, stats.mean((0, 1)).tolist(), strict=True))
            rows = joined.nonzero()[:, 0]  # the target's features of up to 512 frames, evenly spaced
            i = rows[torch.linspace(0, len(rows) - 1, min(len(rows), 512)).long()].to(device)
            with torch.no_grad():
                now, then = (snd.target(snd.preprocess(newest[rows])) for rows in (i, i + N))
            if len(i):
                metrics["target/near"] = (now - then).square().mean().item()
                metrics["target/far"] = (now - now.roll(len(i) // 2, 0)).square().mean().item()
                metrics["target/feature_norm"] = now.norm(dim=1).mean().item()
            for name, mean in metrics.items():
                if not np.isfinite(mean):
                    raise FloatingPointError(f"{name} is {mean} in the iteration after step {step:,}")
            step += args.batch_size
            metrics |= {
                "train/lr": lr,
                "train/valid_frac": reduced(valid.mean()).item() / WORLD,
                "int/reward_raw": raw.mean().item(),
            }
            metrics |= {"int/reward_norm": bonus.mean().item(), "int/return_std": variance[1] ** 0.5}
            metrics["target/rank"] = effective_rank(now) if len(i) else None
            metrics["int/spread"] = spread.mean().item() if args.entropy_bonus else None
            metrics["loss/target"] = None if args.target == "none" else metrics["loss/target"]
            for name, left, whole in zip(("train", "int"), unexplained, variance, strict=False):
                metrics[f"{name}/explained_variance"] = 1 - left / whole if whole > 0 else None
            seen = reduced(torch.from_numpy(seen).int()).numpy() > 0
            metrics["episode/rooms_ever"] = int(seen.sum()) if seen.any() else None
            run.lap("learn")
            if own and RANK == 0 and args.eval_every and step % args.eval_every < args.batch_size:
                metrics["eval/return"] = evaluate_splits(agent, args)["game"]["mean"]
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
