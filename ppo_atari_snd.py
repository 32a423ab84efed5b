r"""PPO with Self-supervised Network Distillation (SND) on Atari: Pechac et al. 2023.

    python ppo_atari_snd.py --env-id MontezumaRevenge  # SND-V, 128M agent steps = 512M frames
    python ppo_atari_snd.py --resume runs/NAME         # go on with a stopped run

    PAPER="--snd-preprocess none --motivation-passes one --minibatches permuted --noop-max 1 \
        --warmup-steps 0"
    python ppo_atari_snd.py $PAPER                     # SND-V by the paper's code; -STD, -VIC:
    python ppo_atari_snd.py $PAPER --target std --snd-net relu4 --target-gain 0.5 \
        --predictor-gain 0.5 --predictor-share 1 --predictor-sum --eta 1
    python ppo_atari_snd.py $PAPER --target vic --snd-net relu4 --target-gain 0.5 \
        --predictor-share 1 --eta 0.25

SND: arXiv:2302.11563. RND: Burda et al. 2018, arXiv:1810.12894. ST-DIM: Anand et al. 2019,
arXiv:1906.08226. VICReg: Bardes et al. 2022, arXiv:2105.04906. PPO: arXiv:1707.06347.

A frame is novel, and pays a bonus, where a predictor fails to predict a target network's features.
RND's random target, says the paper, gives similar frames similar features: its bonus is soon small.
Here the target learns to tell frames apart: by a contrastive loss of pairs from the whole rollout
(SND-V), by InfoNCE in space and time (SND-STD) or by VICReg (SND-VIC). Defaults: SND-V as run
cnd_21 of github.com/michalnand/reinforcement_learning sets it and his library of 2023 computes it.
$PAPER: the settings of the paper's code.

Measured, one seed each. benchmark/variants/snd_breakout.py (another network, other pairs; bf16) on
Breakout without its reward, 1M steps: in training 15.2 (michalnand's one run 17.9), evaluated 18.0
+- 0.7 (random play 1.7). This file's bonus of unseen frames over that of seen ones: SND-V 69 (a
random target 80); with $PAPER's frames SND-VIC 72, SND-STD 1.2 (a random target 280): SND-STD's
hardly told new frames from old ones.

Unlike most PPO: two value heads with a discount each; advantages are not normalised; the bonus is
limited, not normalised, and its returns end with the game; the bonus of step t is for o_t (RND:
o_{t+1}), so it reaches the action that led there through the return only; rows are drawn with
replacement.

Departures from michalnand's and the paper's code ("theirs" is both), effects not measured:
- EnvPool has another grey and resizing, plays a no-op with $PAPER too, and fills a new game's frame
  stack with its first frame; rewards are signs (theirs: positive ones only, his since 2023);
- frame statistics are updated once a rollout (theirs: every step), their deviation has no floor
  (his: 8 grey levels); a rollout's last row bootstraps from V of the next observation (theirs:
  advantage 0), a game cut by time from its last (theirs ends);
- a game's last frame is learned too, from the row whose action is ignored; consecutive frames are
  never of two games; a random pair that is one frame counts as near;
- the critic's features are rectified (not in the paper's code).
SND-STD asks which frame comes next, as the paper's code does (ST-DIM: which one came before).

Left out on purpose: films (benchmark/evaluate.py), emulator states in checkpoints; in
benchmark/variants: the paper's Procgen games, michalnand's older network and augmentation for
Breakout.
"""

import contextlib
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


