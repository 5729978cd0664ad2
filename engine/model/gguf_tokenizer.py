"""A GGUF file's tokenizer as `tokenizer.json` and `tokenizer_config.json`.

Byte-level BPE with a pre-tokenizer that we know is built here, in a second and without torch. Everything else goes
through `transformers`, which knows the rest.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from twostroke.cluster.core.errors import ConfigError

_CONTROL, _USER_DEFINED = 3, 4
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = "|".join((_WORDS, r"\p{N}{1,3}", _REST))
_QWEN2 = "|".join((_WORDS, r"\p{N}", _REST))


def write_tokenizer(fields: dict[str, Any], path: Path, directory: Path) -> None:
    """Raises ConfigError for a tokenizer that nobody here can read."""
    pre = _pre_tokenizer(str(fields.get("tokenizer.ggml.pre", "default")))
    if fields.get("tokenizer.ggml.model") == "gpt2" and pre is not None:
        _write_byte_level(fields, pre, directory)
    else:
        _write_through_transformers(path, directory)


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer | None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "gpt2"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    pattern = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2}.get(name)
    if pattern is None:
        return None
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _write_byte_level(fields: dict[str, Any], pre: pre_tokenizers.PreTokenizer, directory: Path) -> None:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, byte_fallback=False))
    if fields.get("tokenizer.ggml.pre") == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    kinds: list[int] = fields.get("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind == _USER_DEFINED
        ]
    )
    bos = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token") and bos is not None:
        start = tokens[bos]
        template = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, bos)]
        )
        tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, template])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = fields.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            settings[f"{name}_token"] = tokens[index]
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _write_through_transformers(path: Path, directory: Path) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(str(directory))
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError([f"model.source: {path}: its tokenizer cannot be read: {error}"]) from None
