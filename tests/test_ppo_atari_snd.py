"""The algorithm of ppo_atari_snd.py against independent oracles, most of them in float64."""

import csv

import numpy as np
import ppo_atari_snd
import pytest
import torch
import torch.nn.functional as F
from ppo_atari_snd import SND, Agent, Args, UsageError, contrastive, hide_tiles, infonce, train, vicreg

from conftest import NEXT_STEP, SAME_STEP, FakeVecEnv, random_episodes

SHAPE = (4, 16, 16)
WARMUP = 3
SMALL = dict(num_envs=4, num_steps=16, minibatch_size=32, update_epochs=1, warmup_steps=WARMUP, pairs=4)
SMALL |= dict(snd_features=8, eval_episodes=0, quiet=True, torch_threads=1, device="cpu")


class Games(FakeVecEnv):
    """FakeVecEnv whose reset begins new games, as every real environment's does."""

    def reset(self, *, seed=None, options=None):
        for env in range(self.num_envs):
            if self.t[env] or self.over[env]:
                self.begin(env)
        return super().reset()


def fake(learn=False, ends=("terminated", "truncated"), autoreset=NEXT_STEP, shape=SHAPE):
    return Games(random_episodes(4, ends=ends), autoreset, shape=shape, learn=learn)


def run(tmp_path, envs, iterations=1, name="run", **changes):
    """Train -> the last metrics, the checkpoint."""
    args = Args(**(SMALL | dict(run_dir=str(tmp_path), run_name=name) | changes))
    args.total_timesteps = iterations * args.num_envs * args.num_steps
    metrics = train(args, envs)
    return metrics, torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)


def build(size=16, **changes):
    return SND(size, Args(**(dict(snd_features=8) | changes)))


# ------------------------------------------------------------------------------------------------------------- maths


def test_defaults_match_reference_table():
    """michalnand's run cnd_21, the paper's SND-V."""
    expected = dict(num_envs=128, num_steps=128, minibatch_size=512, update_epochs=4, gamma=0.998, gamma_int=0.99)
    expected |= dict(gae_lambda=0.95, clip=0.1, vf_coef=1, ent_coef=(0.001,), ext_coef=2, int_coef=1, lr=(1e-4,))
    expected |= dict(max_grad_norm=0.5, repeat_action_probability=0.25, max_episode_steps=4500, noop_max=30)
    expected |= dict(frame_size=96, stack=4, int_clip=1, eta=0.5, target="v", pairs=64, minibatches="drawn")
    expected |= dict(snd_preprocess="std", predictor_share=0, predictor_sum=False, snd_net="elu4", snd_features=512)
    expected |= dict(motivation_passes="per-minibatch", env_id="MontezumaRevenge")
    expected |= dict(target_gain=2**0.5, predictor_gain=2**0.5, total_timesteps=128_000_000, fire_reset=False)
    assert {name: getattr(Args(), name) for name in expected} == expected


def weights(module):
    return sum(w.numel() for w in module.parameters())


def assert_orthogonal(weight, gain):
    rows = weight.flatten(1)
    gram = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
    torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), rtol=1e-3, atol=1e-5)


def test_policy_has_the_layers_of_michalnands_c():
    """Numbers of weights layer by layer, at 32 x 32 (4 x 4 maps), and the scale of each layer at first."""
    agent = Agent((4, 32, 32), 18, Args())
    convs = 9 * (4 * 32 + 32 * 64 + 64 * 64 + 64 * 128) + 32 + 64 + 64 + 128
    assert weights(agent) == convs + 4 * 4 * 128 * 512 + 512 + 2 * (512 * 512 + 512) + 513 * (18 + 2)
    gains = {"hidden_policy": 0.01, "hidden_value": 0.1, "policy": 0.01, "value": 0.01}
    for name, weight in agent.named_parameters():
        if name.endswith("weight"):
            assert_orthogonal(weight, gains.get(name.split(".")[0], 2**0.5))
        else:
            assert not weight.any()


