"""SND-V as in michalnand's older "snd" run on Breakout: other convolutions, pixelated pairs.

    python benchmark/variants/snd_breakout.py --env-id Breakout --ext-coef 0 --eta 0.256 \\
        --num-envs 32 --minibatch-size 128 --fire-reset --total-timesteps 1000000  # no reward

Source: github.com/michalnand/reinforcement_learning. It replaces two things in ppo_atari_snd.py:
the convolutions of `--snd-net elu4` (target and predictor), and `hide_tiles`, which distorts the
frames of a pair. The policy's network stays the script's (his run's: a last convolution of 64, not
128, and no linear layer that policy and critic share).
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_atari_snd as script
from ppo_atari_snd import chance


def pixelate(x):
    """(B, 1, S, S): half of the frames are seen at half the resolution, a quarter at a quarter.

    An eighth lose a tenth of their pixels; all get noise of up to 0.2.
    """
    size = x.shape[-1]
    for factor, share in [(2, 0.5), (4, 0.25)]:
        coarse = F.avg_pool2d(x, factor, ceil_mode=True)
        coarse = F.interpolate(coarse, scale_factor=factor)[..., :size, :size]
        x = torch.where(chance(share, x), coarse, x)
    x = x.masked_fill(chance(0.1, x, size, size) & chance(0.125, x), 0)
    noise = torch.rand_like(x) * 0.4 - 0.2
    return x + noise


script.SCRIPT = "snd_breakout"
script.__doc__ = __doc__
script.hide_tiles = pixelate
# Width, kernel, stride and padding of each: those of michalnand's RND.
script.CONVOLUTIONS["elu4"] = [(32, 8, 4, 2), (64, 3, 2, 1), (64, 3, 1, 1)]

if __name__ == "__main__":
    sys.exit(script.main())
