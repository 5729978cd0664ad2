"""Configuration: a frozen tree, validated once, all mistakes reported together with the paths of their fields.

Config is input; capacity (number of pages that fit, layout, vocabulary) is discovered. Each component gets
the sub-config that it needs. Only `cluster.main` reads the environment.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from twostroke.cluster.core.errors import ConfigError
from twostroke.cluster.core.logprobs import MAX_TOP

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TransportName = Literal["collective", "grpc"]
Budget = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
DEFAULT_TENANT = "default"
"""Of requests that name none."""

MIN_KEY_CHARACTERS = 16
FAKE_VOCAB_SIZE = 258
"""Vocabulary of a fake model (`model.fake`): 256 bytes, a begin and an end token (`router.tokenizer.ByteTokenizer`)."""
FAKE_END_TOKEN = 257


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelSection(Section):
    """Which model, and how its weights are held."""

    source: str = "demo"
    """`demo`, a directory with safetensors and tokenizer files, a GGUF file, or a hub id."""
    name: str = ""
    """The name clients use; empty: the source's own."""
    linear: Literal["auto", "float32", "packed_fp16"] = "auto"
    """On a CPU: exact float32 by torch, or float16 weights and our kernels (ADR 0006). auto: packed where possible."""
    max_context: Annotated[int, Field(ge=0)] = 0
    """Tokens; 0: the model's own."""
    fake: bool = False
    """The deterministic fake executor: no torch, no weights; tokens are a hash of the pages read."""
    fake_step_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """How long a step of a fake executor takes."""


class PagesSection(Section):
    page_size: Positive = 16
    num_pages: Positive = 1024
    """Pages of one worker's pool."""


class WorkerSection(Section):
    """Both roles: where a worker's gRPC and metrics ports listen, and how it is reached."""

    host: str = "127.0.0.1"
    """Listened on; 0.0.0.0: every address."""
    advertise: str = ""
    """Host that the worker tells others to connect to. Empty: `host`, or with 0.0.0.0 this node's own address on
    the way to Redis, so that one file serves workers on many nodes."""
    port: Port = 0
    """gRPC; 0 picks a free port."""

    @field_validator("advertise")
    @classmethod
    def _somebody(cls, value: str) -> str:
        if value in ("0.0.0.0", "::"):
            raise ValueError(f"nobody can connect to {value}; empty lets each node find its own")
        return value


class PrefillSection(Section):
    replicas: Annotated[int, Field(ge=0)] = 1
    threads: Annotated[int, Field(ge=0)] = 0
    """The most that a step computes with; 0: as many as the process may use CPUs."""
    chunk_tokens: Positive = 512
    max_waiting: Positive = 64
    """Accepted jobs that do not yet compute; over it a Submit is refused."""
    hold_s: Seconds = 30.0
    """How long a finished prefill keeps its pages for a transfer of which nothing arrives."""


class DecodeSection(Section):
    replicas: Annotated[int, Field(ge=0)] = 1
    threads: Annotated[int, Field(ge=0)] = 0
    """As for prefill. Workers that share CPUs give way to each other (kernels/cpu_team.py)."""
    chunk_tokens: Positive = 256
    """Token budget of one step: decode rows first, then local prefill chunks."""
    max_running: Positive = 256
    max_waiting: Positive = 64
    lease_ttl_s: Seconds = 30.0
    max_preemptions: Annotated[int, Field(ge=0)] = 2
    local_resume_tokens: Annotated[int, Field(ge=0)] = 256
    """A preempted job resumes locally when at most this many tokens are uncached, else it is given back."""


class TransferSection(Section):
    transports: tuple[TransportName, ...] = ("collective", "grpc")
    """Best first; a pair uses the first that both speak."""
    message_bytes: Annotated[int, Field(ge=4096, le=4 << 20)] = 1 << 20
    """Largest gRPC data message."""
    offer_bytes: Annotated[int, Field(ge=4096, le=64 << 20)] = 16 << 20
    """Largest flat message of `collective`."""
    operation_timeout_s: Seconds = 10.0
    idle_group_s: Seconds = 300.0
    max_groups: Positive = 16


class PolicySection(Section):
    """Weights of the placement cost, in tokens of work (router/policy.py)."""

    local_threshold_tokens: Annotated[int, Field(ge=0)] = 64
    """A prompt whose uncached part on the decode worker is shorter is prefilled there."""
    local_when_no_prefill: bool = True
    max_queued_chunks: Positive = 4
    """A prefill worker is chosen only while its queued tokens are under this many chunk budgets."""
    transfer_weight: Weight = 0.1
    """Cost of shipping one token's KV, in tokens of prefill work."""
    decode_running_weight: Weight = 16.0
    """Cost of one running request on a decode worker, in tokens of KV."""
    balance_abs_tokens: Positive = 4096
    balance_rel: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.5
    """Load guard: affinity yields when max - min > abs and max > rel * min."""