@dataclass
class Args:
    # run
    env_id: str = "MontezumaRevenge"  # Atari game as EnvPool spells it, with or without -v5
    total_timesteps: int = 128_000_000  # agent steps of all environments, 4 frames each
    seed: int = 1  # equal runs on a CPU write equal metrics, but for time/*
    run_dir: str = "runs"  # folder of all runs
    run_name: str = ""  # folder of this run in it; "" = env-id__script__seed__time
    resume: str = ""  # run folder to go on in; its flags apply unless given here
    device: str = "auto"  # auto (cuda if there is one), cpu, cuda, cuda:1
    torch_threads: int = 0  # CPU threads of PyTorch; 0 = the core count on a CPU, 1 on a GPU
    env_threads: int = 0  # threads that step the environments; 0 = the core count
    compile: bool = False  # torch.compile the network; off until measured on a GPU
    precision: Literal["fp32", "bf16"] = "fp32"  # fp32: TF32 on a GPU; bf16: slow on older CPUs
    micro_batch: int = 0  # rows at once (target's loss: all); 0 = 256 on a CPU, all on a GPU
    checkpoint_every: float = 300  # seconds between checkpoints
    eval_episodes: int = 100  # games per evaluation; one evaluation is at the end; 0 = none
    eval_every: int = 0  # agent steps between evaluations in training; 0 = none
    quiet: bool = False  # only results, no progress
    # environment
    repeat_action_probability: float = 0.25  # a raw frame's chance to repeat the last action
    noop_max: int = 30  # 1 to this many no-ops at an episode's start, one less with FIRE
    fire_reset: bool = False  # press FIRE at an episode's start
    episodic_life: bool = False  # a lost life ends the training episode (not the game)
    max_episode_steps: int = 4500  # agent steps after which a game is cut
    frame_size: Literal[84, 96] = 96  # pixels a side, grey
    stack: int = 4  # frames shown
    num_envs: int = 128  # parallel environments, of each process under torchrun
    # optimisation
    num_steps: int = 128  # rollout length per environment
    minibatch_size: int = 512  # rows per SGD step
    minibatches: Literal["drawn", "permuted"] = "drawn"
    """rows of a minibatch: drawn with replacement, or of one permutation for all epochs"""
    update_epochs: int = 4  # uses of a row, with "drawn" on average
    lr: tuple[float, ...] = (1e-4,)
    """learning rate: one number, or step, rate, step, rate, ...: linear between, constant beyond"""
    adam_eps: float = 1e-8  # Adam's epsilon
    max_grad_norm: float = 0.5  # clip the norm of the policy network's gradient; 0 = no clipping
    # algorithm
    gamma: float = 0.998  # discount of the game's rewards
    gamma_int: float = 0.99  # discount of the bonus
    gae_lambda: float = 0.95  # GAE's lambda, of both
    clip: float = 0.1  # clip range of the probability ratio
    vf_coef: float = 1  # weight of the value term, half the squared error of each head
    ent_coef: tuple[float, ...] = (0.001,)  # weight of the entropy bonus: one number, or as --lr
    ext_coef: float = 2  # weight of the game's advantages; 0 = explore only
    int_coef: float = 1  # weight of the bonus' advantages; 0 = PPO without a bonus
    eta: float = 0.5  # bonus = eta x the mean squared error of the features, limited to --int-clip
    int_clip: float = 1  # 0 = no limit
    target: Literal["v", "std", "vic"] = "v"  # the target's loss: SND-V, SND-STD or SND-VIC
    pairs: int = 64  # frame pairs a step of target v; std, vic: one per valid row of the minibatch
    snd_preprocess: Literal["std", "none"] = "std"  # (x - mean) / std clipped to 1, or x / 255
    motivation_passes: Literal["per-minibatch", "one"] = "per-minibatch"
    """target and predictor learn after the policy, in its minibatches or in one ordered pass"""
    predictor_share: float = 0  # share of its (row, feature) errors used; 0 = min(1, 32 / all envs)
    predictor_sum: bool = False  # sum the predictor's squared errors (SND-STD), not their mean
    warmup_steps: int = 256  # random steps per environment that start the frame statistics
    # network
    snd_net: Literal["elu4", "relu4"] = "elu4"  # target and predictor, see CONVOLUTIONS
    snd_features: int = 512  # outputs of target and predictor, width of the predictor's layers
    target_gain: float = 2**0.5  # of the target's orthogonal weights
    predictor_gain: float = 2**0.5  # of the predictor's


