"""The algorithm of ppo_atari_rnd.py against independent oracles, and its environments against hand-kept books."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import NEXT_STEP, SAME_STEP, FakeVecEnv, Noisy, RareDoor, random_episodes

import ppo_atari_rnd
from ppo_atari_rnd import RND, Agent, Args, Episodes, RunningMoments, Variant, ppo_terms, score, train

SHAPE, SMALL = (4, 44, 44), dict(num_envs=4, num_steps=16, minibatch_size=32, update_epochs=1, warmup_steps=3)
SMALL |= dict(rnd_features=8, eval_episodes=0, quiet=True, torch_threads=1, device="cpu")


def run(tmp_path, envs, iterations=1, name="run", **changes):
    args = Args(**(SMALL | dict(run_dir=str(tmp_path), run_name=name) | changes))
    args.total_timesteps = iterations * args.batch_size
    metrics = train(args, envs)
    return metrics, torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)


def fake(autoreset=NEXT_STEP, ends=("terminated", "truncated", "life"), cls=FakeVecEnv, **options):
    return cls(random_episodes(4, ends=ends), autoreset, shape=SHAPE, **options)


def constant_values(outputs, heads):
    return outputs[0], 0 * outputs[1] + heads, outputs[2]


# ------------------------------------------------------------------------------------------------------------- maths


def test_defaults_match_reference_table():
    """OpenAI's published CNN setting."""
    expected = dict(num_envs=128, num_steps=128, minibatch_size=4096, update_epochs=4, gamma=0.999, gamma_int=0.99)
    expected |= dict(gae_lambda=0.95, clip=0.1, vf_coef=1, ent_coef=0.001, ext_coef=2, int_coef=1, lr=("1e-4",))
    expected |= dict(
        adam_eps=1e-8, max_grad_norm=0, repeat_action_probability=0.25, frame_skip=4, noop_max=1, fire_reset=False
    )
    expected |= dict(episodic_life=False, max_episode_steps=4500, frame_size=84, stack=4, int_episodic=False)
    expected |= dict(bonus_on="next", obs_norm="std", int_norm="filter", int_clip=0, int_reward="mean")
    expected |= dict(predictor_mask="sample", predictor_share=0, rnd_features=512, warmup_steps=6400)
    expected |= dict(iterations=30_000, env_id="MontezumaRevenge")
    assert {name: getattr(Args(), name) for name in expected} == expected


def test_network_sizes():
    """Layer by layer as in cnn_policy_param_matched.py: conv 8/4/4, 256, 448, two residual layers, three heads."""
    agent, rnd = Agent((4, 84, 84), 18), RND(84, 2)
    convolutions = 4 * 64 * 32 + 32 + 32 * 16 * 64 + 64 + 64 * 16 * 64 + 64
    hidden = 6 * 6 * 64 * 256 + 256 + 256 * 448 + 448 + 2 * (448 * 448 + 448)
    assert sum(w.numel() for w in agent.parameters()) == convolutions + hidden + 449 * (18 + 2)
    convolutions = 64 * 32 + 32 + 32 * 16 * 64 + 64 + 64 * 9 * 64 + 64
    target = convolutions + 3136 * 512 + 512
    assert sum(w.numel() for w in rnd.target.parameters()) == target
    assert sum(w.numel() for w in rnd.predictor.parameters()) == target + 2 * (512 * 512 + 512)
    assert not any(w.requires_grad for w in rnd.target.parameters())
    for module, gain in (
        (agent.hidden1, 2**0.5),
        (agent.residual_value, 0.1),
        (agent.policy, 0.01),
        (agent.value, 0.01),
    ):
        gram = module.weight @ module.weight.T
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), rtol=1e-3, atol=1e-5)
    assert rnd.target[1].negative_slope == rnd.predictor[3].negative_slope == 0.2


