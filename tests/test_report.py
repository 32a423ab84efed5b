"""benchmark/report.py: the tables agree with the results, and the aggregates with their formulas."""

import itertools
import json

import numpy as np
import pandas as pd
import pytest
import report
import run

from conftest import ROOT

RUNS = ("run0", "run1", "run2")
CURVE = ((4_000_000, 1.0, 2), (7_996_800, 3.0, 1))


def jobs_of(suite, name):
    return [job for job in run.SUITES[suite] if name in job.name]


def write(results, name, mean, suite="gpu", steps=7_996_800, error=None, curve=CURVE, returns=None, **more):
    (job,) = jobs_of(suite, name)
    found = dict(command=" ".join(job.command), status="failed" if error else "done", error=error, steps=steps)
    found |= dict(gpu=None, cpu="CPU", cores=2, train_seconds=5400.0, git="abc", seed=int(name[-1])) | more
    split = dict(returns=returns or [mean], mean=mean, stderr=0.5)
    found["eval"] = None if error else dict(splits=dict(test=split))
    path = results / suite / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    rows = "".join(f"{step},{value},{games}\n" for step, value, games in curve)
    path.with_suffix(".csv").write_text("step,episode/return,episode/count\n" + rows)


def write_seed(results, seed, mean, **more):
    write(results, f"ppo_procgen/starpilot/seed{seed}", mean, "cpu", 61_440, **more)


def rows(text, start):
    return [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith(f"| {start}")]


def starpilot(results):
    """The row of the seeds of `write_seed`."""
    (row,) = rows("\n".join(report.finished(report.read_rows(results))), "cpu, `ppo_procgen/starpilot` (test)")
    return row


def test_committed_tables_are_generated():
    """The committed tables are what the committed results generate."""
    assert report.main(["--check"]) == 0


def test_folder_of_results(tmp_path, capsys):
    """One seed says so, a failure has its error, a job without a result has no row."""
    write(tmp_path, "ppo_procgen/bigfish/seed1", 12.0)
    write(tmp_path, "ppo_procgen/coinrun/seed1", 0.0, error="Traceback\nppo_procgen.py: no memory | left")
    before = (ROOT / "benchmark" / "README.md").read_text()
    assert report.main(["--results", str(tmp_path)]) == 0
    assert (ROOT / "benchmark" / "README.md").read_text() == before
    text = (tmp_path / "README.md").read_text()
    (bigfish,), (coinrun,) = (rows(text, f"gpu, `ppo_procgen/{game}`") for game in ("bigfish", "coinrun"))
    assert bigfish[:4] == ["gpu, `ppo_procgen/bigfish` (test)", "7,996,800", "1 seed", "12.00 (± 0.50 over episodes)"]
    assert bigfish[5].startswith("10.33 ± 0.48, OpenAI's PPO (") and "; 26.28, the competition entry (" in bigfish[5]
    assert bigfish[6] == "-7.33, -14.28" and "starpilot" not in text  # of training, 3.0, and of the evaluation
    assert coinrun[2:4] == ["0 seeds, 1 failed", "failed: ppo_procgen.py: no memory / left"]
    with pytest.raises(SystemExit):
        report.main(["--results", str(tmp_path / "nowhere")])
    assert "no such folder" in capsys.readouterr().err


def test_sixteen_games(tmp_path):
    """z and normalized returns by hand: of means of 100 episodes, over the updates of the last tenth, of each run."""
    # At 916,000 the last 100 episodes have a mean of 0.6 * 6 + 0.4 * 11 = 8.
    curve = ((890_000, 11.0, 40), (916_000, 6.0, 60), (999_424, 8.4, 100))
    write(tmp_path, "ppo_procgen-openai/starpilot/seed1", 1.0, "two_cores", 999_424, curve=curve)
    write(tmp_path, "ppo_procgen-openai/starpilot/seed2", 1.0, "two_cores", 999_424, curve=((999_424, 7.8, 3),))
    write(tmp_path, "ppo_procgen-openai/coinrun/seed1", 1.0, "procgen16_1m", 999_424, curve=((999_424, 7.5, 3),))
    text = "\n".join(report.sixteen_table(report.read_rows(tmp_path)))
    (row,) = rows(text, "starpilot")
    published, deviation = 8.0605, 0.2260 * 3**0.5
    assert row == ["starpilot", "2", "8.20, 7.80", "8.06 (0.39)", f"{(8.0 - published) / deviation:+.1f}"]
    logs = np.genfromtxt(report.REFERENCE / "procgen16_1m.csv", delimiter=",", dtype=None, names=True, encoding="utf-8")
    # The means of 100 episodes at the three steps are 11, 8 and 8.4.
    for part, first, starpilot in (("last tenth", 900_000, 8.0), ("all updates", 0, (27.4 / 3 + 7.8) / 2)):
        runs = {}
        for game, low, high in (("starpilot", 2.5, 64), ("coinrun", 5, 10)):
            part_of_log = logs[(logs["env"] == game) & (logs["step"] > first)]
            runs[game] = [(part_of_log[k].mean() - low) / (high - low) for k in RUNS]
        ours = ((starpilot - 2.5) / 61.5 + (7.5 - 5) / 5) / 2
        theirs = np.mean(list(runs.values()))
        spread = np.sqrt(np.var(runs["starpilot"], ddof=1) + np.var(runs["coinrun"], ddof=1)) / 2
        (row,) = rows(text, f"**mean normalized return of 2 games, {part}")
        assert row[2:] == [f"{ours:.3f}", f"{theirs:.3f} ({spread:.3f})", f"{(ours - theirs) / spread:+.1f}"]
        (row,) = rows(text, f"**interquartile mean, {part}")
        middle = sorted(sum(runs.values(), []))[1:-1]  # of six runs a quarter, rounded down, is one
        assert row[3].startswith(f"{np.mean(middle):.3f} [") and "[" not in row[2]  # coinrun has one seed


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


