"""Presets: settings for a kind of training by name, for `--preset NAME`.

`PRESETS` is pure data. A preset's value counts for an option without a flag, variable or entry in a file.
`suits` names the modes and optimizers that may override a preset's own, and `check` refuses all others. The
table in docs/reference/commands.md is made from this data (`make docs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .configuration import Effective, UsageError
from .spec import parse_spec, unknown

T = TypeVar("T")
_ADAM = ("adam", "adamw")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Settings that belong together.

    Attributes:
        purpose: kind of training that it is for, as a noun phrase.
        suits: accepted names of modes and optimizers, by option name, for values that override the preset's.
    """

    purpose: str
    sets: Mapping[str, str | float]
    suits: Mapping[str, tuple[str, ...]]


_MUON: Mapping[str, str | float] = {
    "optimizer": "muon:beta2=0.99",
    "learning_rate": 0.024,
    "schedule": "cosine:warmup=10%",
}
PRESETS: Mapping[str, Preset] = {
    "low-communication": Preset(
        purpose="transformers over a slow link: 8 local steps of Muon, 1 bit per element",
        sets={
            "mode": "local:steps=8,correction=0,overlay=on,clip=1",
            **_MUON,
            "compressor": "1bit:block=4096,decay=0.97",
            "downlink": "auto",
        },
        suits={"mode": ("local",), "optimizer": ("muon", *_ADAM)},
    ),
    "lowest-communication": Preset(
        purpose="the same over a very slow link, for a higher loss: 16 local steps, the largest twelfth",
        sets={
            "mode": "local:steps=16,correction=0,overlay=on,clip=1",
            **_MUON,
            "compressor": "topk:ratio=12,values=1bit,decay=0.97",
            "downlink": "topk:ratio=12,values=1bit",
        },
        suits={"mode": ("local",), "optimizer": ("muon", *_ADAM)},
    ),
    "adam-4bit": Preset(
        purpose="transformers with AdamW at the server, at an eighth of the bytes",
        sets={
            "mode": "sync",
            "optimizer": "adamw",
            "learning_rate": 0.003,
            "compressor": "4bit",
            "downlink": "auto",
        },
        suits={"mode": ("sync", "stale", "async"), "optimizer": _ADAM},
    ),
    # DiLoCo (arXiv 2311.08105): rate and decay of the inner AdamW, rate and momentum of the outer Nesterov
    # step, float32. Rounds of 30 steps are those of MuLoCo (arXiv 2505.23725); DiLoCo's have 500.
    "diloco": Preset(
        purpose="the paper's local AdamW with an outer Nesterov step, in float32: 30 local steps",
        sets={
            "mode": "local:steps=30,correction=0,outer=sgd/momentum=0.9/nesterov=on,outer_rate=0.7",
            "optimizer": "adamw:weight_decay=0.1",
            "learning_rate": 0.0004,
            "compressor": "none",
            "downlink": "none",
        },
        suits={"mode": ("local",), "optimizer": ("muon", *_ADAM)},
    ),
    "sparse-sgd": Preset(
        purpose="models that train with SGD and momentum, such as CNNs: a hundredth of the elements",
        sets={
            "mode": "sync",
            "optimizer": "sgd",
            "learning_rate": 0.1,
            "compressor": "dgc:ratio=100",
            "downlink": "auto",
        },
        suits={"mode": ("sync",), "optimizer": ("sgd",)},
    ),
}

# Options of a job that scripts replace by an optimizer of their own.
_OF_SCRIPT = "because of --script"
_OF_SCRIPTS = "optimizer", "learning_rate", "schedule"


def parse_preset(text: str) -> None:
    """Raise ValueError unless `text` is a preset's name, or empty for none."""
    if text and text not in PRESETS:
        raise ValueError(unknown("preset", text, PRESETS))


def values_by_preset() -> dict[str, Mapping[str, Any]]:
    """Return the values that each preset sets by option name, by the preset's name."""
    return {name: each.sets for name, each in PRESETS.items()}


def adapted(effective: Effective[T]) -> Effective[T]:
    """Return the options of gc-server or gc-run as scripts need them.

    Scripts clip their gradients and set their rates themselves. So a preset's mode leaves out `clip`, and its
    schedule is not used.
    """
    settings: Any = effective.settings
    origin = f"preset {settings.preset}"
    if not settings.script:
        return effective
    if effective.origins["schedule"] == origin:
        effective = effective.changed(_OF_SCRIPT, schedule="constant")
    if effective.origins["mode"] != origin:
        return effective
    mode = parse_spec("mode", settings.mode)
    without = {key: value for key, value in mode.options.items() if key != "clip"}
    if without == mode.options:
        return effective
    return effective.changed(_OF_SCRIPT, mode=str(replace(mode, options=without)))


def check(effective: Effective[Any]) -> None:
    """Check that the options which override a preset suit it.

    Raises UsageError if a mode or optimizer does not, or if another optimizer has the preset's learning rate;
    the message names option, value and remedy.
    """
    name = effective.settings.preset
    if not name:
        return
    preset = PRESETS[name]
    for option in preset.suits:
        value = getattr(effective.settings, option)
        if why := why_unsuited(name, option, value.partition(":")[0]):
            raise UsageError(f"--{option} {value}: {why}; leave --{option} out, or choose another preset")
    own, given = (
        str(text).partition(":")[0] for text in (preset.sets["optimizer"], effective.settings.optimizer)
    )
    if own != given and effective.origins["learning_rate"] == f"preset {name}":
        raise UsageError(
            f"--optimizer {effective.settings.optimizer}: --preset {name} has a learning rate for {own}, "
            f"{preset.sets['learning_rate']:g}; give --learning-rate for {given} too"
        )


def why_unsuited(preset: str, option: str, name: str) -> str:
    """Return why a mode or an optimizer, the `option`, does not suit a preset, as a clause; empty if it does,
    or if there is no preset."""
    names = PRESETS[preset].suits.get(option, ()) if preset else ()
    return f"--preset {preset} expects {' or '.join(names)}" if names and name not in names else ""


def describe(effective: Effective[Any]) -> str:
    """Return a line with the values that the preset sets, and those that override it, with their origins."""
    settings = effective.settings
    preset = PRESETS[settings.preset]
    kept, replaced = list[str](), list[str]()
    for name, value in preset.sets.items():
        flag, now = f"--{name.replace('_', '-')}", getattr(settings, name)
        origin = effective.origins[name]
        if settings.script and name in _OF_SCRIPTS and origin in (f"preset {settings.preset}", _OF_SCRIPT):
            continue
        if now != value:
            replaced.append(f"{flag} {now} ({origin})")
        else:
            kept.append(f"{flag} {value}")
    text = f"preset {settings.preset} sets {' '.join(kept) or 'nothing'}"
    if replaced:
        text += f"; overridden: {' '.join(replaced)}"
    if settings.script:
        text += "; optimizer, learning rate and schedule are those of the scripts"
    return text


def listed() -> str:
    """Return a text with the values that each preset sets, for --help."""
    lines = ["", "presets, and the values that they set:"]
    for name, each in PRESETS.items():
        values = " ".join(f"--{option.replace('_', '-')} {value}" for option, value in each.sets.items())
        lines.append(f"  {name}: {values}")
    return "\n".join(lines)
