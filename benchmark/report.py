"""Tables, pictures and line numbers of the documentation, from the committed results.

    python benchmark/report.py                   # README.md, docs/*.md, docs/images, benchmark/results/README.md
    python benchmark/report.py --results FOLDER  # of run.py --results FOLDER: writes FOLDER/README.md
    python benchmark/report.py --check           # write nothing; exit code 1 if a text is out of date
    python benchmark/report.py --compare A B     # two folders of results or commits: each row's difference
    python benchmark/report.py --export curves.parquet  # all curves in one table (or curves.csv)

Reads benchmark/results (written by run.py and speed.py) and the published numbers in benchmark/reference. An unreadable
file is named and left out; a failed job is shown with its error.
Published training returns are compared with training returns, published evaluations with evaluations; what is in
benchmark/reference is told in benchmark/README.md.
Links to a line of ours, [`code`](../script.py#L1), get the number of the one line that contains the code.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import scipy.stats
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]
import run as matrix  # noqa: E402

RESULTS, REFERENCE = ROOT / "benchmark" / "results", ROOT / "benchmark" / "reference"
SCRIPTS = ("ppo_procgen", "impala_procgen", "ppo_atari_rnd", "ppo_atari_snd", "appo_atari")
LONG = 400_000  # environment steps; shorter runs are not in the documentation's pages
TRAINING = "in training"  # in published.csv
OTHER = "another network and batch; "


@dataclass
class Row:
    """A game and setting of a suite: its first job, the results of its seeds, and the curves of the finished ones."""

    job: matrix.Job
    done: list[dict] = field(default_factory=list)
    failed: list[dict] = field(default_factory=list)
    curves: dict[int, pd.DataFrame] = field(default_factory=dict)  # by seed

    @property
    def name(self) -> str:
        return str(Path(self.job.name).parent)  # script-setting/game

    @property
    def steps(self) -> int:
        return self.done[0]["steps"] if self.done else 0

    @property
    def splits(self) -> list[str]:
        evaluation = self.done[0]["eval"] if self.done else {"splits": {}}
        return list(evaluation["splits"]) if evaluation else ["not evaluated"]

    def evaluations(self, split: str) -> list[dict]:
        """mean and stderr (over episodes) of each seed."""
        return [one["eval"]["splits"][split] for one in self.done if one["eval"]]


def read_rows(results: Path) -> list[Row]:
    """The rows that have a result; one of earlier flags does not count."""
    rows = {}
    for suite, jobs in matrix.SUITES.items():
        for job in jobs:
            path = results / suite / f"{job.name}.json"
            one = matrix.read_json(path)
            if one.get("command") != " ".join(job.command):
                continue
            row = rows.setdefault((suite, job.variant, job.game), Row(job))
            if one["status"] == "failed":
                row.failed.append(one)
            if one["status"] == "done":
                row.done.append(one)
                if path.with_suffix(".csv").exists():
                    row.curves[job.seed] = pd.read_csv(path.with_suffix(".csv"))
    return list(rows.values())


def episodes(curve: pd.DataFrame) -> pd.DataFrame:
    """The rows in which episodes ended: step, mean return, number of episodes."""
    curve = curve[["step", "episode/return", "episode/count"]].dropna()
    return curve.set_axis(["step", "score", "count"], axis=1).reset_index(drop=True)


def mean_over_episodes(rows: pd.DataFrame) -> float:
    return (rows["score"] * rows["count"]).sum() / rows["count"].sum()


@cache
def reference() -> pd.DataFrame:
    """Published scores: game, series, step (an environment step), score, last_tenth, stderr."""
    procgen = pd.read_csv(REFERENCE / "procgen.csv")
    procgen = procgen.rename(columns={"env": "game", "split": "series", "mean_return": "score"})
    atari = pd.read_csv(REFERENCE / "atari.csv")
    atari = atari.rename(columns={"env": "game", "algo": "series", "frames": "step"})
    atari["step"] //= 4
    return pd.concat([procgen, atari], ignore_index=True)


def points_of(game: str, series: str) -> pd.DataFrame:
    points = reference()
    return points[(points["game"] == game) & (points["series"] == series)].sort_values("step")


def sources(job: matrix.Job, split: str) -> list:
    """(series, what it is, how its protocol differs) to compare a job's split with."""
    levels = re.search(r"--num-levels ([1-9]\d*)", job.flags)
    table = pd.read_csv(REFERENCE / "published.csv", dtype=str, keep_default_na=False)
    key = (job.script, levels[1] if levels else "", split)
    found = table[(table[["script", "levels", "split"]] == key).all(axis=1)]
    if job.variant.endswith(":openai"):  # the published network and batch
        found = found.assign(how=found["how"].str.removeprefix(OTHER))
    return found[["series", "what", "how"]].to_numpy().tolist()


