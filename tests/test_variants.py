"""The variants of the scripts, benchmark/variants/: each as a user runs it, and what is its own."""

import copy
import importlib
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from conftest import NEXT_STEP, ROOT, SAME_STEP, FakeVecEnv, random_episodes

FOLDER = ROOT / "benchmark" / "variants"
TINY = """--num-envs 4 --num-steps 16 --minibatch-size 32 --total-timesteps 128 --eval-episodes 2 --device cpu
--torch-threads 1 --env-threads 1 --run-name x --quiet"""
OWN = {
    "procgen_augment": "--env-id leaper --channels 4 4 4 --augment flip translate crop rotate pad_crop",
    "impala_augment": "--env-id leaper --channels 4 4 4 --num-groups 2 --sync --minibatch-size 64 --augment-draw anew",
    "procgen_rnd": "--env-id leaper --channels 4 4 4",
    "snd_procgen": "--env-id jumper --snd-features 8 --warmup-steps 3 --update-epochs 1",
    "rnd_michalnand": "--config ppo_rnd_b2 --warmup-steps 3 --update-epochs 1 --max-episode-steps 30",
}
RESUMED = ["procgen_rnd"]


def run(folder, *words):
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", OWN)
def test_runs(name, tmp_path):
    """As typed, shrunk: two iterations and an evaluation; one variant of each kind goes on, and is played again."""
    run(tmp_path, FOLDER / f"{name}.py", *OWN[name].split(), *TINY.split())
    folder = tmp_path / "runs" / "x"
    own = json.loads((folder / "eval.json").read_text())
    assert json.loads((folder / "config.json").read_text())["script"] == name
    if name in RESUMED:
        out = tmp_path / "out.json"
        run(tmp_path, ROOT / "benchmark" / "evaluate.py", folder, "--episodes", 2, "--out", out)
        assert json.loads(out.read_text()) == own and own["step"] == 128
        run(tmp_path, FOLDER / f"{name}.py", "--resume", folder, "--total-timesteps", 192)
        assert json.loads((folder / "eval.json").read_text())["step"] == 192


@pytest.fixture
def variant(monkeypatch):
    """variant(name): its module, imported anew; after the test its script is as it was."""
    monkeypatch.syspath_prepend(FOLDER)
    scripts = [importlib.import_module(path.stem) for path in ROOT.glob("*.py")]
    before = [dict(vars(script)) for script in scripts]
    yield importlib.import_module
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)
    for script, names in zip(scripts, before, strict=True):
        vars(script).update(names)


def moved(augment, frames, name, *draws):
    """All rows moved with these draws of [0, 1)."""
    draws = torch.tensor([[0.0, *draws]]).repeat(len(frames), 1)
    return augment(torch.from_numpy(frames), (name,), 0.5, draws).numpy()


def test_augmentations_by_hand(variant):
    """Each against NumPy, or where it must send a dot and a ramp; a row that draws no move stays."""
    augment = variant("procgen_augment").augment
    frames = np.random.default_rng(0).integers(0, 256, (2, 6, 64, 64), np.uint8)
    assert (moved(augment, frames, "flip", 0.4, 0.6, 0) == frames[..., ::-1]).all()
    assert (moved(augment, frames, "flip", 0.6, 0.4, 0) == frames[..., ::-1, :]).all()
    shift = moved(augment, frames, "translate", 11.5 / 17, 0.5 / 17, 0)  # 3 to the left, 8 down
    assert (shift == np.roll(frames, (8, -3), (2, 3))).all()
    padded = np.pad(frames, [(0, 0), (0, 0), (10, 10), (10, 10)], "reflect")
    assert (moved(augment, frames, "pad_crop", 0.5 / 21, 14.5 / 21, 0) == padded[..., 14:78, 0:64]).all()
    ramp = np.zeros((1, 3, 64, 64), np.uint8) + 4 * np.arange(64, dtype=np.uint8)
    crop = moved(augment, ramp, "crop", 0, 0, 0)[0, 0]  # three quarters of the side, from the left
    np.testing.assert_allclose(crop, np.tile(3 * np.arange(64), (64, 1)), atol=0.51)
    dot = np.zeros((1, 3, 64, 64), np.uint8)
    dot[..., 31:33, 51:53] = 255  # 20 to the right of the centre
    turned = moved(augment, dot, "rotate", 1, 0, 0)[0, 0].astype(float)
    y, x = (np.indices((64, 64)) * turned).sum((1, 2)) / turned.sum() - 31.5
    np.testing.assert_allclose([x, y], 20 * np.array([np.cos(np.pi / 9), -np.sin(np.pi / 9)]), atol=0.2)
    draws = torch.tensor([[0.4, 0, 0, 0], [0.5, 0, 0, 0]])
    some = augment(torch.from_numpy(frames), ("flip",), 0.5, draws).numpy()
    assert (some[0] == frames[0, :, ::-1, ::-1]).all() and (some[1] == frames[1]).all()


