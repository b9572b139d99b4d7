"""ModelConfig: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bitnet_cli
from bitnet import other_names, reference
from bitnet.config import ModelConfig
from bitnet.presets import PRESETS
from bitnet.reference import default_of
from bitnet.settings import Settings
from bitnet.setup.given import Given, options_of
from bitnet.setup.resolve import resolve
from bitnet.source_settings import of_source

SMALL = {
    "vocab_size": 10, "dim": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "ffn_dim": 16,
    "max_context": 32,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name: str) -> None:
    config = PRESETS[name]
    assert ModelConfig.from_dict(json.loads(config.to_json())) == config


def test_derived_fields() -> None:
    config = ModelConfig.from_dict(SMALL)
    assert (config.rope_dim, config.attention_scale) == (4, 0.5)
    assert config.ternary_weights == 8 * (8 + 4 + 4 + 8 + 3 * 16)
    wider = config.replace(head_dim=16)
    assert (wider.rope_dim, wider.attention_scale) == (16, 0.25)
    fixed = config.replace(rope_dim=2, attention_scale=0.3).replace(head_dim=16)
    assert (fixed.rope_dim, fixed.attention_scale) == (2, 0.3)
    assert config.replace(position="none").rope_dim == 0
    assert config.replace(ternary=["q", "down"]).ternary_weights == 8 * (8 + 16)


def test_what_a_layer_sees() -> None:
    config = ModelConfig.from_dict(
        SMALL | {"n_layers": 7, "sliding_window": 5, "global_every": 3, "rope_local_theta": 100.0,
                 "rope_scaling": "linear", "rope_factor": 8.0}
    )  # fmt: skip
    layers = [config.of_layer(i) for i in range(7)]
    assert [c.sliding_window for c in layers] == [5, 5, 0, 5, 5, 0, 5]
    assert [c.rope_theta for c in layers] == [100.0, 100.0, 1e4, 100.0, 100.0, 1e4, 100.0]
    assert [c.rope_scaling for c in layers[1:3]] == ["none", "linear"]
    same = config.replace(rope_local_theta=0.0).of_layer(0)
    assert (same.sliding_window, same.rope_theta, same.rope_scaling) == (5, 1e4, "linear")
    alike = config.replace(global_every=0)
    assert alike.of_layer(2) == alike


def test_bitnet_2b4t_has_its_published_size() -> None:
    assert PRESETS["bitnet-2b4t"].ternary_weights == 30 * (2 * 2560**2 + 2 * 2560 * 640 + 3 * 2560 * 6912)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dimm": 8}, "unknown model option 'dimm', did you mean 'dim'"),
        ({"dim": 0}, "dim is 0, expected an integer from 1 to 65536"),
        ({"dim": 8.0}, "dim is 8.0, expected an integer"),
        ({"dim": True}, "dim is True, expected an integer"),
        ({"vocab_size": "many"}, "vocab_size is 'many', expected an integer"),
        ({"head_dim": "wide"}, "head_dim is 'wide', expected an integer"),
        ({"n_experts": None}, "n_experts is None, expected an integer"),
        ({"input": "images", "image_size": "big"}, "image_size is 'big', expected an integer"),
        ({"input": "images", "max_context": -1, "class_token": "no"}, "class_token is 'no', expected true or false"),
        ({"n_heads": 3, "n_kv_heads": 2}, "n_heads is 3, expected a multiple of n_kv_heads = 2"),
        ({"n_kv_heads": 4}, "n_kv_heads is 4, expected an integer from 1 to 2"),
        ({"rope_dim": 3}, "rope_dim is 3 with position = 'rope', expected an even number"),
        ({"rope_dim": 8}, "rope_dim is 8"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, expected a finite number above 0"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"logit_softcap": -1.0}, "logit_softcap is -1.0"),
        ({"logit_softcap": "1"}, "logit_softcap is '1', expected 0 (none)"),
        ({"global_every": 6}, "global_every is 6 with sliding_window = 0, expected 0 (all layers alike), or at"),
        ({"global_every": 1, "sliding_window": 4}, "global_every is 1 with sliding_window = 4"),
        ({"rope_local_theta": -1.0}, "rope_local_theta is -1.0"),
        ({"rope_local_theta": 9.0, "rope_attention_factor": 1.2}, "rope_attention_factor is 1.2 with rope_local_theta"),
        ({"activation": "swish"}, "activation is 'swish', expected one of relu2, silu"),
        ({"sub_norm": "no"}, "sub_norm is 'no', expected true or false"),
        ({"tie_embeddings": 1}, "tie_embeddings is 1, expected true or false"),
        ({"rope_dim": 0}, "rope_dim is 0 with position = 'rope', expected an even number above 0"),
        ({"position": "none", "rope_dim": 4}, "rope_dim is 4 with position = 'none', expected 0"),
        ({"rope_attention_factor": 0.0}, "rope_attention_factor is 0.0, expected a finite number above 0"),
        ({"rope_scaling": "linear", "rope_factor": 0.0}, "rope_factor is 0.0"),
        ({"rope_scaling": "yarn", "rope_factor": 2.0}, "rope_original_context is 0, expected at least 1 with yarn"),
        ({"rope_scaling": "yarn", "rope_original_context": 9, "rope_theta": 1.0}, "expected more than 1 with yarn"),
        ({"rope_scaling": "llama3", "rope_original_context": 9, "rope_low_freq_factor": 4.0}, "expected less than"),
        ({"ternary": 5}, "ternary is 5, expected a list"),
        ({"name": 5}, "name is 5, expected a text"),
        (
            {"experts_per_token": 2},
            "n_experts is 0 and experts_per_token 2, expected both 0 or both above 0; set n_exp",
        ),
        ({"n_experts": 4}, "n_experts is 4 and experts_per_token 0, expected both 0 or both above 0; set experts_per"),
        ({"ternary": ["query"]}, "ternary names 'query'"),
        ({"ternary": ["q", "o", "q"]}, "ternary is q, o, q, expected each at most once"),
        ({"name": "x" * 64}, "longer than 63 bytes"),
    ],
)
def test_refusals_name_what_was_found_and_expected(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig.from_dict(SMALL | changes)


def test_pixels_of_other_channels_are_normalized_alike() -> None:
    vision = PRESETS["siglip-tiny"].replace(vision={"channels": 1}).vision
    assert vision and (vision.pixel_mean, vision.pixel_std) == ((0.5,), (0.5,))
    with pytest.raises(ValueError, match=r"pixel_mean is .*, expected 1 finite number, one for each channel"):
        PRESETS["clip-base"].replace(vision={"channels": 1})


def test_the_comment_of_a_field_may_be_on_any_of_its_lines() -> None:
    body = "    # sizes\n    a: int = 1  # one\n\n    # more\n    b: tuple[str, ...] = (\n        'x',  # two\n    )\n"
    assert reference.comments_of(body) == [("", "sizes"), ("a", "one"), ("", "more"), ("b", "two")]
    with pytest.raises(ValueError, match="the field c of ModelConfig has no comment on its lines; write one behind it"):
        reference.comments_of("    # above it\n    c: int = 1\n")


@pytest.mark.parametrize(("source", "most", "told"), [("", 0.9, "a share 0.9 at most"), ("x", 0.5, "finetune 0.5")])
def test_the_largest_share_of_quantize_warmup_is_told(source: str, most: float, told: str) -> None:
    (field,) = [field for field in dataclasses.fields(Settings) if field.name == "quantize_warmup"]
    assert told in field.metadata["help"]
    Settings(source=source, quantize_warmup=most)
    with pytest.raises(ValueError, match=rf"--quantize-warmup is .*, expected 0 to {most}"):
        Settings(source=source, quantize_warmup=most + 0.01)


def test_each_name_from_elsewhere_stands_for_one_option() -> None:
    ours = {field.name for options in (Settings, ModelConfig) for field in dataclasses.fields(options)}
    there = [name for names in other_names.ELSEWHERE.values() for name in names.split()]
    assert set(other_names.ELSEWHERE) <= ours and not ours.intersection(there)
    assert len(there) == len(set(there)) and set(other_names.UNITS) <= set(other_names.ELSEWHERE)


def test_the_page_of_options_is_that_of_the_code(tmp_path: Path) -> None:
    written = (Path(__file__).parents[1] / "docs/options.md").read_text(encoding="utf-8")
    assert written == reference.page(), "run python -m bitnet.reference > docs/options.md"
    for options in (Settings, ModelConfig):
        for field in dataclasses.fields(options):
            name = field.name if options is ModelConfig else f"--{field.name.replace('_', '-')}"
            assert f"| `{'SRC' if name == '--source' else name}` |" in written
    assert "|  |\n" not in written.partition("## Model")[2]  # each option of the model has its sentence
    (tmp_path / "my.toml").write_text(written.split("```")[1].removeprefix("toml\n"))
    given = Given(config=str(tmp_path / "my.toml"), options={"lr": 0.006})
    settings, model = resolve(given)
    assert (settings.lr, settings.steps, settings.batch, model.dim, model.head_dim) == (0.006, 3000, 8, 256, 64)


@pytest.mark.parametrize("verb", ["train", "finetune"])
def test_help_begins_with_what_most_runs_give(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bitnet_cli.main([verb, "--help"]) == 0
    usage, *rest = capsys.readouterr().out.splitlines()
    assert usage.startswith(f"usage: bitnet {verb} ") and rest[0] == ""  # not the names of all options
    first, others = (rest.index(title) for title in ("options of most runs:", "more options:"))
    places = {name: at for at, line in enumerate(rest) if (name := line.strip().partition(" ")[0]).startswith("--")}
    assert all(first < places[name] < others for name in ("--data", "--out", "--steps", "--minutes", "--lr"))
    assert all(others < places[name] for name in ("--column", "--spike", "--recompute,"))


def test_help_says_the_defaults_of_verb_and_preset(capsys: pytest.CaptureFixture[str]) -> None:
    helps = {}
    for verb in ("train", "finetune"):
        assert bitnet_cli.main([verb, "--help"]) == 0
        helps[verb] = " ".join(capsys.readouterr().out.split())
    rates = "tiny, gguf, mini-gpt, mini-gpt-learned: 0.008; thinker, thinker-moe, transformer-2017, "
    rates += "transformer-2017-encoder: 0.004; bitnet-2b4t: 0.0012; siglip-tiny, paligemma-tiny: 0.003; "
    rates += "1m to 1b: by size"
    assert default_of("lr") == rates
    for said in (f"peak learning rate [{rates}]", f"[{default_of('steps')}]", f"[{default_of('tokenizer')}]"):
        assert said.replace(" ", "") in helps["train"].replace(" ", "")  # lines end behind the dash of a name, too
    said = "peak learning rate [0.0001; with --lora 0.001, with --preference 1e-05, with both 0.0001]"
    assert said in helps["finetune"] and "and --resume [1000]" in helps["finetune"]
    for config in (PRESETS["tiny"], PRESETS["tiny"].replace(ternary=()), PRESETS["bitnet-2b4t"]):
        settings = Settings.from_dict(of_source(config)[0] | {"source": "x"})
        for f in dataclasses.fields(Settings):
            said, found = default_of(f.name, finetune=True), getattr(settings, f.name)
            if f.name == "quantize_warmup":
                assert said == "0.5, from a ternary source 0" and found == (0.0 if config.ternary else 0.5)
            elif f.name == "lr":
                assert said.startswith(f"{found:g}; with --lora ")
            elif f.name == "context":
                assert said == "the source's, at most 1024" and found == (0 if config.max_context <= 1024 else 1024)
            elif f.name != "source" and not isinstance(found, list | bool):
                assert said == (f"{found:g}" if isinstance(found, float) else str(found))


def test_a_stage_that_keeps_the_model_keeps_it_from_dropping_out() -> None:
    config = PRESETS["paligemma-tiny"].replace(vision={"dropout": 0.1})
    assert config.drops and of_source(config)[1].drops and of_source(config, lora=True)[1].drops
    assert not of_source(config, preference=True)[1].drops and not of_source(config.replace(dropout=0.1), True)[1].drops


def test_missing_option() -> None:
    with pytest.raises(ValueError, match="model option 'dim' is missing"):
        ModelConfig.from_dict({name: value for name, value in SMALL.items() if name != "dim"})


def test_command_line_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, bitnet_cli, bitnet.config, bitnet.settings; print(*({'torch', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_a_file_of_options_may_be_a_pipe() -> None:
    """As of a shell's <(...), which can be read once."""
    read, write = os.pipe()
    os.write(write, b"[train]\nlr = 0.004\n[model]\ndim = 64\n")
    os.close(write)
    given = Given(options={}, config=f"/dev/fd/{read}")
    assert options_of(given) == ({"lr": 0.004}, {"dim": 64}) == options_of(given)
    os.close(read)


def test_an_error_of_the_model_names_the_file_that_describes_it(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('[model]\ndim = "wide"\n')
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: dim is 'wide', expected an integer"):
        resolve(Given(options={}, config=str(file)))
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))} and --set: dim is -1, expected an integer from 1"):
        resolve(Given(options={}, config=str(file), model=["dim=-1"]))
    with pytest.raises(ValueError, match=r"^dim is -1, expected an integer from 1"):
        resolve(Given(options={}, model=["dim=-1"]))
