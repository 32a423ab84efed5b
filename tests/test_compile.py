"""--compile without a GPU: what is compiled, how often, and what is left to Python."""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import KINDS, spy_on

COMPILE = torch.compile
LOSSES = dict(ppo_atari_rnd=2, ppo_atari_snd=3)  # one per network that learns; the others have one
SCHEDULES = dict(lr=(0, 1e-3, 192, 1e-4), ent_coef=(0, 0.1, 192, 0.01))


class Forgetful:
    """Compiles nothing, but results and gradients are lost when the next one starts, as those of CUDA graphs are."""

    def __init__(self):
        self.results, self.weights = [], set()

    def __call__(self, graph, inputs):
        def run(*inputs):
            self.weights |= {x for x in inputs if isinstance(x, torch.nn.Parameter)}
            gradients = [x.grad for x in self.weights if x.grad is not None]
            for old in self.results + gradients:
                old.fill_(float("nan") if old.is_floating_point() else 0)
            results = graph.forward(*inputs)
            self.results = [x.detach() for x in results]
            return results

        return run


@pytest.fixture
def graphs(monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    backend = Forgetful()
    monkeypatch.setattr(torch, "compile", lambda mode: lambda f: COMPILE(f, backend=backend, fullgraph=True))
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.parametrize("script", KINDS, indirect=True)
def test_compiled_once_and_whole(script, graphs, monkeypatch):
    """One graph each of acting and loss, for all rates and weights; no result is read too late.

    Metrics and weights equal those without --compile after three iterations.
    """
    runs, compiled = [], []
    spy_on(monkeypatch, script.module.Run, "log", lambda *_: compiled.append(graphs()))
    options = dict(micro_batch=4096)  # one piece: the gradients of several add up
    if script.name in ("appo_atari", "impala_procgen"):
        options["sync"] = True
    for name in (False, True):
        result = script.train(script.fake(), 3, run_name=str(name), compile=name, **SCHEDULES, **options)
        metrics = {key: float(x) for key, x in result.items() if "/" in key and "time/" not in key}
        runs.append((metrics, dict(result["agent"].state_dict())))
    assert compiled == [0, 0, 0] + 3 * [1 + LOSSES.get(script.name, 1)]
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-5)
    torch.testing.assert_close(runs[1][1], runs[0][1], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("script", KINDS, indirect=True)
def test_a_compiled_update_equals_the_eager_one(script):
    """With PyTorch's compiler, which draws the same random numbers here. Later differences would grow by chaos."""
    options = dict(sync=True) if script.name in ("appo_atari", "impala_procgen") else {}
    size = 2 if script.name == "appo_atari" else 1  # a dataset is two minibatches
    weights = []
    for name in (False, True):
        with torch._inductor.config.patch(fallback_random=True):
            result = script.train(script.fake(), size, run_name=str(name), compile=name, device="cpu", **options)
        weights.append(result["agent"].state_dict())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)


def test_graphs_on_a_gpu_only(script, monkeypatch):
    """And not with micro-batches, whose gradients the next graph would overwrite."""
    modes, compiled, options = [], script.module.compiled, script.module.Args
    monkeypatch.setattr(torch, "compile", lambda mode: modes.append(mode))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for changes in (dict(), dict(device="cpu"), dict(micro_batch=64)):
        compiled(options(compile=True, **changes))
    assert modes == ["reduce-overhead", None, None] and compiled(options())(len) is len


class Count(TorchDispatchMode):
    """Counts operations on tensors, without views, except in compiled functions and their backward passes."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.operations, self.depth = 0, 0
        monkeypatch.setattr(torch, "compile", lambda mode: self.hidden)
        monkeypatch.setattr(torch.Tensor, "backward", self.hidden(torch.Tensor.backward))

    def hidden(self, function):
        def uncounted(*inputs):
            self.depth += 1
            try:
                return function(*inputs)
            finally:
                self.depth -= 1

        return uncounted

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        view = function.is_view or function is torch.ops.aten._unsafe_view.default
        self.operations += self.depth == 0 and not view and function.namespace != "profiler"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("script", KINDS, indirect=True)
def test_few_operations_are_left(script, monkeypatch):
    """They are launched one by one, for which a GPU waits: at most 12 per acting step, 30 per network and SGD step."""
    count, envs, acting, learning, updates = Count(monkeypatch), script.fake(), [], [], []
    options = dict(minibatch_size=64, update_epochs=4, micro_batch=64)
    if script.name == "ppo_procgen":
        options["norm_reward"] = 0  # its statistics are computed on the CPU
    if script.name == "appo_atari":
        options |= dict(minibatch_size=16, num_minibatches=8)
    step, learn = envs.step, script.module.learn

    def counted_step(actions):
        acting.append(count.operations)
        return step(actions)

    def counted_learn(*inputs):
        start = count.operations
        means = learn(*inputs)
        learning.append((count.operations - start) / len(updates))
        updates.clear()
        return means

    def counted_rollout(*inputs):
        with count:  # each thread has its own modes
            return play_rollout(*inputs)

    if script.name in ("appo_atari", "impala_procgen"):
        options["sync"] = True
        play_rollout = script.module.play_rollout
        monkeypatch.setattr(script.module, "play_rollout", counted_rollout)
    monkeypatch.setattr(envs, "step", counted_step)
    monkeypatch.setattr(script.module, "learn", counted_learn)
    spy_on(monkeypatch, torch.optim.Adam, "step", lambda *_: updates.append(1))
    with count:
        script.train(envs, 4, compile=True, **options)
    acting = np.diff(acting[-16:])  # of the last rollout
    assert max(acting) <= 12 and learning[1] <= 30  # the first creates Adam's state
