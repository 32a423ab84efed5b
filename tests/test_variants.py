"""The variants of the scripts, benchmark/variants/: each as a user runs it, and what is its own."""

import copy
import dataclasses
import importlib
import json
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import FOLDER, ROOT, SAME_STEP, STEMS, FakeVecEnv, giving, plain_deviation, random_episodes, timeless

ITERATION = "--num-envs 4 --num-steps 16 --minibatch-size 32 --threads 1"
LEAPER = "--env-id leaper --channels 4 4 4"
BONUS = "--warmup-steps 3 --update-epochs 1"
OWN = {
    "procgen_augment": f"{LEAPER} --augment flip translate crop rotate pad_crop",
    "impala_augment": f"{LEAPER} --num-groups 2 --sync --minibatch-size 64 --augment-draw anew",
    "procgen_rnd": LEAPER,
    "procgen_shaped": LEAPER,
    "procgen_tf_adam": f"{LEAPER} --adam-eps 1e-5",
    "snd_procgen": "--env-id jumper --target vic --snd-features 8 --update-epochs 1",
    "snd_paper": f"--env-id Breakout --target std --snd-features 8 --max-episode-steps 30 {BONUS}",
    "snd_entropy": f"--env-id Breakout --snd-features 8 --episodic-steps 5 --max-episode-steps 30 {BONUS}",
    "snd_breakout": f"--env-id Breakout --snd-features 8 --max-episode-steps 30 {BONUS}",
    "rnd_michalnand": f"--config ppo_rnd_b2 --snd-features 8 --max-episode-steps 30 {BONUS}",
}


@pytest.mark.parametrize("name", OWN)
def test_runs(variant, name, tmp_path, monkeypatch):
    """As typed, but small: two iterations and an evaluation; a variant with a state is resumed and played again."""
    monkeypatch.setattr(torch.optim, "Adam", torch.optim.Adam)  # procgen_tf_adam replaces it
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
    run(file, *f"{ITERATION} {OWN[name]} --total-timesteps 128 --eval-episodes 2 --run-name x".split())
    own = json.loads((folder / "eval.json").read_text())
    assert Path(json.loads((folder / "config-0.json").read_text())["command"][0]) == file and own["step"] == 128
    if name == "procgen_rnd":
        run(ROOT / "benchmark" / "evaluate.py", folder, "--episodes", 2, "--out", tmp_path / "out.json")
        assert json.loads((tmp_path / "out.json").read_text()) == own
        run(file, "--resume", folder, "--total-timesteps", 192)
        assert json.loads((folder / "eval.json").read_text())["step"] == 192


def test_augmentations_by_hand(variant):
    """Each against NumPy, or where it must send a dot and a ramp; a row that draws no move stays."""
    augment = variant("procgen_augment").augment

    def moved(frames, name, *draws):
        draws = torch.tensor([[0.0, *draws, 0]]).repeat(len(frames), 1)
        return augment(torch.from_numpy(frames), (name,), 0.5, draws).numpy()

    frames = np.random.default_rng(0).integers(0, 256, (2, 6, 64, 64), np.uint8)
    shift = moved(frames, "translate", 11.5 / 17, 0.5 / 17)  # 3 to the left, 8 down
    assert (shift == np.roll(frames, (8, -3), (2, 3))).all()
    padded = np.pad(frames, [(0, 0), (0, 0), (10, 10), (10, 10)], "reflect")
    assert (moved(frames, "pad_crop", 0.5 / 21, 14.5 / 21) == padded[..., 14:78, 0:64]).all()
    ramp = np.zeros((1, 3, 64, 64), np.uint8) + 4 * np.arange(64, dtype=np.uint8)
    crop = moved(ramp, "crop", 0, 0)[0, 0]  # three quarters of the side, from the left
    np.testing.assert_allclose(crop, np.tile(3 * np.arange(64), (64, 1)), atol=0.51)
    dot = np.zeros((1, 3, 64, 64), np.uint8)
    dot[..., 31:33, 51:53] = 255  # 20 to the right of the centre
    turned = moved(dot, "rotate", 1, 0)[0, 0].astype(float)
    y, x = (np.indices((64, 64)) * turned).sum((1, 2)) / turned.sum() - 31.5
    np.testing.assert_allclose([x, y], 20 * np.array([np.cos(np.pi / 9), -np.sin(np.pi / 9)]), atol=0.2)
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
    args = dict(num_envs=2, num_steps=20, channels=(8, 8, 8), minibatch_size=8, gamma=0.9, device="cpu")
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
        bonus = 0.5 * np.minimum(errors[-1] / plain_deviation(history), 1)
        np.testing.assert_allclose(reward - games.log[-1][0], bonus, rtol=1e-3, atol=1e-6)
        paid.update(bonus.tolist())
    assert max(paid) == 0.5 and len(paid) > 20 and games.episode.min() > 1
    assert torch.equal(target.hidden.weight, envs.target.hidden.weight)
    with torch.no_grad():
        after = [envs.errors(torch.from_numpy(frames)).mean().item() for frames in games.seen[:20]]
    assert np.mean(after) < np.mean(errors)
    plain_run, written = module.script.Run.__mro__[1], {}
    monkeypatch.setattr(plain_run, "save", lambda self, name, parts, **counters: written.update(parts))
    object.__new__(module.Run).save("checkpoint.pt", {}, step=40)
    saved = copy.deepcopy({name: part.state_dict() for name, part in written.items()})
    monkeypatch.setattr(plain_run, "__init__", lambda *args: None)
    again = module.make_envs(module.replace(args, seed=2), 2, 1)
    module.Run(args, saved, None)
    with torch.no_grad():
        assert torch.equal(again.errors(torch.from_numpy(obs)), envs.errors(torch.from_numpy(obs)))
    assert again is not envs and again.optimizer.state_dict()["state"]
    # In one go or resumed, the divisor is the same: the discounted sums are saved, too.
    bonus, done = torch.rand(30, 2), torch.zeros(2)
    for x in bonus:
        assert torch.equal(envs.normalizer(x, done), again.normalizer(x, done))
    with pytest.raises(module.script.UsageError, match="not a run of procgen_rnd"):
        module.Run(args, {"agent": {}, "folder": "x"}, None)


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
    copied, own = [timeless(trial.run) for trial in trials]
    assert copied[:2] == own[:2] and copied[2] != own[2]  # the same past, other episodes since
    assert [float(row["train/lr"]) for row in copied] == [2e-3, 2e-3, 8e-4, 8e-4]
    own = json.loads((worse.run / "config-128.json").read_text())["args"]
    assert own["seed"] == flags["seed"] and own["ent_coef"] == [0, 0.02]
    (tmp_path / "metrics.csv").write_text("step,episode/return,episode/count\n10,100,5\n20,1,3\n30,,0\n40,5,1\n")
    assert pbt.mean_return(tmp_path, 10) == 2.0 and pbt.mean_return(tmp_path, 40) == -np.inf


