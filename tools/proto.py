"""Regenerate the committed stubs from `proto/v1/*.proto`, or (`--check`) fail when they have drifted.

The protoc root is `src/`, so that messages import each other as `twostroke/proto/v1/x.proto` and the stubs
as `twostroke.proto.v1.x_pb2`.
"""

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "proto" / "v1").glob("*.proto"))


def generate(out: Path) -> None:
    """Write stubs for all sources below `out`. Exits when protoc fails."""
    import grpc_tools

    include = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{ROOT / 'src'}",
        f"-I{include}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *(f"twostroke/proto/v1/{source.name}" for source in SOURCES),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = {path.name: path.read_text() for path in (Path(scratch) / "twostroke/proto/v1").iterdir()}
    target = ROOT / "proto" / "v1"
    drifted = [
        name for name, text in fresh.items() if not (target / name).exists() or (target / name).read_text() != text
    ]
    if "--check" in sys.argv[1:]:
        if drifted:
            raise SystemExit(f"stubs drifted from their sources, run `make proto`: {sorted(drifted)}")
        print(f"{len(fresh)} stubs match their sources")
        return
    for name in drifted:
        (target / name).write_text(fresh[name])
    print(f"regenerated: {sorted(drifted) or 'nothing'}")


if __name__ == "__main__":
    main()
