"""rnd_recurrent.py with a Differentiable Neural Computer (DNC) in the place of the policy's GRU.

    python benchmark/variants/rnd_dnc.py --env-id MontezumaRevenge --dnc 16 16 4

Source: Graves et al. 2016, Nature 538, pages 471-476, Methods. github.com/AdeelMufti/RL-RND offers
it as the memory of its agent and of its RND networks; here only the policy has it. Not measured.
The memory is empty at the start of an episode.
"""

import math
import sys

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

import rnd_recurrent
from rnd_recurrent import script


@dataclass(config=script.CONFIG)
class Args(rnd_recurrent.Args):
    dnc: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 16, 4)
    """the memory's slots, their width, and read heads"""


def content(memory, keys, strengths):
    """Weights (B, K, N) of the slots (B, N, W), larger where they resemble the keys (B, K, W)."""
    cosine = F.normalize(keys, dim=-1, eps=1e-6) @ F.normalize(memory, dim=-1, eps=1e-6).mT
    return (strengths[..., None] * cosine).softmax(-1)


def new_usage(usage, write, reads, free_gates):
    """How far each slot is in use (B, N): writing raises it, reading with an open gate frees it."""
    retention = (1 - free_gates[..., None] * reads).prod(1)
    return (usage + write - usage * write) * retention


def allocation(usage):
    """Weights (B, N) for a new entry: the least used slot first, others get what it leaves."""
    ordered, order = usage.sort(dim=-1, stable=True)
    used_before = F.pad(ordered[:, :-1], (1, 0), value=1).cumprod(-1)
    return torch.zeros_like(usage).scatter(-1, order, (1 - ordered) * used_before)


def new_links(links, precedence, write):
    """links[b, i, j]: slot i was written right after slot j; precedence (B, N): last written."""
    kept = 1 - write[:, :, None] - write[:, None, :]
    links = kept * links + write[:, :, None] * precedence[:, None, :]
    links = links * (1 - torch.eye(links.shape[-1], device=links.device))
    return links, (1 - write.sum(-1, keepdim=True)) * precedence + write


class DNC(nn.Module):
    """Input (B, D) and state (B, self.size) -> output (B, width), next state. Starts from zeros."""

    def __init__(self, num_inputs: int, width: int, N: int, W: int, R: int):
        super().__init__()
        # The state: of the controller, memory, usage, precedence, links, write, reads, last read
        self.shapes = [(width,), (width,), (N, W), (N,), (N,), (N, N), (N,), (R, N), (R, W)]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.size = sum(self.sizes)
        # Of the interface: read keys, strengths, free gates and modes; then of the write head
        self.parts = [R * W, R, R, 3 * R, W, 1, W, W, 1, 1]
        self.controller = nn.LSTMCell(num_inputs + R * W, width)
        self.interface = nn.Linear(width, sum(self.parts))
        self.output = nn.Linear(width + R * W, width)

    def forward(self, x, state):
        pairs = zip(state.split(self.sizes, -1), self.shapes, strict=True)
        parts = [part.unflatten(-1, shape) for part, shape in pairs]
        hidden, cell, memory, usage, precedence, links, write, reads, last_read = parts
        R = reads.shape[1]
        hidden, cell = self.controller(torch.cat([x, last_read.flatten(1)], -1), (hidden, cell))
        parts = self.interface(hidden).split(self.parts, -1)
        read_keys, read_strengths, free_gates, modes, *write_head = parts
        write_key, write_strength, erase, vector, allocation_gate, write_gate = write_head
        # Write
        usage = new_usage(usage, write, reads, free_gates.sigmoid())
        similar = content(memory, write_key[:, None], 1 + F.softplus(write_strength))[:, 0]
        place = torch.lerp(similar, allocation(usage), allocation_gate.sigmoid())
        write = write_gate.sigmoid() * place
        memory = memory * (1 - write[..., None] * erase.sigmoid()[:, None])
        memory = memory + write[..., None] * vector[:, None]
        # Read: backwards in the order of writing, by content, forwards
        links, precedence = new_links(links, precedence, write)
        keys = read_keys.unflatten(-1, (R, -1))
        similar = content(memory, keys, 1 + F.softplus(read_strengths))
        ways = torch.stack([reads @ links, similar, reads @ links.mT], -1)  # (B, R, N, 3)
        modes = modes.unflatten(-1, (R, 1, 3)).softmax(-1)
        reads = (ways * modes).sum(-1)
        last_read = reads @ memory
        output = self.output(torch.cat([hidden, last_read.flatten(1)], -1))
        parts = [hidden, cell, memory, usage, precedence, links, write, reads, last_read]
        return output, torch.cat([part.flatten(1) for part in parts], -1)


class Agent(rnd_recurrent.Agent):
    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, args: Args):
        super().__init__(obs_shape, num_actions, args)
        self.hidden2 = DNC(256, 256, *args.dnc)
        self.memory_size = self.hidden2.size

    def recur(self, x, memory, valid):
        """Run the DNC over the rows of each environment: x (B, 256) -> outputs (B, 256), memory."""
        x = x.float().unflatten(0, (len(memory), -1))
        valid = valid.view(len(memory), -1, 1)
        outputs = []
        with torch.autocast(x.device.type, enabled=False):
            for t in range(x.shape[1]):
                output, memory = self.hidden2(x[:, t], memory)
                outputs.append(output)
                memory = memory * valid[:, t]  # the next row begins an episode if valid is 0
        return torch.stack(outputs, 1).flatten(0, 1), memory


script.SCRIPT = "rnd_dnc"
script.__doc__ = __doc__
script.Args = Args
script.Agent = Agent

if __name__ == "__main__":
    sys.exit(script.main())
