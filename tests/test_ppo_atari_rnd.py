"""The algorithm of ppo_atari_rnd.py against independent oracles, its environments against hand-kept books."""

import csv
import math

import numpy as np
import ppo_atari_rnd
import pytest
import torch
import torch.nn.functional as F
from ppo_atari_rnd import RND, Agent, Args, RunningMoments, UsageError, gae, make_envs, play, ppo_terms, train

from conftest import NEXT_STEP, SAME_STEP, FakeVecEnv, RareDoor, random_episodes

SHAPE, WARMUP = (4, 44, 44), 3
SMALL = dict(num_envs=4, num_steps=16, minibatch_size=32, update_epochs=1, warmup_steps=WARMUP, rnd_features=8)
SMALL |= dict(eval_episodes=0, quiet=True, torch_threads=1, device="cpu")


class Fake(FakeVecEnv):
    """The scripted environment, whose reset begins new games as EnvPool's does; `noise` in a game's last frame."""

    noise = 0

    def reset(self, *, seed=None, options=None):
        for env in np.flatnonzero((self.t > 0) | self.over):
            self.begin(env)
        return super().reset()

    def frames(self):
        frames = super().frames()
        frames[self.over] ^= self.noise
        return frames


class Bright(Fake):
    """Frames that differ much, from step to step and game to game."""

    def frame(self, env):
        frame = super().frame(env)
        frame[:, 1:] = (50 * env + 37 * self.episode[env] + 11 * self.t[env]) % 256
        return frame


def fake(cls=Fake, ends=("terminated", "truncated", "life"), **options):
    return cls(random_episodes(4, ends=ends), NEXT_STEP, shape=SHAPE, **options)


def same_games(length=5, reward=1.0, cls=Fake):
    return cls([[([reward] * length, "terminated")]] * 4, NEXT_STEP, shape=SHAPE)


def run(tmp_path, envs, iterations=1, name="run", **changes):
    """Train -> the last metrics, the checkpoint."""
    args = Args(**(SMALL | dict(run_dir=str(tmp_path), run_name=name) | changes))
    args.total_timesteps = iterations * args.num_envs * args.num_steps
    metrics = train(args, envs)
    return metrics, torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)


def spy_on(monkeypatch, owner, name, note):
    """Call `note` with the result and the arguments of each call of owner.name."""
    real = getattr(owner, name)

    def spy(*args):
        result = real(*args)
        note(result, *args)
        return result

    monkeypatch.setattr(owner, name, spy)


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


# ------------------------------------------------------------------------------------------------------------- maths


def test_defaults_match_reference_table():
    """OpenAI's published setting."""
    expected = dict(num_envs=128, num_steps=128, minibatch_size=4096, update_epochs=4, gamma=0.999, gamma_int=0.99)
    expected |= dict(gae_lambda=0.95, clip=0.1, vf_coef=1, ent_coef=(0.001,), ext_coef=2, int_coef=1, lr=(1e-4,))
    expected |= dict(repeat_action_probability=0.25, noop_max=1, fire_reset=False, episodic_life=False, stack=4)
    expected |= dict(
        adam_eps=1e-8,
        max_grad_norm=0,
        max_episode_steps=4500,
        frame_size=84,
        predictor_share=0,
        rnd_features=512,
        warmup_steps=6400,
    )
    expected |= dict(total_timesteps=30_000 * 128 * 128, env_id="MontezumaRevenge")
    assert {name: getattr(Args(), name) for name in expected} == expected


def size(module):
    return sum(weight.numel() for weight in module.parameters())


def test_network_sizes_and_initial_weights():
    """Layer by layer as in the authors' cnn_policy_param_matched.py and cnn_gru_policy_dynamics.py."""
    agent, rnd = Agent((4, 84, 84), 18, Args()), RND((1, 84, 84), 512)
    convs = 4 * 64 * 32 + 32 + 32 * 16 * 64 + 64 + 64 * 16 * 64 + 64
    hidden = 6 * 6 * 64 * 256 + 256
    assert size(agent) == convs + hidden + 256 * 448 + 448 + 2 * (448 * 448 + 448) + 449 * 20
    gru = Agent((4, 84, 84), 18, Args(memory="gru"))
    gates = 3 * 2 * (256 * 256 + 256)  # PyTorch's cell has two biases a gate
    assert size(gru) == convs + hidden + gates + 2 * (256 * 256 + 256) + 257 * 20
    assert not gru.hidden2.bias_ih.any() and not gru.hidden2.bias_hh.any()
    target = 64 * 32 + 32 + 32 * 16 * 64 + 64 + 64 * 9 * 64 + 64 + 3136 * 512 + 512
    assert size(rnd.target) == target and size(rnd.predictor) == target + 2 * (512 * 512 + 512)
    assert not any(weight.requires_grad for weight in rnd.target.parameters())
    for module, gain in (
        (agent.hidden1, 2**0.5),
        (agent.residual_value, 0.1),
        (agent.residual_policy, 0.1),
        (agent.policy, 0.01),
        (agent.value, 0.01),
        (rnd.predictor[-1], 2**0.5),
    ):
        gram = module.weight @ module.weight.T
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), rtol=1e-3, atol=1e-5)
    gram = gru.hidden2.weight_hh.T @ gru.hidden2.weight_hh
    torch.testing.assert_close(gram, torch.eye(256), rtol=1e-3, atol=1e-5)