def published(job: matrix.Job, split: str, steps: int) -> list[dict]:
    """score, what it is, how its protocol differs, error: published numbers at the nearest step within 10 %.

    Means over the last tenth where there are any. error: the standard error over runs, NaN if not published.
    """
    found = []
    for series, what, how in sources(job, split):
        points = points_of(job.game, series)
        distance = (points["step"] - steps).abs()
        if distance.min() <= 0.1 * steps:
            point = points.loc[distance.idxmin()]
            score = point["score"] if pd.isna(point["last_tenth"]) else point["last_tenth"]
            found.append(dict(score=score, what=what, how=how, error=point["stderr"]))
    return found


def number(scores: list[float], evaluations: list[dict] | None = None, text="{:.2f}".format) -> str:
    """Mean and standard error over seeds; two seeds: both; one: its standard error over episodes."""
    if len(scores) > 2:
        return f"{text(np.mean(scores))} ± {text(scipy.stats.sem(scores))}"
    over_episodes = f" (± {evaluations[0]['stderr']:.2f} over episodes)" if evaluations and len(scores) == 1 else ""
    return (", ".join(map(text, scores)) or "-") + over_episodes


def last_tenth(row: Row) -> tuple[list[float], int]:
    """Mean training return over the last tenth of the steps, of each seed in which episodes ended; all episodes."""
    ends = [episodes(curve).query(f"step > {0.9 * row.steps}") for curve in row.curves.values()]
    return [mean_over_episodes(end) for end in ends if len(end)], int(sum(end["count"].sum() for end in ends))


def machine(one: dict) -> str:
    """The GPU, or the CPU with its number of cores, of a result; the machines of its first steps come first."""
    text = ""
    for name, step in one.get("machines_before", {}).items():
        text += f"{name}, evaluated on " if step == one["steps"] else f"{name} up to step {step:,}, then "
    return text + (one["gpu"] or f"{one['cpu']}, {one['cores']} core" + "s" * (one["cores"] > 1))


def revision(git: str | None) -> str:
    """A commit, shortened, and whether the tree was changed."""
    return (git[:7] + "-dirty" * git.endswith("-dirty")) if git else "-"


def summary(row: Row, split: str) -> dict[str, str]:
    """The columns of a row's tables."""
    evaluations, (means, count) = row.evaluations(split), last_tenth(row)
    scores = [one["mean"] for one in evaluations]
    missing = f", {len(means)} of {len(row.curves)} seeds" * (len(means) < len(row.curves))
    shown = []
    for one in published(row.job, split, row.steps):
        error = "" if pd.isna(one["error"]) else f" ± {one['error']:.2f}"
        shown.append(f"{one['score']:.2f}{error}, {one['what']} ({one['how']})")
    hours = pd.Series([one["train_seconds"] / 3600 for one in row.done], index=map(machine, row.done))
    hours = hours.groupby(level=0, sort=False).mean()
    commits = (git for one in row.done for git in [*one.get("git_before", ()), one["git"]])
    return dict(
        steps=f"{row.steps:,}",
        seeds=str(len(row.done)),
        evaluation=number(scores, evaluations),
        last_tenth=number(means),
        training=f"{number(means)} ({count:,} episodes{missing})" if means else "-",
        published="; ".join(shown) or "none at these steps",
        hardware="; ".join(hours.index),
        time="; ".join((f"{x:.1f} h" if x >= 1 else f"{60 * x:.0f} min") + f" on {name}" for name, x in hours.items()),
        commits=", ".join(dict.fromkeys(map(revision, commits))),
    )


def markdown(head: str, rows: list) -> list[str]:
    """A table; `head` has its columns, separated by " | "."""
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    return [f"| {head} |", "|" + "---|" * len(head.split(" | ")), *lines]


