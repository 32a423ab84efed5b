"""The paper's settings of SND on Atari: SND-V, SND-STD and SND-VIC (Pechac et al. 2023).

    python benchmark/variants/snd_paper.py                                               # SND-V
    python benchmark/variants/snd_paper.py --target std --predictor-share 1 --eta 1      # SND-STD
    python benchmark/variants/snd_paper.py --target vic --predictor-share 1 --eta 0.25   # SND-VIC

These flags are for Montezuma's Revenge, Gravitar and Pitfall. For SND-STD, Private Eye and Solaris
have --eta 0.5, Venture 0.25; for SND-V and SND-VIC all six games are alike.

SND: arXiv:2302.11563. SND-STD learns its target by InfoNCE in space and time (ST-DIM: Anand et al.
2019, arXiv:1906.08226), SND-VIC by VICReg (Bardes et al. 2022, arXiv:2105.04906). Both pair each
frame of a minibatch with the next frame.

Changes to ppo_atari_snd.py: frames are divided by 255, not standardized; one permutation is split
into the minibatches of every epoch; predictor and target then make one pass over the rollout, in
order. SND-STD and SND-VIC have wider networks with ReLU, which start with smaller weights (but for
SND-VIC's predictor); SND-STD sums the predictor's errors over its minibatch.

Departures from the paper's code, effects not measured: those of docs/ppo_atari_snd.md. SND-STD asks
which frame comes next, as the paper's code does (ST-DIM: which frame came before).
"""

import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_atari_snd as script
from ppo_atari_snd import mean_over_ranks

GAINS = {"std": (0.5, 0.5), "vic": (0.5, 2**0.5)}  # of the weights of target and predictor


@dataclass
class Args(script.Args):
    noop_max: int = 1  # an episode starts with 1 to this many no-ops; one less with --fire-reset
    warmup_steps: int = 0  # random steps per environment at the start; frame statistics are unused
    target: Literal["v", "std", "vic"] = "v"  # the target's loss: SND-V, SND-STD or SND-VIC
    spread_coef: float = 1e-4  # SND-STD: weight of the std across a frame's features


class SND(script.SND):
    target_convs = predictor_convs = script.POLICY_CONVS  # of SND-STD and SND-VIC

    def __init__(self, frame_shape: tuple[int, int, int], args: Args):
        super().__init__(frame_shape, args)
        self.kind = args.target
        self.spread_coef = args.spread_coef
        if self.kind == "v":
            return
        target_gain, predictor_gain = GAINS[self.kind]
        self.target = self.wider(self.target, self.target_convs, frame_shape, target_gain)
        self.predictor = self.wider(
            self.predictor, self.predictor_convs, frame_shape, predictor_gain
        )
        if self.kind == "std":
            depth = self.target[4].out_channels  # of the third convolution
            self.whole = nn.Linear(args.snd_features, depth)
            self.local = nn.Linear(depth, depth)
        self.to(memory_format=torch.channels_last)

    def wider(self, network, convs: list, frame_shape: tuple[int, int, int], gain: float):
        """Replace the convolutions by these, with ReLU, and the linear layer after them."""
        convs = script.conv_layers(frame_shape[0], convs, nn.ReLU)
        width = convs(torch.zeros(1, *frame_shape)).shape[1]
        linear = script.layer(nn.Linear(width, network[9].out_features))
        network = nn.Sequential(*convs, linear, *network[10:])
        for weights in network.parameters():
            weights.data *= gain / 2**0.5  # they are orthogonal with gain sqrt(2)
        return network

    def preprocess(self, frames):
        return frames.float() / 255

    def target_loss(self, frames, others, far):
        """The loss of pairs (frames[i], others[i]); with std and vic, others[i] comes next."""
        if self.kind == "v":
            return super().target_loss(frames, others, far)
        with torch.autocast(frames.device.type, torch.bfloat16, enabled=self.bf16):
            # Feature maps after three convolutions, (B, K, H, W)
            maps = self.target[:6](self.preprocess(frames))
            next_maps = self.target[:6](self.preprocess(others))
            a = self.target[6:](maps)
            b = self.target[6:](next_maps)
        a, b = a.float(), b.float()
        if self.kind == "vic":
            return vicreg(a, b)
        patches = maps.float().flatten(2).permute(2, 0, 1)  # (H * W, B, K)
        next_patches = next_maps.float().flatten(2).permute(2, 0, 1)
        loss = infonce(patches, self.whole(b), self.local(next_patches))
        return loss - self.spread_coef * a.std(1).mean()


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


