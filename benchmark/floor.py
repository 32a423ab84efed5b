"""How close a script's learner and its acting come to the speed of its convolutions and matrix products alone.

    python benchmark/floor.py ppo_procgen --json floor.json -- --env-id starpilot

The script trains. Between its iterations the same process measures
- GFLOP/s of a plain matrix product;
- rows per second of every convolution and linear layer of the script's networks alone, forward and backward, with the
  batch size that was best at first (no ReLU, pooling, residual sum, loss, optimizer or indexing);
- rows per second of the policy's forward pass alone.
The script's own rates are from time/learn_s and time/policy_s of the iteration between two measurements (synchronous
scripts count their targets in time/policy_s). Shares are medians over the rounds. Rows are environment steps, with all
their epochs.
Run it with nothing else running, on the CPU. Scripts with groups need --sync --num-groups 1 (IMPALA also --num-envs
32): one thread at a time.
"""

import argparse
import contextlib
import importlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import tyro
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PIECES = (16, 32, 64, 128, 256, 512)
LEAST = 0.1  # seconds of a measurement


class Enough(BaseException):
    """Ends the training once everything is measured."""


def seconds(work) -> float:
    """Median time of a call, over at least LEAST seconds and 3 calls, after a warm-up call."""
    work()
    times, end = [], time.perf_counter() + LEAST
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def layers_of(network: nn.Module, inputs, calls) -> list:
    """(layer, shapes of its input and output without the batch) of every convolution and linear layer, in order."""
    found, hooks = [], []
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            hook = module.register_forward_hook(lambda layer, x, y: found.append((layer, x[0].shape[1:], y.shape[1:])))
            hooks.append(hook)
    with torch.no_grad():
        calls(network, inputs)
    for hook in hooks:
        hook.remove()
    return found


def flops(layer, shape, out) -> float:
    """Of one row's forward pass; a multiplication and an addition are two."""
    if isinstance(layer, nn.Linear):
        return 2.0 * layer.weight.numel()
    return 2.0 * layer.weight.numel() * out[1] * out[2]


def alone(layers: list, piece: int, backward: bool) -> float:
    """Seconds per row of all layers, one after the other; the first one needs no gradient of its input."""
    total = 0.0
    for i, (layer, shape, _) in enumerate(layers):
        x = torch.randn(piece, *shape)
        x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
        x.requires_grad_(backward and i > 0)
        with torch.no_grad():
            gradient = torch.randn_like(layer(x))

        def work(layer=layer, x=x, gradient=gradient):
            if not backward:
                with torch.no_grad():
                    layer(x)
                return
            x.grad = layer.weight.grad = layer.bias.grad = None
            layer(x).backward(gradient)

        total += seconds(work) / piece
    return total


def networks(script: str, args, made: dict) -> list:
    """(network, inputs, how it is called, passes per row of the rollout: forward and backward, forward only)."""
    agent = made["Agent"]
    plain = lambda net, x: net(x)  # noqa: E731
    if script == "ppo_atari_rnd":
        size = (args.frame_size, args.frame_size)
        frames = torch.zeros(2, args.stack, *size, dtype=torch.uint8)
        rnd, share = made["RND"], args.predictor_share or min(1, 32 / args.num_envs)
        predictor = (rnd.predictor, torch.zeros(2, 1, *size), plain, args.update_epochs * share, 0)
        return [(agent, frames, plain, args.update_epochs, 0), predictor]
    if "atari" in script:
        shape = (args.stack, args.frame_size, args.frame_size)
    else:
        shape = (3 * len(importlib.import_module(script).STACKS[args.stack]), 64, 64)
    passes = args.update_epochs * (1 + getattr(args, "replay_proportion", 0))
    if script == "ppo_procgen":  # the remainder of a rollout is unused
        rollout = args.num_envs * args.num_steps
        passes *= rollout // args.minibatch_size * args.minibatch_size / rollout
    rows = [(agent, torch.zeros(2, *shape, dtype=torch.uint8), plain, passes, 0)]
    if script == "ppo_atari_snd":
        snd, one = made["SND"], torch.zeros(2, 1, *shape[1:])
        pairs = args.pairs / args.minibatch_size
        rows.append((snd.predictor, one, plain, args.update_epochs, 0))
        rows.append((snd.target, one, plain, 2 * pairs * args.update_epochs, args.update_epochs))
    return rows


def keep(kind: type, made: dict) -> type:
    """A subclass whose first instance is stored in `made`, under the name of the class."""

    def init(self, *rest, **named):
        kind.__init__(self, *rest, **named)
        made.setdefault(kind.__name__, self)

    return type(kind.__name__, (kind,), {"__init__": init})