def test_network_equals_plain_float64():
    torch.manual_seed(0)
    agent = Agent(SHAPE, 5)
    obs = torch.randint(0, 256, (3, *SHAPE), dtype=torch.uint8)
    w, x = {name: weight.double() for name, weight in agent.state_dict().items()}, obs.double() / 255
    for i, stride in ((0, 4), (2, 2), (4, 1)):
        x = F.conv2d(x, w[f"trunk.{i}.weight"], w[f"trunk.{i}.bias"], stride).clamp(min=0)
    x = x.flatten(1)
    for name in ("hidden1", "hidden2"):
        x = (x @ w[f"{name}.weight"].T + w[f"{name}.bias"]).clamp(min=0)
    policy, value = (
        x + (x @ w[f"residual_{name}.weight"].T + w[f"residual_{name}.bias"]).clamp(min=0)
        for name in ("policy", "value")
    )
    logits, values, _ = agent(obs)
    torch.testing.assert_close(logits.double(), policy @ w["policy.weight"].T + w["policy.bias"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(values.double(), value @ w["value.weight"].T + w["value.bias"], rtol=1e-4, atol=1e-6)


def test_ppo_terms_by_hand():
    """Half the squared error of each head, summed; no value clipping; the surrogate takes the worse of both."""
    logits = torch.tensor([[0.0, np.log(3.0)]])  # p = 1/4, 3/4
    values, targets = torch.tensor([[1.0, -2.0]]), torch.tensor([[4.0, 0.0]])
    for old_p, advantage, surrogate in (
        (0.25, 2.0, 2.0),
        (0.2, 2.0, 1.1 * 2),
        (0.2, -2.0, -1.25 * 2),
        (0.5, -2.0, -1.8),
    ):
        row = (torch.tensor([0]), torch.tensor([advantage]), targets, torch.tensor([old_p]).log())
        policy, value, entropy, kl, clipped = ppo_terms(logits, values, *row, torch.ones(2), 0.1)
        assert policy.item() == pytest.approx(-surrogate) and value.item() == pytest.approx((9 + 4) / 2)
        assert entropy.item() == pytest.approx(-0.25 * np.log(0.25) - 0.75 * np.log(0.75))
        ratio = 0.25 / old_p
        assert kl.item() == pytest.approx(ratio - 1 - np.log(ratio), abs=1e-6) and clipped.item() == (old_p != 0.25)


def test_running_moments_match_numpy():
    rng, moments = np.random.default_rng(0), RunningMoments((2, 3))
    batches = [rng.integers(0, 256, (n, 2, 3)) for n in (5, 1, 40)]
    for batch in batches:
        moments.update(torch.from_numpy(batch.astype(np.uint8)))
    everything = np.concatenate(batches).astype(float)
    np.testing.assert_allclose(moments.mean(), everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.std(), everything.std(0), rtol=1e-4)


def test_running_moments_of_constants_are_finite():
    """A pixel that never changes has a deviation small but not zero, however long it was seen."""
    moments = RunningMoments((2,))
    moments.sums += torch.tensor([1.0, 255.0, 255.0**2])[:, None].double() * 2e9
    assert (moments.std() > 0).all() and (moments.std() < 1e-2).all()


def test_forward_filter_axis():
    """Env k with the constant bonus k + 1: its filter tends to (k + 1) / (1 - gamma); nothing crosses envs."""
    rnd = RND(44, 3, 4)
    bonus = torch.tensor([1.0, 2.0, 3.0]).expand(500, 3)
    for _ in range(4):  # it persists from rollout to rollout
        rnd.normalize(bonus, 0.98)
    np.testing.assert_allclose(rnd.filtered, np.array([1, 2, 3]) / (1 - 0.98), rtol=1e-6)


@pytest.mark.parametrize("kind", ["filter", "std", "none"])
def test_intrinsic_normalisation_matches_numpy_loop(kind):
    rng, rnd = np.random.default_rng(3), RND(44, 2, 4)
    filtered, seen = np.zeros(2), []
    for _ in range(5):
        bonus = rng.exponential(size=(40, 2))
        for row in bonus:
            filtered = 0.9 * filtered + row if kind == "filter" else row
            seen += filtered.tolist()
        got = rnd.normalize(torch.from_numpy(bonus), 0.9, kind).numpy()
        np.testing.assert_allclose(got, bonus / (1 if kind == "none" else np.std(seen)), rtol=1e-4)


def test_preprocess():
    """std: standardised and clipped to +-5; mean: only centred, in units of 255."""
    frames = torch.randint(0, 256, (50, 1, 44, 44), dtype=torch.uint8)
    frames[:, 0, 0, 0] = 7
    for kind in ("std", "mean"):
        rnd = RND(44, 1, 4, kind)
        rnd.frames.update(frames)
        new = frames[:3].clone()
        new[:, 0, 0, 0] = 9
        mean, std = frames.double().mean(0), frames.double().std(0, correction=0)
        expected = ((new - mean) / std).clamp(-5, 5) if kind == "std" else (new - mean) / 255
        torch.testing.assert_close(rnd.preprocess(new).double(), expected, rtol=1e-3, atol=1e-3)
        assert rnd.preprocess(new)[0, 0, 0, 0] == pytest.approx(5 if kind == "std" else 2 / 255, rel=1e-3)


def test_bonus_equals_per_sample_loss():
    """The mean squared error of the features, one a row; half_sum is half their sum; nothing tracks gradients."""
    rnd = RND(44, 1, 6)
    frames = torch.randint(0, 256, (9, 1, 44, 44), dtype=torch.uint8)
    rnd.frames.update(frames)
    x = rnd.preprocess(frames)
    error = (rnd.predictor(x) - rnd.target(x)).detach() ** 2
    torch.testing.assert_close(rnd.bonus(frames), error.mean(1))
    torch.testing.assert_close(rnd.bonus(frames, "half_sum"), error.sum(1) / 2)
    assert not rnd.bonus(frames).requires_grad


def size(module):
    return sum(w.numel() for w in module.parameters())


def test_sizes_of_the_other_networks():
    """michalnand's A to D at 96 x 96, two of his targets and predictors, the paper's recurrent policy at 84 x 84."""
    head = lambda width: width * width + width  # noqa: E731
    convs = dict(
        a=64 * 4 * 32 + 32 + 9 * (32 * 64 + 64 * 64) + 64 + 64,
        b=64 * 4 * 64 + 64 + 9 * (64 * 64 + 64 * 128) + 64 + 128,
        c=9 * (4 * 32 + 32 * 64 + 64 * 64 + 64 * 128) + 32 + 64 + 64 + 128,
        d=64 * 4 * 128 + 128 + 2 * 4 * head(128),
    )
    flat = dict(a=64 * 144, b=128 * 144, c=128 * 144, d=128 * 144)
    widths = dict(a=448, b=800, c=512, d=512)
    for net, width in widths.items():
        agent = Variant((4, 96, 96), 18, net)
        features = flat[net] * width + width + (head(448) if net == "a" else 0)
        assert size(agent) == convs[net] + features + 2 * head(width) + (width + 1) * 20, net
        logits, values, _ = agent(torch.zeros(2, 4, 96, 96, dtype=torch.uint8))
        assert logits.shape == (2, 18) and values.shape == (2, 2)
        for gain, part in ((0.01, agent.hidden_policy), (0.1, agent.hidden_value), (2**0.5, agent.trunk[-2])):
            gram = part.weight @ part.weight.T
            torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), rtol=1e-3, atol=1e-4)
    rows = Variant((4, 96, 96), 18, "c", 2**0.5).hidden_value.weight
    torch.testing.assert_close(rows @ rows.T, 2 * torch.eye(512), rtol=1e-3, atol=1e-4)
    agent = Agent((4, 84, 84), 18, gru=True)
    convolutions = 4 * 64 * 32 + 32 + 32 * 16 * 64 + 64 + 64 * 16 * 64 + 64
    assert not agent.hidden2.bias_ih.any() and not agent.hidden2.bias_hh.any()
    gates = 3 * 2 * (256 * 256 + 256)  # PyTorch's cell has two biases a gate
    assert size(agent) == convolutions + 6 * 6 * 64 * 256 + 256 + gates + 2 * head(256) + 257 * 20
    convs = dict(
        elu=64 * 32 + 32 + 9 * (32 * 64 + 64 * 64) + 128, elu4=9 * (16 + 16 * 32 + 32 * 64 + 64 * 64) + 16 + 32 + 128
    )
    for net, convolutions in convs.items():
        rnd = RND(96, 2, 512, "mean", net)
        assert size(rnd.target) == convolutions + 64 * 144 * 512 + 512
        assert size(rnd.predictor) == size(rnd.target) + 2 * head(512)
        assert {type(part).__name__ for part in rnd.predictor} == {"Conv2d", "ELU", "Flatten", "Linear"}


def test_coupled_networks_are_orthogonal_to_each_other():
    """elu4: target's and predictor's weights of a layer are halves of one orthogonal matrix."""
    rnd = RND(44, 1, 64, "mean", "elu4")
    for i in (0, 2, 4, 6, 9):
        halves = torch.cat([net[i].weight.flatten(1) for net in (rnd.target, rnd.predictor)])
        rows, columns = halves.shape
        gram = halves @ halves.T if rows <= columns else halves.T @ halves
        torch.testing.assert_close(gram, 2 * torch.eye(min(rows, columns)), rtol=1e-3, atol=1e-4)
    assert rnd.predictor[11].weight.shape == (64, 64) and not rnd.target[9].weight.requires_grad


