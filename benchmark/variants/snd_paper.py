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
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, NonNegativeInt
from pydantic.dataclasses import dataclass
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_atari_snd as script

GAINS = {"std": (0.5, 0.5), "vic": (0.5, 2**0.5)}  # of the weights of target and predictor
latest = {}  # the observation after the rollout


@dataclass(config=script.CONFIG)
class Args(script.Args):
    noop_max: Annotated[int, Field(ge=1, le=1000)] = 1  # no-ops at the start of an episode
    warmup_steps: NonNegativeInt = 0  # random steps at the start; frame statistics are unused
    target: Literal["v", "std", "vic"] = "v"  # the target's loss: SND-V, SND-STD or SND-VIC
    spread_coef: NonNegativeFloat = 1e-4  # SND-STD: weight of the std across a frame's features


class Agent(script.Agent):
    def forward(self, obs):
        if not torch.is_grad_enabled():  # acting
            self.keep(obs)
        return super().forward(obs)

    @torch.compiler.disable
    def keep(self, obs):
        latest["obs"] = obs


class SND(script.SND):
    target_convs = predictor_convs = script.POLICY_CONVS  # of SND-STD and SND-VIC

    def __init__(self, frame_shape: tuple[int, int, int], args: Args):
        super().__init__(frame_shape, args)
        self.kind = args.target
        self.spread_coef = args.spread_coef
        self.num_rows = args.minibatch_size * script.WORLD
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

    def predictor_loss(self, rows: dict):
        losses, terms = super().predictor_loss(rows)
        if self.kind != "std":
            return losses, terms
        losses = losses * rows["mask"].sum(1) * self.num_rows  # whose mean is the sum of errors
        return losses, {"loss/predictor": losses}

    def target_loss(self, pairs: dict):
        """The loss of pairs of frames; with std and vic, the second one comes next."""
        if self.kind == "v":
            return super().target_loss(pairs)
        loss = self.next_loss(pairs["first"], pairs["second"]).expand(len(pairs["far"]))
        return loss, {"loss/target": loss}

    def next_loss(self, frames, next_frames):
        with torch.autocast(frames.device.type, torch.bfloat16, enabled=self.bf16):
            # Feature maps after three convolutions, (B, K, H, W)
            maps = self.target[:6](self.preprocess(frames))
            next_maps = self.target[:6](self.preprocess(next_frames))
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


def learn(agent, snd, optimizer, batch: dict, ent_coef: float, args: Args) -> dict:
    """Train the policy, then predictor and target, in an ordered pass -> means over minibatches."""
    size, num_rows, device = args.minibatch_size, len(batch["action"]), batch["obs"].device
    # Frame i + num_envs comes after frame i
    frames = [obs[:, -args.frame_channels :] for obs in (batch["obs"], latest["obs"])]
    frames = torch.cat(frames)
    share = args.predictor_share or min(1, 32 / (args.num_envs * script.WORLD))
    target = nn.ModuleList([snd.target, *([snd.whole, snd.local] if args.target == "std" else [])])
    updates, snd_updates = [], []

    def policy_loss(rows):
        return script.ppo_loss(agent, rows, ent_coef, args)

    snd.zero_grad()  # the optimizer skips what has no gradient
    permutation = torch.randperm(num_rows, device=device)  # one for all epochs
    for index in permutation.repeat(args.update_epochs).split(size):
        rows = {name: column[index] for name, column in batch.items()}
        means = script.gradient(agent, policy_loss, rows, args.micro_batch, rows["valid"])
        limit = args.max_grad_norm or torch.inf
        means["train/grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), limit)
        optimizer.step()
        updates.append(means)
    agent.zero_grad()
    for index in torch.arange(num_rows, device=device).split(size):
        mask = torch.rand(size, args.snd_features, device=device) < share
        weight = None if args.target == "std" else mask.sum(1)
        rows = {"frame": frames[index], "mask": mask}
        means = script.gradient(snd.predictor, snd.predictor_loss, rows, args.micro_batch, weight)
        if args.target == "v":
            first, other = torch.randint(num_rows, (2, args.pairs), device=device)
            second = torch.where(torch.rand(args.pairs, device=device) < 0.5, first, other)
        else:
            first = index[batch["valid"][index] > 0]  # after another row a new episode begins
            first = first if len(first) > 1 else index  # VICReg's loss of one pair is nan
            second = first + args.num_envs
        pairs = {"first": frames[first], "second": frames[second], "far": first != second}
        means |= script.gradient(target, snd.target_loss, pairs, len(first))  # in one piece
        optimizer.step()
        snd_updates.append(means)
    return script.mean_of(updates) | script.mean_of(snd_updates)


script.SCRIPT = "snd_paper"
script.__doc__ = __doc__
script.Args = Args
script.Agent = Agent
script.SND = SND
script.learn = learn

if __name__ == "__main__":
    sys.exit(script.main())