def check(args: Args):
    """Raise UsageError for settings that cannot work."""
    rows = args.num_envs * args.num_steps
    for name in ("num_envs", "num_steps", "update_epochs", "pairs"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1")
    at_least_0 = """seed micro_batch eval_episodes eval_every torch_threads env_threads
        max_grad_norm warmup_steps""".split()
    for name in at_least_0:
        if getattr(args, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 0")
    if args.minibatch_size < 2 or rows % args.minibatch_size:
        raise UsageError(f"--minibatch-size {args.minibatch_size}: a divisor of {rows} from 2 on")
    if args.total_timesteps < rows * WORLD:
        raise UsageError(f"--total-timesteps {args.total_timesteps}: at least {rows * WORLD}")
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

CONVOLUTIONS = {  # width, kernel, stride and padding of each
    "elu4": [(16, 3, 2, 1), (32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 1, 1)],  # SND-V
    "relu4": [(32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 2, 1), (128, 3, 1, 1)],  # STD, VIC, the policy
}


def layer(module, gain: float = 2**0.5):
    """Orthogonal weights, zero bias."""
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def conv_layers(channels: int, net: str, gain: float = 2**0.5) -> nn.Sequential:
    """Those of `net`, each with its activation, then flattened: (B, channels, S, S) -> (B, D)."""
    layers = nn.Sequential()
    for width, kernel, stride, padding in CONVOLUTIONS[net]:
        layers.append(layer(nn.Conv2d(channels, width, kernel, stride, padding), gain))
        layers.append(nn.ReLU() if net == "relu4" else nn.ELU())
        channels = width
    return layers.append(nn.Flatten())


class Agent(nn.Module):
    """michalnand's policy C: uint8 (B, C, S, S) -> logits (B, A), values (B, 2): game, bonus."""

    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        super().__init__()
        self.trunk = conv_layers(obs_shape[0], "relu4")
        num_features = self.trunk(torch.zeros(1, *obs_shape)).shape[1]
        self.trunk.append(layer(nn.Linear(num_features, 512)))
        self.trunk.append(nn.ReLU())
        self.hidden_policy = layer(nn.Linear(512, 512), 0.01)
        self.hidden_value = layer(nn.Linear(512, 512), 0.1)
        self.policy = layer(nn.Linear(512, num_actions), 0.01)
        self.value = layer(nn.Linear(512, 2), 0.01)
        self.to(memory_format=torch.channels_last)

    def forward(self, obs):
        # Reordered while still bytes: a quarter of the traffic. div_ reuses the floats.
        x = obs.contiguous(memory_format=torch.channels_last).float().div_(255)
        x = self.trunk(x)
        policy = F.relu(self.hidden_policy(x))
        value = F.relu(self.hidden_value(x))
        with torch.autocast(x.device.type, enabled=False):
            return self.policy(policy.float()), self.value(value.float())


class RunningMoments(nn.Module):
    """Mean and deviation of all rows so far, element by element; saved with the weights."""

    def __init__(self, shape: tuple[int, ...] = ()):
        super().__init__()
        self.register_buffer("sums", torch.zeros(3, *shape, dtype=torch.float64))  # of 1, x, x^2
        self.sums[[0, 2]] = 1e-4  # 1e-4 rows of mean 0 and variance 1

    def update(self, x):
        """x: (B, *shape). Pixels are summed in float32, exact for 256 rows: 256 * 255^2 < 2^24."""
        new = torch.zeros_like(self.sums)
        new[0] = len(x)
        for rows in x.split(256):
            rows = rows.float() if x.dtype == torch.uint8 else rows.double()
            new[1] += rows.sum(0)
            new[2] += rows.square().sum(0)
        self.sums += sum_over_ranks(new)

    def mean(self):
        return self.sums[1] / self.sums[0]

    def std(self):
        return (self.sums[2] / self.sums[0] - self.mean() ** 2).clamp(min=1e-12).sqrt()


class SND(nn.Module):
    """A target network that learns, its predictor, and the running statistics of frames.

    Frames are uint8 (B, 1, S, S), the newest of an observation; features are (B, D).
    """

    def __init__(self, size: int, args: Args):
        super().__init__()
        self.args = args
        self.frames = RunningMoments((1, size, size))
        features = args.snd_features
        self.target = conv_layers(1, args.snd_net, args.target_gain)
        self.predictor = conv_layers(1, args.snd_net, args.predictor_gain)
        width = self.target(torch.zeros(1, 1, size, size)).shape[1]
        self.target.append(layer(nn.Linear(width, features), args.target_gain))
        self.predictor.append(layer(nn.Linear(width, features), args.predictor_gain))
        for _ in range(2):
            self.predictor.append(nn.ELU())
            self.predictor.append(layer(nn.Linear(features, features), args.predictor_gain))
        if args.target == "std":  # bilinear scores: these outputs times the patches of a frame
            depth = CONVOLUTIONS[args.snd_net][2][0]  # of the third convolution's maps
            self.whole = nn.Linear(features, depth)
            self.local = nn.Linear(depth, depth)
        self.to(memory_format=torch.channels_last)

    def preprocess(self, frames):
        """uint8 -> float32, under the statistics so far."""
        x = frames.float()
        if self.args.snd_preprocess == "none":
            return x / 255
        x = x - self.frames.mean().float()
        return (x / self.frames.std().float()).clamp(-1, 1)

    def errors(self, frames):
        """Squared errors of the predictor, (B, D): eta x their mean is the bonus."""
        x = self.preprocess(frames)
        with torch.no_grad():
            features = self.target(x).float()
        return (self.predictor(x).float() - features).square()

    def target_loss(self, frames, others, far):
        """The loss of the pairs (frames[i], others[i]).

        v: one frame twice, or two where far (B,) is True; std, vic: others[i] is the next frame.
        """
        pair = [self.preprocess(frames), self.preprocess(others)]
        if self.args.target == "v":
            pair = [hide_tiles(x) for x in pair]
        maps = [self.target[:6](x) for x in pair]  # after three convolutions, (B, K, H, W)
        a, b = [self.target[6:](x).float() for x in maps]
        with torch.autocast(a.device.type, enabled=False):
            if self.args.target == "v":
                return contrastive(a, b, far)
            if self.args.target == "vic":
                return vicreg(a, b)
            patches, next_patches = [x.float().flatten(2).permute(2, 0, 1) for x in maps]
            return infonce(patches, self.whole(b), self.local(next_patches), a)


# --- mathematics ---


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


def ppo_terms(logits, values, rows: dict, clip: float, in_use) -> dict:
    """What the loss is made of, a number a row: logits (B, A) and values (B, 2) are the new ones.

    policy: negated clipped surrogate (PPO, eq. 7); value: half the squared errors of the
    heads that in_use (2,) marks; approx_kl: the estimate r - 1 - log r of KL(old || new).
    """
    logp = logits.log_softmax(-1)
    log_ratio = logp.gather(-1, rows["action"][:, None]).squeeze(-1) - rows["logp"]
    ratio = log_ratio.exp()
    surrogate = ratio * rows["advantage"]
    clipped_surrogate = ratio.clamp(1 - clip, 1 + clip) * rows["advantage"]
    return {
        "policy": -torch.min(surrogate, clipped_surrogate),
        "value": 0.5 * ((values - rows["target"]) ** 2 * in_use).sum(-1),
        "entropy": -(logp.exp() * logp).sum(-1),
        "approx_kl": ratio - 1 - log_ratio,
        "clip_frac": ((ratio - 1).abs() > clip).float(),
    }


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


def chance(share: float, like, height: int = 1, width: int = 1):
    """(B, 1, height, width) booleans, True with probability `share`; B as in `like`."""
    return torch.rand(len(like), 1, height, width, device=like.device) < share


def hide_tiles(x):
    """(B, 1, S, S): half the frames lose a tenth of their tiles; half, drawn anew, get noise."""
    size = x.shape[-1]
    tile = [1, 2, 4, 8, 12, 16][torch.randint(6, ()).item()]
    tiles = math.ceil(size / tile)
    hidden = chance(0.1, x, tiles, tiles).repeat_interleave(tile, 2).repeat_interleave(tile, 3)
    x = x.masked_fill(hidden[..., :size, :size] & chance(0.5, x), 0)
    noise = torch.rand_like(x) * 0.4 - 0.2
    return x + noise * chance(0.5, x)


def contrastive(a, b, far):
    """SND-V's loss: the mean squared distance of features (B, D) should be `far` (B,), 0 or 1.

    The second term penalises the mean square of a plus that of b, beyond 200.
    """
    distance = (a - b).square().mean(1)
    size = a.square().mean() + b.square().mean()
    return (far.float() - distance).square().mean() + F.relu(size - 200)


def vicreg(a, b):
    """SND-VIC's loss of features (B, D): VICReg's three terms, weighted 1, 1, 1/25."""
    loss = F.mse_loss(a, b)
    for z in (a, b):
        z = z - z.mean(0)
        covariance = z.T @ z / (len(z) - 1)  # torch.cov would wait for the GPU
        variance = covariance.diagonal()
        off_diagonal = covariance.square().sum() - variance.square().sum()
        loss = loss + F.relu(1 - (variance + 1e-4).sqrt()).mean()
        loss = loss + off_diagonal / len(covariance) / 25
    return loss


def infonce(patches, whole, local, features):
    """SND-STD's loss: which frame of the batch comes next? (ST-DIM with two regularisers.)

    patches: (P, B, K), maps of the frames; whole: (B, K), of the next frames; local: (P, B, K), of
    their patches; features: (B, D), of the frames. The regularisers: 1e-4 x the
    norm of a patch's (B, B) logits, to keep them small; -1e-4 x the deviation across a frame's
    features, to spread them.
    """
    P, B, _ = patches.shape
    answers = torch.arange(B, device=patches.device).repeat(P)  # frame i is followed by candidate i
    loss = -1e-4 * features.std(1).mean()
    for candidates in (whole, local):
        logits = patches @ candidates.mT  # (P, B, B): patch p of frame i with next frame j
        loss = loss + F.cross_entropy(logits.flatten(0, 1), answers)
        loss = loss + 1e-4 * logits.norm(dim=(1, 2)).mean()
    return loss


# --- training ---


def train(args: Args, envs: gym.vector.VectorEnv | None = None) -> dict:
    """Train; returns the last metrics, "agent", "run" (the folder), "eval" (eval.json's, if made).

    envs: a VectorEnv with next-step autoreset, uint8 (C, S, S) observations, newest frame last,
    discrete actions. It is not seeded, evaluated or closed. None = EnvPool's Atari as args say.
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
    if envs.num_envs != N or envs.metadata.get("autoreset_mode") != AutoresetMode.NEXT_STEP:
        raise UsageError(f"--num-envs {N}: needs {N} environments, next-step autoreset; not {envs}")
    if envs.single_observation_space.dtype != np.uint8:
        raise UsageError("observations: must be uint8 (C, H, W)")
    obs_shape = envs.single_observation_space.shape
    num_actions = envs.single_action_space.n
    if len(obs_shape) != 3 or obs_shape[1] != obs_shape[2] or obs_shape[1] < 4:
        raise UsageError(f"observations of shape {obs_shape}: must be (C, S, S) from 4 pixels on")

    torch.manual_seed(args.seed)  # equal first weights on all ranks
    agent = Agent(obs_shape, num_actions, args).to(device)
    snd = SND(obs_shape[-1], args).to(device)
    network = torch.compile(agent) if args.compile else agent
    parameters = [*agent.parameters(), *snd.parameters()]
    optimizer = torch.optim.Adam(parameters, eps=args.adam_eps, fused=True)
    rooms_ever = getattr(envs, "rooms_ever", np.zeros(256, bool))  # AtariEnvs marks new ones in it
    best = -np.inf
    if args.resume:
        agent.load_state_dict(saved["agent"])
        snd.load_state_dict(saved["snd"])
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.param_groups[0]["eps"] = args.adam_eps  # a flag given now wins
        rooms_ever |= saved["rooms_ever"].numpy()
        if Path(args.resume, "best.pt").exists():  # may be newer than the checkpoint
            best = load_checkpoint(args.resume, "best.pt")["best"]
    torch.manual_seed(stream_seed(args.seed, stream))
    micro_batch = args.micro_batch or (256 if device.type == "cpu" else args.minibatch_size)
    predictor_share = args.predictor_share or min(1, 32 / (N * WORLD))
    in_use = torch.tensor([args.ext_coef > 0, args.int_coef > 0], device=device)  # value heads
    recent = deque(maxlen=100)  # returns of the last games
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")

    def forward(obs):
        with autocast:
            return network(obs)

    def save(name: str):
        state = {
            "step": step,
            "best": best,
            "agent": agent.state_dict(),
            "optimizer": optimizer.state_dict(),
            "snd": snd.state_dict(),
            "rooms_ever": torch.from_numpy(rooms_ever),
        }
        logger.save(name, state)

    # Row t = (obs_t, a_t, log pi(a_t|obs_t), V(obs_t), valid_t, r_{t+1}, terminated_{t+1},
    # done_{t+1}). The row after an end is no transition, its action is ignored: it is not valid,
    # which masks policy and value loss. Its frame, a game's last, trains the predictor.
    observations = torch.zeros(T + 1, N, *obs_shape, dtype=torch.uint8, device=device)
    # The newest frames, a view: frame t * N + n is row t's of environment n; i + N follows i.
    newest = observations[:, :, -1:].view(-1, 1, *obs_shape[1:])
    rollout = {
        "obs": observations[:T],
        "action": torch.zeros(T, N, dtype=torch.int64, device=device),
        "logp": torch.zeros(T, N, device=device),
        "value": torch.zeros(T, N, 2, device=device),  # of the game, of the bonus
    }
    rewards = torch.zeros(T, N)
    terminations = torch.zeros(T, N)
    dones = torch.zeros(T, N)
    valid = torch.zeros(T, N)

    logger = Logger(args, device, step, total)
    last_save = time.monotonic()
    metrics = {}
    try:
        obs, _ = envs.reset()
        if step == 0:
            logger.say(f"{args.warmup_steps * N:,} random steps start the frame statistics")
            for _ in range(args.warmup_steps):
                obs, *_ = envs.step(torch.randint(num_actions, (N,)).numpy())
                snd.frames.update(torch.from_numpy(obs[:, -1:]).to(device))
            obs, _ = envs.reset()
        done = np.zeros(N, bool)  # of the last step
        while step < total:
            logger.mark = time.perf_counter()  # the clock anew: saving and evaluating do not count
            # Rollout
            returns, lengths = [], []  # of the games that end
            for t in range(T):
                observations[t] = torch.from_numpy(obs)
                valid[t] = torch.from_numpy(~done)
                with torch.no_grad():
                    logits, value = forward(observations[t])
                action = sample(logits)
                logp = logits.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)
                rollout["action"][t] = action
                rollout["logp"][t] = logp
                rollout["value"][t] = value
                action = action.cpu().numpy()
                logger.lap("policy")
                obs, reward, terminated, truncated, info = envs.step(action)
                done = terminated | truncated
                if "episode" in info:
                    returns += info["episode"]["r"][info["_episode"]].tolist()
                    lengths += info["episode"]["l"][info["_episode"]].tolist()
                rewards[t] = torch.from_numpy(reward)
                terminations[t] = torch.from_numpy(terminated)
                dones[t] = torch.from_numpy(done)
                logger.lap("env", N * WORLD)
            observations[T] = torch.from_numpy(obs)
            with torch.no_grad():
                _, last_value = forward(observations[T])
            logger.lap("policy")

            # Bonus of o_t, under the frame statistics so far; then this rollout enters them
            pieces = newest[: T * N].split(micro_batch)
            with torch.no_grad(), autocast:
                raw_bonus = torch.cat([snd.errors(piece).mean(1) for piece in pieces])
            raw_bonus = raw_bonus.view(T, N).cpu()
            bonus = (args.eta * raw_bonus).clamp(max=args.int_clip or np.inf)
            snd.frames.update(newest[: T * N])
            logger.lap("bonus")

            # Targets. Row t's bonus is for o_t, to which a_{t-1} led: it is in a_{t-1}'s return
            values = torch.cat([rollout["value"], last_value[None]]).cpu()
            value_ext, value_int = values.unbind(-1)
            lam = args.gae_lambda
            advantage_ext = gae(rewards, value_ext, terminations, dones, args.gamma, lam)
            advantage_int = gae(bonus, value_int, terminations, dones, args.gamma_int, lam)
            advantages = args.ext_coef * advantage_ext + args.int_coef * advantage_int
            targets = torch.stack([advantage_ext, advantage_int], -1) + values[:T]
            is_valid = valid.bool()
            explained_ext = explained_variance(value_ext[:T][is_valid], targets[is_valid][:, 0])
            explained_int = explained_variance(value_int[:T][is_valid], targets[is_valid][:, 1])
            columns = rollout | {"advantage": advantages.to(device), "target": targets.to(device)}
            columns["valid"] = valid.to(device)
            batch = {name: column.flatten(0, 1) for name, column in columns.items()}
            logger.lap("policy")

            # Update of the policy
            lr = schedule(step, args.lr)
            ent_coef = schedule(step, args.ent_coef)
            optimizer.param_groups[0]["lr"] = lr
            if args.minibatches == "drawn":
                order = torch.randint(T * N, (args.update_epochs * T * N,))
            else:
                order = torch.randperm(T * N).repeat(args.update_epochs)
            minibatches = order.split(args.minibatch_size)
            sums = defaultdict(float)  # of the minibatches' means
            for index in minibatches:
                index = index.to(device, non_blocking=True)
                minibatch = {name: column[index] for name, column in batch.items()}
                num_valid = sum_over_ranks(minibatch["valid"].sum()).clamp(min=1)
                optimizer.zero_grad()
                for start in range(0, args.minibatch_size, micro_batch):
                    piece = slice(start, start + micro_batch)
                    rows = {name: column[piece] for name, column in minibatch.items()}
                    terms = ppo_terms(*forward(rows["obs"]), rows, args.clip, in_use)
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
            means = {name: sum_over_ranks(x) / len(minibatches) for name, x in sums.items()}

            # Update of predictor and target. zero_grad makes the policy's gradients None, so Adam
            # skips it, as it skipped these two above.
            if args.motivation_passes == "one":
                minibatches = torch.arange(T * N).split(args.minibatch_size)  # once more, in order
            snd_sums = defaultdict(float)
            for index in minibatches:
                minibatch = newest[index.to(device, non_blocking=True)]
                # A mask of single features, not of rows.
                mask = torch.rand(len(index), args.snd_features, device=device) < predictor_share
                num_kept = sum_over_ranks(mask.sum()).clamp(min=1)
                optimizer.zero_grad()
                for start in range(0, args.minibatch_size, micro_batch):
                    piece = slice(start, start + micro_batch)
                    with autocast:
                        errors = snd.errors(minibatch[piece])
                    loss = (errors * mask[piece]).sum()
                    if not args.predictor_sum:
                        loss = loss / num_kept
                    loss.backward()
                    snd_sums["predictor"] += loss.detach()
                if args.target == "v":  # pairs: one frame twice or two, at even odds
                    first, other = torch.randint(T * N, (2, args.pairs), device=device)
                    same = torch.rand(args.pairs, device=device) < 0.5
                    second = torch.where(same, first, other)
                else:  # consecutive frames; after an invalid row's frame another game begins
                    kept = index[is_valid.flatten()[index]]  # on the CPU, or a GPU would wait here
                    kept = kept if len(kept) > 1 else index  # VICReg's loss of one row is nan
                    first = kept.to(device, non_blocking=True)
                    second = first + N
                with autocast:
                    loss = snd.target_loss(newest[first], newest[second], first != second)
                loss = loss / WORLD
                loss.backward()
                snd_sums["target"] += loss.detach()
                for parameter in snd.parameters():
                    parameter.grad = sum_over_ranks(parameter.grad)
                optimizer.step()
            for name, x in snd_sums.items():
                means[name] = sum_over_ranks(x) / len(minibatches)
            means = {name: mean.item() for name, mean in means.items()}
            logger.lap("learn")

            # Metrics: with torchrun the losses are all ranks', the rest rank 0's
            if not np.isfinite(sum(means.values())):
                raise FloatingPointError(f"a loss is not finite after step {step:,}: {means}")
            next_step = step + batch_size
            metrics = {
                "step": next_step,
                "iteration": next_step // batch_size,
                "episode/return": np.mean(returns) if returns else None,
                "episode/length": np.mean(lengths) if lengths else None,
                "episode/count": len(returns),
                "episode/rooms_ever": rooms_ever.sum() or None,
                "eval/return": None,
                "loss/policy": means["policy"],
                "loss/value": means["value"],
                "loss/entropy": means["entropy"],
                "loss/predictor": means["predictor"],
                "loss/target": means["target"],
                "train/approx_kl": means["approx_kl"],
                "train/clip_frac": means["clip_frac"],
                "train/explained_variance": explained_ext,
                "train/grad_norm": means["grad_norm"],
                "train/lr": lr,
                "train/ent_coef": ent_coef,
                "train/valid_frac": valid.mean().item(),
                "int/reward_raw": raw_bonus.mean().item(),
                "int/reward_norm": bonus.mean().item(),  # scaled and limited, not normalised
                "int/return_std": targets[is_valid][:, 1].std().item(),  # in RND the bonus' divisor
                "int/explained_variance": explained_int,
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