def finished(rows: list[Row]) -> list[str]:
    """All finished and failed rows: for README.md in a folder of results."""
    head = "suite, row | steps | n | evaluation | training, last tenth | published | hardware | commits"
    names = ("evaluation", "training", "published", "hardware", "commits")
    lines = []
    for row in rows:
        done, failed = len(row.done), len(row.failed)
        seeds = f"{done} seed" + "s" * (done != 1) + f", {failed} failed" * bool(failed)
        if failed and not done:
            error = row.failed[0]["error"].splitlines()[-1].replace("|", "/")
            lines.append([f"{row.job.suite}, `{row.name}`", "-", seeds, f"failed: {error}", *["-"] * 4])
        for split in row.splits:
            texts = summary(row, split)
            cells = [f"{row.job.suite}, `{row.name}` ({split})", texts["steps"], seeds]
            lines.append([*cells, *(texts[name] for name in names)])
    return markdown(head, lines)


PAGES = {"snd_breakout": "ppo_atari_snd"}  # the page of a variant's results


def of_script(script: str, rows: list[Row]) -> list[Row]:
    """The finished rows of LONG steps of a script and of its variants."""
    return [row for row in rows if row.steps >= LONG and PAGES.get(row.job.script, row.job.script) == script]


def setting(row: Row, script: str) -> str:
    return row.job.variant.removeprefix(f"{script}:").replace(":", " ")


def results_of(script: str, rows: list[Row]) -> list[str]:
    """A docs page's table, its picture and the commands of its rows."""
    names = ("steps", "seeds", "last_tenth", "evaluation", "published", "time")
    lines, commands = [], {}
    for row in of_script(script, rows):
        commands.setdefault(setting(row, script), " ".join(row.job.command))
        for split in row.splits:
            texts = summary(row, split)
            lines.append([setting(row, script), row.job.game, *(texts[name] for name in names)])
    return [
        f"![Training curves of {script}.py](images/{script}.svg)",
        "",
        *markdown("setting | game | steps | seeds | in training | evaluated | published | time", lines),
        "",
        "In training: mean over the episodes of the last tenth of the steps. Evaluated: 100 episodes.",
        "",
        "```sh",
        *(line for name, command in commands.items() for line in (f"# {name}", command)),
        "```",
    ]


ONE_MILLION = 999_424  # environment steps of OpenAI's 61st update
WHO = ("OpenAI", "ours")


def running_mean(curve: pd.DataFrame, least: int = 100) -> pd.DataFrame:
    """step, score: the mean over the last rows with at least 100 episodes, as in OpenAI's logs."""
    rows = episodes(curve)
    count = np.cumsum([0, *rows["count"]])
    total = np.cumsum([0, *rows["score"] * rows["count"]])
    first = np.maximum(np.searchsorted(count, count[1:] - least, side="right") - 1, 0)
    return pd.DataFrame(dict(step=rows["step"], score=(total[1:] - total[first]) / (count[1:] - count[first])))


def openai_rows(rows: list[Row]) -> list[Row]:
    """Our runs of 1M steps in OpenAI's setting."""
    found = [row for row in rows if row.job.variant == "ppo_procgen:openai"]
    return [row for row in found if row.job.suite in ("two_cores", "procgen16_1m")]


def sixteen(groups: dict[str, list[Row]]) -> pd.DataFrame:
    """game, who (OpenAI or a group), run, step, score, R_min, R_max, normalized: the games of the group "ours"."""
    theirs = pd.read_csv(REFERENCE / "procgen16_1m.csv").rename(columns={"env": "game"})
    tables = [theirs.melt(["game", "step"], var_name="run", value_name="score").assign(who="OpenAI")]
    for who, rows in groups.items():
        for row in rows:
            for seed, curve in row.curves.items():
                tables.append(running_mean(curve).assign(game=row.job.game, run=f"seed{seed}", who=who))
    found = pd.concat(tables)
    found = found[found["game"].isin(found.loc[found["who"] == "ours", "game"])]
    limits = reference().query("series in ('R_min', 'R_max')").pivot(index="game", columns="series", values="score")
    found = found.merge(limits, on="game")
    return found.assign(normalized=(found["score"] - found["R_min"]) / (found["R_max"] - found["R_min"]))


