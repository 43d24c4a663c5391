"""Writes README's annotated tree, one phrase per file, taken from the files' own first sentences.

python tools/readme_tree.py           prints the tree
python tools/readme_tree.py --write   puts it into README.md, between its two markers
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- tree: begin -->", "<!-- tree: end -->"
FOLDERS = ("grpo_mc", "csrc", "configs", "benchmarks", "tools")
UNNAMED = ("__init__.py", "py.typed")
COLUMN, WIDTH = 34, 118


def first_words(path: Path) -> str:
    """The first paragraph of a file's docstring, or its leading comment."""
    text = path.read_text(errors="replace")
    if path.suffix == ".py":
        return " ".join((ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].split())
    mark = "//" if path.suffix in (".cpp", ".h", ".cu", ".cuh") else "#"
    words: list[str] = []
    for line in text.splitlines():
        if line.startswith(("#!", "#SBATCH", "#pragma", "// nvcc:")) or (not words and not line.startswith(mark)):
            continue
        if not line.startswith(mark) or not line.strip(mark + " "):
            break
        words.append(line.strip(mark + " "))
    return " ".join(words)


def phrase(path: Path) -> str:
    """The first sentence, cut at a colon where enough stands before it."""
    if path.suffix in (".json", ".jsonl"):
        return ""
    sentence = re.split(r"(?<=[\w)`])[.;](?=\s|$)", first_words(path))[0]
    name = path.parent.name if path.name in UNNAMED else path.stem
    sentence = re.sub(rf"^`?(grpo_mc\.)?{name}`?: ", "", sentence).rstrip(".")
    head = sentence.split(": ", 1)[0]
    return head if len(head.split()) >= 5 else sentence


def line(depth: int, name: str, note: str) -> str:
    """One line of the tree, shortened at a word."""
    text = f"{'    ' * depth + name:<{COLUMN}}{note}".rstrip()
    return text if len(text) <= WIDTH else text[: WIDTH - 3].rsplit(" ", 1)[0].rstrip(",") + " ..."


def branch(folder: Path, files: list[Path], depth: int) -> list[str]:
    """The lines below a folder: its files, then its folders."""
    here = sorted(path for path in files if path.parent == folder and path.name not in UNNAMED)
    lines = [line(depth, path.name, phrase(path)) for path in here]
    below = {folder / path.relative_to(folder).parts[0] for path in files if path.parent != folder}
    for child in sorted(below):
        package = child / "__init__.py"
        lines.append(line(depth, child.name + "/", phrase(package) if package in files else ""))
        lines += branch(child, [path for path in files if path.is_relative_to(child)], depth + 1)
    return lines


def tree() -> str:
    """The tree of the tracked files under FOLDERS."""
    command = ["git", "ls-files", *FOLDERS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.splitlines()]
    return "\n".join(
        text
        for name in FOLDERS
        for text in [name + "/", *branch(ROOT / name, [f for f in files if f.is_relative_to(ROOT / name)], 1)]
    )


def print_or_write(text: str, begin: str, end: str) -> None:
    """Prints the text; with --write it stands in README.md between the two markers instead."""
    if "--write" not in sys.argv:
        print(text)
        return
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(begin)
    readme.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def main() -> None:
    print_or_write(f"```\n{tree()}\n```", BEGIN, END)


if __name__ == "__main__":
    main()
