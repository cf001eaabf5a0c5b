"""Known incompatibilities of Accelerate, Transformers and Lightning, whose own FP8 is easily not what runs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .situation import Found, Row, Situation, class_of, comes_from, first

_HANDLERS = {"TE": "TERecipeKwargs", "AO": "AORecipeKwargs", "MSAMP": "MSAMPRecipeKwargs"}


def _te(s: Situation) -> bool:
    """Whether accelerate was asked for TransformerEngine."""
    return s.accelerate_fp8[0] == "TE"


def _te_recipe(s: Situation) -> Iterator[Found]:
    if s.config and _te(s):
        yield Found("kwargs_handlers", "TERecipeKwargs, with DeepSpeed")


def _te_tied(s: Situation) -> Iterator[Found]:
    if not _te(s):
        return
    seen: dict[int, str] = {}
    for name, parameter in s.parameters():
        other = seen.setdefault(id(parameter), name)
        if other != name:
            yield Found(name, f"the same Parameter as {other}")


def _te_sizes(s: Situation) -> Iterator[Found]:
    if _te(s):
        yield from first(
            (name, f"Linear {m.in_features}→{m.out_features}")
            for name, m in s.modules()
            if isinstance(m, nn.Linear) and (m.in_features % 16 or m.out_features % 16)
        )


def _te_options(s: Situation) -> Iterator[Found]:
    backend, handler = s.accelerate_fp8
    if backend != "TE" or s.older("transformer_engine", (2,)):
        return
    if handler.interval not in (None, 1):
        yield Found("TERecipeKwargs.interval", str(handler.interval))
    if any(handler.override_linear_precision or ()):
        options = handler.override_linear_precision
        yield Found("TERecipeKwargs.override_linear_precision", str(options))


def _msamp_section(s: Situation) -> Iterator[Found]:
    if s.config and s.accelerate_fp8[0] == "MSAMP" and s.at("msamp") is None:
        yield Found("kwargs_handlers", "MSAMPRecipeKwargs, with DeepSpeed")


def _msamp_scaler(s: Situation) -> Iterator[Found]:
    scaler = getattr(s.accelerator, "scaler", None)
    if not s.config and s.accelerate_fp8[0] == "MSAMP" and scaler is not None:
        yield Found("accelerator.scaler", class_of(scaler))


def _discarded(s: Situation) -> Iterator[Found]:
    trainer = s.driver
    if comes_from(trainer, "transformers") and getattr(trainer, "is_deepspeed_enabled", False):
        given = trainer.optimizer  # once training has begun it is accelerate's
        if given is not None and not comes_from(given, "accelerate"):
            yield Found("Trainer.optimizers", class_of(given))


def _fsdp1(s: Situation) -> Iterator[Found]:
    plugin = getattr(getattr(s.accelerator, "state", None), "fsdp_plugin", None)
    version = getattr(plugin, "fsdp_version", 1)
    if comes_from(s.driver, "transformers") and plugin is not None and version == 1 and _te(s):
        yield Found("Trainer.args.fsdp", f"FSDP{version}, with TERecipeKwargs")


def _switched_off(s: Situation) -> Iterator[Found]:
    backend, _ = s.accelerate_fp8
    if s.config and backend and s.older("accelerate", (1, 11)):
        yield Found(
            "accelerate", f"{s.versions['accelerate']}, {_HANDLERS[backend]} with DeepSpeed"
        )


_NATIVE = 'Use mixed_precision="bf16" and fp8stack for FP8: fp8stack.initialize before accelerator.prepare.'

ROWS = (
    Row(8, "accelerate-te-recipe", "Accelerate", "warning",
        "TERecipeKwargs and DeepSpeed",
        "Accelerate does not pass the recipe on: delayed scaling with TransformerEngine's defaults runs instead.",
        _NATIVE,
        "accelerate 1.15 Accelerator._prepare_deepspeed", _te_recipe),
    Row(9, "accelerate-te-tied", "Accelerate", "error",
        "Accelerate's conversion to TransformerEngine, and tied weights",
        "The tie is broken, and the new weight (the head's) is not in the optimizer: it is never trained.",
        f"{_NATIVE} Ties stay ties there.",
        "accelerate 1.15 convert_model, Accelerator._prepare_te", _te_tied),
    Row(10, "accelerate-te-sizes", "Accelerate", "warning",
        "Accelerate's conversion to TransformerEngine, and a size that is no multiple of 16",
        "The conversion stops at this layer and leaves all that follow it in the module unconverted, silently.",
        f"{_NATIVE} Such layers are padded there.",
        "accelerate 1.15 convert_model", _te_sizes),
    Row(11, "accelerate-te-options", "Accelerate", "warning",
        "interval or override_linear_precision of TERecipeKwargs, and TransformerEngine 2",
        "TransformerEngine's recipe has no such option any more: TypeError.",
        "Leave the option out.",
        "transformer_engine/common/recipe: DelayedScaling", _te_options),
    Row(12, "accelerate-msamp-section", "Accelerate", "warning",
        "MSAMPRecipeKwargs and DeepSpeed",
        'Without DeepSpeedPlugin(enable_msamp=True) the config gets no "msamp" section: FP8 is off, while Accelerate '
        "names MS-AMP as its backend.",
        'Write "fp8stack": {"opt_level": "O2"} into the DeepSpeed config.',
        "accelerate 1.15 DeepSpeedPlugin", _msamp_section),
    Row(13, "accelerate-msamp-scaler", "Accelerate", "error",
        "MSAMPRecipeKwargs without DeepSpeed",
        "The loss is multiplied by a GradScaler's 65536 and gradients are never divided by it: clipping, Adam's eps "
        "and float16 moments are wrong.",
        _NATIVE,
        "accelerate 1.15 Accelerator.__init__, _prepare_msamp", _msamp_scaler),
    Row(14, "trainer-optimizers", "Transformers", "error",
        "Trainer(optimizers=...) and DeepSpeed",
        "The Trainer drops the optimizer that it was given and makes an AdamW, silently.",
        "Pass optimizer_cls_and_kwargs=(fp8stack.optim.AdamW, {...}) instead.",
        "transformers 5.23 integrations/deepspeed.py: deepspeed_init", _discarded),
    Row(15, "trainer-fsdp1-te", "Transformers", "error",
        "Trainer, FSDP1 and Accelerate's TransformerEngine backend",
        "The Trainer prepares the model alone, and Accelerate raises ValueError for want of the optimizer.",
        "Use FSDP2, or bf16 with fp8stack's FP8.",
        "transformers#34024", _fsdp1),
    Row(16, "accelerate-fp8-off", "Accelerate", "error",
        "Accelerate before 1.11, FP8 and DeepSpeed",
        "Layers stay nn.Linear: FP8 is off, and nothing says so.",
        f"Update to accelerate 1.11. {_NATIVE}",
        "accelerate#3360, #3361, #3611, #3688, #3714", _switched_off),
    Row(46, "lightning-te", "Lightning", "warning",
        "DeepSpeedStrategy or FSDPStrategy, and TransformerEnginePrecision",
        "Lightning raises ValueError: these strategies have precisions of their own.",
        'Use precision="bf16-true", with fp8stack.integrations.deepspeed.install() and its section of the config.',
        "Lightning#18679, #18820", undetected="Lightning raises when the Trainer is made"),
)  # fmt: skip