@pytest.mark.parametrize(
    "net, size",
    [
        ("elu4", 9 * (16 + 16 * 32 + 32 * 64 + 64 * 64) + 16 + 32 + 64 + 64 + 64 * 16 * 512 + 512),
        ("relu4", 9 * (32 + 32 * 64 + 64 * 64 + 64 * 128) + 32 + 64 + 64 + 128 + 128 * 16 * 512 + 512),
    ],
)
def test_target_and_predictor_have_the_published_layers(net, size):
    """At 32 x 32; the predictor has two more layers, and a scale of its own."""
    snd = SND(32, Args(snd_net=net, target_gain=0.5, target="std"))
    assert (weights(snd.target), weights(snd.predictor)) == (size, size + 2 * (512 * 512 + 512))
    kinds = [type(part).__name__ for part in snd.target]
    assert kinds.count("ReLU" if net == "relu4" else "ELU") == kinds.count("Conv2d") == 4
    for part, gain in [(snd.target, 0.5), (snd.predictor, 2**0.5)]:
        for name, weight in part.named_parameters():
            if name.endswith("weight"):
                assert_orthogonal(weight, gain)
    assert snd.whole.weight.shape == (64, 512) and snd.local.weight.shape == (64, 64)  # of the third convolution


def plain_agent(w, obs):
    x = obs.double() / 255
    for i, stride in ((0, 2), (2, 2), (4, 2), (6, 1)):
        x = F.relu(F.conv2d(x, w[f"trunk.{i}.weight"], w[f"trunk.{i}.bias"], stride, 1))
    x = F.relu(F.linear(x.flatten(1), w["trunk.9.weight"], w["trunk.9.bias"]))
    policy = F.relu(F.linear(x, w["hidden_policy.weight"], w["hidden_policy.bias"]))
    value = F.relu(F.linear(x, w["hidden_value.weight"], w["hidden_value.bias"]))
    return F.linear(policy, w["policy.weight"], w["policy.bias"]), F.linear(value, w["value.weight"], w["value.bias"])


def plain_snd(w, net, x, kind="elu4"):
    """Features and the third convolution's maps, in float64."""
    activation = F.relu if kind == "relu4" else F.elu
    maps = None
    for i, stride in enumerate((2, 2, 2, 1)):
        x = activation(F.conv2d(x, w[f"{net}.{2 * i}.weight"], w[f"{net}.{2 * i}.bias"], stride, 1))
        maps = x if i == 2 else maps
    x = F.linear(x.flatten(1), w[f"{net}.9.weight"], w[f"{net}.9.bias"])
    for j in (11, 13) if net == "predictor" else ():
        x = F.linear(F.elu(x), w[f"{net}.{j}.weight"], w[f"{net}.{j}.bias"])
    return x, maps


def numpy_contrastive(a, b, far):
    loss = 0.0
    for x, y, label in zip(a, b, far, strict=True):
        loss += (label - sum((p - q) ** 2 for p, q in zip(x, y, strict=True)) / len(x)) ** 2 / len(a)
    return loss + max(0.0, (a**2).mean() + (b**2).mean() - 200)


@pytest.mark.parametrize("scale", [1, 14])
def test_contrastive_matches_numpy(scale):
    """Once under and once over the limit of the norms."""
    rng = np.random.default_rng(0)
    a, b = scale * rng.normal(size=(2, 7, 5))
    far = rng.random(7) < 0.5
    ours = contrastive(torch.from_numpy(a), torch.from_numpy(b), torch.from_numpy(far)).item()
    assert ours == pytest.approx(numpy_contrastive(a, b, far)) and ((a**2).mean() + (b**2).mean() > 200) == (scale > 1)


def numpy_vicreg(a, b):
    n, d = a.shape
    loss = ((a - b) ** 2).sum() / (n * d)
    for z in (a, b):
        z = z - z.mean(0)
        for i in range(d):
            loss += max(0.0, 1 - np.sqrt((z[:, i] ** 2).sum() / (n - 1) + 1e-4)) / d
            for j in range(d):
                loss += (i != j) * ((z[:, i] * z[:, j]).sum() / (n - 1)) ** 2 / d / 25
    return loss


