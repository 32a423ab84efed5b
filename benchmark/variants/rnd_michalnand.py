"""michalnand's Random Network Distillation on Atari: four policies, and his settings by name.

    python benchmark/variants/rnd_michalnand.py --env-id MontezumaRevenge --config rnd_1

Source: github.com/michalnand/reinforcement_learning; its RND is its SND but for a fixed target,
frames less their mean, and the bonus: half the sum of 512 squared errors, at most 1. Departures as
in ppo_atari_snd.py; b2, b3 update a deviation a piece at a time; A's critic adds its hidden layer's
input to its output (his: the output before the ReLU to that after it). Guesses: B's paddings, D's
gains and ReLU. --target, --snd-net and --snd-preprocess do nothing here. Not measured; his rnd_1
has 6,219 on Montezuma's Revenge at 128M steps (mean of 3 runs).
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_atari_snd as script

POLICIES = {  # convolutions: width, kernel, stride, padding; widths of the linear layers after them
    "a": ([(32, 8, 4, 2), (64, 3, 2, 1), (64, 3, 1, 1)], [448, 448]),
    "b": ([(64, 8, 4, 2), (64, 3, 2, 1), (128, 3, 1, 1)], [800]),
    "c": ([(32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 2, 1), (128, 3, 1, 1)], [512]),
    "d": ([(128, 8, 8, 0)], [512]),
}
CONFIGS = {  # policy, gain of the critic's hidden layer, is the bonus over its running deviation
    "rnd_1": ("c", 0.1, False),
    "ppo_rnd_a0": ("a", 0.1, False),
    "ppo_rnd_b0": ("b", 0.1, False),
    "ppo_rnd_b1": ("b", 2**0.5, False),
    "ppo_rnd_b2": ("b", 0.1, True),
    "ppo_rnd_b3": ("b", 2**0.5, True),
    "ppo_rnd_c0": ("c", 0.1, False),
    "ppo_rnd_c1": ("c", 2**0.5, False),
    "ppo_rnd_d0": ("d", 0.1, False),
}
script.CONVOLUTIONS["elu"] = [(32, 8, 4, 2), (64, 3, 2, 1), (64, 3, 1, 1)]


@dataclass
class Args(script.Args):
    config: Literal[*CONFIGS] = "rnd_1"
    eta: float = 256  # bonus = eta x the mean of the 512 squared errors, limited to --int-clip


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv = nn.ModuleList(script.layer(nn.Linear(width, width), 1) for _ in range(3))
        self.mix = script.layer(nn.Conv2d(width, width, 1))

    def forward(self, x):
        positions = x.flatten(2).mT  # (B, H * W, width)
        columns = [column(positions) for column in self.qkv]
        x = F.scaled_dot_product_attention(*columns, scale=1).mT.reshape(x.shape)
        return x + F.relu(self.mix(x))


class Residual(nn.Linear):  # of ReLU's outputs: never negative, and forward()'s ReLU does nothing
    def forward(self, x):
        return x + F.relu(super().forward(x))


class Agent(script.Agent):
    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        nn.Module.__init__(self)
        policy, critic_gain, _ = CONFIGS[args.config]
        convs, widths = POLICIES[policy]
        size = obs_shape[0]
        self.trunk = nn.Sequential()
        for conv in convs:
            self.trunk.extend([script.layer(nn.Conv2d(size, *conv)), nn.ReLU()])
            size = conv[0]
        if policy == "d":
            self.trunk.extend([Attention(size), Attention(size)])
        self.trunk.append(nn.Flatten())
        size = self.trunk(torch.zeros(1, *obs_shape)).shape[1]
        for width in widths:
            self.trunk.extend([script.layer(nn.Linear(size, width)), nn.ReLU()])
            size = width
        hidden = Residual if policy == "a" else nn.Linear
        self.hidden_policy = script.layer(nn.Linear(size, size), 0.01)
        self.hidden_value = script.layer(hidden(size, size), critic_gain)
        self.policy = script.layer(nn.Linear(size, num_actions), 0.01)
        self.value = script.layer(nn.Linear(size, 2), 0.01)
        self.to(memory_format=torch.channels_last)


class RND(script.SND):
    def __init__(self, size: int, args: Args):
        coupled = args.config == "rnd_1"  # weights are halves of one orthogonal matrix
        super().__init__(size, replace(args, snd_net="elu4" if coupled else "elu"))
        self.bonuses = script.RunningMoments()
        for one, other in zip(self.target, self.predictor, strict=False):
            if coupled and hasattr(one, "weight"):
                both = torch.empty(2 * len(one.weight), *one.weight.shape[1:])
                one.weight.data, other.weight.data = nn.init.orthogonal_(both, 2**0.5).chunk(2)

    def preprocess(self, frames):
        return (frames.float() - self.frames.mean().float()) / 255

    def target_loss(self, frames, others, far):
        return 0 * sum(weights.sum() for weights in self.target.parameters())  # it learns nothing

    def errors(self, frames):
        errors = super().errors(frames)
        if CONFIGS[self.args.config][2] and not torch.is_grad_enabled():  # asked for the bonus
            self.bonuses.update(errors.mean(1))
            errors = errors / (self.args.eta * self.bonuses.std()).float()
        return errors


script.SCRIPT = "rnd_michalnand"
script.__doc__ = __doc__
script.Args, script.Agent, script.SND = Args, Agent, RND

if __name__ == "__main__":
    sys.exit(script.main())
