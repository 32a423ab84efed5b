"""benchmark/variants/pbt.py and hub.py: what is built around a script's runs."""

import csv
import importlib
import json
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark" / "variants"))
TINY = "--env-id leaper --num-envs 16 --num-steps 32 --minibatch-size 64 --channels 4 4 4 --torch-threads 1".split()


def rows(run):
    with open(run / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def weights(run):
    saved = torch.load(run / "checkpoint.pt", weights_only=True)
    return torch.cat([x.flatten().double() for x in saved["agent"].values()])


def untimed(row):
    return {name: x for name, x in row.items() if not name.startswith("time/")}


def test_pbt_trial_goes_on_with_the_copy_of_a_better_one(tmp_path):
    """The whole run is copied; then its own seed, number of steps and present numbers count, not the other's."""
    import pbt
    import ppo_procgen

    args = ppo_procgen.Args(env_id="leaper", num_envs=4, num_steps=32, minibatch_size=64, channels=(4, 4, 4))
    args.run_dir, args.eval_episodes, args.quiet = str(tmp_path), 0, True
    trials = []
    for number in range(2):
        trial = object.__new__(type("Alone", (pbt.Trial,), {"trial_id": f"x_0000{number}", "iteration": 0}))
        trial.setup({}, pbt.Options("ppo_procgen", str(tmp_path), slice_steps=300), args)
        trial.config = {"lr": 1e-3 * (number + 1), "ent_coef": 0.01}
        assert trial.step()["step"] == 256  # whole iterations
        trials.append(trial)
    better, worse = trials
    assert not torch.equal(weights(better.run), weights(worse.run))
    better.save_checkpoint(tmp_path / "copy")
    worse.load_checkpoint(tmp_path / "copy")
    assert torch.equal(weights(better.run), weights(worse.run))
    for trial in trials:
        trial.config = {"lr": 8e-4, "ent_coef": 0.02}
        type(trial).iteration = 1
        assert trial.step()["step"] == 512
    ours, theirs = [list(map(untimed, rows(trial.run))) for trial in trials]
    assert ours[:2] == theirs[:2] and ours[2] != theirs[2]  # the same past, other games since
    assert [float(row["train/lr"]) for row in theirs] == [1e-3, 1e-3, 8e-4, 8e-4]
    flags = json.loads((worse.run / "config.json").read_text())["args"]
    assert flags["seed"] == args.seed + 1 and flags["ent_coef"] == [0.02]

    table = "step,episode/return,episode/count\n10,100,5\n20,1,3\n30,,0\n40,5,1\n"
    (tmp_path / "metrics.csv").write_text(table)
    assert pbt.mean_return(tmp_path, 10) == 2.0 and pbt.mean_return(tmp_path, 40) == -np.inf


@pytest.mark.slow
def test_pbt_exploits_and_explores(tmp_path):
    """As typed, by Ray. Hardly learning, trials of two seeds end with equal weights only if one copied the other."""
    command = [sys.executable, ROOT / "benchmark" / "variants" / "pbt.py", "ppo_procgen", tmp_path / "pbt"]
    command += "--population 2 --slices 2 --slice-steps 1024 --lr 1e-9 1e-8 --".split()
    subprocess.run([*command, *TINY], check=True, capture_output=True, timeout=1800)
    (line,) = (tmp_path / "pbt" / "tune" / "pbt_global.txt").read_text().splitlines()
    worse, better, _, _, before, after = json.loads(line)
    runs = [tmp_path / "pbt" / f"trial_{name.split('_')[0]}" for name in (worse, better)]
    assert (weights(runs[0]) - weights(runs[1])).abs().max() < 1e-5
    copied, own = [list(map(untimed, rows(run))) for run in runs]
    assert copied[:2] == own[:2] and copied[2] != own[2] and len(copied) == 4
    assert after["lr"] != before["lr"] and after["ent_coef"] != before["ent_coef"]
    assert [float(row["train/lr"]) for row in copied[1:3]] == pytest.approx([before["lr"], after["lr"]], rel=1e-5)
    assert float(own[2]["train/lr"]) == pytest.approx(before["lr"], rel=1e-5)


def test_pbt_refuses_in_one_line(tmp_path, capsys):
    import pbt

    assert pbt.main(["ppo_procgen", str(tmp_path / "a"), "--slice-steps", "100", "--", *TINY]) == 2
    assert pbt.main(["ppo_procgen", str(tmp_path), "--slice-steps", "512", "--", *TINY]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "--total-timesteps 100" in errors[0] and "exists" in errors[1]
    assert not list(tmp_path.iterdir())


def test_hub_card_has_the_runs_figures(tmp_path, monkeypatch, capsys):
    import hub

    run, folder = tmp_path / "run", tmp_path / "run-hub"
    run.mkdir()
    arguments = [str(run), "user/name", "--dry-run"]
    assert hub.main(arguments) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and "eval.json" in errors[0] and not folder.exists()

    flags = vars(importlib.import_module("appo_atari").Args()) | {"env_id": "Pong", "run_dir": "x"}
    flags |= {"vtrace": True, "anneal_lr": False, "lr": [0, 5e-4, 1e6, 1e-4]}
    config = {"script": "appo_atari", "args": flags, "git": "abc123", "torch": "2.13.0", "cpu": "EPYC", "gpu": None}
    (run / "config.json").write_text(json.dumps(config | {"ranks": 1}))
    scores = {"mean": 16.561, "stderr": 2.567, "returns": [14.0, 19.122], "lengths": [9, 9]}
    (run / "eval.json").write_text(json.dumps({"step": 499712, "splits": {"game": scores}}))
    (run / "metrics.csv").write_text("step\n499712\n")
    torch.save({"step": 499712}, run / "checkpoint.pt")
    (run / "film.mp4").write_text("film")
    assert hub.main(arguments) == 0
    card = (folder / "README.md").read_text()
    metadata = json.loads(card.split("---\n")[1])
    (metric,) = metadata["model-index"][0]["results"][0]["metrics"]
    assert metric["value"] == "16.56 +/- 2.57" and "| game | 16.56 +/- 2.57 | 2 |" in card
    for part in ("appo_atari.py on Pong", "499,712", "abc123", "torch 2.13.0", "numpy", "EPYC", "(replay.mp4)"):
        assert part in card
    command = "    python appo_atari.py --env-id Pong --lr 0 0.0005 1000000.0 0.0001 --no-anneal-lr --vtrace\n"
    assert command in card
    files = ["README.md", "checkpoint.pt", "config.json", "eval.json", "metrics.csv", "replay.mp4"]
    assert sorted(path.name for path in folder.iterdir()) == files

    assert "huggingface_hub" not in sys.modules  # the dry run did not need it
    sent = []
    api = types.SimpleNamespace(
        create_repo=lambda name, exist_ok: types.SimpleNamespace(repo_id=name),
        upload_folder=lambda repo_id, folder_path: sent.append((repo_id, folder_path)),
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=lambda: api))
    assert hub.main(arguments[:2]) == 0 and sent == [("user/name", folder)]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # not installed
    capsys.readouterr()
    assert hub.main(arguments[:2]) == 2 and capsys.readouterr().err.count("\n") == 1

    torch.save({"step": 500000}, run / "checkpoint.pt")  # went on after its evaluation
    assert hub.main(arguments) == 2 and "checkpoint.pt of 500000" in capsys.readouterr().err