@pytest.mark.parametrize("scale", [0.3, 3])
def test_vicreg_matches_numpy(scale):
    a, b = scale * np.random.default_rng(1).normal(size=(2, 9, 4))
    assert vicreg(torch.from_numpy(a), torch.from_numpy(b)).item() == pytest.approx(numpy_vicreg(a, b))


def numpy_infonce(patches, whole, local, features):
    """A softmax over the next frames for every patch of every row; patches: (P, B, K). Norms: of a patch's logits."""
    P, B, _ = patches.shape
    loss = 0.0
    for question in (np.broadcast_to(whole, patches.shape), local):
        for p in range(P):
            squares = 0.0
            for b in range(B):
                logits = np.array([question[p, c] @ patches[p, b] for c in range(B)])
                loss += (np.log(np.exp(logits).sum()) - logits[b]) / (P * B)
                squares += (logits**2).sum()
            loss += 1e-4 * np.sqrt(squares) / P
    return loss - 1e-4 * np.mean([row.std(ddof=1) for row in features])


def test_infonce_matches_numpy():
    rng = np.random.default_rng(2)
    parts = [rng.normal(size=shape) for shape in ((6, 5, 3), (5, 3), (6, 5, 3), (5, 7))]
    ours = infonce(*map(torch.from_numpy, parts)).item()
    assert ours == pytest.approx(numpy_infonce(*parts), rel=1e-9)


def test_tiles_hide_a_tenth_of_half_the_frames_and_noise_moves_half():
    """Shares, range and tile sizes, from many draws."""
    torch.manual_seed(0)
    hidden, noisy, sizes, noise = [], [], set(), []
    for _ in range(60):
        x = torch.full((64, 1, 48, 48), 5.0)
        y = hide_tiles(x)
        dark = y.abs() <= 0.2
        assert ((y - 5).abs() <= 0.2).logical_or(dark).all()
        share = dark.float().mean((1, 2, 3))
        hidden.append(share)
        noise.append((y - 5)[y > 4])
        noisy += [(row.frac() != 0).any().item() for row in y]
        row = dark[share.argmax(), 0]  # runs of hidden pixels are multiples of the tile
        edges = (row[:, 1:] != row[:, :-1]).any(0).nonzero().flatten() + 1
        sizes.add(int(np.gcd.reduce(edges.numpy())) if len(edges) else 48)
    hidden, noise = torch.cat(hidden), torch.cat(noise)
    assert noise.mean().abs() < 0.001 and noise.min() < -0.199 and noise.max() > 0.199
    assert hidden.mean().item() == pytest.approx(0.05, abs=0.006)
    assert (hidden > 0).float().mean() == pytest.approx(0.5, abs=0.06)
    assert np.mean(noisy) == pytest.approx(0.5, abs=0.05) and {1, 2, 4, 8, 12, 16} <= sizes


def test_both_frames_of_a_pair_have_draws_of_their_own(monkeypatch):
    """Else a frame would be told from itself without any distortion to see through."""
    shown = []

    def spy(x):
        shown.append(hide_tiles(x))
        return shown[-1]

    monkeypatch.setattr(ppo_atari_snd, "hide_tiles", spy)
    torch.manual_seed(0)
    frames = torch.randint(0, 256, (16, 1, 16, 16), dtype=torch.uint8)
    loss = build().target_loss(frames, frames, torch.zeros(16))
    assert loss > 0 and len(shown) == 2
    assert (shown[0] != shown[1]).flatten(1).any(1).float().mean() > 0.6  # all but those that neither draw touched


@pytest.mark.parametrize("kind", ["std", "none"])
def test_preprocess(kind):
    frames = torch.randint(0, 256, (600, 1, 16, 16), dtype=torch.uint8)
    snd = build(snd_preprocess=kind)
    snd.frames.update(frames[:500])
    snd.frames.update(frames[500:])
    x = frames.double()
    expected = {"std": ((x - x.mean(0)) / x.std(0, correction=0)).clamp(-1, 1), "none": x / 255}
    torch.testing.assert_close(snd.preprocess(frames).double(), expected[kind], rtol=1e-4, atol=1e-4)