class Rounds:
    """The measurements between a script's iterations, and the script's rows of metrics.csv."""

    def __init__(self, script: str, args, made: dict, wanted: int):
        self.script, self.args, self.made, self.wanted = script, args, made, wanted
        self.measured, self.rows = [], []

    def begin(self):
        """Find the best batch size of each network."""
        self.networks = networks(self.script, self.args, self.made)
        self.layers = [layers_of(*entry[:3]) for entry in self.networks]
        self.pieces = [{piece: alone(layers, piece, True) for piece in PIECES} for layers in self.layers]
        agent, inputs, *_ = self.networks[0]
        self.batch = self.args.num_envs // getattr(self.args, "num_groups", 1)
        frames = torch.randint(0, 256, (self.batch, *inputs.shape[1:]), dtype=torch.uint8)
        self.forward = torch.no_grad()(lambda: agent(frames))

    def measure(self):
        """One round: seconds per row of the layers alone and of the policy's forward pass, GFLOP/s of the product."""
        a, b, floor = torch.randn(1024, 1024), torch.randn(1024, 1024), 0.0
        for layers, each, (*_, both, only) in zip(self.layers, self.pieces, self.networks, strict=True):
            best = min(each, key=each.get)
            floor += both * alone(layers, best, True) + (only * alone(layers, best, False) if only else 0)
        product = 2 * 1024**3 / seconds(lambda: a @ b) / 1e9
        forward = seconds(self.forward) / self.batch
        self.measured.append(dict(floor=floor, forward=forward, product=product))

    def gflop(self) -> float:
        """Arithmetic of a row's update: three forward passes, less the gradient of the first layer's input."""
        total = 0.0
        for layers, (*_, both, only) in zip(self.layers, self.networks, strict=True):
            one_pass = sum(flops(*layer) for layer in layers)
            total += both * (3 * one_pass - flops(*layers[0])) + only * one_pass
        return total / 1e9

    def after(self, run, log, metrics):
        """In place of the script's Run.log, which is `log`."""
        log(run, metrics)
        self.rows.append(metrics)
        if len(self.rows) == 1:
            self.begin()
        self.measure()
        if len(self.rows) == self.wanted + 1:
            raise Enough

    def result(self) -> dict:
        """Medians over rounds; an iteration is compared with the mean of the rounds before and after it."""
        size = self.rows[0]["step"]  # of an iteration
        own = self.rows[1:]
        pairs = list(zip(self.measured, self.measured[1:], strict=False))
        learn, act = ([size / row[f"time/{name}_s"] for row in own] for name in ("learn", "policy"))
        floor, forward = ([2 / (a[key] + b[key]) for a, b in pairs] for key in ("floor", "forward"))
        median = statistics.median
        shares = {
            "learner": [x / y for x, y in zip(learn, floor, strict=True)],
            "acting": [x / y for x, y in zip(act, forward, strict=True)],
        }
        found = dict(
            matrix_product_gflops=median(one["product"] for one in self.measured),
            update_gflop_per_row=self.gflop(),
            layers_alone_rows_per_s=median(floor),
            layers_alone_gflops=median(floor) * self.gflop(),
            learner_rows_per_s=median(learn),
            learner_gflops=median(learn) * self.gflop(),
            forward_rows_per_s=median(forward),
            acting_rows_per_s=median(act),
            acting_batch=self.batch,
        )
        for name, each in shares.items():
            found |= {f"{name}_share": median(each), f"{name}_shares": each}
        return found


def main(argv=None) -> int:
    own, _, flags = " ".join(sys.argv[1:] if argv is None else argv).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=sorted(path.stem for path in ROOT.glob("*.py")), help="without .py")
    parser.add_argument("--rounds", type=int, default=3, help="iterations that count, after a warm-up iteration")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args(own.split())
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: must be at least 1")
    module, made = importlib.import_module(options.script), {}
    args = tyro.cli(module.Args, args=flags.split())
    if not getattr(args, "sync", True) or getattr(args, "num_groups", 1) > 1:
        parser.error(f"{options.script}: needs -- --sync --num-groups 1, otherwise actors share its cores")
    if args.precision != "fp32":
        parser.error(f"--precision {args.precision}: not measured here")
    if args.device not in ("auto", "cpu"):
        parser.error(f"--device {args.device}: on a CPU only")
    args.device = "cpu"
    if options.json:
        if options.json.is_dir():
            parser.error(f"--json {options.json}: is a folder")
        options.json.parent.mkdir(parents=True, exist_ok=True)
    args.total_timesteps, args.eval_episodes = 10**9, 0
    rounds = Rounds(options.script, args, made, options.rounds)
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as args.run_dir:
        for name in {"Agent", "RND", "SND"} & vars(module).keys():  # store the networks that `train` makes
            stack.enter_context(mock.patch.object(module, name, keep(getattr(module, name), made)))
        log = module.Run.log
        timed = mock.patch.object(module.Run, "log", lambda run, metrics: rounds.after(run, log, metrics))
        stack.enter_context(timed)
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))  # stdout gets the result only
        try:
            module.train(args)
        except module.UsageError as error:
            parser.error(str(error))
        except Enough:
            pass
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    revision = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    result = dict(script=options.script, flags=flags, git=revision)
    result |= dict(threads=torch.get_num_threads()) | rounds.result()
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
