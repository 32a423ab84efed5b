"""The variants of the scripts, benchmark/variants/: each as a user runs it, and what is its own."""

import copy
import dataclasses
import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import conftest
from conftest import FOLDER, ROOT, SAME_STEP, STEMS, FakeVecEnv, giving, random_episodes, rows
from test_appo_atari import compare_with_plain
from test_impala_procgen import plain_vtrace

ITERATION = "--num-envs 4 --num-steps 8 --minibatch-size 16 --threads 1"
LEAPER = "--env-id leaper --channels 4 4 4"
BREAKOUT = "--env-id Breakout --max-episode-steps 30"
BONUS = "--warmup-steps 3 --update-epochs 1"
RND = f"{BREAKOUT} {BONUS} --rnd-features 8"
SND = f"{BREAKOUT} {BONUS} --snd-features 8 --pairs 4"
OWN = {
    "appo_vtrace": f"{BREAKOUT} --num-groups 2 --num-minibatches 2 --sync",
    "procgen_augment": f"{LEAPER} --augment flip translate crop rotate pad_crop",
    "impala_augment": f"{LEAPER} --num-groups 2 --sync --minibatch-size 32 --augment-draw anew",
    "procgen_rnd": LEAPER,
    "procgen_shaped": LEAPER,
    "procgen_tf_adam": f"{LEAPER} --adam-eps 1e-5",
    "rnd_recurrent": f"{RND} --target-return 999",
    "rnd_dnc": f"{RND} --dnc 4 3 2",
    "rnd_michalnand": f"--config ppo_rnd_b2 --max-episode-steps 30 {BONUS} --snd-features 8 --pairs 4",
    "snd_procgen": "--env-id jumper --target vic --snd-features 8 --update-epochs 1",
    "snd_paper": f"{SND} --target std",
    "snd_breakout": SND,
    "snd_entropy": f"{SND} --episodic-steps 5",
}