@pytest.mark.parametrize("name", ["procgen_augment", "impala_augment"])
def test_augmentation_is_in_updates_only(variant, monkeypatch, name):
    """Acting sees frames as they are; a row's two frames move alike; `once` moves a row as before, `anew` does not."""
    module = variant(name)
    monkeypatch.setattr(module.Agent.__mro__[2], "forward", lambda self, obs: obs)  # the script's own network
    obs = torch.randint(256, (32, 3, 64, 64), dtype=torch.uint8).repeat(1, 2, 1, 1)
    for draw in ("once", "anew"):
        args = module.Args(channels=(4, 4, 4), augment=("translate", "rotate"), augment_chance=0.9, augment_draw=draw)
        agent = module.Agent((6, 64, 64), 15, args)
        with torch.no_grad():
            assert agent(obs) is obs
        first, second = agent(obs), agent(obs.flip(0)).flip(0)
        assert torch.equal(first[:, :3], first[:, 3:])
        assert (first != obs).flatten(1).any(1).sum() > 24
        assert torch.equal(first, second) == (draw == "once")


def test_rnd_pays_the_bonus_of_the_observation_acted_on(variant, monkeypatch):
    """Over the deviation of its sums along time, through ends; then the predictor learns; all of it is resumed."""
    module = variant("procgen_rnd")
    games = FakeVecEnv(random_episodes(2, ends=("terminated",)), SAME_STEP, shape=(6, 16, 16), learn=True)
    monkeypatch.setattr(module, "plain_envs", lambda *args: games)
    args = dict(num_envs=2, num_steps=20, channels=(8, 8, 8), minibatch_size=8, gamma=0.9, device="cpu")
    args = module.Args(**args, rnd_coef=0.5, rnd_clip=1)
    assert module.make_envs(args, 2, "test") is games
    envs = module.make_envs(args, 2, "training")
    target, predictor = copy.deepcopy([envs.target, envs.predictor])
    obs, _ = envs.reset()
    errors, sums, history, paid = [], np.zeros(2), [], set()
    for _ in range(20):
        x = torch.from_numpy(obs)
        features = target.hidden(target.features((x.float() - 128) / 255))
        errors.append((predictor(x)[0] - features).square().mean(1).detach().numpy())
        obs, reward, *_ = envs.step(np.zeros(2, int))
        sums = 0.9 * sums + errors[-1]
        history += sums.tolist()
        count = len(history) + 1e-4  # its prior: 1e-4 rows of variance 1
        variance = (np.square(history).sum() + 1e-4) / count - (np.sum(history) / count) ** 2
        bonus = 0.5 * np.minimum(errors[-1] / np.sqrt(variance + 1e-8), 1)
        np.testing.assert_allclose(reward - games.log[-1][0], bonus, rtol=1e-4, atol=1e-6)
        paid.update(bonus.tolist())
    assert max(paid) == 0.5 and len(paid) > 20 and games.episode.min() > 1
    assert not torch.equal(predictor.policy.weight, envs.predictor.policy.weight)
    assert torch.equal(target.hidden.weight, envs.target.hidden.weight)
    with torch.no_grad():
        assert np.mean([envs.errors(frames).mean() for frames in games.seen[:20]]) < np.mean(errors)
    written = []
    monkeypatch.setattr(module.Logger.__mro__[1], "save", lambda self, name, state: written.append(state))
    object.__new__(module.Logger).save("checkpoint.pt", {})
    monkeypatch.setattr(module.script, "load_checkpoint", lambda run: written[0])
    args.seed, args.resume = 2, "run"
    again = module.make_envs(args, 2, "training from 40")
    assert torch.equal(again.errors(obs), envs.errors(obs)) and again is not envs
    assert torch.equal(again.normalizer.sums, envs.normalizer.sums) and again.optimizer.state_dict()["state"]