def test_other_networks_equal_plain_float64():
    """Attention and residual critic included: what each layer does, from its weights."""
    torch.manual_seed(0)
    shapes = dict(a=((4, 2), (2, 1), (1, 1)), b=((4, 2), (2, 1), (1, 1)), c=((2, 1),) * 3 + ((1, 1),), d=((8, 0),))
    for net, strides in shapes.items():
        agent, obs = Variant((4, 48, 48), 5, net), torch.randint(0, 256, (3, 4, 48, 48), dtype=torch.uint8)
        for part in (agent.hidden_policy, agent.policy, agent.value):
            part.weight.data *= 50
        w, x = {name: weight.double() for name, weight in agent.state_dict().items()}, obs.double() / 255

        def linear(x, name, w=w):
            return x @ w[f"{name}.weight"].flatten(1).T + w[f"{name}.bias"]

        for i, (stride, padding) in enumerate(strides):
            x = F.conv2d(x, w[f"trunk.{2 * i}.weight"], w[f"trunk.{2 * i}.bias"], stride, padding).clamp(min=0)
        for i in (2, 3) if net == "d" else ():
            tokens = x.flatten(2).transpose(1, 2)
            query, key, value = (linear(tokens, f"trunk.{i}.{part}") for part in ("query", "key", "value"))
            score = (query[:, :, None] * key[:, None]).sum(-1).exp()
            tokens = (score / score.sum(-1, keepdim=True)) @ value
            x = (tokens + linear(tokens, f"trunk.{i}.mix").clamp(min=0)).transpose(1, 2).reshape(x.shape)
        x, first = x.flatten(1), {"a": 7, "b": 7, "c": 9, "d": 5}[net]
        x = linear(x, f"trunk.{first}")
        x = linear(x.clamp(min=0), "trunk.9") if net == "a" else x
        x = x.clamp(min=0)
        policy, value = linear(linear(x, "hidden_policy").clamp(min=0), "policy"), linear(x, "hidden_value")
        value = linear(value.clamp(min=0) + (value if net == "a" else 0), "value")
        logits, values, _ = agent(obs)
        torch.testing.assert_close(logits.double(), policy, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(values.double(), value, rtol=1e-3, atol=1e-4)


# -------------------------------------------------------------------------------------------------------------- memory


def plain_gru(w, games):
    """Logits and values of whole games, each a float64 sequence of frames (L, C, S, S), from no memory."""
    results = []
    for obs in games:
        x = obs.double() / 255
        for i, stride in ((0, 4), (2, 2), (4, 1)):
            x = F.relu(F.conv2d(x, w[f"trunk.{i}.weight"], w[f"trunk.{i}.bias"], stride))
        x, memory = F.relu(F.linear(x.flatten(1), w["hidden1.weight"], w["hidden1.bias"])), torch.zeros(256).double()
        out = []
        for row in x:
            inputs = F.linear(row, w["hidden2.weight_ih"], w["hidden2.bias_ih"]).chunk(3)
            hidden = F.linear(memory, w["hidden2.weight_hh"], w["hidden2.bias_hh"]).chunk(3)
            reset, update = (inputs[0] + hidden[0]).sigmoid(), (inputs[1] + hidden[1]).sigmoid()
            memory = (1 - update) * (inputs[2] + reset * hidden[2]).tanh() + update * memory
            out.append(memory)
        x = torch.stack(out)
        policy, value = (
            x + F.relu(F.linear(x, w[f"residual_{name}.weight"], w[f"residual_{name}.bias"]))
            for name in ("policy", "value")
        )
        logits, values = (
            F.linear(y, w[f"{n}.weight"], w[f"{n}.bias"]) for n, y in (("policy", policy), ("value", value))
        )
        results.append((logits, values))
    return results


class Bright(FakeVecEnv):
    """Frames that differ much, from step to step and game to game."""

    def frame(self, env):
        frame = super().frame(env)
        frame[:, 1:] = (50 * env + 37 * self.episode[env] + 11 * self.t[env]) % 256
        return frame


@pytest.mark.parametrize("autoreset", [NEXT_STEP, SAME_STEP])
def test_memory_lasts_a_game(tmp_path, monkeypatch, autoreset):
    """Acting and learning, over three rollouts: every row's outputs are those of its game played from no memory.

    The row of the ignored action still belongs to the old game, whose last value it gives.
    """
    init, calls, forward = Agent.__init__, [], Agent.forward

    def larger(self, *rest, **options):
        init(self, *rest, **options)
        self.policy.weight.data *= 30
        self.value.weight.data *= 30

    def spy(self, obs, *rest):
        outputs = forward(self, obs, *rest)
        calls.append((torch.is_grad_enabled(), obs.clone(), *(x.detach().clone() for x in outputs)))
        return outputs

    monkeypatch.setattr(Agent, "__init__", larger)
    monkeypatch.setattr(Agent, "forward", spy)
    envs = fake(autoreset, ends=("terminated",), cls=Bright)
    options = dict(memory="gru", lr=("0",), warmup_steps=3, micro_batch=20, minibatch_size=64)  # pieces of 2 envs
    _, saved = run(tmp_path, envs, 3, **options)
    w = {name: x.double() for name, x in saved["agent"].items()}
    frames = np.stack(envs.seen[3:])  # from the first acted one on
    expected = np.zeros((len(frames), 4, 6))
    for env in range(4):
        # A game's rows end with its last frame; with next-step autoreset that is the row of the ignored action.
        begins = [0, *(t for t in range(1, len(frames)) if frames[t, env, 0, 0, 1] != frames[t - 1, env, 0, 0, 1])]
        spans = list(zip(begins, [*begins[1:], len(frames)], strict=True))
        games = [torch.from_numpy(frames[a:b, env]) for a, b in spans]
        for (a, b), (logits, values) in zip(spans, plain_gru(w, games), strict=True):
            expected[a:b, env] = torch.cat([logits, values], 1).numpy()
        assert len(spans) > 8
    acted = [call for call in calls if not call[0] and len(call[1]) == 4]
    assert len(acted) == 51
    for i, (_, obs, logits, values, _) in enumerate(acted):  # every 17th gives the bootstrap values
        t = i - i // 17
        assert np.array_equal(obs, frames[t])
        np.testing.assert_allclose(torch.cat([logits, values], 1), expected[t], rtol=1e-3, atol=1e-4)
    learned = [call for call in calls if call[0]]
    assert len(learned) == 6 and all(len(call[1]) == 32 for call in learned)  # two envs a piece
    for i, (_, _, logits, values, _) in enumerate(learned):
        rollout, first = divmod(i, 2)
        rows = expected[16 * rollout : 16 * rollout + 16, 2 * first : 2 * first + 2].transpose(1, 0, 2).reshape(32, 6)
        np.testing.assert_allclose(torch.cat([logits, values], 1), rows, rtol=1e-3, atol=1e-4)


def test_truncation_bootstraps_with_the_games_memory(tmp_path, monkeypatch):
    """Same-step: the value of the final observation is that of the whole game, not of a frame without a past."""
    calls, forward = [], Agent.forward

    def spy(self, obs, memory, fresh):
        calls.append((len(obs), memory.clone(), fresh.clone(), forward(self, obs, memory, fresh)))
        return calls[-1][3]

    monkeypatch.setattr(Agent, "forward", spy)
    envs = Bright([[([1.0] * 5, "truncated"), ([1.0] * 4, "truncated")]] * 4, SAME_STEP, shape=SHAPE)
    run(tmp_path, envs, 1, memory="gru", micro_batch=64, minibatch_size=64)
    single = [i for i, call in enumerate(calls) if call[0] == 1]
    assert len(single) > 8
    for i in single:
        acted = max(j for j in range(i) if calls[j][0] == 4)
        env = sum(1 for j in range(acted + 1, i))  # all four are cut at once, in order
        assert torch.equal(calls[i][1][0], calls[acted][3][2][env]) and calls[i][1].any() and not calls[i][2].any()


def test_memory_forgets_the_final_frame(tmp_path, monkeypatch):
    """Scrambling a game's last frame changes its value there and leaves the next game's logits bit-equal."""
    outputs = []
    for noise in (0, 255):
        calls, forward = [], Agent.forward
        with monkeypatch.context() as patch:
            patch.setattr(Agent, "forward", lambda self, *x, c=calls, f=forward: c.append(f(self, *x)) or c[-1])
            envs = fake(cls=Noisy, ends=("terminated",), num_actions=1)
            envs.noise = noise
            run(tmp_path, envs, 1, f"noise {noise}", memory="gru")
        outputs.append(
            [(logits, values) for logits, values, _ in calls if not logits.requires_grad and len(logits) == 4][:16]
        )
    final = np.stack([before for *_, before in envs.log[3:19]])  # the row of the ignored action
    changed = torch.stack([(a[1] != b[1]).any(1) for a, b in zip(*outputs, strict=True)]).numpy()
    assert np.array_equal(changed, final) and final.any(0).all()
    assert all(torch.equal(a[0][~end], b[0][~end]) for a, b, end in zip(*outputs, torch.from_numpy(final), strict=True))


def test_gradients_flow_through_the_rollout_but_not_over_ends():
    """A row's value depends on all frames of its game in the rollout, on none of another game or environment."""
    torch.manual_seed(0)
    agent = Agent(SHAPE, 3, gru=True)
    fresh = torch.tensor([0.0, 0, 0, 1, 0] * 2)
    x = torch.rand(10, *SHAPE).mul(255).requires_grad_()
    _, values, memory = agent(x, torch.randn(2, 256), fresh)
    for row, reached in ((2, [0, 1, 2]), (4, [3, 4]), (7, [5, 6, 7])):
        (gradient,) = torch.autograd.grad(values[row].sum(), x, retain_graph=True)
        assert gradient.flatten(1).abs().sum(1).nonzero().flatten().tolist() == reached
    assert memory.shape == (2, 256)


def test_memory_survives_a_resume(tmp_path):
    """With environments that save their games a stopped recurrent run goes on as if nothing had been."""
    from test_plumbing import Saving, same

    envs = lambda: Saving(random_episodes(4), NEXT_STEP, shape=SHAPE)  # noqa: E731
    _, whole = run(tmp_path, envs(), 3, "whole", memory="gru")
    run(tmp_path, envs(), 2, "parts", memory="gru")
    saved = torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)
    assert saved["memory"].abs().sum() > 0
    train(Args(**(saved["args"] | dict(resume=str(tmp_path / "parts"), total_timesteps=3 * 64))), envs())
    parts = torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)
    assert all(same(whole[name], parts[name]) for name in ("agent", "rnd", "memory", "fresh", "optimizer"))


