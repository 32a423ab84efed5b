"""Draw docs/images/flow_<script>.svg, the data flow of each script: python docs/draw_flow.py

A box is (column, row, first line, other lines); names in boxes are those of the code. An arrow goes
from one box to another, with a label; dashed arrows carry weights, not data.
"""

from html import escape
from pathlib import Path
from typing import NamedTuple

IMAGES = Path(__file__).resolve().parent / "images"
WIDTH, HEIGHT = 190, 74  # of a box
PITCH_X, PITCH_Y = 250, 124  # from a box to the next one
MARGIN = 24
ACTING, LEARNING, BONUS = "#eef3fb", "#eaf6ea", "#fdf3e1"


class Box(NamedTuple):
    column: float
    row: float
    title: str
    lines: tuple[str, ...] = ()
    color: str = ACTING


class Arrow(NamedTuple):
    start: str
    end: str
    label: str = ""
    dashed: bool = False


FLOWS = {
    "ppo_procgen": (
        {
            "envs": Box(0, 0, "envs.step", ("48 environments",)),
            "agent": Box(0, 1, "agent", ("logits, value",)),
            "rollout": Box(1, 0, "rollout", ("T x N rows: obs, action,", "logits, value, reward, done")),
            "gae": Box(2, 0, "gae", ("advantage,", "target = advantage + value")),
            "standardize": Box(3, 0, "standardize", ("advantages of the", "whole rollout")),
            "minibatch": Box(3, 1, "minibatch", ("rows split once;", "3 epochs, order shuffled"), LEARNING),
            "loss": Box(3, 2, "ppo_loss", ("policy, value, KL, entropy",), LEARNING),
            "adam": Box(1, 2, "optimizer.step", ("Adam",), LEARNING),
            "kl": Box(2, 1, "kl_coef", ("x 1.5 or x 0.5 by the KL", "of the last epoch"), LEARNING),
        },
        [
            Arrow("envs", "rollout", "reward"),
            Arrow("agent", "envs", "action"),
            Arrow("agent", "rollout"),
            Arrow("rollout", "gae"),
            Arrow("gae", "standardize"),
            Arrow("standardize", "minibatch"),
            Arrow("minibatch", "loss"),
            Arrow("kl", "loss"),
            Arrow("loss", "adam", "gradient"),
            Arrow("adam", "agent", "weights", True),
        ],
        "Synchronous: the environments wait while the learner trains.",
    ),
    "impala_procgen": (
        {
            "group": Box(0, 0, "play_rollout", ("a thread per group:", "32 environments, 64 steps")),
            "actors": Box(0, 1, "actors.agent", ("a copy; each step uses", "the newest weights")),
            "datasets": Box(1, 0, "actors.datasets", ("fragments: obs, action,", "logp, reward, done")),
            "ring": Box(2, 0, "ring", ("the 16 newest batches",)),
            "batches": Box(3, 0, "batches", ("the new one, then", "3 drawn from the ring"), LEARNING),
            "forward": Box(3, 1, "agent", ("logits, value", "of today's weights"), LEARNING),
            "vtrace": Box(2, 1, "vtrace", ("rho, vs, rho_advantage;", "again in every pass"), LEARNING),
            "loss": Box(2, 2, "impala_loss", ("policy, value, entropy",), LEARNING),
            "adam": Box(1, 2, "optimizer.step", ("Adam, once per batch",), LEARNING),
            "publish": Box(0, 2, "actors.publish", ("after every SGD step",), LEARNING),
        },
        [
            Arrow("actors", "group", "weights", True),
            Arrow("group", "datasets", "rollout"),
            Arrow("datasets", "ring", "batch"),
            Arrow("ring", "batches", ""),
            Arrow("batches", "forward"),
            Arrow("forward", "vtrace", ""),
            Arrow("vtrace", "loss"),
            Arrow("loss", "adam", "gradient"),
            Arrow("adam", "publish", "", True),
            Arrow("publish", "actors", "weights", True),
        ],
        "Default (--sync): actors wait while the learner trains, the learner waits for one rollout. With --no-sync "
        "actors play at most 2 batches ahead, then wait.",
    ),
    "ppo_atari_rnd": (
        {
            "envs": Box(0, 0, "envs.step", ("128 environments",)),
            "agent": Box(0, 1, "agent", ("logits, two values:", "of the game, of the bonus")),
            "rollout": Box(1, 0, "rollout", ("T x N rows and one", "more observation")),
            "error": Box(1, 1, "rnd.error", ("predictor - target, on frames", "standardized by old statistics"), BONUS),
            "normalize": Box(2, 1, "rnd.normalize", ("/ std of discounted sums,", "one sum per environment"), BONUS),
            "ext": Box(3, 0, "gae", ("ext: of reward and its value,", "ends with the episode")),
            "int": Box(3, 1, "gae", ("int_: of bonus and its value,", "no ends"), BONUS),
            "advantage": Box(4, 0, "advantages", ("ext_coef * ext", "+ int_coef * int_"), LEARNING),
            "loss": Box(4, 1, "ppo_loss", ("policy, two values, entropy;", "valid rows"), LEARNING),
            "predictor": Box(2, 2, "predictor_loss", ("errors again, new statistics;", "a quarter of the rows"), BONUS),
            "adam": Box(4, 2, "optimizer.step", ("one Adam for policy", "and predictor"), LEARNING),
        },
        [
            Arrow("envs", "rollout", "reward"),
            Arrow("agent", "envs", "action"),
            Arrow("agent", "rollout"),
            Arrow("rollout", "error", "frames"),
            Arrow("error", "normalize", "errors"),
            Arrow("normalize", "int", "bonus"),
            Arrow("rollout", "ext", "reward, value"),
            Arrow("ext", "advantage"),
            Arrow("int", "advantage"),
            Arrow("advantage", "loss", "minibatches"),
            Arrow("loss", "adam", "gradients"),
            Arrow("error", "predictor", "frames"),
            Arrow("predictor", "adam", "gradients"),
        ],
        "The bonus enters as a second reward with its own value head. Synchronous: the environments wait while the "
        "learner trains; the next rollout uses the new weights.",
    ),
    "ppo_atari_snd": (
        {
            "envs": Box(0, 0, "envs.step", ("128 environments",)),
            "agent": Box(0, 1, "agent", ("logits, two values:", "of the game, of the bonus")),
            "rollout": Box(1, 0, "rollout", ("T x N rows",)),
            "frames": Box(1, 1, "frames", ("the newest one", "of each obs t"), BONUS),
            "bonus": Box(2, 1, "snd.bonus", ("eta * error of the predictor,", "at most 1"), BONUS),
            "predictor": Box(2, 2, "predictor_loss", ("a quarter of the features", "of each minibatch row"), BONUS),
            "pairs": Box(1, 3, "pairs", ("64 random pairs of frames,", "each frame augmented"), BONUS),
            "target": Box(2, 3, "target_loss", ("one frame twice: near;", "two frames: far"), BONUS),
            "ext": Box(3, 0, "gae", ("ext: of the rewards' signs,", "ends with the episode")),
            "int": Box(3, 1, "gae", ("int_: of the bonus,", "ends with the episode"), BONUS),
            "advantage": Box(4, 0, "advantages", ("ext_coef * ext", "+ int_coef * int_"), LEARNING),
            "loss": Box(4, 1, "ppo_loss", ("policy, two values, entropy;", "valid rows"), LEARNING),
            "adam": Box(4, 2, "optimizer.step", ("one Adam for policy,", "predictor and target"), LEARNING),
        },
        [
            Arrow("envs", "rollout", "reward"),
            Arrow("agent", "envs", "action"),
            Arrow("agent", "rollout"),
            Arrow("rollout", "frames"),
            Arrow("frames", "bonus"),
            Arrow("frames", "predictor"),
            Arrow("frames", "pairs"),
            Arrow("pairs", "target"),
            Arrow("bonus", "int", "bonus"),
            Arrow("rollout", "ext", "reward, value"),
            Arrow("ext", "advantage"),
            Arrow("int", "advantage"),
            Arrow("advantage", "loss", "minibatches"),
            Arrow("loss", "adam", "gradients"),
            Arrow("predictor", "adam", "gradients"),
            Arrow("target", "adam", "gradients"),
        ],
        "The bonus enters as a second reward with its own value head. Synchronous: the environments wait while the "
        "learner trains; the next rollout uses the new weights.",
    ),
    "appo_atari": (
        {
            "group": Box(0, 0, "play_rollout", ("a thread per group:", "16 environments, 128 steps")),
            "actors": Box(0, 1, "actors.agent", ("a copy; each step uses", "the newest weights")),
            "datasets": Box(1, 0, "actors.datasets", ("obs, action, logp, value,", "reward, ends, valid, version")),
            "frames": Box(2, 0, "agent.frames.update", ("statistics of frames",), LEARNING),
            "gae": Box(3, 0, "gae", ("once per dataset; then", "agent.returns.update"), LEARNING),
            "minibatch": Box(3, 1, "minibatch", ("whole trajectories,", "fixed order, 4 epochs"), LEARNING),
            "standardize": Box(3, 2, "standardize", ("advantages of the", "minibatch's valid rows"), LEARNING),
            "loss": Box(2, 2, "ppo_loss", ("policy, value, entropy; valid", "rows that are not too old"), LEARNING),
            "adam": Box(1, 2, "optimizer.step", ("Adam",), LEARNING),
            "publish": Box(0, 2, "actors.publish", ("after every SGD step",), LEARNING),
        },
        [
            Arrow("actors", "group", "weights", True),
            Arrow("group", "datasets", "rollout"),
            Arrow("datasets", "frames", "dataset"),
            Arrow("frames", "gae"),
            Arrow("gae", "minibatch"),
            Arrow("minibatch", "standardize"),
            Arrow("standardize", "loss"),
            Arrow("loss", "adam", "gradient"),
            Arrow("adam", "publish", "", True),
            Arrow("publish", "actors", "weights", True),
        ],
        "The learner waits for a complete dataset. Actors play while it trains, at most 2 datasets ahead, then wait. "
        "With --sync they wait while the learner trains.",
    ),
}


