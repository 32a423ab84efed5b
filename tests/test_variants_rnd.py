"""The variants of ppo_atari_rnd.py: its recurrent policy, and that with a DNC in the place of the GRU."""

import json
import math
import runpy
import sys

import numpy as np
import pytest
import torch

import conftest
from conftest import FOLDER, ROOT, STEMS, Games, rows, timeless
from test_ppo_atari_rnd import SHAPE, SMALL, N, T, assert_updates_equal_reference, fake, plain_agent

TYPED = "--env-id Breakout --num-envs 4 --num-steps 16 --minibatch-size 32 --threads 1 --rnd-features 8"
TYPED += " --warmup-steps 3 --update-epochs 1 --max-episode-steps 30 --total-timesteps 128 --eval-episodes 2"


@pytest.mark.parametrize("name, own", [("rnd_recurrent", "--target-return 999"), ("rnd_dnc", "--dnc 4 3 2")])
def test_runs(variant, name, own, tmp_path, monkeypatch):
    """As typed: trained, played again with the same returns, resumed."""
    monkeypatch.chdir(tmp_path)

    def run(file, *words):
        for stem in STEMS:
            sys.modules.pop(stem, None)
        monkeypatch.setattr(sys, "argv", [str(file), *map(str, words)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(file), run_name="__main__")
        assert end.value.code == 0

    folder, file = tmp_path / "runs" / "x", FOLDER / f"{name}.py"
    run(file, *f"{TYPED} {own} --run-name x".split())
    played = json.loads((folder / "eval.json").read_text())
    run(ROOT / "benchmark" / "evaluate.py", folder, "--episodes", 2, "--out", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == played
    run(file, "--resume", folder, "--total-timesteps", 192)
    assert json.loads((folder / "eval.json").read_text())["step"] == 192


# ------------------------------------------------------------------------------------------------- the recurrent policy


@pytest.mark.usefixtures("in_float64")
def test_updates_equal_float64_reference(variant, tmp_path, monkeypatch):
    """The memory is carried through rollouts and empty after an end; SGD steps run it over whole environments."""
    changes = dict(micro_batch=7, max_grad_norm=0.05, ext_coef=0, bonus_after=T * N)
    assert_updates_equal_reference(variant("rnd_recurrent").script, tmp_path, monkeypatch, changes)


def test_gru_size_and_initial_weights(variant):
    """Layer by layer as in the authors' cnn_gru_policy_dynamics.py."""
    module = variant("rnd_recurrent")
    agent = module.Agent((4, 84, 84), 18, module.Args())
    trunk = 4 * 64 * 32 + 32 + 32 * 16 * 64 + 64 + 64 * 16 * 64 + 64 + 6 * 6 * 64 * 256 + 256
    gates = 3 * 2 * (256 * 256 + 256)  # PyTorch's cell has two biases a gate
    assert conftest.num_weights(agent) == trunk + gates + 2 * (256 * 256 + 256) + 257 * 20
    gains = dict(residual_value=0.1, residual_policy=0.1, policy=0.01, value=0.01, hidden2=1)
    conftest.assert_initial(agent, gains)
    with pytest.raises(ValueError, match="--compile"):
        module.Args(compile=True)


def test_memory_is_carried_in_evaluation(variant):
    """Each game that is played has a memory of its own, from nothing, its last frame included."""
    module = variant("rnd_recurrent")
    torch.manual_seed(0)
    agent, calls = module.Agent(SHAPE, 4, module.Args()), []
    agent.policy.weight.data *= 30
    agent.register_forward_hook(lambda module, inputs, outputs: calls.append((inputs[0], outputs[0])))
    episodes = module.play(agent, Games([[([5.0] * 4, "terminated")]], shape=SHAPE), 3, seed=0)
    assert episodes == [(0, 20.0, 4)] * 3  # every fifth step's action is ignored
    w = {name: x.double() for name, x in agent.state_dict().items()}
    for first in (0, 5, 10):
        obs, logits = (torch.stack(part) for part in zip(*calls[first : first + 5], strict=False))
        expected, *_ = plain_agent(w, obs, torch.zeros(1, 256).double(), torch.zeros(len(obs), 1, dtype=bool))
        torch.testing.assert_close(logits.double(), expected, rtol=1e-3, atol=1e-4)


def test_evaluations_leave_the_memory_of_training_alone(variant, tmp_path):
    """With evaluations in between, training has the same metrics."""
    module = variant("rnd_recurrent")
    run = conftest.runner(module.script, SMALL)
    # Ends later than a rollout, so that the memory is not empty at an evaluation
    episodes = [[([1.0] * (11 + env), "terminated")] for env in range(N)]
    for name, changes in dict(plain={}, evaluated=dict(eval_every=T * N, eval_episodes=1)).items():
        envs = [Games(episodes, shape=SHAPE) for _ in range(5)]
        run(tmp_path, envs if changes else envs[0], 3, name, **changes)
    assert timeless(tmp_path / "plain") == timeless(tmp_path / "evaluated")
    assert all(row["eval/return"] for row in rows(tmp_path / "evaluated"))


def test_training_ends_at_the_target_return(variant, tmp_path, monkeypatch):
    """When the last 100 episodes average it on all ranks, not before there are 100; it is saved as usual."""
    module = variant("rnd_recurrent")
    run = conftest.runner(module.script, SMALL)
    # Episodes 0 to 24 of each of the 4 environments return 0.75, 25 to 49 return 3, the next ones 9.
    episodes = [([x, 0.0, 0.0], "terminated") for x in 25 * [0.75] + 25 * [3.0] + 99 * [9.0]]
    steps = {}
    for target in (0, 0.75, 2):
        envs = Games([episodes] * N, shape=SHAPE)
        changes = dict(target_return=target, num_steps=4, warmup_steps=0)  # an iteration is one episode of each
        metrics, saved = run(tmp_path, envs, 42, f"target {target}", **changes)
        assert saved["step"] == metrics["step"]
        steps[target] = metrics["step"] // 16
    assert steps == {0: 42, 0.75: 25, 2: 39}
    # One of two ranks; the other has not had 100 episodes yet
    args, agent = module.Args(**SMALL, target_return=0.5), module.Agent(SHAPE, 4, module.Args())
    agent.envs = module.Memories(fake())
    agent.envs.reset()
    agent.envs.recent = [1.0] * 100
    monkeypatch.setattr(module, "learn_cnn", lambda *args: {})
    for others, ends in ((-math.inf, False), (-0.5, False), (0.5, True)):
        monkeypatch.setattr(module.script, "WORLD", 2)
        monkeypatch.setattr(module.script, "sum_over_ranks", lambda x, others=others: x + others)
        module.learn(agent, None, None, {"obs": torch.zeros(1)}, 0, args)
        assert (args.total_timesteps == 0) == ends


# --------------------------------------------------------------------------------------------------------------- a DNC


def test_an_end_empties_the_dnc(variant):
    """The row after a row that shows an episode's last observation is played as if it was the first."""
    module = variant("rnd_dnc")
    agent = module.Agent((4, 44, 44), 5, module.Args(dnc=(4, 3, 2)))
    x = torch.rand(6, 256)  # two environments, three rows each
    empty, size = torch.zeros(1, agent.memory_size), agent.memory_size
    with torch.no_grad():
        outputs, after = agent.recur(x, empty.repeat(2, 1), torch.tensor([1.0, 0, 1, 1, 1, 1]))
        both, ended = agent.recur(x[:2], empty, torch.tensor([1.0, 0]))
        last, memory = agent.recur(x[2:3], empty, torch.ones(1))
        other, other_memory = agent.recur(x[3:], empty, torch.ones(3))
        alone = agent.recur(x[4:5], empty, torch.ones(1))[0]
    assert size == 2 * 256 + 4 * 3 + 3 * 4 + 4 * 4 + 2 * 4 + 2 * 3 and not ended.any() and memory.any()
    torch.testing.assert_close(outputs, torch.cat([both, last, other]))
    torch.testing.assert_close(after, torch.cat([memory, other_memory]))
    assert not torch.allclose(other[1], alone[0])  # within an episode it remembers
    with pytest.raises(ValueError, match="dnc"):
        module.Args(dnc=(4, 0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_dnc_learns_to_copy(variant, seed):
    """Three rows of three bits, asked for after the last one; without a memory the bits can only be guessed."""
    module = variant("rnd_dnc")
    torch.manual_seed(seed)
    dnc, plain, head = module.DNC(4, 32, 8, 6, 1), torch.nn.Linear(4, 32), torch.nn.Linear(32, 3)
    for memory, updates in ((True, 1500), (False, 300)):
        weights = [*dnc.parameters(), *plain.parameters(), *head.parameters()]
        optimizer = torch.optim.Adam(weights, lr=3e-3)
        for _ in range(updates):
            bits = torch.randint(2, (32, 3, 3)).float()
            x = torch.cat([torch.cat([bits, torch.ones(32, 3, 1)], 2), torch.zeros(32, 3, 4)], 1)
            state, outputs = torch.zeros(32, dnc.size), []
            for t in range(6):
                output, state = dnc(x[:, t], state) if memory else (plain(x[:, t]).tanh(), state)
                outputs.append(head(output))
            logits = torch.stack(outputs[3:], 1)
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(logits, bits).backward()
            torch.nn.utils.clip_grad_norm_(weights, 1)
            optimizer.step()
        errors = ((logits > 0) != bits.bool()).float().mean().item()
        assert errors < 0.05 if memory else errors > 0.35


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
