"""michalnand's Random Network Distillation on Atari: four policies, and his settings by name.

    python benchmark/variants/rnd_michalnand.py --env-id MontezumaRevenge --config rnd_1

Source: github.com/michalnand/reinforcement_learning. His RND is his SND except that the target is
fixed, frames only have their mean subtracted, and the bonus is half the sum of 512 squared errors,
at most 1. Not measured; his rnd_1 has 6,537 on Montezuma's Revenge (3 runs, last tenth of 128M).

Departures: those of ppo_atari_snd.py; b2 and b3 divide by the std of the bonuses before this
rollout (1 in the first rollout; his: before every step); A's critic adds its hidden layer's input
to its output (his: the output before the ReLU to the output after it).
Guesses: B's paddings, D's gains and ReLU.
"""

import sys
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_atari_snd as script

POLICIES = {  # convolutions: width, kernel, stride, padding; widths of the linear layers after them
    "a": ([(32, 8, 4, 2), (64, 3, 2, 1), (64, 3, 1, 1)], [448, 448]),
    "b": ([(64, 8, 4, 2), (64, 3, 2, 1), (128, 3, 1, 1)], [800]),
    "c": ([(32, 3, 2, 1), (64, 3, 2, 1), (64, 3, 2, 1), (128, 3, 1, 1)], [512]),
    "d": ([(128, 8, 8, 0)], [512]),
}
CONFIGS = {  # policy, gain of the critic's hidden layer, whether the bonus is divided by its std
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
SND_CONVS = script.SND_CONVS  # of rnd_1
RND_CONVS = [(32, 8, 4, 2), (64, 3, 2, 1), (64, 3, 1, 1)]  # of the others


@dataclass(config=script.CONFIG)
class Args(script.Args):
    config: Literal[*CONFIGS] = "rnd_1"  # policy, gain and bonus, see CONFIGS
    eta: NonNegativeFloat = 256
    """bonus = this x the mean of the 512 squared errors, at most --int-clip; no effect in b2, b3"""


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


class Residual(nn.Linear):  # its input is a ReLU's output, so the ReLU after it does nothing
    def forward(self, x):
        return x + F.relu(super().forward(x))


class Agent(script.Agent):
    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        nn.Module.__init__(self)
        self.bf16 = args.precision == "bf16"
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
    def __init__(self, frame_shape: tuple[int, int, int], args: Args):
        coupled = args.config == "rnd_1"  # weights are halves of one orthogonal matrix
        script.SND_CONVS = SND_CONVS if coupled else RND_CONVS
        super().__init__(frame_shape, args)
        self.divides = CONFIGS[args.config][2]
        self.bonuses = script.RunningMoments((), count=1e-4, variance=1, epsilon=1e-12)
        for one, other in zip(self.target, self.predictor, strict=False):
            if coupled and hasattr(one, "weight"):
                both = torch.empty(2 * len(one.weight), *one.weight.shape[1:])
                one.weight.data, other.weight.data = nn.init.orthogonal_(both, 2**0.5).chunk(2)

    def preprocess(self, frames):
        return (frames.float() - self.frames.mean) / 255

    def target_loss(self, pairs: dict):
        loss = 0 * sum(weights.sum() for weights in self.target.parameters())  # it learns nothing
        return loss.expand(len(pairs["far"])), {"loss/target": loss.expand(len(pairs["far"]))}

    def bonus(self, frames, micro_batch: int):
        """As SND, or (b2, b3) the errors divided by their std in the earlier rollouts."""
        errors, bonus = super().bonus(frames, micro_batch)
        if self.divides:
            bonus = (errors / self.bonuses.std).clamp(max=self.int_clip)
            self.bonuses.update(errors.flatten())
        return errors, bonus


script.SCRIPT = "rnd_michalnand"
script.__doc__ = __doc__
script.Args = Args
script.Agent = Agent
script.SND = RND

if __name__ == "__main__":
    sys.exit(script.main())