def infonce(patches, whole, local):
    """SND-STD's contrastive loss: which frame of the batch comes next? (ST-DIM, regularized.)

    patches: (P, B, K), of the frames. whole: (B, K), of the next frames. local: (P, B, K), of their
    patches. 1e-4 x the norm of a patch's (B, B) logits keeps them small.
    """
    P, B, _ = patches.shape
    answers = torch.arange(B, device=patches.device).repeat(P)  # candidate i comes after frame i
    loss = 0
    for candidates in (whole, local):
        logits = patches @ candidates.mT  # (P, B, B): patch p of frame i with next frame j
        loss = loss + F.cross_entropy(logits.flatten(0, 1), answers)
        loss = loss + 1e-4 * logits.norm(dim=(1, 2)).mean()
    return loss


def draw_minibatches(num_rows: int, device, args: Args) -> tuple:
    """The row numbers of each minibatch of an iteration: one permutation for all epochs."""
    permutation = torch.randperm(num_rows, device=device)
    return permutation.repeat(args.update_epochs).split(args.minibatch_size)


learn_snd_v = script.learn_snd


def learn_snd(snd, optimizer, batch: dict, minibatches, micro_batch: int, args: Args) -> dict:
    """Train predictor and target in one ordered pass over the rollout -> means over minibatches."""
    device = batch["obs"].device
    minibatches = torch.arange(len(batch["action"]), device=device).split(args.minibatch_size)
    if args.target == "v":
        return learn_snd_v(snd, optimizer, batch, minibatches, micro_batch, args)
    frames = batch["obs"][:, -1:]  # frame i + num_envs comes after frame i
    share = args.predictor_share or min(1, 32 / (args.num_envs * script.WORLD))
    sums = defaultdict(float)
    for index in minibatches:
        minibatch = frames[index]
        mask = torch.rand(len(index), args.snd_features, device=device) < share
        # SND-STD sums over all ranks, and gradients are averaged over ranks below.
        num_kept = mean_over_ranks(mask.float().sum()).clamp(min=1 / script.WORLD)
        divisor = 1 / script.WORLD if args.target == "std" else num_kept
        optimizer.zero_grad()
        for start in range(0, args.minibatch_size, micro_batch):
            rows = slice(start, start + micro_batch)
            loss = (snd.errors(minibatch[rows]) * mask[rows]).sum() / divisor
            loss.backward()
            sums["loss/predictor"] += loss.detach()
        first = index[batch["valid"][index] > 0]  # after another row's frame a new episode begins
        if len(first) < 2:
            first = index  # VICReg's loss of one pair is nan
        second = first + args.num_envs
        loss = snd.target_loss(frames[first], frames[second], None)
        loss.backward()
        sums["loss/target"] += loss.detach()
        for parameter in snd.parameters():
            parameter.grad = mean_over_ranks(parameter.grad)
        optimizer.step()
    return {name: mean_over_ranks(x / len(minibatches)).item() for name, x in sums.items()}


script.SCRIPT = "snd_paper"
script.__doc__ = __doc__
script.FIXED += ["target"]
script.Args = Args
script.SND = SND
script.draw_minibatches = draw_minibatches
script.learn_snd = learn_snd

if __name__ == "__main__":
    sys.exit(script.main())
