"""Tokenizers: trained on the training split, or taken from a file or a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ds_vcycle.data.errors import DataError

Architecture = Literal["gpt", "bert"]
TokenizerKind = Literal["bpe", "wordpiece"]
BERT_ROLES = ("pad", "unk", "cls", "sep", "mask")
END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """A tokenizer with what the data needs of it.

    Attributes:
        size: highest id + 1, added tokens included.
        roles: role -> token; ``eod`` for gpt, :data:`BERT_ROLES` for bert.
        special_ids: ids of every special token, in ascending order.
    """

    tokenizer: Tokenizer
    size: int
    roles: dict[str, str]
    special_ids: tuple[int, ...]

    @property
    def role_ids(self) -> dict[str, int]:
        """Role -> id."""
        ids = {role: self.tokenizer.token_to_id(token) for role, token in self.roles.items()}
        return {role: i for role, i in ids.items() if i is not None}


def train_tokenizer(
    texts: Callable[[], Iterator[str]], *, kind: TokenizerKind, vocab_size: int, architecture: Architecture
) -> Vocabulary:
    """Train a byte-level BPE or an uncased WordPiece tokenizer; the same texts give the same ids every time.

    Args:
        texts: gives a fresh pass over the training documents (WordPiece takes two).
        kind: byte-level BPE as in GPT-2, or WordPiece as in BERT.
        vocab_size: ids to fill, special tokens included; a small corpus may fill fewer.
        architecture: decides the special tokens.

    Raises:
        DataError: ``vocab_size`` does not hold the alphabet and the special tokens.
    """
    roles = {"eod": "<|endoftext|>"} if architecture == "gpt" else {role: f"[{role.upper()}]" for role in BERT_ROLES}
    specials = list(dict.fromkeys([*roles.values(), *(["[UNK]"] if kind == "wordpiece" else [])]))
    if kind == "bpe":
        tokenizer = _train_bpe(texts, vocab_size, specials)
    else:
        tokenizer = _train_wordpiece(texts, vocab_size, specials)
    if tokenizer.get_vocab_size() > vocab_size:
        least = tokenizer.get_vocab_size()
        raise DataError(f"vocab_size={vocab_size} does not hold the alphabet and the special tokens, {least}; raise it")
    return _vocabulary(tokenizer, roles, architecture)


def load_tokenizer(path: Path, *, architecture: Architecture, eod_token: str | None = None) -> Vocabulary:
    """Read ``tokenizer.json``, or a directory with it, with ``vocab.json`` + ``merges.txt`` or with ``vocab.txt``.

    Padding and truncation stored in the file are switched off.

    Raises:
        DataError: nothing usable is there, or a special token that the architecture needs is missing.
    """
    tokenizer = _read_tokenizer(path)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    named = _named_tokens(path)
    vocab = tokenizer.get_vocab()
    if architecture == "bert":
        roles = {role: named.get(f"{role}_token") or f"[{role.upper()}]" for role in BERT_ROLES}
    else:
        candidates = [eod_token] if eod_token else [named.get("eos_token"), *END_OF_DOCUMENT]
        known = [token for token in candidates if token in vocab]
        roles = {"eod": known[0] if known and known[0] else eod_token or END_OF_DOCUMENT[0]}
    missing = [f"{role} ({token})" for role, token in roles.items() if token not in vocab]
    if missing:
        remedy = "name one of its tokens with eod_token" if architecture == "gpt" else "take a BERT tokenizer"
        raise DataError(f"tokenizer {path}: no token for {', '.join(missing)}, which {architecture} needs; {remedy}")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in roles.values()])
    return _vocabulary(tokenizer, roles, architecture)


def write_tokenizer(vocabulary: Vocabulary, directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which ``AutoTokenizer.from_pretrained`` loads."""
    vocabulary.tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if "cls" in vocabulary.roles:
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    for role, token in vocabulary.roles.items():
        for name in ("eos_token", "bos_token") if role == "eod" else (f"{role}_token",):
            config[name] = token
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _train_bpe(texts: Callable[[], Iterator[str]], vocab_size: int, specials: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def _train_wordpiece(texts: Callable[[], Iterator[str]], vocab_size: int, specials: list[str]) -> Tokenizer:
    """The trainer numbers the continuing characters (``##e``) in the order of a randomly seeded hash map.

    So a first pass without merges collects them, and the second is given them sorted.
    """
    alphabet = _wordpiece(models.WordPiece(unk_token="[UNK]"))
    alphabet.train_from_iterator(
        texts(), trainers.WordPieceTrainer(vocab_size=0, special_tokens=list(specials), show_progress=False)
    )
    continuing = sorted(token for token in alphabet.get_vocab() if token.startswith("##") and len(token) > 2)
    trained = _wordpiece(models.WordPiece(unk_token="[UNK]"))
    trained.train_from_iterator(
        texts(),
        trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=[*specials, *continuing], show_progress=False),
    )
    tokenizer = _wordpiece(models.WordPiece(trained.get_vocab(), unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def _wordpiece(model: models.WordPiece) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _read_tokenizer(path: Path) -> Tokenizer:
    directory = path if path.is_dir() else path.parent
    try:
        if path.is_file():
            return Tokenizer.from_file(str(path))
        if (path / "tokenizer.json").is_file():
            return Tokenizer.from_file(str(path / "tokenizer.json"))
        if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            tokenizer = Tokenizer(models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt")))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            return tokenizer
        if (path / "vocab.txt").is_file():
            return _read_wordpiece(path)
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"tokenizer {directory}: not readable ({error}); expected a Hugging Face tokenizer") from error
    raise DataError(
        f"tokenizer {path}: expected a tokenizer.json, or a directory with one, with vocab.json and merges.txt, "
        "or with vocab.txt"
    )


def _read_wordpiece(path: Path) -> Tokenizer:
    config = _json_object(path / "tokenizer_config.json")
    tokenizer = _wordpiece(
        models.WordPiece.from_file(str(path / "vocab.txt"), unk_token=_named_tokens(path).get("unk_token", "[UNK]"))
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=bool(config.get("do_lower_case", True)))
    return tokenizer


def _named_tokens(path: Path) -> dict[str, str]:
    """``pad_token`` etc. as the Hugging Face files beside the tokenizer name them."""
    directory = path if path.is_dir() else path.parent
    named = {**_json_object(directory / "special_tokens_map.json"), **_json_object(directory / "tokenizer_config.json")}
    tokens = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: value for key, value in tokens.items() if key.endswith("_token") and isinstance(value, str)}


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _vocabulary(tokenizer: Tokenizer, roles: dict[str, str], architecture: Architecture) -> Vocabulary:
    if architecture == "bert":
        cls, sep = (tokenizer.token_to_id(roles[role]) for role in ("cls", "sep"))
        assert cls is not None and sep is not None
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{roles['cls']} $A {roles['sep']}",
            pair=f"{roles['cls']} $A {roles['sep']} $B:1 {roles['sep']}:1",
            special_tokens=[(roles["cls"], cls), (roles["sep"], sep)],
        )
    special = sorted(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return Vocabulary(
        tokenizer=tokenizer, size=max(tokenizer.get_vocab().values()) + 1, roles=roles, special_ids=tuple(special)
    )