def test_memory_is_carried_in_evaluation():
    """Each game of an evaluation is played from no memory, and with its own."""
    torch.manual_seed(0)
    agent, calls = Agent(SHAPE, 4, gru=True), []
    agent.register_forward_hook(lambda module, inputs, outputs: calls.append((inputs, outputs[2])))
    ppo_atari_rnd.evaluate(agent, fake(ends=("terminated",)), 3, seed=0)
    assert (calls[0][0][1] == 0).all()
    for (before, memory), (inputs, _) in zip(calls, calls[1:], strict=False):
        assert torch.equal(inputs[1], memory)
        first = inputs[0][:, 0, 0, 2] == 0  # a game's first frame, and no other, is seen from no memory
        assert torch.equal(inputs[2] > 0, first | (before[0][:, 0, 0, 1] != inputs[0][:, 0, 0, 1]))


def test_memory_needs_whole_environments(tmp_path):
    for flags in (dict(net="c"), dict(minibatches="drawn"), dict(compile=True)):
        with pytest.raises(ppo_atari_rnd.UsageError, match="--memory gru"):
            run(tmp_path, fake(), memory="gru", **flags)


# ---------------------------------------------------------------------------------------------------- one whole update


def streams(envs, args, values, bonus, first):
    """GAE of both heads in float64 by the definition: sums over each game for one, over all rows for the other."""
    T, N, lam = args.num_steps, args.num_envs, args.gae_lambda
    reward, ended, cut, before = (np.stack(x) for x in zip(*envs.log[first : first + T], strict=True))
    ext, internal = np.zeros((T, N)), np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            factor = 1.0
            for k in range(t, T):  # until the game's end
                following = 0.0 if ended[k, n] else values[k + 1, n, 0]
                ext[t, n] += factor * (reward[k, n] + args.gamma * following - values[k, n, 0])
                factor *= args.gamma * lam
                if ended[k, n] or cut[k, n]:
                    break
            factor = 1.0
            for k in range(t, T):  # through all ends, dummy rows included
                stop = args.int_episodic and (ended[k, n] or cut[k, n])
                following = 0.0 if args.int_episodic and ended[k, n] else values[k + 1, n, 1]
                internal[t, n] += factor * (bonus[k, n] + args.gamma_int * following - values[k, n, 1])
                factor *= args.gamma_int * lam
                if stop:
                    break
    return ext, internal, ~before


def deviation(values):
    """Of all values and of 1e-4 of an observation with mean 0 and variance 1, from which OpenAI's statistics start."""
    n = len(values) + 1e-4
    return np.sqrt((np.sum(np.square(values), axis=0) + 1e-4) / n - (np.sum(values, axis=0) / n) ** 2)


def standardised(frames, shown, kind):
    everything = np.concatenate(shown)
    x = frames.double() - torch.from_numpy(everything.sum(0) / (len(everything) + 1e-4))
    return (x / torch.from_numpy(deviation(everything))).clamp(-5, 5) if kind == "std" else x / 255


