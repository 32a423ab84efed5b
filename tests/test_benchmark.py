"""The tools under benchmark/: evaluate.py, floor.py, speed.py, explore.py."""

import contextlib
import dataclasses
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import evaluate
import floor
import numpy as np
import pytest
import speed
import torch

from conftest import ROOT, SAME_STEP, FakeVecEnv, spy_on

explore_file = ROOT / "benchmark" / "explore.py"  # its own process: it changes the scripts

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
    folder = trained / name
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    own = json.loads(before["eval.json"])
    assert evaluate.main([str(folder), "--episodes", "3", "--out", str(tmp_path / "x.json")]) == 0
    assert json.loads((tmp_path / "x.json").read_text()) == own and own["step"] == 64
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


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
    monkeypatch.setitem(sys.modules, "av", None)  # importing it fails
    for words, part in {
        f"{run} --checkpoint eval.json": "no readable config-<step>.json and eval.json",
        f"{run} --split game": "--split game: this run has train, test",
        f"{run} --episodes 0": "--episodes 0",
        f"{run} --out {run}/eval.json": "must not be in the run's own folder",
        f"{run} --out {tmp_path}/no/r.json": "no/r.json: must be a file",
        f"{run} --video f.gif": "--video f.gif",
        f"{run} --video {tmp_path}": f"{tmp_path}: must be a file",
        f"{run} --video {tmp_path}/f.mp4": "imageio and av",
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
    assert evaluate.main([folder, "--episodes", "1"]) == 2
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


def test_cells_are_counted(tmp_path):
    """Two iterations of Montezuma's Revenge: a row each, cells only grow, and their count is of pairs and rooms."""
    words = f"cells --steps 128 --json {tmp_path}/x.json -- {MONTEZUMA} {TINY}"
    done = subprocess.run([sys.executable, explore_file, *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [row[0] for row in rows] == [64, 128] and 0 < rows[0][1] <= rows[1][1] and rows[1][2] == 1


def test_feature_moments():
    """Over the frames of all episodes: squared mean and variance (n - 1) of each feature, then their means."""
    code = f"""
import sys; sys.path.insert(0, {str(explore_file.parent)!r})
import types, numpy, explore
snd = types.SimpleNamespace(preprocess=lambda x: x.float(), target=lambda x: x.flatten(1))
frames = numpy.array([[[9, 9], [0, 2]], [[9, 9], [3, 2]], [[9, 9], [6, 2]]], numpy.uint8)[:, :, None]
print(*explore.feature_moments(snd, [frames[:2], frames[2:]]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["6.5", "4.5"], done.stderr  # means 3 and 2, variances 9 and 0


@pytest.mark.slow
def test_novelty_after_each_number_of_sgd_steps(tmp_path):
    """Rows in order, of one run that goes on; SND-STD makes one pass over a rollout of eight minibatches."""
    words = f"novelty --target std --seeds 1 --sgd-steps 24 8 --run-dir {tmp_path} --json {tmp_path}/x.json"
    done = subprocess.run([sys.executable, explore_file, *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [first["steps"], second["steps"]] == [8, 24] and first["target"] == second["target"] == "std"
    assert first["untrained_ratio"] != 1 and first["decay"] == 1 != second["decay"]  # one iteration, then three
    assert first["seen"] != second["seen"] and first["seen_games"] == second["seen_games"] > 2
    assert first["seen_variance"] > 0 and first["unseen_variance"] > 0 and 8 < second["target_loss"] < 8.4  # 2 ln 64
    words = words.replace("24 8", "8 32 --freeze-target")  # 8: the run is already at 24
    done = subprocess.run([sys.executable, explore_file, *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again, third = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert again["steps"] == 24 and again["seen"] == second["seen"]
    assert third["steps"] == 32 and third["target_loss"] == 0 != third["seen_squared_mean"]
    words = f"novelty --seeds 1 --sgd-steps 8 --json {tmp_path}/x.json -- --minibatch-size 32 --update-epochs 1"
    done = subprocess.run([sys.executable, explore_file, *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "x.json").read_text())["rows"][0]["steps"] == 16  # of one iteration


def test_floor_command(tmp_path, monkeypatch, capsys):
    """A learner is at most about as fast as its layers alone; the file has what is printed."""
    flags = "--env-id leaper --num-envs 4 --num-steps 16 --minibatch-size 64 --channels 8 8 8 --threads 1"
    monkeypatch.setattr(floor, "PIECES", (16, 64))
    monkeypatch.setattr(floor, "LEAST", 0.01)
    assert floor.main(["ppo_procgen", "--json", str(tmp_path / "x.json"), "--", *flags.split()]) == 0
    result = json.loads((tmp_path / "x.json").read_text())
    assert result == json.loads(capsys.readouterr().out) and len(result["learner_shares"]) == 3
    assert 0 < result["learner_share"] < 8 and 0 < result["acting_share"] < 8  # at most 1 on an idle machine
    first, heads = 2 * 9 * 64 * 64 * 6 * 8, 2 * (8 * 256 + 256 * 15 + 256)
    convolutions = first + 2 * 9 * 8 * 8 * (4 * 32**2 + 32**2 + 4 * 16**2 + 16**2 + 4 * 8**2)
    expected = 3 * (3 * (convolutions + heads) - first)
    assert result["update_gflop_per_row"] == pytest.approx(expected / 1e9)


def test_speed_against_another_revision(tmp_path, monkeypatch, capsys):
    """Old and new alternate, each with its Python; a ratio above 1: the new one is faster; no worktree is left."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run([*git, "init", "-q"], check=True)
    for seconds in ("3", "2"):
        (tmp_path / "ppo_procgen.py").write_text(f"raise SystemExit('{seconds}')")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", seconds], check=True)

    def process(source, name, flags, python):
        assert flags[-2:] == ["--total-timesteps", "300"]
        assert python == (sys.executable if source == tmp_path else "sh")
        wall = float((source / f"{name}.py").read_text().split("'")[1])
        return dict(wall=wall, cpu=wall**2, steps=300)

    monkeypatch.setattr(speed, "ROOT", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(speed, "process", process)
        flags = f"--pairs 2 --against-python sh --json {tmp_path}/x.json -- --total-timesteps 300"
        assert speed.main(["--against", "HEAD~1", "--script", "ppo_procgen", *flags.split()]) == 0
    found = json.loads((tmp_path / "x.json").read_text())["revisions"]["ppo_procgen"]
    assert found["wall_ratios"] == [1.5, 1.5] and found["cpu_ratios"] == [2.25, 2.25]
    assert len(subprocess.run([*git, "worktree", "list"], capture_output=True).stdout.splitlines()) == 1
    assert speed.main(["--against", "HEAD", "--script", "ppo_procgen"]) == 1
    assert "exit code 1: 2" in capsys.readouterr().err
    (tmp_path / "old.py").write_text("torch_threads: int = 0")
    old = " ".join(speed.flags_for(tmp_path / "old.py", "--a 1 --threads 2 --b".split()))
    assert old == "--a 1 --torch-threads 2 --env-threads 2 --b"
    one = speed.process(ROOT, "ppo_procgen", f"{PLAYED['ppo_procgen']} {TINY} --total-timesteps 64".split())
    assert one["steps"] == 64 and 0 < one["cpu"] and 0 < one["wall"] and 0.1 < one["peak_gib"] < 10


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
    monkeypatch.setattr(speed, "ROWS", {"x": ("appo_atari", flags, 1, 1)})
    words = f"--against cleanrl --source . --script appo_atari --pairs 1 --json {tmp_path} -- {TINY}"
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
    script = speed.load("appo_atari")
    args = script.Args(num_envs=8, minibatch_size=256, num_minibatches=4)
    assert "--env-id=Breakout-v5" in speed.cleanrl_flags(script, args)
    for name, value in (("num_minibatches", 8), ("minibatch_size", 384), ("frame_size", 96)):
        with pytest.raises(script.UsageError, match=f"{name.replace('_', '-')} {value}: CleanRL"):
            speed.cleanrl_flags(script, dataclasses.replace(args, **{name: value}))


FAKE_SAMPLE_FACTORY = """#!/bin/sh
sleep 300 &
echo $! > $0.worker
for i in $(seq 100); do
    echo "Fps is ... Total num frames: ${i}000"
    sleep 0.2
done
"""


def test_speed_against_sample_factory(tmp_path):
    """Its reports are in frames, four per step; at the end its worker processes end too."""
    python = tmp_path / "python"
    python.write_text(FAKE_SAMPLE_FACTORY)
    python.chmod(0o755)
    args = speed.load("appo_atari").Args(run_dir=str(tmp_path), device="cpu")
    assert speed.sample_factory(args, 3, str(python))["sps"] == pytest.approx(1000 / 4 / 0.2, rel=0.5)
    worker = Path("/proc", (tmp_path / "python.worker").read_text().strip(), "cmdline")
    until = time.monotonic() + 10
    with contextlib.suppress(OSError):  # it is gone
        while worker.read_bytes():  # empty: a zombie
            assert time.monotonic() < until
            time.sleep(0.1)


def test_the_floor_counts_the_rows_that_are_trained():
    """9,600 rows in minibatches of 1,024: 384 are unused."""
    args = floor.importlib.import_module("ppo_procgen").Args()
    ((*_, passes, _),) = floor.networks("ppo_procgen", args, {"Agent": None})
    assert passes == pytest.approx(3 * 9216 / 9600)


REFUSED = [
    (floor, "ppo_procgen --rounds 0", ["--rounds 0", "at least 1"]),
    (floor, "appo_atari -- --sync", ["appo_atari", "--num-groups 1"]),
    (floor, "ppo_procgen -- --precision bf16", ["--precision bf16", "not measured"]),
    (speed, "ppo_procgen --json /tmp", ["--json /tmp", "is a folder"]),
    (speed, "--against fp32 ppo_procgen", ["ppo_procgen", "comes first"]),
    (speed, "ppo_procgen -- --resume runs/x", ["--resume", "its steps would count"]),
    (speed, "ppo_procgen --against sync", ["ppo_procgen", "cleanrl, fp32"]),
    (speed, "--against nowhere --script ppo_procgen", ["nowhere: no revision"]),
    (speed, "ppo_procgen --against cleanrl --source x", ["--source x", "no cleanrl/ppo_procgen.py", "git clone"]),
]


@pytest.mark.parametrize("tool, command, parts", REFUSED)
def test_bad_input(tool, command, parts, capsys):
    """One clear line, before anything is measured."""
    with pytest.raises(SystemExit) as stop:
        tool.main(command.split())
    last = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and all(part in last for part in parts), last
