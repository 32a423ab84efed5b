"""The tools under benchmark/: evaluate.py and speed.py."""

import dataclasses
import importlib
import json
import subprocess
import sys
import types

import evaluate
import pytest
import speed

from conftest import KINDS, ROOT, spy_on

TINY = "--num-envs 4 --num-steps 16 --minibatch-size 32 --device cpu --threads 1"
PLAYED = KINDS | {"ppo_procgen": f"{KINDS['ppo_procgen']} --num-levels 3"}  # one with two splits


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a tiny run of each script."""
    runs = tmp_path_factory.mktemp("runs")
    for name, flags in PLAYED.items():
        words = f"{flags} --total-timesteps 64 --run-dir {runs} --run-name {name}"
        assert importlib.import_module(name).main(words.split()) == 0
    return runs


@pytest.mark.parametrize("name", PLAYED)
def test_evaluate_plays_the_episodes_of_the_run(tmp_path, trained, name):
    """The same agent, episodes and random numbers as in the script's own evaluation; the run is only read."""
    before = {path.name: path.read_bytes() for path in (trained / name).iterdir()}
    assert evaluate.main([str(trained / name), "--episodes", "2", "--out", str(tmp_path / "x.json")]) == 0
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
    frames = importlib.import_module("imageio.v3").imread(film, plugin="pyav")
    assert frames.shape == (found[1]["lengths"][0] + 1, 256, 256, 3) and frames.std() > 10


@pytest.mark.slow
def test_the_trained_agent_is_played(tmp_path):
    """The one in the repository beats OpenAI's 10.3."""
    run = ROOT / "benchmark" / "results" / "trained" / "ppo_procgen_bigfish"
    assert evaluate.main([str(run), "--episodes", "8", "--out", str(tmp_path / "x.json")]) == 0
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
from procgen import ProcgenEnv
from torch.utils.tensorboard import SummaryWriter
flags = dict(word[2:].split("=") for word in sys.argv[1:] if "=" in word)
envs = ProcgenEnv(num_envs=4, env_name="starpilot", num_levels=0, start_level=0, distribution_mode="easy")
envs = gym.wrappers.RecordEpisodeStatistics(gym.wrappers.TransformObservation(envs, lambda obs: obs["rgb"]))
envs = gym.wrappers.TransformReward(gym.wrappers.NormalizeReward(envs, gamma=0.9), lambda x: np.clip(x, 0, 3))
random, lengths, largest, writer = np.random.default_rng(0), [], 0, SummaryWriter("runs/x")
assert envs.reset().shape == (4, 64, 64, 3)
for step in range(4, 10**6, 4):
    obs, reward, done, info = envs.step(random.integers(envs.action_space.n, size=4))
    assert obs.dtype == np.uint8 and obs.shape == (4, 64, 64, 3) and len(reward) == len(done) == 4
    largest = max(largest, float(reward.max()))
    lengths += [int(one["episode"]["l"]) for one in info if "episode" in one]
    if step % 1000 == 0 and lengths:
        assert 0 < sum(lengths) <= step  # each episode's own steps
        with open(__file__ + ".json", "w") as file:
            json.dump([largest, torch.get_num_threads(), flags], file)
        writer.add_scalar("charts/SPS", 0, step)  # the end of an iteration
"""


def test_speed_against_cleanrl(tmp_path, monkeypatch):
    """A stand-in for CleanRL's file gets old gym and equal sizes; a file per row, ratios the right way round."""
    (tmp_path / "cleanrl").mkdir()
    (tmp_path / "cleanrl" / "ppo_procgen.py").write_text(OLD_GYM)
    row = "ppo_procgen --iterations 1 -- --env-id starpilot --update-epochs 2"
    monkeypatch.setattr(speed, "ROWS", {"cleanrl_x": row, "leanrl_x": "not measured"})
    words = f"--against cleanrl --equal --source {tmp_path} --pairs 1 --json {tmp_path} -- {TINY}"
    assert speed.main(words.split()) == 0
    found = json.loads((tmp_path / "cleanrl_x_equal.json").read_text())
    (ours,), (theirs,) = found["results"]["script"], found["results"]["cleanrl"]
    phases = ours["seconds_a_step"]
    assert found["wall_ratios"] == [ours["sps"] / theirs["sps"]] and "--source CLONE" in found["command"]
    assert found["cpu_ratios"] == [theirs["seconds_a_step"]["cpu"] / phases["cpu"]]
    assert 0.5 < sum(phases[name] for name in ("env", "policy", "learn")) * ours["sps"] <= 1.001
    largest, threads, flags = json.loads((tmp_path / "cleanrl" / "ppo_procgen.py.json").read_text())
    sizes = {"num-envs": "4", "num-steps": "16", "num-minibatches": "2", "update-epochs": "2"}
    assert flags.items() >= sizes.items() and threads == 1 and 0 < largest <= 3


LEAN = """
import gym, numpy as np, tqdm, wandb
from torch.distributions.categorical import Categorical
Categorical.logits = None  # as LeanRL's file does, in its way
assert Categorical(logits=__import__("torch").zeros(3)).logits.shape == (3,) and gym.__version__ == "0.23.1"
wandb.init(project="x")
for iteration in tqdm.tqdm(range(1, 9)):
    np.linalg.norm(np.ones(10**5 * iteration))
    wandb.log({"speed": 1}, step=iteration)
raise RuntimeError("was not stopped")
"""


def test_speed_against_leanrl(tmp_path):
    """A stand-in for LeanRL's file: the progress bar tells the end of iterations of equal size."""
    (tmp_path / "leanrl").mkdir()
    (tmp_path / "leanrl" / "ppo_atari_envpool_torchcompile.py").write_text(LEAN)
    words = f"appo_atari --child leanrl --against leanrl --source {tmp_path} --iterations 2 --warmup 1 -- --device cpu"
    command = [sys.executable, speed.__file__, *words.split(), "--minibatch-size", "1024", "--num-minibatches", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sps"] > 0 and 0 < found["seconds_a_step"]["cpu"] < 1


def test_speed_against_cleanrl_at_equal_sizes_only():
    """Flags that CleanRL's files do not have are refused: the ratio would be of unequal work."""
    script = importlib.import_module("appo_atari")
    args = script.Args(num_envs=8, minibatch_size=256, num_minibatches=4)
    options = types.SimpleNamespace(against="cleanrl", equal=False)
    assert "--env-id=Breakout-v5" in speed.peer_flags(script, args, options)
    for name, value in (("num_minibatches", 8), ("minibatch_size", 384), ("frame_size", 96)):
        with pytest.raises(script.UsageError, match="cleanrl|minibatches"):
            speed.peer_flags(script, dataclasses.replace(args, **{name: value}), options)