def corner(box: Box) -> tuple[float, float]:
    return MARGIN + box.column * PITCH_X, MARGIN + box.row * PITCH_Y


def edge(box: Box, dx: float, dy: float) -> tuple[float, float]:
    """The point where a line from the center of a box in this direction leaves the box."""
    x, y = corner(box)
    scale = min(WIDTH / 2 / abs(dx) if dx else 1e9, HEIGHT / 2 / abs(dy) if dy else 1e9)
    return x + WIDTH / 2 + dx * scale, y + HEIGHT / 2 + dy * scale


def drawn_box(box: Box) -> list[str]:
    x, y = corner(box)
    center = x + WIDTH / 2
    top = y + HEIGHT / 2 - 8 * len(box.lines) + 5
    size = f'width="{WIDTH}" height="{HEIGHT}" rx="8"'
    parts = [f'<rect x="{x:.0f}" y="{y:.0f}" {size} fill="{box.color}" stroke="#445"/>']
    parts.append(f'<text x="{center:.0f}" y="{top:.0f}" class="title">{escape(box.title)}</text>')
    for i, line in enumerate(box.lines, 1):
        parts.append(f'<text x="{center:.0f}" y="{top + 17 * i:.0f}">{escape(line)}</text>')
    return parts


def ends(start: Box, end: Box) -> tuple[float, float, float, float]:
    dx = (end.column - start.column) * PITCH_X
    dy = (end.row - start.row) * PITCH_Y
    return *edge(start, dx, dy), *edge(end, -dx, -dy)