def test_logs_of_sixteen_games():
    """The curves of OpenAI's three runs have the last tenth and the standard error that the tables use."""
    found = report.sixteen(report.read_rows(report.RESULTS))
    theirs = found[found["who"] == "OpenAI"]
    assert theirs.groupby(["game", "run"])["step"].agg(["size", "max"]).eq([61, report.ONE_MILLION]).all(axis=None)
    for game, runs in report.means_after(0.9, found, "score")["OpenAI"].items():
        point = report.points_of(game, "all_levels_PPO").set_index("step").loc[report.ONE_MILLION]
        assert runs.mean() == pytest.approx(point["last_tenth"], abs=1e-4)
        assert runs.std(ddof=1) / 3**0.5 == pytest.approx(point["stderr"], abs=2e-4)


def test_statistics_of_updates(tmp_path):
    """Ratios to OpenAI's mean by hand, the value loss halved; a run is outside beyond 4.97 standard deviations."""
    entropies = [2.56377, 2.56829, 2.57586]  # of bigfish, in reference/procgen16_1m_statistics.csv
    value_losses = [0.151545, 0.137697, 0.14914]
    mean, deviation = np.mean(entropies), np.std(entropies, ddof=1)
    write(tmp_path, "ppo_procgen-openai/bigfish/seed1", 1.0, "procgen16_1m", 999_424)
    path = tmp_path / "procgen16_1m/ppo_procgen-openai/bigfish/seed1.csv"
    for z, outside in ((4.96, "0"), (-4.96, "0"), (4.98, "1"), (-4.98, "1")):
        ours = dict.fromkeys(report.STATISTICS, 1.0) | {"loss/entropy": mean + z * deviation}
        table = [["step", "episode/return", "episode/count", *ours]]
        for value_loss in (0.2, 0.4):  # of two updates
            ours["loss/value"] = value_loss
            table.append([1, 2, 3, *ours.values()])
        path.write_text("".join(",".join(map(str, row)) + "\n" for row in table))
        text = "\n".join(report.statistics_table(report.read_rows(tmp_path)))
        (entropy,), (value,) = rows(text, "`loss/entropy`"), rows(text, "`loss/value`")
        ratio = f"{ours['loss/entropy'] / mean:.2f}"
        assert entropy == ["`loss/entropy`", ratio, f"{ratio} to {ratio}", outside]
        assert value[1] == f"{0.15 / np.mean(value_losses):.2f}"


