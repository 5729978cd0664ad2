"""From a client's parameters and prompt to a `GenerateRequest`: what HTTP and gRPC share.

    check_params    ranges of each parameter, without a model; how many and how long is in `config.limits`
    serving         the model that is asked for is the one served
    check_length    a text that cannot fit is refused before the work of tokenizing it
    prepare         all of it for a tokenized prompt: context, defaults, seed, ends, deadline

Nothing here waits, and nothing is changed. Every refusal is an `InvalidRequest` naming the parameter as it is called
here; a face whose clients call it otherwise renames it.
"""

import math
import re
from collections.abc import Sequence

from twostroke.cluster.config import DEFAULT_TENANT, BudgetSection, LimitsSection, RouterSection
from twostroke.cluster.core.errors import ContextOverflow, InvalidRequest, Unavailable, UnknownModel
from twostroke.cluster.core.grammar import Grammar
from twostroke.cluster.core.ids import RequestId, new_request_id
from twostroke.cluster.core.random import draw_seed
from twostroke.cluster.core.records import dataclass
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.cluster.telemetry.logs import MAX_CLIENT_ID
from twostroke.router.continuation import begin, under_budget
from twostroke.router.request import Continuation, GenerateRequest, Generator, ServedModel
from twostroke.router.tokenizer import Tokenizer

