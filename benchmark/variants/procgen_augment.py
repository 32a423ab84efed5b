"""ppo_procgen.py with random augmentation of the frames, only in updates.

    python benchmark/variants/procgen_augment.py --env-id bigfish --augment flip translate
    python benchmark/variants/impala_augment.py --env-id bigfish  # the same for impala_procgen.py

Source: `transforms.py` of T. Tumiel's entry to the NeurIPS 2020 Procgen competition, which moves
the observations of a rollout, each move with probability 0.3 per row. Its default is flips and
translations. As there, acting, old log-probabilities and values use the unchanged frames, and only
forward passes with gradients see moved ones. All frames of a row move alike; actions stay the same.
With `--augment-draw once`, as in the entry, a row moves the same way in all epochs: its draws are a
hash of its pixels.

Not measured. Departures from the entry:
- its pad-crop left stacked frames unchanged;
- the corners of its crops are whole pixels; here the corners are centres of pixels, so that no
  pixel from beyond the edges is needed;
- its translations by 8 pixels are half as likely as the others;
- it draws again for every rollout, so equal observations of two rollouts may move differently.
"""

import math
import sys
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_procgen as script

Move = Literal["flip", "rotate", "crop", "translate", "pad_crop"]


@dataclass(config=script.CONFIG)
class Flags:
    augment: tuple[Move, ...] = ("flip", "translate")  # moves of a row's frames, in this order
    augment_chance: script.Share = 0.3  # probability of each move, per row
    augment_draw: Literal["once", "anew"] = "once"  # draw a row's moves once, or in every epoch


@dataclass(config=script.CONFIG)
class Args(Flags, script.Args):
    pass


# A move maps the coordinates of the new pixels to those of the old pixels they show. Coordinates
# are relative to the frame's centre, from -half to half; a, b and c are draws of [0, 1), (B, 1, 1).


def flip(x, y, half, a, b, c):
    return torch.where(a < 0.5, -x, x), torch.where(b < 0.5, -y, y)


def rotate(x, y, half, a, b, c):
    angle = math.radians(20) * (2 * a - 1)
    return x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()


def crop(x, y, half, a, b, c):
    share = 0.75 + 0.25 * a  # 48 to 64 pixels of 64
    room = half * (1 - share)
    return share * x + room * (2 * b - 1), share * y + room * (2 * c - 1)


def translate(x, y, half, a, b, c):
    x, y = x + half + (17 * a).floor() - 8, y + half + (17 * b).floor() - 8
    return x % (2 * half + 1) - half, y % (2 * half + 1) - half  # around the edges


def pad_crop(x, y, half, a, b, c):
    x, y = x + half + (21 * a).floor() - 10, y + half + (21 * b).floor() - 10
    x, y = x.abs(), y.abs()  # reflect at one edge; the next line at the other one
    return half - (2 * half - x).abs(), half - (2 * half - y).abs()


MOVES = {move.__name__: move for move in (flip, rotate, crop, translate, pad_crop)}


def augment(frames, names: tuple[str, ...], chance: float, draws):
    """Move square frames, uint8 (B, C, S, S) -> the same shape; draws: (B, 4 * moves) of [0, 1)."""
    half = (frames.shape[-1] - 1) / 2
    line = torch.arange(frames.shape[-1], device=frames.device) - half
    y, x = torch.meshgrid(line, line, indexing="ij")
    in_place = torch.stack([x, y], -1)
    moved = frames.float()
    for i, name in enumerate(names):
        drawn, a, b, c = draws[:, 4 * i : 4 * i + 4].float().T[..., None, None]
        grid = torch.stack(MOVES[name](x, y, half, a, b, c), -1)
        grid = torch.where(drawn[..., None] < chance, grid, in_place)
        moved = F.grid_sample(moved, grid / (half + 0.5), align_corners=False)
    return moved.round().to(torch.uint8)


class Augmented:
    """Mixed into a script's Agent: moves the frames in forward passes with gradients."""

    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        super().__init__(obs_shape, num_actions, args)
        self.args = args
        own = torch.Generator().manual_seed(args.seed)
        key = torch.rand(math.prod(obs_shape), 4 * len(args.augment), generator=own).double()
        self.register_buffer("key", key, persistent=False)

    def forward(self, obs):
        if torch.is_grad_enabled():
            draws = torch.rand(len(obs), self.key.shape[1], device=obs.device)
            if self.args.augment_draw == "once":
                draws = (obs.flatten(1).double() @ self.key) % 1  # a hash, exact in double
            obs = augment(obs, self.args.augment, self.args.augment_chance, draws)
        return super().forward(obs)


class Agent(Augmented, script.Agent):
    pass


script.SCRIPT = "procgen_augment"
script.__doc__ = __doc__
script.Args = Args
script.Agent = Agent

if __name__ == "__main__":
    sys.exit(script.main())