class LimitsSection(Section):
    """What one request may ask for, beside `router.max_body_bytes`. Over it: 400, with the limit in the message."""

    max_json_depth: Annotated[int, Field(ge=8, le=250)] = 64
    """orjson writes no more than 254 levels."""
    """Levels of objects and lists in a body."""
    max_prompt_tokens: Positive = 1 << 20
    """The model's context bounds a prompt too."""
    max_output_tokens: Positive = 1 << 20
    """Of one choice."""
    max_choices: Positive = 128
    """`n`, times the number of prompts."""
    max_messages: Positive = 8192
    max_stops: Positive = 32
    max_stop_characters: Positive = 1024
    max_stop_tokens: Positive = 256
    max_salt_characters: Positive = 256
    max_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = MAX_TOP
    """Alternatives for each token, of the answer or of the prompt."""
    max_logit_biases: Positive = 1024
    max_grammar_characters: Annotated[int, Field(gt=0, le=65536)] = 65536
    """Of a schema, regular expression, grammar, or of choices together."""
    max_tools: Positive = 128
    max_tool_schema_bytes: Positive = 64 << 10
    """Of one function's `parameters`, as JSON."""


class TemplatesSection(Section):
    """Prompt templates from files, read again when they change (router/templates.py)."""

    chat_template: str = ""
    """A Jinja file instead of the model's own template; empty: the model's own."""
    system_prompt: str = ""
    """A text file: the system message of chats that bring none; empty: no such message."""
    check_interval_s: Seconds = 1.0
    """Between two looks at the files' times; a look costs two `stat` calls, and only chats cause it."""


def read_keys(lines: bytes) -> tuple[bytes, ...]:
    """One a line. Raises ValueError when there is none, or one is too short to be secret."""
    keys = tuple(line.strip() for line in lines.splitlines() if line.strip())
    if not keys or min(map(len, keys)) < MIN_KEY_CHARACTERS:
        raise ValueError(f"a key has at least {MIN_KEY_CHARACTERS} characters, each on a line of its own")
    return keys


class TenantBudget(Section):
    service_class: Name | None = None
    output_tokens: Budget | None = None
    """None: its class's."""


class BudgetSection(Section):
    """Output tokens that a choice may have before it ends with a continuation token (ADR 0010). 0: as many as asked."""

    output_tokens: Budget = 0
    """Of tenants without one of their own or of a class."""
    classes: dict[Name, Budget] = {}
    tenants: dict[Name, TenantBudget] = {}
    tenant_header: Annotated[str, Field(pattern=r"^[a-z0-9-]{0,64}$")] = ""
    """HTTP header, and gRPC metadata key, in which the proxy before the routers names the tenant. Empty: who asks is
    not known, and all are `default`; else clients could choose."""
    key: str = ""
    """Signs continuation tokens; the same on every router. Of several lines, each a key, the first signs and all are
    good. `up` draws one; else empty, with no file either: each router draws its own, and takes no other's tokens."""
    key_file: str = ""
    """Holds it, instead of `key`."""
    ttl_s: Annotated[float, Field(ge=1, le=366 * 86400)] = 3600.0
    """How long a continuation token is good."""

    @model_validator(mode="after")
    def _consistent(self) -> "BudgetSection":
        for name, tenant in self.tenants.items():
            if tenant.service_class is not None and tenant.service_class not in self.classes:
                raise ValueError(f"tenant {name} is of class {tenant.service_class}, which is not in classes")
        if self.key and self.key_file:
            raise ValueError("key and key_file: name one of them")
        if self.key:
            read_keys(self.key.encode())
        return self

    def tokens_of(self, tenant: str) -> int:
        """The tenant's budget; 0: none."""
        own = self.tenants.get(tenant)
        if own is None:
            return self.output_tokens
        if own.output_tokens is not None:
            return own.output_tokens
        return self.output_tokens if own.service_class is None else self.classes[own.service_class]