def plain_agent(w, obs):
    x = obs.double() / 255
    for i, stride in ((0, 4), (2, 2), (4, 1)):
        x = F.relu(F.conv2d(x, w[f"trunk.{i}.weight"], w[f"trunk.{i}.bias"], stride))
    x = x.flatten(1)
    for name in ("hidden1", "hidden2"):
        x = F.relu(F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"]))
    policy, value = (
        x + F.relu(F.linear(x, w[f"residual_{name}.weight"], w[f"residual_{name}.bias"]))
        for name in ("policy", "value")
    )
    return F.linear(policy, w["policy.weight"], w["policy.bias"]), F.linear(value, w["value.weight"], w["value.bias"])


def plain_rnd(w, net, x):
    for i, stride in ((0, 4), (2, 2), (4, 1)):
        x = F.leaky_relu(F.conv2d(x, w[f"{net}.{i}.weight"], w[f"{net}.{i}.bias"], stride), 0.2)
    x = F.linear(x.flatten(1), w[f"{net}.7.weight"], w[f"{net}.7.bias"])
    for i in (9, 11) if net == "predictor" else ():
        x = F.linear(F.relu(x), w[f"{net}.{i}.weight"], w[f"{net}.{i}.bias"])
    return x


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(micro_batch=7, predictor_share=0.4),
        dict(predictor_mask="element", predictor_share=0.4, max_grad_norm=0.05),
        dict(
            int_episodic=True, bonus_on="current", obs_norm="mean", int_norm="std", int_clip=1.5, int_reward="half_sum"
        ),
    ],
    ids=["default", "pieces", "element", "michalnand"],
)
def test_update_equals_float64_reference(tmp_path, monkeypatch, changes):
    """Two iterations with terminations, truncations, lost lives and dummy rows, recomputed in float64 from the frames.

    Compared: both networks' weights, the statistics of frames and intrinsic returns, the metrics.
    """
    draws, real = [], torch.rand
    monkeypatch.setattr(torch, "rand", lambda *size, **k: draws.append(real(*size, **k)) or draws[-1])
    init = Agent.__init__

    def with_large_values(self, *rest):  # so that it matters which frame a value is of
        init(self, *rest)
        self.value.weight.data *= 30

    monkeypatch.setattr(Agent, "__init__", with_large_values)
    envs = fake(learn=True)  # whose frames differ much
    options = dict(update_epochs=2, lr=("1e-3",), adam_eps=0.01, clip=1e-3, vf_coef=0.7, gamma=0.95, gamma_int=0.9)
    metrics, saved = run(tmp_path, envs, iterations=2, **options, **changes)
    args = Args(**(SMALL | options | changes))
    torch.manual_seed(1)
    agent, rnd = Agent(SHAPE, 4), RND(44, 4, 8, args.obs_norm)
    w = {name: x.double().requires_grad_() for name, x in agent.state_dict().items()}
    r = {name: x.double() for name, x in rnd.state_dict().items() if name.startswith(("target", "predictor"))}
    learned = [*w.values(), *(x.requires_grad_() for name, x in r.items() if name.startswith("predictor"))]
    optimizer = torch.optim.Adam(learned, lr=1e-3, eps=0.01)
    T, N, warmup, share = 16, 4, 3, args.predictor_share or 1
    shown = [frame[:, -1:].astype(float) for frame in envs.seen[1 : warmup + 1]]  # all that the statistics saw
    filtered, returns, draw = np.zeros(N), [], iter(draws)
    for rollout in range(2):
        first = warmup + rollout * T
        obs = torch.from_numpy(np.stack(envs.seen[first : first + T + 1]))
        actions = torch.from_numpy(np.stack(envs.actions[first : first + T])).long()
        frames = obs[1:, :, -1:] if args.bonus_on == "next" else obs[:-1, :, -1:]
        with torch.no_grad():
            logits, values = (x.view(T + 1, N, -1) for x in plain_agent(w, obs.flatten(0, 1)))
            x = standardised(frames.flatten(0, 1), shown, args.obs_norm)
            raw = ((plain_rnd(r, "predictor", x) - plain_rnd(r, "target", x)) ** 2).numpy()
            raw = (raw.mean(1) if args.int_reward == "mean" else raw.sum(1) / 2).reshape(T, N)
            for row in raw:
                filtered = args.gamma_int * filtered + row if args.int_norm == "filter" else row
                returns += filtered.tolist()
            bonus = np.minimum(raw / deviation(returns), args.int_clip or np.inf)
            shown += [frame.numpy().astype(float) for frame in frames]
            features = plain_rnd(r, "target", x := standardised(frames.flatten(0, 1), shown, args.obs_norm)).view(
                T, N, -1
            )
            x = x.view(T, N, 1, 44, 44)
        ext, internal, valid = streams(envs, args, values.numpy(), bonus, first)
        advantage = torch.from_numpy(2 * ext + internal)
        target = torch.from_numpy(np.stack([ext, internal], -1)) + values[:T]
        old_logp = logits[:T].log_softmax(-1).gather(-1, actions[..., None])[..., 0]
        valid, losses = torch.from_numpy(valid), []
        for _ in range(args.update_epochs):
            for envs_of in (slice(0, 2), slice(2, 4)):  # whole environments, in this order
                keep = valid[:, envs_of].T.flatten()
                rows = (obs[:T], actions, advantage, target, old_logp)
                frame, action, adv, goal, old = (part[:, envs_of].transpose(0, 1).flatten(0, 1)[keep] for part in rows)
                logits, value = plain_agent(w, frame)
                ratio = (logits.log_softmax(-1).gather(1, action[:, None])[:, 0] - old).exp()
                clipped = torch.where(adv > 0, ratio.clamp(max=1 + args.clip), ratio.clamp(min=1 - args.clip))
                probabilities = logits.softmax(-1)
                entropy = -(probabilities * probabilities.log()).sum(1).mean()
                policy, value = -(clipped * adv).mean(), (value - goal).square().sum(1).mean() / 2
                mask = (next(draw) < share).double()
                shown_x, goals = (part[:, envs_of].transpose(0, 1).flatten(0, 1) for part in (x, features))
                error = plain_rnd(r, "predictor", shown_x) - goals
                predictor = (error**2 * mask).sum() / (mask * torch.ones_like(error)).sum()
                optimizer.zero_grad()
                (policy + 0.7 * value - 0.001 * entropy + predictor).backward()
                norm = sum(weight.grad.square().sum() for weight in w.values()) ** 0.5  # of the policy network only
                if args.max_grad_norm:
                    for weight in w.values():
                        weight.grad *= min(1.0, args.max_grad_norm / norm.item())
                optimizer.step()
                outside = ((ratio - 1).abs() > args.clip).double().mean()
                others = [predictor, (ratio - 1 - ratio.log()).mean(), outside, norm]
                losses.append([x.item() for x in (policy, value, entropy, *others)])
    assert next(draw, None) is None
    assert not args.int_clip or 0.1 < (bonus == args.int_clip).mean() < 0.9  # the limit was felt
    names = ("loss/policy", "loss/value", "loss/entropy", "loss/predictor")
    names += ("train/approx_kl", "train/clip_frac", "train/grad_norm")
    for name, mean in zip(names, np.mean(losses, axis=0), strict=True):
        assert metrics[name] == pytest.approx(mean, rel=2e-3, abs=1e-7 if "kl" in name else 1e-4), (name, mean)
    assert metrics["train/lr"] == pytest.approx(1e-3) and 0 < metrics["train/clip_frac"] < 1
    assert metrics["int/reward_raw"] == pytest.approx(raw.mean(), rel=1e-3)
    assert metrics["int/reward_norm"] == pytest.approx(bonus.mean(), rel=1e-3)
    assert metrics["int/return_std"] == pytest.approx(deviation(returns), rel=1e-3)
    assert metrics["train/valid_frac"] == pytest.approx(valid.double().mean().item())
    unexplained = [part[valid.numpy()].var(ddof=1) for part in (ext, internal)]
    explained = 1 - np.array(unexplained) / target[valid].var(0).numpy()
    assert metrics["train/explained_variance"] == pytest.approx(explained[0], rel=1e-2, abs=1e-3)
    assert metrics["int/explained_variance"] == pytest.approx(explained[1], rel=1e-2, abs=1e-3)
    np.testing.assert_allclose(saved["rnd"]["filtered"], filtered, rtol=1e-3)
    np.testing.assert_allclose(saved["rnd"]["frames.sums"][1], np.concatenate(shown).sum(0), rtol=1e-9)
    for name, weight in w.items():
        torch.testing.assert_close(saved["agent"][name].double(), weight, rtol=1e-3, atol=2e-5, msg=name)
    for name, weight in r.items():
        torch.testing.assert_close(saved["rnd"][name].double(), weight, rtol=1e-3, atol=2e-5, msg=name)


def test_invalid_rows_have_zero_gradient(tmp_path):
    """Reward and action of the dummy row reach no weight; its observation none either when no bonus counts."""

    saved = []
    for dummy_reward in (0.0, -1e6):
        envs = fake(dummy_reward=dummy_reward)
        saved.append(run(tmp_path, envs, 2, str(dummy_reward))[1])
    for part in ("agent", "rnd"):
        assert all(torch.equal(saved[0][part][name], saved[1][part][name]) for name in saved[0][part])
    saved = []
    for noise in (0, 255):  # one action: what is acted on the final frame cannot change the stream
        envs = fake(cls=Noisy, ends=("terminated",), num_actions=1)
        envs.noise = noise
        saved.append(run(tmp_path, envs, 2, f"noise {noise}", int_coef=0, vf_coef=1)[1])
    assert all(torch.equal(saved[0]["agent"][name], saved[1]["agent"][name]) for name in saved[0]["agent"])
    assert not all(torch.equal(saved[0]["rnd"][name], saved[1]["rnd"][name]) for name in saved[0]["rnd"])