def means_after(share: float, found: pd.DataFrame) -> dict:
    """who -> a list of games, each with the normalized means of its runs after this share of 1M steps."""
    means = found[found["step"] > share * ONE_MILLION].groupby(["who", "game", "run"])["normalized"].mean()
    return {who: [runs.to_numpy() for _, runs in means[who].groupby("game")] for who in WHO}


def interquartile_mean(*games, axis=-1):
    """The mean of the middle half of all runs of all games (Agarwal et al. 2021)."""
    return scipy.stats.trim_mean(np.concatenate(games, axis=axis), 0.25, axis=axis)


def interval(games: list):
    """95 % stratified bootstrap interval of the interquartile mean: runs are drawn within each game.

    games: the normalized scores of each game, with the runs on the last axis. None if a game has only one run.
    """
    if min(np.shape(game)[-1] for game in games) < 2:
        return None
    options = dict(vectorized=True, axis=-1, method="percentile", n_resamples=2000, batch=100, rng=0)
    return scipy.stats.bootstrap(games, interquartile_mean, **options).confidence_interval


def welch(theirs: list, ours: list) -> tuple[float, float]:
    """Welch's t test of the mean over games: the std of OpenAI's mean of one run per game, and p.

    theirs, ours: each game's runs. A game's variance is that of OpenAI's runs, for both.
    """
    variances = np.array([runs.var(ddof=1) for runs in theirs])
    freedom = np.array([len(runs) - 1 for runs in theirs])
    parts = variances * [1 / len(a) + 1 / len(b) for a, b in zip(theirs, ours, strict=True)]
    difference = np.sum([b.mean() - a.mean() for a, b in zip(theirs, ours, strict=True)])
    t = difference / parts.sum() ** 0.5
    p = 2 * scipy.stats.t.sf(abs(t), parts.sum() ** 2 / (parts**2 / freedom).sum())
    return variances.sum() ** 0.5 / len(theirs), p


def sixteen_table(rows: list[Row]) -> list[str]:
    """Normalized returns of all games in 1M steps, with a test: means of `running_mean` over updates."""
    lines, found = [], sixteen(dict(ours=openai_rows(rows)))
    for title, share in (("updates 11 to 61", 10.5 / 61), ("last tenth", 0.9), ("all updates", 0.0)):
        theirs, ours = means_after(share, found).values()
        means = [np.mean([runs.mean() for runs in each]) for each in (theirs, ours)]
        deviation, p = welch(theirs, ours)
        cells = [f"{means[1]:.3f}", f"{means[0]:.3f} ({deviation:.3f})", f"{p:.2f}"]
        lines.append([f"mean of {len(theirs)} games, {title}", *cells])
    for title, share in (("last tenth", 0.9), ("all updates", 0.0)):
        cells = []
        for runs in reversed(means_after(share, found).values()):
            limits = interval(runs)
            bounds = f" [{limits.low:.3f}, {limits.high:.3f}]" if limits else ""
            cells.append(f"{interquartile_mean(*runs):.3f}{bounds}")
        lines.append([f"interquartile mean, {title}", *cells, ""])
    return markdown("normalized return of all games | ours | OpenAI's PPO | p", lines)


def other_seeds(script: str, rows: list[Row]) -> list[Row]:
    """The runs of 0.66M steps in OpenAI's setting by ppo_procgen or procgen_tf_adam."""
    return [row for row in rows if row.job.suite == "adam_eps" and row.job.script == script]


def epsilon_table(rows: list[Row]) -> list[str]:
    """Normalized return of updates 11 to 40 in OpenAI's setting: other seeds, and Adam's epsilon as in TensorFlow."""
    groups = dict(ours=openai_rows(rows))
    groups |= {script: other_seeds(script, rows) for script in ("ppo_procgen", "procgen_tf_adam")}
    found = sixteen(groups).query("170_000 < step < 660_000")
    means = found.groupby(["who", "game", "run"])["normalized"].mean()
    texts = means.map("{:.3f}".format).groupby(["who", "game"]).agg(", ".join).unstack("who", fill_value="")
    texts = texts.reindex(columns=["OpenAI", *groups], fill_value="")
    texts = texts[texts["ppo_procgen"] != ""]
    scores = means.groupby(["who", "game"]).mean().unstack("who").reindex(texts.index, columns=texts.columns)
    lines = [[game, *cells] for game, *cells in texts.itertuples()]
    with_epsilon = scores.dropna()
    for title, part in ((f"{len(scores)} games", scores), (", ".join(with_epsilon.index), with_epsilon)):
        averages = part.mean(skipna=False).map("{:.3f}".format).replace("nan", "")
        lines.append([f"mean of {title}", *averages])
    return markdown("game | OpenAI's runs | seed 1 | other seeds | other seeds, TensorFlow's epsilon", lines)