def test_exploration_envs_reset_in_the_next_step(variant):
    """The row of an end shows the frame before it, the row after it plays a no-op, has no reward and begins a game."""
    module = variant("snd_procgen")
    ends = [
        [([3.0, -2.0, 5.0], "terminated"), ([7.0], "terminated"), ([0.0, 2.0], "terminated")],
        [([1.0] * 9, "terminated")],
    ]
    games = FakeVecEnv(ends, SAME_STEP, num_actions=15, shape=(6, 64, 64))
    envs = module.ExplorationEnvs(games, 0, seed=1)
    assert envs.metadata["autoreset_mode"] == NEXT_STEP and envs.single_observation_space.shape == (2, 128, 128)
    obs, _ = envs.reset()
    rows = []
    for _ in range(6):
        obs, reward, terminated, truncated, _ = envs.step(np.full(2, 9))
        _, game, step = module.unpack(torch.from_numpy(obs))[0, 0, 0, :3].tolist()
        rows.append((game, step, reward[0], terminated[0], truncated[0]))
    ended, going_on = (True, False), (False, False)
    expected = [(0, 1, 1, *going_on), (0, 2, -1, *going_on), (0, 2, 1, *ended), (2, 0, 0, *going_on)]
    assert rows == [*expected, (2, 1, 0, *going_on), (2, 1, 1, *ended)]  # game 1 was over in its no-op
    assert [actions.tolist() for actions in games.actions] == [[9, 9]] * 3 + [[4, 9], [9, 9], [9, 9]]
    envs.random_action = 1
    for _ in range(60):
        envs.step(np.full(2, 9))
    assert len(np.unique(games.actions)) == 15


def test_snd_sees_the_colours_of_the_newest_frame(variant):
    """Packing loses nothing; policy: two frames, SND: the last one, each with the layers of the paper's code."""
    module = variant("snd_procgen")
    frames = np.random.default_rng(0).integers(0, 256, (3, 6, 64, 64), np.uint8)
    envs = module.ExplorationEnvs(FakeVecEnv(random_episodes(3), SAME_STEP, shape=(6, 64, 64)), 0, seed=1)
    packed = torch.from_numpy(envs.pack(frames))
    assert (module.unpack(packed).numpy() == frames).all()
    args = module.Args(snd_features=8, snd_preprocess="none")
    agent, snd = module.Agent((2, 128, 128), 15, args), module.SND(128, args)
    values = module.script.Agent.__mro__[1].forward(agent, torch.from_numpy(frames))[1]
    assert torch.equal(agent(packed)[1], values) and agent.trunk[9].in_features == 64 * 8 * 8
    x = torch.from_numpy(frames[:, 3:]).float() / 255
    error = (snd.predictor(x) - snd.target(x)).square()
    np.testing.assert_allclose(snd.errors(packed[:, -1:]).detach(), error.detach(), rtol=1e-5)


