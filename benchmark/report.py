"""Tables, plots and a page from the committed results, compared with published numbers.

    python benchmark/report.py            # the tables between marks in README.md and benchmark/README.md,
                                          # results/plots/curves.png and results/index.html
    python benchmark/report.py --results FOLDER    # of run.py --results FOLDER: FOLDER/README.md and index.html
    python benchmark/report.py --check    # write nothing; exit code 1 if the committed tables are out of date

Reads benchmark/results/<suite>/<script>/<game>/seed<k>.json and .csv (written by benchmark/run.py), the speed figures
in results/speed/*.json and results/floor/*.json, and the published numbers in benchmark/reference/. An unreadable file
is named and left out. A job without a result is shown with its published number (in the large suites it is left out);
a failed one with its error.
Published training returns are compared with training returns, published evaluations with evaluations. For OpenAI's and
michalnand's runs, reference/*.csv has the mean over the last tenth of the steps, as in the tables, and the mean at a
step, for the plots. "stderr" is the standard error over runs.
"""

import argparse
import csv
import html
import importlib
import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]
import run as matrix  # noqa: E402

RESULTS, REFERENCE = ROOT / "benchmark" / "results", ROOT / "benchmark" / "reference"
SHOWN = ("two_cores", "long", "cpu", "gpu")  # suites shown in full; of the others only what has a result
LONG = 400_000  # environment steps
CND_21 = "SND-V_michalnand_cnd21(paper Montezuma)(raw_score)"
RND_1 = "RND_michalnand_cfg1(raw_score)"
NO_REWARD = "SND-V_michalnand_no_reward(raw_score)"
TRAINING = "in training"
OTHER = "another network and batch; "
OPENAI = f"{TRAINING}, 3 runs"
RUNNING = f"{TRAINING}, running mean of one environment"
PUBLISHED = {  # (script, number of training levels, split): [(file, series, what it is, how its protocol differs)]
    ("ppo_procgen", "", "test"): [
        ("procgen", "all_levels_PPO", "OpenAI's PPO", f"{OTHER}{OPENAI}"),
        ("procgen", "competition_entry_PPO_wide", "the competition entry", "wide network, one run, evaluation"),
    ],
    ("impala_procgen", "", "test"): [("procgen", "all_levels_PPO", "OpenAI's PPO", f"PPO, not IMPALA; {OPENAI}")],
    ("ppo_procgen", "200", "train"): [("procgen", "train200_PPO", "OpenAI's PPO", OPENAI)],
    ("ppo_procgen", "200", "test"): [("procgen", "test_full_PPO", "OpenAI's PPO", "on all levels, 3 runs")],
    ("ppo_atari_rnd", "", "game"): [
        ("atari", "RND", "RND paper", f"{TRAINING}, recurrent policy, no forced no-op, 3 seeds"),
        ("atari", RND_1, "michalnand's RND", f"{OTHER}{RUNNING}, 3 runs"),
    ],
    ("ppo_atari_snd", "", "game"): [("atari", CND_21, "michalnand's SND-V", f"{RUNNING}, 4 runs")],
    ("snd_breakout", "", "game"): [
        ("atari", NO_REWARD, "michalnand's SND without reward", f"another policy network; {RUNNING}, one run")
    ],
    ("appo_atari", "", "game"): [
        ("atari", "CleanRL_ppo_atari_envpool", "CleanRL's PPO with EnvPool", f"another batch; {TRAINING}, 3 runs"),
        ("atari", "CleanRL_ppo_atari", "CleanRL's PPO without EnvPool", f"another batch; {TRAINING}, 3 runs"),
    ],
}