def test_a_coefficient_of_zero_turns_its_stream_off(tmp_path):
    """--ext-coef 0: rewards reach no weight. --int-coef 0: the bonus reaches none of the policy's."""
    saved = []
    for scale in (0, 100):
        envs = FakeVecEnv([[([float(scale)] * 5, "terminated")]] * 4, NEXT_STEP, shape=SHAPE)
        saved.append(run(tmp_path, envs, 2, f"ext {scale}", ext_coef=0)[1])
    assert all(torch.equal(saved[0]["agent"][name], saved[1]["agent"][name]) for name in saved[0]["agent"])
    saved = []
    for kind in ("mean", "half_sum"):
        saved.append(run(tmp_path, fake(), 2, f"int {kind}", int_coef=0, int_norm="none", int_reward=kind)[1])
    assert all(torch.equal(saved[0]["agent"][name], saved[1]["agent"][name]) for name in saved[0]["agent"])


def test_int_gae_crosses_episodes(tmp_path, monkeypatch):
    """Intrinsic advantages of a stream are those of the same stream without ends; extrinsic ones are not."""
    calls, real = [], ppo_atari_rnd.gae
    monkeypatch.setattr(ppo_atari_rnd, "gae", lambda *x: calls.append(x) or real(*x))
    run(tmp_path, fake())
    (_, _, ended, done, gamma, _), (bonus, value, no_end, no_done, gamma_int, lam) = calls
    assert ended.any() and done.any() and (gamma, gamma_int, lam) == (0.999, 0.99, 0.95)
    assert not no_end.any() and not no_done.any() and no_end.shape == no_done.shape == bonus.shape == ended.shape
    assert value.shape == (17, 4)


@pytest.mark.parametrize("coefs", [(1, 0), (0, 1), (2, 1)])
def test_combined_advantage(tmp_path, monkeypatch, coefs):
    """ext_coef x one stream + int_coef x the other, not normalised."""
    seen, streams, terms, gae = [], [], ppo_atari_rnd.ppo_terms, ppo_atari_rnd.gae
    monkeypatch.setattr(ppo_atari_rnd, "gae", lambda *x: streams.append(gae(*x)) or streams[-1])
    monkeypatch.setattr(ppo_atari_rnd, "ppo_terms", lambda *x: seen.append(x[3]) or terms(*x))
    run(tmp_path, fake(), ext_coef=coefs[0], int_coef=coefs[1], minibatch_size=64, micro_batch=64)
    torch.testing.assert_close(seen[0], (coefs[0] * streams[0] + coefs[1] * streams[1]).T.flatten())


def test_norm_order(tmp_path, monkeypatch):
    """The bonus of rollout k is computed under the statistics through rollout k - 1, the update under those of k."""
    counts, preprocess = [], RND.preprocess
    monkeypatch.setattr(
        RND, "preprocess", lambda self, x: counts.append(round(self.frames.sums[0].max().item())) or preprocess(self, x)
    )
    run(tmp_path, fake(), iterations=2, micro_batch=64, minibatch_size=64)
    warmup, rollout = 3 * 4, 16 * 4  # rows
    # for each iteration: bonus, then features, then the predictor's one minibatch
    assert counts == [warmup, *[warmup + rollout] * 2, warmup + rollout, *[warmup + 2 * rollout] * 2]


def test_bonus_frame_is_the_newest_of_the_next_observation(tmp_path, monkeypatch):
    seen, bonus = [], RND.bonus
    monkeypatch.setattr(RND, "bonus", lambda self, x, *rest: seen.append(x.clone()) or bonus(self, x, *rest))

    class Layers(FakeVecEnv):
        def frames(self):
            frames = super().frames()
            frames[:, :3, 1:] = 99  # older frames of the stack
            self.seen[-1] = frames
            return frames.copy()

    for k, (which, offset) in enumerate((("next", 1), ("current", 0))):
        envs = fake(cls=Layers)
        run(tmp_path, envs, name=which, bonus_on=which, micro_batch=64)
        expected = np.stack(envs.seen[3 + offset : 3 + 16 + offset])[:, :, -1:]
        assert np.array_equal(seen[k].numpy().reshape(16, 4, 1, 44, 44), expected)


def test_rollout_is_uint8_without_gradients(tmp_path, monkeypatch):
    kinds, forward = set(), Agent.forward
    monkeypatch.setattr(
        Agent,
        "forward",
        lambda self, x, *rest: kinds.add((x.dtype, torch.is_grad_enabled(), len(x))) or forward(self, x, *rest),
    )
    run(tmp_path, fake(), micro_batch=32)
    assert kinds == {(torch.uint8, False, 4), (torch.uint8, True, 32)}


def test_predictor_sees_every_row_and_its_share(tmp_path, monkeypatch):
    """At share 1 all next frames, those of dummy rows too; at 0.25 about a quarter; default: min(1, 32 / envs)."""
    sizes, forward = [], torch.nn.Sequential.forward
    envs = fake()

    def spy(self, x):
        if torch.is_grad_enabled() and x.shape[1] == 1 and len(x) > 1:
            sizes.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(torch.nn.Sequential, "forward", spy)
    run(tmp_path, envs, minibatch_size=64, micro_batch=64)
    assert sizes == [64]
    sizes.clear()
    run(tmp_path, envs, name="b", minibatch_size=64, micro_batch=64, update_epochs=40, predictor_share=0.25)
    assert np.mean(sizes) == pytest.approx(16, abs=3 * 12**0.5 / 40**0.5) and len(set(sizes)) > 5


def test_minibatches_are_whole_envs_in_order(tmp_path, monkeypatch):
    seen, terms = [], ppo_atari_rnd.ppo_terms
    monkeypatch.setattr(ppo_atari_rnd, "ppo_terms", lambda *x: seen.append(x[3]) or terms(*x))
    monkeypatch.setattr(ppo_atari_rnd, "gae", lambda r, *x: torch.arange(64.0).view(16, 4))
    run(tmp_path, fake(), ext_coef=1, int_coef=0, minibatch_size=32, update_epochs=3)
    rows = torch.arange(64.0).view(16, 4)
    for k, minibatch in enumerate(seen):
        assert torch.equal(minibatch, rows[:, 2 * (k % 2) : 2 * (k % 2) + 2].T.flatten())
    assert len(seen) == 6


def test_warm_up_counts_no_steps_and_loses_no_game(tmp_path, monkeypatch):
    """Statistics of exactly the warm-up's next frames; games begun in it are reported with their whole return."""
    games, log = [], ppo_atari_rnd.Run.log
    monkeypatch.setattr(ppo_atari_rnd.Run, "log", lambda self, *x: games.extend(self.games) or log(self, *x))
    envs = FakeVecEnv([[([1.0] * 10, "terminated")]] * 4, NEXT_STEP, shape=SHAPE)
    metrics, saved = run(tmp_path, envs, warmup_steps=5)
    assert metrics["step"] == 64 and {game[:2] for game in games} == {(10.0, 10)} and len(games) == 8
    assert saved["rnd"]["frames.sums"][0].max().item() == pytest.approx(5 * 4 + 64, abs=1e-3)
    resumed = Args(**(saved["args"] | dict(resume=str(tmp_path / "run"), total_timesteps=128)))
    train(resumed, FakeVecEnv([[([1.0] * 10, "terminated")]] * 4, NEXT_STEP, shape=SHAPE))
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert saved["rnd"]["frames.sums"][0].max().item() == pytest.approx(5 * 4 + 128, abs=1e-3)  # no second warm-up