WEIGHTS = {  # of the trunks, by hand; width of the critic and gain of its weights
    "ppo_rnd_a0": (32 * 4 * 64 + 64 * 32 * 9 + 64 * 64 * 9 + 2304 * 448 + 448**2, 448, 0.1),
    "ppo_rnd_b1": (64 * 4 * 64 + 64 * 64 * 9 + 128 * 64 * 9 + 4608 * 800, 800, 2**0.5),
    "rnd_1": (32 * 4 * 9 + 64 * 32 * 9 + 64 * 64 * 9 + 128 * 64 * 9 + 4608 * 512, 512, 0.1),
    "ppo_rnd_d0": (128 * 4 * 64 + 2 * 4 * 128**2 + 4608 * 512, 512, 0.1),
}


@pytest.mark.parametrize("config", WEIGHTS)
def test_policies_of_michalnand(variant, config):
    """Weights of the trunk, gain of the critic, the residual critic of A, the attention of D, by hand."""
    weights, width, gain = WEIGHTS[config]
    module = variant("rnd_michalnand")
    agent = module.Agent((4, 48, 48), 18, module.Args(config=config))
    assert sum(weight.numel() for weight in agent.trunk.parameters() if weight.dim() > 1) == weights
    critic = agent.hidden_value.weight
    np.testing.assert_allclose((critic @ critic.T).detach(), gain**2 * np.eye(width), atol=1e-4)
    obs = torch.randint(256, (2, 4, 48, 48), dtype=torch.uint8)
    with torch.no_grad():
        x = agent.trunk(obs / 255)
        hidden = (x @ critic.T).relu() + (x if config == "ppo_rnd_a0" else 0)
        np.testing.assert_allclose(agent(obs)[1], hidden @ agent.value.weight.T, atol=1e-5)
        if config == "ppo_rnd_d0":
            attention, x = agent.trunk[2], torch.randn(1, 128, 3, 3)
            query, key, value = [linear.weight @ x.flatten(2)[0] for linear in attention.qkv]  # (128, 9)
            mixed = [(query[:, i] @ key).softmax(0) @ value.T for i in range(9)]  # of each position, from all
            mixed = torch.stack(mixed, 1)
            mixed += (attention.mix.weight[:, :, 0, 0] @ mixed).relu()
            np.testing.assert_allclose(attention(x)[0], mixed.view(128, 3, 3), atol=1e-4)


def test_bonus_of_michalnand(variant):
    """Half the sum of squared errors of frames less their mean, with b2 over its deviation; rnd_1's weights coupled."""
    module = variant("rnd_michalnand")
    frames = torch.randint(256, (8, 1, 32, 32), dtype=torch.uint8)
    bonuses = {}
    for config in ("ppo_rnd_b0", "ppo_rnd_b2", "rnd_1"):
        torch.manual_seed(1)
        args = module.Args(config=config)
        rnd = module.RND(32, args)
        rnd.frames.update(frames)
        with torch.no_grad():
            x = (frames - frames.double().mean(0)).float() / 255
            error = (rnd.predictor(x) - rnd.target(x)).square()
            bonuses[config] = args.eta * rnd.errors(frames).mean(1)
        if config == "ppo_rnd_b0":
            np.testing.assert_allclose(bonuses[config], error.sum(1) / 2, rtol=1e-3)
        np.testing.assert_allclose(
            rnd.errors(frames).detach(), error, rtol=1e-2, atol=1e-6
        )  # its loss has no deviation
    raw = bonuses["ppo_rnd_b0"]
    np.testing.assert_allclose(bonuses["ppo_rnd_b2"], raw / raw.std(correction=0), rtol=0.05)
    last = torch.cat([rnd.target[9].weight, rnd.predictor[9].weight]).detach()  # of rnd_1
    np.testing.assert_allclose(last @ last.T, 2 * np.eye(1024), atol=1e-3)
