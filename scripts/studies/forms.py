"""The search space of scripts.search: forms of attn=rwv, as overrides of train.py."""

from optuna.trial import FixedTrial, Trial

# Factors of W in attn/rwv.py: functions of K, and scores, which are functions of Q and K.
KEYS = ("exp_k", "sigmoid_k")
SCORES = ("exp_qk", "phi_qk", "qk")
SIGNED = ("qk",)  # scores that may be negative, so that a norm takes the place of the denominator
ROTATED = ("exp_qk", "qk")  # scores that may have rotary embeddings
RECEPTANCES = ("one", "sigmoid", "silu", "gelu")
SHIFTS = ("half", "learned", "convolution")
POSITIONS = {  # overrides that choose W's second factor: w, or forget gates; `suggest` adds the override of attn.W
    "ones": ("attn.position_weight.initial_f=ones",),
    "decays": ("attn.position_weight.initial_f=decays",),
    "head_decay": ("attn/position_weight=head_decay",),
    "channel_decay": ("attn/position_weight=channel_decay",),
    "forget": ("attn.forget=true",),
}
OF_SCORES = tuple(position for position in POSITIONS if position != "channel_decay")  # scores have no value per channel


def suggest(trial: Trial | FixedTrial) -> tuple[str, ...]:
    """Return the overrides of the form that a trial describes. Every form that can be suggested is valid."""
    content = trial.suggest_categorical("content", [*KEYS, *SCORES])
    of_keys = content in KEYS
    name = "position_of_keys" if of_keys else "position_of_scores"
    position = trial.suggest_categorical(name, list(POSITIONS if of_keys else OF_SCORES))
    words = [f"attn.R={trial.suggest_categorical('R', list(RECEPTANCES))}"]
    words.append(f"attn.W={content}" if position == "forget" else f"attn.W=w_{content}")
    words += POSITIONS[position]
    words.append(f"attn.shift={trial.suggest_categorical('shift', list(SHIFTS))}")
    if content in SIGNED:
        words += ["attn.denominator=none", "attn.norm=true"]
    if content in ROTATED and trial.suggest_categorical("rotary", [False, True]):
        words.append("attn.rotary=0.5")
    if not of_keys and trial.suggest_categorical("talking_heads", [False, True]):
        words.append("attn.talking_heads=true")
    return "attn=rwv", *words