def drawn_line(start: Box, end: Box, dashed: bool) -> str:
    x1, y1, x2, y2 = ends(start, end)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    line = f'x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}"'
    return f'<line {line} stroke="#445" stroke-width="1.5" marker-end="url(#head)"{dash}/>'


def drawn_label(start: Box, end: Box, label: str) -> str:
    """Beside a vertical arrow, above any other."""
    x1, y1, x2, y2 = ends(start, end)
    x, y, anchor = (x1 + x2) / 2, (y1 + y2) / 2 - 8, "middle"
    if x1 == x2:
        x, y, anchor = x + 8, y + 12, "start"
    return f'<text x="{x:.0f}" y="{y:.0f}" class="label" style="text-anchor:{anchor}">{label}</text>'


def wrapped(text: str, width: float) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def svg(script: str) -> str:
    """The picture of a script's data flow."""
    boxes, arrows, caption = FLOWS[script]
    colors = {box.color for box in boxes.values()}
    width = 2 * MARGIN + WIDTH + max(box.column for box in boxes.values()) * PITCH_X
    height = 2 * MARGIN + HEIGHT + max(box.row for box in boxes.values()) * PITCH_Y
    legend = "Blue: acting. Green: learning. " + "Orange: the bonus. " * (BONUS in colors)
    lines = wrapped(legend + caption, width // 7)
    total = height + 8 + 20 * len(lines)
    style = "text{font:13px sans-serif;text-anchor:middle;fill:#112}"
    style += ".title{font:bold 14px monospace}.label{font-size:12px;fill:#445}.caption{text-anchor:start}"
    head = '<path d="M0,0 L8,4 L0,8 z" fill="#445"/>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {total:.0f}" width="{width:.0f}">',
        f"<title>Data flow of {script}.py</title>",
        f"<style>{style}</style>",
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="8" refY="4" orient="auto" '
        f'markerUnits="userSpaceOnUse">{head}</marker></defs>',
        f'<rect width="{width:.0f}" height="{total:.0f}" fill="white"/>',
    ]
    parts += [drawn_line(boxes[arrow.start], boxes[arrow.end], arrow.dashed) for arrow in arrows]
    for box in boxes.values():
        parts += drawn_box(box)
    parts += [drawn_label(boxes[arrow.start], boxes[arrow.end], arrow.label) for arrow in arrows if arrow.label]
    for i, line in enumerate(lines):
        y = height + 8 + 20 * i
        parts.append(f'<text x="{MARGIN}" y="{y:.0f}" class="caption">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    for name in FLOWS:
        (IMAGES / f"flow_{name}.svg").write_text(svg(name))
