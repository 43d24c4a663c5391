"""The report's page: style sheet, sections, tables, samples. Everything that came from a run is escaped.

The page needs nothing from outside itself: no script, no font, no image, no link to a style sheet.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from grpo_mc.monitor.formats import format_number
from grpo_mc.monitor.run_files import decode_number

# Okabe and Ito's palette, told apart with colour-blind eyes; lightened for the dark page.
_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f7f7f")
_DARK = ("#4aa8e0", "#ff8c42", "#35c99a", "#e7a3c8", "#e0b53c", "#8fd0ff", "#b0b0b0")

_STYLE = """
:root{color-scheme:light dark;--ink:#1c1f24;--soft:#667;--line:#d9dde3;--card:#fff;--page:#f5f6f8;--bad:#b3261e;LIGHT}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#9aa3ad;--line:#3a4048;--card:#1f2328;--page:#15181c;
--bad:#ff8a80;DARK}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1500px;padding:24px;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 12px}
p.sub{margin:0;color:var(--soft)}.tiles,.charts{display:grid;gap:14px}
.tiles{grid-template-columns:repeat(auto-fit,minmax(215px,1fr));margin-top:20px}
.charts{grid-template-columns:repeat(auto-fill,minmax(400px,1fr))}
.tile,figure,details,.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px;
margin:0}.tile b{display:block;font-size:20px;font-variant-numeric:tabular-nums}.tile span,.note,.legend,.empty{
color:var(--soft);font-size:13px}figcaption{font-weight:600;margin-bottom:6px}svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}svg .grid{stroke:var(--line)}
svg .axis{stroke:var(--soft)}svg polyline{fill:none;stroke-width:1.8;stroke-linejoin:round}
svg .faint{opacity:.35;stroke-width:1}svg .bar{fill:none;stroke-width:1.5}svg .hover{fill:transparent}
svg .hover:hover{fill:var(--soft);opacity:.12}.empty{padding:40px 0;text-align:center}
.legend{display:flex;flex-wrap:wrap;gap:4px 14px;margin-top:4px}.legend span::before{content:"";display:inline-block;
width:10px;height:10px;border-radius:2px;margin-right:5px;background:var(--k)}.legend .faint{opacity:.6}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}th,td{text-align:left;padding:5px 10px;
border-bottom:1px solid var(--line);vertical-align:top}th{color:var(--soft);font-weight:500}td.n,th.n{text-align:right}
.scroll{overflow-x:auto}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:6px 0;
font:13px/1.4 ui-monospace,monospace}
.samples{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(min(440px,100%),1fr))}
.sample{min-width:0}.sample .role{color:var(--soft);font-size:12px;text-transform:uppercase;letter-spacing:.04em}
.problems{border-color:var(--bad)}.problems li{overflow-wrap:anywhere}summary{cursor:pointer;font-weight:600}
COLORS"""


def style_sheet() -> str:
    """The page's CSS with the series colours filled in."""
    names = range(len(_LIGHT))
    colors = "\n".join(
        f"svg .s{i}{{stroke:var(--c{i})}}svg circle.s{i},svg .a{i}{{fill:var(--c{i})}}.k{i}{{--k:var(--c{i})}}"
        for i in names
    )
    light = ";".join(f"--c{i}:{_LIGHT[i]}" for i in names)
    dark = ";".join(f"--c{i}:{_DARK[i]}" for i in names)
    return _STYLE.replace("LIGHT", light).replace("DARK", dark).replace("COLORS", colors)


def page(title: str, subtitle: str, sections: Sequence[str]) -> str:
    """The whole document. `title` and `subtitle` are plain text, `sections` are HTML."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{style_sheet()}</style></head>\n"
        f'<body><h1>{text(title)}</h1><p class="sub">{text(subtitle)}</p>\n'
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def text(value: Any) -> str:
    """Any value as escaped text; control characters that HTML forbids become the replacement character."""
    shown = "".join(c if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160) else "\ufffd" for c in str(value))
    return html.escape(shown)


def section(title: str, body: str) -> str:
    """A titled part of the page; nothing when the body is empty."""
    return f"<section><h2>{text(title)}</h2>{body}</section>" if body else ""


def tiles(items: Sequence[tuple[str, str]]) -> str:
    """Headline figures: (label, value)."""
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><span>{text(label)}</span><b>{text(value)}</b></div>' for label, value in items
    ) + "</div>"  # fmt: skip


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], *, css: str = "card scroll") -> str:
    """A table; columns of numbers are set right, numbers shortened, the full value in the cell's title."""
    is_text = [any(isinstance(row[i], str) for row in rows) for i in range(len(header))]
    head = "".join(f"<th{'' if is_text[i] else ' class=n'}>{text(name)}</th>" for i, name in enumerate(header))
    body = "".join("<tr>" + "".join(_cell(value, is_text[i]) for i, value in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="{css}"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any, is_text: bool) -> str:
    css = "" if is_text else ' class="n"'
    number = decode_number(value) if not isinstance(value, str) else None
    if number is None:
        return f"<td{css}>{text('-' if value is None else value)}</td>"
    return f'<td{css} title="{number!r}">{format_number(number)}</td>'


def problems(lines: Sequence[str]) -> str:
    """A marked list of what is missing or damaged; nothing when there is nothing."""
    if not lines:
        return ""
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f'<div class="card problems" style="margin-top:20px"><b>This report is incomplete</b><ul>{items}</ul></div>'


def folded(title: str, content: str) -> str:
    """Text that opens on a click."""
    return f"<details><summary>{text(title)}</summary><pre>{text(content)}</pre></details>"


def folded_charts(title: str, charts: Sequence[str]) -> str:
    """Charts that open on a click."""
    return (
        f'<details style="margin-top:14px"><summary>{text(title)}</summary>'
        f'<div class="charts" style="margin-top:12px">{"".join(charts)}</div></details>'
    )


def folded_table(title: str, content: str) -> str:
    """A table that opens on a click."""
    return f'<details style="margin-top:14px"><summary>{text(title)}</summary>{content}</details>'


def sample(record: dict[str, Any]) -> str:
    """One rollout of samples.jsonl: prompt, response, what it earned and why."""
    reward = decode_number(record.get("reward"))
    head = [f"step {record.get('step', '-')}", f"reward {format_number(reward) if reward is not None else 'unscored'}",
            str(record.get("finish_reason", ""))]  # fmt: skip
    if record.get("ground_truth") is not None:
        head.append(f"reference answer {record['ground_truth']}")
    parts = [f'<div class="card sample"><b>{text(" - ".join(part for part in head if part))}</b>']
    for role in ("prompt", "response"):
        parts.append(f'<div class="role">{role}</div><pre>{text(record.get(role, ""))}</pre>')
    verdicts = [v for v in record.get("verdicts") or [] if isinstance(v, dict)]
    if verdicts:
        rows = [[v.get("name"), v.get("status"), decode_number(v.get("score")), v.get("reason", "")] for v in verdicts]
        parts.append(table(["reward", "status", "score", "reason"], rows, css="scroll"))
    elif isinstance(record.get("rewards"), dict) and record["rewards"]:
        parts.append(text(", ".join(f"{name}: {value}" for name, value in record["rewards"].items())))
    return "".join(parts) + "</div>"
