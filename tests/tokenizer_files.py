"""Model directories with small trained vocabularies, for tests of the tokenizer."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = ["The capital of France is Paris.", "naïve café 😀 日本語 text", "system user assistant <think> hello\n"] * 20
CHATML = (
    "{% for message in messages %}\n"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{%- set ns = namespace(first=true) -%}{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant', 'system'] %}{{ raise_exception('role ' + m.role) }}{% endif %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{% if loop.index0 > 5 %}{% break %}{% endif %}[{{ m.role }}] {{ m | tojson }}{% endif %}"
    "{% set ns.first = false %}{% endfor %}{% if add_generation_prompt %} [assistant] {% endif %}"
    "{% if tools is not none or documents is not none %}tools{% endif %}{{ strftime_now('%Y') }}"
)
TOOLED = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def write_model(directory: Path, kind: str, template: str = CHATML) -> Path:
    """`kind` is `byte_level`, or `sentencepiece` for byte fallback and U+2581 for a space."""
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        extra: list[str] = []
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = []
        extra = ["<unk>", *(f"<0x{value:02X}>" for value in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=extra, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if extra:
        # Bytes are ordinary vocabulary, not added tokens, in a converted SentencePiece model.
        data = json.loads(tokenizer.to_str())
        data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] == "<unk>"]
        tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<s>")])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return directory
