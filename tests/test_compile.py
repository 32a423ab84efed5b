"""--compile without a GPU: what is compiled, how often, and what is left to Python."""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import KINDS, spy_on

COMPILE = torch.compile
SCHEDULES = dict(lr=(0, 1e-3, 192, 1e-4), ent_coef=(0, 0.1, 192, 0.01))


class Forgetful:
    """Compiles nothing, but its results are lost when the next one starts, as those of CUDA graphs are."""

    def __init__(self):
        self.results = []

    def __call__(self, graph, inputs):
        def run(*inputs):
            for old in self.results:
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
    """One graph each of acting (synchronous scripts) and loss, for all rates; no result is read too late.

    Metrics and weights equal those without --compile after three iterations.
    """
    runs, compiled = [], []
    spy_on(monkeypatch, script.module.Run, "log", lambda *_: compiled.append(graphs()))
    options = {} if script.name in ("ppo_procgen", "ppo_atari_rnd", "ppo_atari_snd") else dict(sync=True)
    for name in (False, True):
        result = script.train(script.fake(), 3, run_name=str(name), compile=name, **SCHEDULES, **options)
        metrics = {key: float(x) for key, x in result.items() if "/" in key and "time/" not in key}
        runs.append((metrics, dict(result["agent"].state_dict())))
    assert compiled == [0, 0, 0] + 3 * [1 if options else 2]
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-5)
    torch.testing.assert_close(runs[1][1], runs[0][1], rtol=1e-5, atol=1e-7)


def test_graphs_on_a_gpu_only(script, monkeypatch):
    """And not with micro-batches, whose gradients the next graph would overwrite."""
    modes, compiled, options = [], script.module.compiled, script.module.Args
    monkeypatch.setattr(torch, "compile", lambda mode: modes.append(mode))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for changes in (dict(), dict(device="cpu"), dict(micro_batch=64)):
        compiled(options(compile=True, **changes))
    assert modes == ["reduce-overhead", None, None] and compiled(options())(len) is len


class Count(TorchDispatchMode):
    """Counts operations other than views, except in compiled functions and their backward passes."""

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
        self.operations += self.depth == 0 and not getattr(function, "is_view", False)
        return function(*args, **(kwargs or {}))


def test_few_operations_are_left(script, monkeypatch):
    """They are launched one by one from Python, for which a GPU would wait."""
    count = Count(monkeypatch)
    envs, acting, learning = script.fake(), [], []
    step, learn = envs.step, script.module.learn

    def counted_step(actions):
        acting.append(count.operations)
        return step(actions)

    def counted_learn(*inputs):
        start = count.operations
        means = learn(*inputs)
        learning.append(count.operations - start)
        return means

    monkeypatch.setattr(envs, "step", counted_step)
    monkeypatch.setattr(script.module, "learn", counted_learn)
    with count:
        script.train(envs, 2, compile=True, minibatch_size=16, update_epochs=10, norm_reward=0)
    assert np.diff(acting[:16]).max() <= 12 and learning[1] <= 40 * 30  # the first creates Adam's state