def plain_convolutions(w, name, x):
    for i, stride in ((0, 4), (2, 2), (4, 1)):
        x = F.conv2d(x, w[f"{name}.{i}.weight"], w[f"{name}.{i}.bias"], stride)
        x = F.relu(x) if name == "convs" else F.leaky_relu(x, 0.2)
    return x.flatten(1)


def plain_linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def plain_heads(w, x):
    policy = x + F.relu(plain_linear(w, "residual_policy", x))
    value = x + F.relu(plain_linear(w, "residual_value", x))
    return plain_linear(w, "policy", policy), plain_linear(w, "value", value)


def plain_agent(w, obs):
    x = plain_convolutions(w, "convs", obs.double() / 255)
    for name in ("hidden1", "hidden2"):
        x = F.relu(plain_linear(w, name, x))
    return plain_heads(w, x)


def plain_gru(w, obs):
    """Logits and values of one whole game, frames (L, C, S, S), from no memory."""
    x = F.relu(plain_linear(w, "hidden1", plain_convolutions(w, "convs", obs.double() / 255)))
    memory, states = torch.zeros(256).double(), []
    for row in x:
        inputs = (w["hidden2.weight_ih"] @ row + w["hidden2.bias_ih"]).chunk(3)
        hidden = (w["hidden2.weight_hh"] @ memory + w["hidden2.bias_hh"]).chunk(3)
        reset, update = (inputs[0] + hidden[0]).sigmoid(), (inputs[1] + hidden[1]).sigmoid()
        memory = (1 - update) * (inputs[2] + reset * hidden[2]).tanh() + update * memory
        states.append(memory)
    return plain_heads(w, torch.stack(states))


def plain_rnd(w, net, x):
    x = plain_linear(w, f"{net}.7", plain_convolutions(w, net, x))
    for i in (9, 11) if net == "predictor" else ():
        x = plain_linear(w, f"{net}.{i}", F.relu(x))
    return x


def test_gae_equals_per_episode_reference():
    """Terminations and truncations: the recursion equals every episode's own double sum, joined."""
    rng, (T, N, gamma, lam) = np.random.default_rng(0), (40, 5, 0.97, 0.9)
    reward, value, ends = rng.normal(size=(T, N)), rng.normal(size=(T + 1, N)), rng.random((T, N))
    terminated, truncated = ends < 0.1, ends > 0.9
    expected = np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            for k in range(t, T):
                following = 0 if terminated[k, n] else value[k + 1, n]
                expected[t, n] += (gamma * lam) ** (k - t) * (reward[k, n] + gamma * following - value[k, n])
                if terminated[k, n] or truncated[k, n]:
                    break
    rows = (torch.tensor(x, dtype=torch.float64) for x in (reward, value, terminated, terminated | truncated))
    np.testing.assert_allclose(gae(*rows, gamma, lam).numpy(), expected, rtol=1e-12, atol=1e-12)


