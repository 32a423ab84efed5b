"""SND-V as in michalnand's older "snd" run on Breakout: other convolutions, pixelated pairs.

    python benchmark/variants/snd_breakout.py --env-id Breakout --ext-coef 0 --eta 0.256 \\
        --num-envs 32 --minibatch-size 128 --fire-reset --total-timesteps 1000000  # no reward

Source: github.com/michalnand/reinforcement_learning. Changes to ppo_atari_snd.py: the convolutions
of target and predictor, and `augment`, the augmentation of the frames of a pair. The policy
network is the script's (the source's has a last convolution of 64 channels, not 128, and no linear
layer that policy and critic share).
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_atari_snd as script


def chance(probability: float, x, height: int = 1, width: int = 1):
    """(B, 1, height, width) booleans for frames x (B, C, H, W), each True with this probability."""
    return torch.rand(len(x), 1, height, width, device=x.device) < probability


def pixelate(x, tiles):
    """Augment frames (B, C, H, W): half are at half the resolution, a quarter at a quarter.

    An eighth lose a tenth of their pixels; all get noise of up to 0.2. tiles: not used.
    """
    height, width = x.shape[2:]
    for factor, probability in [(2, 0.5), (4, 0.25)]:
        coarse = F.avg_pool2d(x, factor, ceil_mode=True)
        coarse = F.interpolate(coarse, scale_factor=factor)[..., :height, :width]
        x = torch.where(chance(probability, x), coarse, x)
    x = x.masked_fill(chance(0.1, x, height, width) & chance(0.125, x), 0)
    noise = torch.rand_like(x) * 0.4 - 0.2
    return x + noise


script.SCRIPT = "snd_breakout"
script.__doc__ = __doc__
script.augment = pixelate
# width, kernel, stride and padding of each convolution, as in michalnand's RND
script.SND_CONVS = [(32, 8, 4, 2), (64, 3, 2, 1), (64, 3, 1, 1)]

if __name__ == "__main__":
    sys.exit(script.main())
