"""How near a script's learner and its acting come to what its convolutions and matrix products alone allow.

    python benchmark/floor.py ppo_procgen --json benchmark/results/floor/ppo_procgen.json -- --env-id starpilot

Three figures, of the same machine, one after the other: GFLOP/s of a plain matrix product; rows a second of every
convolution and linear layer of the script's networks alone, forward and backward, in the best piece size (no ReLU,
pooling, residual sum, loss, optimiser or indexing); rows a second of the script itself, from time/learn_s and
time/policy_s of its last iteration (in which the synchronous scripts book the targets as acting). Nothing else may
run. Rows are agent steps, with all their epochs.
"""

import argparse
import contextlib
import importlib
import json
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
LEAST = 0.3  # seconds of a measurement


def seconds(work) -> float:
    """Median time of one call, over at least LEAST seconds and 3 calls, after one that warms up."""
    work()
    times, end = [], time.perf_counter() + LEAST
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def layers_of(network: nn.Module, inputs, calls) -> list:
    """(layer, shape of its input without the batch) of every convolution and linear layer, in the order of use."""
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
    """Of one row's forward pass: two a multiplication and addition."""
    if isinstance(layer, nn.Linear):
        return 2.0 * layer.weight.numel()
    return 2.0 * layer.weight.numel() * out[1] * out[2]


def alone(layers: list, piece: int, backward: bool) -> float:
    """Seconds a row of all layers, one after the other; the first needs no gradient of its input."""
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
            layer.weight.requires_grad_(), layer.bias.requires_grad_()
            layer(x).backward(gradient)

        total += seconds(work) / piece
    return total


def networks(script: str, args, made: dict) -> list:
    """(network, how it is called, passes forward and backward a row of the rollout, forward passes only)."""
    agent = made["Agent"]
    if script == "ppo_atari_rnd":
        frames, zeros = torch.zeros(2, 4, 84, 84, dtype=torch.uint8), torch.zeros(2)
        act = lambda net, x: net(x, torch.zeros(2, net.memory), zeros)  # noqa: E731
        rnd, share = made["RND"], args.predictor_share or min(1, 32 / args.num_envs)
        plain = lambda net, x: net(x)  # noqa: E731
        one = torch.zeros(2, 1, 84, 84)
        return [(agent, frames, act, args.update_epochs, 0), (rnd.predictor, one, plain, args.update_epochs * share, 0)]
    plain = lambda net, x: net(x)  # noqa: E731
    shape = dict(ppo_atari_snd=(4, 96, 96), appo_atari=(4, 84, 84)).get(script)
    shape = shape or (3 * len(importlib.import_module(script).STACKS[args.stack]), 64, 64)
    rows = [(agent, torch.zeros(2, *shape, dtype=torch.uint8), plain, args.update_epochs, 0)]
    if script == "ppo_atari_snd":
        snd, one = made["SND"], torch.zeros(2, 1, 96, 96)
        pairs = (args.pairs or args.minibatch_size // 8) / args.minibatch_size  # --target v
        rows.append((snd.predictor, one, plain, args.update_epochs, 0))
        rows.append((snd.target, one, plain, 2 * pairs * args.update_epochs, args.update_epochs))
    return rows


def keep(kind: type, made: dict) -> type:
    """A subclass whose first instance is kept in `made`, under the name of the class."""

    def init(self, *rest, **named):
        kind.__init__(self, *rest, **named)
        made.setdefault(kind.__name__, self)

    return type(kind.__name__, (kind,), {"__init__": init})


def main(argv=None) -> int:
    own, _, flags = " ".join(sys.argv[1:] if argv is None else argv).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script")
    parser.add_argument("--iterations", type=int, default=2, help="of the script; only the last one counts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(own.split())
    module, made = importlib.import_module(options.script), {}
    args = tyro.cli(module.Args, args=flags.split())
    args.total_timesteps, args.eval_episodes, args.quiet = options.iterations * args.batch_size, 0, True
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as args.run_dir:
        for name in {"Agent", "RND", "SND"} & vars(module).keys():  # keep the networks that `train` makes
            stack.enter_context(mock.patch.object(module, name, keep(getattr(module, name), made)))
        metrics = module.train(args)
    device_threads = torch.get_num_threads()
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    product = 2 * 1024**3 / seconds(lambda: a @ b) / 1e9
    floor, update_flops, sizes = 0.0, 0.0, {}
    for network, inputs, call, both, only in networks(options.script, args, made):
        layers = layers_of(network, inputs, call)
        one_pass = sum(flops(*layer) for layer in layers)
        first = flops(*layers[0])
        each = {piece: alone(layers, piece, True) for piece in PIECES}
        best = min(each, key=each.get)
        sizes[type(network).__name__ + str(len(sizes))] = dict(
            best=best, rows_per_s={p: 1 / s for p, s in each.items()}
        )
        floor += both * each[best]
        update_flops += both * (3 * one_pass - first) + only * one_pass
        if only:
            floor += only * min(alone(layers, piece, False) for piece in PIECES)
    rows = args.batch_size
    learn = rows / metrics["time/learn_s"]
    groups = getattr(args, "num_groups", 1)
    batch = args.num_envs // groups
    agent, inputs, call, *_ = networks(options.script, args, made)[0]
    frames = torch.randint(0, 256, (batch, *inputs.shape[1:]), dtype=torch.uint8)
    if options.script == "ppo_atari_rnd":
        work = lambda: agent(frames, torch.zeros(batch, agent.memory), torch.zeros(batch))  # noqa: E731
    else:
        work = lambda: agent(frames)  # noqa: E731
    forward = batch / seconds(torch.no_grad()(work))
    acting = rows / metrics["time/policy_s"]
    result = dict(
        script=options.script,
        flags=flags,
        git=module.provenance(torch.device("cpu"))["git"],
        threads=device_threads,
        matrix_product_gflops=product,
        update_gflop_per_row=update_flops / 1e9,
        layers_alone_rows_per_s=1 / floor,
        layers_alone_gflops=update_flops / floor / 1e9,
        learner_rows_per_s=learn,
        learner_gflops=update_flops * learn / 1e9,
        learner_share=learn * floor,
        forward_rows_per_s=forward,
        acting_rows_per_s=acting,
        acting_share=acting / forward,
        acting_batch=batch,
        pieces=sizes,
    )
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