PBT = f"{LEAPER} --num-envs 16 --num-steps 32 --minibatch-size 64 --threads 1".split()


@pytest.mark.slow
def test_pbt_exploits_and_explores(tmp_path):
    """As typed, by Ray. Hardly learning, trials of two seeds end with equal weights only if one copied the other."""
    command = [sys.executable, FOLDER / "pbt.py", "ppo_procgen", tmp_path / "pbt"]
    command += "--population 2 --slices 2 --slice-steps 1024 --lr 1e-9 1e-8 --".split()
    subprocess.run([*command, *PBT], check=True, capture_output=True, timeout=1800)
    (line,) = (tmp_path / "pbt" / "tune" / "pbt_global.txt").read_text().splitlines()
    *_, before, after = json.loads(line)
    assert after["lr"] != before["lr"] and after["ent_coef"] != before["ent_coef"]
    runs = [tmp_path / "pbt" / f"trial_{number}" for number in range(2)]
    assert (weights(runs[0]) - weights(runs[1])).abs().max() < 1e-5


@pytest.mark.slow
def test_pbt_ends_when_a_trial_fails(tmp_path):
    """Ray's scheduler would let the others wait for it forever."""
    command = [sys.executable, FOLDER / "pbt.py", "ppo_procgen", tmp_path / "pbt"]
    command += "--population 2 --slices 2 --slice-steps 1024 --lr 1e-9 1e31 --".split()  # drawn: 5e7 and 1e-9
    assert subprocess.run([*command, *PBT, "--seed", "1"], capture_output=True, timeout=600).returncode == 1
    (error,) = (tmp_path / "pbt" / "tune").glob("*/error.txt")
    assert "training has diverged" in error.read_text()