@pytest.mark.parametrize("name", OWN)
def test_runs_and_continues(variant, name, tmp_path, monkeypatch):
    """As typed, but small: two iterations and an evaluation, then a third iteration."""
    monkeypatch.setattr(torch.optim, "Adam", torch.optim.Adam)  # procgen_tf_adam replaces it
    monkeypatch.setattr(torch.nn.init, "orthogonal_", lambda weight, gain=1: weight)  # would take most of the time
    module = variant(name)
    for part in {"Args", "Agent", "SND", "Run"} & vars(module).keys():
        assert getattr(module.script, part) is getattr(module, part)  # of the script, too
    monkeypatch.chdir(tmp_path)

    def run(file, *words):
        for stem in STEMS:
            sys.modules.pop(stem, None)
        monkeypatch.setattr(sys, "argv", [str(file), *map(str, words)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(file), run_name="__main__")
        assert end.value.code == 0

    folder, file = tmp_path / "runs" / "x", FOLDER / f"{name}.py"
    run(file, *f"{ITERATION} {OWN[name]} --total-timesteps 64 --eval-episodes 2 --run-name x".split())
    played = json.loads((folder / "eval.json").read_text())
    assert Path(json.loads((folder / "config-0.json").read_text())["command"][0]) == file and played["step"] == 64
    if name in ("procgen_rnd", "rnd_recurrent", "rnd_dnc"):  # whose environments have a state, too
        run(ROOT / "benchmark" / "evaluate.py", folder, "--episodes", 2, "--out", tmp_path / "out.json")
        assert json.loads((tmp_path / "out.json").read_text()) == played
    run(file, "--resume", folder, "--total-timesteps", 96, "--eval-episodes", 0)
    assert rows(folder)[-1]["step"] == "96"


# ------------------------------------------------------------------------------------------- of the scripts for Procgen


def test_augmentations_by_hand(variant):
    """Shifts, the padded crop and the mirror against NumPy; a row that draws no move stays."""
    augment = variant("procgen_augment").augment

    def moved(frames, name, *draws):
        draws = torch.tensor([[0.0, *draws, 0]]).repeat(len(frames), 1)
        return augment(torch.from_numpy(frames), (name,), 0.5, draws).numpy()

    frames = np.random.default_rng(0).integers(0, 256, (2, 6, 64, 64), np.uint8)
    shift = moved(frames, "translate", 11.5 / 17, 0.5 / 17)  # 3 to the left, 8 down
    assert (shift == np.roll(frames, (8, -3), (2, 3))).all()
    padded = np.pad(frames, [(0, 0), (0, 0), (10, 10), (10, 10)], "reflect")
    assert (moved(frames, "pad_crop", 0.5 / 21, 14.5 / 21) == padded[..., 14:78, 0:64]).all()
    draws = torch.tensor([[0.4, 0, 0.6, 0], [0.5, 0, 0, 0]])
    some = augment(torch.from_numpy(frames), ("flip",), 0.5, draws).numpy()
    assert (some[0] == frames[0, ..., ::-1]).all() and (some[1] == frames[1]).all()


def test_shaped_rewards(variant, monkeypatch):
    """Rewards by hand; reports and so evaluations keep the game's."""
    module = variant("procgen_shaped")
    np.testing.assert_allclose(module.shape(np.array([0, 3, -3, 8, 0.5])), [0, 1.003, -1.003, 2.008, 1.5**0.5 - 0.9995])

    games = FakeVecEnv([[([3.0] * 5, "terminated")]] * 2, SAME_STEP, shape=(3, 64, 64))
    monkeypatch.setattr(module, "plain_envs", giving(games))
    envs = module.make_envs(module.Args(), 2, 1)
    envs.reset()
    for _ in range(5):
        _, reward, *_, info = envs.step(np.zeros(2, int))
        np.testing.assert_allclose(reward, 1.003)
    assert info["episode"]["r"].tolist() == [15, 15]


@pytest.mark.parametrize("name", ["procgen_augment", "impala_augment"])
def test_augmentation_is_in_updates_only(variant, monkeypatch, name):
    """Acting sees unchanged frames; a row's two frames move alike; `once` moves a row as before, `anew` does not."""
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
    """Divided by the std of its discounted sums, through ends; then the predictor learns; all of it is resumed."""
    module = variant("procgen_rnd")
    games = FakeVecEnv(random_episodes(2, ends=("terminated",)), SAME_STEP, shape=(6, 16, 16), learn=True)
    monkeypatch.setattr(module, "plain_envs", lambda *args: games)
    args = dict(num_envs=2, num_steps=20, channels=(8, 8, 8), minibatch_size=8, gamma=0.9, device="cpu", threads=1)
    args = module.Args(**args, rnd_coef=0.5, rnd_clip=1)
    assert module.make_envs(args, 2, module.script.stream_seed(1, "test"), test=True) is games
    envs = module.make_envs(args, 2, 1)
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
        bonus = 0.5 * np.minimum(errors[-1] / conftest.plain_deviation(history), 1)
        np.testing.assert_allclose(reward - games.log[-1][0], bonus, rtol=1e-3, atol=1e-6)
        paid.update(bonus.tolist())
    assert max(paid) == 0.5 and len(paid) > 20 and games.episode.min() > 1
    assert torch.equal(target.hidden.weight, envs.target.hidden.weight)
    with torch.no_grad():
        after = [envs.errors(torch.from_numpy(frames)).mean().item() for frames in games.seen[:20]]
    assert np.mean(after) < np.mean(errors)
    monkeypatch.setattr(module.script.Run.__mro__[1], "__init__", lambda *args: None)
    saved = copy.deepcopy({name: part.state_dict() for name, part in envs.parts.items()})
    again = module.make_envs(module.replace(args, seed=2), 2, 1)
    module.Run(args, saved, None)
    bonuses = []
    for either in (envs, again):  # the same networks and sums
        either.obs = obs
        _, reward, *_ = either.step(np.zeros(2, int))
        bonuses.append(reward - games.log[-1][0])
    np.testing.assert_allclose(*bonuses, rtol=1e-4)
    assert (bonuses[0] < 0.5).all()


# ---------------------------------------------------------------------------------------------------------- appo_vtrace


@pytest.mark.usefixtures("in_float64")
def test_vtrace_updates_match_plain_float64(variant, tmp_path):
    """New targets in every minibatch; the returns' statistics learn from those of the first epoch."""
    compare_with_plain(variant("appo_vtrace").script, tmp_path, max_grad_norm=0, vtrace=plain_vtrace)


# -------------------------------------------------------------------------------------------------------- pbt and hub


def weights(run):
    saved = torch.load(run / "checkpoint.pt", weights_only=True)
    return torch.cat([x.flatten().double() for x in saved["agent"].values()])


def test_pbt_trial_continues_the_copy_of_a_better_one(variant, tmp_path):
    """The whole run is copied; then its own seed, number of steps and present numbers count, not the other's."""
    pbt, trials = variant("pbt"), []
    args = dict(env_id="leaper", num_envs=4, num_steps=16, minibatch_size=64, channels=(4, 4, 4), threads=1)
    args |= dict(run_dir=str(tmp_path), update_epochs=1, eval_episodes=0)
    flags = dataclasses.asdict(variant("ppo_procgen").Args(**args))
    for number in range(2):
        trial = object.__new__(type("Alone", (pbt.Trial,), {"trial_id": f"x_0000{number}", "iteration": 0}))
        trial.setup({}, {"script": "ppo_procgen", "slice_steps": 150}, flags)
        trial.config = {"lr": np.float64(1e-3 * (number + 1)), "ent_coef": np.float64(0.01)}
        assert trial.step()["step"] == 128  # whole iterations
        trials.append(trial)
    worse, better = trials  # the worse one's seed is the default, the copied run's is not
    assert not torch.equal(weights(better.run), weights(worse.run))
    better.save_checkpoint(tmp_path / "copy")
    worse.load_checkpoint(tmp_path / "copy")
    assert torch.equal(weights(better.run), weights(worse.run))
    for trial in trials:
        trial.config = {"lr": 8e-4, "ent_coef": 0.02}
        type(trial).iteration = 1
        assert trial.step()["step"] == 256
    copied, own = [conftest.timeless(trial.run) for trial in trials]
    assert copied[:2] == own[:2] and copied[2] != own[2]  # the same past, other episodes since
    assert [float(row["train/lr"]) for row in copied] == [2e-3, 2e-3, 8e-4, 8e-4]
    own = json.loads((worse.run / "config-128.json").read_text())["args"]
    assert own["seed"] == flags["seed"] and own["ent_coef"] == [0, 0.02]


@pytest.mark.slow
def test_pbt_exploits_and_explores(tmp_path):
    """As typed, by Ray. Hardly learning, trials of two seeds end with equal weights only if one copied the other."""
    command = [sys.executable, FOLDER / "pbt.py", "ppo_procgen", tmp_path / "pbt"]
    command += "--population 2 --slices 2 --slice-steps 1024 --lr 1e-9 1e-8 --".split()
    command += f"{LEAPER} --num-envs 16 --num-steps 32 --minibatch-size 64 --threads 1".split()
    subprocess.run(command, check=True, capture_output=True, timeout=1800)
    (line,) = (tmp_path / "pbt" / "tune" / "pbt_global.txt").read_text().splitlines()
    *_, before, after = json.loads(line)
    assert after["lr"] != before["lr"] and after["ent_coef"] != before["ent_coef"]
    runs = [tmp_path / "pbt" / f"trial_{number}" for number in range(2)]
    assert (weights(runs[0]) - weights(runs[1])).abs().max() < 1e-5


def test_hub_card_has_the_runs_figures(variant, tmp_path):
    """Its figures, command and files."""
    hub, run, folder = variant("hub"), tmp_path / "run", tmp_path / "run-hub"
    run.mkdir()
    args = variant("appo_atari").Args(env_id="Pong", run_dir="x", fire_reset=False, lr=[0, 5e-4, 1e6, 1e-4])
    flags = json.loads(json.dumps(dataclasses.asdict(args)))
    config = {"args": flags, "command": ["x/appo_atari.py"], "ranks": 1, "versions": {"torch": "2.13.0", "numpy": "2"}}
    (run / "config-1000.json").write_text(json.dumps(config))
    scores = {"mean": 16.561, "stderr": 2.567, "returns": [14.0, 19.122]}
    (run / "eval.json").write_text(json.dumps({"step": 499712, "splits": {"game": scores}}))
    for name in ("appo_atari.py", "metrics.csv", "film.mp4"):
        (run / name).touch()
    torch.save({"step": 499712}, run / "checkpoint.pt")
    assert hub.main([str(run), "user/name", "--dry-run"]) == 0
    card = (folder / "README.md").read_text()
    assert json.loads(card.split("---\n")[1])["model-index"][0]["results"]
    command = "    python appo_atari.py --env-id Pong --no-fire-reset --lr 0.0 0.0005 1000000.0 0.0001\n"
    versions = "appo_atari.py is a copy of the code that ran. Packages: torch 2.13.0, numpy 2."
    for text in ("| game | 16.56 ± 2.57 | 2 |", "499,712", versions, "(replay.mp4)", command):
        assert text in card
    files = {path.name for path in run.iterdir()} - {"film.mp4"} | {"README.md", "replay.mp4"}
    assert {path.name for path in folder.iterdir()} == files
