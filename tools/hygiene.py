"""Hygiene of given or all tracked files: white space, TOML and YAML that parse, no large file, no private key."""

import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

MAX_BYTES = 512 * 1024
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".proto", ".txt", ".json", ".tpl"}


def complaints(path: Path) -> list[str]:
    """What is wrong with one file, as messages without the path."""
    found: list[str] = []
    data = path.read_bytes()
    if len(data) > MAX_BYTES:
        found.append(f"{len(data)} bytes, over {MAX_BYTES}")
    if b"PRIVATE KEY-----" in data and path.name != "hygiene.py":
        found.append("holds a private key")
    if path.suffix not in TEXT or "_pb2" in path.name:
        return found
    text = data.decode("utf-8")
    if text and not text.endswith("\n"):
        found.append("no newline at the end")
    found += [
        f"line {number}: trailing white space"
        for number, line in enumerate(text.split("\n"), 1)
        if line != line.rstrip()
    ]
    try:
        if path.suffix == ".toml":
            tomllib.loads(text)
        elif path.suffix in {".yaml", ".yml"} and "templates" not in path.parts:
            list(yaml.safe_load_all(text))
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        found.append(f"does not parse: {error}")
    return found


def main() -> None:
    names = sys.argv[1:] or subprocess.run(
        ["git", "ls-files"], check=True, capture_output=True, text=True
    ).stdout.split("\n")
    paths = [Path(name) for name in names if name]
    found = [
        f"{path}: {message}"
        for path in paths
        if path.is_file() and not path.is_symlink()
        for message in complaints(path)
    ]
    print("\n".join(found) or f"{len(paths)} files are clean")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