def test_pbt_refuses_in_one_line(variant, tmp_path, monkeypatch, capsys):
    """Before Ray starts, or what Ray says when it cannot; no folder is left."""
    pbt, new, flags = variant("pbt"), str(tmp_path / "a" / "b"), ["--", *PBT]

    def init(address, **options):  # as with a TMPDIR of 110 characters
        raise OSError("AF_UNIX path length\ncannot exceed 107 bytes")

    monkeypatch.setattr(pbt.ray, "init", init)
    for words, part in {
        (new, "--slice-steps", "100", *flags): "--total-timesteps 100",
        (str(tmp_path), "--slice-steps", "512", *flags): "exists",
        (new, "--slice-steps", "512", *flags): "AF_UNIX path length cannot exceed",
    }.items():
        assert pbt.main(["ppo_procgen", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert part in line, line
    wrong = {"--ent-coef 0.1 0.03": "--ent-coef 0.1 0.03", "--lr nan 0.1": "lr", "--population 1": "population"}
    for words, part in (wrong | {f"-- --resume {new}": "--resume"}).items():
        with pytest.raises(SystemExit) as end:  # tyro's box
            pbt.main(["ppo_procgen", new, *words.split()])
        assert end.value.code == 2 and part in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_pbt_workers_find_the_script(variant, tmp_path):
    """Ray unpickles a trial's arguments in a worker that was started in another folder."""
    pbt = variant("pbt")
    code = """if True:
        import pickle, sys
        setup, options, flags, trial = pickle.load(sys.stdin.buffer)
        setup(trial, {}, options, flags)
        print(trial.args.env_id, trial.args.seed)
    """
    from ray import cloudpickle

    trial = types.SimpleNamespace(trial_id="x_00003")
    setup = types.FunctionType(pbt.Trial.setup.__code__, {"ROOT": pbt.ROOT, "Path": Path, "sys": sys})
    setup.__globals__["importlib"] = importlib
    flags = dataclasses.asdict(variant("ppo_procgen").Args(env_id="leaper", run_dir=str(tmp_path)))
    data = cloudpickle.dumps((setup, {"script": "ppo_procgen", "slice_steps": 1}, flags, trial))
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, cwd=tmp_path)
    assert done.stdout == b"leaper 4\n", done.stderr.decode()


def test_hub_without_docstrings(tmp_path):
    """`python -OO` removes them."""
    command = [sys.executable, "-OO", FOLDER / "hub.py", tmp_path / "run", "user/name", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "eval.json" in done.stderr and "Traceback" not in done.stderr


def test_hub_card_has_the_runs_figures(variant, tmp_path, monkeypatch, capsys):
    """Its figures, command and files; a run without an evaluation of its last step is refused in one line."""
    hub, run, folder = variant("hub"), tmp_path / "run", tmp_path / "run-hub"
    run.mkdir()
    arguments = [str(run), "user/name", "--dry-run"]
    assert hub.main(arguments) == 2 and not folder.exists()
    assert "eval.json" in capsys.readouterr().err
    args = variant("appo_atari").Args(env_id="Pong", run_dir="x", fire_reset=False, lr=[0, 5e-4, 1e6, 1e-4])
    flags = json.loads(json.dumps(dataclasses.asdict(args)))
    config = {"args": flags, "command": ["x/appo_atari.py"], "ranks": 1, "versions": {"torch": "2.13.0", "numpy": "2"}}
    (run / "config-999.json").write_text(json.dumps(config | {"ranks": 2}))
    (run / "config-1000.json").write_text(json.dumps(config))
    (run / "appo_atari.py").write_text("")
    scores = {"mean": 16.561, "stderr": 2.567, "returns": [14.0, 19.122]}
    (run / "eval.json").write_text(json.dumps({"step": 499712, "splits": {"game": scores}}))
    (run / "metrics.csv").write_text("step\n499712\n")
    torch.save({"step": 499712}, run / "checkpoint.pt")
    (run / "film.mp4").write_text("film")
    assert hub.main(arguments) == 0 and "huggingface_hub" not in sys.modules  # the dry run did not need it
    card = (folder / "README.md").read_text()
    assert json.loads(card.split("---\n")[1])["model-index"][0]["results"]
    command = "    python appo_atari.py --env-id Pong --no-fire-reset --lr 0.0 0.0005 1000000.0 0.0001\n"
    versions = "appo_atari.py is a copy of the code that ran. Packages: torch 2.13.0, numpy 2."
    for text in ("| game | 16.56 ± 2.57 | 2 |", "499,712", versions, "(replay.mp4)", command):
        assert text in card
    assert hub.command_of("appo_atari", flags, ranks=2).startswith("torchrun --nproc-per-node 2 appo_atari.py --env-id")
    assert hub.script_of(run, ["a/pytest"]) == "appo_atari"  # started from Python
    snd_flags = json.loads(json.dumps(dataclasses.asdict(variant("ppo_atari_snd").Args(seed=3))))
    command = hub.command_of("snd_breakout", snd_flags, ranks=1)
    assert command == "python benchmark/variants/snd_breakout.py --seed 3"  # which has the Args of its script
    files = ["README.md", "appo_atari.py", "checkpoint.pt", "config-1000.json", "config-999.json", "eval.json"]
    files += ["metrics.csv", "replay.mp4"]
    assert sorted(path.name for path in folder.iterdir()) == files
    api, sent = types.SimpleNamespace(), []
    api.create_repo = lambda name, exist_ok: types.SimpleNamespace(repo_id=name)
    api.upload_folder = lambda repo_id, folder_path: sent.append((repo_id, folder_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=lambda: api))
    assert hub.main(arguments[:2]) == 0 and sent == [("user/name", folder)]
    torch.save({"step": 500000}, run / "checkpoint.pt")
    assert hub.main(arguments) == 2 and "checkpoint.pt of 500000" in capsys.readouterr().err
    shutil.rmtree(folder)
    assert hub.main([*arguments, "--film", str(tmp_path / "x.mp4")]) == 2 and not folder.exists()
    assert "--film" in capsys.readouterr().err
    (run / "config-1000.json").write_text('{"args"')
    assert hub.main(arguments) == 2 and len(capsys.readouterr().err.splitlines()) == 1

    def broken(*rest):
        raise OSError("a bug")

    (run / "config-1000.json").write_text(json.dumps(config))
    monkeypatch.setattr(hub, "card", broken)
    torch.save({"step": 499712}, run / "checkpoint.pt")
    with pytest.raises(OSError, match="a bug"):  # no one-line message for unexpected errors
        hub.main(arguments)
