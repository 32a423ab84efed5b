"""The variants of ppo_atari_rnd.py: its recurrent policy, and that with a DNC in the place of the GRU."""

import types

import numpy as np
import pytest
import torch

import conftest
from conftest import Games
from test_ppo_atari_rnd import SHAPE, SMALL, N, T, assert_updates_equal_reference, plain_agent


@pytest.mark.usefixtures("in_float64")
def test_updates_equal_float64_reference(variant, tmp_path, monkeypatch):
    """The memory is carried through rollouts and empty after an end; SGD steps run it over whole environments."""
    changes = dict(micro_batch=7, max_grad_norm=0.05, ext_coef=0, bonus_after=T * N)
    assert_updates_equal_reference(variant("rnd_recurrent").script, tmp_path, monkeypatch, changes)


def test_memory_is_carried_in_evaluation(variant):
    """Each episode starts with an empty memory; that of training is left alone."""
    module = variant("rnd_recurrent")
    torch.manual_seed(0)
    agent, calls = module.Agent(SHAPE, 4, module.Args()), []
    agent.policy.weight.data *= 30
    agent.envs = training = object()
    agent.register_forward_hook(lambda module, inputs, outputs: calls.append((inputs[0], outputs[0])))
    episodes = module.play(agent, Games([[([5.0] * 4, "terminated")]], shape=SHAPE), 3, seed=0)
    assert episodes == [(0, 20.0, 4)] * 3  # every fifth step's action is ignored
    assert agent.envs is training
    w = {name: x.double() for name, x in agent.state_dict().items()}
    for first in (0, 5, 10):
        obs, logits = (torch.stack(part) for part in zip(*calls[first : first + 5], strict=False))
        expected, *_ = plain_agent(w, obs, torch.zeros(1, 256).double(), torch.zeros(len(obs), 1, dtype=bool))
        torch.testing.assert_close(logits.double(), expected, rtol=1e-3, atol=1e-4)


def test_training_ends_at_the_target_return(variant, tmp_path):
    """When the last 100 episodes average it, not before there are 100; it is saved as usual."""
    run = conftest.runner(variant("rnd_recurrent").script, SMALL)
    # Episodes 0 to 24 of each of the 4 environments return 0.75, 25 to 49 return 3.
    episodes = [([x, 0.0, 0.0], "terminated") for x in 25 * [0.75] + 25 * [3.0]]
    for target, iterations in {0.75: 25, 2: 39}.items():
        changes = dict(target_return=target, num_steps=4, warmup_steps=0)  # an iteration is one episode of each
        metrics, saved = run(tmp_path, Games([episodes] * N, shape=SHAPE), 42, f"target {target}", **changes)
        assert saved["step"] == metrics["step"] == 16 * iterations


def plain_dnc(dnc, x, state):
    """A step of one environment in NumPy, slot by slot (Graves et al. 2016, Methods)."""
    w = {name: weight.detach().double().numpy() for name, weight in dnc.named_parameters()}
    hidden, cell, memory, usage, precedence, links, write, reads, last = state
    R, N = reads.shape

    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    def content(key, strength):
        norms = np.linalg.norm(memory, axis=1) * np.linalg.norm(key)
        cosine = np.divide(memory @ key, norms, out=norms * 0, where=norms > 0)
        scores = np.exp((1 + np.log1p(np.exp(strength))) * cosine)
        return scores / scores.sum()

    gates = w["controller.weight_ih"] @ np.concatenate([x, last.ravel()]) + w["controller.bias_ih"]
    i, f, g, o = np.split(gates + w["controller.weight_hh"] @ hidden + w["controller.bias_hh"], 4)
    cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
    hidden = sigmoid(o) * np.tanh(cell)
    parts = np.split(w["interface.weight"] @ hidden + w["interface.bias"], np.cumsum(dnc.parts)[:-1])
    keys, strengths, free, modes, key, strength, erase, vector, allocation_gate, write_gate = parts
    kept = [np.prod([1 - sigmoid(free[r]) * reads[r, n] for r in range(R)]) for n in range(N)]
    usage = np.array([(usage[n] + write[n] - usage[n] * write[n]) * kept[n] for n in range(N)])
    allocation, product = np.zeros(N), 1.0
    for n in np.argsort(usage, kind="stable"):
        allocation[n] = (1 - usage[n]) * product
        product *= usage[n]
    a, similar = sigmoid(allocation_gate), content(key, strength[0])
    write = sigmoid(write_gate) * (a * allocation + (1 - a) * similar)
    memory = memory * (1 - np.outer(write, sigmoid(erase))) + np.outer(write, vector)
    new = np.zeros((N, N))
    for n, m in np.ndindex(N, N):
        if n != m:
            new[n, m] = (1 - write[n] - write[m]) * links[n, m] + write[n] * precedence[m]
    precedence = (1 - write.sum()) * precedence + write
    for r in range(R):
        mode = np.exp(modes.reshape(R, 3)[r])
        backward, forward = new.T @ reads[r], new @ reads[r]
        similar = content(keys.reshape(R, -1)[r], strengths[r])
        reads[r] = (mode[0] * backward + mode[1] * similar + mode[2] * forward) / mode.sum()
    last = reads @ memory
    output = w["output.weight"] @ np.concatenate([hidden, last.ravel()]) + w["output.bias"]
    return output, [hidden, cell, memory, usage, precedence, new, write, reads, last]


@pytest.mark.usefixtures("in_float64")
def test_dnc_equals_its_equations(variant):
    """Two environments of eight steps, the second with an end; weights so large that every gate and mode matters."""
    module = variant("rnd_dnc")
    torch.manual_seed(0)
    dnc = module.DNC(3, 5, 4, 3, 2)
    for weight in dnc.parameters():
        torch.nn.init.normal_(weight, std=0.7)
    x, valid = torch.randn(2, 8, 3), torch.ones(2, 8)
    valid[1, 3] = 0
    agent = types.SimpleNamespace(hidden2=dnc)
    outputs, memory = module.Agent.recur(agent, x.flatten(0, 1), torch.zeros(2, dnc.size), valid.flatten())
    for env in range(2):
        plain = [np.zeros(shape) for shape in dnc.shapes]
        for t in range(8):
            expected, plain = plain_dnc(dnc, x[env, t].numpy(), plain)
            np.testing.assert_allclose(outputs[8 * env + t].detach(), expected, rtol=1e-9, atol=1e-9)
            if not valid[env, t]:
                plain = [np.zeros(shape) for shape in dnc.shapes]
        flat = np.concatenate([part.ravel() for part in plain])
        np.testing.assert_allclose(memory[env].detach(), flat, rtol=1e-9, atol=1e-9)
