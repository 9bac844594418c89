#!/usr/bin/env python3
"""Draws observability/dashboard.json as an SVG, with the answers that a Prometheus gives to its queries.

    scripts/draw-dashboard.py --prometheus http://127.0.0.1:9090 --seconds 3600 --out dashboard.svg [--var job=envoy]

It stands in for a picture of Grafana where there is none. Needs Python 3.9, nothing else.
"""

import argparse
import json
import math
import pathlib
import time
import urllib.parse
import urllib.request
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIDTH, UNIT, GAP = 1440, 30, 8
COLUMN = WIDTH / 24
COLOURS = ["#3274d9", "#e0752d", "#37872d", "#c4162a", "#8f3bb8", "#b8860b", "#19838f", "#7c5c42"]
INK, MUTED, LINE, PAPER, BACK = "#1f2328", "#656d76", "#d8dee4", "#ffffff", "#f3f5f7"
UNITS = {"reqps": "requests/s", "ops": "per second", "ms": "ms", "bytes": "bytes"}


class Prometheus:
    def __init__(self, address, end, seconds):
        self.address, self.end, self.start = address, end, end - seconds

    def ask(self, path, **fields):
        url = f"{self.address}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]["result"]

    def now(self, expr):
        return [(one["metric"], float(one["value"][1])) for one in self.ask("query", query=expr, time=self.end)]

    def over_time(self, expr):
        step = max((self.end - self.start) / 180, 0.25)
        answer = self.ask("query_range", query=expr, start=self.start, end=self.end, step=step)
        lines = []
        for one in answer:
            points = [(float(at), float(value)) for at, value in one["values"]]
            points = [(at, value) for at, value in points if math.isfinite(value)]
            if points:
                lines.append((one["metric"], points))
        return lines


def text(x, y, content, size=12, colour=INK, anchor="start", weight="normal"):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(content)}</text>'
    )


def short(value):
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def without_repeats(points):
    """Of a stretch of equal values only the first and the last."""
    inner = zip(points, points[1:], points[2:])
    kept = [now for before, now, after in inner if not before[1] == now[1] == after[1]]
    return [*points[:1], *kept, *points[-1:]]


def round_up(value):
    """The next of 1, 2, 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * 0.999)


def legend_of(template, metric):
    for name, value in metric.items():
        template = template.replace("{{" + name + "}}", value)
    return template


def draw_stat(panel, box, answers):
    x, y, width, height = box
    if not answers:
        return [text(x + width / 2, y + height / 2 + 8, "no data", 14, MUTED, "middle")]
    value = answers[0][1][1]
    colour = INK
    for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            colour = {"green": "#37872d", "red": "#c4162a"}[step["color"]]
    return [text(x + width / 2, y + height / 2 + 22, f"{value:,.0f}", 34, colour, "middle", "bold")]


def draw_lines(panel, box, answers, span):
    x, y, width, height = box
    if not answers:
        return [text(x + width / 2, y + height / 2 + 8, "no data", 14, MUTED, "middle")]
    # The legend, in as many lines as it takes.
    rows, used = [[]], 0
    for index, (label, _) in enumerate(answers):
        takes = 24 + 6.4 * len(label)
        if used + takes > width - 24:
            rows.append([])
            used = 0
        rows[-1].append((used, index, label))
        used += takes
    left, right, top = x + 58, x + width - 14, y + 38
    bottom = y + height - 26 - 16 * len(rows)
    most = max((value for _, points in answers for _, value in points), default=0)
    ceiling = round_up(most) if most > 0 else 1
    start, end = span
    unit = UNITS.get(panel["fieldConfig"]["defaults"]["unit"], "")
    parts = [text(right, y + 20, unit, 11, MUTED, "end")]
    for tick in range(5):
        level = bottom - (bottom - top) * tick / 4
        parts.append(f'<line x1="{left:.1f}" y1="{level:.1f}" x2="{right:.1f}" y2="{level:.1f}" stroke="{LINE}"/>')
        parts.append(text(left - 6, level + 4, short(ceiling * tick / 4), 10, MUTED, "end"))
    for tick in range(5):
        at = left + (right - left) * tick / 4
        ago = (end - start) * (1 - tick / 4)
        says = "now" if tick == 4 else f"-{ago / 60:.1f} min" if end - start >= 120 else f"-{ago:.0f} s"
        parts.append(text(at, bottom + 14, says, 10, MUTED, "end" if tick == 4 else "middle"))
    for index, (_, points) in enumerate(answers):
        path = " ".join(
            f"{left + (right - left) * (at - start) / (end - start):.1f},{bottom - (bottom - top) * value / ceiling:.1f}"
            for at, value in without_repeats(points)
        )
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    for number, row in enumerate(rows):
        for offset, index, label in row:
            at, level = x + 12 + offset, bottom + 32 + 16 * number
            parts.append(f'<rect x="{at:.1f}" y="{level - 5:.1f}" width="12" height="3" fill="{COLOURS[index % 8]}"/>')
            parts.append(text(at + 16, level, label, 11))
    return parts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", required=True)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--var", action="append", default=[], help="NAME=VALUE of a dashboard variable")
    options = parser.parse_args()
    dashboard = json.loads((ROOT / "observability" / "dashboard.json").read_text(encoding="utf-8"))
    end = time.time()
    prometheus = Prometheus(options.prometheus, end, options.seconds)
    variables = {
        "__rate_interval": f"{max(2, round(options.seconds / 30))}s",
        "__range": f"{math.ceil(options.seconds)}s",
        **{each["name"]: each.get("allValue", "") for each in dashboard["templating"]["list"]},
        **dict(each.split("=", 1) for each in options.var),
    }

    def fill(expr):
        for name in sorted(variables, key=len, reverse=True):
            expr = expr.replace("$" + name, variables[name])
        return expr

    parts, height = [], 0
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        x, y = grid["x"] * COLUMN + GAP, 52 + grid["y"] * UNIT
        width, tall = grid["w"] * COLUMN - GAP, grid["h"] * UNIT - GAP
        height = max(height, y + tall)
        if panel["type"] == "row":
            parts.append(text(x, y + 19, panel["title"], 14, INK, weight="bold"))
            continue
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{tall:.1f}" rx="3" fill="{PAPER}" stroke="{LINE}"/>'
        )
        parts.append(text(x + 12, y + 20, panel["title"], 13, weight="bold" if panel["type"] != "stat" else "normal"))
        stat = panel["type"] == "stat"
        answers = []
        for target in panel["targets"]:
            expr = fill(target["expr"])
            found = [(m, (0, v)) for m, v in prometheus.now(expr)] if stat else prometheus.over_time(expr)
            answers += [(legend_of(target["legendFormat"], metric), points) for metric, points in found]
        box = (x, y, width, tall)
        parts += draw_stat(panel, box, answers) if stat else draw_lines(panel, box, answers, (prometheus.start, end))
    height += GAP * 2
    title = [text(GAP, 32, dashboard["title"], 20, INK, weight="bold")]
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + GAP} {height}" '
        f'font-family="Inter, Helvetica, Arial, sans-serif">\n<rect width="100%" height="100%" fill="{BACK}"/>\n'
        + "\n".join(title + parts)
        + "\n</svg>\n"
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
