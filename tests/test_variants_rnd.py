"""The variants of ppo_atari_rnd.py: its recurrent policy, and that with a DNC in the place of the GRU."""

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


def test_initial_weights_of_the_gru(variant):
    module = variant("rnd_recurrent")
    gains = dict(residual_value=0.1, residual_policy=0.1, policy=0.01, value=0.01, hidden2=1)
    conftest.assert_initial(module.Agent((4, 84, 84), 18, module.Args()), gains)


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


def test_an_end_empties_the_dnc(variant):
    """The row after a row that shows an episode's last observation is played as if it was the first."""
    module = variant("rnd_dnc")
    agent = module.Agent((4, 44, 44), 5, module.Args(dnc=(4, 3, 2)))
    x, empty = torch.rand(6, 256), torch.zeros(1, agent.memory_size)  # two environments, three rows each
    with torch.no_grad():
        outputs, after = agent.recur(x, empty.repeat(2, 1), torch.tensor([1.0, 0, 1, 1, 1, 1]))
        both, ended = agent.recur(x[:2], empty, torch.tensor([1.0, 0]))
        last, memory = agent.recur(x[2:3], empty, torch.ones(1))
        other, other_memory = agent.recur(x[3:], empty, torch.ones(3))
        alone, _ = agent.recur(x[4:5], empty, torch.ones(1))
    assert not ended.any() and memory.any()
    torch.testing.assert_close(outputs, torch.cat([both, last, other]))
    torch.testing.assert_close(after, torch.cat([memory, other_memory]))
    assert not torch.allclose(other[1], alone[0])  # within an episode it remembers


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


def test_dnc_equals_its_equations(variant):
    """Eight steps in float64, with weights large enough that every gate and mode matters."""
    module = variant("rnd_dnc")
    torch.manual_seed(0)
    dnc = module.DNC(3, 5, 4, 3, 2).double()
    for weight in dnc.parameters():
        torch.nn.init.normal_(weight, std=0.7)
    x, state = torch.randn(8, 1, 3, dtype=torch.float64), torch.zeros(1, dnc.size, dtype=torch.float64)
    plain = [np.zeros(shape) for shape in dnc.shapes]
    for t in range(8):
        output, state = dnc(x[t], state)
        expected, plain = plain_dnc(dnc, x[t, 0].numpy(), plain)
        np.testing.assert_allclose(output[0].detach(), expected, rtol=1e-9, atol=1e-9)
        flat = np.concatenate([part.ravel() for part in plain])
        np.testing.assert_allclose(state[0].detach(), flat, rtol=1e-9, atol=1e-9)
        state = state.detach()