def reference(column: str = "") -> dict:
    """(file, game, series) -> {environment steps: score}, or another column of the rows that have it."""
    found = {}
    for name, game, series, steps, score, frames in (
        ("procgen", "env", "split", "step", "mean_return", 1),
        ("atari", "env", "algo", "frames", "score", 4),
    ):
        with open(REFERENCE / f"{name}.csv", newline="") as file:
            for row in csv.DictReader(file):
                points = found.setdefault((name, row[game], row[series]), {})
                value = row.get(column or score)
                if value:
                    points[int(row[steps]) // frames] = float(value)
    return found


class Published(NamedTuple):
    """A number, what it is, how its protocol differs, its standard error over runs if published."""

    score: float
    what: str
    how: str
    error: float | None


def levels(flags: str) -> str:
    """The number of training levels in a command; "" for all."""
    return flag(flags, "--num-levels", "0").removeprefix("0")


def flag(flags: str, name: str, default: str) -> str:
    words = flags.split()
    return words[words.index(name) + 1] if name in words else default


def sources(job, split: str) -> list:
    """[(file, series, what it is, how its protocol differs)] to compare a job's split with."""
    found = PUBLISHED.get((job.script, levels(job.flags), split), [])
    if job.variant.endswith(":openai"):  # the published network and batch
        found = [(file, series, what, how.removeprefix(OTHER)) for file, series, what, how in found]
    return found


def published(job, split: str, steps: int, points: dict) -> list[Published]:
    """Published numbers at the nearest step within 10 %: means over the last tenth where there are any."""
    found, tenths, errors = [], reference("last_tenth"), reference("stderr")
    for file, name, what, how in sources(job, split):
        series = points.get((file, job.game, name), {})
        near = [step for step in series if abs(step - steps) <= 0.1 * steps]
        if near:
            step = min(near, key=lambda step: abs(step - steps))
            key = file, job.game, name
            found.append(Published(tenths[key].get(step, series[step]), what, how, errors[key].get(step)))
    return found


def checkpoints(job, steps: int, points: dict) -> list:
    """(what, [(step, score)]) of published training returns up to our number of steps."""
    found = sources(job, "train") or sources(job, "game") or sources(job, "test")
    curves = []
    for file, name, what, how in [source for source in found if TRAINING in source[3]]:
        series = sorted(points.get((file, job.game, name), {}).items())
        curves.append((f"{what} ({how})", [point for point in series if point[0] <= 1.1 * steps]))
    return [(what, known) for what, known in curves if known]


def steps_of(job) -> int:
    """Environment steps that a command asks for."""
    asked = flag(job.flags, "--total-timesteps", "")
    return int(asked or importlib.import_module(job.script).Args().total_timesteps)


def curve(path: Path) -> list[tuple[int, float, float]]:
    """(step, mean return, number of episodes) of the rows in which episodes ended."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("episode/return") and row.get("episode/count")]
    return [(int(row["step"]), float(row["episode/return"]), float(row["episode/count"])) for row in rows]


def read(path: Path) -> dict:
    """The content of a JSON file; empty if there is none or it is unreadable (which is printed)."""
    content = matrix.read_json(path)
    return content if isinstance(content, dict) else {}


def cells(results: Path = RESULTS) -> list[dict]:
    """One entry per row of a suite and game: its jobs, their results, the published numbers."""
    points, found = reference(), []
    for suite in matrix.SUITES:
        groups = {}
        for job in matrix.jobs_of(suite):
            groups.setdefault((job.variant, job.game), []).append(job)
        for jobs in groups.values():
            done = {}
            for job in jobs:
                one = read(results / suite / f"{job.name}.json")
                if one.get("command") == " ".join(job.command):  # otherwise of earlier flags
                    done[job.seed] = one
            if not done and suite not in SHOWN:
                continue
            job, finished = jobs[0], [d for d in done.values() if d["status"] == "done"]
            steps = finished[0]["steps"] if finished else steps_of(job)
            split = {"train", "test"} if levels(job.flags) else {"test", "game"}
            cell = dict(job=job, steps=steps, done=finished, seeds=len(jobs))
            cell["published"] = {name: published(job, name, steps, points) for name in sorted(split)}
            cell["checkpoints"] = checkpoints(job, steps, points)
            cell["failed"] = [d["error"] for d in done.values() if d["status"] == "failed"]
            cell["curves"] = {
                d["seed"]: curve((results / suite / f"{job.name}.csv").with_name(f"seed{d['seed']}.csv"))
                for d in finished
            }
            cell["splits"] = {}
            for split in finished[0]["eval"]["splits"] if finished else ():
                cell["splits"][split] = [d["eval"]["splits"][split]["mean"] for d in finished]
            found.append(cell)
    return found


def number(scores: list[float], evaluation: dict | None = None) -> str:
    """Mean and standard error over seeds; two seeds: both; one: its standard error over episodes."""
    if len(scores) > 2:
        return f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores) / len(scores) ** 0.5:.2f}"
    if len(scores) == 2:
        return ", ".join(f"{score:.2f}" for score in scores)
    error = evaluation["stderr"] if evaluation else None
    return f"{scores[0]:.2f}" + (f" (± {error:.2f} over episodes)" if error is not None else "")


def last_tenth(cell: dict) -> tuple[list[float], str]:
    """Mean training return over the last tenth of the steps, of each seed in which episodes ended; and as text."""
    ends = [[row[1:] for row in curve if row[0] > 0.9 * cell["steps"]] for curve in cell["curves"].values()]
    means = [sum(value * count for value, count in end) / sum(count for _, count in end) for end in ends if end]
    episodes = sum(count for end in ends for _, count in end)
    missing = f", {len(means)} of {len(ends)} seeds" * (len(means) < len(ends))
    return means, f"{number(means)} ({episodes:,.0f} episodes{missing})" if means else "-"


def differences(cell: dict, scores: list[float], theirs: list[Published]) -> str:
    """Our evaluation minus a published one, or our last tenth of training minus a published training return."""
    ours = [last_tenth(cell)[0] if TRAINING in entry.how else scores for entry in theirs]
    pairs = zip(ours, theirs, strict=True)
    return ", ".join(f"{statistics.mean(of) - entry.score:+.2f}" if of else "-" for of, entry in pairs) or "-"


HEADER = """| script | game | steps | n | evaluation | training, last tenth | published | difference |
 hardware | commits |""".replace("\n", "")


def seeds_of(cell: dict) -> str:
    done, failed = len(cell["done"]), len(cell["failed"])
    return f"{done} seed" + "s" * (done != 1) + f", {failed} failed" * bool(failed)


def failure(cell: dict) -> str:
    return f"failed: {cell['failed'][0].splitlines()[-1].replace('|', '/')}"


def hours(cell: dict) -> str:
    """Training time, mean over seeds, and the hardware."""
    mean = statistics.mean(one["train_seconds"] for one in cell["done"]) / 3600
    return f"{mean:.1f} on {hardware(cell)}"


def hardware(cell: dict) -> str:
    kinds = (one["gpu"] or f"{one['cpu']}, {one['cores']} core" + "s" * (one["cores"] > 1) for one in cell["done"])
    return "; ".join(dict.fromkeys(kinds))


def commits(cell: dict) -> str:
    """All revisions that trained a row's runs, shortened."""
    found = (git for one in cell["done"] for git in [*one.get("git_before", ()), one["git"]])
    return ", ".join(dict.fromkeys(map(revision, found)))


def table(entries: list[dict], results: Path = RESULTS) -> list[str]:
    lines = [HEADER, "|" + "---|" * 10]
    for cell in entries:
        job = cell["job"]
        start, steps = f"| `{job.name.rpartition('/')[0]}` |", f"{cell['steps']:,}"
        if not cell["done"]:
            theirs = [entry for entries in cell["published"].values() for entry in entries]
            partial = results / "partial" / job.folder.partition("/")[2].rpartition("-")[0]
            state = "**not finished**" if partial.is_dir() else "**not run**"
            state = failure(cell) if cell["failed"] else state
            lines.append(f"{start} {job.game} | {steps} | 0 | {state} | - | {shown(theirs)} | - | - | - |")
        for split, scores in cell["splits"].items():
            first, theirs = cell["done"][0], cell["published"].get(split, [])
            value = number(scores, first["eval"]["splits"][split])
            row = [f"{job.game} ({split})", steps, seeds_of(cell), value]
            row += [last_tenth(cell)[1], shown(theirs), differences(cell, scores, theirs)]
            row += [hardware(cell), commits(cell)]
            lines.append(" ".join([start, " | ".join(row), "|"]))
    return lines


def shown(theirs: list) -> str:
    errors = ["" if entry.error is None else f" ± {entry.error:.2f}" for entry in theirs]
    texts = (f"{one.score:.2f}{error}, {one.what} ({one.how})" for one, error in zip(theirs, errors, strict=True))
    return "; ".join(texts) or "none at these steps"


def speeds(results: Path = RESULTS) -> list[dict]:
    """The files of results/speed except comparisons of revisions: CleanRL first, then other libraries."""
    first = ["cleanrl", "sample-factory", "sb3"]
    found = [read(path) for path in sorted((results / "speed").glob("*.json"))]
    found = [one for one in found if "results" in one]  # without comparisons of revisions
    for one in found:
        command, _, flags = one["command"].partition(" -- ")
        one["script"] = command.split()[2]
        one["work"] = f"{one['script']} {flags}".strip()
        one["beside"] = [*one["results"]][-1]
    return sorted(found, key=lambda one: [*first, one["beside"]].index(one["beside"]))


def revision(git: str | None) -> str:
    """A commit, shortened, and whether the tree was changed."""
    return (git[:7] + "-dirty" * git.endswith("-dirty")) if git else "-"


def speed_table(results: Path = RESULTS) -> list[str]:
    """One line per file of results/speed: steps/s of both, their ratio in wall and CPU time, hardware, commit."""
    head = ["script and flags", "steps/s", "compared with, its steps/s", "ratio, wall time", "CPU time"]
    head += ["memory", "processor", "commit"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for found in speeds(results):
        ours, name, theirs = found["results"]["script"], found["beside"], [*found["results"].values()][-1]
        row = [f"`{found['work']}`", ", ".join(f"{r['sps']:,.0f}" for r in ours)]
        if name != "script":
            wall, cpu = found["wall_ratios"], [ratio for ratio in found["cpu_ratios"] if ratio == ratio]
            of = f" {revision(found['source'])}" if "source" in found else ""
            row += [f"{name}{of}: " + ", ".join(f"{r['sps']:,.0f}" for r in theirs)]
            row += [f"**{statistics.median(wall):.2f}** ({min(wall):.2f} to {max(wall):.2f})"]
            row += [f"{statistics.median(cpu):.2f}" if cpu else "-"]
        else:
            row += ["-", "-", "-"]
        row += [f"{max(r['peak_gib'] for r in ours):.2f} GiB"]
        row += [found["hardware"].partition(" cores")[0] + " cores", revision(found["git"])]
        lines.append("| " + " | ".join(row) + " |")
    return lines


SHARES = ("learner", "acting")


def floor_table(results: Path = RESULTS) -> list[str]:
    """One line per file of results/floor: learner and acting compared with their layers alone."""
    head = ["script and flags", "matrix product", "layers alone", "learner", "share", "forward only", "acting", "share"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * 8]
    for path in sorted((results / "floor").glob("*.json")):
        one = read(path)
        if not one:
            continue
        layers = f"{one['layers_alone_rows_per_s']:,.0f} rows/s, {one['layers_alone_gflops']:.0f} GFLOP/s"
        row = [f"`{one['script']} {one['flags']}`".replace(" `", "`"), f"{one['matrix_product_gflops']:.0f} GFLOP/s"]
        spans = {name: "{:.2f} to {:.2f}".format(*(f(one[f"{name}_shares"]) for f in (min, max))) for name in SHARES}
        row += [layers, f"{one['learner_rows_per_s']:,.0f}", f"**{one['learner_share']:.2f}** ({spans['learner']})"]
        row += [f"{one['forward_rows_per_s']:,.0f} (batch {one['acting_batch']})", f"{one['acting_rows_per_s']:,.0f}"]
        row += [f"**{one['acting_share']:.2f}** ({spans['acting']})"]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def short_table(results: Path = RESULTS) -> list[str]:
    """For the README: all runs of at least LONG steps and failed ones; rows with a published number first."""
    head = "| suite, script, game | steps | n | evaluation | training, last tenth | published at these steps | hours |"
    lines = [head, "|" + "---|" * 7]
    rows = []
    for cell in cells(results):
        if cell["steps"] < LONG:
            continue
        start = f"{cell['job'].suite}, `{cell['job'].name.partition('/')[0]}`, {cell['job'].game}"
        for split, scores in cell["splits"].items():
            value = number(scores, cell["done"][0]["eval"]["splits"][split])
            row = [f"{start} ({split})", f"{cell['steps']:,}", seeds_of(cell), value, last_tenth(cell)[1]]
            theirs = cell["published"].get(split, [])
            rows.append((not theirs, "| " + " | ".join([*row, shown(theirs), hours(cell)]) + " |"))
        if cell["failed"] and not cell["done"]:
            rows.append((True, f"| {start} | {cell['steps']:,} | {seeds_of(cell)} | {failure(cell)} | - | - | - |"))
    return lines + [line for _, line in sorted(rows, key=lambda row: row[0])]


def suite_tables(results: Path = RESULTS) -> list[str]:
    """A table for each suite that has something to show."""
    entries, lines = cells(results), []
    for suite in matrix.SUITES:
        own = [cell for cell in entries if cell["job"].suite == suite]
        if own:
            lines += [f"### {suite}", "", *table(own, results), ""]
    return lines


TABLES = dict(results=short_table, suites=suite_tables, speed=speed_table, floor=floor_table)


def filled(text: str, results: Path = RESULTS) -> str:
    """The text with the present tables between <!-- NAME --> and <!-- end of NAME -->."""
    for name, lines in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin in text:
            head, _, rest = text.partition(begin)
            tail = rest.split(end, 1)[1]  # an IndexError rather than a cut README
            text = "\n".join([head + begin, *lines(results), end + tail])
    return text


def report(results: Path = RESULTS) -> str:
    """The text of FOLDER/README.md, of report.py --results FOLDER."""
    return "\n".join(["# Results", "", *suite_tables(results)])


IMPALA = "impala_procgen_starpilot_1m"
NO_SUITE = {
    "starpilot": [
        (
            "impala_procgen in bf16, 1M steps",
            [f"{IMPALA}/long_fragments_64_seed1", f"{IMPALA}/long_fragments_64_seed2"],
        ),
        ("impala_procgen --no-sync in fp32, 1M steps", [f"{IMPALA}/overlap_seed1"]),
    ]
}


def picture(results: Path = RESULTS):
    """plots/curves.png: a panel for each game with runs of LONG steps, smoothed over a fiftieth of the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    games = {}
    for cell in cells(results):
        if cell["done"] and cell["steps"] >= LONG:
            games.setdefault(cell["job"].game, []).append(cell)
    if not games:
        return
    columns = min(len(games), 3)
    rows = -(-len(games) // columns)
    size = (4.5 * columns, 4.2 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for panel, (game, group) in zip(axes.flat, games.items(), strict=False):
        lines = [(cell["job"].variant, list(cell["curves"].values())) for cell in group]
        for name, files in NO_SUITE.get(game, []) if results == RESULTS else []:
            lines.append((name, [curve(RESULTS / "curves" / file / "metrics.csv") for file in files]))
        for i, (name, curves) in enumerate(lines):
            for values in filter(None, curves):
                panel.plot(*smooth(values, values[-1][0] / 50), f"C{i}", linewidth=1)
            panel.plot([], [], f"C{i}", label=f"{name}, n = {len(curves)}")
        points = {}  # of all the panel's rows, the longest last
        for cell in sorted(group, key=lambda cell: cell["steps"]):
            points |= {what.split(" (")[0]: known for what, known in cell["checkpoints"]}
        for marker, (what, known) in zip("*^v", points.items(), strict=False):
            panel.plot(*zip(*known, strict=True), f"k{marker}", label=f"published: {what}")
        panel.set(title=game, xlabel="environment steps", ylabel="training return")
        panel.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(0, -0.2))  # below, where it hides no curve
    for panel in axes.flat[len(games) :]:
        panel.remove()
    (results / "plots").mkdir(exist_ok=True)
    figure.savefig(results / "plots" / "curves.png", dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def smooth(values: list, window: float) -> tuple[list, list]:
    """Rows (step, mean return, episodes) -> last steps and mean returns of the windows of steps."""
    windows = {}
    for step, score, episodes in values:
        windows.setdefault(int((step - 1) // window), []).append((step, score, episodes))
    steps = [part[-1][0] for part in windows.values()]
    means = [sum(score * n for _, score, n in part) / sum(n for *_, n in part) for part in windows.values()]
    return steps, means


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Results</title>
<style>body{font:15px/1.4 sans-serif;margin:2em;max-width:80em}table{border-collapse:collapse;margin:1em 0}
td,th{border:1px solid #bbb;padding:.2em .5em;text-align:left}svg{background:#fafafa;margin:.5em}
.miss{color:#a00}figure{display:inline-block;margin:.5em}</style><h1>Results</h1>
<p>Script <select id="script"></select> Game <select id="game"></select> <span id="count"></span></p>
<div id="out"></div><script>
const cells = CELLS;
const pick = id => document.getElementById(id);
for (const [id, key] of [["script", "script"], ["game", "game"]]) {
  for (const value of ["all", ...new Set(cells.map(c => c[key]))]) pick(id).add(new Option(value));
  pick(id).onchange = show;
}
function plot(cell) {
  const all = cell.curves.flat().concat(cell.known), w = 420, h = 220, pad = 40;
  if (!all.length) return "";
  const xs = all.map(p => p[0]), ys = all.map(p => p[1]), top = Math.max(...xs), low = Math.min(...ys, 0), high = Math.max(...ys);
  const x = v => pad + v / top * (w - 2 * pad), y = v => h - pad - (v - low) / (high - low || 1) * (h - 2 * pad);
  const lines = cell.curves.map((c, i) => `<polyline fill="none" stroke="hsl(${i * 97 + 210},60%,45%)" points="${c.map(p => x(p[0]) + "," + y(p[1])).join(" ")}"/>`);
  const stars = cell.known.map(p => `<text x="${x(p[0])}" y="${y(p[1])}" text-anchor="middle">&#9733;</text>`);
  return `<figure><svg width="${w}" height="${h}">${lines.join("")}${stars.join("")}<text x="2" y="${y(high)}" font-size="11">${high.toPrecision(3)}</text>` +
    `<text x="2" y="${y(low)}" font-size="11">${low.toPrecision(3)}</text><text x="${w - 90}" y="${h - 8}" font-size="11">${top.toLocaleString()} steps</text></svg><figcaption>${cell.title}</figcaption></figure>`;
}
function show() {
  const chosen = cells.filter(c => ["script", "game"].every(k => ["all", c[k]].includes(pick(k).value)));
  pick("count").textContent = chosen.length + " cells";
  const rows = chosen.map(c => `<tr class="${c.n ? "" : "miss"}"><td>${[c.suite, c.script, c.variant, c.game, c.steps.toLocaleString(), c.n || "not run", c.score, c.published, c.command].join("<td>")}</tr>`);
  pick("out").innerHTML = `<table><tr><th>${["suite", "script", "setting", "game", "steps", "seeds", "evaluation", "published", "command"].join("<th>")}</tr>${rows.join("")}</table>${chosen.map(plot).join("")}`;
}
show();
</script></html>
"""  # noqa: E501


def page(results: Path = RESULTS) -> str:
    """results/index.html: tables, curves and filters in one file, without a server."""
    data = []
    for cell in cells(results):
        job, theirs = cell["job"], [entry for entries in cell["published"].values() for entry in entries]
        scores = [f"{split}: {number(means)}" for split, means in cell["splits"].items()]
        failed = [f"failed: {html.escape(error.splitlines()[-1])}" for error in cell["failed"]]
        row = dict(suite=job.suite, script=job.script, variant=job.variant.partition(":")[2], game=job.game)
        row |= dict(n=len(cell["done"]), steps=cell["steps"], score="; ".join([*scores, *failed]) or "-")
        row |= dict(published=shown(theirs))
        row |= dict(command=html.escape(" ".join(job.command)), title=f"{job.variant} {job.game}")
        row |= dict(curves=[[r[:2] for r in c[:: max(len(c) // 200, 1)]] for c in cell["curves"].values()])
        row |= dict(known=[point for _, known in cell["checkpoints"] for point in known if row["n"]])
        data.append(row)
    return PAGE.replace("CELLS", json.dumps(data).replace("</", "<\\/"))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if the committed files are out of date"
    )
    parser.add_argument("--results", type=Path, help="another folder of results; writes README.md and index.html there")
    options = parser.parse_args(argv)
    results = options.results or RESULTS
    if not results.is_dir():
        parser.error(f"--results {results}: no such folder")
    files = {results / "index.html": page(results)}
    if options.results:
        files[results / "README.md"] = report(results)
    else:
        for path in (ROOT / "README.md", ROOT / "benchmark" / "README.md"):
            files[path] = filled(path.read_text())
    if options.check:
        old = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
        print("\n".join(f"{path}: out of date, run benchmark/report.py" for path in old) or "up to date")
        return int(bool(old))
    for path, text in files.items():
        matrix.write_atomically(path, text)
    picture(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