def test_bonus_and_training_error_have_one_precision():
    """With bf16 the features' difference is taken in float32: else it would be rounded to 2 or 3 digits."""
    snd = build()
    frames = torch.randint(0, 256, (32, 1, 16, 16), dtype=torch.uint8)
    snd.frames.update(frames)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours = snd.errors(frames)
        x = snd.preprocess(frames)
        features, predicted = snd.target(x), snd.predictor(x)
    assert features.dtype == torch.bfloat16 and ours.dtype == torch.float32
    torch.testing.assert_close(ours, (features.float() - predicted.float()) ** 2, rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------------------------- one whole update


def plain_loss(kind, w, x, y, far, net):
    """The target's loss of standardised frames, float64, from the formulas."""
    (a, maps), (b, next_maps) = (plain_snd(w, "target", z, net) for z in (x, y))
    if kind == "v":
        distance = (a - b).square().mean(1)
        return (far.double() - distance).square().mean() + (a.square().mean() + b.square().mean() - 200).clamp(min=0)
    if kind == "vic":
        loss, d = (a - b).square().mean(), a.shape[1]
        for z in (a, b):
            z = z - z.mean(0)
            covariance = z.T @ z / (len(z) - 1)
            loss = loss + (1 - (covariance.diagonal() + 1e-4).sqrt()).clamp(min=0).mean()
            loss = loss + (covariance * (1 - torch.eye(d))).square().sum() / d / 25
        return loss
    loss, size = 0, maps.shape[-1]
    for row in range(size):
        for column in range(size):
            patch, following = maps[:, :, row, column], next_maps[:, :, row, column]
            whole = F.linear(b, w["whole.weight"], w["whole.bias"])
            local = F.linear(following, w["local.weight"], w["local.bias"])
            for asked in (whole, local):
                logits = patch @ asked.T
                right = (logits.exp().sum(1).log() - logits.diagonal()).mean()
                loss = loss + (right + 1e-4 * logits.square().sum().sqrt()) / size**2
    return loss - 1e-4 * a.std(1).mean()


def plain_preprocess(frames, shown, kind):
    """shown: all frames that the statistics have seen, which start from 1e-4 rows of mean 0 and variance 1."""
    x, seen = frames.double(), np.concatenate(shown)
    if kind == "none":
        return x / 255
    n = len(seen) + 1e-4
    mean = seen.sum(0) / n
    deviation = np.sqrt((np.square(seen).sum(0) + 1e-4) / n - mean**2)
    return ((x - torch.from_numpy(mean)) / torch.from_numpy(deviation)).clamp(-1, 1)


def plain_gae(reward, value, ended, cut, gamma, lam):
    """By the definition, (T, N): the sum over the rest of the game, and of the rollout."""
    advantages = np.zeros_like(reward, dtype=np.float64)
    for t, n in np.ndindex(*reward.shape):
        factor = 1.0
        for k in range(t, len(reward)):
            following = 0.0 if ended[k, n] else value[k + 1, n]
            advantages[t, n] += factor * (reward[k, n] + gamma * following - value[k, n])
            factor *= gamma * lam
            if ended[k, n] or cut[k, n]:
                break
    return advantages


RELU = dict(snd_net="relu4", target_gain=1.2)
CASES = {
    "v": dict(),
    "v, pieces, one pass": dict(micro_batch=7, motivation_passes="one", predictor_share=0.5, pairs=9),
    "std": dict(target="std", predictor_gain=1.2, predictor_sum=True, predictor_share=1, eta=420, **RELU),
    "vic": dict(target="vic", minibatches="permuted", snd_preprocess="none", eta=15, ext_coef=0, **RELU),
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_update_equals_float64_reference(tmp_path, monkeypatch, changes):
    """Two iterations with terminations, truncations, lost lives and dummy rows, recomputed in float64 from the frames.

    Compared: weights of policy, predictor and target, frame statistics, metrics. Augmentation is a mirror here.
    """
    drawn = {"rand": [], "randint": [], "randperm": []}

    def keep(name):
        draw = getattr(torch, name)

        def spy(*size, **options):
            drawn[name].append(draw(*size, **options))
            return drawn[name][-1]

        monkeypatch.setattr(torch, name, spy)

    for name in drawn:
        keep(name)
    monkeypatch.setattr(ppo_atari_snd, "hide_tiles", lambda x: x.flip(3))
    init = Agent.__init__

    def with_large_values(self, *rest):  # so that it matters which frame a value is of
        init(self, *rest)
        for part in (self.hidden_policy, self.policy, self.value):
            part.weight.data *= 30

    monkeypatch.setattr(Agent, "__init__", with_large_values)
    envs = fake(learn=True, ends=("terminated", "truncated", "life"))  # whose frames differ much
    options = dict(update_epochs=2, lr=(1e-3,), adam_eps=0.01, clip=1e-3, vf_coef=0.7, gamma=0.95, gamma_int=0.9)
    options |= dict(max_grad_norm=0.05, eta=1.2, ent_coef=(0.1,)) | changes
    metrics, saved = run(tmp_path, envs, iterations=2, **options)
    args = Args(**(SMALL | options))
    T, N, size, kind, net = 16, 4, args.minibatch_size, args.target, args.snd_net
    monkeypatch.undo()
    monkeypatch.setattr(Agent, "__init__", with_large_values)
    torch.manual_seed(1)
    agent, snd = Agent(SHAPE, 4, args), SND(16, args)
    w = {name: x.double().requires_grad_() for name, x in agent.state_dict().items()}
    r = {name: x.double().requires_grad_() for name, x in snd.state_dict().items() if name != "frames.sums"}
    optimizer = torch.optim.Adam([*w.values(), *r.values()], lr=1e-3, eps=0.01)
    rands = iter(drawn["rand"])
    orders = iter([x for x in drawn["randint"] if x.shape == (2 * T * N,)])
    if args.minibatches == "permuted":
        orders = (x.repeat(2) for x in drawn["randperm"])
    ints = iter([x for x in drawn["randint"] if x.shape == (2, args.pairs)])
    shown = [frame[:, -1:].astype(float) for frame in envs.seen[1 : WARMUP + 1]]  # all that the statistics saw
    for rollout in range(2):
        first = WARMUP + 1 + rollout * T  # of the frames; a reset's has no step
        obs = torch.from_numpy(np.stack(envs.seen[first : first + T + 1]))
        actions = torch.from_numpy(np.stack(envs.actions[first - 1 : first - 1 + T])).long().flatten()
        reward, ended, cut, before = (np.stack(x) for x in zip(*envs.log[first - 1 : first - 1 + T], strict=True))
        newest = obs[:, :, -1:]
        with torch.no_grad():
            logits, values = (x.view(T + 1, N, -1) for x in plain_agent(w, obs.flatten(0, 1)))
            x = plain_preprocess(newest[:T].flatten(0, 1), shown, args.snd_preprocess)
            raw = (plain_snd(r, "predictor", x, net)[0] - plain_snd(r, "target", x, net)[0]).square().mean(1)
            raw = raw.view(T, N).numpy()
            bonus = np.minimum(args.eta * raw, 1)
        shown += [frame.numpy().astype(float) for frame in newest[:T]]
        everything = plain_preprocess(newest.flatten(0, 1), shown, args.snd_preprocess)
        x = everything[:-N]
        ext = plain_gae(reward, values[..., 0].numpy(), ended, cut, args.gamma, args.gae_lambda)
        internal = plain_gae(bonus, values[..., 1].numpy(), ended, cut, args.gamma_int, args.gae_lambda)
        advantage = torch.from_numpy(args.ext_coef * ext + internal).flatten()
        target = (torch.from_numpy(np.stack([ext, internal], -1)) + values[:T]).flatten(0, 1)
        old_logp = logits[:T].log_softmax(-1).flatten(0, 1).gather(-1, actions[:, None])[:, 0]
        valid = torch.from_numpy(~before).flatten()
        order, losses, novelty = next(orders), [], []
        for rows in order.split(size):
            keep = rows[valid[rows]]
            logits, value = plain_agent(w, obs[:T].flatten(0, 1)[keep])
            logp = logits.log_softmax(-1).gather(1, actions[keep][:, None])[:, 0]
            ratio, adv = (logp - old_logp[keep]).exp(), advantage[keep]
            clipped = torch.where(adv > 0, ratio.clamp(max=1 + args.clip), ratio.clamp(min=1 - args.clip))
            probabilities = logits.softmax(-1)
            entropy = -(probabilities * probabilities.log()).sum(1).mean()
            policy = -(clipped * adv).mean()
            errors = (value - target[keep]).square()
            value = (errors if args.ext_coef else errors[:, 1:]).sum(1).mean() / 2
            optimizer.zero_grad()
            (policy + 0.7 * value - 0.1 * entropy).backward()
            norm = sum(weight.grad.square().sum() for weight in w.values()) ** 0.5
            for weight in w.values():
                weight.grad *= min(1.0, 0.05 / norm.item())
            optimizer.step()
            outside = ((ratio - 1).abs() > args.clip).double().mean()
            kl = (ratio - 1 - ratio.log()).mean()
            losses.append([x.item() for x in (policy, value, entropy, kl, outside, norm)])
        for rows in (order if args.motivation_passes != "one" else torch.arange(T * N)).split(size):
            mask = (next(rands) < (args.predictor_share or 1)).double()
            error = plain_snd(r, "predictor", x[rows], net)[0] - plain_snd(r, "target", x[rows], net)[0].detach()
            predictor = (error**2 * mask).sum() / (1 if args.predictor_sum else mask.sum())
            one = rows[valid[rows]]  # the next frame of a dummy row is another game's
            other = one + N
            if kind == "v":
                one, other = next(ints)
                other = torch.where(next(rands) < 0.5, one, other)
            pair = [everything[part].flip(3) if kind == "v" else everything[part] for part in (one, other)]
            goal = plain_loss(kind, r, *pair, one != other, net)
            optimizer.zero_grad()
            (predictor + goal).backward()
            optimizer.step()
            novelty.append([predictor.item(), goal.item()])
    assert next(rands, None) is None and next(ints, None) is None and next(orders, None) is None
    assert 0.02 < (bonus == 1).mean() < 0.98  # the limit was felt
    names = ("loss/policy", "loss/value", "loss/entropy", "train/approx_kl", "train/clip_frac", "train/grad_norm")
    for name, mean in zip(names, np.mean(losses, axis=0), strict=True):
        assert metrics[name] == pytest.approx(mean, rel=2e-3, abs=1e-7 if "kl" in name else 1e-4), (name, mean)
    predictor, goal = np.mean(novelty, axis=0)
    assert metrics["loss/predictor"] == pytest.approx(predictor, rel=2e-3)
    assert metrics["loss/target"] == pytest.approx(goal, rel=2e-3, abs=1e-4)
    assert metrics["int/reward_raw"] == pytest.approx(raw.mean(), rel=1e-3)
    assert metrics["int/reward_norm"] == pytest.approx(bonus.mean(), rel=1e-3)
    assert metrics["train/valid_frac"] == pytest.approx(valid.double().mean().item())
    assert metrics["train/lr"] == pytest.approx(1e-3) and 0 < metrics["train/clip_frac"] < 1
    unexplained = np.array([part.flatten()[valid.numpy()].var(ddof=1) for part in (ext, internal)])
    explained = 1 - unexplained / target[valid].var(0).numpy()
    assert metrics["train/explained_variance"] == pytest.approx(explained[0], rel=1e-2, abs=1e-3)
    assert metrics["int/explained_variance"] == pytest.approx(explained[1], rel=1e-2, abs=1e-3)
    np.testing.assert_allclose(saved["snd"]["frames.sums"][1], np.concatenate(shown).sum(0), rtol=1e-9)
    for start, plain, ours in ((agent, w, saved["agent"]), (snd, r, saved["snd"])):
        for name, weight in start.state_dict().items():
            if name in plain:  # the error is small beside what was learned
                learned = (plain[name] - weight).norm().item()
                assert (plain[name] - ours[name]).norm().item() <= 0.01 * learned + 1e-6, name


@pytest.mark.parametrize("target", ["v", "std", "vic"])
def test_predictor_and_target_do_not_teach_each_other(tmp_path, monkeypatch, target):
    """Without rows for the predictor only the target moves; without a loss of its own only the predictor does."""
    start = {}
    init = SND.__init__

    def keep(self, *rest):
        init(self, *rest)
        start.update({name: weight.detach().clone() for name, weight in self.named_parameters()})

    monkeypatch.setattr(SND, "__init__", keep)

    def moved(saved):
        return {name.split(".")[0] for name, weight in start.items() if not torch.equal(weight, saved["snd"][name])}

    flags = dict(target=target, snd_net="relu4" if target != "v" else "elu4")
    learned = {"target", "whole", "local"} if target == "std" else {"target"}
    assert moved(run(tmp_path, fake(learn=True), name="target", predictor_share=1e-12, **flags)[1]) == learned
    loss = SND.target_loss
    monkeypatch.setattr(SND, "target_loss", lambda self, *x: 0 * loss(self, *x))
    assert moved(run(tmp_path, fake(learn=True), name="predictor", **flags)[1]) == {"predictor"}


@pytest.mark.parametrize("target", ["std", "vic"])
def test_pairs_of_std_and_vic_are_of_one_game(tmp_path, monkeypatch, target):
    """Consecutive frames: the next step of the same game, never the next game's first frame; all rows but those."""
    pairs, loss = [], SND.target_loss

    def spy(self, x, y, far):
        pairs.append((x, y))
        return loss(self, x, y, far)

    monkeypatch.setattr(SND, "target_loss", spy)
    envs = fake()
    run(tmp_path, envs, target=target, snd_net="relu4", motivation_passes="one", update_epochs=3)
    x, y = (torch.cat(frames)[:, 0, 0, :3].int() for frames in zip(*pairs, strict=True))
    assert torch.equal(x[:, :2], y[:, :2]) and (y[:, 2] == x[:, 2] + 1).all()
    dummies = sum(int(before.sum()) for *_, before in envs.log[WARMUP:])
    assert len(x) == 64 - dummies and dummies > 3


def test_pairs_of_v(tmp_path, monkeypatch):
    """Half are one frame twice, half two frames of the whole rollout, as many as asked, whatever the minibatch."""
    pairs, loss = [], SND.target_loss

    def spy(self, x, y, far):
        pairs.append((x, y, far))
        return loss(self, x, y, far)

    monkeypatch.setattr(SND, "target_loss", spy)
    run(tmp_path, fake(), update_epochs=20, minibatch_size=16, pairs=20)
    assert len(pairs) == 80 and all(len(x) == 20 for x, _, _ in pairs)
    x, y, far = (torch.cat(part) for part in zip(*pairs, strict=True))
    assert far.float().mean() == pytest.approx(0.5 * 63 / 64, abs=4 * 0.5 / 1600**0.5)
    assert (x == y)[~far].all() and not (x == y)[far].flatten(1).all(1).all()
    for frames in (x, y[far]):
        assert set(frames[:, 0, 0, 0].tolist()) == {0, 1, 2, 3}
    assert (x[far][:, 0, 0, 0] != y[far][:, 0, 0, 0]).float().mean() == pytest.approx(0.76, abs=0.08)


def test_games_begin_anew_after_the_warm_up(tmp_path, monkeypatch):
    """As in the reference: its steps are in no rollout, return or length, and a first frame is shown first."""
    shown, forward = [], Agent.forward

    def spy(self, x):
        shown.append(x.clone())
        return forward(self, x)

    monkeypatch.setattr(Agent, "forward", spy)
    envs = Games([[([1.0] * 10, "terminated")]] * 4, NEXT_STEP, shape=SHAPE)
    metrics, saved = run(tmp_path, envs)
    assert shown[0][:, 0, 0, :3].tolist() == [[env, 1, 0] for env in range(4)]
    assert (metrics["episode/count"], metrics["episode/return"], metrics["episode/length"]) == (4, 10, 10)
    assert saved["snd"]["frames.sums"][0, 0, 0, 0] == pytest.approx(4 * (WARMUP + 16) + 1e-4)


def test_a_resumed_run_keeps_its_statistics(tmp_path, monkeypatch):
    """No second warm-up; weights, Adam's moments, the sums of frames and the rooms ever seen go on."""
    _, before = run(tmp_path, fake(), target="vic", snd_net="relu4")
    args = Args(**(before["args"] | dict(resume=str(tmp_path / "run"), total_timesteps=128)))
    loaded, errors = [], SND.errors

    def spy(self, frames):
        loaded.append({name: x.clone() for name, x in self.state_dict().items()})
        return errors(self, frames)

    monkeypatch.setattr(SND, "errors", spy)
    envs = fake()
    metrics = train(args, envs)
    assert len(envs.log) == 16
    after = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    for name, weight in before["snd"].items():
        assert torch.equal(weight, loaded[0][name]), name
    assert metrics["step"] == after["step"] == 128
    assert after["snd"]["frames.sums"][0, 0, 0, 0] == pytest.approx(4 * (WARMUP + 32) + 1e-4)
    steps = {int(state["step"]) for state in after["optimizer"]["state"].values()}
    assert steps == {4}  # two minibatches an iteration, for every weight


def test_what_is_refused(tmp_path):
    """One message that names the flag, or the frames, before anything is written."""
    changes = [dict(minibatch_size=24), dict(minibatch_size=1), dict(num_envs=0), dict(warmup_steps=-1)]
    changes += [dict(pairs=0), dict(eval_every=9)]
    for change in changes:
        with pytest.raises(UsageError, match="--" + next(iter(change)).replace("_", "-")):
            run(tmp_path, fake(), **change)
    with pytest.raises(UsageError, match="from 4 pixels on"):
        run(tmp_path, fake(shape=(4, 3, 3)))
    with pytest.raises(UsageError, match="next-step"):
        run(tmp_path, fake(autoreset=SAME_STEP))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("net", ["elu4", "relu4"])
def test_smallest_frames(net):
    """What is not refused runs: 4 x 4 pixels, with each network and target."""
    Agent((4, 4, 4), 3, Args())(torch.zeros(2, 4, 4, 4, dtype=torch.uint8))
    frames = torch.randint(0, 256, (8, 1, 4, 4), dtype=torch.uint8)
    for target in ("v", "std", "vic"):
        snd = build(4, target=target, snd_net=net)
        assert snd.errors(frames).shape == (8, 8)
        assert snd.target_loss(frames, frames.roll(1, 0), torch.ones(8)).isfinite()


# --------------------------------------------------------------------------------------------------------------- learns


@pytest.mark.slow
def test_it_learns_the_games_rewards_and_its_bonus_falls(tmp_path):
    """Reward 1 for the action that the frame shows, one in four by chance, bonus and all: no term is upside down."""
    envs = Games([[([0.0] * 20, "terminated")]] * 8, NEXT_STEP, shape=SHAPE, learn=True)
    flags = dict(num_envs=8, num_steps=32, minibatch_size=64, update_epochs=4, lr=(3e-4,), gamma=0.5, eta=0.01)
    metrics, _ = run(tmp_path, envs, 50, **flags)
    rewards = np.stack([reward for reward, *_ in envs.log])
    assert rewards[:200].mean() < 0.4 and rewards[-200:].mean() > 0.6
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        first = next(csv.DictReader(file))
    assert metrics["int/reward_raw"] < 0.1 * float(first["int/reward_raw"])
    assert metrics["loss/target"] < 0.5 * float(first["loss/target"])