def speeds() -> list[dict]:
    """The files of results/speed except comparisons of revisions: CleanRL first, then other libraries."""
    found = [matrix.read_json(path) for path in sorted((RESULTS / "speed").glob("*.json"))]
    found = [one for one in found if "results" in one]
    for one in found:
        command, _, flags = one["command"].partition(" -- ")
        one["work"] = f"`{command.split()[2]} {flags}`".replace(" `", "`")
        one["beside"] = list(one["results"])[-1]  # "script" if it was compared with nothing
        wall = one.get("wall_ratios")
        one["ratio"] = f"**{np.median(wall):.2f}** ({min(wall):.2f} to {max(wall):.2f})" if wall else "-"
        parts = one["hardware"].split(", ")
        one["processor"] = [part for part in parts if not part.startswith(("no GPU", "torch "))]  # CPU, cores, GPU
    return sorted(found, key=lambda one: ["cleanrl", "sb3", one["beside"]].index(one["beside"]))


def speed_table(rows: list[Row]) -> list[str]:
    """One line per file of results/speed: steps/s of both, their ratio in wall and CPU time, hardware, commit."""
    head = "script and flags | steps/s | compared with, its steps/s | ratio, wall time | per CPU second"
    lines = []
    for one in speeds():
        rates = {name: ", ".join(f"{run['sps']:,.0f}" for run in runs) for name, runs in one["results"].items()}
        ours, beside = rates.pop("script"), "-"
        for name, theirs in rates.items():
            beside = f"{name} {revision(one['source'])}: {theirs}" if "source" in one else f"{name}: {theirs}"
        cpu = f"{np.median(one['cpu_ratios']):.2f}" if rates else "-"
        peak = f"{max(run['peak_gib'] for run in one['results']['script']):.2f} GiB"
        cells = [one["work"], ours, beside, one["ratio"], cpu, peak, ", ".join(one["processor"]), revision(one["git"])]
        lines.append(cells)
    return markdown(f"{head} | memory | processor | commit", lines)


PER_FILE = {  # the tables between marks, by file
    "README.md": {},
    "benchmark/README.md": {},
    "docs/performance.md": dict(speed=speed_table),
    "docs/metrics.md": {},
    "docs/ppo_procgen.md": dict(procgen16=sixteen_table, adam_eps=epsilon_table),
    "docs/ppo_atari_rnd.md": {},
    "docs/ppo_atari_snd.md": {},
    **{f"docs/{name}.md": dict(results=partial(results_of, name)) for name in ("impala_procgen", "appo_atari")},
}


def filled(text: str, tables: dict, rows: list[Row]) -> str:
    """The text with the present tables between <!-- NAME --> and <!-- end of NAME -->."""
    for name, lines in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        tail = rest.split(end, 1)[1]  # an IndexError rather than a cut page
        text = "\n".join([head + begin, *lines(rows), end + tail])
    return text


LINK = re.compile(r"\[`([^`]+)`\]\((\.\./)?((?:benchmark/variants/)?\w+\.py)#L(\d+)\)")


def relinked(text: str) -> str:
    """Links [`code`](../script.py#L1) with the number of the one line of the script that contains the code."""

    def link(match):
        code, up, file, _ = match.groups()
        lines = (ROOT / file).read_text().splitlines()
        found = [i for i, line in enumerate(lines, 1) if code in line]
        if len(found) != 1:
            raise ValueError(f"{file}: {len(found)} lines contain `{code}`")
        return f"[`{code}`]({up or ''}{file}#L{found[0]})"

    return LINK.sub(link, text)