def test_target_return_stops(tmp_path):
    envs = FakeVecEnv([[([1.0] * 10, "terminated")]] * 4, NEXT_STEP, shape=SHAPE)
    assert run(tmp_path, envs, 5, target_return=10.0)[0]["step"] == 64
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    again = train(Args(**(saved["args"] | dict(resume=str(tmp_path / "run")))), envs)  # is finished
    assert again["step"] == 64 and "loss/policy" not in again
    assert run(tmp_path, envs, 5, "b", target_return=10.5)[0]["step"] == 5 * 64
    envs = FakeVecEnv([[([-1.0] * 10, "terminated")]] * 4, NEXT_STEP, shape=SHAPE)
    assert run(tmp_path, envs, 5, "c", target_return=-10.0)[0]["step"] == 64


def test_a_resumed_run_plays_other_games(tmp_path, monkeypatch):
    """EnvPool's random numbers start with the pool: a resumed run must not replay them."""
    made, make = [], ppo_atari_rnd.make_envs
    monkeypatch.setattr(ppo_atari_rnd, "make_envs", lambda *rest: made.append(make(*rest)) or made[-1])
    args = Args(**SMALL, env_id="Breakout", run_dir=str(tmp_path), run_name="a", total_timesteps=64)
    train(args)
    train(dataclasses.replace(args, total_timesteps=128, resume=str(tmp_path / "a")))
    seeds = [set(envs.pool.spec.config.env_seed) for envs in made]
    assert len(seeds) == 2 and not seeds[0] & seeds[1]


def test_same_step_truncation_of_the_episodic_bonus(tmp_path, monkeypatch):
    """With --int-episodic a truncated row's bonus grows by gamma_int V_int(final observation)."""
    calls, gae, forward, bonus = [], ppo_atari_rnd.gae, Agent.forward, RND.bonus
    heads = torch.tensor([3.0, 7.0])
    monkeypatch.setattr(Agent, "forward", lambda self, x, *rest: constant_values(forward(self, x, *rest), heads))
    monkeypatch.setattr(RND, "bonus", lambda self, x, *rest: 0 * bonus(self, x, *rest))
    monkeypatch.setattr(ppo_atari_rnd, "gae", lambda *x: calls.append(x) or gae(*x))
    envs = FakeVecEnv([[([1.0, 1.0, 2.0], "truncated"), ([5.0], "terminated")]] * 4, SAME_STEP, shape=SHAPE)
    run(tmp_path, envs, warmup_steps=4, int_episodic=True, int_norm="none")
    np.testing.assert_allclose(calls[1][0][:, 0].numpy(), np.tile([0, 0, 0.99 * 7, 0], 4), rtol=1e-6)
    assert torch.equal(calls[1][2], calls[0][2]) and torch.equal(calls[1][3], calls[0][3])


@pytest.mark.parametrize("shape", [(4, 20, 20), (4, 44, 60)])
def test_unsuitable_frames_are_refused(tmp_path, shape):
    with pytest.raises(ppo_atari_rnd.UsageError, match="must be"):
        run(tmp_path, FakeVecEnv(random_episodes(4), NEXT_STEP, shape=shape))
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------------------- learns


class Unique(FakeVecEnv):
    """Reset frames look like nothing else; the bonus of the row that shows one is booked in `self.bonuses`."""

    def frame(self, env):
        frame = np.full(self.shape, 40, np.uint8)
        if self.t[env] == 0:
            frame[:, 10:30, 10:30] = 200
        return frame


def test_bonus_of_the_reset_frame_falls(tmp_path, monkeypatch):
    """A new game's first frame is only ever a dummy row's next frame: if that row did not train the predictor, its
    bonus would stay high, a reward for dying."""
    means, bonus = [], RND.bonus

    def spy(self, frames, *rest):
        result = bonus(self, frames, *rest)
        means.append(result[frames[:, 0, 15, 15] == 200].mean().item())
        return result

    monkeypatch.setattr(RND, "bonus", spy)
    envs = Unique([[([0.0] * 7, "terminated")]] * 4, NEXT_STEP, shape=SHAPE)
    run(tmp_path, envs, 20, warmup_steps=20, lr=("1e-3",), micro_batch=64, update_epochs=2, rnd_features=64)
    assert means[-1] < means[0] / 10


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_the_bonus_finds_the_rare_door(tmp_path, seed):
    """The agent with the bonus goes through the door five times as often as with --int-coef 0, same budget."""
    reached = []
    options = dict(num_envs=8, num_steps=64, minibatch_size=256, update_epochs=4, warmup_steps=64, rnd_features=32)
    for int_coef in (1.0, 0.0):
        envs = RareDoor()
        run(tmp_path, envs, 40, str(int_coef), int_coef=int_coef, ext_coef=0, lr=("5e-4",), seed=seed, **options)
        reached.append(envs.reached)
    assert reached[0] >= 5 * max(reached[1], 1), reached


# ------------------------------------------------------------------------------------------------------ the environment


def atari(num_envs=4, split="training", **changes):
    return ppo_atari_rnd.make_envs(Args(**(dict(env_id="Breakout") | changes)), split, num_envs)


def play(envs, steps, seed=0):
    rng, over = np.random.default_rng(seed), np.zeros(envs.num_envs, bool)
    obs, _ = envs.reset()
    for _ in range(steps):
        actions = rng.integers(envs.single_action_space.n, size=envs.num_envs)
        valid = ~over
        obs, reward, ended, cut, info = envs.step(actions)
        over = ended | cut
        yield obs, reward, ended, cut, info, valid


@pytest.mark.parametrize("episodic_life", [False, True])
def test_true_returns_on_breakout(episodic_life):
    """Whole games, unclipped, over lost lives and time limits, against books kept from lives and step counts."""
    envs, episodes, games = atari(8, max_episode_steps=120, episodic_life=episodic_life), Episodes(8), []
    books, expected = [[0.0, 0] for _ in range(8)], []
    lost, limits = 0, 0
    for _, reward, ended, cut, info, valid in play(envs, 600):
        games += episodes.step(*score(reward, ended, cut, info), valid)
        for i in range(8):
            books[i][0] += info["reward"][i] if valid[i] else 0
            books[i][1] += bool(valid[i])
            lost += bool(ended[i] and info["lives"][i] > 0)
            limits += bool(cut[i])
            if info["lives"][i] == 0 and ended[i] or cut[i]:
                expected.append((*books[i], i))
                books[i] = [0.0, 0]
    assert [(game[0], game[1], game[3]) for game in games] == expected and len(expected) > 20
    assert limits > 5 and (lost > 20) == episodic_life
    assert max(game[1] for game in games) <= 120 * (2 if episodic_life else 1)


def test_truncates_at_arg_and_clips_sign():
    """The limit is in agent steps; the training reward is the sign of the score, info has the score."""
    envs, lengths = atari(4, max_episode_steps=50, env_id="SpaceInvaders-v5"), set()
    rewards, raw = set(), set()
    for _, reward, _, cut, info, _ in play(envs, 300):
        lengths |= set(info["elapsed_step"][cut].tolist())
        rewards |= set(reward.tolist())
        raw |= set(info["reward"].tolist())
    assert lengths == {50} and rewards == {0.0, 1.0} and max(raw) >= 5


