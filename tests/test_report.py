"""benchmark/report.py: the tables agree with the results, and the aggregates with their formulas."""

import itertools
import json
import re

import numpy as np
import pandas as pd
import pytest
import report
import run
import scipy.stats
from matplotlib.colors import to_hex

from conftest import ROOT

CURVE = ((4_000_000, 1.0, 2), (7_996_800, 3.0, 1))


def write(results, name, mean, suite="gpu", steps=7_996_800, error=None, curve=CURVE, returns=None, **more):
    (job,) = [job for job in run.SUITES[suite] if job.name == name]
    found = dict(command=" ".join(job.command), status="failed" if error else "done", error=error, steps=steps)
    found |= dict(gpu=None, cpu="CPU", cores=2, train_seconds=5400.0, git="abc", seed=int(name[-1])) | more
    split = dict(returns=returns or [mean], mean=mean, stderr=0.5)
    found["eval"] = None if error else dict(splits=dict(test=split))
    path = results / suite / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    rows = "".join(f"{step},{value},{games}\n" for step, value, games in curve)
    path.with_suffix(".csv").write_text("step,episode/return,episode/count\n" + rows)


def rows(text, start):
    return [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith(f"| {start}")]


def test_committed_tables_are_generated():
    """The committed tables are what the committed results generate."""
    assert report.main(["--check"]) == 0