def test_line_numbers_follow_the_code(monkeypatch, tmp_path):
    """A link gets the number of the line with its code; code that is gone or not unique is an error."""
    (tmp_path / "a.py").write_text("x = 1\ny = 2\ny = 2\nz = 3\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert report.relinked("see [`z = 3`](../a.py#L1).") == "see [`z = 3`](../a.py#L4)."
    for code in ("gone", "y = 2"):
        with pytest.raises(ValueError, match=code):
            report.relinked(f"[`{code}`](../a.py#L1)")


def test_pictures(tmp_path):
    """Each picture is drawn; without a date, so that equal results make equal files."""
    report.draw(report.read_rows(report.RESULTS), tmp_path)
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert files.keys() == {f"{name}.svg" for name in (*report.SCRIPTS, "procgen16")}
    assert not any("date>" in text for text in files.values())


def test_picture_has_all_settings(tmp_path):
    """Six settings of a game are six lines of different colors; a game of procgen16.svg alone has no panel."""
    settings = ["norm-reward", "discounts", "constant-lr", "input"]
    found = [("two_cores", "openai"), ("two_cores", "narrow-1m"), *(("fruitbot_parts", name) for name in settings)]
    curve = ((500_000, 1, 3), (999_424, 2, 3))
    for suite, setting in found:
        write(tmp_path, f"ppo_procgen-{setting}/fruitbot/seed1", 1.0, suite, 999_424, curve=curve)
    write(tmp_path, "ppo_procgen-openai/heist/seed1", 1.0, "procgen16_1m", 999_424, curve=curve)
    figure = report.draw_script("ppo_procgen", report.read_rows(tmp_path))
    (panel,) = figure.axes
    ours = [line for line in panel.lines if line.get_linestyle() != "None"]
    assert [line.get_label() for line in ours] == ["openai", "narrow-1m", *settings]
    assert len({line.get_color() for line in ours}) == 6
    report.pyplot.close(figure)


def test_damaged_files_are_named(tmp_path, capsys):
    """A half JSON or one of no object is named and left out, and the rest is reported."""
    write(tmp_path, "ppo_procgen/bigfish/seed1", 12.0)
    write(tmp_path, "ppo_procgen/starpilot/seed1", 12.0)
    damaged = tmp_path / "gpu/ppo_procgen/starpilot/seed1.json"
    for content in ('{"command": "pyth', "null"):
        damaged.write_text(content)
        assert report.main(["--results", str(tmp_path)]) == 0
        assert "12.00" in (tmp_path / "README.md").read_text()
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{damaged}: unreadable, ignored")


def test_export_can_be_loaded_in_one_line(tmp_path):
    """One row per script, game, seed, step and metric; empty cells have none."""
    write(tmp_path, "ppo_procgen/bigfish/seed1", 12.0, curve=((64, "", 0), (128, 3.5, 2)))
    path = tmp_path / "gpu/ppo_procgen/bigfish/seed1.csv"
    path.write_text(path.read_text().replace("step,", "iteration,step,").replace("\n", "\n1,").removesuffix("1,"))
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
    for folder, scores in ((old, [1.0, 2.0, 6.0]), (new, [4.0, 5.0, 9.0])):
        for seed, score in enumerate(scores, 1):
            write_seed(folder, seed, score)
    for folder, returns in ((old, [1.0, 3.0]), (new, [2.0, 4.0])):
        write(folder, "ppo_procgen/bigfish/seed1", 0.0, returns=returns)
        write(folder, "ppo_procgen/coinrun/seed1", 5.0)  # equal: no row
    assert report.main(["--compare", str(old), str(new)]) == 0
    bigfish, starpilot = sorted(capsys.readouterr().out.splitlines()[2:], reverse=True)
    width = 2.776445 * (7 + 7) ** 0.5 / 3**0.5  # Student's t with four degrees of freedom; variances of 7
    limits = f"{3 - width:+.2f} to {3 + width:+.2f}"
    assert starpilot == f"| `cpu/ppo_procgen/starpilot` (test) | 3.00 | 6.00 | +3.00 ({limits}) | 3, 3 seeds |"
    width = 4.302653 * 2**0.5
    limits = f"{1 - width:+.2f} to {1 + width:+.2f}"
    assert bigfish == f"| `gpu/ppo_procgen/bigfish` (test) | 2.00 | 3.00 | +1.00 ({limits}) | 2, 2 episodes |"
    assert report.main(["--compare", "HEAD", str(ROOT / "benchmark" / "results")]) == 0
    assert pytest.raises(SystemExit, report.main, ["--compare", "nowhere", str(new)]).value.code == 2
    assert "nowhere: neither a folder nor a commit with results" in capsys.readouterr().err


def test_seeds(tmp_path):
    """Mean and standard error over three seeds, the values of two; all revisions and machines."""
    scores, hashes = [1.0, 2.0, 6.0], ["1" * 40, "1" * 40, "1" * 40 + "-dirty"]
    for seed, (score, git) in enumerate(zip(scores, hashes, strict=True), 1):
        curve = ((100, 0.0, 5), (61_000, score, 1), (61_440, score + 1, 3))  # three of four episodes have one more
        before = dict(git_before=["2" * 40], machines_before={"GPU": 1024}) if seed == 1 else {}
        write_seed(tmp_path, seed, score, curve=curve, git=git, cpu="Other" if seed == 2 else "CPU", **before)
    error = np.std(scores, ddof=1) / 3**0.5
    row = starpilot(tmp_path)
    assert row[2:4] == ["3 seeds", f"3.00 ± {error:.2f}"]
    assert row[4:7] == [f"3.75 ± {error:.2f} (12 episodes)", "none at these steps", "-"]
    assert row[7] == "GPU up to step 1,024, then CPU, 2 cores; Other, 2 cores; CPU, 2 cores"
    assert row[8] == "2222222, 1111111, 1111111-dirty"
    write_seed(tmp_path, 1, 1.0)
    write_seed(tmp_path, 2, 2.0, machines_before={"GPU": 61_440})
    write_seed(tmp_path, 3, 6.0, train_seconds=1800.0)
    (row,) = report.read_rows(tmp_path)  # seeds 1 to 3: 1.5, 1.5 and 0.5 hours
    assert report.summary(row, "test")["time"] == "1.0 h on CPU, 2 cores; 1.5 h on GPU, evaluated on CPU, 2 cores"
    for seed, score in ((1, 1.0), (2, 2.0)):
        write_seed(tmp_path, seed, score, curve=((100, 0.0, 5), (61_000, score, 1), (61_440, score + 1, 3)))
    write_seed(tmp_path, 3, 99.0, error="gone", curve=((61_440, 99.0, 1),))
    row = starpilot(tmp_path)  # nothing of a failed seed
    assert row[2:4] == ["2 seeds, 1 failed", "1.00, 2.00"] and row[4] == "1.75, 2.75 (8 episodes)"
    write_seed(tmp_path, 3, 99.0, command="python ppo_procgen.py --env-id starpilot --lr 1e-1")
    assert starpilot(tmp_path)[2:4] == ["2 seeds", "1.00, 2.00"]  # nor of one with earlier flags


def test_speed_has_a_column_for_each_machine(tmp_path, monkeypatch):
    """Medians and ranges by hand; a row that a machine lacks; no other comparison."""
    for name, beside, hardware, ratios in (
        ("a", "cleanrl", "CPU (AVX2), 2 cores, no GPU, torch 2", [1.0, 4.0, 2.0]),
        ("b", "cleanrl", "CPU, 16 cores, GPU X, torch 2", [3.0, 5.0]),
        ("c", "fp32", "CPU, 2 cores, no GPU, torch 2", [9.0]),
    ):
        figures = [dict(sps=10.0, peak_gib=1.0) for _ in ratios]
        found = dict(command=f"python benchmark/speed.py appo_atari -- --seed {name}", git="1" * 40, hardware=hardware)
        found |= dict(results=dict(script=figures) | {beside: figures}, wall_ratios=ratios, cpu_ratios=ratios)
        (tmp_path / "speed").mkdir(exist_ok=True)
        (tmp_path / "speed" / f"{name}.json").write_text(json.dumps(found))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    head, _, first, second = report.speed_headlines([])
    assert head == "| script and flags | 2 cores | GPU X, 16 cores |"
    assert first == "| `appo_atari --seed a` | **2.00** (1.00 to 4.00) | - |"
    assert second == "| `appo_atari --seed b` | - | **4.00** (3.00 to 5.00) |"
    text = "\n".join(report.speed_table([]))
    assert "| CPU (AVX2), 2 cores | 1111111 |" in text and "| CPU, 16 cores, GPU X | 1111111 |" in text


def test_smooth():
    """Each window has its last step and the mean over its episodes."""
    table = pd.DataFrame([(10, 1.0, 3), (90, 5.0, 1), (110, 7.0, 2)], columns=["step", "score", "count"])
    assert report.smooth(table, 1.1).to_dict() == {90: 2.0, 110: 7.0}


def test_published_numbers():
    """The nearest step within 10 %, its last tenth and standard error; four frames are a step; splits differ."""
    bigfish, montezuma = (jobs_of("gpu", f"{name}/seed1")[0] for name in ("bigfish", "snd/MontezumaRevenge"))
    points = report.points_of("bigfish", "all_levels_PPO").set_index("step").loc[7_995_392]
    (first, entry) = report.published(bigfish, "test", 8_400_000)
    assert (first["score"], first["error"]) == (points["last_tenth"], points["stderr"])
    assert first["score"] != points["score"] and np.isnan(entry["error"])
    assert report.published(bigfish, "test", 6_000_000) == []
    assert report.published(montezuma, "game", 128_000_000)[0]["score"] == pytest.approx(11_822, abs=1)
    (openai,) = jobs_of("gpu", "ppo_procgen-openai")
    for split, name in (("train", "train200_PPO"), ("test", "test_full_PPO")):
        (found,) = report.published(openai, split, 25_000_000)
        points = report.points_of("coinrun", name).set_index("step")
        assert found["score"] == points.loc[25_001_984, "last_tenth"]
    (one_million,) = jobs_of("two_cores", "ppo_procgen-openai/starpilot/seed1")  # --num-levels 0: all of them
    assert report.published(one_million, "test", 1_000_000)[0]["how"] == "in training, 3 runs"