MAX_PRIORITY = 1000
MAX_BIAS = 100
_SEED_MASK = (1 << 64) - 1
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """What a client may ask for, with the defaults of the OpenAI API and, beyond it, of vLLM."""

    max_tokens: int | None = None
    """None: `default_max_tokens`, or what the context leaves if that is less."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 are off."""
    min_p: float = 0.0
    seed: int | None = None
    """None: drawn. Any 64-bit integer, signed or not."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    """What the answer must look like; checked by a `GrammarGate` before."""
    grammar_field: str = "response_format"
    """Where it came from."""
    timeout_s: float | None = None
    """None: `default_timeout_s`. Capped at `max_timeout_s`."""
    priority: int = 0
    """Lower goes first, as in vLLM; see `router.admission` for what a step is worth."""


def check_params(params: GenerateParams, limits: LimitsSection) -> None:
    """Raises InvalidRequest naming the first parameter that is out of its range."""
    if params.max_tokens is not None:
        check_range("max_tokens", params.max_tokens, 1)
    check_range("min_tokens", params.min_tokens, 0)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(f"min_tokens {params.min_tokens} is over max_tokens {params.max_tokens}", "min_tokens")
    check_range("temperature", params.temperature, 0, 2)
    check_range("top_p", params.top_p, 0, 1, above=True)
    check_range("top_k", params.top_k, -1)
    check_range("min_p", params.min_p, 0, 1)
    if params.seed is not None:
        check_range("seed", params.seed, -(1 << 63), _SEED_MASK)
    check_range("presence_penalty", params.presence_penalty, -2, 2)
    check_range("frequency_penalty", params.frequency_penalty, -2, 2)
    check_range("repetition_penalty", params.repetition_penalty, 0, 10, above=True)
    check_range("n", params.n, 1, limits.max_choices)
    check_range("priority", params.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if params.timeout_s is not None:
        check_range("timeout_s", params.timeout_s, 0, above=True)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None:
            check_range(name, count, 0, limits.max_logprobs)
    most = limits.max_logit_biases
    if len(params.logit_bias) > most:
        raise InvalidRequest(f"logit_bias has at most {most} tokens, not {len(params.logit_bias)}", "logit_bias")
    for _, bias in params.logit_bias:
        check_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    _check_stops(params, limits)
    if params.grammar is not None:
        _check_with_grammar(params, params.grammar, limits)


def check_range(name: str, value: float, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """`low <= value <= high`, or `low < value` with `above`; NaN and infinities are in no range."""
    if -math.inf < value < math.inf and value <= high and (value > low if above else value >= low):
        return
    wanted = f"above {low}" if above else f"at least {low}"
    if high != math.inf:
        wanted += f" and at most {high}"
    # A number of a million digits is not worth repeating.
    shown = f", not {value:g}" if abs(value) < 1e18 else ""
    raise InvalidRequest(f"{name} must be {wanted}{shown}", name)


def _check_stops(params: GenerateParams, limits: LimitsSection) -> None:
    if len(params.stop) > limits.max_stops:
        raise InvalidRequest(f"at most {limits.max_stops} stop strings, not {len(params.stop)}", "stop")
    for index, text in enumerate(params.stop):
        if not 1 <= len(text) <= limits.max_stop_characters:
            raise InvalidRequest(f"a stop string has 1 to {limits.max_stop_characters} characters", f"stop[{index}]")
    if len(params.stop_token_ids) > limits.max_stop_tokens:
        raise InvalidRequest(
            f"at most {limits.max_stop_tokens} stop_token_ids, not {len(params.stop_token_ids)}", "stop_token_ids"
        )


def _check_with_grammar(params: GenerateParams, grammar: Grammar, limits: LimitsSection) -> None:
    """The grammar says where the answer may end, and then it does."""
    if len(grammar.text) > limits.max_grammar_characters:
        told = f"it has {len(grammar.text)} characters; at most {limits.max_grammar_characters} are taken"
        raise InvalidRequest(told, params.grammar_field)
    if params.ignore_eos:
        raise InvalidRequest(f"ignore_eos cannot be used with {params.grammar_field}", "ignore_eos")
    if params.min_tokens:
        raise InvalidRequest(f"min_tokens cannot be used with {params.grammar_field}", "min_tokens")


def serving(model_name: str | None, generator: Generator) -> ServedModel:
    """The served model, which None stands for. Raises Unavailable while there is none, UnknownModel when another is
    asked for.
    """
    model = generator.model
    if model is None:
        raise Unavailable("no worker is attached yet")
    if model_name is None:
        return model
    if model_name != model.name:
        shown = model_name if len(model_name) <= 128 else model_name[:128] + "..."
        raise UnknownModel(f"model {shown!r} is not served here, {model.name!r} is", "model")
    return model


def check_length(num_characters: int, model: ServedModel, tokenizer: Tokenizer, field: str) -> None:
    """Raises ContextOverflow for a text so long that its tokens cannot fit, however it is tokenized."""
    longest = tokenizer.max_token_bytes
    if longest and num_characters > longest * model.max_context:
        raise ContextOverflow(
            f"the context of {model.name} is {model.max_context} tokens; the prompt has more than "
            f"{num_characters // longest}",
            field,
        )


def prepare(
    prompt: Sequence[int],
    params: GenerateParams,
    *,
    model_name: str,
    generator: Generator,
    tokenizer: Tokenizer,
    config: RouterSection,
    prompt_field: str = "prompt",
    request_id: RequestId | None = None,
    client_request_id: str = "",
    salt: str = "",
    tenant: str = DEFAULT_TENANT,
    template: str = "",
    whole: bool = False,
    continuable: bool = False,
    continuation: Continuation | None = None,
) -> GenerateRequest:
    """A request ready for `generator.submit`, with an id of its own unless one is given, under its tenant's budget.
    `params` passed `check_params`, and `prompt` is of tokens that there are (`router.encode`).

    `continuable`: the answer can carry a continuation token, and go on from `continuation`; else the budget is but a
    lower `max_tokens`.

    Raises InvalidRequest (ContextOverflow, UnknownModel), naming `prompt_field` when it is the prompt that is
    wrong; and Unavailable while no worker is attached.
    """
    model = serving(model_name, generator)
    if len(salt) > config.limits.max_salt_characters:
        raise InvalidRequest(f"cache_salt has at most {config.limits.max_salt_characters} characters", "cache_salt")
    check_client_request_id(client_request_id)
    if not prompt:
        raise InvalidRequest("the prompt has no token", prompt_field)
    check_ids(params.stop_token_ids, tokenizer.vocab_size, "stop_token_ids")
    if any(not 0 <= token < tokenizer.vocab_size for token, _ in params.logit_bias):
        raise InvalidRequest(f"token ids of logit_bias are 0 to {tokenizer.vocab_size - 1}", "logit_bias")
    if params.grammar is not None and not tokenizer.end_token_ids:
        raise InvalidRequest(f"{model.name} has no end token, so no grammar can be used", params.grammar_field)
    max_tokens = _max_tokens(len(prompt), params, model, config, prompt_field)
    timeout_s = config.default_timeout_s if params.timeout_s is None else params.timeout_s
    seed = None if params.seed is None else params.seed & _SEED_MASK
    request = GenerateRequest(
        request_id=new_request_id() if request_id is None else request_id,
        model=model.name,
        prompt=tuple(prompt),
        sampling=_sampling(params, max_tokens, draw_seed() if seed is None else seed, tokenizer),
        time_left_s=min(float(timeout_s), config.max_timeout_s),
        num_choices=params.n,
        stop=params.stop,
        tenant=tenant,
        salt=salt,
        client_request_id=client_request_id,
        priority=params.priority,
        template=template,
        whole=whole,
        grammar_field=params.grammar_field,
    )
    budget = config.budget.tokens_of(tenant)
    if not continuable and continuation is not None:
        raise InvalidRequest("an answer that is taken apart, for calls or reasoning, is not continued", "continuation")
    if not continuable:
        return under_budget(request, budget)
    return begin(request, model, budget, continuation, seed=seed, max_tokens=params.max_tokens)


def _sampling(params: GenerateParams, max_tokens: int, seed: int, tokenizer: Tokenizer) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=float(params.temperature),
        top_k=min(max(params.top_k, 0), tokenizer.vocab_size),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        min_tokens=params.min_tokens,
        end_token_ids=tokenizer.end_token_ids,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        # In order: neither JSON nor gRPC has one, and a continuation is of an equal request.
        logit_bias=tuple(sorted((token, float(bias)) for token, bias in params.logit_bias)),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        grammar=params.grammar,
    )


def read_tenant(values: Sequence[str], budget: BudgetSection) -> str:
    """What came under `budget.tenant_header`; `default` when nothing did. Raises InvalidRequest naming the header, also
    when it came more than once: one of them may be the client's own.
    """
    if not values:
        return DEFAULT_TENANT
    if len(values) > 1:
        raise InvalidRequest("a request has one tenant", budget.tenant_header)
    [value] = values
    if not _TENANT.fullmatch(value):
        raise InvalidRequest("a tenant has 1 to 64 letters, digits and . _ -", budget.tenant_header)
    return value


def check_client_request_id(value: str) -> None:
    """Raises InvalidRequest unless it is fit for a log line and a header: at most 128 printable ASCII characters."""
    if len(value) > MAX_CLIENT_ID or not value.isascii() or not value.isprintable():
        raise InvalidRequest(f"a request id has at most {MAX_CLIENT_ID} printable ASCII characters", "x-request-id")


def _max_tokens(num_prompt: int, params: GenerateParams, model: ServedModel, config: RouterSection, field: str) -> int:
    if num_prompt > config.limits.max_prompt_tokens:
        raise InvalidRequest(
            f"a prompt has at most {config.limits.max_prompt_tokens} tokens, this one {num_prompt}", field
        )
    limit = model.max_context
    room = limit - num_prompt
    if room < 1:
        raise ContextOverflow(
            f"the context of {model.name} is {limit} tokens; the prompt has {num_prompt}, which leaves none to answer",
            field,
        )
    if params.max_tokens is None:
        max_tokens = min(config.default_max_tokens, config.limits.max_output_tokens, room)
        if params.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens {params.min_tokens} is over the {max_tokens} output tokens there may be", "min_tokens"
            )
        return max_tokens
    if params.max_tokens > room:
        asked = f"{params.max_tokens}" if params.max_tokens < 10**18 else "more than 10^18"
        raise ContextOverflow(
            f"the context of {model.name} is {limit} tokens; the prompt has {num_prompt} and {asked} output tokens "
            f"were requested, {room} are left",
            "max_tokens",
        )
    most = config.limits.max_output_tokens
    if params.max_tokens > most:
        raise InvalidRequest(f"max_tokens must be at most {most}, not {params.max_tokens}", "max_tokens")
    return params.max_tokens


def check_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raises InvalidRequest naming the first id that is no token."""
    # Two passes in C; the loop to find the culprit runs only when there is one.
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        index = next(index for index, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidRequest(f"token ids are 0 to {vocab_size - 1}", f"{field}[{index}]")