def test_options_reach_the_emulator():
    envs = atari(
        3, repeat_action_probability=0.3, frame_skip=2, noop_max=5, fire_reset=True, frame_size=96, stack=2, seed=7
    )
    config = envs.pool.spec.config
    assert config.repeat_action_probability == pytest.approx(0.3) and config.frame_skip == 2 and config.noop_max == 5
    assert config.use_fire_reset and config.img_height == config.img_width == 96 and config.reward_clip
    assert envs.single_observation_space.shape == (2, 96, 96) and config.max_episode_steps == 4500


def test_seed_streams_disjoint():
    """No two envs of neighbouring runs, nor of training and evaluation, share a seed."""
    seeds = [atari(64, split, seed=s).pool.spec.config.env_seed for s in (1, 2, 3) for split in ("training", "game")]
    assert len({seed for one in seeds for seed in one}) == 6 * 64
    assert atari(64, seed=1).pool.spec.config.env_seed == seeds[0]


def test_newest_frame_is_last():
    envs = atari(2, stack=4)
    before, same = envs.reset()[0], 0
    for obs, _, _, _, _, valid in play(envs, 30):
        if valid.all():
            assert (obs[:, :3] == before[:, 1:]).all() or not same
            same += 1
        before = obs
    assert same > 20


class Pool:
    """EnvPool's surface with scripted rooms: env 0 visits 1, 2 in its first game and 5 in its second."""

    observation_space = ppo_atari_rnd.gym.spaces.Box(0, 255, (4, 44, 44), np.uint8)
    action_space = ppo_atari_rnd.gym.spaces.Discrete(3)
    rooms, ends = [1, 2, 1, 5, 5, 7], [0, 0, 1, 0, 0, 0]

    def __init__(self):
        self.t = -1

    def reset(self):
        return np.zeros((1, 4, 44, 44), np.uint8), {}

    def step(self, actions):
        self.t += 1
        ram = np.zeros((1, 128), np.uint8)
        ram[0, 3] = self.rooms[self.t]
        ended = np.array([bool(self.ends[self.t])])
        info = dict(reward=np.ones(1, np.float32), terminated=ended.astype(np.int32), ram=ram)
        return np.zeros((1, 4, 44, 44), np.uint8), np.ones(1, np.float32), ended, np.zeros(1, bool), info


def test_rooms_by_hand():
    """Rooms of this game only; the dummy row after the end begins the next game's."""
    envs, counts = ppo_atari_rnd.AtariEnvs(Pool(), 1, 3), []
    envs.reset()
    for _ in range(6):
        obs, reward, ended, cut, info = envs.step(np.zeros(1, int))
        counts.append(int(score(reward, ended, cut, info)[2][0]))
    assert counts == [1, 2, 2, 1, 1, 2] and np.flatnonzero(info["rooms"][0]).tolist() == [5, 7]


def test_rooms_of_montezuma():
    for env_id, known in (("MontezumaRevenge", True), ("Pitfall", True), ("Breakout", False)):
        *_, info, _ = [*play(atari(2, env_id=env_id), 20)][-1]
        assert ("rooms" in info) == known
        if known:
            assert info["rooms"][[0, 1], info["ram"][:, ppo_atari_rnd.ROOM_BYTE[env_id]]].all()
            assert (info["rooms"].sum(1) <= (1 if env_id == "MontezumaRevenge" else 3)).all()


@pytest.mark.slow
def test_a_new_screen_of_pitfall_is_novel():
    """After training the predictor on the start screen, the screen next door has at least ten times its bonus."""
    envs = atari(8, env_id="Pitfall", repeat_action_probability=0.0)
    envs.reset()
    start, rng = [], np.random.default_rng(0)
    home = envs.step(np.zeros(8, int))[4]["ram"][0, 1]
    while len(start) < 200:  # random play that stays on the first screen
        obs, _, _, _, info = envs.step(rng.integers(18, size=8))
        start += [torch.from_numpy(frame[-1:]) for frame in obs[info["ram"][:, 1] == home]]
    other = []
    for step in range(600):  # walk left, with jumps
        obs, _, _, _, info = envs.step(np.full(8, 4 if step % 40 else 12))
        other += [torch.from_numpy(frame[-1:]) for frame in obs[info["ram"][:, 1] != home]]
    assert len(other) > 50
    torch.manual_seed(0)
    start, other, rnd = torch.stack(start), torch.stack(other), RND(84, 1)
    rnd.frames.update(start)
    features = rnd.target(rnd.preprocess(start))
    optimizer = torch.optim.Adam(rnd.predictor.parameters(), lr=1e-4)
    for _ in range(60):
        for rows in torch.randperm(len(start)).split(64):
            optimizer.zero_grad()
            (rnd.predictor(rnd.preprocess(start[rows])) - features[rows]).square().mean().backward()
            optimizer.step()
    assert rnd.bonus(other).mean() > 10 * rnd.bonus(start).mean()


def test_actions_are_obeyed():
    """64-bit actions reach the game: always right and always left move Breakout's paddle apart."""
    ends = []
    for action in (2, 3):
        envs = atari(1, repeat_action_probability=0.0)
        envs.reset()
        for _ in range(15):
            obs, *_, info = envs.step(np.array([action]))
        ends.append(int(info["ram"][0, 72]))  # where Breakout keeps the paddle
    assert abs(ends[0] - ends[1]) > 50


def test_reading_args_from_a_checkpoint(tmp_path):
    metrics, saved = run(tmp_path, fake())
    args = Args(**saved["args"])
    assert dataclasses.asdict(args)["rnd_features"] == 8 and metrics["run"] == str(tmp_path / "run")


def test_same_step_envs_train_alike(tmp_path):
    """A truncated same-step stream bootstraps from the final observation, as next-step does; no bonus counts here."""
    weights = []
    for autoreset, steps in ((SAME_STEP, 6), (NEXT_STEP, 8)):
        envs = FakeVecEnv([[(np.float32([1, -1, 2]), "truncated")]] * 4, autoreset, num_actions=1, shape=SHAPE)
        options = dict(num_steps=steps, minibatch_size=4 * steps, int_coef=0, warmup_steps=4 if steps == 8 else 3)
        weights.append(run(tmp_path, envs, name=f"{steps}", **options)[1]["agent"])
    torch.testing.assert_close(weights[0]["value.weight"][0], weights[1]["value.weight"][0], rtol=1e-3, atol=1e-5)


def test_same_step_truncation_adds_the_games_value(tmp_path, monkeypatch):
    """A truncated row gets gamma V(final observation) of the game's head on top of its reward; the trace ends there."""
    seen, gae, forward = [], ppo_atari_rnd.gae, Agent.forward
    heads = torch.tensor([3.0, 7.0])
    monkeypatch.setattr(Agent, "forward", lambda self, x, *rest: constant_values(forward(self, x, *rest), heads))
    monkeypatch.setattr(ppo_atari_rnd, "gae", lambda *x: seen.append(x) or gae(*x))
    envs = FakeVecEnv([[([1.0, 1.0, 2.0], "truncated"), ([5.0], "terminated")]] * 4, SAME_STEP, shape=SHAPE)
    run(tmp_path, envs, warmup_steps=4)
    reward, _, terminated, done, *_ = seen[0]
    cycle = [1, 1, 2 + 0.999 * 3, 5]
    np.testing.assert_allclose(reward[:, 0].numpy(), np.tile(cycle, 4), rtol=1e-6)
    assert terminated[:, 0].tolist() == done[:, 0].tolist() == [0, 0, 1, 1] * 4