def test_ppo_terms_by_hand():
    """Half the squared error of each head, summed; no value clipping; the surrogate takes the worse of both."""
    logits = torch.tensor([[0.0, math.log(3.0)]])  # p = 1/4, 3/4
    values, both = torch.tensor([[1.0, -2.0]]), torch.tensor([True, True])
    cases = ((0.25, 2.0, 2.0), (0.2, 2.0, 1.1 * 2), (0.2, -2.0, -1.25 * 2), (0.5, -2.0, -1.8), (0.5, 2.0, 1.0))
    for old_p, advantage, surrogate in cases:
        rows = dict(action=torch.tensor([0]), advantage=torch.tensor([advantage]), logp=torch.tensor([old_p]).log())
        rows["target"] = torch.tensor([[4.0, 0.0]])
        terms = {name: term.item() for name, term in ppo_terms(logits, values, rows, 0.1, both).items()}
        assert terms["policy"] == pytest.approx(-surrogate) and terms["value"] == pytest.approx((9 + 4) / 2)
        assert terms["entropy"] == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
        ratio = 0.25 / old_p
        assert terms["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)
        assert terms["clip_frac"] == (old_p != 0.25)
    assert ppo_terms(logits, values, rows, 0.1, torch.tensor([False, True]))["value"].item() == 2


def test_running_moments_match_numpy():
    rng, moments = np.random.default_rng(0), RunningMoments((2, 3))
    batches = [rng.integers(0, 256, (n, 2, 3)) for n in (5, 1, 700)]
    for batch in batches:
        moments.update(torch.from_numpy(batch.astype(np.uint8)))
    everything = np.concatenate(batches).astype(float)
    np.testing.assert_allclose(moments.mean(), everything.mean(0), rtol=1e-6)
    np.testing.assert_allclose(moments.std(), everything.std(0), rtol=1e-5)


def test_running_moments_of_constants_are_finite():
    """A pixel that never changes has a deviation small but not zero, however long it was seen."""
    moments = RunningMoments((2,))
    moments.sums += torch.tensor([1.0, 255.0, 255.0**2])[:, None].double() * 2e9
    assert (moments.std() > 0).all() and (moments.std() < 1e-2).all()


def test_preprocess_and_error():
    """Frames are standardised and clipped to +-5; the error is the mean square over the features, one per row."""
    rnd = RND((1, 44, 44), 6)
    frames = torch.randint(0, 256, (50, 1, 44, 44), dtype=torch.uint8)
    frames[:, 0, 0, 0] = 7
    rnd.frames.update(frames)
    new = frames[:9].clone()
    new[:, 0, 0, 0] = 9
    x = ((new - frames.double().mean(0)) / frames.double().std(0, correction=0)).clamp(-5, 5)
    torch.testing.assert_close(rnd.preprocess(new).double(), x, rtol=1e-3, atol=1e-3)
    assert rnd.preprocess(new)[0, 0, 0, 0] == pytest.approx(5, rel=1e-3)
    w = {name: weight.double() for name, weight in rnd.state_dict().items()}
    expected = (plain_rnd(w, "predictor", x) - plain_rnd(w, "target", x)).square().mean(1)
    features = rnd.features(new)
    torch.testing.assert_close(rnd.error(new, features).double(), expected, rtol=1e-3, atol=1e-6)
    assert rnd.error(new, features).requires_grad and not features.requires_grad


def test_bonus_and_loss_have_one_precision():
    """Under bf16 both are differences of float32: in bf16 what is left of two near features would be noise."""
    rnd = RND((1, 44, 44), 64)
    frames = torch.randint(0, 256, (9, 1, 44, 44), dtype=torch.uint8)
    rnd.frames.update(frames)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        x = rnd.preprocess(frames)
        prediction, target = rnd.predictor(x), rnd.target(x)
        error = rnd.error(frames, rnd.features(frames))
    assert prediction.dtype == torch.bfloat16 and error.dtype == torch.float32
    assert torch.equal(error, (prediction.float() - target.float()).square().mean(1))
    assert not torch.equal(error, (prediction - target).square().mean(1).float())


def test_intrinsic_normalisation_matches_numpy_loop():
    """The sums run along time, persist from rollout to rollout, cross no environments; bonuses are not centred."""
    rng, rnd = np.random.default_rng(3), RND((1, 44, 44), 4)
    filtered, seen = np.zeros(2), []
    for _ in range(5):
        bonus = rng.exponential(size=(40, 2)) * [1, 3]
        for row in bonus:
            filtered = 0.9 * filtered + row
            seen += filtered.tolist()
        got = rnd.normalize(torch.from_numpy(bonus), 0.9).numpy()
        np.testing.assert_allclose(got, bonus / np.std(seen), rtol=1e-4)


# -------------------------------------------------------------------------------------------------------------- memory


def test_memory_lasts_a_game(tmp_path, monkeypatch):
    """Acting and learning, over three rollouts: every row's outputs are those of its game played from no memory.

    The row of the ignored action still belongs to the old game, whose last value it gives.
    """
    init, calls = Agent.__init__, []

    def larger(self, *rest):
        init(self, *rest)
        self.policy.weight.data *= 30
        self.value.weight.data *= 30

    def note(outputs, module, obs, *rest):
        calls.append((torch.is_grad_enabled(), obs.clone(), torch.cat(outputs[:2], 1).detach()))

    monkeypatch.setattr(Agent, "__init__", larger)
    spy_on(monkeypatch, Agent, "forward", note)
    envs = fake(Bright, ends=("terminated",))
    options = dict(memory="gru", lr=(0.0,), micro_batch=20, minibatch_size=64)  # pieces of 2 envs
    _, saved = run(tmp_path, envs, 3, **options)
    w = {name: x.double() for name, x in saved["agent"].items()}
    frames = np.stack(envs.seen[WARMUP + 1 :])  # from the first acted one on
    expected = np.zeros((len(frames), 4, 6))
    for env in range(4):
        # A game's rows end with its last frame, which is the row of the ignored action.
        begins = [0, *(t for t in range(1, len(frames)) if frames[t, env, 0, 0, 1] != frames[t - 1, env, 0, 0, 1])]
        spans = list(zip(begins, [*begins[1:], len(frames)], strict=True))
        for a, b in spans:
            expected[a:b, env] = torch.cat(plain_gru(w, torch.from_numpy(frames[a:b, env])), 1).numpy()
        assert len(spans) > 8
    acted = [call for call in calls if not call[0] and len(call[1]) == 4]
    assert len(acted) == 51
    for i, (_, obs, outputs) in enumerate(acted):  # every 17th gives the bootstrap values
        t = i - i // 17
        assert np.array_equal(obs, frames[t])
        np.testing.assert_allclose(outputs, expected[t], rtol=1e-3, atol=1e-4)
    learned = [call for call in calls if call[0]]
    assert len(learned) == 6 and all(len(call[1]) == 32 for call in learned)  # two envs a piece
    for i, (_, _, outputs) in enumerate(learned):
        rollout, first = divmod(i, 2)
        rows = expected[16 * rollout : 16 * rollout + 16, 2 * first : 2 * first + 2].transpose(1, 0, 2).reshape(32, 6)
        np.testing.assert_allclose(outputs, rows, rtol=1e-3, atol=1e-4)


def test_gradients_flow_through_the_rollout_but_not_over_ends():
    """A row's value depends on all frames of its game in the rollout, on none of another game or environment."""
    torch.manual_seed(0)
    agent = Agent(SHAPE, 3, Args(memory="gru"))
    valid = torch.tensor([1.0, 1, 0, 1, 1] * 2)
    x = torch.rand(10, *SHAPE).mul(255).requires_grad_()
    _, values, memory = agent(x, torch.randn(2, 256), valid)
    for row, reached in ((2, [0, 1, 2]), (4, [3, 4]), (7, [5, 6, 7])):
        (gradient,) = torch.autograd.grad(values[row].sum(), x, retain_graph=True)
        assert gradient.flatten(1).abs().sum(1).nonzero().flatten().tolist() == reached
    assert memory.shape == (2, 256)


def scripted_rooms(rooms, ends):
    """One environment behind EnvPool's surface: its RAM tells rooms[t], a game is over where ends[t]."""

    class Pool:
        observation_space = ppo_atari_rnd.gym.spaces.Box(0, 255, SHAPE, np.uint8)
        action_space = ppo_atari_rnd.gym.spaces.Discrete(3)
        t = -1

        def frame(self):
            frame = np.zeros((1, *SHAPE), np.uint8)
            frame[:, :, :, 20:] = 10 * (self.t + 2) % 256
            return frame

        def reset(self):
            return self.frame(), {}

        def step(self, actions):
            self.t += 1
            ram = np.zeros((1, 128), np.uint8)
            ram[0, 3] = rooms[self.t % len(rooms)]
            over = np.array([bool(ends[self.t % len(ends)])])
            info = dict(reward=np.full(1, 5, np.float32), terminated=over.astype(np.int32), ram=ram)
            return self.frame(), np.ones(1, np.float32), over, np.zeros(1, bool), info

    return ppo_atari_rnd.AtariEnvs(Pool(), 1, 3)


def test_memory_is_carried_in_evaluation():
    """Each game that is played has a memory of its own, from nothing, its last frame included."""
    torch.manual_seed(0)
    agent, calls = Agent(SHAPE, 3, Args(memory="gru")), []
    agent.policy.weight.data *= 30
    agent.register_forward_hook(lambda module, inputs, outputs: calls.append((inputs[0], outputs[0])))
    returns, lengths = play(agent, scripted_rooms([1], [0, 0, 0, 1, 0]), 3, seed=0)
    assert returns == [20.0] * 3 and lengths == [4] * 3  # every fifth step's action is ignored
    w = {name: x.double() for name, x in agent.state_dict().items()}
    for first in (0, 5, 10):
        game = calls[first : first + 5]
        expected, _ = plain_gru(w, torch.cat([obs for obs, _ in game]))
        torch.testing.assert_close(torch.cat([logits for _, logits in game]).double(), expected, rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------------------- one whole update


def streams(envs, args, values, bonus, first):
    """GAE of both heads in float64 by the definition: sums over each game for one, over all rows for the other."""
    T, N, lam = args.num_steps, args.num_envs, args.gae_lambda
    reward, ended, cut, before = (np.stack(x) for x in zip(*envs.log[first : first + T], strict=True))
    ext, internal = np.zeros((T, N)), np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            for k in range(t, T):  # until the game's end
                following = 0.0 if ended[k, n] else values[k + 1, n, 0]
                delta = reward[k, n] + args.gamma * following - values[k, n, 0]
                ext[t, n] += (args.gamma * lam) ** (k - t) * delta
                if ended[k, n] or cut[k, n]:
                    break
            for k in range(t, T):  # through all ends, dummy rows included
                delta = bonus[k, n] + args.gamma_int * values[k + 1, n, 1] - values[k, n, 1]
                internal[t, n] += (args.gamma_int * lam) ** (k - t) * delta
    return ext, internal, ~before


def deviation(values):
    """Of all values and of 1e-4 of an observation with mean 0 and variance 1, from which OpenAI's statistics start."""
    n = len(values) + 1e-4
    return np.sqrt((np.sum(np.square(values), axis=0) + 1e-4) / n - (np.sum(values, axis=0) / n) ** 2)


def standardised(frames, shown):
    everything = np.concatenate(shown)
    x = frames.double() - torch.from_numpy(everything.sum(0) / (len(everything) + 1e-4))
    return (x / torch.from_numpy(deviation(everything))).clamp(-5, 5)


@pytest.mark.parametrize(
    "changes", [{}, dict(micro_batch=7, predictor_share=0.4, max_grad_norm=0.05)], ids=["default", "pieces"]
)
def test_update_equals_float64_reference(tmp_path, monkeypatch, changes):
    """Two iterations with terminations, truncations, lost lives and dummy rows, recomputed in float64 from the frames.

    Compared: both networks' weights, the statistics of frames and intrinsic returns, the metrics.
    """
    draws, real = [], torch.rand
    monkeypatch.setattr(torch, "rand", lambda *size: draws.append(real(*size)) or draws[-1])
    init = Agent.__init__

    def with_large_values(self, *rest):  # so that it matters which frame a value is of
        init(self, *rest)
        self.value.weight.data *= 30

    monkeypatch.setattr(Agent, "__init__", with_large_values)
    envs = fake(learn=True)  # whose frames differ much
    options = dict(
        adam_eps=0.01, update_epochs=2, lr=(1e-3,), clip=1e-3, vf_coef=0.7, ent_coef=(0.3,), gamma=0.95, gamma_int=0.9
    )
    metrics, saved = run(tmp_path, envs, iterations=2, **options, **changes)
    args = Args(**(SMALL | options | changes))
    torch.manual_seed(1)
    agent, rnd = Agent(SHAPE, 4, args), RND((1, 44, 44), 8)
    w = {name: x.double().requires_grad_() for name, x in agent.state_dict().items()}
    r = {name: x.double() for name, x in rnd.state_dict().items() if name.startswith(("target", "predictor"))}
    learned = [*w.values(), *(x.requires_grad_() for name, x in r.items() if name.startswith("predictor"))]
    optimizer = torch.optim.Adam(learned, lr=1e-3, eps=0.01)  # a large one: else first steps are signs
    T, N, share = 16, 4, args.predictor_share or 1
    shown = [frame[:, -1:].astype(float) for frame in envs.seen[1 : WARMUP + 1]]  # all that the statistics saw
    filtered, returns, draw = np.zeros(N), [], iter(draws)
    for rollout in range(2):
        first = WARMUP + rollout * T  # of the actions; one more of the frames, for the reset after the warm-up
        obs = torch.from_numpy(np.stack(envs.seen[first + 1 : first + T + 2]))
        actions = torch.from_numpy(np.stack(envs.actions[first : first + T])).long()
        frames = obs[1:, :, -1:]
        with torch.no_grad():
            logits, values = (x.view(T + 1, N, -1) for x in plain_agent(w, obs.flatten(0, 1)))
            x = standardised(frames.flatten(0, 1), shown)
            raw = ((plain_rnd(r, "predictor", x) - plain_rnd(r, "target", x)) ** 2).mean(1).view(T, N).numpy()
            for row in raw:
                filtered = args.gamma_int * filtered + row
                returns += filtered.tolist()
            bonus = raw / deviation(returns)
            shown += [frame.numpy().astype(float) for frame in frames]
            x = standardised(frames.flatten(0, 1), shown)
            features = plain_rnd(r, "target", x).view(T, N, -1)
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
                error = (plain_rnd(r, "predictor", shown_x) - goals).square().mean(1)
                predictor = (error * mask).sum() / mask.sum()
                optimizer.zero_grad()
                (policy + 0.7 * value - 0.3 * entropy + predictor).backward()
                norm = sum(weight.grad.square().sum() for weight in w.values()) ** 0.5  # of the policy network only
                if args.max_grad_norm:
                    for weight in w.values():
                        weight.grad *= min(1.0, args.max_grad_norm / norm.item())
                optimizer.step()
                outside = ((ratio - 1).abs() > args.clip).double().mean()
                others = [predictor, (ratio - 1 - ratio.log()).mean(), outside, norm]
                losses.append([x.item() for x in (policy, value, entropy, *others)])
    assert next(draw, None) is None
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
    np.testing.assert_allclose(saved["rnd"]["frames.sums"][1], np.concatenate(shown).sum(0), rtol=1e-9)
    for name, weight in w.items():
        torch.testing.assert_close(
            saved["agent"][name].double(), weight, rtol=1e-3, atol=5e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
    for name, weight in r.items():
        torch.testing.assert_close(
            saved["rnd"][name].double(), weight, rtol=1e-3, atol=5e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_invalid_rows_have_zero_gradient(tmp_path):
    """Reward and action of the dummy row reach no weight; its observation none either when no bonus counts."""
    saved = [run(tmp_path, fake(dummy_reward=x), 2, f"reward {x}")[1] for x in (0.0, -1e6)]
    assert equal(saved[0]["agent"], saved[1]["agent"]) and equal(saved[0]["rnd"], saved[1]["rnd"])
    saved = []
    for noise in (0, 255):  # one action: what is acted on the final frame cannot change the stream
        envs = fake(ends=("terminated",), num_actions=1)
        envs.noise = noise
        saved.append(run(tmp_path, envs, 2, f"noise {noise}", int_coef=0)[1])
    assert equal(saved[0]["agent"], saved[1]["agent"]) and not equal(saved[0]["rnd"], saved[1]["rnd"])


def test_a_coefficient_of_zero_turns_its_stream_off(tmp_path, monkeypatch):
    """--ext-coef 0: rewards reach no weight. --int-coef 0: the bonus reaches none of the policy's."""
    saved = [run(tmp_path, same_games(5, x), 2, f"ext {x}", ext_coef=0)[1] for x in (0.0, 100.0)]
    assert equal(saved[0]["agent"], saved[1]["agent"])
    saved = [run(tmp_path, fake(), 2, "int 1", int_coef=0)[1]]
    normalize = RND.normalize
    monkeypatch.setattr(RND, "normalize", lambda *x: 100 * normalize(*x))
    saved.append(run(tmp_path, fake(), 2, "int 100", int_coef=0)[1])
    assert equal(saved[0]["agent"], saved[1]["agent"])


def test_bonus_after_leaves_the_first_errors_out_of_the_deviation(tmp_path):
    """No bonus in the first of two iterations; the deviation then knows the second one's 64 rows only."""
    metrics, saved = run(tmp_path, fake(), 2, bonus_after=64)
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        assert float(next(csv.DictReader(file))["int/reward_norm"]) == 0
    assert metrics["int/reward_norm"] > 0 and saved["rnd"]["returns.sums"][0].item() == pytest.approx(64, abs=1e-3)


def test_int_gae_crosses_episodes(tmp_path, monkeypatch):
    """Intrinsic advantages of a stream are those of the same stream without ends; extrinsic ones are not."""
    calls = []
    spy_on(monkeypatch, ppo_atari_rnd, "gae", lambda result, *x: calls.append(x))
    run(tmp_path, fake())
    (_, _, ended, done, gamma, _), (bonus, value, no_end, no_done, gamma_int, lam) = calls
    assert ended.any() and (done > ended).any() and (gamma, gamma_int, lam) == (0.999, 0.99, 0.95)
    assert not no_end.any() and not no_done.any() and no_end.shape == no_done.shape == bonus.shape == ended.shape
    assert value.shape == (17, 4)


def test_norm_order(tmp_path, monkeypatch):
    """The bonus of rollout k is computed under the statistics through rollout k - 1, the update under those of k."""
    counts = []
    spy_on(monkeypatch, RND, "preprocess", lambda result, rnd, x: counts.append(round(rnd.frames.sums[0].max().item())))
    run(tmp_path, fake(), iterations=2, micro_batch=64, minibatch_size=64)
    before, rollout = WARMUP * 4, 16 * 4  # rows
    # for each iteration: features and prediction for the bonus, then features and prediction to learn
    expected = [*[before] * 2, *[before + rollout] * 2, *[before + rollout] * 2, *[before + 2 * rollout] * 2]
    assert counts == expected


def test_bonus_frame_is_the_newest_of_the_next_observation(tmp_path, monkeypatch):
    class Layers(Fake):
        def frames(self):
            frames = super().frames()
            frames[:, :3, 1:] = 99  # older frames of the stack
            self.seen[-1] = frames
            return frames.copy()

    seen, envs = [], fake(Layers)
    spy_on(monkeypatch, RND, "error", lambda result, rnd, frames, features: seen.append(frames.clone()))
    run(tmp_path, envs, micro_batch=64, minibatch_size=64)
    expected = np.stack(envs.seen[WARMUP + 2 :])[:, :, -1:]
    bonus, learned = (x.numpy() for x in seen)
    assert np.array_equal(bonus.reshape(16, 4, 1, 44, 44), expected)
    assert np.array_equal(learned.reshape(4, 16, 1, 44, 44), expected.swapaxes(0, 1))  # a dummy row's too


def test_predictor_learns_its_share_of_the_rows(tmp_path, monkeypatch):
    """At share 0.25 about a quarter; one that is drawn in no piece does not matter; default: min(1, 32 / envs)."""
    sizes = []
    spy_on(monkeypatch, RND, "error", lambda result, rnd, frames, x: sizes.append(len(frames)))
    run(tmp_path, fake(), minibatch_size=64, micro_batch=64, update_epochs=20, predictor_share=0.25)
    assert np.mean(sizes[1:]) == pytest.approx(16, abs=3 * 12**0.5 / 20**0.5) and len(set(sizes)) > 5
    sizes.clear()
    metrics, _ = run(tmp_path, fake(), name="few", micro_batch=8, predictor_share=0.02)
    assert sizes.count(0) > 0 and np.isfinite(metrics["loss/predictor"])
    sizes.clear()
    envs = Fake(random_episodes(64), NEXT_STEP, shape=SHAPE)
    run(tmp_path, envs, name="many", num_envs=64, num_steps=2, minibatch_size=128, update_epochs=10)
    assert np.mean(sizes[1:]) == pytest.approx(64, abs=3 * 32**0.5 / 10**0.5)


def test_rollout_is_uint8_and_minibatches_are_whole_envs_in_order(tmp_path, monkeypatch):
    kinds, seen = set(), []
    note = lambda result, agent, x, *rest: kinds.add((x.dtype, torch.is_grad_enabled(), len(x)))  # noqa: E731
    spy_on(monkeypatch, Agent, "forward", note)
    spy_on(monkeypatch, ppo_atari_rnd, "ppo_terms", lambda result, *x: seen.append(x[2]["advantage"]))
    monkeypatch.setattr(ppo_atari_rnd, "gae", lambda r, *x: torch.arange(64.0).view(16, 4))
    run(tmp_path, fake(), ext_coef=1, int_coef=0, update_epochs=3)
    rows = torch.arange(64.0).view(16, 4)
    for k, minibatch in enumerate(seen):
        assert torch.equal(minibatch, rows[:, 2 * (k % 2) : 2 * (k % 2) + 2].T.flatten())
    assert len(seen) == 6 and kinds == {(torch.uint8, False, 4), (torch.uint8, True, 32)}


def test_games_begin_after_the_warm_up(tmp_path):
    """Statistics of exactly the warm-up's frames; then all games begin anew, as in the authors' code."""
    envs = same_games(10)
    metrics, saved = run(tmp_path, envs, warmup_steps=7)
    assert metrics["step"] == 64 and metrics["episode/return"] == metrics["episode/length"] == 10
    assert metrics["episode/count"] == 4 and len(envs.actions) == 7 + 16  # cut off at 6, then 10 steps and a row
    assert saved["rnd"]["frames.sums"][0].max().item() == pytest.approx(7 * 4 + 64, abs=1e-3)
    resumed = Args(**(saved["args"] | dict(resume=str(tmp_path / "run"), total_timesteps=128)))
    train(resumed, same_games(10))
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert saved["rnd"]["frames.sums"][0].max().item() == pytest.approx(7 * 4 + 128, abs=1e-3)  # no second warm-up


@pytest.mark.parametrize("shape", [(4, 36, 36), (4, 43, 60), (44, 44)])
def test_unsuitable_frames_are_refused(tmp_path, shape):
    with pytest.raises(UsageError, match="from 44 pixels"):
        run(tmp_path, FakeVecEnv(random_episodes(4), NEXT_STEP, shape=shape))
    assert not (tmp_path / "run").exists()


def test_bad_flags_are_refused(tmp_path):
    with pytest.raises(UsageError, match="next-step"):
        run(tmp_path, FakeVecEnv(random_episodes(4), SAME_STEP, shape=SHAPE))
    for flag, changes in {
        "--minibatch-size": dict(minibatch_size=24),  # no whole environments
        "--minibatch-size 48": dict(minibatch_size=48),  # one environment would be left
        "--compile": dict(memory="gru", compile=True),
        "--noop-max": dict(noop_max=0),
        "--env-id": dict(env_id="Montezuma"),
    }.items():
        with pytest.raises(UsageError, match=flag):
            run(tmp_path, None, **changes)
    with pytest.raises(UsageError, match="did you mean MontezumaRevenge"):
        run(tmp_path, None, env_id="Montezuma")


# --------------------------------------------------------------------------------------------------------------- learns


class Unique(Fake):
    """Reset frames look like nothing else."""

    def frame(self, env):
        frame = np.full(self.shape, 40, np.uint8)
        if self.t[env] == 0:
            frame[:, 10:30, 10:30] = 200
        return frame


def test_bonus_of_the_reset_frame_falls(tmp_path, monkeypatch):
    """A new game's first frame is only ever a dummy row's next frame: if that row did not train the predictor, its
    bonus would stay high, a reward for dying."""
    means = []

    def note(result, rnd, frames, features):
        if not result.requires_grad:
            means.append(result[frames[:, 0, 15, 15] == 200].mean().item())

    spy_on(monkeypatch, RND, "error", note)
    options = dict(lr=(1e-3,), micro_batch=64, update_epochs=2, rnd_features=64)
    run(tmp_path, same_games(7, 0.0, Unique), 20, warmup_steps=20, **options)
    assert means[-1] < means[0] / 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_bonus_finds_the_rare_door(tmp_path, seed):
    """The agent with the bonus goes through the door five times as often as with --int-coef 0, same budget."""
    reached = []
    options = dict(num_envs=8, num_steps=64, minibatch_size=256, update_epochs=4, warmup_steps=64, rnd_features=32)
    for int_coef in (1.0, 0.0):
        envs = RareDoor()
        run(tmp_path, envs, 40, str(int_coef), int_coef=int_coef, ext_coef=0, lr=(5e-4,), seed=seed, **options)
        reached.append(envs.reached)
    assert reached[0] >= 5 * max(reached[1], 1), reached


# ------------------------------------------------------------------------------------------------------ the environment


def atari(num_envs=4, stream="training", **changes):
    return make_envs(Args(**(dict(env_id="Breakout", env_threads=1) | changes)), num_envs, stream)


def random_play(envs, steps, seed=0):
    rng, done = np.random.default_rng(seed), np.zeros(envs.num_envs, bool)
    envs.reset()
    for _ in range(steps):
        valid = ~done
        obs, reward, ended, cut, info = envs.step(rng.integers(envs.single_action_space.n, size=envs.num_envs))
        done = ended | cut
        yield obs, reward, ended, cut, info, valid


@pytest.mark.parametrize("episodic_life", [False, True])
def test_true_returns_on_breakout(episodic_life):
    """Whole games, unclipped, over lost lives and time limits, against books kept from lives and step counts."""
    envs, games = atari(8, max_episode_steps=120, episodic_life=episodic_life), []
    books, expected = [[0.0, 0] for _ in range(8)], []
    lost, limits = 0, 0
    for _, _, ended, cut, info, valid in random_play(envs, 300):
        for i in np.flatnonzero(info.get("_episode", np.zeros(8, bool))):
            games.append((info["episode"]["r"][i], info["episode"]["l"][i], i))
        for i in range(8):
            books[i][0] += info["reward"][i] if valid[i] else 0
            books[i][1] += bool(valid[i])
            lost += bool(ended[i] and info["lives"][i] > 0)
            limits += bool(cut[i])
            if info["lives"][i] == 0 and ended[i] or cut[i]:
                expected.append((*books[i], i))
                books[i] = [0.0, 0]
    assert games == expected and len(expected) > 12 and limits > 5 and (lost > 20) == episodic_life
    assert max(length for _, length, _ in games) <= 120 * (2 if episodic_life else 1)
    assert envs.episode_returns.tolist() == [book[0] for book in books]
    assert envs.episode_lengths.tolist() == [book[1] for book in books]
    envs.reset()
    assert not envs.episode_returns.any() and not envs.episode_lengths.any()


def test_truncates_at_arg_and_clips_sign():
    """The limit is in agent steps; the training reward is the sign of the score, info has the score."""
    envs, lengths = atari(4, max_episode_steps=50, env_id="SpaceInvaders-v5"), set()
    rewards, raw = set(), set()
    for _, reward, _, cut, info, _ in random_play(envs, 300):
        lengths |= set(info["elapsed_step"][cut].tolist())
        rewards |= set(reward.tolist())
        raw |= set(info["reward"].tolist())
    assert lengths == {50} and rewards == {0.0, 1.0} and max(raw) >= 5


def test_options_reach_the_emulator():
    options = dict(repeat_action_probability=0.3, noop_max=5, fire_reset=True, frame_size=96, stack=2, seed=7)
    envs = atari(3, **options)
    config = envs.pool.spec.config
    assert config.repeat_action_probability == pytest.approx(0.3) and config.frame_skip == 4 and config.noop_max == 5
    assert config.use_fire_reset and config.img_height == config.img_width == 96 and config.reward_clip
    assert envs.single_observation_space.shape == (2, 96, 96) and config.max_episode_steps == 4500


def test_seed_streams_disjoint():
    """No two envs of neighbouring runs, nor of training and evaluation, share a seed."""
    seeds = [atari(8, stream, seed=s).pool.spec.config.env_seed for s in (1, 2, 3) for stream in ("training", "game")]
    assert len({seed for one in seeds for seed in one}) == 6 * 8
    assert atari(8, seed=1).pool.spec.config.env_seed == seeds[0]


def test_newest_frame_is_last():
    before, same = None, 0
    for obs, *_, valid in random_play(atari(2), 30):
        if before is not None and valid.all():
            assert (obs[:, :3] == before[:, 1:]).all()
            same += 1
        before = obs
    assert same > 20


def test_actions_are_obeyed():
    """64-bit actions reach the game: always right and always left move Breakout's paddle apart."""
    ends = []
    for action in (2, 3):
        envs = atari(1, repeat_action_probability=0.0)
        envs.reset()
        for _ in range(15):
            *_, info = envs.step(np.array([action]))
        ends.append(int(info["ram"][0, 72]))  # where Breakout keeps the paddle
    assert abs(ends[0] - ends[1]) > 50


def test_rooms_by_hand():
    """Rooms of all games; the row after the end begins the next game's; returns and lengths without that row."""
    envs = scripted_rooms([1, 2, 1, 5, 5, 7], [0, 0, 1, 0, 0, 1])
    envs.reset()
    games = [envs.step(np.zeros(1, int))[4] for _ in range(6)]
    games = {t: {key: x[0] for key, x in info["episode"].items()} for t, info in enumerate(games) if "episode" in info}
    assert games == {2: {"r": 15, "l": 3}, 5: {"r": 10, "l": 2}}
    assert np.flatnonzero(envs.rooms_ever).tolist() == [1, 2, 5, 7]


def test_rooms_in_metrics_and_checkpoint(tmp_path, monkeypatch):
    """Rooms of all games, which a resumed run still knows; empty where the RAM tells none.

    Returns are scores, rewards that train are their signs.
    """
    calls = []
    spy_on(monkeypatch, ppo_atari_rnd, "gae", lambda result, *x: calls.append(x))
    options = dict(num_envs=1, minibatch_size=16, warmup_steps=0)
    made = scripted_rooms([1, 2, 1, 5, 5, 7], [0, 0, 1, 0, 0, 0])
    monkeypatch.setattr(ppo_atari_rnd, "make_envs", lambda *x: made)
    metrics, saved = run(tmp_path, None, **options)
    assert metrics["episode/count"] == 3 and metrics["episode/rooms_ever"] == 4
    assert metrics["episode/return"] == pytest.approx(5 * metrics["episode/length"])
    assert set(calls[0][0].flatten().tolist()) == {1.0}
    made = scripted_rooms([9], [1, 0])
    metrics = train(Args(**(saved["args"] | dict(resume=str(tmp_path / "run"), total_timesteps=32))))
    assert metrics["episode/rooms_ever"] == 5
    made = scripted_rooms([1], [0, 0, 1])
    made.room_byte = None
    metrics, _ = run(tmp_path, None, name="none", **options)
    assert metrics["episode/count"] > 3 and metrics["episode/rooms_ever"] is None


def test_rooms_of_montezuma():
    for env_id, rooms in (("MontezumaRevenge", {1}), ("Pitfall", {1, 2, 3}), ("Breakout", {0})):
        envs = atari(2, env_id=env_id, max_episode_steps=20)
        assert any("episode" in info for *_, info, _ in random_play(envs, 20))
        assert envs.rooms_ever.sum() in rooms
