"""The tools under benchmark/: evaluate.py and speed.py."""

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path

import evaluate
import numpy as np
import pytest
import speed
import torch

from conftest import ROOT, SAME_STEP, FakeVecEnv, spy_on

TINY = "--num-envs 4 --num-steps 16 --minibatch-size 32 --device cpu --threads 1"
MONTEZUMA = "--env-id MontezumaRevenge --warmup-steps 4 --update-epochs 1 --max-episode-steps 50"
PLAYED = {  # two splits, one, a bonus, a target network
    "ppo_procgen": "--env-id starpilot --channels 4 4 4 --update-epochs 1 --num-levels 3",
    "impala_procgen": "--env-id starpilot --channels 4 4 4 --update-epochs 1 --sync",
    "ppo_atari_rnd": f"{MONTEZUMA} --rnd-features 8",
    "ppo_atari_snd": f"{MONTEZUMA} --snd-features 8",
    "appo_atari": "--env-id Breakout --max-episode-steps 50 --num-groups 2 --num-minibatches 2 --sync",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a tiny run of each script."""
    runs = tmp_path_factory.mktemp("runs")
    for name, flags in PLAYED.items():
        words = f"{flags} {TINY} --total-timesteps 64 --eval-episodes 3 --run-dir {runs} --run-name {name}"
        assert importlib.import_module(name).main(words.split()) == 0
    return runs


@pytest.mark.parametrize("name", PLAYED)
def test_evaluate_plays_the_episodes_of_the_run(tmp_path, trained, name):
    """The same agent, episodes and random numbers as in the script's own evaluation; the run is only read."""
    before = {path.name: path.read_bytes() for path in (trained / name).iterdir()}
    assert evaluate.main([str(trained / name), "--episodes", "3", "--out", str(tmp_path / "x.json")]) == 0
    assert json.loads((tmp_path / "x.json").read_text()) == json.loads(before["eval.json"])
    assert {path.name: path.read_bytes() for path in (trained / name).iterdir()} == before


def test_evaluate_greedy_split_and_film(tmp_path, trained, monkeypatch):
    """One split, the most probable action, and a film with all frames of the first episode."""
    script, asked = importlib.import_module("ppo_procgen"), []
    spy_on(monkeypatch, script, "sample", lambda action, logits, _: asked.append(logits.softmax(-1)[0, action].item()))
    out, film = tmp_path / "x.json", tmp_path / "x.mp4"
    flags = ["--greedy", "--split", "test", "--episodes", "1", "--out", str(out), "--video", str(film)]
    assert evaluate.main([str(trained / "ppo_procgen"), *flags]) == 0
    (found,) = json.loads(out.read_text())["splits"].items()
    assert found[0] == "test" and set(asked) == {1}
    logits, value = evaluate.take_best(None, (), (torch.tensor([[1.0, 3.0, 2.0], [5.0, 4.0, 0.0]]), "value"))
    assert logits.softmax(-1).tolist() == [[0, 1, 0], [1, 0, 0]] and value == "value"
    frames = importlib.import_module("imageio.v3").imread(film, plugin="pyav")
    assert frames.shape == (found[1]["lengths"][0] + 1, 256, 256, 3) and frames.std() > 10


def test_film_is_the_first_episode():
    """The newest frame of environment 0, from its first to its last observation, and nothing of the next episode."""
    episodes = [[([0.0] * 3, "terminated"), ([0.0] * 9, "terminated")], [([0.0] * 2, "terminated")]]
    envs = FakeVecEnv(episodes, SAME_STEP, shape=(6, 16, 16))
    film = evaluate.Film(envs, 3)
    film.reset()
    for _ in range(8):
        film.step(np.zeros(2, int))
    assert np.array_equal(film.frames, [seen[0, -3:].transpose(1, 2, 0) for seen in envs.seen[:4]])


def copy_of(run, folder, **change):
    """A copy of a run with changes in the config of its last start."""
    folder.mkdir()
    (folder / "checkpoint.pt").write_bytes((run / "checkpoint.pt").read_bytes())
    config = json.loads((run / "config-0.json").read_text())
    (folder / "config-8.json").write_text(json.dumps({"args": {}, "command": ["other"]}))
    (folder / "config-64.json").write_text(json.dumps(config | {"command": ["ppo_procgen.py"]} | change))
    return str(folder)


def test_evaluate_bad_input(tmp_path, trained, monkeypatch, capsys):
    """One line that names what is wrong, and exit code 2, before anything is played."""
    run = trained / "ppo_procgen"
    flags = json.loads((run / "config-0.json").read_text())["args"]
    monkeypatch.setattr(importlib.import_module("ppo_procgen"), "play", None)
    for words, part in {
        f"{run} --checkpoint eval.json": "no readable config-<step>.json and eval.json",
        f"{run} --split game": "--split game: this run has train, test",
        f"{run} --episodes 0": "--episodes 0",
        f"{run} --out {tmp_path}/no/r.json": "no/r.json: must be a file",
        f"{run} --video f.gif": "--video f.gif",
        copy_of(run, tmp_path / "newer", args=flags | {"warp": 9}): "warp",
        copy_of(run, tmp_path / "foreign", command=["os"]): "made by os.py",
        copy_of(run, tmp_path / "own", args=flags | {"env_id": "Corridor"}): "--env-id Corridor: ",
        copy_of(run, tmp_path / "wide", args=flags | {"channels": [8, 8, 8]}): "size mismatch",
    }.items():
        assert evaluate.main(words.split()) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert part in line and len(line) < 400


def test_evaluate_a_renamed_script(tmp_path, trained, monkeypatch, capsys):
    """It is in no usual place; newer flags have their defaults; a run with another code is played with a warning."""
    run = trained / "ppo_procgen"
    code = (ROOT / "ppo_procgen.py").read_text()
    (tmp_path / "mine.py").write_text(code)
    flags = json.loads((run / "config-0.json").read_text())["args"]
    del flags["reshuffle"]
    folder = copy_of(run, tmp_path / "run", command=["mine.py"], args=flags)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for copy, warned in ((code, False), (code + "\n", True)):
        Path(folder, "mine.py").write_text(copy)
        words = ["--episodes", "1", "--split", "test", "--script", str(tmp_path / "mine.py")]
        assert evaluate.main([folder, *words]) == 0
        assert ("mine.py is not the code that trained" in capsys.readouterr().err) == warned


def test_the_trained_agent_is_played(tmp_path):
    """The one in the repository beats OpenAI's 10.3."""
    run = ROOT / "benchmark" / "results" / "trained" / "ppo_procgen_bigfish"
    assert evaluate.main([str(run), "--episodes", "4", "--out", str(tmp_path / "x.json")]) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["step"] == 7_996_800 and found["splits"]["test"]["mean"] > 10


def test_speed_against_another_revision(tmp_path, monkeypatch):
    """Old and new alternate, each measured by its own speed.py; a ratio above 1: the new one is faster."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "benchmark").mkdir()
    for rate in (2, 3):
        found = dict(sps=rate, peak_gib=1, seconds_a_step=dict(cpu=1 / rate**2))
        (tmp_path / "benchmark" / "speed.py").write_text(f"import sys\nprint('''{json.dumps(found)}''')\n")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    monkeypatch.setattr(speed, "ROOT", tmp_path)
    monkeypatch.setattr(speed.measure, "__defaults__", (tmp_path,))
    assert speed.main(["ppo_procgen", "--revision", "HEAD~1", "--json", str(tmp_path / "x.json")]) == 0
    found = json.loads((tmp_path / "x.json").read_text())["revisions"]
    assert found["wall_ratios"] == [1.5, 1.5] and found["cpu_ratios"] == [2.25, 2.25]
    assert len(subprocess.run([*git, "worktree", "list"], capture_output=True).stdout.splitlines()) == 1


OLD_GYM = """
import json, sys
import gym, numpy as np, torch
from torch.utils.tensorboard import SummaryWriter
flags = dict(word[2:].split("=") for word in sys.argv[1:] if "=" in word)
num_envs, procgen, random = int(flags["num-envs"]), flags["env-id"] == "starpilot", np.random.default_rng(0)
if procgen:
    from procgen import ProcgenEnv
    envs = ProcgenEnv(num_envs=num_envs, env_name="starpilot", num_levels=0, start_level=0, distribution_mode="easy")
    envs = gym.wrappers.RecordEpisodeStatistics(gym.wrappers.TransformObservation(envs, lambda obs: obs["rgb"]))
    envs = gym.wrappers.TransformReward(gym.wrappers.NormalizeReward(envs, gamma=0.9), lambda x: np.clip(x, 0, 3))
else:
    import envpool
    envs = gym.Wrapper(envpool.make(flags["env-id"], env_type="gym", num_envs=num_envs, episodic_life=True))
obs, games, rewards, writer = envs.reset(), [], [], SummaryWriter("runs/x")
for step in range(num_envs, 10**6, num_envs):
    obs, reward, done, info = envs.step(random.integers(envs.action_space.n, size=num_envs))
    assert obs.dtype == np.uint8 and obs.shape[0] == len(reward) == len(done) == num_envs
    rewards.append(reward.max())
    games += [one["episode"] for one in info if "episode" in one] if procgen else [info["lives"]]
    if step % 1000 == 0 and games:
        assert not procgen or 0 < sum(int(game["l"]) for game in games) <= step  # each game's own steps
        with open(__file__ + ".json", "w") as file:
            json.dump([float(max(rewards)), torch.get_num_threads(), flags], file)
        print("the end of an iteration")
        writer.add_scalar("charts/SPS", 0, step)
"""


def clone(folder, name):
    """A stand-in for a clone of CleanRL -> the file in which its counterpart of a script writes what it saw."""
    (folder / "cleanrl").mkdir()
    for file in ("ppo_procgen", speed.COUNTERPARTS[name]):
        (folder / "cleanrl" / f"{file}.py").write_text(OLD_GYM)
    return folder / "cleanrl" / f"{speed.COUNTERPARTS[name]}.py.json"


def test_speed_against_cleanrl(tmp_path, monkeypatch):
    """Equal sizes, a file per row, ratios the right way round; EnvPool returns what it returned to old gym."""
    seen = clone(tmp_path, "appo_atari")
    monkeypatch.chdir(tmp_path)
    flags = "--env-id Breakout --num-minibatches 2 --sync --update-epochs 2"
    monkeypatch.setattr(speed, "ROWS", {"x": f"appo_atari --warmup 1 --iterations 1 -- {flags}"})
    words = f"--against cleanrl --source . --pairs 1 --json {tmp_path} -- {TINY}"
    assert speed.main(words.split()) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    (ours,), (theirs,) = found["results"]["script"], found["results"]["cleanrl"]
    cpu = ours["seconds_a_step"].pop("cpu")
    assert found["wall_ratios"] == [ours["sps"] / theirs["sps"]] and "--source CLONE" in found["command"]
    assert found["cpu_ratios"] == [theirs["seconds_a_step"]["cpu"] / cpu]
    phases = ours["seconds_a_step"]
    assert 0.5 < (phases["wait"] + phases["learn"]) * ours["sps"] <= 1.001  # parts of the iteration's wall time
    _, threads, flags = json.loads(seen.read_text())
    sizes = {"num-envs": "4", "num-steps": "16", "num-minibatches": "2", "update-epochs": "2"}
    assert flags.items() >= sizes.items() and threads == 1


def test_old_gym_wrappers_of_procgen(tmp_path):
    """Observations of EnvPool's Procgen, whole episodes, and the clip after the division."""
    seen = clone(tmp_path, "ppo_procgen")
    words = f"ppo_procgen --child cleanrl --against cleanrl --source {tmp_path} -- --env-id starpilot {TINY}"
    done = subprocess.run([sys.executable, speed.__file__, *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sps"] > 0 and 0 < json.loads(seen.read_text())[0] <= 3


def test_speed_against_cleanrl_at_equal_sizes_only():
    """Flags that CleanRL's files do not have are refused: the ratio would be of unequal work."""
    script = importlib.import_module("appo_atari")
    args = script.Args(num_envs=8, minibatch_size=256, num_minibatches=4)
    assert "--env-id=Breakout-v5" in speed.cleanrl_flags(script, args)
    for name, value in (("num_minibatches", 8), ("minibatch_size", 384), ("frame_size", 96)):
        with pytest.raises(script.UsageError, match="CleanRL"):
            speed.cleanrl_flags(script, dataclasses.replace(args, **{name: value}))


def test_speed_bad_input(capsys):
    """One clear line, before anything is measured."""
    for words, part in (
        ("ppo_procgen --json /tmp", "--json /tmp: is a folder"),
        ("ppo_procgen --pairs 0", "at least 1"),
        ("ppo_procgen -- --resume runs/x", "its steps would count"),
        ("ppo_procgen --against sync", "ppo_procgen has cleanrl, fp32"),
        ("ppo_procgen --revision nowhere", "nowhere: no revision"),
        ("ppo_procgen --against cleanrl --source x", "--source x: no cleanrl/ppo_procgen.py"),
    ):
        assert pytest.raises(SystemExit, speed.main, words.split()).value.code == 2
        assert part in capsys.readouterr().err.splitlines()[-1]