class RouterSection(Section):
    replicas: Annotated[int, Field(ge=0)] = 1
    """Routers that the supervisor starts; 0: they run outside Ray, as a Deployment on Kubernetes does."""
    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 8001
    max_queued: Positive = 256
    """Requests admitted and not yet placed; over it 429 with Retry-After."""
    max_body_bytes: Positive = 8 << 20
    default_max_tokens: Positive = 1024
    default_timeout_s: Seconds = 600.0
    max_timeout_s: Seconds = 3600.0
    reserve_skip: Annotated[int, Field(ge=0)] = 8
    """Smaller requests that may pass one that waits for pages."""
    max_attempts: Positive = 3
    max_continuations: Positive = 4
    """Continuations after a loss that may run at once."""
    token_buffer: Positive = 256
    """Undelivered tokens a request may hold; over it the client reads too slowly and is cut."""
    policy: PolicySection = PolicySection()
    limits: LimitsSection = LimitsSection()
    templates: TemplatesSection = TemplatesSection()
    budget: BudgetSection = BudgetSection()


class RedisSection(Section):
    url: str = ""
    """Empty: `twostroke up` starts an embedded server and fills this in."""
    prefix: str = "twostroke"
    registration_ttl_s: Seconds = 15.0
    stream_maxlen: Positive = 8192


class RaySection(Section):
    address: str = ""
    """Empty: start a local Ray."""
    pool_resources: bool = False
    """A prefill worker takes one `twostroke-prefill` resource of Ray, a decode worker one `twostroke-decode`: on
    Kubernetes each pod of a pool offers one. False: anywhere."""
    prefill_gpus: Annotated[float, Field(ge=0)] | None = None
    """GPUs that a prefill worker asks Ray for. None: the GPUs that Ray has at `up`, shared out."""
    decode_gpus: Annotated[float, Field(ge=0)] | None = None
    restart_backoff_s: Seconds = 1.0
    max_backoff_s: Seconds = 30.0
    drain_s: Seconds = 60.0


class TelemetrySection(Section):
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    metrics_port: Port = 0
    """Workers' own /metrics; 0 picks a free port. The router serves /metrics on its HTTP port."""


class Config(Section):
    """The whole of it. One file serves every role; a role reads its own sections."""

    cluster: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] = "local"
    model: ModelSection = ModelSection()
    pages: PagesSection = PagesSection()
    worker: WorkerSection = WorkerSection()
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    transfer: TransferSection = TransferSection()
    router: RouterSection = RouterSection()
    redis: RedisSection = RedisSection()
    ray: RaySection = RaySection()
    telemetry: TelemetrySection = TelemetrySection()

    @model_validator(mode="after")
    def _transports_named(self) -> "Config":
        if not self.transfer.transports:
            raise ValueError("transfer.transports: name at least one of collective, grpc")
        return self


def parse_config(data: object) -> Config:
    """Validate a parsed document. Raises ConfigError with every mistake as `path: what is wrong`."""
    if data is None:
        data = {}
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        mistakes = [
            f"{'.'.join(str(part) for part in detail['loc']) or '(file)'}: {detail['msg']}" for detail in error.errors()
        ]
        raise ConfigError(mistakes) from None


def load_config(path: Path) -> Config:
    """Read a YAML file. Raises ConfigError, also for a file that cannot be read or is not YAML."""
    return parse_config(_read_yaml(path))


def _read_yaml(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: {error}"]) from None


STORED = (("ray", "drain_s"), ("redis", "url"), ("router", "budget", "key"))


def load_stored(path: Path) -> Config:
    """Of the configuration that a running cluster keeps, the name and what `STORED` names, with defaults for all else:
    another version may have written it, with fields that this one does not know. Raises ConfigError.
    """
    data = _read_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: not a mapping"])
    known: dict[str, Any] = {"cluster": data["cluster"]} if "cluster" in data else {}
    for *sections, name in STORED:
        found, kept = data, known
        for section in sections:
            inner = found.get(section)
            found, kept = inner if isinstance(inner, dict) else {}, kept.setdefault(section, {})
        if name in found:
            kept[name] = found[name]
    return parse_config(known)


def with_secrets(config: Config, environment: Mapping[str, str]) -> Config:
    """What the environment has instead of the file: `TWOSTROKE_CONTINUATION_KEY`. Raises ConfigError."""
    key = environment.get("TWOSTROKE_CONTINUATION_KEY")
    if not key:
        return config
    data = config.model_dump()
    data["router"]["budget"] |= {"key": key, "key_file": ""}
    return parse_config(data)


def dump_config(config: Config) -> str:
    """YAML that `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def usable_threads(configured: int) -> int:
    """`configured`, or as many as this process may use CPUs."""
    if configured:
        return configured
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