def draw_sixteen(rows: list[Row]):
    """All Procgen games in OpenAI's setting, our runs and OpenAI's three, and the interquartile mean of all."""
    figure = pyplot.figure(figsize=(8.4, 9), layout="constrained")
    panels = figure.subplot_mosaic([*np.arange(16).reshape(4, 4).tolist(), ["all"] * 4], sharex=True)
    found = sixteen(dict(ours=openai_rows(rows), shorter=other_seeds("ppo_procgen", rows)))
    for panel, (game, part) in zip(panels.values(), found.groupby("game"), strict=False):
        for (who, _), run in part.groupby(["who", "run"]):
            color, width = ("0.6", 0.8) if who == "OpenAI" else ("C0", 1.2)
            panel.plot(run["step"] / 1e6, run["score"], color, linewidth=width)
        panel.axhline(part["R_min"].iloc[0], color="grey", linestyle=":", linewidth=1)
        panel.set_title(game, fontsize=10)
    table = found.pivot(index="step", columns=["who", "game", "run"], values="normalized")
    table = table.interpolate("index", limit_direction="both")  # updates in which no episode ended
    for who, color in (("OpenAI", "0.6"), ("ours", "C0")):
        scores = [runs.T.to_numpy() for _, runs in table[who].T.groupby("game")]
        panels["all"].plot(table.index / 1e6, interquartile_mean(*scores), color)
        if limits := interval(scores):
            panels["all"].fill_between(table.index / 1e6, *limits, color=color, alpha=0.3, linewidth=0)
    panels["all"].set_title("interquartile mean of normalized returns, 95 % bootstrap interval", fontsize=10)
    for panel in panels.values():
        panel.tick_params(labelsize=8)
        panel.set(xlim=(0, 1.05), xticks=[0, 0.5, 1])
    lines = [
        pyplot.Line2D([], [], color="C0", label="ppo_procgen.py, one line per seed"),
        pyplot.Line2D([], [], color="0.6", label="OpenAI's PPO, one line per run"),
        pyplot.Line2D([], [], color="grey", linestyle=":", label="lower end of the normalized range"),
    ]
    figure.legend(handles=lines, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    figure.supxlabel("million environment steps", fontsize=10)
    figure.supylabel("training return", fontsize=10)
    return figure


def draw_script(script: str, rows: list[Row]):
    """A panel per game that is not only in procgen16.svg, a color per setting, a line per seed, published points."""
    games, colors = {}, {}
    for row in of_script(script, rows):
        if row.job.suite != "adam_eps":  # in procgen16.svg
            games.setdefault(row.job.game, []).append(row)
    games = {game: group for game, group in games.items() if {row.job.suite for row in group} != {"procgen16_1m"}}
    columns = min(len(games), 3)
    lines = -(-len(games) // columns)
    size = (max(4.2, 2.8 * columns), 2.9 * lines)
    figure, axes = pyplot.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for panel, (game, group) in zip(axes.flat, games.items(), strict=False):
        for row in group:
            label = setting(row, script)
            flags = re.sub(r"-\d+[mk]", "", label)  # without the number of steps
            color = colors.setdefault(flags, f"C{len(colors)}")
            for curve in map(episodes, row.curves.values()):
                if len(curve):
                    means = smooth(curve)
                    panel.plot(means.index / 1e6, means, color, linewidth=1.2, label=label)
                    label = None
        longest = max(group, key=lambda row: row.steps)
        known = {}  # published training returns
        for row in group:
            for series, what, how in sources(row.job, "train") or sources(row.job, "game") or sources(row.job, "test"):
                points = points_of(game, series).query(f"step <= {1.1 * longest.steps}")
                if TRAINING in how and len(points):
                    known[what] = points
        for marker, (what, points) in zip("o^v", known.items(), strict=False):
            panel.plot(points["step"] / 1e6, points["score"], f"k{marker}", markersize=4, label=what)
        panel.set_title(game, fontsize=10)
        panel.tick_params(labelsize=8)
        panel.legend(fontsize=7, frameon=False)
    for panel in axes.flat[len(games) :]:
        panel.remove()
    figure.supxlabel("million environment steps", fontsize=9)
    figure.supylabel("training return", fontsize=9)
    return figure


def smooth(rows: pd.DataFrame, windows: int = 50) -> pd.Series:
    """Mean returns of the windows of steps, by the last step of each."""
    window = (rows["step"] - 1) // (rows["step"].iloc[-1] / windows)
    return pd.Series({part["step"].iloc[-1]: mean_over_episodes(part) for _, part in rows.groupby(window)})


def draw(rows: list[Row], folder: Path = ROOT / "docs" / "images"):
    """All pictures, as SVG without a date."""
    matplotlib.use("Agg")
    pyplot.rcParams |= {"svg.hashsalt": "0", "axes.spines.top": False, "axes.spines.right": False}
    figures = {"procgen16": draw_sixteen(rows)}
    figures |= {script: draw_script(script, rows) for script in SCRIPTS if of_script(script, rows)}
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


def export(rows: list[Row], path: Path):
    """All curves in one table with the columns script (suite/script-setting), game, seed, step, metric, value."""
    tables = []
    for row in rows:
        for seed, curve in row.curves.items():
            table = curve.drop(columns="iteration", errors="ignore").melt("step", var_name="metric").dropna()
            script = f"{row.job.suite}/{row.job.variant.replace(':', '-')}"
            tables.append(table.assign(script=script, game=row.job.game, seed=seed))
    curves = pd.concat(tables)[["script", "game", "seed", "step", "metric", "value"]]
    write = curves.to_parquet if path.suffix == ".parquet" else curves.to_csv
    write(path, index=False)


def returns_of(place: str) -> dict:
    """(row, split) -> returns of each seed's evaluation, in a folder of results or in a commit's benchmark/results."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(place)
        if not folder.is_dir():
            archive = Path(temporary, "results.zip")
            git = ["git", "-C", str(ROOT), "archive", "--output", str(archive), place, "benchmark/results"]
            if subprocess.run(git, capture_output=True).returncode:
                raise ValueError(f"{place}: neither a folder nor a commit with results")
            shutil.unpack_archive(archive, temporary)
            folder = Path(temporary, "benchmark", "results")
        found = {}
        for path in sorted(folder.glob("*/*/*/seed*.json")):
            evaluation = matrix.read_json(path).get("eval") or {"splits": {}}
            for split, one in evaluation["splits"].items():
                found.setdefault((str(path.parent.relative_to(folder)), split), []).append(one["returns"])
        return found


def compare(before: str, after: str) -> list[str]:
    """For each row that differs: evaluations, the difference and its 95 % interval (Welch's t).

    The interval is over seeds, or over episodes if a side has only one seed: then it is too narrow.
    """
    old, new = returns_of(before), returns_of(after)
    lines = []
    for row, split in [key for key in new if key in old]:
        a, b = old[row, split], new[row, split]
        if a == b:
            continue
        over = "seeds" if min(len(a), len(b)) > 1 else "episodes"
        a, b = ([np.mean(seed) for seed in each] if over == "seeds" else np.concatenate(each) for each in (a, b))
        limits = scipy.stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
        difference = f"{np.mean(b) - np.mean(a):+.2f} ({limits.low:+.2f} to {limits.high:+.2f})"
        means, over = [f"{np.mean(each):.2f}" for each in (a, b)], f"{len(a)}, {len(b)} {over}"
        lines.append([f"`{row}` ({split})", *means, difference, over])
    return markdown("row | A | B | B - A (95 % interval) | over", lines)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a text is out of date")
    parser.add_argument("--results", type=Path, help="another folder of results; writes README.md there")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="folders of results, or commits")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write all curves to a .parquet or .csv file")
    options = parser.parse_args(argv)
    if options.results and not options.results.is_dir():
        parser.error(f"--results {options.results}: no such folder")
    if options.compare:
        try:
            print("\n".join(compare(*options.compare)))
        except ValueError as error:
            parser.error(f"--compare {error}")
        return 0
    rows = read_rows(options.results or RESULTS)
    if options.export:
        export(rows, options.export)
        return 0
    table = "\n".join(["# Results", "", *finished(rows), ""])
    if options.results:
        (options.results / "README.md").write_text(table)
        return 0
    old = {name: (ROOT / name).read_text() for name in [*PER_FILE, "benchmark/results/README.md"]}
    new = {name: relinked(filled(old[name], tables, rows)) for name, tables in PER_FILE.items()}
    new["benchmark/results/README.md"] = table
    if options.check:
        changed = [name for name in new if new[name] != old[name]]
        print("\n".join(f"{name}: out of date, run benchmark/report.py" for name in changed) or "up to date")
        return int(bool(changed))
    for name, text in new.items():
        (ROOT / name).write_text(text)
    draw(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