def test_folder_of_results(tmp_path, capsys):
    """One seed says so, a failure has its error. Results of other flags do not count; an unreadable one is named."""
    write(tmp_path, "ppo_procgen/bigfish/seed1", 12.0)
    write(tmp_path, "ppo_procgen/starpilot/seed1", 12.0)
    damaged = tmp_path / "gpu/ppo_procgen/starpilot/seed1.json"
    damaged.write_text(damaged.read_text()[:100])
    write(tmp_path, "ppo_procgen/coinrun/seed1", 0.0, error="Traceback\nppo_procgen.py: no memory | left")
    write(tmp_path, "ppo_procgen/miner/seed1", 1.0, command="python ppo_procgen.py --env-id miner --lr 1e-1")
    assert report.main(["--results", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{damaged}: unreadable, ignored")
    text = (tmp_path / "README.md").read_text()
    (bigfish,), (coinrun,) = (rows(text, f"gpu, `ppo_procgen/{game}`") for game in ("bigfish", "coinrun"))
    assert bigfish[:4] == ["gpu, `ppo_procgen/bigfish` (test)", "7,996,800", "1 seed", "12.00 (± 0.50 over episodes)"]
    assert bigfish[5].startswith("10.33 ± 0.48, OpenAI's PPO (") and "; 26.28, the competition entry (" in bigfish[5]
    assert text.count("\n|") == 4
    assert coinrun[2:4] == ["0 seeds, 1 failed", "failed: ppo_procgen.py: no memory / left"]
    assert pytest.raises(SystemExit, report.main, ["--results", str(tmp_path / "nowhere")]).value.code == 2


def test_sixteen_games(tmp_path):
    """Returns, their test and interquartile means by hand: of means of 100 episodes, over updates, of each run."""
    # At 916,000 the last 100 episodes have a mean of 0.6 * 6 + 0.4 * 11 = 8.
    curve = ((890_000, 11.0, 40), (916_000, 6.0, 60), (999_424, 8.4, 100))
    write(tmp_path, "ppo_procgen-openai/starpilot/seed1", 1.0, "two_cores", 999_424, curve=curve)
    write(tmp_path, "ppo_procgen-openai/starpilot/seed2", 1.0, "two_cores", 999_424, curve=((999_424, 7.8, 3),))
    write(tmp_path, "ppo_procgen-openai/coinrun/seed1", 1.0, "procgen16_1m", 999_424, curve=((999_424, 7.5, 3),))
    text = "\n".join(report.sixteen_table(report.read_rows(tmp_path)))
    logs = pd.read_csv(report.REFERENCE / "procgen16_1m.csv")
    # The means of 100 episodes at the three steps are 11, 8 and 8.4.
    of_all = (27.4 / 3 + 7.8) / 2
    for part, first, starpilot in (
        ("updates 11 to 61", 170_000, of_all),
        ("last tenth", 900_000, 8.0),
        ("all updates", 0, of_all),
    ):
        runs = {}
        for game, low, high in (("starpilot", 2.5, 64), ("coinrun", 5, 10)):
            part_of_log = logs[(logs["env"] == game) & (logs["step"] > first)]
            runs[game] = [(part_of_log[name].mean() - low) / (high - low) for name in ("run0", "run1", "run2")]
        ours = ((starpilot - 2.5) / 61.5 + (7.5 - 5) / 5) / 2
        theirs = np.mean(list(runs.values()))
        spread = np.sqrt(np.var(runs["starpilot"], ddof=1) + np.var(runs["coinrun"], ddof=1)) / 2
        (row,) = rows(text, f"mean of 2 games, {part}")
        # Ours are two runs on starpilot, one on coinrun, OpenAI's three with two degrees of freedom each
        parts = [np.var(runs["starpilot"], ddof=1) * (1 / 3 + 1 / 2), np.var(runs["coinrun"], ddof=1) * (1 / 3 + 1)]
        t = 2 * (ours - theirs) / sum(parts) ** 0.5
        freedom = sum(parts) ** 2 / ((parts[0] ** 2 + parts[1] ** 2) / 2)
        p = 2 * scipy.stats.t.cdf(-abs(t), freedom)
        assert row[1:] == [f"{ours:.3f}", f"{theirs:.3f} ({spread:.3f})", f"{p:.2f}"]
        if first == 170_000:
            continue
        (row,) = rows(text, f"interquartile mean, {part}")
        middle = sorted(sum(runs.values(), []))[1:-1]  # of six runs a quarter, rounded down, is one
        assert row[2].startswith(f"{np.mean(middle):.3f} [") and "[" not in row[1]  # coinrun has one seed


def test_other_seeds_and_epsilon(tmp_path):
    """Normalized returns of updates 11 to 40 alone; a mean is of the same games in all columns, or it is left out."""
    curve = ((163_840, 9.9, 100), (180_224, 5.0, 100), (655_360, 6.0, 100), (671_744, 9.9, 100))
    write(tmp_path, "ppo_procgen-openai/jumper/seed1", 1.0, "procgen16_1m", 999_424, curve=curve)
    write(tmp_path, "ppo_procgen-openai-660k/jumper/seed11", 1.0, "adam_eps", 655_360, curve=curve[:3])
    write(tmp_path, "ppo_procgen-openai/leaper/seed1", 1.0, "procgen16_1m", 999_424, curve=curve)
    write(tmp_path, "ppo_procgen-openai-660k/leaper/seed21", 1.0, "adam_eps", 655_360, curve=curve[:3])
    write(tmp_path, "procgen_tf_adam-openai-660k/leaper/seed21", 1.0, "adam_eps", 655_360, curve=curve[1:2])
    table = "\n".join(report.epsilon_table(report.read_rows(tmp_path)))
    jumper, leaper, epsilon = (5.5 - 1) / 9, (5.5 - 1.5) / 8.5, f"{(5 - 1.5) / 8.5:.3f}"
    assert rows(table, "jumper")[0][2:] == [*2 * [f"{jumper:.3f}"], ""]
    assert rows(table, "leaper")[0][2:] == [*2 * [f"{leaper:.3f}"], epsilon]
    assert rows(table, "mean of 2 games")[0][2:] == [*2 * [f"{(jumper + leaper) / 2:.3f}"], ""]
    assert rows(table, "mean of leaper")[0][2:] == [*2 * [f"{leaper:.3f}"], epsilon]


def test_interquartile_mean_and_its_interval():
    """Agarwal et al. 2021: mean of the middle half of all runs; percentiles over runs drawn within each game."""
    games = [np.array([0.0, 8.0]), np.array([1.0, 3.0]), np.array([5.0, 5.5])]
    assert report.interquartile_mean(*games) == np.mean([1.0, 3.0, 5.0, 5.5])
    draws = [[runs[list(drawn)] for drawn in itertools.product((0, 1), repeat=2)] for runs in games]
    means = [np.mean(np.sort(np.concatenate(one))[1:-1]) for one in itertools.product(*draws)]  # all 64
    limits = report.interval(games)
    for limit, level in ((limits.low, 0.025), (limits.high, 0.975)):
        assert np.mean(np.array(means) < limit - 1e-9) <= level + 0.02
        assert np.mean(np.array(means) <= limit + 1e-9) >= level - 0.02
    curves = [np.stack([runs, runs + 1]) for runs in games]  # two steps
    assert np.allclose(report.interval(curves).high, [limits.high, limits.high + 1])
    assert report.interval([*games, np.array([1.0])]) is None


def test_pictures(tmp_path):
    """Each picture is drawn; without a date, so that equal results make equal files."""
    report.draw(report.read_rows(report.RESULTS), tmp_path)
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert files.keys() == {f"{name}.svg" for name in (*report.SCRIPTS, "procgen16")}
    assert not any("date>" in text for text in files.values())


def test_every_setting_has_its_own_color():
    """In all panels of ppo_procgen.svg; settings that differ in the number of steps share one of the ten colors."""
    panels = report.draw_script("ppo_procgen", report.read_rows(report.RESULTS)).axes
    curves = [curve for panel in panels for curve in panel.lines if curve.get_linestyle() == "-"]
    labels = {curve.get_label(): to_hex(curve.get_color()) for curve in curves if curve.get_label()[0] != "_"}
    colors = {(re.sub(r"-\d+[mk]", "", label), color) for label, color in labels.items()}
    assert "openai-660k" not in labels  # those runs are in procgen16.svg
    assert len(labels) > len(colors) == len({color for _, color in colors}) == len({flags for flags, _ in colors})


def test_export_can_be_loaded_in_one_line(tmp_path):
    """One row per script, game, seed, step and metric; empty cells have none."""
    write(tmp_path, "ppo_procgen/bigfish/seed1", 12.0, curve=((64, "", 0), (128, 3.5, 2)))
    expected = [["episode/return", 128, 3.5], ["episode/count", 64, 0], ["episode/count", 128, 2]]
    for name, load in (("x.csv", pd.read_csv), ("x.parquet", pd.read_parquet)):
        assert report.main(["--results", str(tmp_path), "--export", str(tmp_path / name)]) == 0
        table = load(tmp_path / name)
        assert list(table) == ["script", "game", "seed", "step", "metric", "value"]
        assert table[["metric", "step", "value"]].to_numpy().tolist() == expected
        assert (table[["script", "game", "seed"]] == ["gpu/ppo_procgen", "bigfish", 1]).all(axis=None)


def test_compare(tmp_path, capsys):
    """B minus A with Welch's interval, over seeds or, if there is one, over episodes; a commit can be A or B."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, scores, returns in ((old, [1.0, 2.0, 6.0], [1.0, 3.0]), (new, [4.0, 5.0, 9.0], [2.0, 4.0])):
        for seed, score in enumerate(scores, 1):
            write(folder, f"ppo_procgen/starpilot/seed{seed}", score, "cpu", 61_440)
        write(folder, "ppo_procgen/bigfish/seed1", 0.0, returns=returns)
        write(folder, "ppo_procgen/coinrun/seed1", 5.0)  # equal: no row
    assert report.main(["--compare", str(old), str(new)]) == 0
    starpilot, bigfish = capsys.readouterr().out.splitlines()[2:]
    # Student's t with four and two degrees of freedom; variances of 7 and 2.
    for row, start, difference, width in (
        (starpilot, "cpu/ppo_procgen/starpilot` (test) | 3.00 | 6.00", 3, 2.776445 * (7 / 3 + 7 / 3) ** 0.5),
        (bigfish, "gpu/ppo_procgen/bigfish` (test) | 2.00 | 3.00", 1, 4.302653 * (2 / 2 + 2 / 2) ** 0.5),
    ):
        limits = f"({difference - width:+.2f} to {difference + width:+.2f})"
        assert row.startswith(f"| `{start} | {difference:+.2f} {limits} | ")
    assert starpilot.endswith("| 3, 3 seeds |") and bigfish.endswith("| 2, 2 episodes |")
    assert report.main(["--compare", "HEAD", str(ROOT / "benchmark" / "results")]) == 0
    assert pytest.raises(SystemExit, report.main, ["--compare", "nowhere", str(new)]).value.code == 2
